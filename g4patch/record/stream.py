"""Write a reference tensor by tensor: a run's logits alone can be hundreds of megabytes.

The safetensors library writes a file from tensors that are all in memory. Its format lets one do otherwise: a length
(8 bytes, little endian), a JSON header of that length, which may end in spaces, and the tensors' bytes in the header's
order without a gap (https://huggingface.co/docs/safetensors, "Format"). The header holds the tolerances, which are
known last: room is left for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from g4patch import reference
from g4patch.copying import Progress, refuse_existing, refuse_full, sync
from g4patch.errors import BundleError, UsageError

Shape = tuple[int, ...]
Metadata = Mapping[str, Any]

# What references hold, by safetensors' names.
_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}

# For the tolerance of an expected tensor, at most: two numbers and a reason of three lines.
_ROOM = 512


@dataclass(frozen=True)
class Spec:
    """The dtype and shape of a tensor that is to be written."""

    dtype: np.dtype[Any]
    shape: Shape

    @property
    def size(self) -> int:
        """In bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass
class Stream:
    """A reference in the making. Each tensor is written once, in any order, then `finish` makes it a file to read."""

    path: Path
    file: IO[bytes]
    specs: Mapping[str, Spec]
    room: int
    progress: Progress
    done: int = 0
    written: set[str] = field(default_factory=set)
    offsets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        offset = 0
        # Wide elements first: each tensor then begins at a multiple of its element's size.
        for name in sorted(self.specs, key=lambda name: (-self.specs[name].dtype.itemsize, name)):
            self.offsets[name] = offset
            offset += self.specs[name].size

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Write one tensor. Raises BundleError where it holds NaN or infinities, which no bundle could reproduce."""
        spec = self.specs[name]
        assert array.shape == spec.shape, f"{name} is {array.shape}, not {spec.shape}"
        if spec.dtype.kind == "f" and not np.isfinite(array).all():
            raise BundleError(f"{name} holds NaN or infinities", "nothing was written; is the checkpoint whole?")
        with _writing(self.path):
            self.file.seek(8 + self.room + self.offsets[name])
            self.file.write(np.ascontiguousarray(array, spec.dtype).data)
        self.written.add(name)
        self.done += spec.size
        self.progress(f"writing {self.path.name}", self.done, sum(spec.size for spec in self.specs.values()))

    def finish(self, metadata: Metadata) -> None:
        """Write the header."""
        assert self.written == set(self.specs), f"not written: {set(self.specs) - self.written}"
        header = _header(self.specs, self.offsets, metadata)
        assert len(header) <= self.room, "the tolerances are longer than the room that was left for them"
        with _writing(self.path):
            self.file.seek(0)
            self.file.write(self.room.to_bytes(8, "little") + header.ljust(self.room))
            self.file.flush()


@contextmanager
def streaming(out: Path, specs: Mapping[str, Spec], metadata: Metadata, progress: Progress) -> Iterator[Stream]:
    """A stream that becomes the file `out` at the end, and nothing if there is an error.

    `metadata` is all but the tolerances. Raises UsageError where `out` exists or there is too little room for it,
    BundleError where what was written does not read as a reference.
    """
    refuse_existing(out)
    refuse_full(out, sum(spec.size for spec in specs.values()))
    expected = {name.rsplit("/", 1)[1] for name in specs if "/expected/" in name}
    room = len(_header(specs, dict.fromkeys(specs, 1 << 60), metadata)) + _ROOM * (1 + len(expected))
    room += -room % 8  # the tensors begin at a multiple of 8, as the library has it
    partial = out.with_name(f".{out.name}.g4patch-partial")
    try:
        with _writing(out):
            file = partial.open("wb")
        with file:
            yield Stream(out, file, specs, room, progress)
        reference.load(partial)
        with _writing(out):
            sync(partial)
            os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", "choose another place") from error


def _header(specs: Mapping[str, Spec], offsets: Mapping[str, int], metadata: Metadata) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"g4patch": json.dumps(metadata, allow_nan=False)}}
    for name, offset in offsets.items():
        spec = specs[name]
        span = [offset, offset + spec.size]
        entries[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
    return json.dumps(entries).encode()


def spec_of(array: NDArray[Any]) -> Spec:
    """A tensor's own spec. Raises ValueError for a dtype that references do not hold."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _NAMES:
        raise ValueError(f"it is {array.dtype}; references hold {', '.join(code.lower() for code in _DTYPES)}")
    return Spec(dtype, array.shape)


def float32(*shape: int) -> Spec:
    """A float32 tensor."""
    return Spec(np.dtype("<f4"), shape)


def int32(*shape: int) -> Spec:
    """An int32 tensor."""
    return Spec(np.dtype("<i4"), shape)


def bounds_json(bounds: Mapping[str, reference.Tolerance]) -> dict[str, Any]:
    """Tolerances as a reference's metadata holds them."""
    return {name: vars(bound) for name, bound in sorted(bounds.items())}
