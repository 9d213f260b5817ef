"""Constants that hold some rows of a table: copied as they are stored, never decoded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from g4patch.runtimes.coreai.bindings import ConstantOp, HandleType, create_elements, ir

Array = NDArray[Any]

_BLOB = re.compile(r'dense_resource<"?(.+?)"?> : ')
_WIDTH = re.compile(r"(?:[su]?i|f|bf|tf)(\d+)")
_INTEGER = re.compile(r"(s|u)?i(\d+)")
_FLOATS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
# Rows of a table that is fed at run time are numbered in this base, digit by digit: every dtype holds the
# digits.
_BASE = 64


class CannotRun(Exception):
    """A lookup, or its table, has a form that cannot be cut out."""


class Rows:
    """Reads rows of blobs. `blobs` is key -> [offset, size] in the file at `path`."""

    def __init__(self, path: Path, blobs: Mapping[str, Sequence[int]]) -> None:
        self.path = path
        self.blobs = blobs

    def constant(self, op: Any, wanted: Array) -> Any:
        """A constant that holds the wanted rows of a constant, in their order, repeats included."""
        attribute, tensor = op.attributes["value"], op.results[0].type
        target = with_rows(tensor, len(wanted))
        if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
            return _splat(attribute, target)
        size = _row_size(tensor)
        stored = self._stored(attribute, tensor.shape[0] * size).reshape(tensor.shape[0], size)
        return _constant(target, stored[wanted])

    def _stored(self, attribute: Any, size: int) -> Array:
        if isinstance(attribute, ir.DenseElementsAttr):
            stored: Array = np.frombuffer(memoryview(attribute).tobytes(), np.uint8)
        else:
            match = _BLOB.match(str(attribute))
            offset, length = self.blobs.get(match.group(1), (0, 0)) if match else (0, 0)
            if length != size:
                raise CannotRun("its rows are stored in a way that is not known")
            stored = np.memmap(self.path, np.uint8, "r", offset, (length,))
        if len(stored) != size:
            raise CannotRun("its rows are stored in a way that is not known")
        return stored

    def invented(self, tensor: Any, wanted: Array) -> Any:
        """Rows for a table that is an input: no two alike, so that it shows which one was read."""
        width = int(np.prod(tensor.shape[1:]))
        digits = np.stack([wanted // _BASE**place % _BASE for place in range(4)], axis=1)
        values = np.resize(np.arange(4), width)
        if width < 4:
            raise CannotRun(f"its table is an input with rows of {width}")
        rows = np.ascontiguousarray(digits[:, values].astype(numpy_dtype(tensor)))
        return _constant(with_rows(tensor, len(wanted)), rows)

    def with_axes(self, value: Any, rank: int) -> Any:
        """A constant without axes, given axes of size 1; any other value as it is."""
        if len(value.type.shape):
            return value
        target = ir.RankedTensorType.get([1] * rank, value.type.element_type)
        return _splat(value.owner.attributes["value"], target)


def with_rows(tensor: Any, count: int) -> Any:
    """A tensor type with another first dimension."""
    return ir.RankedTensorType.get([count, *tensor.shape[1:]], tensor.element_type, tensor.encoding)


def numpy_dtype(tensor: Any) -> Any:
    """numpy's dtype for the elements of a tensor type, bfloat16 by ml_dtypes. Raises CannotRun."""
    element = str(getattr(tensor, "element_type", tensor))
    match = _INTEGER.fullmatch(element)
    if match is None and element in _FLOATS:
        return _FLOATS[element]
    if match is None:
        raise CannotRun(f"it takes an input of {element}")
    if element == "i1":
        return np.dtype(bool)
    return np.dtype(f"{'uint' if match.group(1) == 'u' else 'int'}{match.group(2)}")


def is_state(type: Any) -> bool:
    return isinstance(type, HandleType)


def held(type: Any) -> Any:
    """The type of what a state holds; any other type as it is."""
    return type.inner_type if is_state(type) else type


def nbytes(tensor: Any) -> int:
    """The size of a tensor, packed; 0 where a dimension is open."""
    match = _WIDTH.match(str(getattr(tensor, "element_type", "")))
    return math.prod(tensor.shape) * int(match.group(1)) // 8 if match and tensor.has_static_shape else 0


def _row_size(tensor: Any) -> int:
    """Bytes that a row takes as stored: sub-byte elements are packed."""
    match = _WIDTH.match(str(tensor.element_type))
    bits = int(match.group(1)) * int(np.prod(tensor.shape[1:])) if match else 1
    if bits % 8:
        raise CannotRun("its rows do not end at whole bytes")
    return bits // 8


def _splat(attribute: Any, target: Any) -> Any:
    return ConstantOp(value=ir.DenseElementsAttr.get_splat(target, attribute.get_splat_value())).result


def _constant(target: Any, rows: Array) -> Any:
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    return ConstantOp(value=create_elements(ir.Location.unknown(), target, data.tobytes())).result
