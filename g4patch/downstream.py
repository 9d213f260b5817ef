"""Follow rows that a gather reads on their way to the layers: scaled, cut up, put together, masked, summed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from g4patch.cone import NotAMap, trace
from g4patch.rows import rows_rank
from g4patch.view import VIEW_OPS, Graph, Node, Op, Table, Use, Value


@dataclass(frozen=True)
class Select:
    """A `where` that rows pass through, and whether they are kept where its condition is true."""

    node: Node
    kept_when_true: bool


@dataclass(frozen=True)
class Numbers:
    """What rows stand for: (what is stored - `zero_point`) * `scale`."""

    scale: float
    zero_point: float


@dataclass(frozen=True)
class Downstream:
    """What becomes of rows on their way to the layers.

    `scale` is the product of the scalars they are multiplied with, None where paths disagree; `summed` what they stand
    for where they are added up, dequantised, None where that is not known. `tail` is the (L, D) of the reshape, or of
    the concatenation of L parts; `flat` where no such thing was seen, and `tail` is what the configuration says of the
    width. `sum` is what they are added up to with a projection, `output` the graph output that they reach. `masks` are
    `mul`s by a function of the ids, `zeroing` `where`s against a constant, `selects` against other rows. `factors` are
    gathers by which each row is scaled or shifted on its own.
    """

    scale: float | None
    tail: tuple[int, int] | None
    sum: str | None
    output: str | None
    masks: tuple[tuple[Node, str], ...]
    zeroing: tuple[Select, ...]
    selects: tuple[Select, ...]
    factors: tuple[Node, ...] = ()
    summed: Numbers | None = None
    flat: bool = False


@dataclass(frozen=True)
class _Rows:
    """Rows at one point of their way: the scalars so far, the elements in one, the rank where it is known.

    `stacked` is an axis of size 1 that was put in for the parts to be concatenated along. `line` is the (a, b) by which
    the rows are what is stored times a plus b, None where that is not known.
    """

    value: str
    width: int
    rank: int | None
    scale: float = 1.0
    stacked: int | None = None
    line: tuple[float, float] | None = (1.0, 0.0)

    def times(self, factor: float) -> _Rows:
        line = (self.line[0] * factor, self.line[1] * factor) if self.line is not None else None
        return replace(self, scale=self.scale * factor, line=line)

    def plus(self, number: float) -> _Rows:
        return replace(self, line=(self.line[0], self.line[1] + number) if self.line is not None else None)


@dataclass
class _Found:
    """What `follow` has found so far."""

    tail: tuple[int, int] | None
    scales: set[float] = field(default_factory=set)
    lines: set[tuple[float, float] | None] = field(default_factory=set)
    sum: str | None = None
    output: str | None = None
    masks: list[tuple[Node, str]] = field(default_factory=list)
    zeroing: list[Select] = field(default_factory=list)
    selects: list[Select] = field(default_factory=list)
    factors: dict[str, Node] = field(default_factory=dict)


def follow(graph: Graph, start: str, width: int, tail: tuple[int, int] | None = None) -> Downstream:
    """Follow rows of `width` elements forward through scales, casts, reshapes, masks and wheres until they are summed.

    `tail` is given where the table itself is `[V, L, D]`.
    """
    found = _Found(tail)
    queue, seen = [_Rows(start, width, _rank(graph, start))], {start}
    table = _table_of(graph, start)
    while queue:
        rows = queue.pop()
        if rows.value in graph.outputs:
            found.output = rows.value
            found.scales.add(rows.scale)
        for use, node in graph.consumers(rows.value):
            if node.op is Op.SHAPE:
                continue
            onward = _onward(graph, rows, use, node, table, found)
            if onward is None:
                found.scales.add(rows.scale)
            elif node.output not in seen:
                seen.add(node.output)
                queue.append(replace(onward, value=node.output))
    return Downstream(
        found.scales.pop() if len(found.scales) == 1 else None,
        found.tail,
        found.sum,
        found.output,
        tuple(found.masks),
        tuple(found.zeroing),
        tuple(found.selects),
        tuple(found.factors.values()),
        _numbers(found.lines),
    )


def _numbers(lines: set[tuple[float, float] | None]) -> Numbers | None:
    """What rows stand for that all sums get alike."""
    line = lines.pop() if len(lines) == 1 else None
    return Numbers(line[0], -line[1] / line[0] + 0.0) if line is not None and line[0] else None


def _onward(graph: Graph, rows: _Rows, use: Use, node: Node, table: Table | None, found: _Found) -> _Rows | None:
    """The rows behind a node that reads them, and what is to be noted of it; None where they end."""
    other = node.operands.get({"x": "y", "y": "x"}.get(use.operand, ""), "")
    if node.op in VIEW_OPS and use.operand == "x":
        for operand in ("scale", "zero_point"):
            _note_factor(graph, node.operands.get(operand, ""), table, found)
        found.tail = found.tail or reshape_tail(graph, node, rows.width)
        return _viewed(graph, _dequantised(graph, rows, node) if node.op is Op.PASS else rows, node)
    if node.op is Op.BRANCH and use.operand != "condition":
        return rows
    if node.op is Op.SLICE and use.operand == "x" and found.tail is None:
        return _sliced(rows, node)
    if node.op in (Op.CONCAT, Op.STACK):
        return _concatenated(graph, rows, node, found)
    if node.op is Op.MUL and (number := graph.scalar(other)) is not None:
        return rows.times(number)
    if node.op in (Op.ADD, Op.SUB) and use.operand == "x" and (number := graph.scalar(other)) is not None:
        return rows.plus(-number if node.op is Op.SUB else number)
    if node.op is Op.ADD and (number := graph.scalar(other)) is not None:
        return rows.plus(number)
    if node.op in (Op.MUL, Op.ADD, Op.SUB) and use.operand in ("x", "y") and _note_factor(graph, other, table, found):
        return rows
    if node.op is Op.MUL and _is_function_of_integers(graph, other):
        found.masks.append((node, other))
        return rows
    if node.op is Op.WHERE and use.operand != "condition":
        against_constant = graph.scalar(other) is not None
        (found.zeroing if against_constant else found.selects).append(Select(node, use.operand == "x"))
        return rows
    if node.op is Op.ADD and _behind_matmul(graph, other):
        found.sum = node.output
        found.lines.add(rows.line)
    return None


def _dequantised(graph: Graph, rows: _Rows, node: Node) -> _Rows:
    """Rows behind a node that dequantises them by one scale; `scale` stays that of the product with sqrt(D)."""
    factor = graph.scalar(node.operands.get("scale", ""))
    zero = graph.scalar(node.operands["zero_point"]) if "zero_point" in node.operands else 0
    line = None if factor is None or zero is None else rows.plus(-zero).times(factor).line
    return replace(rows, line=line)


def _table_of(graph: Graph, rows: str) -> Table | None:
    node = graph.producer(rows)
    return graph.tables.get(node.operands["data"]) if node is not None and node.op is Op.GATHER else None


def _rank(graph: Graph, rows: str) -> int | None:
    shape, node, table = graph.value(rows).shape, graph.producer(rows), _table_of(graph, rows)
    if shape is not None:
        return len(shape)
    if node is None or table is None:
        return None
    inputs = trace(graph, node.operands["index"]).inputs
    try:
        return rows_rank(graph, node, len(table.shape), inputs[0]) if len(inputs) == 1 else None
    except NotAMap:
        return None


def _viewed(graph: Graph, rows: _Rows, node: Node) -> _Rows:
    if node.op is Op.RESHAPE:
        shape = _target(graph, node.operands.get("shape", ""))
        stacked = shape is not None and len(shape) > 2 and shape[-2:] == (1, rows.width)
        rank = len(shape) if shape is not None else None
        return replace(rows, rank=rank, stacked=rank - 2 if rank is not None and stacked else None)
    if node.op is Op.EXPAND_DIMS and rows.rank is not None:
        axes = node.attributes["axes"]
        rank = rows.rank + len(axes)
        return replace(rows, rank=rank, stacked=axes[0] % rank if len(axes) == 1 else None)
    if node.op in (Op.EXPAND_DIMS, Op.SQUEEZE):
        axes = node.attributes.get("axes")
        rank = rows.rank - len(axes) if rows.rank is not None and axes else None
        return replace(rows, rank=rank, stacked=None)
    return rows


def _sliced(rows: _Rows, node: Node) -> _Rows | None:
    """A part of each row, as a layer takes it from a lookup that is as wide as all layers."""
    for axis, bounds in node.attributes.get("ranges", {}).items():
        if axis not in (-1, None if rows.rank is None else rows.rank - 1):
            return None
        rows = replace(rows, width=len(range(rows.width)[slice(*bounds)]))
    return rows if rows.width else None


def _concatenated(graph: Graph, rows: _Rows, node: Node, found: _Found) -> _Rows | None:
    """Parts put together again: stacked, one a layer, or side by side."""
    axis, rank, count = node.attributes["axis"], rows.rank, len(node.operands)
    if node.op is Op.STACK:
        if rank is None or axis not in (-2, rank - 1):
            return None
        rows = replace(rows, rank=rank + 1, stacked=rank - 1)
        rank = rank + 1
    if rank is not None and not -rank <= axis < rank:
        return None
    axis = axis % rank if rank is not None else axis
    # Parts that are looked up: Gemma 3n's AltUp stacks the token embedding with projections of it.
    looked_up = not any(_behind_matmul(graph, value) for value in node.operands.values())
    if rows.stacked is not None and axis == rows.stacked and looked_up:
        found.tail = found.tail or (count, rows.width)
        return replace(rows, width=count * rows.width, stacked=None)
    widths = [_width(graph, value) for value in node.operands.values()]
    total = sum(width or 0 for width in widths)
    beside = axis == (-1 if rank is None else rank - 1) and None not in widths
    return replace(rows, width=total, stacked=None) if beside else None


def _width(graph: Graph, value: str) -> int | None:
    """The width of rows as a table has it, behind casts and scales."""
    node = _behind_scales(graph, value)
    table = graph.tables.get(node.operands["data"]) if node is not None and node.op is Op.GATHER else None
    return table.width if table is not None else None


def _behind_scales(graph: Graph, value: str) -> Node | None:
    """The node that makes a value, looking through casts, reshapes, and products with a scalar."""
    node = graph.producer(value)
    while node is not None and (node.op in VIEW_OPS or node.op is Op.MUL):
        scalars = {key: graph.scalar(name) for key, name in node.operands.items() if key in ("x", "y")}
        rows = [node.operands[key] for key, number in scalars.items() if number is None]
        if len(rows) != 1:
            return None
        node = graph.producer(rows[0])
    return node


def _note_factor(graph: Graph, value: str, table: Table | None, found: _Found) -> bool:
    """Whether a value is a scale, or a zero point, of each row of a table, looked up in a narrower table beside it."""
    node = _behind_scales(graph, value)
    if table is None or node is None or node.op is not Op.GATHER:
        return False
    beside = graph.tables.get(node.operands["data"])
    if beside is None or beside.rows != table.rows or not 0 < beside.width < table.width or table.width % beside.width:
        return False
    found.factors[node.address] = node
    return True


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


def is_integer(value: Value) -> bool:
    return (value.dtype or "").removeprefix("u").startswith("int")
