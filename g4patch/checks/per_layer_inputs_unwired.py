"""per-layer-inputs-unwired: what a decoder requires for PLE must be fed by what the configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from g4patch.configs import Config
from g4patch.edits import ConfigSet
from g4patch.report import Finding, Subject
from g4patch.wiring import model_of

if TYPE_CHECKING:
    from g4patch.rules import Rule

# The key of onnxruntime-genai's configuration, among the embedding model's outputs and the decoder's inputs.
_KEY = "per_layer_inputs"
_FED, _TAKEN = ("model", "embedding", "outputs"), ("model", "decoder", "inputs")


def check(rule: Rule, subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Finding]]:
    """One finding for each configuration whose decoder takes per-layer inputs that it does not wire."""
    for subject in subjects:
        config = subject.model.config
        decoder = model_of(subject, subjects, "decoder")
        if config is None or decoder is None:
            continue
        for name in (name for analysis in decoder.analyses for name in analysis.host_inputs):
            missing = [
                path for path in (_FED, _TAKEN) if path[:2] in _present(config) and not _names(config, path, name)
            ]
            if missing:
                yield subject, _finding(rule, subject, model_of(subject, subjects, "embedding"), name, missing)


def _present(config: Config) -> list[tuple[str, ...]]:
    """The models that a configuration has a section for."""
    return [path[:2] for path in (_FED, _TAKEN) if config.section(*path[:2])]


def _names(config: Config, path: Sequence[str], name: str) -> bool:
    return name in config.section(*path).values()


def _finding(
    rule: Rule, subject: Subject, embedding: Subject | None, name: str, missing: Sequence[tuple[str, ...]]
) -> Finding:
    entries = tuple(ConfigSet(rule.id, (*path, _KEY), name) for path in missing)
    places = " and ".join(".".join(entry.path) for entry in entries)
    message = f"the decoder takes {name}, and there is no entry {places}"
    outputs = [output for analysis in embedding.analyses for output in analysis.graph.outputs] if embedding else []
    withheld = ""
    if name not in outputs:
        withheld = f"no output of the embedding model is called {name}: export again with one that computes it"
    elif subject.model.config is None or subject.model.config.layout is None:
        withheld = f'add "{_KEY}": "{name}" by hand: the file is not laid out as JSON writers do it'
    return Finding(rule.id, rule.severity, message, "", edits=() if withheld else entries, withheld=withheld)
