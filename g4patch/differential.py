"""The differential check: the lookups of both models, run on their own weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch import formats
from g4patch.cone import constants
from g4patch.edits import Plan
from g4patch.ple import Lookup
from g4patch.report import Check, Status, Subject
from g4patch.row_maps import edits_lookups, pairs
from g4patch.runtimes import Probe, Unavailable
from g4patch.sidecars import HostTable
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Ids

# A table of up to so many rows is read whole. Of a larger one rows are sampled: each costs a prompt of the graph's own
# length, and maps the piece of the file that the system caches around it, up to 2 MB.
_WHOLE_TABLE = 1024
_SAMPLED_ROWS = 8
_SAMPLE_SEED = 4


def differential(before: Subject, after: Subject, plan: Plan | None = None) -> Check:
    """Run the lookups of both models: what comes out is, bit for bit, the rows that the row maps say."""
    if before.model.host_table is not None and after.model.host_table is not None:
        return _rows(before.model.host_table, after.model.host_table, before.tokens)
    both = list(pairs(before, after))
    if not both:
        return Check("differential", Status.SKIPPED, "there is no lookup to run")
    edited = edits_lookups(before, plan)
    masked = list(before.tokens.media.values()) if edited else []
    problems: list[str] = []
    rows = 0
    runtime = ""
    try:
        for old, new in both:
            if new is None:
                problems.append(f"the lookup {old.gather.address} is gone")
                continue
            fmt = formats.of(before.model)
            was, now = fmt.probe(before.model, old.graph), fmt.probe(after.model, new.graph)
            ids = _ids_to_run(before, after, old, new)
            problems += _output_problems(was, now, old, new, masked, before.tokens.pad_id, ids)
            rows += len(ids)
            runtime = now.runtime
    except Unavailable as unavailable:
        if not problems:
            return Check("differential", Status.SKIPPED, unavailable.reason)
    if problems:
        return Check("differential", Status.FAILED, problems[0], tuple(problems))
    said = "media rows are the pad row, all others unchanged" if edited else "all unchanged"
    return Check("differential", Status.PASSED, f"{rows:,} rows on {runtime}: {said}, bit for bit")


def _rows(old: HostTable, new: HostTable, tokens: TokenFacts) -> Check:
    """The rows of two tables that hosts look up: media rows are the pad row now, and others what they were."""
    media = [token for token in tokens.media.values() if token < old.table.rows]
    if not media:
        return Check("differential", Status.SKIPPED, "no media id is a row of this table")
    ids = _sampled([tokens.pad_id, *media], old.table.rows)
    ids = ids[(ids >= 0) & (ids < old.table.rows)]
    before, after = old.rows(ids.tolist()), new.rows(ids.tolist())
    is_media = np.isin(ids, media)
    pad = np.repeat(old.rows([tokens.pad_id]), int(is_media.sum()), 0)
    problems = [
        *_unequal(ids[is_media], after[is_media], pad, "it is not the pad row"),
        *_unequal(ids[~is_media], after[~is_media], before[~is_media], "a row that is not media changed"),
    ]
    if problems:
        return Check("differential", Status.FAILED, problems[0], tuple(problems))
    said = f"{len(ids):,} rows read again: media rows are the pad row, all others unchanged, byte by byte"
    return Check("differential", Status.PASSED, said)


def _output_problems(
    was: Probe, now: Probe, old: Lookup, new: Lookup, masked: Sequence[int], pad_id: int, ids: Ids
) -> Iterator[str]:
    """What is wrong with the rows that come out. `masked` are the ids that read the pad row now."""
    if old.judgement.row_map is None or new.judgement.row_map is None:
        yield "the rows that are read could not be evaluated"
        return
    media = np.isin(ids, masked)
    before, after = was.lookup(old.ids_input, old.output, ids), now.lookup(new.ids_input, new.output, ids)
    if before.dtype != after.dtype or before.shape != after.shape:
        yield f"the lookup's output was {before.dtype}{before.shape} and is {after.dtype}{after.shape}"
        return
    if len(after) != len(ids):
        yield f"{len(after)} rows came out for {len(ids)} ids"
        return
    own = _table(was, old, old.judgement.row_map.take(ids))
    expected = _table(was, old, new.judgement.row_map.take(ids))
    pad_row = old.judgement.row_map.row(pad_id)
    pad = _table(was, old, np.array([pad_row], np.int64))
    yield from _unequal(ids, before, own, "the unpatched lookup does not read the row it should")
    yield from _unequal(ids, after, expected, "the lookup does not read the row it should")
    yield from _unequal(ids[media], after[media], np.repeat(pad, int(media.sum()), 0), "it is not the pad row")
    yield from _unequal(ids[~media], after[~media], before[~media], "a row that is not media changed")
    fixed = np.isin(ids, old.judgement.missing) & media
    same = [
        int(token) for token, equal in zip(ids[fixed], _equal_rows(before[fixed], after[fixed]), strict=True) if equal
    ]
    if same and not old.scales:
        yield f"id {same[0]}: no change shows; its row in the table equals the pad row"


def _table(probe: Probe, lookup: Lookup, rows: Ids) -> NDArray[Any]:
    """Rows of a lookup's table, or of the tables that it is split over: `[N, W]`."""
    if not lookup.shards:
        return probe.table(lookup.index, lookup.output, rows)
    parts: list[tuple[NDArray[np.bool_], NDArray[Any]]] = []
    for shard in lookup.shards:
        own = (rows >= shard.first) & (rows < shard.first + shard.table.rows)
        if own.any():
            parts.append((own, probe.table(shard.index, shard.gather.output, rows[own] - shard.first)))
    if not parts:
        raise Unavailable("none of these rows is in a table")
    found = np.zeros((len(rows), *parts[0][1].shape[1:]), parts[0][1].dtype)
    for own, part in parts:
        found[own] = part
    return found


def _ids_to_run(before: Subject, after: Subject, old: Lookup, new: Lookup) -> Ids:
    """Media ids and their neighbours (BOI, EOI and the like), every id that either graph names, and a sample."""
    rows = old.table.rows
    named = [before.tokens.pad_id, *before.tokens.media.values()]
    for subject, lookup in ((before, old), (after, new)):
        graph = next(a.graph for a in subject.analyses if a.graph.name == lookup.graph)
        named += constants(graph, lookup.index)
    ids = _sampled(named, rows)
    return ids[((ids >= 0) & (ids < rows)) | np.isin(ids, old.judgement.masked)]


def _sampled(named: Sequence[int], rows: int) -> Ids:
    """Ids that are named and their neighbours, the first and last rows, and a sample of all, or all of a few."""
    near = [token + step for token in named for step in (-2, -1, 0, 1, 2)]
    size = rows if rows <= _WHOLE_TABLE else _SAMPLED_ROWS
    drawn = np.random.default_rng(_SAMPLE_SEED).choice(rows, size, replace=False)
    return np.unique(np.concatenate([np.array([*near, 0, 1, rows - 2, rows - 1]), drawn])).astype(np.int64)


def _equal_rows(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    """Row by row, whether the bytes are equal: NaN equals itself, -0.0 differs from 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return np.zeros(len(left), bool)
    if not len(left):
        return np.zeros(0, bool)
    bytes_of = [np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1) for array in (left, right)]
    equal: NDArray[np.bool_] = (bytes_of[0] == bytes_of[1]).all(axis=1)
    return equal


def _unequal(ids: Ids, left: NDArray[Any], right: NDArray[Any], what: str) -> Iterator[str]:
    wrong = ids[~_equal_rows(left, right)]
    if len(wrong):
        yield f"id {wrong[0]}: {what}" + (f" (and {len(wrong) - 1} more ids)" if len(wrong) > 1 else "")
