"""The checks that look at the end of a model, or at all models of a bundle together: the chain and the gates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from g4patch import chain, compare, gates, values
from g4patch.reference import Reference
from g4patch.report import Check, Status, Subject
from g4patch.runtimes import Unavailable
from g4patch.thresholds import Thresholds


def checks(
    bundle: Path,
    models: Sequence[Path],
    before: Sequence[Subject],
    after: Sequence[Subject],
    reference: Reference | None,
    limits: Thresholds | None,
    *,
    chain_too: bool,
) -> tuple[Check, ...]:
    """The checks of all models of a bundle together, where there is a reference of the whole model.

    `before` are the same as `after` where nothing was patched, and empty where that is not known.
    """
    if reference is None or (layers := reference.layers) is None:
        return ()
    folder = bundle.parent if bundle in models else bundle
    places = [path.relative_to(folder).as_posix() for path in models]
    media = _media(after)
    judged = limits is not None or gates.are_told(reference, media)
    names = ["chain"] * chain_too + ["gates"] * judged
    wrong = tuple(line for subject in after for line in compare.does_not_fit(subject, reference))
    if wrong or not names:
        return tuple(Check(name, Status.FAILED, wrong[0], wrong) for name in names)
    try:
        links = chain.ordered(folder, dict(zip(places, after, strict=True)), layers)
        passage = chain.run(links, reference, alone=chain_too)
        was = dict(zip(places, before, strict=True)) if judged and before else {}
        old = chain.ordered(folder, was, layers) if was else ()
        unpatched = chain.run(old, reference, alone=False) if old else None
    except Unavailable as unavailable:
        return tuple(Check(name, Status.SKIPPED, unavailable.reason) for name in names)
    made = (chain.check(links, passage, unpatched),) if chain_too else ()
    if not judged:
        return made
    logits = unpatched.logits if unpatched is not None else None
    pairs = zip(before, after, strict=True) if before else ()
    changed = {token for pair in pairs for token in compare.changed(*pair)}
    return (*made, gates.check(passage.logits, logits, reference, media, changed, limits or reference.gates))


def gates_of(
    before: Subject | None, after: Subject, reference: Reference | None, limits: Thresholds | None
) -> tuple[Check, ...]:
    """The gates of a model with a reference of its own; those of a whole model are for its bundle."""
    media = _media([after])
    if reference is None or reference.layers is not None or not (limits or gates.are_told(reference, media)):
        return ()
    try:
        found = values.logits(after, reference)
        unpatched = values.logits(before, reference) if before is not None else None
    except Unavailable as unavailable:
        return (Check("gates", Status.SKIPPED, unavailable.reason),)
    changed = compare.changed(before, after) if before is not None else set[int]()
    return (gates.check(found, unpatched, reference, media, changed, limits or reference.gates),)


def _media(subjects: Sequence[Subject]) -> list[int]:
    return sorted({token for subject in subjects for token in subject.tokens.media.values()})
