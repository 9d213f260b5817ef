"""Run the stages of a bundle one after another, as a host does, and find the first that leaves the reference.

Every stage is fed twice: with what the last stage put out, and with what the reference says it should have got. A
stage that is off only in the first case inherited its error; one that is off in both has a fault of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray

from g4patch import configs
from g4patch.divergence import Compared, compare, first, nearest, row_kinds
from g4patch.evidence import Divergence, StageEvidence
from g4patch.feeding import Feeds, computed, feeds, given, only_of, takes, within_reach
from g4patch.reference import Reference, Run
from g4patch.report import Check, Status, Subject
from g4patch.runtimes import Unavailable
from g4patch.stages import LOGITS, Stage, stage_of

Array = NDArray[Any]


@dataclass(frozen=True)
class Link:
    """A model of the chain, and its graphs that may be the stage: one for prompts, one to decode, and so on."""

    place: str
    subject: Subject
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        return str(PurePosixPath(self.place).with_suffix(""))

    @property
    def layers(self) -> tuple[int, ...]:
        return self.stages[0].layers


@dataclass
class _Trail:
    """What was found of one link in all runs."""

    chained: list[Compared] = field(default_factory=list)
    alone: list[Compared] = field(default_factory=list)
    unknown: str = ""
    filled: dict[str, None] = field(default_factory=dict)
    unseen: dict[str, None] = field(default_factory=dict)


class _Unfit(Unavailable):
    """A prompt of a length that a stage does not take."""


@dataclass
class Passage:
    """What running a chain gave: the logits at its end by run, what was found of each link, and what did not fit."""

    logits: dict[str, Array] = field(default_factory=dict)
    trails: dict[str, _Trail] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)


def check(links: Sequence[Link], passage: Passage, unpatched: Passage | None = None) -> Check:
    """What running a chain on every run of a reference of the whole model showed, and what it was before a patch.

    Passed only if every stage computed a value that the reference has, fed from the last stage.
    """
    before = unpatched.trails if unpatched is not None else {}
    stages = tuple(_evidence(link, passage.trails[link.name], before.get(link.name, _Trail())) for link in links)
    details = (*_used(stages), *(f"left out: {run}: {why}" for run, why in passage.unfit.items()))
    if passage.problems:
        return Check("chain", Status.FAILED, passage.problems[0], (*passage.problems, *details), stages=stages)
    fault = next((stage for stage in stages if stage.chained or stage.alone), None)
    if fault is not None:
        return Check("chain", Status.FAILED, said(fault), ("", *details), stages=stages)
    blank = [stage.name for stage in stages if not stage.compared]
    if blank:
        return Check("chain", Status.SKIPPED, f"the reference has no value of {', '.join(blank)}", stages=stages)
    values = sum(stage.compared for stage in stages)
    number = f"{len(stages)} stages" if len(stages) > 1 else "1 stage"
    share = max(item.share for trail in passage.trails.values() for item in trail.chained)
    summary = f"{number}, {values} values, the furthest off by {share:.0%} of its limit"
    return Check("chain", Status.PASSED, summary, ("", *details), stages=stages)


def said(stage: StageEvidence) -> str:
    """The first divergence of a stage in words."""
    off = stage.chained or stage.alone
    assert off is not None
    if stage.alone is not None:
        origin = "fed from the reference it is off too, so the fault is here"
    elif stage.alone_unknown:
        origin = f"whether it was handed the error is not known: {stage.alone_unknown}"
    else:
        origin = "only when fed from the last stage: inherited"
    return f"first divergence: {stage.name}, {place(off)}: {origin}"


def place(off: Divergence) -> str:
    """A divergence in words: layer, row, value."""
    where = f"layer {off.layer}, " if off.layer is not None else ""
    row = f"row {off.row} ({off.kind})" if off.row is not None else "the norm alone"
    return f"{where}{row} of {off.run}, {off.name} off by {off.error:.1e} (limit {off.limit:.0e})"


def _used(stages: Sequence[StageEvidence]) -> Iterator[str]:
    """What was fed that nobody gave, and which values could not be seen, for a person to judge the check by."""
    filled = dict.fromkeys(what for stage in stages for what in stage.filled)
    if filled:
        yield f"derived inputs: {', '.join(filled)}"
    for stage in stages:
        if stage.unseen:
            yield f"{stage.name}: not seen: {', '.join(stage.unseen)}"


def ordered(folder: Path, subjects: Mapping[str, Subject], layers: int) -> tuple[Link, ...]:
    """The models that are stages of a model of so many layers, in the order in which they run.

    Raises Unavailable where it is not clear.
    """
    links = [link for place, subject in subjects.items() if (link := _link(place, subject)) is not None]
    if not links:
        raise Unavailable("no model here computes what a reference of the whole model holds")
    for link in links:
        if (depth := link.stages[0].depth) not in (None, layers):
            raise Unavailable(f"{link.name} has per-layer inputs of {depth} of {layers} layers: of which is not said")
    links = sorted(_of_one_variant(folder, links), key=lambda link: (min(link.layers, default=-1), link.place))
    for at, link in enumerate(links):
        for other in links[at + 1 :]:
            if clash := _clash(link, other):
                raise Unavailable(f"{link.name} and {other.name} both compute {clash}: which is the stage is not said")
    deep = [link for link in links if link.layers]
    for before, after in pairwise(deep):
        if before.layers[-1] + 1 != after.layers[0]:
            gap = f"layers {before.layers[-1] + 1} to {after.layers[0] - 1}"
            raise Unavailable(f"no model here computes {gap}, between {before.name} and {after.name}")
    return tuple(links)


def _link(place: str, subject: Subject) -> Link | None:
    stages = tuple(stage_of(analysis, subject.tokens) for analysis in subject.analyses)
    stages = tuple(stage for stage in stages if stage.takes_part)
    return Link(place, subject, stages) if stages else None


def _clash(link: Link, other: Link) -> str:
    """What two models both compute, so that one of them cannot be a stage beside the other; "" if nothing."""
    common = set(link.layers) & set(other.layers)
    if common:
        return f"layer {min(common)}"
    if link.layers or other.layers:
        return ""
    return ", ".join(sorted(set(link.stages[0].taps) & set(other.stages[0].taps)))


def _of_one_variant(folder: Path, links: Sequence[Link]) -> Sequence[Link]:
    """Of models that clash, those that the folder's own metadata names: it may hold variants."""
    if not any(_clash(link, other) for at, link in enumerate(links) for other in links[at + 1 :]):
        return links
    named = _named(folder)
    return [link for link in links if link.place in named] or links


def _named(folder: Path) -> set[str]:
    """The files that `metadata.json` (assets) and `genai_config.json` (filename) name, where they can be read."""

    def names(entry: Any, wanted: bool) -> Iterator[str]:
        if isinstance(entry, Mapping):
            for key, value in entry.items():
                yield from names(value, wanted or key in ("assets", "filename"))
        elif wanted and isinstance(entry, str):
            yield str(PurePosixPath(entry))

    contents = (configs.load(folder / name) for name in ("metadata.json", "genai_config.json"))
    return {name for content in contents for name in names(content, False)}


def run(links: Sequence[Link], against: Reference, *, alone: bool = True) -> Passage:
    """Run a chain on every run that its stages take. Without `alone` they are fed from the last one only.

    Raises Unavailable where a stage cannot be run at all, or takes no run.
    """
    passage = Passage(trails={link.name: _Trail() for link in links})
    twins = {one.without_media for one in against.runs}
    # What a run without the media shows is told only where no other shows it.
    for one in sorted(against.runs, key=lambda one: one.name in twins):
        try:
            _run(links, one, against, passage, alone)
        except _Unfit as unfit:
            passage.unfit[one.name] = unfit.reason
    if len(passage.unfit) == len(against.runs):
        raise Unavailable(next(iter(passage.unfit.values()), "the reference has no run"))
    return passage


def _run(links: Sequence[Link], one: Run, against: Reference, passage: Passage, alone: bool) -> None:
    handed = given(one)
    for link in links:
        values = _pass(link, one, against, handed, passage, alone)
        handed |= values
        if LOGITS in values:
            passage.logits[one.name] = values[LOGITS]


def _pass(
    link: Link, one: Run, against: Reference, handed: Mapping[str, Array], passage: Passage, alone: bool
) -> dict[str, Array]:
    """Run one stage on one prompt, from what it is handed and from the reference. Returns what it hands on."""
    trail, right = passage.trails[link.name], given(one)
    stage, fed = _stage(link, handed)
    values = _values(link, stage, fed, one, set(stage.outputs.values()))
    found = _compare(link, stage, values, one, against, passage)
    trail.filled |= dict.fromkeys(fed.filled)
    trail.unseen |= dict.fromkeys(name for name in stage.taps if name in one.expected and name not in values)
    trail.chained += found
    lacking = [name for name in stage.inputs.values() if name in handed and name not in right]
    if lacking:
        trail.unknown = f"the reference lacks {', '.join(lacking)}"
    elif all(handed.get(name) is right.get(name) for name in stage.inputs.values()):
        trail.alone += found
    elif alone:
        own = feeds(stage, right, link.subject.tokens.media)
        trail.alone += _compare(link, stage, _values(link, stage, own, one), one, against, passage)
    return {name: values[name] for name in stage.outputs.values()}


def _stage(link: Link, tensors: Mapping[str, Array]) -> tuple[Stage, Feeds]:
    """The graph of a model that takes a prompt, and what it is fed."""
    media = link.subject.tokens.media
    for stage in link.stages:
        fed = feeds(stage, tensors, media)
        if takes(stage, fed.arrays):
            return stage, fed
    rows = tensors["input_ids"].shape[-1] if "input_ids" in tensors else 0
    raise _Unfit(f"{link.name} takes no prompt of {rows} rows{only_of(link.stages)}")


def _values(link: Link, stage: Stage, fed: Feeds, one: Run, needed: Collection[str] = frozenset()) -> dict[str, Array]:
    """What a stage computes of all that the reference has, and of what the next stage needs."""
    if any(not within_reach(stage, fed, name) for name in needed):
        raise Unavailable(f"{link.name}: nothing is given for {', '.join(sorted(fed.missing))}")
    names = {name for name in stage.taps if name in one.expected and within_reach(stage, fed, name)} | set(needed)
    return computed(link.subject.model, stage, fed, sorted(names), one.expected) if names else {}


def _compare(
    link: Link, stage: Stage, values: Mapping[str, Array], one: Run, against: Reference, passage: Passage
) -> list[Compared]:
    tokens = link.subject.tokens
    kinds = row_kinds(one.inputs.get("input_ids"), tokens.media, tokens.pad_id)
    found = []
    for name, actual in values.items():
        if name in one.expected:
            bound = against.tolerances[name]
            try:
                found.append(compare(one.name, name, actual, one.expected[name], bound, stage.layers, kinds))
            except ValueError as error:
                passage.problems.append(f"{link.name}: {name}, {one.name}: {error}")
    return found


def _evidence(link: Link, trail: _Trail, before: _Trail) -> StageEvidence:
    return StageEvidence(
        link.name,
        link.layers,
        len(trail.chained),
        first(trail.chained),
        first(trail.alone),
        trail.unknown,
        tuple(trail.filled),
        tuple(trail.unseen),
        nearest(trail.chained),
        nearest(before.chained),
    )
