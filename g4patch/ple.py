"""Find the PLE lookups and the splices of a graph, and evaluate for every token id what they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from g4patch import recognise
from g4patch.cone import NotAMap, map_ids, per_id, trace
from g4patch.downstream import Downstream, Select, follow
from g4patch.lookups import judge_lookup, row_value
from g4patch.shards import JOINED, Shard, joined, shards
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Judgement, Verdict, domain, worst
from g4patch.view import Graph, Node, Table


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

    `index` is the row that is read for each id: the gather's index, or what that repeats. Of a vocabulary that is split
    over several tables, `gather` is one from them all, which stands for the `where` between them in the joined graph.
    `combined` is the value that the layers get, None where nothing is summed; `layers_used` are the layers whose slices
    of it the graph takes, None where that is unclear. `scales` is the gather
    whose rows this one's scale, "" where it reads the PLE rows themselves. `flat` is D where `combined` is `[.., L*D]`,
    else 0.
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
    flat: int = 0

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The tables of a split vocabulary, whose gathers this one stands for; else nothing."""
        return shards(self.gather)

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

    The graph of the result is the joined one, see `g4patch.shards`. Raises BundleError where the pad id is not a row of
    the PLE table.
    """
    graph = joined(graph)
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
        if _entries(node, table, others) >= rows and (not ids_inputs or roots & ids_inputs):
            yield node
    for node, roots in (*recognise.other_readers(graph, rows), *recognise.open_gathers(graph, tokens)):
        if not ids_inputs or roots & ids_inputs:
            yield node


def _entries(node: Node, table: Table, others: Sequence[tuple[Node, Table]]) -> int:
    """What a gather chooses from: of rows, with those of its table's like, over which a vocabulary may be split."""
    axis = recognise.gather_axis(node, table)
    alike = {one.name: one.rows for _, one in others if one.shape[1:] == table.shape[1:]}
    return sum(alike.values()) if axis == 0 else table.shape[axis]


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
    steps = (step.native for step in trace(graph, index).nodes if step.native != JOINED)
    path = (ids_input, *steps, node.native)
    judgement = judge_lookup(graph, node, table, ids_input, downstream, tokens)
    if judgement.verdict is Verdict.RAW and any(splice.outside and not splice.ids for splice in splices):
        reason = "rows are spliced by ids outside the vocabulary, so the media ids are never fed"
        judgement = replace(judgement, verdict=Verdict.OTHER_SCHEME, reason=reason)
    layers, width = downstream.tail
    combined = recognise.combined(graph, downstream.sum) if downstream.sum else None
    flat = width if downstream.flat else 0
    used = recognise.layers_used(graph, combined, layers, flat) if combined else None
    return Lookup(
        graph=graph.name,
        gather=node,
        index=row_value(graph, index, ids_input),
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
        flat=flat,
    )


def _splice(graph: Graph, select: Select, table: Table, tokens: TokenFacts) -> Splice:
    """Which ids of the vocabulary take the other branch of a `where` that token-embedding rows meet."""
    condition = per_id(graph, select.node.operands["condition"])
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
