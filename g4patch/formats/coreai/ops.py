"""Core AI operations -> `g4patch.view.Op`.

What is not listed, or not in the form that is meant, stays opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.view import Op, Value

Constants = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Native:
    """One operation as it stands in the program: its operands and its result, and what is known of them."""

    name: str
    operands: Sequence[str]
    result: str
    values: Mapping[str, Value]
    constants: Constants

    def integers(self, number: int) -> tuple[int, ...] | None:
        """A constant integer operand."""
        constant = self.constants.get(self.operands[number]) if number < len(self.operands) else None
        if constant is None or constant.dtype.kind not in "iu":
            return None
        return tuple(int(item) for item in constant.reshape(-1))

    def is_bool(self) -> bool:
        return self.values[self.result].dtype == "bool"

    def rank(self, number: int) -> int | None:
        shape = self.values[self.operands[number]].shape
        return None if shape is None else len(shape)


@dataclass(frozen=True)
class Meaning:
    """What an operation means.

    `operands` are numbers of native operands, by the names that `Op` gives them.
    """

    op: Op
    operands: Mapping[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)


_Reader = Callable[[Native], Meaning | None]


def meaning(native: Native) -> Meaning:
    """The meaning of an operation, opaque where it has none here."""
    short = native.name.removeprefix("coreai.").removeprefix("decomposable.").removeprefix("broadcasting_")
    reader = _READERS.get(short if native.name.startswith("coreai.") else native.name)
    found = reader(native) if reader else None
    return found or Meaning(Op.OPAQUE, {str(number): number for number in range(len(native.operands))})


def _plain(op: Op, *names: str) -> _Reader:
    def read(native: Native) -> Meaning | None:
        return Meaning(op, {name: number for number, name in enumerate(names)})

    return read


def _boolean(op: Op, *names: str) -> _Reader:
    def read(native: Native) -> Meaning | None:
        return Meaning(op, {name: number for number, name in enumerate(names)}) if native.is_bool() else None

    return read


def _bound(name: str) -> _Reader:
    """`maximum` and `minimum` against a constant: a clip with one bound."""

    def read(native: Native) -> Meaning | None:
        constant = [operand in native.constants for operand in native.operands]
        if constant == [False, True]:
            return Meaning(Op.CLIP, {"x": 0, name: 1})
        return Meaning(Op.CLIP, {"x": 1, name: 0}) if constant == [True, False] else None

    return read


def _cast(native: Native) -> Meaning | None:
    return Meaning(Op.CAST, {"x": 0}, {"dtype": native.values[native.result].dtype})


def _axes(op: Op) -> _Reader:
    def read(native: Native) -> Meaning | None:
        axes = native.integers(1)
        return Meaning(op, {"x": 0}, {"axes": axes}) if axes else None

    return read


def _reshape(native: Native) -> Meaning | None:
    return Meaning(Op.RESHAPE, {"x": 0, "shape": 1}, {"allowzero": True})


def _concat(native: Native) -> Meaning | None:
    axis = native.integers(0)
    if axis is None or len(axis) != 1:
        return None
    parts = {str(number): number + 1 for number in range(len(native.operands) - 1)}
    return Meaning(Op.CONCAT, parts, {"axis": axis[0]})


def _broadcast_in_dims(native: Native) -> Meaning | None:
    """To computed lengths. Of one constant, or to the same shape, it changes nothing that the cone could tell."""
    constant = native.constants.get(native.operands[0])
    before, after = native.values[native.operands[0]].shape, native.values[native.result].shape
    unchanged = before is not None and before == after and None not in before
    exact = unchanged or (constant is not None and constant.size == 1)
    return Meaning(Op.IDENTITY if exact else Op.PASS, {"x": 0, **_others(native)})


def _slice(native: Native) -> Meaning | None:
    """Along each axis from start to end by 1, where these are constants."""
    starts, ends, steps = (native.integers(number) for number in (1, 2, 3))
    ranges = {}
    if starts and ends and steps and len(starts) == len(ends) == len(steps):
        bounds = enumerate(zip(starts, ends, steps, strict=True))
        ranges = {axis: (start, end) for axis, (start, end, step) in bounds if step == 1}
    return Meaning(Op.SLICE, {"x": 0, **_others(native)}, {"ranges": ranges})


def _pass(native: Native) -> Meaning | None:
    """Rows are dequantised: `x` are the rows, the others scales, offsets or a palette."""
    return Meaning(Op.PASS, {"x": 0, **_others(native)})


def _others(native: Native) -> dict[str, int]:
    return {str(number): number for number in range(1, len(native.operands))}


def _gather_nd(native: Native) -> Meaning | None:
    return Meaning(Op.GATHER, {"data": 0, "index": 1}, {"axis": 0, "nd": True})


def _gather_along_axis(native: Native) -> Meaning | None:
    axis, rank = native.integers(2), native.rank(0)
    if axis is None or rank is None:
        return None
    return Meaning(Op.GATHER, {"data": 0, "index": 1}, {"axis": axis[0] % max(rank, 1), "along": True})


def _matmul(native: Native) -> Meaning | None:
    return Meaning(Op.MATMUL, {str(number): number for number in range(len(native.operands))})


_READERS: dict[str, _Reader] = {
    "where": _plain(Op.WHERE, "condition", "x", "y"),
    "equal": _plain(Op.EQUAL, "x", "y"),
    "greater": _plain(Op.GT, "x", "y"),
    "add": _plain(Op.ADD, "x", "y"),
    "sub": _plain(Op.SUB, "x", "y"),
    "mul": _plain(Op.MUL, "x", "y"),
    "or": _boolean(Op.OR, "x", "y"),
    "bitwise_or": _boolean(Op.OR, "x", "y"),
    "and": _boolean(Op.AND, "x", "y"),
    "bitwise_and": _boolean(Op.AND, "x", "y"),
    "not": _boolean(Op.NOT, "x"),
    "maximum": _bound("low"),
    "minimum": _bound("high"),
    "cast": _cast,
    "expand_dims": _axes(Op.EXPAND_DIMS),
    "shrink_dims": _axes(Op.SQUEEZE),
    "reshape": _reshape,
    "get_shape": _plain(Op.SHAPE, "x"),
    "concat": _concat,
    "broadcast_to": _plain(Op.EXPAND, "x", "shape"),
    "broadcast_in_dims": _broadcast_in_dims,
    "slice": _slice,
    "blockwise_shift_scale": _pass,
    "dequantize": _pass,
    "lut_to_dense": _pass,
    "gather_nd": _gather_nd,
    "gather_along_axis": _gather_along_axis,
    "batch_matmul": _matmul,
    "conv2d": _matmul,
    "coreaix.copy_with_constraints": _plain(Op.IDENTITY, "x"),
    "coreaix.copy_discarding_constraints": _plain(Op.IDENTITY, "x"),
}


def stretched(native: Native) -> NDArray[np.int64] | None:
    """The shape to which a broadcast along some axes by constants expands, other axes as 1; None for other ops."""
    rank, lengths, axes = None, None, None
    if native.name == "coreai.broadcast_in_dims":
        rank, lengths, axes = native.rank(0), native.integers(1), native.integers(2)
    if rank is None or lengths is None or axes is None or len(lengths) != len(axes):
        return None
    if any(not -rank <= axis < rank for axis in axes):
        return None
    shape = np.ones(rank, np.int64)
    shape[list(axes)] = lengths
    return shape


def slice_rows(native: Native) -> NDArray[np.int64] | None:
    """Which elements of a vector a slice by constants takes; None for other slices."""
    if native.name != "coreai.slice":
        return None
    shape = native.values[native.operands[0]].shape
    bounds = [native.integers(number) for number in (1, 2, 3)]
    if shape is None or len(shape) != 1 or shape[0] is None:
        return None
    if shape[0] > 64 or any(bound is None or len(bound) != 1 for bound in bounds):
        return None
    start, stop, step = (bound[0] for bound in bounds if bound is not None)
    return np.arange(shape[0])[start:stop:step] if step > 0 else None
