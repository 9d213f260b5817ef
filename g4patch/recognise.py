"""Tell PLE lookups, token embeddings and everything else apart by structure.

Names decide nothing here: release exports have none, and a name that only looks right proves nothing. What decides is
what becomes of the rows that a gather reads: PLE rows are scaled by sqrt(D), reshaped to `[.., L, D]` and added to a
normed projection; token embeddings are scaled by sqrt(H), spliced, and go on at full width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from g4patch.cone import depends_on, trace
from g4patch.tokens import TokenFacts
from g4patch.view import VIEW_OPS, Graph, Node, Op, Table, Value

# A scale written in fp16 or bf16 is off by up to 2^-8; the next plausible scale is far further away.
_SCALE_TOLERANCE = 2**-8


@dataclass(frozen=True)
class Select:
    """A `where` that rows pass through, and whether they are kept where its condition is true."""

    node: Node
    kept_when_true: bool


@dataclass(frozen=True)
class Downstream:
    """What becomes of rows on their way to the layers.

    `scale` is the product of the scalars they are multiplied with, None where paths disagree. `tail` is the (L, D) of
    the reshape. `sum` is what they are added up to with a projection, `output` the graph output that they reach.
    `masks` are `mul`s by a function of the ids, `zeroing` `where`s against a constant, `selects` against other rows.
    """

    scale: float | None
    tail: tuple[int, int] | None
    sum: str | None
    output: str | None
    masks: tuple[tuple[Node, str], ...]
    zeroing: tuple[Select, ...]
    selects: tuple[Select, ...]


def id_gathers(graph: Graph) -> Iterator[tuple[Node, Table]]:
    """Gathers from a table, along any axis, whose index depends on an integer graph input."""
    for node in graph.nodes:
        if node.op is Op.GATHER:
            table = graph.tables.get(node.operands["data"])
            if table is not None and len(table.shape) > 1 and integer_roots(graph, node.operands["index"]):
                yield node, table


def gather_axis(node: Node, table: Table) -> int:
    """The axis of its table that a gather reads along, counted from the front: 0 reads rows."""
    axis: int = node.attributes["axis"]
    return axis % len(table.shape)


def integer_roots(graph: Graph, value: str) -> frozenset[str]:
    """The integer graph inputs whose numbers a value depends on, through any op."""
    return frozenset(name for name in depends_on(graph, value) if is_integer(graph.value(name)))


def is_integer(value: Value) -> bool:
    return (value.dtype or "").removeprefix("u").startswith("int")


def ids_input(graph: Graph, index: str) -> str | None:
    """The graph input whose numbers an index hands on: the ids themselves, not what only conditions on them."""
    stack, found, seen = [index], set[str](), set[str]()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        if graph.input(name) is not None:
            found.add(name)
        elif (node := graph.producer(name)) is not None:
            stack.extend(value for operand, value in node.operands.items() if operand not in ("condition", "shape"))
    return found.pop() if len(found) == 1 else None


def follow(graph: Graph, start: str, width: int, tail: tuple[int, int] | None = None) -> Downstream:
    """Follow rows of `width` elements forward through scales, casts, reshapes, masks and wheres until they are summed.

    `tail` is given where the table itself is `[V, L, D]`.
    """
    ends: set[float] = set()
    total: str | None = None
    output: str | None = None
    masks: list[tuple[Node, str]] = []
    zeroing: list[Select] = []
    selects: list[Select] = []
    queue, seen = [(start, 1.0)], {start}

    while queue:
        value, factor = queue.pop()
        if value in graph.outputs:
            output = value
            ends.add(factor)
        for use, node in graph.consumers(value):
            onward: float | None = None
            other = _other_operand(node, use.operand)
            if node.op in VIEW_OPS and use.operand == "x":
                tail = tail or reshape_tail(graph, node, width)
                onward = factor
            elif node.op is Op.MUL and (number := graph.scalar(other)) is not None:
                onward = factor * number
            elif node.op is Op.MUL and _is_function_of_integers(graph, other):
                masks.append((node, other))
                onward = factor
            elif node.op is Op.WHERE and use.operand != "condition":
                against_constant = graph.scalar(other) is not None
                (zeroing if against_constant else selects).append(Select(node, use.operand == "x"))
                onward = factor
            elif node.op is Op.ADD and _behind_matmul(graph, other):
                total = node.output
            if onward is None:
                ends.add(factor)
            elif node.output not in seen:
                seen.add(node.output)
                queue.append((node.output, onward))
    scale = ends.pop() if len(ends) == 1 else None
    return Downstream(scale, tail, total, output, tuple(masks), tuple(zeroing), tuple(selects))


def _other_operand(node: Node, operand: str) -> str:
    return node.operands.get({"x": "y", "y": "x"}.get(operand, ""), "")


def reshape_tail(graph: Graph, node: Node, width: int) -> tuple[int, int] | None:
    """(L, D) where a reshape makes `[.., L, D]` of rows of `width`: by its target shape, else by the recorded one."""
    if node.op is not Op.RESHAPE:
        return None
    for shape in (_target(graph, node.operands.get("shape", "")), graph.value(node.output).shape):
        if shape is not None and len(shape) > 2:
            layers, inner = shape[-2:]
            if layers and inner and layers * inner == width:
                return layers, inner
    return None


def _target(graph: Graph, value: str) -> tuple[int | None, ...] | None:
    """A target shape: constant, or concatenated with None where a part is computed."""
    constant = graph.integers(value)
    if constant is not None:
        return constant
    node = graph.producer(value)
    if node is None or node.op is not Op.CONCAT:
        return None
    sizes: list[int | None] = []
    for part in node.operands.values():
        sizes.extend(graph.integers(part) or (None,))
    return tuple(sizes)


def _is_function_of_integers(graph: Graph, value: str) -> bool:
    cone = trace(graph, value)
    return bool(cone.inputs) and not cone.opaque and all(is_integer(graph.value(name)) for name in cone.inputs)


def _behind_matmul(graph: Graph, value: str) -> bool:
    """Whether a value was computed with a matmul: the projection that PLE is added to is."""
    stack, seen = [value], set[str]()
    while stack:
        node = graph.producer(stack.pop())
        if node is None or node.address in seen:
            continue
        if node.op is Op.MATMUL:
            return True
        seen.add(node.address)
        stack.extend(node.operands.values())
    return False


def ple_evidence(width: int, downstream: Downstream, tokens: TokenFacts) -> tuple[str, ...]:
    """Why rows of `width` are PLE rows, each line for a person to read; empty if that was not shown."""
    if downstream.tail is None:
        return ()
    layers, inner = downstream.tail
    configured = downstream.tail == (tokens.layers, tokens.layer_width)
    if not (downstream.sum or downstream.output or configured):
        return ()
    lines = [f"width {width} = {layers} x {inner}", f"reshape to [..,{layers},{inner}]"]
    if is_scale(downstream.scale, inner):
        lines.append(f"scale sqrt({inner})")
    if downstream.sum:
        lines.append("sum with a projection")
    elif downstream.output:
        lines.append("is a graph output")
    if configured:
        lines.append("L and D of the configuration")
    return tuple(lines)


def is_token_embedding(graph: Graph, table: Table, downstream: Downstream, tokens: TokenFacts) -> bool:
    """Whether a gather is shown to be embed_tokens: by sqrt(H), by H itself, or by a splice with rows handed in."""
    if downstream.tail is not None:
        return False
    ple_width = (tokens.layers or 0) * (tokens.layer_width or 0)
    by_width = table.width == tokens.hidden_size and table.width != ple_width
    by_splice = any(handed_in(graph, other_branch(select), table.width) for select in downstream.selects)
    return by_width or by_splice or (table.width > 1 and is_scale(downstream.scale, table.width))


def is_scale(scale: float | None, width: int) -> bool:
    """Whether a scale is sqrt(width), the factor of Gemma's scaled embeddings."""
    expected = math.sqrt(width)
    return scale is not None and abs(scale - expected) <= expected * _SCALE_TOLERANCE


def other_branch(select: Select) -> str:
    """The rows that come where those that were followed do not."""
    return select.node.operands["y" if select.kept_when_true else "x"]


def handed_in(graph: Graph, name: str, width: int) -> str:
    """The graph input of rows of this width that a value is, perhaps cast or reshaped; "" if it is none."""
    node = graph.producer(name)
    while node is not None and node.op in VIEW_OPS:
        name = node.operands["x"]
        node = graph.producer(name)
    value = graph.input(name)
    fits = value is not None and value.shape is not None and value.shape[-1:] == (width,)
    return value.name if value is not None and fits else ""


def is_host_side(graph: Graph, value: Value, tokens: TokenFacts) -> bool:
    """Whether a graph input hands in PLE rows: `[.., L*D]` reshaped to `[.., L, D]`, or L and D as configured."""
    shape = value.shape
    if shape is None or len(shape) < 3 or value.dtype in ("int32", "int64", "bool"):
        return False
    if tokens.layers and shape[-2:] == (tokens.layers, tokens.layer_width):
        return True
    width = shape[-1]
    return width is not None and follow(graph, value.name, width).tail is not None


def combined(graph: Graph, total: str) -> str:
    """What the layers get of a sum of PLE and projection: the sum itself, or its product with a scalar (2^-0.5)."""
    following = [node for _, node in graph.consumers(total)]
    if len(following) == 1 and following[0].op is Op.MUL:
        scalars = [graph.scalar(name) for name in following[0].operands.values()]
        if any(scalar is not None for scalar in scalars):
            return following[0].output
    return total


def layers_used(graph: Graph, value: str, layers: int) -> frozenset[int] | None:
    """Which layers' slices of a value `[.., L, D]` the graph takes: all where it is put out; None where unclear.

    A stage that does not take the first slice is not the first stage.
    """
    used: set[int] = set()
    queue = [value]
    while queue:
        name = queue.pop()
        if name in graph.outputs:
            return frozenset(range(layers))
        for use, node in graph.consumers(name):
            if node.op in VIEW_OPS and use.operand == "x":
                queue.append(node.output)
            elif node.op is Op.GATHER and use.operand == "data" and node.attributes["axis"] in (2, -2):
                used.update(index % layers for index in graph.integers(node.operands["index"]) or ())
            elif node.op is Op.SLICE and (span := _along_layers(node)) is not None:
                used.update(range(layers)[slice(*span)])
            elif node.op is not Op.SHAPE:
                return None
    return frozenset(used) or None


def _along_layers(node: Node) -> tuple[int, int] | None:
    ranges = node.attributes.get("ranges", {})
    span: tuple[int, int] | None = ranges.get(2, ranges.get(-2))
    return span
