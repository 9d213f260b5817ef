"""ple-raw-ids: media placeholders must read the pad row of the PLE table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from g4patch import formats
from g4patch.edits import mask_ids
from g4patch.places import Place, place_for_mask
from g4patch.ple import GraphAnalysis, Lookup
from g4patch.report import Finding, Severity, Subject
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Verdict, some

if TYPE_CHECKING:
    from g4patch.rules import Rule

# What is wrong with verdicts that no edit of this rule mends, and what to do about it.
_NO_FIX = {
    Verdict.CLOBBERED: "re-export the model: the ids are already changed in a way no mask can undo",
    Verdict.ZERO_ROW: "re-export the model: Hugging Face reads the pad row there, which is not zero",
    Verdict.CONDITIONAL: "what it reads cannot be known from the ids",
    Verdict.AMBIGUOUS: "what is not understood is not edited",
}


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for the lookups of a graph that share a mask, one for each that cannot be mended.

    All lookups of a model are mended, or none: where one cannot be, no finding carries edits.
    """
    findings = [finding for analysis in subject.analyses for finding in _graph(rule, subject, analysis)]
    if not findings and subject.verdict is Verdict.AMBIGUOUS:
        message = "the configuration promises per-layer embeddings, and no lookup was found in the graph"
        findings = [Finding(rule.id, rule.severity, message, "", withheld=_NO_FIX[Verdict.AMBIGUOUS])]
    stuck = [f for f in findings if f.severity is Severity.ERROR and not f.edits]
    if stuck:
        others = f"another lookup cannot be mended ({stuck[0].graph}): all are, or none"
        findings = [replace(f, edits=(), withheld=f.withheld or others) for f in findings]
    yield from findings


def _graph(rule: Rule, subject: Subject, analysis: GraphAnalysis) -> Iterator[Finding]:
    for node in analysis.suspects:
        message = f"{node.native} {node.address} reads a table by token ids, and is not known to be the token embedding"
        yield Finding(
            rule.id,
            rule.severity,
            message,
            analysis.graph.name,
            (node.address,),
            withheld=_NO_FIX[Verdict.AMBIGUOUS],
        )
    groups: dict[tuple[str, tuple[str, ...], tuple[int, ...]], list[tuple[Lookup, Place]]] = {}
    for lookup in analysis.lookups:
        if lookup.verdict in _NO_FIX:
            yield from _unfixable(rule, lookup)
        elif lookup.judgement.missing and lookup.verdict is not Verdict.OTHER_SCHEME:
            dtypes, pad_id = formats.of(subject.model).MASK_DTYPES, subject.tokens.pad_id
            place = place_for_mask(analysis.graph, lookup, dtypes, pad_id, analysis.lookups)
            if isinstance(place, str):
                yield replace(_fault(rule, [lookup], subject.tokens), withheld=place)
            else:
                key = (place.value, tuple(cast.address for cast in place.casts), lookup.judgement.missing)
                groups.setdefault(key, []).append((lookup, place))
    for (value, _, missing), members in groups.items():
        lookups, places = zip(*members, strict=True)
        uses = dict.fromkeys(use for place in places for use in place.uses)
        edit = mask_ids(analysis.graph, value, tuple(uses), missing, subject.tokens.pad_id, rule.id, places[0].casts)
        finding = _fault(rule, lookups, subject.tokens)
        # A note is not a fault: it says what is not known, and nothing is edited for it alone.
        yield replace(finding, edits=(edit,) if finding.severity is rule.severity else ())


def _unfixable(rule: Rule, lookup: Lookup) -> Iterator[Finding]:
    """What is wrong and stays so; for ids that a cast cannot hold, narrow-ids says it."""
    judgement = lookup.judgement
    held = set(judgement.clobbered).difference(*judgement.narrowed.values())
    if judgement.clobbered and not held:
        return
    reads = {
        Verdict.CLOBBERED: f"reads a wrong row for {some(sorted(held))}",
        Verdict.ZERO_ROW: f"puts zeros instead of the pad row for {some(judgement.zeroed)}",
    }
    message = f"the PLE lookup {lookup.gather.address} {reads.get(lookup.verdict, 'is not understood')}"
    withheld = _NO_FIX[lookup.verdict]
    if judgement.reason:
        message = f"{message}: {judgement.reason}"
    if judgement.reason and lookup.verdict is Verdict.CLOBBERED:
        withheld = "export again with a mask of the ids outside the table: these are too many to name one by one"
    yield Finding(
        rule.id,
        rule.severity,
        message,
        lookup.graph,
        (lookup.gather.address,),
        withheld=withheld,
    )


def _fault(rule: Rule, lookups: Sequence[Lookup], tokens: TokenFacts) -> Finding:
    missing = lookups[0].judgement.missing
    names = [f"{modality} {token}" for modality, token in tokens.media.items() if token in missing]
    rows = "its own row" if len(names) == 1 else "their own rows"
    message = f"PLE reads {rows} for {', '.join(names)}; pad row {tokens.pad_id} is right"
    severity = rule.severity
    if all(modality in tokens.only_by_default for modality, token in tokens.media.items() if token in missing):
        severity = Severity.NOTE
        message += ". Only Gemma 4's defaults name these ids: pass them as flags if the model has them"
    return Finding(rule.id, severity, message, lookups[0].graph, tuple(lookup.gather.address for lookup in lookups))
