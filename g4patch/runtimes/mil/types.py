"""MIL's element types, and how the interpreter holds each of them.

Floats of every width are held as float32, so that arithmetic runs in single precision: a value that the program
declares fp16 is rounded to fp16 after each op, and stays a float32 array. Integers keep their width; sub-byte
integers are held in a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Parts of this many elements stay in the cache from one step of rounding to the next.
_ROUNDED_AT_ONCE = 32768

Array = NDArray[Any]
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class ElementType:
    """One of MIL's element types.

    `bits` is the width in storage, `held` the numpy dtype inside the interpreter, `outside` the one that callers
    see, `blob_code` the type code in weight.bin (None: never stored there).
    """

    name: str
    bits: int
    held: np.dtype[Any]
    outside: np.dtype[Any]
    blob_code: int | None = None


def _element(name: str, bits: int, held: str, outside: str = "", blob_code: int | None = None) -> ElementType:
    return ElementType(name, bits, np.dtype(held), np.dtype(outside or held), blob_code)


# Keys: `DataType` in MIL.proto. Blob codes: `BlobDataType` of Apple's MIL blob storage format, version 2.
ELEMENT_TYPES: dict[int, ElementType] = {
    1: _element("bool", 8, "bool"),
    2: _element("string", 0, "object"),
    10: _element("fp16", 16, "float32", "float16", 1),
    11: _element("fp32", 32, "float32", "", 2),
    13: _element("bf16", 16, "float32", "", 5),
    21: _element("int8", 8, "int8", "", 4),
    22: _element("int16", 16, "int16", "", 6),
    23: _element("int32", 32, "int32", "", 14),
    24: _element("int64", 64, "int64"),
    25: _element("int4", 4, "int8", "", 8),
    31: _element("uint8", 8, "uint8", "", 3),
    32: _element("uint16", 16, "uint16", "", 7),
    33: _element("uint32", 32, "uint32", "", 15),
    34: _element("uint64", 64, "uint64"),
    35: _element("uint4", 4, "uint8", "", 11),
    36: _element("uint2", 2, "uint8", "", 10),
    37: _element("uint1", 1, "uint8", "", 9),
    38: _element("uint6", 6, "uint8", "", 13),
    39: _element("uint3", 3, "uint8", "", 12),
    40: _element("fp8e4m3fn", 8, "float32", "", 16),
    41: _element("fp8e5m2", 8, "float32", "", 17),
}
BY_NAME = {element.name: element for element in ELEMENT_TYPES.values()}
FP16 = BY_NAME["fp16"]


@dataclass(frozen=True)
class TensorType:
    """The declared type of a value. `shape` is None where even the rank is open."""

    element: ElementType
    shape: Shape | None

    def admits(self, shape: tuple[int, ...]) -> bool:
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            declared in (None, actual) for declared, actual in zip(self.shape, shape, strict=True)
        )

    def static_shape(self) -> tuple[int, ...] | None:
        """The shape, if no part of it is open."""
        if self.shape is None:
            return None
        known = tuple(dim for dim in self.shape if dim is not None)
        return known if len(known) == len(self.shape) else None


def round_to_fp16(array: Array) -> Array:
    """The nearest fp16 value of each element (ties to even, beyond 65504 infinite), as float32.

    Adding 1.5 * 2^13 times an element's power of two leaves room for the 11 bits of fp16, and the addition itself
    rounds; below 2^-14 the power stays there, as in fp16's subnormals. Twice as fast as casting there and back, and
    more where the processor has no instruction for that.
    """
    source = np.asarray(array, np.float32, order="C")
    rounded = np.empty(source.shape, np.float32)
    flat, out = source.reshape(-1), rounded.reshape(-1)
    scratch = np.empty(min(_ROUNDED_AT_ONCE, flat.size), np.uint32)
    for start in range(0, flat.size, _ROUNDED_AT_ONCE):
        part = flat[start : start + _ROUNDED_AT_ONCE]
        _round_part(part, out[start : start + _ROUNDED_AT_ONCE], scratch[: part.size])
    return rounded


def _round_part(part: Array, out: Array, bits: NDArray[np.uint32]) -> None:
    exponent = np.uint32(23)
    np.bitwise_and(part.view(np.uint32), np.uint32(0xFF) << exponent, out=bits)
    np.clip(bits, np.uint32(127 - 14) << exponent, np.uint32(127 + 17) << exponent, out=bits)
    bits += (np.uint32(13) << exponent) | np.uint32(1 << 22)
    room = bits.view(np.float32)
    np.add(part, room, out=out)
    out -= room
    # What is 2^16 or more becomes infinite on the way up.
    out *= np.float32(2.0**112)
    out *= np.float32(2.0**-112)
    np.copysign(out, part, out=out)


def pack_bytes(count: int, bits: int) -> int:
    """Bytes that `count` elements of `bits` bits take, packed without gaps."""
    return -(-count * bits // 8)


def unpack(raw: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Sub-byte fields of `[..., N]` bytes: uint8 `[..., N * 8 // bits]`. The first field is in the lowest bits.

    Fields of 3 and 6 bits straddle bytes; bits left over at the end are dropped.
    """
    if bits == 8:
        return raw
    if bits in (1, 2, 4):
        fields = np.empty((*raw.shape, 8 // bits), np.uint8)
        mask = np.uint8((1 << bits) - 1)
        for position in range(8 // bits):
            np.bitwise_and(raw >> np.uint8(position * bits), mask, out=fields[..., position])
        return fields.reshape(*raw.shape[:-1], -1)
    single = np.unpackbits(raw, axis=-1, bitorder="little")
    whole = single.shape[-1] // bits * bits
    grouped = single[..., :whole].reshape(*raw.shape[:-1], -1, bits)
    return np.packbits(grouped, axis=-1, bitorder="little")[..., 0]


def decode(raw: NDArray[np.uint8], element: ElementType) -> Array:
    """Little-endian storage `[..., N]` bytes -> values `[..., N * 8 // bits]` in the dtype the interpreter holds."""
    if element.bits < 8:
        fields = unpack(raw, element.bits)
        if element.held.kind == "u":
            return fields
        # Shift the field's sign bit to the byte's, and back with sign.
        spare = 8 - element.bits
        return (fields << np.uint8(spare)).view(np.int8) >> np.int8(spare)
    if element.name == "bf16":
        return (_view(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if element.name == "fp8e5m2":
        return (raw.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    if element.name == "fp8e4m3fn":
        return np.take(_E4M3FN, raw)
    stored = _view(raw, element.outside.newbyteorder("<"))
    return stored.astype(element.held, copy=False)


def _view(raw: NDArray[np.uint8], dtype: str | np.dtype[Any]) -> Array:
    return np.ascontiguousarray(raw).view(dtype)


def _e4m3fn_values() -> NDArray[np.float32]:
    """All 256 values of FP8 E4M3FN: bias 7, no infinities, NaN only where all exponent and mantissa bits are set."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    size[(codes & 127) == 127] = math.nan
    return np.where(codes >> 7 == 1, -size, size).astype(np.float32)


_E4M3FN = _e4m3fn_values()
