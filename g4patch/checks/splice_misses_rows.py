"""splice-misses-rows: every media row, and PAD rows, must come from the rows that the stage was handed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from g4patch import formats
from g4patch.edits import widen
from g4patch.places import place_for_widening
from g4patch.ple import GraphAnalysis, Splice
from g4patch.report import Finding, Severity, Subject

if TYPE_CHECKING:
    from g4patch.rules import Rule

_LATER_STAGE = (
    "in the first stage the rows handed in are the spliced embeddings, and PAD rows stay what they are; "
    "this graph does not take the first layer's per-layer inputs, or it is unclear which it takes"
)


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for each splice that takes handed-in rows for some media ids but not for all, or not for PAD."""
    for analysis in subject.analyses:
        for splice in analysis.splices:
            if splice.rows and set(splice.ids) & set(subject.tokens.media.values()):
                yield from _splice(rule, subject, analysis, splice)


def _splice(rule: Rule, subject: Subject, analysis: GraphAnalysis, splice: Splice) -> Iterator[Finding]:
    tokens, graph = subject.tokens, analysis.graph
    wanted = {**tokens.media, "pad": tokens.pad_id}
    missing = {name: token for name, token in wanted.items() if token not in splice.ids}
    if not missing:
        return
    stated = [name for name in missing if name != "pad" and name not in tokens.only_by_default]
    names = ", ".join(f"{name} {token}" for name, token in missing.items())
    message = f"the splice does not take rows of {splice.rows} for {names}"
    # A later stage projects something else than embeddings for media rows anyway: see later-stage-projection.
    serious = stated and not _is_later_stage(analysis)
    finding = Finding(
        rule.id, rule.severity if serious else Severity.WARNING, message, graph.name, (splice.node.address,)
    )
    place = place_for_widening(graph, splice, tokens, formats.of(subject.model).MASK_DTYPES)
    if isinstance(place, str):
        yield replace(finding, withheld=place)
        return
    value, use = place
    edit = widen(graph, splice.condition, splice.inverted, value, use, list(missing.values()), rule.id)
    yield replace(finding, edits=(edit,), unsafe="" if _is_first_stage(analysis) else _LATER_STAGE)


def _is_later_stage(analysis: GraphAnalysis) -> bool:
    return any(lookup.layers_used and 0 not in lookup.layers_used for lookup in analysis.lookups)


def _is_first_stage(analysis: GraphAnalysis) -> bool:
    """Whether the graph takes the first layer's slice of what it computes, and so begins with the embeddings."""
    return bool(analysis.lookups) and all(0 in (lookup.layers_used or ()) for lookup in analysis.lookups)
