"""Evaluate the cone of a value: the integer ops between the graph inputs and it, for every token id at once.

Ids are fed as a batch of prompts of the graph's own shape, so that a static `[1, 8]` graph and a dynamic one are fed
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.lanes import EVALUATORS, Array, Lane
from g4patch.view import SIZES, VIEW_OPS, Graph, Node, Op, Shape, Value

# Stand in for a dimension that the graph leaves open. Two lengths, since a cone may depend on the length it is fed;
# both odd and different from 1, so that no power-of-two padding or broadcast hides a difference.
_OPEN_LENGTHS = (9, 5)
_SHUFFLE_SEED = 4
# Prompts longer than this are nobody's static shape; a declared one is an attempt to exhaust memory.
_LONGEST_PROMPT = 2**20


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
        if node.op in EVALUATORS:
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


def depends_on(graph: Graph, value: str, leave: Collection[str] = ()) -> frozenset[str]:
    """The graph inputs a value depends on through any op, opaque ones too; not through operands named in `leave`."""
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
            stack.extend(source for operand, source in node.operands.items() if operand not in leave)
    return frozenset(found)


def map_ids(graph: Graph, value: str, ids_input: str, ids: NDArray[np.int64]) -> Array:
    """Evaluate a value for each token id: an array `[N]` of the value's dtype for ids `[N]`.

    Raises NotAMap where the value cannot be evaluated, has not one element an id, or depends on anything else: other
    inputs, the position in the prompt (tested by shuffling the ids), the length of the prompt.
    """
    return evaluated(graph, value, ids_input, ids, one_each)


def carriers(graph: Graph, node: Node) -> tuple[str, ...]:
    """The operands of a node through which the numbers of graph inputs come, and not only their shapes."""
    return tuple(
        operand
        for operand, name in node.operands.items()
        if operand not in SIZES and depends_on(graph, name, leave=SIZES)
    )


def evaluated(
    graph: Graph, value: str, ids_input: str, ids: NDArray[np.int64], per_id: Callable[[Array, int], Array]
) -> Array:
    """Evaluate a value and take what it says of each id by `per_id`: prompts `[P, ...]` of N ids -> `[N]`."""
    cone, declared = mappable(graph, value, ids_input), graph.value(ids_input)

    def run(ids: NDArray[np.int64], open_length: int) -> Array:
        fed = prompts(ids, declared.shape, open_length).astype(_dtype(declared))
        return per_id(_evaluate(graph, cone, value, {ids_input: Lane(fed, True)}), fed.size)[: len(ids)]

    first, second = (run(ids, length) for length in _OPEN_LENGTHS)
    order = np.random.default_rng(_SHUFFLE_SEED).permutation(len(ids))
    shuffled = np.empty_like(first)
    shuffled[order] = run(ids[order], _OPEN_LENGTHS[0])
    if not (_same(first, second) and _same(first, shuffled)):
        raise NotAMap("depends on the position in the prompt", conditional=True)
    return first


def mappable(graph: Graph, value: str, ids_input: str) -> Cone:
    """The cone of a value, if that is made of the token ids alone by ops that can be evaluated. Raises NotAMap."""
    cone = trace(graph, value)
    others = [name for name in cone.inputs if name != ids_input]
    if others:
        raise NotAMap(f"depends on {', '.join(others)}", conditional=True)
    if cone.opaque:
        node = cone.opaque[0]
        raise NotAMap(f"cannot be evaluated: {node.native} at {node.address}")
    if ids_input not in cone.inputs:
        raise NotAMap("does not depend on the token ids")
    return cone


def per_id(graph: Graph, value: str) -> str:
    """The value behind broadcasts and added axes, which has one element an id."""
    node = graph.producer(value)
    while node is not None and node.op in VIEW_OPS and node.op is not Op.CAST:
        value = node.operands["x"]
        node = graph.producer(value)
    return value


def shape_of(graph: Graph, value: str, ids_input: str, open_length: int = _OPEN_LENGTHS[0]) -> tuple[int, ...]:
    """The shape of a value for one prompt, with open dimensions as the evaluator feeds them. Raises NotAMap."""
    declared = graph.value(ids_input)
    feed = prompts(np.zeros(1, np.int64), declared.shape, open_length).astype(_dtype(declared))
    return _evaluate(graph, trace(graph, value), value, {ids_input: Lane(feed, True)}).shape[1:]


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


def one_each(index: Array, count: int) -> Array:
    if index.size != count:
        raise NotAMap(f"has {index.size // len(index)} elements for {count // len(index)} ids")
    return index.reshape(-1)


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


def _evaluate(graph: Graph, cone: Cone, value: str, feeds: dict[str, Lane]) -> Array:
    lanes = dict(feeds)

    def lane(name: str) -> Lane:
        if name not in lanes:
            constant = graph.constants.get(name)
            if constant is None:
                raise NotAMap(f"cannot be evaluated: {name} is not a small constant")
            lanes[name] = Lane(constant, False)
        return lanes[name]

    with np.errstate(all="ignore"):
        for node in cone.nodes:
            operands = {key: lane(name) for key, name in node.operands.items()}
            try:
                lanes[node.output] = EVALUATORS[node.op](node, operands)
            except (ValueError, IndexError, TypeError, KeyError, OverflowError) as error:
                raise NotAMap(f"cannot be evaluated: {node.native} at {node.address}: {error}") from error
    result = lane(value)
    if not result.batched:
        raise NotAMap("does not depend on the token ids")
    return result.array
