"""A file told by another that it has most of its bytes in common with: kilobytes in place of gigabytes of weights.

So a replaced file is kept without what its replacement holds too, and so a change of a few rows of a table is told.

Layout of a delta: the magic, the length of a JSON array as a little-endian uint64, the array, then bytes. The array has
the pieces of the original in order, `[offset, size]` for a part of the replacement, `[null, size]` for the next bytes
of the delta itself.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from g4patch.copying import sync
from g4patch.errors import BundleError

_SUFFIX, _UNFINISHED = ".delta", ".delta-unfinished"
# Bytes in common with its replacement from which on a file is not kept whole.
_WORTH_IT = 64 * 1024 * 1024
_MAGIC = b"g4patch\x01"
_CHUNK = 4 * 1024 * 1024
_HINT = "restore it, or the bundle, from elsewhere"

# A part that an original and its replacement have in common: offset in the one, offset in the other, size.
Span = tuple[int, int, int]
# A part of the original: offset in the replacement, or None for bytes of the delta's own, and size.
_Piece = tuple[int | None, int]
# Bytes and where they go, of a file that is changed where it is.
Patch = tuple[int, bytes]


def of(kept: Path) -> Path:
    """The delta that may stand in place of a kept file."""
    return kept.with_name(kept.name + _SUFFIX)


def thin(kept: Path, shared: Sequence[Span]) -> None:
    """Leave of a kept file what its replacement does not hold, if that saves much and the disk lets us.

    Killed at any moment, the file or its whole delta is there: either will do to put it back.
    """
    if sum(size for _, _, size in shared) < _WORTH_IT:
        return
    unfinished = kept.with_name(kept.name + _UNFINISHED)
    try:
        write(kept, shared, unfinished)
        shutil.copystat(kept, unfinished)
        sync(unfinished)
        os.replace(unfinished, of(kept))
        sync(kept.parent)
        kept.unlink()
        sync(kept.parent)
    except OSError:
        unfinished.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove what a kill left of deltas in the making, at any depth."""
    for path in folder.rglob(f"*{_UNFINISHED}"):
        path.unlink()


def write(original: Path, shared: Sequence[Span], target: Path) -> None:
    """Write a delta that makes `original` of its replacement. Raises ValueError for parts that overlap."""
    with original.open("rb") as source, target.open("xb") as file:
        pieces, own, at = list[_Piece](), list[tuple[int, int]](), 0
        for before, after, size in (*sorted(shared), (original.stat().st_size, 0, 0)):
            if before < at:
                raise ValueError("parts of the original overlap")
            pieces.append((None, before - at))
            own.append((at, before - at))
            pieces.append((after, size))
            at = before + size
        file.write(_head(pieces))
        for offset, size in own:
            _copy(source, offset, size, file)


def _head(pieces: Sequence[_Piece]) -> bytes:
    table = json.dumps(pieces).encode()
    return _MAGIC + struct.pack("<Q", len(table)) + table


def write_patches(size: int, patches: Sequence[Patch], target: Path) -> None:
    """Write the delta of a file of `size` bytes that differs from another only in `patches`, which do not overlap."""
    pieces, at = list[_Piece](), 0
    for offset, data in sorted(patches):
        pieces += [(at, offset - at), (None, len(data))]
        at = offset + len(data)
    pieces.append((at, size - at))
    target.write_bytes(_head(pieces) + b"".join(data for _, data in sorted(patches)))


def patches(path: Path) -> list[Patch]:
    """What a delta of `write_patches` changes. Raises BundleError for another, or one that is damaged."""
    found, at = list[Patch](), 0
    with _opened(path, sys.maxsize) as (delta, pieces):
        for offset, size in pieces:
            if offset is None:
                found.append((at, delta.read(size)))
            elif offset != at:
                raise BundleError(f"{path} cannot be used: it moves bytes", _HINT)
            at += size
    return found


def refuse_unfit(path: Path, replacement: Path) -> None:
    """Raise BundleError for a delta that is damaged, or reaches beyond its replacement."""
    with _opened(path, replacement.stat().st_size):
        pass


@contextmanager
def _opened(path: Path, available: int) -> Iterator[tuple[BinaryIO, list[_Piece]]]:
    """A delta at its own bytes, and its pieces. Raises BundleError where it is none for `available` bytes."""
    try:
        with path.open("rb") as delta:
            _, pieces = _pieces(delta, path.stat().st_size, available)
            yield delta, pieces
    except (OSError, ValueError, TypeError, RecursionError, struct.error) as error:
        raise BundleError(f"{path} cannot be used: {error}", _HINT) from error


def rebuild(path: Path, replacement: Path, target: Path) -> None:
    """Write the original that a delta and its replacement make. Raises BundleError where they do not fit."""
    refuse_unfit(path, replacement)
    with path.open("rb") as delta, replacement.open("rb") as base, target.open("xb") as file:
        at, pieces = _pieces(delta, path.stat().st_size, replacement.stat().st_size)
        for offset, size in pieces:
            if offset is None:
                _copy(delta, at, size, file)
                at += size
            else:
                _copy(base, offset, size, file)


def _pieces(delta: BinaryIO, size: int, available: int) -> tuple[int, list[_Piece]]:
    """Where a delta's own bytes begin, and its pieces. Raises ValueError, TypeError or struct.error for no delta."""
    if delta.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is not a delta")
    (length,) = struct.unpack("<Q", delta.read(8))
    if length > size:
        raise ValueError("it ends too early")
    pieces = [(offset, int(count)) for offset, count in json.loads(delta.read(length))]
    own = sum(count for offset, count in pieces if offset is None)
    if delta.tell() + own != size:
        raise ValueError("its size is not what it says")
    if any(count < 0 or (offset is not None and not 0 <= offset <= available - count) for offset, count in pieces):
        raise ValueError("it reaches beyond the file that it builds on")
    return delta.tell(), pieces


def _copy(source: BinaryIO, offset: int, size: int, file: BinaryIO) -> None:
    source.seek(offset)
    while size:
        chunk = source.read(min(size, _CHUNK))
        if not chunk:
            raise ValueError("it ends too early")
        file.write(chunk)
        size -= len(chunk)
