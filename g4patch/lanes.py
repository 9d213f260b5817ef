"""One small function an op of the cone: numpy arrays in, numpy arrays out, for a batch of prompts at once.

The batch is an extra first axis, as if each op were mapped over prompts one by one: constants have none, and operands
of different rank are aligned prompt by prompt. Functions raise ValueError and the like for what they cannot do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.view import Node, Op

Array = NDArray[Any]

# A cone over every id of the largest vocabulary needs fewer.
_MOST_ELEMENTS = 2**25


@dataclass(frozen=True)
class Lane:
    """An array, and whether its first axis is the batch of prompts."""

    array: Array
    batched: bool

    @property
    def rank(self) -> int:
        return self.array.ndim - self.batched


def _align(lanes: Iterable[Lane]) -> tuple[list[Array], bool]:
    """Arrays that broadcast against each other prompt by prompt."""
    lanes = list(lanes)
    rank = max(lane.rank for lane in lanes)
    arrays = []
    for lane in lanes:
        array = lane.array
        if lane.batched:
            array = array.reshape(array.shape[0], *(1,) * (rank - lane.rank), *array.shape[1:])
        arrays.append(array)
    return arrays, any(lane.batched for lane in lanes)


def _refuse_huge(shape: tuple[int, ...]) -> None:
    """A few ops that repeat their operands would fill any memory."""
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"has {math.prod(shape):,} elements")


_Evaluator = Callable[[Node, dict[str, Lane]], Lane]


def _elementwise(function: Callable[..., Array], *names: str) -> _Evaluator:
    def run(node: Node, operands: dict[str, Lane]) -> Lane:
        arrays, batched = _align(operands[name] for name in names)
        _refuse_huge(np.broadcast_shapes(*(array.shape for array in arrays)))
        return Lane(np.asarray(function(*arrays)), batched)

    return run


def _clip(node: Node, operands: dict[str, Lane]) -> Lane:
    present = [name for name in ("low", "high") if name in operands]
    arrays, batched = _align(operands[name] for name in ("x", *present))
    bounds = dict(zip(present, arrays[1:], strict=True))
    return Lane(np.clip(arrays[0], bounds.get("low"), bounds.get("high")), batched)


def _cast(node: Node, operands: dict[str, Lane]) -> Lane:
    lane = operands["x"]
    return Lane(lane.array.astype(node.attributes["dtype"]), lane.batched)


def _identity(node: Node, operands: dict[str, Lane]) -> Lane:
    return operands["x"]


def _reshape(node: Node, operands: dict[str, Lane]) -> Lane:
    lane = operands["x"]
    if operands["shape"].batched:
        raise ValueError("the shape depends on the token ids")
    own = lane.array.shape[lane.batched :]
    target = operands["shape"].array.reshape(-1)
    copied = not node.attributes.get("allowzero")
    wanted = [own[i] if size == 0 and copied else int(size) for i, size in enumerate(target)]
    batch = lane.array.shape[:1] if lane.batched else ()
    if -1 in wanted:
        known = math.prod(size for size in wanted if size != -1)
        wanted[wanted.index(-1)] = math.prod(own) // known
    return Lane(lane.array.reshape(*batch, *wanted), lane.batched)


def _expand(node: Node, operands: dict[str, Lane]) -> Lane:
    lane = operands["x"]
    if operands["shape"].batched:
        raise ValueError("the shape depends on the token ids")
    target = tuple(int(size) for size in operands["shape"].array.reshape(-1))
    own = lane.array.shape[lane.batched :]
    shape = np.broadcast_shapes(own, target)
    _refuse_huge((len(lane.array) if lane.batched else 1, *shape))
    if lane.batched:
        padded = lane.array.reshape(lane.array.shape[0], *(1,) * (len(shape) - len(own)), *own)
        return Lane(np.broadcast_to(padded, (lane.array.shape[0], *shape)), True)
    return Lane(np.broadcast_to(lane.array, shape), False)


def _expand_dims(node: Node, operands: dict[str, Lane]) -> Lane:
    lane = operands["x"]
    axes = node.attributes["axes"]
    rank = lane.rank + len(axes)
    at = tuple(sorted((axis % rank) + lane.batched for axis in axes))
    return Lane(np.expand_dims(lane.array, at), lane.batched)


def _squeeze(node: Node, operands: dict[str, Lane]) -> Lane:
    lane = operands["x"]
    own = lane.array.shape[lane.batched :]
    axes = node.attributes.get("axes") or tuple(i for i, size in enumerate(own) if size == 1)
    at = tuple((axis % lane.rank) + lane.batched for axis in axes)
    return Lane(np.squeeze(lane.array, at), lane.batched)


def _shape(node: Node, operands: dict[str, Lane]) -> Lane:
    lane = operands["x"]
    sizes = lane.array.shape[lane.batched :]
    return Lane(np.array(sizes[slice(*node.attributes.get("range", (None, None)))], np.int64), False)


def _concat(node: Node, operands: dict[str, Lane]) -> Lane:
    arrays, batched = _numbered(operands)
    rank, axis = arrays[0].ndim - batched, node.attributes["axis"]
    return Lane(np.concatenate(arrays, _axis(axis, rank) + batched), batched)


def _stack(node: Node, operands: dict[str, Lane]) -> Lane:
    arrays, batched = _numbered(operands)
    rank, axis = arrays[0].ndim - batched, node.attributes["axis"]
    return Lane(np.stack(arrays, _axis(axis, rank + 1) + batched), batched)


def _numbered(operands: dict[str, Lane]) -> tuple[list[Array], bool]:
    """The operands 0, 1, ...: if one has a batch, all have it, and none is broadcast otherwise."""
    lanes = [operands[str(i)] for i in range(len(operands))]
    batch = next((len(lane.array) for lane in lanes if lane.batched), 1)
    _refuse_huge((sum(lane.array.size * (1 if lane.batched else batch) for lane in lanes),))
    batched = any(lane.batched for lane in lanes)
    arrays = [
        lane.array if lane.batched or not batched else np.broadcast_to(lane.array, (batch, *lane.array.shape))
        for lane in lanes
    ]
    return arrays, batched


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"has no axis {axis}")
    return axis % rank


def _tile(node: Node, operands: dict[str, Lane]) -> Lane:
    lane = operands["x"]
    if operands["repeats"].batched:
        raise ValueError("the repeats depend on the token ids")
    repeats = [int(count) for count in operands["repeats"].array.reshape(-1)]
    if len(repeats) != lane.rank:
        raise ValueError(f"repeats {len(repeats)} axes of {lane.rank}")
    _refuse_huge((lane.array.size, *repeats))
    return Lane(np.tile(lane.array, [1] * lane.batched + repeats), lane.batched)


def _gather(node: Node, operands: dict[str, Lane]) -> Lane:
    """A lookup in a small constant, as in shape arithmetic or a table of ids."""
    data, index = operands["data"], operands["index"]
    if data.batched:
        raise ValueError("gathers from token ids")
    if node.attributes.get("nd") or node.attributes.get("along"):
        raise ValueError("gathers by coordinates")
    axis = node.attributes["axis"]
    if axis % data.rank != 0:
        raise ValueError("gathers along an inner axis")
    _refuse_huge((*index.array.shape, *data.array.shape[1:]))
    return Lane(np.take(data.array, index.array, axis=0), index.batched)


EVALUATORS: dict[Op, _Evaluator] = {
    Op.WHERE: _elementwise(np.where, "condition", "x", "y"),
    Op.EQUAL: _elementwise(np.equal, "x", "y"),
    Op.OR: _elementwise(np.logical_or, "x", "y"),
    Op.AND: _elementwise(np.logical_and, "x", "y"),
    Op.NOT: _elementwise(np.logical_not, "x"),
    Op.GE: _elementwise(np.greater_equal, "x", "y"),
    Op.GT: _elementwise(np.greater, "x", "y"),
    Op.LE: _elementwise(np.less_equal, "x", "y"),
    Op.LT: _elementwise(np.less, "x", "y"),
    Op.ADD: _elementwise(np.add, "x", "y"),
    Op.SUB: _elementwise(np.subtract, "x", "y"),
    Op.MUL: _elementwise(np.multiply, "x", "y"),
    Op.CLIP: _clip,
    Op.CAST: _cast,
    Op.IDENTITY: _identity,
    Op.RESHAPE: _reshape,
    Op.EXPAND: _expand,
    Op.EXPAND_DIMS: _expand_dims,
    Op.SQUEEZE: _squeeze,
    Op.SHAPE: _shape,
    Op.CONCAT: _concat,
    Op.STACK: _stack,
    Op.TILE: _tile,
    Op.GATHER: _gather,
}
