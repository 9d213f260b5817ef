"""Headers of Core ML's weight files; of their contents only small constants are ever read.

Layout (coremltools' MILBlob StorageFormat, version 2): a 64-byte header of u32 count and u32 version; at each
blob's offset a 64-byte record of u32 0xDEADBEEF, u32 type, u64 size in bytes, u64 data offset, u64 padding
bits. All little endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from g4patch.errors import BundleError
from g4patch.formats.coreml.package import blob_path, refuse_pointer

_HEADER = struct.Struct("<II56x")
_RECORD = struct.Struct("<IIQQQ32x")
_SENTINEL = 0xDEADBEEF
_VERSION = 2

# Storage type -> MIL's name of the element type.
_TYPES = {
    1: "float16",
    2: "float32",
    3: "uint8",
    4: "int8",
    5: "bfloat16",
    6: "int16",
    7: "uint16",
    8: "int4",
    9: "uint1",
    10: "uint2",
    11: "uint4",
    12: "uint3",
    13: "uint6",
    14: "int32",
    15: "uint32",
    16: "float8e4m3fn",
    17: "float8e5m2",
}


@dataclass(frozen=True)
class Blob:
    """One blob's record: `dtype` as stored, `size` bytes at `start` of `path`."""

    path: Path
    offset: int
    dtype: str
    size: int
    start: int


@dataclass
class Weights:
    """The weight files that a model names. Records are read when asked for, each file is opened once."""

    model_file: Path
    _files: dict[str, tuple[Path, BinaryIO, int]] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that were asked for, in order."""
        return tuple(path for path, _, _ in self._files.values())

    def blob(self, name: str, offset: int) -> Blob:
        """The record at an offset of a file. Raises BundleError where the file cannot hold it."""
        path, file, size = self._open(name)
        start = offset + _RECORD.size
        if start > size:
            raise _too_short(path, size, start)
        sentinel, kind, length, data, _ = _RECORD.unpack(_read(file, offset, _RECORD.size))
        if sentinel != _SENTINEL or kind not in _TYPES:
            raise BundleError(
                f"{path} has no weight at offset {offset:,}",
                "it belongs to another model: copy the package again",
            )
        if data + length > size:
            raise _too_short(path, size, data + length)
        return Blob(path, offset, _TYPES[kind], length, data)

    def read(self, name: str, blob: Blob) -> bytes:
        """The bytes of a blob: for small ones only."""
        return _read(self._open(name)[1], blob.start, blob.size)

    def _open(self, name: str) -> tuple[Path, BinaryIO, int]:
        if name not in self._files:
            path = blob_path(self.model_file, name)
            try:
                file = path.open("rb")
                self._files[name] = (path, file, os.fstat(file.fileno()).st_size)
            except OSError as error:
                raise BundleError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error
            _check_header(path, _read(file, 0, _HEADER.size))
        return self._files[name]

    def _close(self) -> None:
        for _, file, _ in self._files.values():
            file.close()


@contextmanager
def open_weights(model_file: Path) -> Iterator[Weights]:
    """The weight files of a model, closed at the end."""
    weights = Weights(model_file)
    try:
        yield weights
    finally:
        weights._close()


def _check_header(path: Path, header: bytes) -> None:
    refuse_pointer(path, header)
    if len(header) < _HEADER.size or _HEADER.unpack(header)[1] != _VERSION:
        raise BundleError(
            f"{path} is not a Core ML weight file of version {_VERSION}", "copy or export the package again"
        )


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _too_short(path: Path, size: int, needed: int) -> BundleError:
    return BundleError(
        f"{path} has {size:,} bytes, and the model needs at least {needed:,}", "was the copy interrupted?"
    )
