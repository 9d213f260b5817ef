"""MIL's types and constant values, translated to numpy and back.

An immediate value is stored in the field that its type calls for: `ints` for int32, int16 and uint16, `floats` for
float32, `bools`, `strings`, and packed little-endian `bytes` for float16, int8, uint8, uint32 and all sub-byte types
(coremltools' `IMMEDIATE_VALUE_TYPES_IN_BYTES`).
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.errors import BundleError, EditError
from g4patch.formats.coreml.proto import Message, mil_pb2
from g4patch.formats.coreml.weights import Weights
from g4patch.view import SMALL_CONSTANT, Shape

Array = NDArray[Any]

# MIL's short names of types in `cast`, where they are not numpy's.
CAST_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}
_MIL_CASTS = {numpy: mil for mil, numpy in CAST_NAMES.items()}

# Element types that numpy has; the others are sub-byte, bfloat16, float8 and strings.
_NUMPY = frozenset({"bool", "float16", "float32", "float64"}) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_FIELDS = {
    "bool": "bools",
    "string": "strings",
    "float32": "floats",
    "float64": "doubles",
    "int16": "ints",
    "uint16": "ints",
    "int32": "ints",
    "int64": "longInts",
    "uint64": "longInts",
}


def dtype_name(data_type: int) -> str:
    """The name of a MIL data type: numpy's where numpy has the type."""
    try:
        name: str = mil_pb2().DataType.Name(data_type)
    except ValueError:
        return f"type {data_type}"
    return name.lower()


def data_type(dtype: str) -> int:
    """The MIL data type of a name. Raises EditError where MIL has none."""
    try:
        number: int = mil_pb2().DataType.Value(dtype.upper())
    except ValueError as error:
        raise EditError(f"Core ML has no type {dtype}") from error
    return number


def is_state(value_type: Message) -> bool:
    """Whether a value type is that of something kept between runs."""
    return bool(value_type.WhichOneof("type") == "stateType")


def tensor_type(value_type: Message) -> Message | None:
    """The tensor in a value type, also of a state; None for lists, tuples and dictionaries."""
    kind = value_type.WhichOneof("type")
    if kind == "stateType":
        return tensor_type(value_type.stateType.wrappedType)
    return value_type.tensorType if kind == "tensorType" else None


def shape_of(tensor: Message) -> Shape | None:
    """The dimensions of a tensor type, None for unknown ones; None where even the rank is unknown."""
    if any(d.WhichOneof("dimension") == "unknown" and d.unknown.variadic for d in tensor.dimensions):
        return None
    return tuple(int(d.constant.size) if d.WhichOneof("dimension") == "constant" else None for d in tensor.dimensions)


def elements(value: Message) -> int | None:
    """How many elements a constant tensor has by its type; None where that is open."""
    tensor = tensor_type(value.type)
    shape = shape_of(tensor) if tensor is not None else None
    if shape is None:
        return None
    known = [size for size in shape if size is not None]
    return math.prod(known) if len(known) == len(shape) else None


def bits(dtype: str) -> int:
    """The bits of one stored element."""
    if dtype == "bool":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8


def text(value: Message) -> str | None:
    """A constant string, else None."""
    strings = value.immediateValue.tensor.strings.values
    return strings[0] if len(strings) == 1 else None


def small_array(value: Message, weights: Weights) -> Array | None:
    """A constant of at most SMALL_CONSTANT elements as numpy; None for larger ones and for types numpy lacks.

    Raises BundleError where fewer or more elements are stored than the type says.
    """
    tensor = tensor_type(value.type)
    count = elements(value)
    if tensor is None or count is None or count > SMALL_CONSTANT:
        return None
    dtype, shape = dtype_name(tensor.dataType), shape_of(tensor)
    if dtype not in _NUMPY or shape is None:
        return None
    stored = _stored(value, dtype, weights)
    if stored.size != count:
        raise BundleError(f"a constant of shape {list(shape)} holds {stored.size} elements", "export the package again")
    return stored.reshape([size or 0 for size in shape])


def _stored(value: Message, dtype: str, weights: Weights) -> Array:
    if value.WhichOneof("value") == "blobFileValue":
        blob = weights.blob(value.blobFileValue.fileName, value.blobFileValue.offset)
        if blob.size > SMALL_CONSTANT * 8:
            return np.zeros(0)
        return _from_bytes(weights.read(value.blobFileValue.fileName, blob), dtype)
    field = value.immediateValue.tensor.WhichOneof("value")
    if field is None or field == "strings":
        return np.zeros(0, dtype)
    values = getattr(value.immediateValue.tensor, field).values
    if field == "bytes":
        return _from_bytes(values, dtype)
    return np.array(values[: SMALL_CONSTANT + 1]).astype(dtype)


def _from_bytes(content: bytes, dtype: str) -> Array:
    little = np.dtype(dtype).newbyteorder("<")
    whole = len(content) // little.itemsize * little.itemsize
    return np.frombuffer(content[:whole], little).astype(dtype)


def scalar_value(dtype: str, number: int | str) -> Message:
    """A constant of rank 0, as coremltools writes one."""
    value = mil_pb2().Value()
    value.type.tensorType.dataType = data_type(dtype)
    tensor = value.immediateValue.tensor
    field = _FIELDS.get(dtype, "bytes")
    if field == "bytes":
        tensor.bytes.values = np.array(number, np.dtype(dtype).newbyteorder("<")).tobytes()
    else:
        getattr(tensor, field).values.append(bool(number) if dtype == "bool" else number)
    return value


def cast_name(dtype: str) -> str:
    """What `cast` calls a numpy type."""
    return _MIL_CASTS.get(dtype, dtype)


def field_for(dtype: str) -> str:
    """The field of an immediate tensor that holds elements of a type."""
    return _FIELDS.get(dtype, "bytes")
