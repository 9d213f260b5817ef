"""Judge one lookup: which row each token id reads, and what is done to the rows behind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from g4patch.cone import NotAMap, map_ids, per_id
from g4patch.downstream import Downstream
from g4patch.errors import BundleError
from g4patch.narrow import narrowed
from g4patch.rows import map_rows, repeated
from g4patch.shards import shards
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Ids, Judgement, RowMap, Verdict, domain, judge
from g4patch.view import Graph, Node, Table


def row_value(graph: Graph, index: str, ids_input: str) -> str:
    """The value with one row an id behind a gather's index: the index itself where that is not clear."""
    try:
        return repeated(graph, index, ids_input).value
    except NotAMap:
        return index


def judge_lookup(
    graph: Graph, node: Node, table: Table, ids_input: str, downstream: Downstream, tokens: TokenFacts
) -> Judgement:
    """What a lookup does, by value. Raises BundleError where the pad id is not a row of its table."""
    if tokens.pad_id >= table.rows:
        raise BundleError(
            f"the pad id {tokens.pad_id} ({tokens.pad.source}) is not a row of the PLE table, which has {table.rows}",
            "pass --pad-token-id",
        )
    ids = domain(tokens, table.rows, graph.value(ids_input).dtype)
    try:
        rows = map_rows(graph, node, table.shape, ids_input, ids)
        zeroed = _zeroed(graph, downstream, ids_input, ids)
    except NotAMap as error:
        verdict = Verdict.CONDITIONAL if error.conditional else Verdict.AMBIGUOUS
        return Judgement(verdict, reason=f"the row that is read {error.reason}")
    row_map = RowMap(ids, rows)
    if downstream.selects:
        reason = f"the rows are replaced by others at {downstream.selects[0].node.address}"
        return Judgement(Verdict.AMBIGUOUS, row_map, reason=reason)
    for modality, token in tokens.media.items():
        if token >= table.rows and row_map.row(token) == token and tokens.token(modality).by_default:
            reason = f"{modality} {token} is not one of the table's {table.rows} rows: which ids has this model?"
            return Judgement(Verdict.AMBIGUOUS, row_map, reason=reason)
    judgement = judge(row_map, zeroed, tokens, table.rows)
    clobbered = np.array(judgement.clobbered, np.int64)
    judgement = replace(judgement, narrowed=narrowed(graph, node.operands["index"], ids_input, clobbered))
    if len(shards(node)) > 1 and set(clobbered.tolist()).difference(*judgement.narrowed.values()):
        reason = f"which rows of its {len(shards(node))} tables are an id's own is not clear"
        return Judgement(Verdict.AMBIGUOUS, row_map, reason=reason)
    return judgement


def _zeroed(graph: Graph, downstream: Downstream, ids_input: str, ids: Ids) -> Ids:
    """Ids whose rows a mask behind the lookup overwrites with zeros or another constant."""
    hit = np.zeros(len(ids), bool)
    for _, mask in downstream.masks:
        hit |= map_ids(graph, per_id(graph, mask), ids_input, ids) == 0
    for select in downstream.zeroing:
        condition = per_id(graph, select.node.operands["condition"])
        hit |= map_ids(graph, condition, ids_input, ids).astype(bool) != select.kept_when_true
    zeroed: Ids = ids[hit]
    return zeroed
