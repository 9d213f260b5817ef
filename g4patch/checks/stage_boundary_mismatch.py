"""stage-boundary-mismatch: what one model puts out must be what the next one takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from g4patch.configs import Config
from g4patch.report import Finding, Subject
from g4patch.view import Graph, Value
from g4patch.wiring import Handover, between_stages, model_of

if TYPE_CHECKING:
    from g4patch.rules import Rule

_ROLES = ("vision", "speech", "embedding", "decoder")
# What onnxruntime-genai copies: outputs of one model to inputs of another, named under the same key.
_COPIED = (("vision", "embedding"), ("speech", "embedding"), ("embedding", "decoder"))
# Inputs that onnxruntime-genai makes itself, and only where the decoder takes them.
_MADE_IF_TAKEN = frozenset({"attention_mask", "position_ids"})
# What the decoder needs under this key and is not wired is per-layer-inputs-unwired's to say, and to mend.
_PER_LAYER_INPUTS = "per_layer_inputs"


def check(rule: Rule, subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Finding]]:
    """One finding for each name that a model does not have, one for each value that two models see differently."""
    configured = [(subject, subject.model.config) for subject in subjects if subject.model.config is not None]
    for subject, config in configured:
        for message in _wired(subject, config, subjects):
            yield subject, Finding(rule.id, rule.severity, message, "")
    for subject, graph, handover in () if configured else between_stages(subjects):
        if handover.differences:
            yield subject, Finding(rule.id, rule.severity, handover.mismatch, graph)


def _wired(subject: Subject, config: Config, subjects: Sequence[Subject]) -> Iterator[str]:
    """What is wrong with what onnxruntime-genai's configuration wires."""
    models = {role: model_of(subject, subjects, role) for role in _ROLES}
    graphs = {role: model.model.graphs[0] for role, model in models.items() if model and len(model.model.graphs) == 1}
    decoder = models["decoder"]
    takes_ple = decoder is not None and any(analysis.host_inputs for analysis in decoder.analyses)
    for role, graph in graphs.items():
        yield from _unknown_names(role, config, graph, takes_ple)
    for giver, taker in _COPIED:
        if giver in graphs and taker in graphs:
            outputs, inputs = _names(config, giver, "outputs"), _names(config, taker, "inputs")
            for key in (key for key in outputs if key in inputs):
                given, taken = _output(graphs[giver], outputs[key]), graphs[taker].input(inputs[key])
                if given is not None and taken is not None:
                    handover = Handover(f"the {giver} model", given, f"the {taker} model", taken)
                    if handover.differences:
                        yield handover.mismatch


def _unknown_names(role: str, config: Config, graph: Graph, takes_ple: bool) -> Iterator[str]:
    for kind, known in (("inputs", [value.name for value in graph.inputs]), ("outputs", list(graph.outputs))):
        for key, name in _names(config, role, kind).items():
            made = kind == "inputs" and key in _MADE_IF_TAKEN
            said_elsewhere = key == _PER_LAYER_INPUTS and takes_ple
            if not made and not said_elsewhere and not any(_is_called(other, name) for other in known):
                yield f"model.{role}.{kind}.{key} is {name}, and the {role} model has no {kind[:-1]} of that name"


def _names(config: Config, role: str, kind: str) -> Mapping[str, str]:
    section = config.section("model", role, kind)
    return {key: name for key, name in section.items() if isinstance(name, str) and name}


def _is_called(name: str, pattern: str) -> bool:
    """Whether a name is what the configuration calls it; `%d` stands for the number of a layer."""
    before, number, after = pattern.partition("%d")
    inner = name.removeprefix(before).removesuffix(after)
    return name == (before + inner + after if number and inner.isdecimal() else pattern)


def _output(graph: Graph, name: str) -> Value | None:
    return graph.value(name) if name in graph.outputs else None
