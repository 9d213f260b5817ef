"""The gates: what comes out of the model, judged by thresholds, or by what the unpatched bundle gave.

Rows are judged by where they stand: before the first media row, in the media, after them (text that has media before
it), or text, in a run without media. Divergences are KL(reference || bundle) in nats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.evidence import Agreement, LogitEvidence, Segment, TeacherForced
from g4patch.metrics import kl_divergence
from g4patch.reference import Reference, Run
from g4patch.report import Check, Status
from g4patch.stages import LOGITS
from g4patch.thresholds import Thresholds

Array = NDArray[Any]
# Logits `[1, S, V]` by run.
Logits = Mapping[str, Array]

_NO_LIMITS = Thresholds("the unpatched bundle, for there are no thresholds")


def check(
    found: Logits,
    unpatched: Logits | None,
    against: Reference,
    media: Sequence[int],
    changed: Collection[int],
    limits: Thresholds | None,
) -> Check:
    """Judge logits by `limits`, or without any by whether they are nearer to the reference than the unpatched ones.

    Only prompts with ids of `changed`, which the patch treats otherwise, can tell patched from unpatched.
    A limit that no run of the reference can be measured by keeps the check from passing.
    """
    limits = limits if limits is not None and limits.set else _NO_LIMITS
    runs = [run for run in _own_runs(against) if LOGITS in run.expected]
    if not runs:
        return Check("gates", Status.SKIPPED, "the reference has no logits")
    runs = [run for run in runs if run.name in found]
    if not runs:
        return Check("gates", Status.SKIPPED, "no prompt of the reference gives logits here")
    try:
        evidence = _measured(runs, found, unpatched, against, media, limits.source)
    except ValueError as error:
        return Check("gates", Status.FAILED, f"the logits cannot be compared: {error}")
    telling = {run.name for run in runs if np.isin(run.inputs.get("input_ids", ()), list(changed)).any()}
    faults, unmeasured, proved = _by_limits(evidence, limits) if limits.set else _by_control(evidence, telling)
    if faults:
        return Check("gates", Status.FAILED, faults[0], tuple(faults), logits=evidence)
    if unmeasured:
        return Check("gates", Status.SKIPPED, unmeasured[0], tuple(unmeasured), logits=evidence)
    return Check("gates", Status.PASSED, f"{'; '.join(proved)}; by {limits.source}", logits=evidence)


def _own_runs(against: Reference) -> list[Run]:
    """All runs but those that only show what another is without its media."""
    twins = {run.without_media for run in against.runs}
    return [run for run in against.runs if run.name not in twins]


def are_told(against: Reference, media: Sequence[int]) -> bool:
    """Whether a reference has anything to say of logits: thresholds, or logits of a prompt with media."""
    runs = [run for run in against.runs if LOGITS in run.expected and "input_ids" in run.inputs]
    return against.gates is not None or any(np.isin(run.inputs["input_ids"], media).any() for run in runs)


def _measured(
    runs: Sequence[Run],
    found: Logits,
    unpatched: Logits | None,
    against: Reference,
    media: Sequence[int],
    source: str,
) -> LogitEvidence:
    rows, before, segments = {}, {}, list[Segment]()
    for run in runs:
        expected = run.expected[LOGITS]
        rows[run.name] = _rows(found[run.name], expected)
        if unpatched is not None and run.name in unpatched:
            before[run.name] = _rows(unpatched[run.name], expected)
        for part, chosen in _parts(run, media):
            now = _agreement(rows[run.name], chosen)
            was = _agreement(before[run.name], chosen) if run.name in before else None
            segments.append(Segment(run.name, part, now, was))
    forced = tuple(_forced(run, found, unpatched) for run in _own_runs(against) if run.steps and run.name in found)
    return LogitEvidence(source, tuple(segments), forced, _series(rows), _series(before))


# For each row its divergence, and whether the argmax is the reference's.
_Rows = tuple[NDArray[np.float64], NDArray[np.bool_]]


def _rows(actual: Array, expected: Array) -> _Rows:
    if expected.ndim != 3 or actual.shape != expected.shape or expected.shape[0] != 1:
        raise ValueError(f"the shape is {list(actual.shape)}, expected {list(expected.shape)}")
    return kl_divergence(actual[0], expected[0]), actual[0].argmax(axis=-1) == expected[0].argmax(axis=-1)


def _series(rows: Mapping[str, _Rows]) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple((run, tuple(divergences.tolist())) for run, (divergences, _) in rows.items())


def _agreement(rows: _Rows, chosen: NDArray[np.bool_]) -> Agreement:
    divergences, same = rows[0][chosen], rows[1][chosen]
    return Agreement(int(chosen.sum()), float(divergences.max()), float(divergences.mean()), float(same.mean()))


def _parts(run: Run, media: Sequence[int]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """The parts of a run that have rows, and which rows those are: bool `[S]`."""
    length = run.expected[LOGITS].shape[1]
    ids = run.inputs.get("input_ids")
    is_media = np.isin(ids.reshape(-1), media) if ids is not None and ids.size == length else np.zeros(length, bool)
    behind = np.logical_or.accumulate(is_media) & ~is_media
    if not is_media.any():
        yield "text", ~is_media
        return
    for name, rows in (("before", ~is_media & ~behind), ("in", is_media), ("after", behind)):
        if rows.any():
            yield name, rows


def _forced(run: Run, found: Logits, unpatched: Logits | None) -> TeacherForced:
    """How much of a run's continuation is predicted: row P-1+i is to predict token P+i."""
    wanted = run.inputs["input_ids"].reshape(-1)[run.prompt :]
    predicted = _predicted(run, found[run.name])
    without = found.get(run.without_media)
    blind = _predicted(run, without) if without is not None else None
    apart = [step for step in range(run.steps) if blind is not None and predicted[step] != blind[step]]
    was = unpatched.get(run.name) if unpatched is not None else None
    return TeacherForced(
        run.name,
        run.steps,
        int((predicted == wanted).sum()),
        int((blind == wanted).sum()) if blind is not None else None,
        apart[0] if apart else None,
        int((_predicted(run, was) == wanted).sum()) if was is not None else None,
    )


def _predicted(run: Run, logits: Array) -> NDArray[np.int64]:
    if logits.ndim != 3 or logits.shape[1] != run.prompt + run.steps:
        raise ValueError(f"run {run.name} has {run.prompt + run.steps} tokens, the logits are {list(logits.shape)}")
    tokens: NDArray[np.int64] = logits[0, run.prompt - 1 : -1].argmax(axis=-1)
    return tokens


# What is wrong, what could not be measured, and what was shown.
_Judgement = tuple[list[str], list[str], list[str]]


def _by_limits(evidence: LogitEvidence, limits: Thresholds) -> _Judgement:
    judgement: _Judgement = ([], [], [])
    for name, limit in limits.set.items():
        measured = list(_measures(evidence, name))
        if not measured:
            judgement[1].append(f"no run of the reference measures {name}, which {limits.source} limits")
            continue
        where, number = (max if name == "max_kl" else min)(measured, key=lambda item: item[1])
        right = number <= limit if name == "max_kl" else number >= limit
        judgement[2 if right else 0].append(f"{name} {where} {number:.3g} (limit {limit:.3g})")
    return judgement


def _measures(evidence: LogitEvidence, name: str) -> Iterator[tuple[str, float]]:
    """Where a limit's number was measured, and what it is."""
    if name in ("max_kl", "argmax"):
        for segment in evidence.segments:
            if segment.part == "after":
                yield f"after the media of {segment.run}", getattr(segment.found, name)
    for forced in evidence.teacher_forced:
        if name == "top1":
            yield f"of {forced.run}", forced.right / forced.steps
        elif name == "lead" and forced.without is not None:
            yield f"of {forced.run}", (forced.right - forced.without) / forced.steps


def _by_control(evidence: LogitEvidence, telling: Collection[str]) -> _Judgement:
    """From the first media row on, the mean divergence must be lower than it was, and the argmax agree as often."""
    told = [one for one in evidence.segments if one.part in ("in", "after")]
    pairs = [(one.run, one.found, one.unpatched) for one in told if one.unpatched is not None]
    changed = [(now, was) for run, now, was in pairs if run in telling]
    if not told:
        return [], ["no thresholds, and no media row in the reference"], []
    if not pairs:
        return [], ["no thresholds, and no unpatched bundle to compare with"], []
    if not changed:
        return [], ["no thresholds, and no media row in the reference that the patch changes"], []
    kl, same = _mean([now for now, _ in changed])
    kl_before, same_before = _mean([was for _, was in changed])
    line = f"mean KL from the media on {kl_before:.2g} -> {kl:.2g}, argmax {same_before:.1%} -> {same:.1%}"
    better = kl < kl_before and same >= same_before
    return ([], [], [line]) if better else ([f"no better than unpatched: {line}"], [], [])


def _mean(agreements: Sequence[Agreement]) -> tuple[float, float]:
    rows = sum(one.rows for one in agreements)
    return sum(one.mean_kl * one.rows for one in agreements) / rows, sum(
        one.argmax * one.rows for one in agreements
    ) / rows
