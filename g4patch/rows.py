"""Which row of its table a gather reads for each id, where its index names rows, coordinates or single elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g4patch.cone import NotAMap, carriers, evaluated, map_ids, mappable, one_each, shape_of
from g4patch.lanes import Array
from g4patch.view import MOVING_OPS, Graph, Node, Op

# Ids by which it is seen how an index repeats them: for all ids it would be as large as the table.
_SAMPLE = 64


def map_rows(graph: Graph, gather: Node, shape: tuple[int, ...], ids_input: str, ids: NDArray[np.int64]) -> Array:
    """The row that a gather along axis 0 of a table of a shape reads for each token id: int64 `[N]` for ids `[N]`.

    Where its index repeats each id, by elements or by coordinates, it must read the whole row and nothing else.
    Raises NotAMap as `map_ids` does.
    """

    def rows(index: Array, count: int) -> Array:
        if gather.attributes.get("along"):
            return _by_element(index, count, shape)
        return _by_coordinates(index, count, shape) if gather.attributes.get("nd") else one_each(index, count)

    index = gather.operands["index"]
    mappable(graph, index, ids_input)
    row = repeated(graph, index, ids_input)
    if row.value == index:
        return evaluated(graph, index, ids_input, ids, rows).astype(np.int64)
    # What is in between only moves numbers, in the same way whatever they are.
    some = np.linspace(0, len(ids) - 1, _SAMPLE).astype(np.int64)
    seen = evaluated(graph, index, ids_input, ids[some], rows)
    found = numbers(graph, index, ids_input, ids)
    if not np.array_equal(found[some], seen):
        raise NotAMap("is not the one that its index repeats")
    return found.astype(np.int64)


def numbers(graph: Graph, value: str, ids_input: str, ids: NDArray[np.int64]) -> Array:
    """What a value holds, once or repeated, for each token id: `[N]` of its dtype for ids `[N]`. Raises NotAMap."""
    row = repeated(graph, value, ids_input)
    found = map_ids(graph, row.value, ids_input, ids)
    for cast in row.casts:
        found = cast_to(found, cast)
    return found


def cast_to(array: Array, cast: Node) -> Array:
    """What a cast makes of an array. Raises NotAMap for dtypes that numpy has not."""
    try:
        with np.errstate(all="ignore"):
            return array.astype(cast.attributes["dtype"])
    except TypeError:
        raise NotAMap(f"cannot be evaluated: {cast.native} at {cast.address}") from None


@dataclass(frozen=True)
class Repeated:
    """A value with one element an id, and the casts between it and an index that repeats it, in order."""

    value: str
    casts: tuple[Node, ...] = ()


def repeated(graph: Graph, index: str, ids_input: str) -> Repeated:
    """What an index repeats for each element, or coordinate, that it reads of a row: itself if it does not.

    Raises NotAMap where anything but moves and casts stands in between.
    """
    count = math.prod(shape_of(graph, ids_input, ids_input))
    value, casts = index, list[Node]()
    while (size := math.prod(shape_of(graph, value, ids_input))) != count:
        node = graph.producer(value)
        onward = carriers(graph, node) if node is not None and node.op in MOVING_OPS else ()
        if node is None or len(onward) != 1:
            raise NotAMap(f"has {size} elements for {count} ids")
        if node.op is Op.CAST:
            casts.insert(0, node)
        value = node.operands[onward[0]]
    return Repeated(value, tuple(casts))


def rows_rank(graph: Graph, gather: Node, table_rank: int, ids_input: str) -> int:
    """The rank of what a gather puts out. Raises NotAMap."""
    shape = shape_of(graph, gather.operands["index"], ids_input)
    if gather.attributes.get("along"):
        return len(shape)
    return len(shape) + table_rank - (1 + shape[-1] if gather.attributes.get("nd") and shape else 1)


def _by_element(index: Array, count: int, shape: tuple[int, ...]) -> Array:
    """Element `[n, w]` of the result is element `[index[n, w], w]` of the table."""
    if index.shape[2:] != shape[1:] or index.size != count * math.prod(shape[1:]):
        raise NotAMap("is read in part")
    return _same_for_all(index.reshape(count, -1))


def _by_coordinates(index: Array, count: int, shape: tuple[int, ...]) -> Array:
    """The last axis of the index holds a row and its coordinates in the next axes: all that there are, in order."""
    coordinates = index.shape[-1] if index.ndim > 1 else 0
    if not 0 < coordinates <= len(shape):
        raise NotAMap(f"is named by {coordinates} coordinates")
    inside = shape[1:coordinates]
    if index.size != count * math.prod(inside) * coordinates:
        raise NotAMap("is read in part")
    per_id = index.reshape(count, math.prod(inside), coordinates)
    if not np.array_equal(per_id[..., 1:], np.broadcast_to(_grid(inside), per_id[..., 1:].shape)):
        raise NotAMap("is read in part")
    return _same_for_all(per_id[..., 0])


def _grid(shape: tuple[int, ...]) -> Array:
    """The coordinates of all elements, in order: `[elements, axes]`."""
    return np.indices(shape).reshape(len(shape), math.prod(shape)).T


def _same_for_all(rows: Array) -> Array:
    if not np.all(rows == rows[:, :1]):
        raise NotAMap("is put together of several rows")
    first: Array = rows[:, 0]
    return first
