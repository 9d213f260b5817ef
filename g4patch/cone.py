"""Evaluate the cone of a value: the integer ops between the graph inputs and it, for every token id at once.

The evaluator runs on batches: each operand is an array with one extra leading axis, the batch of prompts, or a
constant without it. A static `[1, 8]` graph and a dynamic one are fed alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.view import Graph, Node, Op, Shape, Value

Array = NDArray[Any]

# Stand in for a dimension that the graph leaves open. Two lengths, since a cone may depend on the length it is fed;
# both odd and different from 1, so that no power-of-two padding or broadcast hides a difference.
_OPEN_LENGTHS = (9, 5)
_SHUFFLE_SEED = 4
# Prompts longer than this are nobody's static shape; a declared one is an attempt to exhaust memory.
_LONGEST_PROMPT = 2**20
# A cone over every id of the largest vocabulary needs fewer.
_MOST_ELEMENTS = 2**25


class NotAMap(Exception):
    """A value is not a function of the token id alone. `conditional`: another input or the position decides."""

    def __init__(self, reason: str, *, conditional: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.conditional = conditional


@dataclass(frozen=True)
class Cone:
    """What a value is computed from: evaluable nodes in order, the graph inputs, the opaque nodes at its edge."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    opaque: tuple[Node, ...]


def trace(graph: Graph, value: str) -> Cone:
    """Walk back from a value to graph inputs, constants, tables, and the first ops that cannot be evaluated."""
    nodes: dict[str, Node] = {}
    inputs: dict[str, None] = {}
    opaque: dict[str, Node] = {}
    stack = [value]
    seen: set[str] = set()
    while stack:
        name = stack.pop()
        if name in seen or name in graph.constants:
            continue
        seen.add(name)
        if graph.input(name) is not None:
            inputs[name] = None
            continue
        node = graph.producer(name)
        if node is None:
            continue
        if node.op in _EVALUATORS:
            nodes[node.address] = node
            stack.extend(node.operands.values())
        else:
            opaque[node.address] = node
    ordered = tuple(node for node in graph.nodes if node.address in nodes) if nodes else ()
    return Cone(ordered, tuple(inputs), tuple(opaque.values()))


def constants(graph: Graph, value: str) -> tuple[int, ...]:
    """The integers that a value is computed with: ids that a mask names, bounds, offsets."""
    names = {name for node in trace(graph, value).nodes for name in node.operands.values()}
    return tuple(sorted({number for name in names for number in graph.integers(name) or ()}))


def depends_on(graph: Graph, value: str) -> frozenset[str]:
    """The graph inputs a value depends on through any op, opaque ones too."""
    found: set[str] = set()
    seen: set[str] = set()
    stack = [value]
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if graph.input(name) is not None:
            found.add(name)
        node = graph.producer(name)
        if node is not None:
            stack.extend(node.operands.values())
    return frozenset(found)


def map_ids(graph: Graph, value: str, ids_input: str, ids: NDArray[np.int64]) -> Array:
    """Evaluate a value for each token id: an array `[N]` of the value's dtype for ids `[N]`.

    Raises NotAMap where the value cannot be evaluated, has not one element an id, or depends on anything else: other
    inputs, the position in the prompt (tested by shuffling the ids), the length of the prompt.
    """
    cone = trace(graph, value)
    others = [name for name in cone.inputs if name != ids_input]
    if others:
        raise NotAMap(f"depends on {', '.join(others)}", conditional=True)
    if cone.opaque:
        node = cone.opaque[0]
        raise NotAMap(f"cannot be evaluated: {node.native} at {node.address}")
    if ids_input not in cone.inputs:
        raise NotAMap("does not depend on the token ids")
    first, second = (_run(graph, cone, value, ids_input, ids, length) for length in _OPEN_LENGTHS)
    order = np.random.default_rng(_SHUFFLE_SEED).permutation(len(ids))
    shuffled = np.empty_like(first)
    shuffled[order] = _run(graph, cone, value, ids_input, ids[order], _OPEN_LENGTHS[0])
    if not (_same(first, second) and _same(first, shuffled)):
        raise NotAMap("depends on the position in the prompt", conditional=True)
    return first


def shape_of(graph: Graph, value: str, ids_input: str) -> tuple[int, ...]:
    """The shape of a value for one prompt, with open dimensions as the evaluator feeds them. Raises NotAMap."""
    declared = graph.value(ids_input)
    feed = prompts(np.zeros(1, np.int64), declared.shape, _OPEN_LENGTHS[0]).astype(_dtype(declared))
    return _evaluate(graph, trace(graph, value), value, {ids_input: _Lane(feed, True)}).shape[1:]


def prompts(ids: NDArray[np.int64], shape: Shape | None, open_length: int) -> NDArray[np.int64]:
    """Ids `[N]` as prompts `[P, *shape]` of a graph input's shape, open dims taken as `open_length`, ids repeated to
    fill the last one. Raises NotAMap for shapes that no prompt has.
    """
    one = _prompt_shape(shape, open_length)
    per_prompt = math.prod(one)
    if not 0 < per_prompt <= _LONGEST_PROMPT:
        raise NotAMap(f"cannot be evaluated: the graph takes {per_prompt:,} ids at once")
    count = -(-len(ids) // per_prompt)
    return np.resize(ids, count * per_prompt).reshape(count, *one)


def _same(left: Array, right: Array) -> bool:
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind == "f"))


def _run(graph: Graph, cone: Cone, value: str, ids_input: str, ids: NDArray[np.int64], open_length: int) -> Array:
    declared = graph.value(ids_input)
    fed = prompts(ids, declared.shape, open_length).astype(_dtype(declared))
    result = _evaluate(graph, cone, value, {ids_input: _Lane(fed, True)})
    if result.size != fed.size:
        raise NotAMap(f"has {result.size // len(fed)} elements for {fed.size // len(fed)} ids")
    flat: Array = result.reshape(-1)[: len(ids)]
    return flat


def _dtype(declared: Value) -> np.dtype[Any]:
    try:
        return np.dtype(declared.dtype or "int64")
    except TypeError:
        raise NotAMap(f"cannot be evaluated: {declared.name} is {declared.dtype}") from None


def _prompt_shape(shape: Shape | None, open_length: int) -> tuple[int, ...]:
    """The shape to feed: static dims as declared, an open batch as 1, other open dims as `open_length`."""
    if shape is None:
        return (1, open_length)
    if shape == (None,):
        return (open_length,)
    return tuple(dim if dim is not None else (1 if axis == 0 else open_length) for axis, dim in enumerate(shape))


@dataclass(frozen=True)
class _Lane:
    """An array, and whether its first axis is the batch of prompts."""

    array: Array
    batched: bool

    @property
    def rank(self) -> int:
        return self.array.ndim - self.batched


def _evaluate(graph: Graph, cone: Cone, value: str, feeds: dict[str, _Lane]) -> Array:
    lanes = dict(feeds)

    def lane(name: str) -> _Lane:
        if name not in lanes:
            constant = graph.constants.get(name)
            if constant is None:
                raise NotAMap(f"cannot be evaluated: {name} is not a small constant")
            lanes[name] = _Lane(constant, False)
        return lanes[name]

    with np.errstate(all="ignore"):
        for node in cone.nodes:
            operands = {key: lane(name) for key, name in node.operands.items()}
            try:
                lanes[node.output] = _EVALUATORS[node.op](node, operands)
            except (ValueError, IndexError, TypeError, KeyError, OverflowError) as error:
                raise NotAMap(f"cannot be evaluated: {node.native} at {node.address}: {error}") from error
    result = lane(value)
    if not result.batched:
        raise NotAMap("does not depend on the token ids")
    return result.array


def _align(lanes: Iterable[_Lane]) -> tuple[list[Array], bool]:
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


_Evaluator = Callable[[Node, dict[str, _Lane]], _Lane]


def _elementwise(function: Callable[..., Array], *names: str) -> _Evaluator:
    def run(node: Node, operands: dict[str, _Lane]) -> _Lane:
        arrays, batched = _align(operands[name] for name in names)
        _refuse_huge(np.broadcast_shapes(*(array.shape for array in arrays)))
        return _Lane(np.asarray(function(*arrays)), batched)

    return run


def _clip(node: Node, operands: dict[str, _Lane]) -> _Lane:
    present = [name for name in ("low", "high") if name in operands]
    arrays, batched = _align(operands[name] for name in ("x", *present))
    bounds = dict(zip(present, arrays[1:], strict=True))
    return _Lane(np.clip(arrays[0], bounds.get("low"), bounds.get("high")), batched)


def _cast(node: Node, operands: dict[str, _Lane]) -> _Lane:
    lane = operands["x"]
    return _Lane(lane.array.astype(node.attributes["dtype"]), lane.batched)


def _identity(node: Node, operands: dict[str, _Lane]) -> _Lane:
    return operands["x"]


def _reshape(node: Node, operands: dict[str, _Lane]) -> _Lane:
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
    return _Lane(lane.array.reshape(*batch, *wanted), lane.batched)


def _expand(node: Node, operands: dict[str, _Lane]) -> _Lane:
    lane = operands["x"]
    if operands["shape"].batched:
        raise ValueError("the shape depends on the token ids")
    target = tuple(int(size) for size in operands["shape"].array.reshape(-1))
    own = lane.array.shape[lane.batched :]
    shape = np.broadcast_shapes(own, target)
    _refuse_huge((len(lane.array) if lane.batched else 1, *shape))
    if lane.batched:
        padded = lane.array.reshape(lane.array.shape[0], *(1,) * (len(shape) - len(own)), *own)
        return _Lane(np.broadcast_to(padded, (lane.array.shape[0], *shape)), True)
    return _Lane(np.broadcast_to(lane.array, shape), False)


def _expand_dims(node: Node, operands: dict[str, _Lane]) -> _Lane:
    lane = operands["x"]
    axes = node.attributes["axes"]
    rank = lane.rank + len(axes)
    at = tuple(sorted((axis % rank) + lane.batched for axis in axes))
    return _Lane(np.expand_dims(lane.array, at), lane.batched)


def _squeeze(node: Node, operands: dict[str, _Lane]) -> _Lane:
    lane = operands["x"]
    own = lane.array.shape[lane.batched :]
    axes = node.attributes.get("axes") or tuple(i for i, size in enumerate(own) if size == 1)
    at = tuple((axis % lane.rank) + lane.batched for axis in axes)
    return _Lane(np.squeeze(lane.array, at), lane.batched)


def _shape(node: Node, operands: dict[str, _Lane]) -> _Lane:
    lane = operands["x"]
    sizes = lane.array.shape[lane.batched :]
    return _Lane(np.array(sizes[slice(*node.attributes.get("range", (None, None)))], np.int64), False)


def _concat(node: Node, operands: dict[str, _Lane]) -> _Lane:
    lanes = [operands[str(i)] for i in range(len(operands))]
    if any(lane.batched for lane in lanes):
        raise ValueError("concatenates token ids")
    _refuse_huge((sum(lane.array.size for lane in lanes),))
    return _Lane(np.concatenate([lane.array for lane in lanes], node.attributes["axis"]), False)


def _gather(node: Node, operands: dict[str, _Lane]) -> _Lane:
    """A lookup in a small constant, as in shape arithmetic or a table of ids."""
    data, index = operands["data"], operands["index"]
    if data.batched:
        raise ValueError("gathers from token ids")
    if node.attributes.get("nd"):
        raise ValueError("gathers by coordinates")
    axis = node.attributes["axis"]
    if axis % data.rank != 0:
        raise ValueError("gathers along an inner axis")
    _refuse_huge((*index.array.shape, *data.array.shape[1:]))
    return _Lane(np.take(data.array, index.array, axis=0), index.batched)


_EVALUATORS: dict[Op, _Evaluator] = {
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
    Op.GATHER: _gather,
}
