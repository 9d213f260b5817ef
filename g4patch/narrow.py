"""Casts on the way from the token ids to a gather that cannot hold every id."""

from __future__ import annotations

import numpy as np

from g4patch.cone import NotAMap, trace
from g4patch.rows import cast_to, numbers
from g4patch.verdicts import Ids
from g4patch.view import Graph, Node, Op


def narrowed(graph: Graph, value: str, ids_input: str, ids: Ids) -> dict[str, tuple[int, ...]]:
    """Those of some ids whose numbers a cast on the way to a value changes, by the address of the cast.

    Each id is held against the first cast that changes it: those behind it never had the right number.
    """
    found: dict[str, tuple[int, ...]] = {}
    for cast in trace(graph, value).nodes:
        if cast.op is Op.CAST and len(ids):
            changed = _changed(graph, cast, ids_input, ids)
            ids = ids[~np.isin(ids, changed)]
            if len(changed):
                found[cast.address] = tuple(changed.tolist())
    return found


def _changed(graph: Graph, cast: Node, ids_input: str, ids: Ids) -> Ids:
    """By value: a narrow cast of few ids changes none. What cannot be evaluated is not blamed."""
    try:
        before = numbers(graph, cast.operands["x"], ids_input, ids)
        after = cast_to(before, cast)
    except NotAMap:
        return ids[:0]
    if before.dtype.kind not in "iuf" or after.dtype.kind not in "iuf":
        return ids[:0]
    changed: Ids = ids[np.not_equal(before, after)]
    return changed
