"""Judge a model, before it is published, against what it was: verify knows no rules.

Each check is passed, failed or skipped with a reason. A check that compared nothing has not passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch import compare, formats, recognise, whole
from g4patch.cone import NotAMap, constants, map_ids
from g4patch.edits import Plan
from g4patch.places import condition_path
from g4patch.ple import Lookup
from g4patch.reference import Reference
from g4patch.report import Check, Status, Subject
from g4patch.runtimes import Probe, Unavailable
from g4patch.sidecars import HostRows, HostTable
from g4patch.thresholds import Thresholds
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Ids, RowMap, Verdict, domain
from g4patch.view import Graph

# The differential check reads all of a table of up to so many rows. Of a larger one it samples rows: each costs a
# prompt of the graph's own length, and maps the piece of the file that the system caches around it, up to 2 MB.
_WHOLE_TABLE = 1024
_SAMPLED_ROWS = 8
_SAMPLE_SEED = 4


def verify_patch(
    before: Subject,
    after: Subject,
    plan: Plan,
    reference: Reference | None = None,
    limits: Thresholds | None = None,
) -> tuple[Check, ...]:
    """All checks of a patched model against the unpatched one, and against a reference if there is one."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        # A validator may be a process of its own that takes seconds: it runs beside the other checks.
        validated = pool.submit(_validated, before, after)
        others = (
            row_map(before, after, plan),
            differential(before, after, plan),
            _reference(before, after, reference),
            *whole.gates_of(before, after, reference, limits),
        )
        return (structure(before, after, plan, validated.result()), *others)


def verify_bundle(
    subject: Subject,
    before: Subject | None,
    reference: Reference | None,
    limits: Thresholds | None = None,
    unit: str = "",
) -> tuple[Check, ...]:
    """The checks of a bundle as it stands, patched by g4patch or not. `before` is its unpatched original, if kept.

    With `unit`, also that of its outputs on a compute unit of the device that it is for.
    """
    checks = (standing(subject), _reference(before, subject, reference))
    judged = whole.gates_of(before, subject, reference, limits)
    return (*checks, *judged, *((_device(subject, reference, unit),) if unit else ()))


def _device(subject: Subject, reference: Reference | None, unit: str) -> Check:
    if reference is None:
        return Check("device", Status.SKIPPED, "there is no reference to compare its outputs with")
    return compare.on_device(subject, reference, unit)


def standing(subject: Subject) -> Check:
    """Every id of every lookup reads the row it should."""
    if subject.host_rows is not None:
        return _standing_rows(subject.host_rows)
    lookups = [lookup for analysis in subject.analyses for lookup in analysis.lookups]
    wrong = [f"{lookup.graph}: the lookup is {lookup.verdict}" for lookup in lookups]
    wrong = [line for line, lookup in zip(wrong, lookups, strict=True) if lookup.verdict is not Verdict.PATCHED]
    if wrong:
        return Check("row map", Status.FAILED, wrong[0], tuple(wrong))
    if not lookups or subject.verdict is not Verdict.PATCHED:
        return Check("row map", Status.SKIPPED, f"the verdict is {subject.verdict}: no lookup to judge")
    ids = sum(len(lookup.judgement.row_map.ids) for lookup in lookups if lookup.judgement.row_map)
    return Check("row map", Status.PASSED, f"{ids:,} ids: media -> pad row, all others their own")


def _standing_rows(rows: HostRows) -> Check:
    if rows.different:
        return Check("row map", Status.FAILED, f"the rows of {_listed(rows.different)} are not the pad row")
    if not rows.media:
        return Check("row map", Status.SKIPPED, "no media id is a row of this table")
    return Check("row map", Status.PASSED, f"{rows.media} media rows are the pad row, byte by byte")


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(str(token) for token in ids)


def _reference(before: Subject | None, after: Subject, reference: Reference | None) -> Check:
    if not after.model.graphs:
        return Check("reference", Status.SKIPPED, "this computes nothing that could be compared")
    if reference is None:
        return Check("reference", Status.SKIPPED, "there is no reference beside the bundle, and none was named")
    return compare.reference(before, after, reference)


# What the format's own validator has against a model and not against the one before, and a remark on it.
_Validated = tuple[tuple[str, ...], str]


def _validated(before: Subject, after: Subject) -> _Validated:
    fmt = formats.of(before.model)
    try:
        said = fmt.validate(after.model)
        old = fmt.validate(before.model) if said else ()
    except Unavailable as unavailable:
        return (), f"; {unavailable.reason}"
    return tuple(line for line in said if line not in old), "; the validator rejects the original too" if old else ""


def structure(before: Subject, after: Subject, plan: Plan, validated: _Validated | None = None) -> Check:
    """The file is the old one plus the plan, and the format's own validator has nothing new to say."""
    faults, remark = _validated(before, after) if validated is None else validated
    problems = [*formats.of(before.model).differences(before.model, after.model, plan), *faults]
    if _signature(before) != _signature(after):
        problems.append("inputs or outputs changed")
    if problems:
        return Check("structure", Status.FAILED, problems[0], tuple(problems))
    told = ", a note in the metadata" if plan.note else ""
    return Check("structure", Status.PASSED, f"{plan.done}{told}, nothing else changed{remark}")


def _signature(subject: Subject) -> list[Any]:
    return [(a.graph.name, a.graph.inputs, a.graph.outputs) for a in subject.analyses]


def row_map(before: Subject, after: Subject, plan: Plan | None = None) -> Check:
    """Every id, before and after: media ids read the pad row now, every other id the row it read before.

    Where a plan edits no lookup, all ids read what they read before. Of splices and of the token embedding, too,
    every id: a splice may gain media and PAD rows, nothing else may change.
    """
    if before.model.host_table is not None:
        return Check("row map", Status.SKIPPED, "a host looks this table up: which row an id reads is not known")
    pairs, edited = list(_pairs(before, after)), _edits_lookups(before, plan)
    if not pairs:
        return Check("row map", Status.SKIPPED, "there is no lookup in the graph")
    problems: list[str] = []
    compared = 0
    for old, new in pairs:
        where = f"{old.graph}: " if len(before.analyses) > 1 else ""
        if new is None:
            problems.append(f"{where}the lookup {old.gather.address} is gone")
            continue
        problems += [where + line for line in _map_problems(old, new, before.tokens, edited)]
        compared += len(new.judgement.row_map.ids) if new.judgement.row_map else 0
    problems += _splice_problems(before, after)
    problems += _embedding_problems(before, after)
    if len([lookup for analysis in after.analyses for lookup in analysis.lookups]) != len(pairs):
        problems.append("lookups appeared or disappeared")
    if problems:
        return Check("row map", Status.FAILED, problems[0], tuple(problems))
    done = f"{len(before.tokens.media)} -> pad row, all others as before" if edited else "all as before"
    return Check("row map", Status.PASSED, f"{compared:,} ids: {done}")


def _edits_lookups(before: Subject, plan: Plan | None) -> bool:
    """Whether a plan does more to the graphs than to change what splices take. All lookups are mended then.

    Without a plan they are expected to be.
    """
    if plan is None:
        return True
    at_splices = {
        (analysis.graph.name, address)
        for analysis in before.analyses
        for splice in analysis.splices
        for address in condition_path(analysis.graph, splice)
    }
    redirects = [(edit.graph, redirect.use.node) for edit in plan.graph_edits for redirect in edit.redirects]
    return not at_splices.issuperset(redirects)


def _splice_problems(before: Subject, after: Subject) -> Iterator[str]:
    """A splice may take more media and PAD rows than before, and nothing else may change."""
    allowed = {before.tokens.pad_id, *before.tokens.media.values()}
    old = {(a.graph.name, splice.node.address): splice for a in before.analyses for splice in a.splices}
    new = {(a.graph.name, splice.node.address): splice for a in after.analyses for splice in a.splices}
    if old.keys() != new.keys():
        yield "splices appeared or disappeared"
    for key in old.keys() & new.keys():
        lost, gained = set(old[key].ids) - set(new[key].ids), set(new[key].ids) - set(old[key].ids)
        if lost or gained - allowed or old[key].outside != new[key].outside or old[key].reason != new[key].reason:
            ids = sorted(lost | (gained - allowed))
            yield f"the splice {key[1]} changed for ids that are neither media nor pad: {ids[:3] or 'outside'}"


def _embedding_problems(before: Subject, after: Subject) -> Iterator[str]:
    """The token embedding reads the rows it read: no plan may change it, even where a splice hides that."""
    graphs = {analysis.graph.name: analysis.graph for analysis in after.analyses}
    for analysis in before.analyses:
        for node in analysis.embeddings:
            old = _rows_read(analysis.graph, node.address, before.tokens)
            new = _rows_read(graphs.get(analysis.graph.name), node.address, before.tokens)
            if old is not None and (new is None or not np.array_equal(old, new)):
                yield f"the token embedding {node.address} reads other rows"


def _rows_read(graph: Graph | None, gather: str, tokens: TokenFacts) -> Ids | None:
    """The row that a gather reads for each id; None where it is not there or the ids do not decide."""
    if graph is None:
        return None
    try:
        node = graph.node(gather)
        index, table = node.operands["index"], graph.tables[node.operands["data"]]
        ids_input = recognise.ids_input(graph, index)
        if ids_input is None:
            return None
        return map_ids(graph, index, ids_input, domain(tokens, table.rows, graph.value(ids_input).dtype))
    except (KeyError, NotAMap):
        return None


def _pairs(before: Subject, after: Subject) -> Iterator[tuple[Lookup, Lookup | None]]:
    new = {(lookup.graph, lookup.gather.address): lookup for a in after.analyses for lookup in a.lookups}
    for analysis in before.analyses:
        for lookup in analysis.lookups:
            yield lookup, new.get((lookup.graph, lookup.gather.address))


def _map_problems(old: Lookup, new: Lookup, tokens: TokenFacts, edited: bool) -> Iterator[str]:
    if new.verdict is not (Verdict.PATCHED if edited else old.verdict):
        yield f"the lookup is {new.verdict} after the edit" + (
            f": {new.judgement.reason}" if new.judgement.reason else ""
        )
    before, after = old.judgement.row_map, new.judgement.row_map
    if before is None or after is None:
        yield "the rows that are read could not be evaluated"
        return
    if not edited:
        if not (np.array_equal(before.ids, after.ids) and np.array_equal(before.rows, after.rows)):
            yield "ids read other rows, and the plan edits no lookup"
        return
    media = list(tokens.media.values())
    pad_row = before.row(tokens.pad_id)
    for modality, token in tokens.media.items():
        if after.row(token) != pad_row:
            yield f"{modality} {token} reads row {after.row(token)}, the pad row is {pad_row}"
    others = before.ids[~np.isin(before.ids, _reached_by_mask(before, media))]
    changed = others[before.take(others) != after.take(others)]
    if len(changed):
        yield f"{len(changed):,} ids that are not media read another row, the first is {changed[0]}"


def _reached_by_mask(before: RowMap, media: Sequence[int]) -> Ids:
    """Ids that read a media row before: the media ids, and ids outside the table that wrap around to them."""
    reached: Ids = before.ids[np.isin(before.rows, media) | np.isin(before.ids, media)]
    return reached


def differential(before: Subject, after: Subject, plan: Plan | None = None) -> Check:
    """Run the lookups of both models: what comes out is, bit for bit, the rows that the row maps say."""
    if before.model.host_table is not None and after.model.host_table is not None:
        return _rows(before.model.host_table, after.model.host_table, before.tokens)
    pairs = list(_pairs(before, after))
    if not pairs:
        return Check("differential", Status.SKIPPED, "there is no lookup to run")
    edited = _edits_lookups(before, plan)
    masked = list(before.tokens.media.values()) if edited else []
    problems: list[str] = []
    rows = 0
    runtime = ""
    try:
        for old, new in pairs:
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
    own = was.table(old.index, old.output, old.judgement.row_map.take(ids))
    expected = was.table(old.index, old.output, new.judgement.row_map.take(ids))
    pad_row = old.judgement.row_map.row(pad_id)
    pad = was.table(old.index, old.output, np.array([pad_row], np.int64))
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
