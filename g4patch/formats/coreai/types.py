"""MLIR types and constants as text -> numpy names, shapes and arrays."""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.view import Shape, Value

_TENSOR = re.compile(r"tensor<((?:(?:\d+|\?)x)*)([^,<>]+(?:<[^<>]*>)?)(?:, .*)?>")
_HANDLE = re.compile(r"!coreai\.handle<(.*)>")
_INTEGER = re.compile(r"([su]?)i(\d+)")
_DENSE = re.compile(r"dense<(.*)> : .*", re.DOTALL)
# Bits of one number, not those of a whole tensor, which stand in quotes.
_BITS = re.compile(r'(?<!")\b0x[0-9A-F]+')
# How to read the bits of a number, and what to add to them: a bfloat16 is the upper half of a float32.
_FORMS = {"float16": (">e", ""), "bfloat16": (">f", "0000"), "float32": (">f", ""), "float64": (">d", "")}
_BLOB = re.compile(r'dense_resource<"?(.+?)"?> : .*', re.DOTALL)
_PLAIN = frozenset(
    {
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    }
)
_FLOATS = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}


def value(name: str, type: str) -> Value:
    """What a type says of a value. A handle is what it holds."""
    tensor = _TENSOR.fullmatch(_inner(type))
    if tensor is None:
        return Value(name)
    dims, element = tensor.groups()
    shape: Shape = tuple(None if dim == "?" else int(dim) for dim in dims.split("x")[:-1])
    return Value(name, dtype(element), shape)


def is_state(type: str) -> bool:
    """Whether a type is that of something kept between runs."""
    return _HANDLE.fullmatch(type) is not None


def _inner(type: str) -> str:
    handle = _HANDLE.fullmatch(type)
    return handle.group(1) if handle else type


def dtype(element: str) -> str:
    """numpy's name for an element type, or the type itself where numpy has none."""
    integer = _INTEGER.fullmatch(element)
    if integer is None:
        return _FLOATS.get(element, element)
    sign, bits = integer.groups()
    if bits == "1" and not sign:
        return "bool"
    return f"{'uint' if sign == 'u' else 'int'}{bits}"


def bits(dtype: str) -> int:
    """Bits of one stored element; 0 where unknown. Booleans take a byte."""
    if dtype == "bool":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0


def elements(declared: Value) -> float:
    """How many elements a tensor has; infinity where that is open."""
    shape = _static(declared)
    return math.inf if shape is None else math.prod(shape)


def nbytes(declared: Value) -> int:
    """The size of a tensor with static dims, packed; 0 where unknown."""
    shape = _static(declared)
    if shape is None or declared.dtype is None:
        return 0
    return -(-math.prod(shape) * bits(declared.dtype) // 8)


def blob_key(attribute: str) -> str | None:
    """The name of the blob that a constant's attribute refers to; None for inline values."""
    match = _BLOB.fullmatch(attribute)
    return match.group(1) if match else None


def inline(attribute: str, declared: Value) -> NDArray[Any] | None:
    """The values of a small inline constant; None where they are not plain numbers. bf16 becomes float32."""
    match, shape, storage = _DENSE.fullmatch(attribute), _static(declared), _storage(declared.dtype)
    if match is None or storage is None or shape is None:
        return None
    text = _BITS.sub(lambda bits: _special(bits.group(), declared.dtype or ""), match.group(1) or "[]")
    try:
        return np.broadcast_to(np.array(json.loads(text), storage), shape)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _special(bits: str, dtype: str) -> str:
    """A number that MLIR prints as its bits, an infinity or a NaN, in the words of JSON; the bits where it is none."""
    form, padding = _FORMS.get(dtype, ("", ""))
    try:
        return json.dumps(struct.unpack(form, bytes.fromhex(bits[2:] + padding))[0])
    except (struct.error, IndexError, ValueError):
        return bits


def stored(data: bytes, declared: Value) -> NDArray[Any] | None:
    """The values of a small constant that is kept as a blob; None where numpy cannot read them."""
    shape = _static(declared)
    if declared.dtype not in _PLAIN or shape is None:
        return None
    array = np.frombuffer(data, declared.dtype)
    return array.reshape(shape) if array.size == math.prod(shape) else None


def _static(declared: Value) -> tuple[int, ...] | None:
    """A shape without open dimensions."""
    shape = tuple(dim for dim in declared.shape or () if dim is not None)
    return shape if declared.shape is not None and len(shape) == len(declared.shape) else None


def _storage(name: str | None) -> str | None:
    """The numpy dtype that holds values of a dtype exactly."""
    if name is None or name == "bool" or name in _PLAIN:
        return name
    if name == "bfloat16" or name.startswith("f"):
        return "float32"
    integer = re.fullmatch(r"(u?)int(\d+)", name)
    return f"{integer.group(1)}int8" if integer and int(integer.group(2)) < 8 else None
