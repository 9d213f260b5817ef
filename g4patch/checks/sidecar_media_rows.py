"""sidecar-media-rows: in a table that hosts look up, media rows must be the pad row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from g4patch.edits import RowCopy
from g4patch.report import Finding, Severity, Subject

if TYPE_CHECKING:
    from g4patch.rules import Rule


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for the media rows that are zeros, one for those that are rows of their own."""
    rows, tokens = subject.host_rows, subject.tokens
    if rows is None:
        return
    own = [token for token in rows.different if token not in rows.zeroed]
    for ids, what in ((rows.zeroed, "zeros"), (own, "rows of their own")):
        if not ids:
            continue
        named = {modality: token for modality, token in tokens.media.items() if token in ids}
        listed = ", ".join(f"{modality} {token}" for modality, token in named.items())
        message = f"the rows of {listed} are {what}; pad row {tokens.pad_id} is right"
        if set(named) <= tokens.only_by_default:
            # Not a fault: it says what is not known, and nothing is edited for it alone.
            message += ". Only Gemma 4's defaults name these ids: pass them as flags if the model has them"
            yield Finding(rule.id, Severity.NOTE, message, "")
        else:
            yield Finding(rule.id, rule.severity, message, "", edits=(RowCopy(rule.id, tokens.pad_id, tuple(ids)),))
