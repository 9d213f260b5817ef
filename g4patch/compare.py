"""The reference check: stored activations against what a bundle computes, with the unpatched bundle as control."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from g4patch import formats
from g4patch.divergence import beyond
from g4patch.feeding import only_of, shaped
from g4patch.layers import MediaRows, by_layer
from g4patch.metrics import distance
from g4patch.ple import GraphAnalysis
from g4patch.reference import Reference, Run
from g4patch.report import Check, Status, Subject
from g4patch.runtimes import Device, Refused, Unavailable
from g4patch.stages import IDENTITY, stage_of
from g4patch.values import Values, fed, values
from g4patch.view import Node


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
    problems = list(does_not_fit(after, against))
    outcome, unpatched = _Outcome(), _Outcome()
    control = ""
    if not problems:
        try:
            outcome = _compare(after, against)
            problems += outcome.problems
            if against.layers is not None and not problems and not outcome.compared:
                return Check("reference", Status.SKIPPED, _incomparable(after, against))
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


def _incomparable(subject: Subject, against: Reference) -> str:
    """Why a reference of a whole model has nothing to compare a model with."""
    if any(fed(analysis, subject, run, against) is not None for analysis in subject.analyses for run in against.runs):
        return "it holds nothing that this model computes"
    lengths = only_of(stage_of(analysis, subject.tokens) for analysis in subject.analyses)
    return f"this model takes no prompt of the lengths that are in it{lengths}"


def on_device(subject: Subject, against: Reference, unit: str) -> Check:
    """Compare the outputs that a device gives on some compute unit with every run that expects them.

    The unpatched model is not run there: that it fails is for the check of the reference to show.
    """
    outcome, problems, runtimes = _Outcome(), list(does_not_fit(subject, against)), set[str]()

    def on_unit(run: Run) -> Values:
        found: Values = {}
        for analysis, (device, names) in zip(subject.analyses, devices, strict=True):
            inputs = fed(analysis, subject, run, against)
            wanted = {output: name for output, name in names.items() if name in run.expected}
            if inputs is not None and wanted:
                runtimes.add(device.runtime)
                arrays = device.run(inputs)
                for output, name in wanted.items():
                    expected = run.expected[name]
                    found[analysis.graph.name, name] = (shaped(analysis, name, arrays[output], expected), expected, ())
        return found

    try:
        devices = [_device(analysis, subject, against, unit) for analysis in subject.analyses]
        if not problems:
            seen = {name for _, names in devices for name in names.values()}
            outcome = _compare(subject, _seen(against, seen), on_unit)
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


def _device(
    analysis: GraphAnalysis, subject: Subject, against: Reference, unit: str
) -> tuple[Device, Mapping[str, str]]:
    """A device for a graph, and of its outputs those that references name, with that name."""
    device = formats.device(subject.model, analysis.graph.name, unit)
    names = {name: name for name in device.outputs}
    if against.layers is not None:
        outputs = stage_of(analysis, subject.tokens).outputs
        names = {output: outputs[output] for output in device.outputs if output in outputs}
    return device, names


def _seen(against: Reference, names: Collection[str]) -> Reference:
    """A reference without what it expects of other values."""
    runs = [
        replace(run, expected={name: run.expected[name] for name in run.expected if name in names})
        for run in against.runs
    ]
    return replace(against, runs=tuple(run for run in runs if run.expected))


def does_not_fit(subject: Subject, against: Reference) -> Iterator[str]:
    """Why a reference says nothing about this bundle."""
    ours = {**subject.tokens.media, "pad": subject.tokens.pad_id}
    for name, token in against.token_ids.items():
        if ours.get(name) != token:
            yield f"the reference is for {name} id {token}, the bundle has {ours.get(name)}"
    if against.model != "right":
        yield "the reference is of a broken model"


def _compare(subject: Subject, against: Reference, compute: Callable[[Run], Values] | None = None) -> _Outcome:
    outcome = _Outcome()
    for run in against.runs:
        pairs = compute(run) if compute is not None else values(subject, run, against)
        outcome.graphs |= {graph for graph, _ in pairs}
        if against.layers is None:
            for name in sorted(run.expected.keys() - {name for _, name in pairs}):
                outcome.problems.append(f"{name}, {run.name}: the bundle has no such value")
        for (graph, name), (value, expected, layers) in pairs.items():
            where = f"{name}, {run.name}" if len(subject.analyses) == 1 else f"{graph}: {name}, {run.name}"
            bound = against.tolerances[name]
            try:
                found = distance(value, expected)
            except ValueError as error:
                outcome.problems.append(f"{where}: {error}")
                continue
            outcome.compared += 1
            if name == IDENTITY:
                is_media = np.isin(_ids(run), list(subject.tokens.media.values()))
                outcome.media.setdefault(graph, MediaRows(layers)).add(value, expected, is_media)
            outcome.problems += [f"{where}: {problem}" for problem in beyond(found, bound)]
            if found.max_abs * max(outcome.worst[1], 1e-300) >= outcome.worst[0] * bound.max_abs:
                outcome.worst = (found.max_abs, bound.max_abs, where)
    return outcome


def _control(before: Subject | None, after: Subject, against: Reference) -> tuple[str, list[str], _Outcome]:
    """The unpatched model on the same reference: what to say of it, what speaks against the reference, and the rest."""
    if before is None:
        return "no unpatched bundle to compare with", [], _Outcome()
    ids = changed(before, after)
    telling = [run for run in against.runs if ids & set(_ids(run))]
    faults = []
    for run in against.runs:
        if run not in telling:
            old, new = values(before, run, against), values(after, run, against)
            if any(key not in old or old[key][0].tobytes() != new[key][0].tobytes() for key in new):
                faults.append(f"{run.name}: a prompt without media no longer gives the same bits")
    if not telling:
        return "no media row in it that the patch changes: the unpatched bundle is no control", faults, _Outcome()
    unpatched = _compare(before, against)
    if not unpatched.problems:
        faults.append("the unpatched bundle passes as well: this reference cannot tell right from wrong")
    return f"unpatched fails: {unpatched.worst[0]:.2g}", faults, unpatched


def changed(before: Subject, after: Subject) -> set[int]:
    """The media ids for which a patched model does otherwise: in a lookup, or in a splice."""
    told = [
        {(graph.graph.name, part.address): ids for graph in subject.analyses for part, ids in _treated(graph)}
        for subject in (before, after)
    ]
    differing = (told[0].get(key, set()) ^ told[1].get(key, set()) for key in told[0].keys() | told[1].keys())
    return set(before.tokens.media.values()).intersection(set[int]().union(*differing))


def _treated(analysis: GraphAnalysis) -> Iterator[tuple[Node, set[int]]]:
    """The ids that each lookup misses, and those whose rows each splice takes."""
    yield from ((lookup.gather, set(lookup.judgement.missing)) for lookup in analysis.lookups)
    yield from ((splice.node, set(splice.ids)) for splice in analysis.splices)


def _ids(run: Run) -> list[int]:
    ids = run.inputs.get("input_ids")
    return [] if ids is None else [int(token) for token in ids.reshape(-1)]
