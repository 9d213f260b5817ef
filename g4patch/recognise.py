"""Tell PLE lookups, token embeddings and everything else apart by structure.

Names decide nothing here: release exports have none, and a name that only looks right proves nothing. What decides is
what becomes of the rows that a gather reads: PLE rows are scaled by sqrt(D), reshaped to `[.., L, D]` and added to a
normed projection; token embeddings are scaled by sqrt(H), spliced, and go on at full width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from g4patch.cone import depends_on
from g4patch.downstream import Downstream, Select, follow, is_integer, reshape_tail
from g4patch.tokens import TokenFacts
from g4patch.view import SIZES, VIEW_OPS, Graph, Node, Op, Table, Value

# A scale written in fp16 or bf16 is off by up to 2^-8; the next plausible scale is far further away.
_SCALE_TOLERANCE = 2**-8


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


def other_readers(graph: Graph, rows: int) -> Iterator[tuple[Node, frozenset[str]]]:
    """Nodes that are no gathers and may look something up all the same, and the integer inputs that they do it by.

    They combine numbers made of integer inputs alone with a stored tensor of at least `rows` entries along an axis: an
    operator that is not known, or a product with one-hot rows.
    """
    for node in graph.nodes:
        if node.op in (Op.OPAQUE, Op.MATMUL) and any(_is_stored(graph, x, rows) for x in node.operands.values()):
            roots = frozenset(root for value in node.operands.values() for root in _made_of_integers(graph, value))
            if roots:
                yield node, roots


def open_gathers(graph: Graph, tokens: TokenFacts) -> Iterator[tuple[Node, frozenset[str]]]:
    """Gathers of rows from a graph input of any number of rows, and the integer inputs that they do it by.

    No table is known then, and it may be the one of PLE, unless its width is that of the token embedding alone.
    """
    ple_width = (tokens.layers or 0) * (tokens.layer_width or 0)
    for node in graph.nodes:
        if node.op is not Op.GATHER or node.operands["data"] in graph.tables or node.attributes["axis"] != 0:
            continue
        shape = graph.value(node.operands["data"]).shape
        if shape is None or len(shape) < 2 or shape[0] is not None or not _is_input(graph, node.operands["data"]):
            continue
        roots = integer_roots(graph, node.operands["index"])
        if roots and (shape[1:] != (tokens.hidden_size,) or tokens.hidden_size == ple_width):
            yield node, roots


def behind_views(graph: Graph, value: str) -> str:
    """What a value is before casts, reshapes and the like."""
    node = graph.producer(value)
    while node is not None and node.op in VIEW_OPS:
        value = node.operands["x"]
        node = graph.producer(value)
    return value


def _is_input(graph: Graph, value: str) -> bool:
    return graph.input(behind_views(graph, value)) is not None


def _is_stored(graph: Graph, value: str, entries: int) -> bool:
    value = behind_views(graph, value)
    is_made = graph.producer(value) is not None or graph.input(value) is not None
    return not is_made and max((size or 0 for size in graph.value(value).shape or ()), default=0) >= entries


def _made_of_integers(graph: Graph, value: str) -> frozenset[str]:
    """The integer inputs that a value is made of; empty where anything else takes part: float inputs, tables, sizes."""
    stack, seen, roots = [value], set[str](), set[str]()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        node, given = graph.producer(name), graph.input(name)
        if given is not None and is_integer(given):
            roots.add(name)
        elif given is not None or (node is not None and node.op in (Op.GATHER, Op.MATMUL)):
            return frozenset()
        elif node is not None and node.op is not Op.SHAPE:
            stack.extend(node.operands.values())
    return frozenset(roots)


def integer_roots(graph: Graph, value: str) -> frozenset[str]:
    """The integer graph inputs whose numbers a value depends on, through any op."""
    return frozenset(name for name in depends_on(graph, value) if is_integer(graph.value(name)))


def ids_input(graph: Graph, index: str) -> str | None:
    """The graph input whose numbers an index hands on: the ids themselves, not what only conditions on them."""
    found = depends_on(graph, index, leave={"condition", *SIZES})
    return min(found) if len(found) == 1 else None


def with_configured_tail(width: int, downstream: Downstream, tokens: TokenFacts) -> Downstream:
    """Rows that are put out or summed flat, with the L and D of the configuration.

    Not so where they may be the token embedding.
    """
    layers, inner = tokens.layers, tokens.layer_width
    if not layers or not inner or layers * inner != width or width == tokens.hidden_size:
        return downstream
    flat = downstream.tail is None and (downstream.output or downstream.sum) and not downstream.selects
    return replace(downstream, tail=(layers, inner), flat=True) if flat else downstream


def ple_evidence(width: int, downstream: Downstream, tokens: TokenFacts) -> tuple[str, ...]:
    """Why rows of `width` are PLE rows, each line for a person to read; empty if that was not shown."""
    if downstream.tail is None:
        return ()
    layers, inner = downstream.tail
    configured = downstream.tail == (tokens.layers, tokens.layer_width)
    if not (downstream.sum or downstream.output or configured):
        return ()
    part = "" if width == layers * inner else " of "
    lines = [f"width {width}{part or ' = '}{layers} x {inner}"]
    if not downstream.flat:
        lines.append(f"reshape to [..,{layers},{inner}]")
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
    return scale is not None and is_close(scale, math.sqrt(width))


def is_close(scale: float, expected: float) -> bool:
    """Whether a scale is an expected one, as 16-bit floats round it."""
    return abs(scale - expected) <= expected * _SCALE_TOLERANCE


def other_branch(select: Select) -> str:
    """The rows that come where those that were followed do not."""
    return select.node.operands["y" if select.kept_when_true else "x"]


def handed_in(graph: Graph, name: str, width: int) -> str:
    """The graph input of rows of this width that a value is, perhaps cast or reshaped; "" if it is none."""
    value = graph.input(behind_views(graph, name))
    fits = value is not None and value.shape is not None and value.shape[-1:] == (width,)
    return value.name if value is not None and fits else ""


def is_host_side(graph: Graph, value: Value, tokens: TokenFacts) -> bool:
    """Whether a graph input hands in PLE rows: `[.., L*D]` reshaped to `[.., L, D]`, or L and D as configured.

    Rows that are never reshaped, for each layer cuts its part, are known by the configured width alone.
    """
    shape = value.shape
    if shape is None or len(shape) < 3 or value.dtype in ("int32", "int64", "bool"):
        return False
    width = shape[-1]
    if tokens.layers and tokens.layer_width:
        configured = tokens.layers * tokens.layer_width
        if shape[-2:] == (tokens.layers, tokens.layer_width) or width == configured != tokens.hidden_size:
            return True
    return width is not None and follow(graph, value.name, width).tail is not None


def combined(graph: Graph, total: str) -> str:
    """What the layers get of a sum of PLE and projection: the sum itself, or its product with a scalar (2^-0.5)."""
    following = [node for _, node in graph.consumers(total)]
    if len(following) == 1 and following[0].op is Op.MUL:
        scalars = [graph.scalar(name) for name in following[0].operands.values()]
        if any(scalar is not None for scalar in scalars):
            return following[0].output
    return total


def layers_used(graph: Graph, value: str, layers: int, flat: int = 0) -> frozenset[int] | None:
    """Which layers' slices of a value the graph takes: all where it is put out; None where unclear. See `slices`.

    A stage that does not take the first slice is not the first stage.
    """
    found = slices(graph, value, layers, flat)
    return frozenset().union(*(taken for taken, _ in found)) or None if found is not None else None


def slices(graph: Graph, value: str, layers: int, flat: int = 0) -> list[tuple[frozenset[int], str]] | None:
    """The layers whose slices of a value are taken, and the value that holds them; None where unclear.

    The value is `[.., L, D]`, or `[.., L*D]` where `flat` is D. A value that is put out holds them all.
    """
    found: list[tuple[frozenset[int], str]] = []
    queue = [(value, flat)]
    while queue:
        name, width = queue.pop()
        if name in graph.outputs:
            found.append((frozenset(range(layers)), name))
        for use, node in graph.consumers(name):
            if node.op in VIEW_OPS and use.operand == "x":
                queue.append((node.output, 0 if reshape_tail(graph, node, layers * width) else width))
            elif node.op is Op.GATHER and use.operand == "data" and node.attributes["axis"] in (2, -2) and not width:
                indices = graph.integers(node.operands["index"]) or ()
                found.append((frozenset(index % layers for index in indices), node.output))
            elif node.op is Op.SLICE and (span := _along_layers(node, -1 if width else -2)) is not None:
                each = [layer for layer in range(layers) for _ in range(width or 1)]
                found.append((frozenset(each[slice(*span)]), node.output))
            elif node.op is not Op.SHAPE and name not in graph.outputs:
                return None
    return found


def _along_layers(node: Node, axis: int) -> tuple[int, int] | None:
    """The bounds of a slice along an axis, counted from the back, which is the third."""
    ranges = node.attributes.get("ranges", {})
    span: tuple[int, int] | None = ranges.get(2, ranges.get(axis))
    return span
