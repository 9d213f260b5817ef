"""Find the PLE lookups and the splices of a graph, and evaluate for every token id what they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from g4patch import recognise
from g4patch.cone import NotAMap, map_ids, map_rows, repeated, trace
from g4patch.downstream import Downstream, Select, follow
from g4patch.errors import BundleError
from g4patch.narrow import narrowed
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Ids, Judgement, RowMap, Verdict, domain, judge, worst
from g4patch.view import VIEW_OPS, Graph, Node, Op, Table


@dataclass(frozen=True)
class Splice:
    """`where(cond, hidden_states, embed_tokens(ids))`: the ids whose rows come from the other branch.

    `rows` is the graph input that hands them in, "" where they are computed. `condition` has one element an id, and is
    `inverted` where it is true for rows that stay. `outside` are ids that are not of the vocabulary; `reason` is set
    where the condition was not evaluated.
    """

    node: Node
    rows: str
    condition: str
    inverted: bool
    ids: tuple[int, ...] = ()
    outside: tuple[int, ...] = ()
    reason: str = ""

    @property
    def other(self) -> str:
        """The rows that come in place of the token embedding's."""
        return self.node.operands["y" if self.inverted else "x"]


@dataclass(frozen=True)
class Lookup:
    """One gather that reads the PLE table, and all that was found out about it.

    `index` is the row that is read for each id: the gather's index, or what that repeats.
    `combined` is the value that the layers get, None where nothing is summed; `layers_used` are the layers whose slices
    of it the graph takes, None where that is unclear. `scales` is the gather
    whose rows this one's scale, "" where it reads the PLE rows themselves.
    """

    graph: str
    gather: Node
    index: str
    table: Table
    ids_input: str
    layers: int
    layer_width: int
    scale: float | None
    evidence: tuple[str, ...]
    path: tuple[str, ...]
    combined: str | None
    layers_used: frozenset[int] | None
    judgement: Judgement
    scales: str = ""

    @property
    def output(self) -> str:
        """The value that holds the rows as they were read: where checks tap."""
        return self.gather.output

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict


@dataclass(frozen=True)
class GraphAnalysis:
    """What one graph does about PLE. `suspects` are gathers that could be a lookup and were not understood."""

    graph: Graph
    lookups: tuple[Lookup, ...]
    splices: tuple[Splice, ...]
    embeddings: tuple[Node, ...]
    suspects: tuple[Node, ...]
    host_inputs: tuple[str, ...]

    @property
    def lookup(self) -> Lookup | None:
        """The only lookup, None where there are several or none."""
        return self.lookups[0] if len(self.lookups) == 1 else None

    @property
    def verdict(self) -> Verdict:
        verdicts = [lookup.verdict for lookup in self.lookups]
        if self.suspects:
            verdicts.append(Verdict.AMBIGUOUS)
        if self.host_inputs:
            verdicts.append(Verdict.HOST_SIDE)
        return worst(verdicts)


# A gather, its table, what becomes of its rows, and why they are PLE rows.
_Candidate = tuple[Node, Table, Downstream, tuple[str, ...]]


def analyse(graph: Graph, tokens: TokenFacts) -> GraphAnalysis:
    """Everything that can be said about PLE in a graph without weights and without running it.

    Raises BundleError where the pad id is not a row of the PLE table.
    """
    found: list[_Candidate] = []
    embeddings: list[tuple[Node, Table, Downstream]] = []
    others: list[tuple[Node, Table]] = []
    for node, table in recognise.id_gathers(graph):
        if recognise.gather_axis(node, table) != 0:
            others.append((node, table))
            continue
        downstream = follow(graph, node.output, table.width, _own_tail(table))
        downstream = recognise.with_configured_tail(table.width, downstream, tokens)
        evidence = recognise.ple_evidence(table.width, downstream, tokens)
        if evidence and recognise.ids_input(graph, node.operands["index"]):
            found.append((node, table, downstream, evidence))
        elif not evidence and recognise.is_token_embedding(graph, table, downstream, tokens):
            embeddings.append((node, table, downstream))
        else:
            others.append((node, table))

    largest_id = max(tokens.media.values(), default=0)
    if len({table.name for _, table, _ in embeddings if table.rows > largest_id}) > 1:
        # A model has one token embedding: of several that look like it, any may be a part of PLE.
        others += [(node, table) for node, table, _ in embeddings]
        embeddings = []
    scaled = _scaled(graph, [(node, downstream) for node, _, downstream, _ in found])
    of_embeddings = _scaled(graph, [(node, downstream) for node, _, downstream in embeddings])
    others = [item for item in others if item[0].address not in scaled | of_embeddings]
    splices = tuple(
        splice
        for _, table, downstream in embeddings
        for select in downstream.selects
        for splice in [_splice(graph, select, table, tokens)]
    )
    lookups = tuple(
        replace(_lookup(graph, *item, tokens, splices), scales=scaled.get(item[0].address, ""))
        for item in [*found, *_factors(graph, found, scaled)]
    )
    known = [*(item[0] for item in found), *(item[0] for item in embeddings)]
    selects = (select for _, _, downstream in embeddings for select in downstream.selects)
    features = {recognise.behind_views(graph, recognise.other_branch(select)) for select in selects}
    suspects = (node for node in _suspects(graph, known, others, lookups, tokens) if node.output not in features)
    hosts = () if lookups else tuple(v.name for v in graph.inputs if recognise.is_host_side(graph, v, tokens))
    return GraphAnalysis(
        graph,
        lookups,
        splices,
        tuple(node for node, *_ in embeddings),
        # A graph that is handed its PLE rows does not look them up: what else it gathers is not PLE.
        () if hosts else tuple(suspects),
        hosts,
    )


def _scaled(graph: Graph, gathers: Sequence[tuple[Node, Downstream]]) -> dict[str, str]:
    """Gathers that read a scale or a zero point for each row -> the gather of those rows."""
    return {
        factor.address: node.address
        for node, downstream in gathers
        for factor in downstream.factors
        if recognise.ids_input(graph, factor.operands["index"])
    }


def _factors(graph: Graph, found: Sequence[_Candidate], scaled: Mapping[str, str]) -> Iterator[_Candidate]:
    """The lookups of the scales of PLE rows: the pad row needs the pad row's scale."""
    for node, _, downstream, _ in found:
        for factor in downstream.factors:
            if scaled.get(factor.address) == node.address:
                table = graph.tables[factor.operands["data"]]
                yield factor, table, downstream, (f"scales the rows of {node.address}",)


def _own_tail(table: Table) -> tuple[int, int] | None:
    """(L, D) of a table `[V, L, D]`, which needs no reshape."""
    if len(table.shape) == 3 and min(table.shape[1:]) > 1:
        return table.shape[1], table.shape[2]
    return None


def _suspects(
    graph: Graph,
    known: Sequence[Node],
    others: Sequence[tuple[Node, Table]],
    lookups: Sequence[Lookup],
    tokens: TokenFacts,
) -> Iterator[Node]:
    """Reads of at least as many entries as there are ids, by what may be token ids, that nothing explains."""
    ids_inputs = {root for node in known for root in recognise.integer_roots(graph, node.operands["index"])}
    rows = tokens.vocabulary or max((lookup.table.rows for lookup in lookups), default=0)
    rows = rows or max(tokens.media.values(), default=0) + 1
    for node, table in others:
        roots = recognise.integer_roots(graph, node.operands["index"])
        entries = table.shape[recognise.gather_axis(node, table)]
        if entries >= rows and (not ids_inputs or roots & ids_inputs):
            yield node
    for node, roots in (*recognise.other_readers(graph, rows), *recognise.open_gathers(graph, tokens)):
        if not ids_inputs or roots & ids_inputs:
            yield node


def _lookup(
    graph: Graph,
    node: Node,
    table: Table,
    downstream: Downstream,
    evidence: tuple[str, ...],
    tokens: TokenFacts,
    splices: Sequence[Splice],
) -> Lookup:
    index = node.operands["index"]
    ids_input = recognise.ids_input(graph, index)
    assert ids_input is not None
    assert downstream.tail is not None
    path = (ids_input, *(step.native for step in trace(graph, index).nodes), node.native)
    judgement = _judge(graph, node, table, ids_input, downstream, tokens)
    if judgement.verdict is Verdict.RAW and any(splice.outside and not splice.ids for splice in splices):
        reason = "rows are spliced by ids outside the vocabulary, so the media ids are never fed"
        judgement = replace(judgement, verdict=Verdict.OTHER_SCHEME, reason=reason)
    layers, width = downstream.tail
    combined = recognise.combined(graph, downstream.sum) if downstream.sum else None
    used = recognise.layers_used(graph, combined, layers) if combined else None
    return Lookup(
        graph=graph.name,
        gather=node,
        index=_repeated(graph, index, ids_input),
        table=table,
        ids_input=ids_input,
        layers=layers,
        layer_width=width,
        scale=downstream.scale,
        evidence=evidence,
        path=path,
        combined=combined,
        layers_used=used,
        judgement=judgement,
    )


def _repeated(graph: Graph, index: str, ids_input: str) -> str:
    try:
        return repeated(graph, index, ids_input).value
    except NotAMap:
        return index


def _judge(
    graph: Graph, node: Node, table: Table, ids_input: str, downstream: Downstream, tokens: TokenFacts
) -> Judgement:
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
    return replace(judgement, narrowed=narrowed(graph, node.operands["index"], ids_input, clobbered))


def _zeroed(graph: Graph, downstream: Downstream, ids_input: str, ids: Ids) -> Ids:
    """Ids whose rows a mask behind the lookup overwrites with zeros or another constant."""
    hit = np.zeros(len(ids), bool)
    for _, mask in downstream.masks:
        hit |= map_ids(graph, _per_id(graph, mask), ids_input, ids) == 0
    for select in downstream.zeroing:
        condition = _per_id(graph, select.node.operands["condition"])
        hit |= map_ids(graph, condition, ids_input, ids).astype(bool) != select.kept_when_true
    zeroed: Ids = ids[hit]
    return zeroed


def _per_id(graph: Graph, value: str) -> str:
    """The value behind broadcasts and added axes, which has one element an id."""
    node = graph.producer(value)
    while node is not None and node.op in VIEW_OPS and node.op is not Op.CAST:
        value = node.operands["x"]
        node = graph.producer(value)
    return value


def _splice(graph: Graph, select: Select, table: Table, tokens: TokenFacts) -> Splice:
    """Which ids of the vocabulary take the other branch of a `where` that token-embedding rows meet."""
    condition = _per_id(graph, select.node.operands["condition"])
    rows = recognise.handed_in(graph, recognise.other_branch(select), table.width)
    splice = Splice(select.node, rows, condition, select.kept_when_true)
    roots = recognise.integer_roots(graph, condition)
    if len(roots) != 1:
        return replace(splice, reason="its condition does not come from the token ids alone")
    (ids_input,) = roots
    ids = domain(tokens, table.rows, graph.value(ids_input).dtype)
    try:
        taken = map_ids(graph, condition, ids_input, ids).astype(bool) != select.kept_when_true
    except NotAMap as error:
        return replace(splice, reason=f"its condition {error.reason}")
    inside = (ids >= 0) & (ids < (tokens.vocabulary or table.rows))
    spliced, outside = ids[taken & inside], ids[taken & ~inside]
    return replace(splice, ids=tuple(spliced.tolist()), outside=tuple(outside.tolist()))
