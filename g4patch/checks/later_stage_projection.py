"""later-stage-projection: what a later stage is handed for media rows are not embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from g4patch.report import Finding, Subject

if TYPE_CHECKING:
    from g4patch.rules import Rule


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for each lookup whose sum is used by later layers only, in a graph that splices handed-in rows."""
    for analysis in subject.analyses:
        rows = next((splice.rows for splice in analysis.splices if splice.rows), "")
        for lookup in analysis.lookups:
            used = lookup.layers_used
            if rows and used and 0 not in used:
                message = (
                    f"layers {min(used)} to {max(used)} get a projection of {rows}, which in a later stage are layer "
                    "outputs, not embeddings: media rows stay wrong there even with the ids mended. Only an export "
                    "that hands the per-layer inputs, or the embeddings, from stage to stage is right. (This rests on "
                    "the stage contract as it was reported, not on its source.)"
                )
                yield Finding(rule.id, rule.severity, message, lookup.graph, (lookup.gather.address,))
