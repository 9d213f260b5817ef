"""Copy files and whole bundles so that a copy cut short is never taken for a bundle."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from g4patch.errors import UsageError
from g4patch.formats import FORMATS, Model, Staged

# What is being done, and how many bytes of how many are done.
Progress = Callable[[str, int, int], None]

_PARTIAL = ".g4patch-partial"
_CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class Copy:
    """A copy in the making: all of a bundle but the files in `staged`, which are still to be written."""

    bundle: Path
    staged: Staged
    folder: Path
    out: Path


@contextmanager
def copied(model: Model, out: Path, progress: Progress) -> Iterator[Copy]:
    """Copy a bundle, less the files that an edit replaces, into a folder beside `out` that is gone afterwards.

    An `out` without a bundle's suffix is the folder to put the bundle into. Raises UsageError where it cannot go there.
    """
    if out.suffix.lower() not in FORMATS:
        out = out / model.path.name
    if out.suffix.lower() != model.path.suffix.lower():
        raise UsageError(f"{out} does not end in {model.path.suffix}", "name the output like the input")
    root = model.path.parent
    inside = [path for path in model.path.rglob("*") if path.is_file()] if model.path.is_dir() else model.files
    # A new folder is made whole beside its place, and gets its name in one step.
    beside = out.parent if not out.parent.exists() else out
    folder = beside.with_name(f".{beside.name}{_PARTIAL}")
    targets = {path: folder / path.relative_to(root) for path in inside}
    _refuse_existing(out, [out.parent / path.relative_to(root) for path in inside if path != model.path])
    _refuse_full(out, sum(path.stat().st_size for path in inside))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        for path, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if path not in model.replaced:
                copy_file(path, target, progress)
                shutil.copystat(path, target)
        staged = {path: targets[path] for path in model.replaced}
        yield Copy(folder / model.path.name, staged, folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_existing(out: Path, others: list[Path]) -> None:
    for path in (out, *others):
        if path.exists():
            raise UsageError(f"{path} exists already", "choose another name, or remove it first")


def _refuse_full(out: Path, needed: int) -> None:
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UsageError(f"{place} has {free:,} bytes free; the copy needs {needed:,}", "free some space first")


def publish_copy(copy: Copy) -> int:
    """Move a finished copy to where it belongs, into a folder that is there the bundle itself last.

    Returns the bytes of the copy.
    """
    for original, path in copy.staged.items():
        shutil.copystat(original, path)
        sync(path)
    size = sum(path.stat().st_size for path in copy.folder.rglob("*") if path.is_file())
    if copy.out.name == copy.bundle.name and not copy.out.parent.exists():
        os.replace(copy.folder, copy.out.parent)
        sync(copy.out.parent.parent)
    else:
        copy.out.parent.mkdir(exist_ok=True)
        for path in sorted(copy.folder.iterdir(), key=lambda path: path == copy.bundle):
            os.replace(path, copy.out if path == copy.bundle else copy.out.parent / path.name)
        sync(copy.out.parent)
    return size


def copy_file(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Copy bytes; file systems that can share them do (`copy_file_range`). `target` is on disk afterwards."""
    size = source.stat().st_size
    done = 0
    with source.open("rb") as reader, target.open("xb") as writer:
        while done < size and (moved := _move(reader.fileno(), writer.fileno(), min(_CHUNK, size - done))):
            done += moved
            if progress is not None:
                progress(f"copying {source.name}", done, size)
        os.fsync(writer.fileno())


def _move(reader: int, writer: int, count: int) -> int:
    if hasattr(os, "copy_file_range"):
        with suppress(OSError):
            return os.copy_file_range(reader, writer, count)
    return os.write(writer, os.read(reader, count))


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
