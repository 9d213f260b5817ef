"""Where an edit can take hold: at a value that still is the token id, or at a condition that nothing else reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from g4patch.cone import NotAMap, carriers, map_ids, shape_of, trace
from g4patch.ple import Lookup, Splice
from g4patch.shards import JOINED, index_uses
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Ids
from g4patch.view import MOVING_OPS, Graph, Node, Op, Use


@dataclass(frozen=True)
class Place:
    """Where to mask: `value`, which equals the id, as the `uses` read it.

    `casts` stand between it and them and feed other nodes too: they have to be made again behind the mask.
    """

    value: str
    uses: tuple[Use, ...]
    casts: tuple[Node, ...] = ()


def place_for_mask(
    graph: Graph, lookup: Lookup, dtypes: frozenset[str], pad_id: int, lookups: Sequence[Lookup] = ()
) -> Place | str:
    """The deepest value that still equals the id, and the use of it on the way to the gather.

    `dtypes` are those in which the format can compute a mask. Of the `lookups`, those that miss the same ids may read
    the value too. Returns the reason where there is no such place.
    """
    if lookup.shards:
        return _place_before_choice(graph, lookup, dtypes, pad_id)
    value, use = lookup.gather.operands["index"], Use(lookup.gather.address, "index")
    alike = {Use(one.gather.address, "index") for one in lookups if one.judgement.missing == lookup.judgement.missing}
    casts: list[Node] = []
    while not (
        graph.node(use.node).editable and graph.value(value).dtype in dtypes and _equals_id(graph, value, lookup)
    ):
        node = graph.producer(value)
        onward = carriers(graph, node) if node is not None else ()
        if node is None or node.op not in MOVING_OPS | {Op.ADD, Op.SUB} or len(onward) != 1:
            return "the index is not the token id, and no value on the way to it is"
        others = [at for at, reader in graph.consumers(value) if at != use and reader.op is not Op.SHAPE]
        if not casts and alike.issuperset(others):
            use = Use(node.address, onward[0])
        elif node.op is Op.CAST:
            casts.insert(0, node)
        else:
            return f"the index is not the token id, and {value} on the way to it feeds other nodes too"
        value = node.operands[onward[0]]
    return Place(value, (use,), tuple(casts))


def _place_before_choice(graph: Graph, lookup: Lookup, dtypes: frozenset[str], pad_id: int) -> Place | str:
    """The deepest value that equals the id and that all tables, and the choice between them, are read by.

    It is masked for what leads to this lookup alone. What leads elsewhere too is left, and must not need a mask.
    """
    cone = {node.address for node in trace(graph, lookup.index).nodes if node.native != JOINED}

    def readers(value: str) -> dict[Use, Node]:
        between = ((use, node) for use, node in graph.consumers(value) if use.node in cone and node.op is not Op.SHAPE)
        return dict([*between, *index_uses(lookup.gather, value)])

    value, found = lookup.ids_input, readers(lookup.ids_input)
    while len(found) == 1:
        (node,) = found.values()
        if node.op not in MOVING_OPS or not _equals_id(graph, node.output, lookup):
            break
        value, found = node.output, readers(node.output)
    if graph.value(value).dtype not in dtypes or not _equals_id(graph, value, lookup):
        return "no value that all tables are read by is the token id"
    shared = _feed_others(graph, lookup.gather)
    others = {use: node for use, node in found.items() if use.node in shared}
    for node in others.values():
        if not _is_same_for_pad(graph, node.output, lookup, pad_id):
            return f"{node.address} on the way to the index feeds other nodes too"
    own = {use: node for use, node in found.items() if use not in others}
    if not own or not all(node.editable for node in own.values()):
        return "the ids are read in a function that is called"
    return Place(value, tuple(own))


def _feed_others(graph: Graph, gather: Node) -> set[str]:
    """The nodes whose numbers reach an end of the graph in another way than through a gather."""
    needed, others = set(graph.outputs), set[str]()
    for node in reversed(graph.nodes):
        if node.address == gather.address or (node.outputs and needed.isdisjoint(node.outputs)):
            continue
        others.add(node.address)
        if node.op is not Op.SHAPE:
            needed.update(node.operands.values())
    return others


def _is_same_for_pad(graph: Graph, value: str, lookup: Lookup, pad_id: int) -> bool:
    """Whether a value is the same for the ids to mask as for the pad id."""
    ids = np.array([pad_id, *lookup.judgement.missing], np.int64)
    try:
        found = map_ids(graph, value, lookup.ids_input, ids)
    except NotAMap:
        return False
    return bool(np.all(found == found[0]))


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
        if graph.value(name).dtype in dtypes and _holds(graph, name, ids_input, shape, ids):
            return name, use
    return "no value beside the condition holds the token ids"


def condition_path(graph: Graph, splice: Splice) -> Iterator[str]:
    """The addresses of the nodes from a splice back to its condition: where widening it redirects a use."""
    yield splice.node.address
    value = splice.node.operands["condition"]
    while value != splice.condition and (node := graph.producer(value)) is not None:
        yield node.address
        value = node.operands["x"]


def _holds(graph: Graph, value: str, ids_input: str, shape: tuple[int, ...], ids: Ids) -> bool:
    """Whether a value of a shape is the id itself, for every id."""
    try:
        return shape_of(graph, value, ids_input) == shape and np.array_equal(map_ids(graph, value, ids_input, ids), ids)
    except NotAMap:
        return False
