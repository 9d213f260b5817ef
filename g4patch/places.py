"""Where an edit can take hold: at a value that still is the token id, or at a condition that nothing else reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from g4patch.cone import NotAMap, carriers, map_ids, shape_of, trace
from g4patch.ple import Lookup, Splice
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Ids
from g4patch.view import MOVING_OPS, Graph, Node, Op, Use


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
