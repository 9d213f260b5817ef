"""MLIR bytecode as bytes: its sections, and where the weights lie in it.

Layout (mlir.llvm.org/docs/BytecodeFormat, version 6): magic, version, producer with a zero at its end, then
sections `id | 0x80 if aligned, length, [alignment, padding]`. All numbers are prefix varints. Weights are
blobs in the Resource section; the ResourceOffset section names them and gives their sizes, in the order in
which they lie there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from g4patch.errors import BundleError

MAGIC = b"ML\xefR"
VERSION = 6

STRING, DIALECT, ATTR_TYPE, ATTR_TYPE_OFFSET, IR, RESOURCE, RESOURCE_OFFSET, DIALECT_VERSIONS, PROPERTIES = range(9)
_NAMES = (
    "String",
    "Dialect",
    "AttrType",
    "AttrTypeOffset",
    "IR",
    "Resource",
    "ResourceOffset",
    "DialectVersions",
    "Properties",
)
_REQUIRED = (STRING, DIALECT, ATTR_TYPE, ATTR_TYPE_OFFSET, IR, PROPERTIES)
BLOB = 0
ALIGNED = 0x80
PADDING = b"\xcb"
# Everything but the weights is read into memory. Real files have up to a few MB of it.
_LARGEST_SECTION = 512 * 1024 * 1024
_LARGEST_ALIGNMENT = 4096
_JUNK_HINT = "is it a Core AI asset, copied whole?"


@dataclass(frozen=True)
class Section:
    """One section: its id, where its data lies in the file, and its alignment (1 where none is given)."""

    id: int
    offset: int
    size: int
    alignment: int

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Resource:
    """One entry of the Resource section. `offset` and `size` are those of a blob's own bytes in the file."""

    key: str
    key_index: int
    kind: int
    alignment: int
    offset: int
    size: int


@dataclass(frozen=True)
class Group:
    """Resources of one owner. `key` is an index of a string (external) or of a dialect."""

    key: int
    resources: tuple[Resource, ...]


@dataclass(frozen=True)
class Bytecode:
    """A checked bytecode file: sections tile it without gaps, resources tile their section."""

    path: Path
    size: int
    header: bytes
    sections: tuple[Section, ...]
    external_groups: int
    groups: tuple[Group, ...]

    @cached_property
    def resources(self) -> dict[str, Resource]:
        """Blobs by key."""
        entries = (entry for group in self.groups for entry in group.resources)
        return {entry.key: entry for entry in entries if entry.kind == BLOB}

    def section(self, id: int) -> Section | None:
        return next((section for section in self.sections if section.id == id), None)

    def read(self, offset: int, size: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


class _Reader:
    """A cursor over the bytes of one section. Raises BundleError past the end."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data = data
        self.at = 0
        self.what = what

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise BundleError(f"{self.what} is malformed: it ends inside a value", _JUNK_HINT)
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def varint(self) -> int:
        first = self.take(1)[0]
        if first == 0:
            return int(struct.unpack("<Q", self.take(8))[0])
        extra = (first & -first).bit_length() - 1
        return int.from_bytes(bytes((first,)) + self.take(extra), "little") >> (extra + 1)


def parse(path: Path) -> Bytecode:
    """Walk a bytecode file from end to end.

    Raises BundleError for anything that is not a whole, sound file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(4096)
        if not head.startswith(MAGIC):
            raise BundleError(f"{path} is not MLIR bytecode", _JUNK_HINT)
        reader = _Reader(head, str(path))
        reader.take(len(MAGIC))
        version = reader.varint()
        if version != VERSION:
            raise BundleError(
                f"{path} is MLIR bytecode of version {version}; g4patch knows version {VERSION}",
                "export the model with a coreai-core that writes asset version 2.0",
            )
        end = head.find(b"\0", reader.at)
        if end < 0:
            raise BundleError(f"{path} is malformed: its producer has no end", _JUNK_HINT)
        header = head[: end + 1]
        sections = tuple(_walk(path, file, len(header), size))
        missing = [_NAMES[id] for id in _REQUIRED if id not in {section.id for section in sections}]
        if missing:
            raise BundleError(
                f"{path} ends before its {missing[0]} section ({size:,} bytes)", "was the copy interrupted?"
            )
        bytecode = Bytecode(path, size, header, sections, 0, ())
        return _with_resources(bytecode, file)


def _walk(path: Path, file: BinaryIO, start: int, size: int) -> Iterator[Section]:
    at, seen = start, set[int]()
    while at < size:
        file.seek(at)
        reader = _Reader(file.read(32 + _LARGEST_ALIGNMENT), f"{path} (section at byte {at:,})")
        tag = reader.take(1)[0]
        id, length, alignment = tag & ~ALIGNED, reader.varint(), 1
        if id >= len(_NAMES) or id in seen:
            raise BundleError(f"{path} is malformed: unknown or repeated section {id} at byte {at:,}", _JUNK_HINT)
        if tag & ALIGNED:
            alignment = reader.varint()
            if not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
                raise BundleError(
                    f"{path} is malformed: its {_NAMES[id]} section is aligned to {alignment}", _JUNK_HINT
                )
            padding = reader.take(-(at + reader.at) % alignment)
            if padding.strip(PADDING):
                raise BundleError(f"{path} is malformed: padding at byte {at:,} is not padding", _JUNK_HINT)
        data = at + reader.at
        if data + length > size:
            raise BundleError(
                f"{path} ends in the middle of its {_NAMES[id]} section ({size:,} of {data + length:,} bytes, or more)",
                "was the copy interrupted?",
            )
        if id != RESOURCE and length > _LARGEST_SECTION:
            raise BundleError(f"{path} has a {_NAMES[id]} section of {length:,} bytes", _JUNK_HINT)
        seen.add(id)
        yield Section(id, data, length, alignment)
        at = data + length


def _with_resources(bytecode: Bytecode, file: BinaryIO) -> Bytecode:
    resource, offsets = bytecode.section(RESOURCE), bytecode.section(RESOURCE_OFFSET)
    if resource is None and offsets is None:
        return bytecode
    if resource is None or offsets is None:
        raise BundleError(f"{bytecode.path} has only one of its two resource sections", "was the copy interrupted?")
    strings = _strings(bytecode, file)
    reader = _Reader(_load(file, offsets), f"{bytecode.path} (ResourceOffset section)")
    external, groups, at = reader.varint(), [], resource.offset
    while reader.left:
        key, count, entries = reader.varint(), reader.varint(), []
        if count > reader.left:
            raise BundleError(f"{reader.what} is malformed: it lists {count} resources", _JUNK_HINT)
        for _ in range(count):
            index, size, kind = reader.varint(), reader.varint(), reader.take(1)[0]
            if index >= len(strings) or at + size > resource.end:
                raise BundleError(f"{reader.what} is malformed: a resource lies outside its section", _JUNK_HINT)
            entries.append(_resource(bytecode, file, strings[index], index, kind, at, size))
            if resource.offset % entries[-1].alignment:
                raise BundleError(f"{reader.what} is malformed: a resource is not aligned", _JUNK_HINT)
            at += size
        groups.append(Group(key, tuple(entries)))
    if at != resource.end or external > len(groups):
        raise BundleError(f"{reader.what} is malformed: it does not cover the Resource section", _JUNK_HINT)
    keys = [entry.key for group in groups for entry in group.resources]
    if len(set(keys)) != len(keys):
        raise BundleError(f"{reader.what} is malformed: two resources have one name", _JUNK_HINT)
    return replace(bytecode, external_groups=external, groups=tuple(groups))


def _load(file: BinaryIO, section: Section) -> bytes:
    file.seek(section.offset)
    return file.read(section.size)


def _strings(bytecode: Bytecode, file: BinaryIO) -> list[str]:
    """The String section: a count, the sizes from the last string to the first, then the strings."""
    section = bytecode.section(STRING)
    assert section is not None
    reader = _Reader(_load(file, section), f"{bytecode.path} (String section)")
    count = reader.varint()
    if count > reader.left:
        raise BundleError(f"{reader.what} is malformed: it lists {count} strings", _JUNK_HINT)
    sizes = [reader.varint() for _ in range(count)][::-1]
    if sum(sizes) != reader.left or not all(sizes):
        raise BundleError(f"{reader.what} is malformed: its strings do not fill it", _JUNK_HINT)
    return [reader.take(size)[:-1].decode("utf-8", "surrogateescape") for size in sizes]


def _resource(bytecode: Bytecode, file: BinaryIO, key: str, index: int, kind: int, at: int, size: int) -> Resource:
    if kind != BLOB:
        return Resource(key, index, kind, 1, at, size)
    file.seek(at)
    reader = _Reader(file.read(min(size, 32 + _LARGEST_ALIGNMENT)), f"{bytecode.path} (resource {key})")
    alignment, length = reader.varint(), reader.varint()
    if not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise BundleError(f"{reader.what} is malformed: it is aligned to {alignment}", _JUNK_HINT)
    data = -(-(at + reader.at) // alignment) * alignment
    if data + length != at + size:
        raise BundleError(f"{reader.what} is malformed: {size} bytes for a blob of {length}", _JUNK_HINT)
    return Resource(key, index, kind, alignment, data, length)
