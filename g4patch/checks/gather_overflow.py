"""gather-overflow: a table of more elements than a signed 32-bit offset can count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from g4patch.ple import Lookup
from g4patch.recognise import gather_axis
from g4patch.report import Finding, Severity, Subject

if TYPE_CHECKING:
    from g4patch.rules import Rule

# A signed 32-bit offset counts elements, whatever their size in bytes, from 0 to this minus 1.
_COUNTED = 2**31

# Format -> the runtime that was seen to count so. Of other formats' runtimes nothing is known either way.
_SEEN = {"ONNX": "onnxruntime's CUDA provider up to 1.24"}


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for each PLE lookup that reads, for some ids, elements which such an offset does not reach.

    A note where no runtime of the model's format is known to count in 32 bits.
    """
    for analysis in subject.analyses:
        for lookup in analysis.lookups:
            row = _first_row(lookup)
            if row is not None:
                yield _finding(rule, subject, lookup, row)


def _first_row(lookup: Lookup) -> int | None:
    """The first row with an element out of reach; None where there is none."""
    table = lookup.table
    if gather_axis(lookup.gather, table) != 0 or table.rows * table.width <= _COUNTED:
        return None
    return _COUNTED // table.width


def _finding(rule: Rule, subject: Subject, lookup: Lookup, row: int) -> Finding:
    table, format = lookup.table, subject.model.format
    known = _SEEN.get(format)
    runtimes = f"{known} is one" if known else f"none is known for {format}: try one before you ship for it"
    message = (
        f"the table has {table.rows:,} x {table.width:,} elements, more than 2^31: runtimes that count them in 32 bits "
        f"({runtimes}) read wrong memory for {_ids(lookup, subject, row)}. Masking media ids does not cure that: split "
        "the table by layer in the export, or run it where offsets have 64 bits"
    )
    severity = rule.severity if known else Severity.NOTE
    return Finding(rule.id, severity, message, lookup.graph, (lookup.gather.address,))


def _ids(lookup: Lookup, subject: Subject, row: int) -> str:
    """Which ids read that row or a later one, by the row map where there is one."""
    row_map = lookup.judgement.row_map
    if row_map is None:
        return f"whatever reads row {row} or later"
    fed = row_map.between(0, subject.tokens.vocabulary or lookup.table.rows)
    ids = fed.ids[(fed.rows >= row) & (fed.rows < lookup.table.rows)]
    if not ids.size:
        return f"ids that read row {row} or later: none of the vocabulary does"
    if ids.size == 1:
        return f"id {ids[0]}"
    start = f"from {ids[0]} on" if np.all(np.diff(ids) == 1) else f"the first of them {ids[0]}"
    return f"{ids.size:,} ids, {start}"
