"""Write MLIR bytecode with the weights of another file carried over, byte for byte and unparsed.

A program is edited as a stub: the same file with 16 bytes in place of each blob. What comes back is written
around the original's blobs, which is what saving the whole program would give, without loading it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from g4patch.errors import BundleError
from g4patch.formats.coreai.bytecode import (
    ALIGNED,
    BLOB,
    PADDING,
    RESOURCE,
    RESOURCE_OFFSET,
    Bytecode,
    Resource,
)

_CHUNK = 4 * 1024 * 1024

# A piece of a file to write: bytes, or a span (offset, size) of the original file.
Piece = bytes | tuple[int, int]
Content = Callable[[Resource], Piece]


def write_stub(original: Bytecode, target: Path) -> None:
    """Write the same program with every blob replaced by 16 bytes that no other stub has.

    Equal blobs would be merged into one when the program is saved again, so each stub holds its own number.
    """
    numbers = {key: number for number, key in enumerate(original.resources)}

    def content(entry: Resource) -> Piece:
        return _stub(numbers[entry.key]) if entry.kind == BLOB else _own(entry)

    with target.open("xb") as file:
        _write(original, _layout(original, content), file)


def _stub(number: int) -> bytes:
    return b"g4patch\0" + struct.pack("<Q", number)


def _own(entry: Resource) -> Piece:
    return entry.offset, entry.size


def splice(original: Bytecode, edited: Bytecode, file: BinaryIO) -> bytes:
    """Write an edited stub with the original's blobs in place of its stubs. Returns the SHA-256 of the file.

    Raises ValueError where the stubs do not correspond one to one: then the program has to be saved
    officially.
    """
    by_stub = {_stub(number): entry for number, entry in enumerate(original.resources.values())}
    blobs = {key: edited.read(entry.offset, entry.size) for key, entry in edited.resources.items()}
    keys = [by_stub[stub].key if stub in by_stub else None for stub in blobs.values()]
    if len(keys) != len(by_stub) or keys != list(blobs):
        raise ValueError("the stubs of the weights did not come back one for one")

    def content(entry: Resource) -> Piece:
        if entry.kind != BLOB:
            return edited.read(entry.offset, entry.size)
        return _own(by_stub[blobs[entry.key]])

    return _write(original, _layout(edited, content), file)


def is_identity(original: Bytecode) -> bool:
    """Whether this module lays the file out as it is: written again, it would come out byte for byte."""
    at = 0
    for piece in _layout(original, _own):
        same = original.read(at, len(piece)) == piece if isinstance(piece, bytes) else piece[0] == at
        if not same:
            return False
        at += _length(piece)
    return at == original.size


def _layout(program: Bytecode, content: Content) -> Iterator[Piece]:
    """A program's file from start to end, with `content` for each of its resources."""
    entries = [entry for group in program.groups for entry in group.resources]
    resources, sizes = _lay_out(entries, content)
    yield program.header
    at = len(program.header)
    for section in program.sections:
        alignment = section.alignment
        if section.id == RESOURCE:
            pieces = resources
            alignment = max((entry.alignment for entry in entries), default=1)
        elif section.id == RESOURCE_OFFSET:
            pieces = [_resource_offsets(program, sizes)]
        else:
            pieces = [program.read(section.offset, section.size)]
        size = sum(map(_length, pieces))
        head = _section_head(section.id, size, alignment, at)
        yield head
        yield from pieces
        at += len(head) + size


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece[1]


def _varint(number: int) -> bytes:
    """A prefix varint: its first byte ends in as many zero bits as bytes follow."""
    for extra in range(8):
        if number < 1 << (7 * (extra + 1)):
            return (((number << 1) | 1) << extra).to_bytes(extra + 1, "little")
    return b"\x00" + struct.pack("<Q", number)


def _section_head(id: int, size: int, alignment: int, at: int) -> bytes:
    """A section's header, with alignment and padding only where its data would not lie aligned."""
    head = _varint(size)
    if (at + 1 + len(head)) % alignment:
        head += _varint(alignment)
        head += PADDING * (-(at + 1 + len(head)) % alignment)
        id |= ALIGNED
    return bytes((id,)) + head


def _lay_out(entries: Iterable[Resource], content: Content) -> tuple[list[Piece], list[int]]:
    """The pieces of a Resource section, and the size of each entry with its padding."""
    pieces: list[Piece] = []
    sizes: list[int] = []
    at = 0
    for entry in entries:
        piece = content(entry)
        length, head = _length(piece), b""
        if entry.kind == BLOB:
            head = _varint(entry.alignment) + _varint(length)
            head += PADDING * (-(at + len(head)) % entry.alignment)
        pieces += [head, piece]
        sizes.append(len(head) + length)
        at += sizes[-1]
    return pieces, sizes


def _resource_offsets(program: Bytecode, sizes: Iterable[int]) -> bytes:
    table = [_varint(program.external_groups)]
    remaining = iter(sizes)
    for group in program.groups:
        table += [_varint(group.key), _varint(len(group.resources))]
        for entry in group.resources:
            table += [_varint(entry.key_index), _varint(next(remaining)), bytes((entry.kind,))]
    return b"".join(table)


def _write(original: Bytecode, pieces: Iterable[Piece], file: BinaryIO) -> bytes:
    """Write pieces and return their SHA-256; spans are read from the original in chunks."""
    digest = hashlib.sha256()
    with original.path.open("rb") as source:
        for piece in pieces:
            for chunk in (piece,) if isinstance(piece, bytes) else _chunks(source, *piece):
                digest.update(chunk)
                file.write(chunk)
    return digest.digest()


def _chunks(source: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
    source.seek(offset)
    while size:
        chunk = source.read(min(size, _CHUNK))
        if not chunk:
            raise BundleError("the model's file became shorter while it was read", "is another program writing it?")
        yield chunk
        size -= len(chunk)


def digest(path: Path) -> bytes:
    """The SHA-256 of a file, read in chunks: what `main.hash` holds, 32 raw bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def same_weights(left: Bytecode, right: Bytecode) -> list[str]:
    """The keys of blobs that are not in both files with the same bytes."""
    keys = left.resources.keys() | right.resources.keys()
    with left.path.open("rb") as first, right.path.open("rb") as second:
        return sorted(
            key for key in keys if not _same_blob(first, left.resources.get(key), second, right.resources.get(key))
        )


def _same_blob(first: BinaryIO, left: Resource | None, second: BinaryIO, right: Resource | None) -> bool:
    if left is None or right is None or (left.size, left.alignment) != (right.size, right.alignment):
        return False
    chunks = zip(_chunks(first, left.offset, left.size), _chunks(second, right.offset, right.size), strict=True)
    return all(one == other for one, other in chunks)
