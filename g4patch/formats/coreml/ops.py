"""MIL ops as nodes of the cone view. Parameters have the names of coremltools' definitions (`mil/ops/defs`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from g4patch.formats.coreml.values import CAST_NAMES, Array
from g4patch.view import Node, Op, Shape, Value

# Operand of the view -> (parameter, position in it).
Operands = dict[str, tuple[str, int]]

# From iOS 17 (CoreML7) on, a 0 in `reshape` counts dimensions from the right.
_RIGHT_ALIGNED_ZEROS = 7
# The end of any axis.
_END = 2**31 - 1


@dataclass(frozen=True)
class Call:
    """One op with its arguments by parameter, and what is known of values so far."""

    native: str
    opset: int
    arguments: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, Array]
    strings: Mapping[str, str]

    def argument(self, parameter: str) -> str:
        names = self.arguments.get(parameter, ())
        return names[0] if len(names) == 1 else ""

    def integers(self, parameter: str) -> tuple[int, ...] | None:
        """A constant argument as integers (or booleans); None where it is absent or not constant."""
        array = self.constants.get(self.argument(parameter))
        if array is None or array.dtype.kind not in "iub":
            return None
        return tuple(int(item) for item in array.reshape(-1))

    def integer(self, parameter: str, default: int) -> int | None:
        """A constant scalar; the default where it is absent, None where it is not constant."""
        if parameter not in self.arguments:
            return default
        numbers = self.integers(parameter)
        return numbers[0] if numbers is not None and len(numbers) == 1 else None

    def shape(self, parameter: str) -> Shape | None:
        value = self.values.get(self.argument(parameter))
        return value.shape if value is not None else None


@dataclass(frozen=True)
class Translation:
    op: Op
    operands: Mapping[str, str]
    attributes: Mapping[str, Any]


_X = {"x": "x"}
_XY = {"x": "x", "y": "y"}
_GATHER = {"data": "x", "index": "indices"}

# Ops that need no more than names: MIL op -> (op, operand -> parameter). `fill` makes one number of many, which is the
# same to all that broadcasts.
_PLAIN: dict[str, tuple[Op, Mapping[str, str]]] = {
    "equal": (Op.EQUAL, _XY),
    "logical_or": (Op.OR, _XY),
    "logical_and": (Op.AND, _XY),
    "logical_not": (Op.NOT, _X),
    "greater_equal": (Op.GE, _XY),
    "greater": (Op.GT, _XY),
    "less_equal": (Op.LE, _XY),
    "less": (Op.LT, _XY),
    "add": (Op.ADD, _XY),
    "sub": (Op.SUB, _XY),
    "mul": (Op.MUL, _XY),
    "select": (Op.WHERE, {"condition": "cond", "x": "a", "y": "b"}),
    "clip": (Op.CLIP, {"x": "x", "low": "alpha", "high": "beta"}),
    "maximum": (Op.CLIP, {"x": "x", "low": "y"}),
    "minimum": (Op.CLIP, {"x": "x", "high": "y"}),
    "identity": (Op.IDENTITY, _X),
    "fill": (Op.IDENTITY, {"x": "value"}),
    "fill_like": (Op.IDENTITY, {"x": "value"}),
    "shape": (Op.SHAPE, _X),
    "dequantize": (Op.PASS, {"x": "input"}),
}
_JOINS = {"concat": Op.CONCAT, "stack": Op.STACK}
_MATMULS = frozenset({"matmul", "linear", "conv", "einsum"})


def translate(call: Call, address: str, inner: tuple[str, ...]) -> Iterator[tuple[Node, Operands]]:
    """The nodes for an op, each with where its operands are bound; `inner` are the outputs of its blocks.

    One node, with one exception: `not_equal` is `not` of an `equal`.
    """
    if call.native == "not_equal" and len(call.outputs) == 1:
        between = f"{address}/equal"
        operands: Operands = {"x": ("x", 0), "y": ("y", 0)}
        names = {key: call.arguments[parameter][position] for key, (parameter, position) in operands.items()}
        yield Node(Op.EQUAL, call.native, between, names, (between,), editable=False), operands
        yield Node(Op.NOT, call.native, address, {"x": between}, call.outputs, editable=False), {}
        return
    translation = _translation(call) if len(call.outputs) == 1 and not inner else None
    if translation is None:
        yield _numbered(call, address, inner)
        return
    operands = {key: (parameter, 0) for key, parameter in translation.operands.items()}
    names = {key: call.arguments[parameter][0] for key, parameter in translation.operands.items()}
    yield Node(translation.op, call.native, address, names, call.outputs, translation.attributes), operands


def _translation(call: Call) -> Translation | None:
    if call.native in _PLAIN:
        op, wanted = _PLAIN[call.native]
        found: Translation | None = Translation(op, wanted, {})
    else:
        special = _SPECIAL.get(call.native)
        found = special(call) if special is not None else None
    if found is None or not all(call.argument(parameter) for parameter in found.operands.values()):
        return None
    return found


def _numbered(call: Call, address: str, inner: tuple[str, ...]) -> tuple[Node, Operands]:
    """Operands by number: matmuls, concatenations and all that is not translated."""
    op = Op.MATMUL if call.native in _MATMULS and len(call.outputs) == 1 else Op.OPAQUE
    attributes: dict[str, Any] = {}
    bound = [(parameter, i) for parameter, names in call.arguments.items() for i in range(len(names))]
    axis = call.integer("axis", 0)
    if call.native in _JOINS and axis is not None and call.integer("interleave", 0) == 0:
        op, attributes = _JOINS[call.native], {"axis": axis}
        bound = [place for place in bound if place[0] == "values"]
    places = {str(number): place for number, place in enumerate(bound)}
    names = {key: call.arguments[parameter][i] for key, (parameter, i) in places.items()}
    names |= {str(len(bound) + number): name for number, name in enumerate(inner)}
    return Node(op, call.native, address, names, call.outputs, attributes), places


def _gather(call: Call) -> Translation | None:
    """`gather` along one axis. With batch dimensions it is another op, whose index does not evaluate to rows."""
    rank, axis = len(call.shape("x") or ()), call.integer("axis", 0)
    if not rank or axis is None or call.integer("batch_dims", 0) != 0:
        return None
    return Translation(Op.GATHER, _GATHER, {"axis": axis % rank})


def _gather_nd(call: Call) -> Translation | None:
    """`gather_nd` by rows, or by coordinates of several axes."""
    batch = call.integer("batch_dims", 0)
    return Translation(Op.GATHER, _GATHER, {"axis": batch, "nd": True}) if batch is not None else None


def _gather_along_axis(call: Call) -> Translation | None:
    """`gather_along_axis` reads single elements: it gathers rows where the index repeats all along a row."""
    rank, axis = len(call.shape("x") or ()), call.integer("axis", 0)
    return Translation(Op.GATHER, _GATHER, {"axis": axis % rank, "along": True}) if rank and axis is not None else None


def _cast(call: Call) -> Translation | None:
    name = call.strings.get(call.argument("dtype"))
    return Translation(Op.CAST, _X, {"dtype": CAST_NAMES.get(name, name)}) if name else None


def _reshape(call: Call) -> Translation | None:
    """`reshape`, unless its zeros mean something else than ONNX's."""
    shape, own = call.integers("shape"), call.shape("x")
    if shape is not None and 0 in shape and call.opset >= _RIGHT_ALIGNED_ZEROS and len(own or ()) != len(shape):
        return None
    return Translation(Op.RESHAPE, {"x": "x", "shape": "shape"}, {})


def _expand_dims(call: Call) -> Translation | None:
    axes = call.integers("axes")
    return Translation(Op.EXPAND_DIMS, _X, {"axes": axes}) if axes else None


def _squeeze(call: Call) -> Translation | None:
    if "axes" not in call.arguments:
        return Translation(Op.SQUEEZE, _X, {})
    axes = call.integers("axes")
    return Translation(Op.SQUEEZE, _X, {"axes": axes}) if axes else None


def _tile(call: Call) -> Translation | None:
    """`tile`, which is a broadcast where only axes of size 1 are repeated."""
    repeats, shape = call.integers("reps") or (), call.shape("x")
    broadcast = shape is not None and len(repeats) == len(shape)
    broadcast = broadcast and all(count == 1 or size == 1 for count, size in zip(repeats, shape or (), strict=True))
    return Translation(Op.EXPAND if broadcast else Op.TILE, {"x": "x", "shape" if broadcast else "repeats": "reps"}, {})


def _slice(call: Call) -> Translation:
    """`slice_by_index`; a mask of `begin` or `end` opens that bound, one of `squeeze` takes a single index."""
    begins, ends, rank = call.integers("begin"), call.integers("end"), len(call.shape("x") or ())
    steps = call.integers("stride") if "stride" in call.arguments else (1,) * rank
    masks = [call.integers(f"{name}_mask") or (0,) * rank for name in ("begin", "end", "squeeze")]
    ranges: dict[int, tuple[int, int]] = {}
    if begins is not None and ends is not None and steps is not None and set(steps) <= {1}:
        for axis, (begin, end, from_start, to_end, single) in enumerate(zip(begins, ends, *masks, strict=False)):
            if single:
                ranges[axis] = (begin, begin + 1 or _END)
            else:
                ranges[axis] = (0 if from_start else begin, _END if to_end else end)
    return Translation(Op.SLICE, _X, {"ranges": ranges})


_SPECIAL: dict[str, Callable[[Call], Translation | None]] = {
    "gather": _gather,
    "gather_nd": _gather_nd,
    "gather_along_axis": _gather_along_axis,
    "cast": _cast,
    "reshape": _reshape,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "tile": _tile,
    "slice_by_index": _slice,
}
