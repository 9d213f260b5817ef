"""Find the PLE lookups of a graph, evaluate which row each token id reads, and judge that.

"What is right" is Hugging Face's `Gemma4Model.forward`: media ids read the pad row, every other id its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from g4patch import recognise
from g4patch.cone import NotAMap, map_ids, shape_of, trace
from g4patch.downstream import Downstream, Select, follow
from g4patch.errors import BundleError
from g4patch.tokens import TokenFacts
from g4patch.view import VIEW_OPS, Graph, Node, Op, Table, Use

Ids = NDArray[np.int64]

# Ids just outside the vocabulary that are evaluated too: they show range masks and other ways to mark media rows.
_BEYOND = 8
# No vocabulary is larger; a declared one that is would only exhaust memory.
_LARGEST_VOCABULARY = 2**24


class Verdict(StrEnum):
    """What a lookup does with the token ids. In order of weight: the worst decides for a model."""

    CLOBBERED = "clobbered"  # an id reads a row that is neither its own nor what it should read
    ZERO_ROW = "zero-row"  # media rows are zeroed instead of reading the pad row
    AMBIGUOUS = "ambiguous"  # there may be a lookup that is not understood: nothing is claimed
    CONDITIONAL = "conditional"  # another input, or the position, decides which row is read
    RAW = "raw"  # every media id reads its own row
    PARTIAL = "partial"  # some media ids read the pad row, some their own
    OTHER_SCHEME = "other-scheme"  # the runtime marks media rows by negative or extended ids
    PATCHED = "patched"  # every media id reads the pad row, every other id its own
    HOST_SIDE = "host-side"  # the rows come in as a graph input
    NO_PLE = "no-ple"  # nothing in the graph looks PLE up


INCONCLUSIVE = frozenset({Verdict.AMBIGUOUS, Verdict.CONDITIONAL})


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that decides; no-ple where there are none."""
    order = list(Verdict)
    return min(verdicts, key=order.index, default=Verdict.NO_PLE)


@dataclass(frozen=True)
class RowMap:
    """Token id -> table row, for every id that was evaluated. Both arrays are int64 `[N]`, ids ascending."""

    ids: Ids
    rows: Ids

    def row(self, token: int) -> int | None:
        """The row that a token reads; None where the token was not evaluated."""
        at = int(np.searchsorted(self.ids, token))
        return int(self.rows[at]) if at < len(self.ids) and self.ids[at] == token else None

    def take(self, tokens: Ids) -> Ids:
        """Rows for tokens that were all evaluated."""
        rows: Ids = self.rows[np.searchsorted(self.ids, tokens)]
        return rows

    def between(self, low: int, high: int) -> RowMap:
        """The part for ids from `low` up to, but without, `high`."""
        inside = (self.ids >= low) & (self.ids < high)
        return RowMap(self.ids[inside], self.rows[inside])


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


@dataclass(frozen=True)
class Judgement:
    """What a lookup does, by value.

    `masked` are media ids that read the pad row, `missing` those that read their own; `clobbered` are ids that read a
    wrong row, `zeroed` media ids whose rows are overwritten with a constant after the lookup. `reason` is set where
    `row_map` could not be made or trusted.
    """

    verdict: Verdict
    row_map: RowMap | None = None
    masked: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    clobbered: tuple[int, ...] = ()
    zeroed: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Lookup:
    """One gather that reads the PLE table, and all that was found out about it.

    `combined` is the value that the layers get, None where nothing is summed; `layers_used` are the layers whose slices
    of it the graph takes, None where that is unclear. `scales` is the gather
    whose rows this one's scale, "" where it reads the PLE rows themselves.
    """

    graph: str
    gather: Node
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
    def index(self) -> str:
        return self.gather.operands["index"]

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
    hosts = () if lookups else tuple(v.name for v in graph.inputs if recognise.is_host_side(graph, v, tokens))
    return GraphAnalysis(
        graph,
        lookups,
        splices,
        tuple(node for node, *_ in embeddings),
        # A graph that is handed its PLE rows does not look them up: what else it gathers is not PLE.
        () if hosts else tuple(_suspects(graph, known, others, lookups, tokens)),
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


def domain(tokens: TokenFacts, rows: int, dtype: str | None) -> Ids:
    """Every id to evaluate: vocabulary, table rows, media ids, a few beyond, some negatives. Ascending, unique.

    `dtype` is that of the ids input: what it cannot hold cannot be fed. Raises BundleError for absurd sizes.
    """
    media = list(tokens.media.values())
    size = max(tokens.vocabulary or 0, rows)
    if max(size, *media, 0) > _LARGEST_VOCABULARY:
        raise BundleError(f"a vocabulary of {max(size, *media):,} ids is not plausible", "is the file damaged?")
    beyond = sorted({*range(size, size + _BEYOND), *(token for token in media if token >= size)})
    negatives = sorted({-1, -2, -size, *(-token for token in media if token)})
    ids = np.concatenate([np.array(negatives), np.arange(size), np.array(beyond)]).astype(np.int64)
    if dtype is not None:
        # By name: formats have integers of a few bits, which numpy has not.
        bits, unsigned = int(dtype.removeprefix("u").removeprefix("int")), dtype.startswith("u")
        lowest, highest = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        ids = ids[(ids >= lowest) & (ids <= min(highest, np.iinfo(np.int64).max))]
    return ids


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
        rows = map_ids(graph, node.operands["index"], ids_input, ids).astype(np.int64)
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
    return judge(row_map, zeroed, tokens, table.rows)


def judge(row_map: RowMap, zeroed: Ids, tokens: TokenFacts, rows: int) -> Judgement:
    """Compare a row map, and the ids whose rows are zeroed afterwards, with what is right.

    `rows` is the number of the table's rows: the vocabulary, where no source states it.
    """
    media, pad = list(tokens.media.values()), tokens.pad_id
    text = row_map.between(0, tokens.vocabulary or rows)
    text_ids = text.ids[~np.isin(text.ids, media)]
    offset = _offset(row_map.take(text_ids) - text_ids)
    wrong = text_ids[(row_map.take(text_ids) != text_ids + offset) | np.isin(text_ids, zeroed)]
    rows_read = {token: row_map.row(token) for token in media}
    masked = tuple(token for token, row in rows_read.items() if row == pad + offset)
    missing = tuple(token for token, row in rows_read.items() if row == token + offset and token not in masked)
    clobbered = (*(token for token in media if token not in masked + missing), *wrong.tolist())
    zeroed_media = sorted(set(media) & set(zeroed.tolist()))
    verdict = _verdict(missing, clobbered, zeroed_media, tokens)
    return Judgement(verdict, row_map, masked, missing, clobbered, tuple(zeroed_media))


def _offset(differences: Ids) -> int:
    """A table may hold its rows shifted by a constant; 0 where the differences are not all the same."""
    first = int(differences[0]) if len(differences) else 0
    return first if np.all(differences == first) else 0


def _verdict(
    missing: Sequence[int], clobbered: Sequence[int], zeroed_media: Sequence[int], tokens: TokenFacts
) -> Verdict:
    stated = {token for modality, token in tokens.media.items() if modality not in tokens.only_by_default}
    if clobbered:
        return Verdict.CLOBBERED
    if zeroed_media:
        return Verdict.ZERO_ROW
    if not stated & set(missing):
        return Verdict.PATCHED
    return Verdict.RAW if stated <= set(missing) else Verdict.PARTIAL


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


@dataclass(frozen=True)
class Place:
    """Where to mask: `value`, which equals the id, as `use` reads it.

    `casts` stand between the two and feed other nodes too: they have to be made again behind the mask.
    """

    value: str
    use: Use
    casts: tuple[Node, ...] = ()


def place_for_mask(graph: Graph, lookup: Lookup, dtypes: frozenset[str], lookups: Sequence[Lookup] = ()) -> Place | str:
    """The deepest value that still equals the id, and the use of it on the way to the gather.

    `dtypes` are those in which the format can compute a mask. Of the `lookups`, those that miss the same ids may read
    the value too. Returns the reason where there is no such place.
    """
    value, use = lookup.index, Use(lookup.gather.address, "index")
    alike = {Use(one.gather.address, "index") for one in lookups if one.judgement.missing == lookup.judgement.missing}
    casts: list[Node] = []
    while not (
        graph.node(use.node).editable and graph.value(value).dtype in dtypes and _equals_id(graph, value, lookup)
    ):
        node = graph.producer(value)
        onward = [key for key, name in node.operands.items() if name not in graph.constants] if node else []
        if node is None or node.op not in VIEW_OPS | {Op.ADD, Op.SUB} or len(onward) != 1:
            return "the index is not the token id, and no value on the way to it is"
        others = [at for at, reader in graph.consumers(value) if at != use and reader.op is not Op.SHAPE]
        if not casts and alike.issuperset(others):
            use = Use(node.address, onward[0])
        elif node.op is Op.CAST:
            casts.insert(0, node)
        else:
            return f"the index is not the token id, and {value} on the way to it feeds other nodes too"
        value = node.operands[onward[0]]
    return Place(value, use, tuple(casts))


def _equals_id(graph: Graph, value: str, lookup: Lookup) -> bool:
    """Whether a value is the id itself for every id that is neither masked already nor outside the table."""
    row_map = lookup.judgement.row_map
    assert row_map is not None
    inside = row_map.between(0, lookup.table.rows)
    try:
        values = map_ids(graph, value, lookup.ids_input, inside.ids)
    except NotAMap:
        return False
    return bool(np.all((values == inside.ids) | np.isin(inside.ids, lookup.judgement.masked)))


def place_for_widening(
    graph: Graph, splice: Splice, tokens: TokenFacts, dtypes: frozenset[str]
) -> tuple[str, Use] | str:
    """The ids in the shape of a splice's condition, and the use of the condition on the way to the splice.

    Returns the reason where there is no such place.
    """
    value, use = splice.node.operands["condition"], Use(splice.node.address, "condition")
    while value != splice.condition:
        node = graph.producer(value)
        if node is None or len(graph.uses(value)) > 1:
            return f"{value}, made of the condition, feeds other nodes too"
        use, value = Use(node.address, "x"), node.operands["x"]
    if not graph.node(use.node).editable:
        return "the splice is in a function that is called"
    cone = trace(graph, splice.condition)
    candidates = (*cone.inputs, *(node.output for node in cone.nodes))
    (ids_input,) = cone.inputs
    shape = shape_of(graph, splice.condition, ids_input)
    ids = np.arange(tokens.vocabulary or max(tokens.media.values()) + 1)
    for name in candidates:
        if graph.value(name).dtype not in dtypes or shape_of(graph, name, ids_input) != shape:
            continue
        if np.array_equal(map_ids(graph, name, ids_input, ids), ids):
            return name, use
    return "no value beside the condition holds the token ids"
