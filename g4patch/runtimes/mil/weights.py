"""`weight.bin`: the file that holds the constants of an ML Program, read through a memory map and only where asked.

The layout is version 2 of the MIL blob storage format, little-endian: a 64-byte header (`<II`: number of blobs,
version), and at each blob's offset 64 bytes of metadata (`<IIQQQ`: sentinel, element type, size in bytes, offset of the
data, padding in bits).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.errors import BundleError
from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil.types import Array, ElementType, TensorType, decode, pack_bytes

_HEADER = struct.Struct("<II")
_METADATA = struct.Struct("<IIQQQ")
_BLOCK = 64
_VERSION = 2
_SENTINEL = 0xDEADBEEF
_MODEL_PATH = "@model_path/weights/"
_RECOPY = "copy the bundle again, or export it again"

# Pages of the map count as this process's memory until they are handed back.
_RELEASE_BYTES = 64 * 1024 * 1024
# Elements decoded at once: small enough to stay near the processor, enough to be worth a matrix product.
_BLOCK_ELEMENTS = 1024 * 1024
# What one op may have decoded as a whole: 1 GiB in float32.
_DENSE_ELEMENTS = 2**28

Rows = slice | NDArray[np.int64]


@dataclass(frozen=True)
class Lazy:
    """A constant tensor of rank 1 or more that is decoded where it is read.

    `read` takes rows of the first axis, a slice with bounds or int64 indices within them, and gives
    `[rows, *shape[1:]]` in `dtype`, by which the interpreter holds its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Rows], Array] = field(repr=False)

    @classmethod
    def of(cls, tensor: Array | Lazy) -> Lazy:
        """A tensor as if it were stored: small constants stand in the program itself."""
        if isinstance(tensor, Lazy):
            return tensor
        return cls(tensor.shape, tensor.dtype, lambda rows: tensor[rows])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def blocks(self) -> Iterator[slice]:
        """Slices that together are all rows, each of a size that is worth decoding at once."""
        length = self.shape[0]
        step = max(1, _BLOCK_ELEMENTS // max(1, math.prod(self.shape[1:])))
        return (slice(start, min(start + step, length)) for start in range(0, length, step))

    def dense(self) -> Array:
        """The whole tensor. Raises Unavailable if it is too large to hold decoded."""
        if self.size > _DENSE_ELEMENTS:
            raise Unavailable(f"a constant of shape {self.shape} is needed whole, which takes too much memory here")
        whole = np.empty(self.shape, self.dtype)
        for rows in self.blocks():
            whole[rows] = self.read(rows)
        return whole


@dataclass(frozen=True)
class Blob:
    """Where a constant is stored: a file name as the program writes it, the offset of its metadata, its type."""

    file: str
    offset: int
    type: TensorType


class Weights:
    """The weight files of one bundle. `folder` is the one that `@model_path/weights` stands for.

    Files are opened when a constant in them is first asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, _File] = {}

    def tensor(self, blob: Blob) -> Lazy | Array:
        """A stored constant: lazily, or as an array if it has rank 0. Raises BundleError for a damaged file."""
        shape = blob.type.static_shape()
        if shape is None:
            raise BundleError(f"a constant in {blob.file} has no fixed shape", "export the model again")
        file = self._file(blob.file)
        start = file.check(blob)
        vector = packed(shape or (1,), blob.type.element, lambda low, high: file.view(start + low, start + high))
        return vector if shape else vector.dense().reshape(())

    def _file(self, name: str) -> _File:
        if name not in self._files:
            inner = name.removeprefix(_MODEL_PATH)
            if not name.startswith(_MODEL_PATH) or inner != Path(inner).name or inner in ("", ".", ".."):
                raise BundleError(f"a constant is stored in {name!r}, outside the bundle's weights", _RECOPY)
            self._files[name] = _File(self.folder / inner)
        return self._files[name]


class _File:
    """One mapped weight file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if not path.is_file():
                raise BundleError(f"{path} is missing", _RECOPY)
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} cannot be read: {error}", _RECOPY) from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._handed_out = 0
        version = _HEADER.unpack_from(self._map)[1] if len(self._map) >= _BLOCK else None
        if version != _VERSION:
            raise BundleError(f"{path} is not a weight file of version 2", "run git lfs pull if it is a pointer file")

    def check(self, blob: Blob) -> int:
        """Where a blob's data starts, after checking its size and type against the file and the program."""
        where = f"{self._path.name} at offset {blob.offset}"
        if blob.offset + _BLOCK > len(self._map):
            raise BundleError(f"{where} is past the end of the file", _RECOPY)
        sentinel, code, size, start, _ = _METADATA.unpack_from(self._map, blob.offset)
        if sentinel != _SENTINEL:
            raise BundleError(f"{where} holds no constant", _RECOPY)
        if start + size > len(self._map):
            raise BundleError(f"the constant of {where} is cut off", _RECOPY)
        element = blob.type.element
        expected = pack_bytes(math.prod(blob.type.static_shape() or ()), element.bits)
        if code != element.blob_code or size != expected:
            raise BundleError(
                f"{where} holds {size} bytes of type {code}, the program expects {expected} bytes of {element.name}",
                _RECOPY,
            )
        return int(start)

    def view(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes of the file, not copied."""
        self._handed_out += stop - start
        if self._handed_out > _RELEASE_BYTES and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._handed_out = 0
        return self._bytes[start:stop]


def packed(shape: tuple[int, ...], element: ElementType, between: Callable[[int, int], NDArray[np.uint8]]) -> Lazy:
    """A tensor over packed bytes; `between(first, last)` gives a range of them."""
    width = math.prod(shape[1:])
    row_bytes, odd_bits = divmod(width * element.bits, 8)

    def elements(first: int, last: int) -> Array:
        # Eight elements take whole bytes at any width, so decoding starts at a multiple of eight.
        base = first // 8 * 8
        raw = between(pack_bytes(base, element.bits), pack_bytes(last, element.bits))
        return decode(raw, element)[first - base : last - base]

    def scattered(rows: NDArray[np.int64]) -> Array:
        if odd_bits:
            return np.stack([elements(row * width, (row + 1) * width) for row in rows.tolist()])
        return decode(np.stack([between(row * row_bytes, (row + 1) * row_bytes) for row in rows.tolist()]), element)

    def read(rows: Rows) -> Array:
        if isinstance(rows, slice):
            return elements(rows.start * width, rows.stop * width).reshape(-1, *shape[1:])
        if not len(rows):
            return np.empty((0, *shape[1:]), element.held)
        return scattered(rows).reshape(-1, *shape[1:])

    return Lazy(shape, element.held, read)
