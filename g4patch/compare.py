"""The reference check: stored activations against what a bundle computes, with the unpatched bundle as control."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch import formats
from g4patch.layers import MediaRows, by_layer
from g4patch.metrics import Distance, distance
from g4patch.ple import GraphAnalysis, Lookup
from g4patch.reference import Reference, Run, Tolerance
from g4patch.report import Check, Status, Subject
from g4patch.runtimes import Refused, Unavailable

Array = NDArray[Any]

# What a person should look at first where a comparison fails, per expected name.
_IDENTITY, _COMBINED = "per_layer_identity", "per_layer_inputs"


# What a model computes for a run, by graph and by the name that references use.
_Compute = Callable[[Subject, Run], dict[tuple[str, str], Array]]


@dataclass
class _Outcome:
    """What comparing one model with a reference gave."""

    problems: list[str] = field(default_factory=list)
    compared: int = 0
    graphs: set[str] = field(default_factory=set)
    media: dict[str, MediaRows] = field(default_factory=dict)
    worst: tuple[float, float, str] = (0.0, 0.0, "")  # max |d|, its limit, where; the one nearest to its limit


def reference(before: Subject | None, after: Subject, against: Reference) -> Check:
    """Compare every run and every expected tensor. `before` is the unpatched model, if there is one.

    The unpatched model must fail the same comparison, else the reference cannot tell right from wrong; text-only runs
    must come out bit for bit as they did.
    """
    problems = list(_does_not_fit(after, against))
    outcome, unpatched = _Outcome(), _Outcome()
    control = ""
    if not problems:
        try:
            outcome = _compare(after, against)
            problems += outcome.problems
            if not problems and not outcome.compared:
                problems.append("nothing was compared: the reference expects no tensor")
            if not problems:
                control, faults, unpatched = _control(before, after, against)
                problems += faults
        except Unavailable as unavailable:
            return Check("reference", Status.SKIPPED, unavailable.reason)
    layers = by_layer(outcome.media, unpatched.media)
    if problems:
        return Check("reference", Status.FAILED, problems[0], tuple(problems), layers)
    worst, limit, where = outcome.worst
    summary = f"{outcome.compared} tensors, max |d| {worst:.1e} (limit {limit:.0e}, {where}); {control}"
    unseen = [a.graph.name for a in after.analyses if a.lookups and a.graph.name not in outcome.graphs]
    if unseen:
        summary += f"; no prompt in it fits {', '.join(unseen)}"
    return Check("reference", Status.PASSED, summary, (summary, str(against.path)), layers)


def on_device(subject: Subject, against: Reference, unit: str) -> Check:
    """Compare the outputs that a device gives on some compute unit with every run that expects them.

    The unpatched model is not run there: that it fails is for the check of the reference to show.
    """
    outcome, problems, runtimes = _Outcome(), list(_does_not_fit(subject, against)), set[str]()

    def values(_: Subject, run: Run) -> dict[tuple[str, str], Array]:
        found: dict[tuple[str, str], Array] = {}
        for graph in [analysis.graph.name for analysis in subject.analyses if _fits(analysis, run)]:
            device = devices[graph]
            if run.expected.keys() & set(device.outputs):
                runtimes.add(device.runtime)
                outputs = device.run(run.inputs)
                found |= {(graph, name): outputs[name] for name in run.expected if name in outputs}
        return found

    try:
        devices = {a.graph.name: formats.device(subject.model, a.graph.name, unit) for a in subject.analyses}
        if not problems:
            outcome = _compare(subject, _seen(against, {name for d in devices.values() for name in d.outputs}), values)
            problems += outcome.problems
    except Unavailable as unavailable:
        return Check("device", Status.SKIPPED, unavailable.reason)
    except Refused as refused:
        problems.append(str(refused))
    if problems:
        return Check("device", Status.FAILED, problems[0], tuple(problems))
    if not outcome.compared:
        return Check("device", Status.SKIPPED, "the reference expects no output of the bundle")
    worst, limit, where = outcome.worst
    summary = (
        f"{outcome.compared} outputs on {', '.join(sorted(runtimes))}: max |d| {worst:.1e} (limit {limit:.0e}, {where})"
    )
    return Check("device", Status.PASSED, summary)


def _seen(against: Reference, names: Collection[str]) -> Reference:
    """A reference without what it expects of other values."""
    runs = [
        replace(run, expected={name: run.expected[name] for name in run.expected if name in names})
        for run in against.runs
    ]
    return replace(against, runs=tuple(run for run in runs if run.expected))


def _does_not_fit(subject: Subject, against: Reference) -> Iterator[str]:
    """Why a reference says nothing about this bundle."""
    ours = {**subject.tokens.media, "pad": subject.tokens.pad_id}
    for name, token in against.token_ids.items():
        if ours.get(name) != token:
            yield f"the reference is for {name} id {token}, the bundle has {ours.get(name)}"
    if against.model != "right":
        yield "the reference is of a broken model"


def _compare(subject: Subject, against: Reference, compute: _Compute | None = None) -> _Outcome:
    outcome = _Outcome()
    for run in against.runs:
        values = (compute or _values)(subject, run)
        outcome.graphs |= {graph for graph, _ in values}
        for name in sorted(run.expected.keys() - {name for _, name in values}):
            outcome.problems.append(f"{name}, {run.name}: the bundle has no such value")
        for (graph, name), value in values.items():
            where = f"{name}, {run.name}" if len(subject.analyses) == 1 else f"{graph}: {name}, {run.name}"
            expected, bound = run.expected[name], against.tolerances[name]
            try:
                found = distance(value, expected)
            except ValueError as error:
                outcome.problems.append(f"{where}: {error}")
                continue
            outcome.compared += 1
            if name == _IDENTITY:
                is_media = np.isin(_ids(run), list(subject.tokens.media.values()))
                outcome.media.setdefault(graph, MediaRows()).add(value, expected, is_media)
            outcome.problems += [f"{where}: {problem}" for problem in _beyond(found, bound)]
            if found.max_abs * max(outcome.worst[1], 1e-300) >= outcome.worst[0] * bound.max_abs:
                outcome.worst = (found.max_abs, bound.max_abs, where)
    return outcome


def _beyond(found: Distance, bound: Tolerance) -> Iterator[str]:
    if found.max_abs > bound.max_abs:
        yield f"max |d| {found.max_abs:.1e} is over {bound.max_abs:.0e}, cosine {found.cosine:.4f}"
    if abs(found.norm_ratio - 1) > bound.norm_ratio:
        yield f"the norm is {found.norm_ratio:.4f} times what is expected"


def _values(subject: Subject, run: Run) -> dict[tuple[str, str], Array]:
    """What a model computes for a run, by graph and the name that references use.

    Of several graphs, such as one for prompts and one to decode, only those are run whose inputs the run fits.
    """
    values: dict[tuple[str, str], Array] = {}
    fitting = [analysis for analysis in subject.analyses if _fits(analysis, run)]
    for analysis in fitting or subject.analyses:
        wanted = _wanted(analysis, run)
        if wanted:
            graph = analysis.graph.name
            probe = formats.of(subject.model).probe(subject.model, graph)
            outputs = list(dict.fromkeys(output for output, _ in wanted.values()))
            found = probe.run(run.inputs, outputs)
            values |= {(graph, name): shaped(found[output]) for name, (output, shaped) in wanted.items()}
    return values


def _fits(analysis: GraphAnalysis, run: Run) -> bool:
    """Whether a run has token ids for a graph, and its shapes are ones that the graph takes, as far as declared."""
    if any(lookup.ids_input not in run.inputs for lookup in analysis.lookups):
        return False
    for value in analysis.graph.inputs:
        if value.name in run.inputs and value.shape is not None:
            given = run.inputs[value.name].shape
            if len(given) != len(value.shape) or any(
                size not in (None, dim) for size, dim in zip(value.shape, given, strict=True)
            ):
                return False
    return True


Shaper = Callable[[Array], Array]


def _wanted(analysis: GraphAnalysis, run: Run) -> dict[str, tuple[str, Shaper]]:
    """For each expected name that a graph can compute, the value to tap and what makes it comparable."""
    wanted: dict[str, tuple[str, Shaper]] = {}
    for name, expected in run.expected.items():
        lookup = analysis.lookups[0] if len(analysis.lookups) == 1 else None
        if name == _IDENTITY and lookup is not None:
            wanted[name] = (lookup.output, _scaled(lookup, expected.shape))
        elif name == _COMBINED and lookup is not None and lookup.combined:
            wanted[name] = (lookup.combined, lambda array: array)
        elif name in analysis.graph.outputs or name in analysis.graph.states:
            wanted[name] = (name, lambda array: array)
    return wanted


def _scaled(lookup: Lookup, shape: Sequence[int]) -> Shaper:
    """Rows times the scale that the graph applies to them, in the reference's shape `[1, S, L, D]`."""
    if lookup.scale is None:
        raise Unavailable("the scale of the looked-up rows is not clear")
    scale = np.float32(lookup.scale)

    def shaped(rows: Array) -> Array:
        scaled: Array = rows.astype(np.float32) * scale
        return scaled.reshape(shape) if scaled.size == np.prod(shape) else scaled

    return shaped


def _control(before: Subject | None, after: Subject, against: Reference) -> tuple[str, list[str], _Outcome]:
    """The unpatched model on the same reference: what to say of it, what speaks against the reference, and the rest."""
    if before is None:
        return "no unpatched bundle to compare with", [], _Outcome()
    media = set(before.tokens.media.values())
    with_media = [run for run in against.runs if media & set(_ids(run))]
    faults = []
    for run in against.runs:
        if run not in with_media:
            old, new = _values(before, run), _values(after, run)
            if any(key not in old or old[key].tobytes() != new[key].tobytes() for key in new):
                faults.append(f"{run.name}: a prompt without media no longer gives the same bits")
    if not with_media:
        return "no media row in it: the unpatched bundle is no control", faults, _Outcome()
    unpatched = _compare(before, against)
    if not unpatched.problems:
        faults.append("the unpatched bundle passes as well: this reference cannot tell right from wrong")
    return f"unpatched fails: {unpatched.worst[0]:.2g}", faults, unpatched


def _ids(run: Run) -> list[int]:
    ids = run.inputs.get("input_ids")
    return [] if ids is None else [int(token) for token in ids.reshape(-1)]
