"""The check of row maps: which row every token id reads, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from g4patch import recognise
from g4patch.cone import NotAMap
from g4patch.edits import Plan
from g4patch.places import condition_path
from g4patch.ple import Lookup
from g4patch.report import Check, Status, Subject
from g4patch.rows import map_rows
from g4patch.sidecars import HostRows
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Ids, RowMap, Verdict, domain
from g4patch.view import Graph


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


def row_map(before: Subject, after: Subject, plan: Plan | None = None) -> Check:
    """Every id, before and after: media ids read the pad row now, every other id the row it read before.

    Where a plan edits no lookup, all ids read what they read before. Of splices and of the token embedding, too,
    every id: a splice may gain media and PAD rows, nothing else may change.
    """
    if before.model.host_table is not None:
        return Check("row map", Status.SKIPPED, "a host looks this table up: which row an id reads is not known")
    both, edited = list(pairs(before, after)), edits_lookups(before, plan)
    if not both:
        return Check("row map", Status.SKIPPED, "there is no lookup in the graph")
    problems: list[str] = []
    compared = 0
    for old, new in both:
        where = f"{old.graph}: " if len(before.analyses) > 1 else ""
        if new is None:
            problems.append(f"{where}the lookup {old.gather.address} is gone")
            continue
        problems += [where + line for line in _map_problems(old, new, before.tokens, edited)]
        compared += len(new.judgement.row_map.ids) if new.judgement.row_map else 0
    problems += _splice_problems(before, after)
    problems += _embedding_problems(before, after)
    if len([lookup for analysis in after.analyses for lookup in analysis.lookups]) != len(both):
        problems.append("lookups appeared or disappeared")
    if problems:
        return Check("row map", Status.FAILED, problems[0], tuple(problems))
    done = f"{len(before.tokens.media)} -> pad row, all others as before" if edited else "all as before"
    return Check("row map", Status.PASSED, f"{compared:,} ids: {done}")


def edits_lookups(before: Subject, plan: Plan | None) -> bool:
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
        return map_rows(graph, node, table.shape, ids_input, domain(tokens, table.rows, graph.value(ids_input).dtype))
    except (KeyError, NotAMap):
        return None


def pairs(before: Subject, after: Subject) -> Iterator[tuple[Lookup, Lookup | None]]:
    """Each lookup of a model with the same one of the model it became, None where that has none."""
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
