"""Copy files and whole bundles so that a copy cut short is never taken for a bundle."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from g4patch.bundle import BACKUP_SUFFIX, Bundle
from g4patch.errors import BundleError, UsageError
from g4patch.formats import Staged, pattern
from g4patch.links import stays_inside

# What is being done, and how many bytes of how many are done.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


_PARTIAL = ".g4patch-partial"
_CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True)
class Copy:
    """A copy in the making in `folder`: all of a bundle but the files in `staged`, which are still to be written.

    `root` is what paths of the original are relative to.
    """

    staged: Staged
    folder: Path
    root: Path
    bundle: Path
    out: Path

    def place(self, path: Path) -> Path:
        """Where a file or model of the original is in the copy."""
        return self.folder / path.relative_to(self.root)


@contextmanager
def copied(
    bundle: Bundle, files: Sequence[Path], replaced: Sequence[Path], out: Path, progress: Progress
) -> Iterator[Copy]:
    """Copy a bundle, less the files that are replaced, into a folder beside `out` that is gone afterwards.

    `files` are those of the bundle's models. Of folders, everything is copied. For a single model, an `out` without a
    bundle's name is the folder to put it into. Raises UsageError where it cannot go there.
    """
    source = bundle.path if pattern(out) else bundle.folder or bundle.path
    if pattern(source) and not pattern(out):
        out = out / source.name
    if pattern(source) != pattern(out):
        raise UsageError(f"{out} is no name for a copy of {source.name}", "name the output like the input")
    if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{out} is inside {source}, which is left as it is", "choose another place")
    root = source.parent
    inside = list(_everything(source)) if source.is_dir() else list(files)
    _refuse_links_out(source, inside)
    refuse_existing(out, [out.parent / path.relative_to(root) for path in inside if not source.is_dir()])
    refuse_full(out, sum(path.stat().st_size for path in inside))
    # A new folder is made whole beside its place, and gets its name in one step.
    beside = out.parent if not out.parent.exists() else out
    folder = beside.with_name(f".{beside.name}{_PARTIAL}")
    shutil.rmtree(folder, ignore_errors=True)
    copy = Copy({path: folder / path.relative_to(root) for path in replaced}, folder, root, source, out)
    try:
        folder.mkdir(parents=True)
        for path in inside:
            target = copy.place(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path not in copy.staged:
                copy_file(path, target, progress)
                shutil.copystat(path, target)
        yield copy
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _everything(folder: Path) -> Iterator[Path]:
    """All files of a folder but what g4patch itself keeps there."""
    for path in sorted(folder.rglob("*")):
        ours = any(part.endswith(BACKUP_SUFFIX) for part in path.relative_to(folder).parts[:-1])
        if path.is_file() and not ours:
            yield path


def _refuse_links_out(source: Path, files: Sequence[Path]) -> None:
    """Of a single file's own files, its format has judged where they may lie."""
    for path in files if source.is_dir() else ():
        if not stays_inside(path, source):
            raise BundleError(f"{path} is a link out of {source}", "put what it leads to in its place, or remove it")


def refuse_existing(out: Path, others: Sequence[Path] = ()) -> None:
    """Raise UsageError if `out`, or one of the others, is there already."""
    for path in (out, *others):
        if path.exists():
            raise UsageError(f"{path} exists already", "choose another name, or remove it first")


def refuse_full(out: Path, needed: int) -> None:
    """Raise UsageError unless there is room for `needed` bytes where `out` is to be."""
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UsageError(f"{place} has {free:,} bytes free; {out.name} needs {needed:,}", "free some space first")


def publish_copy(copy: Copy) -> int:
    """Move a finished copy to where it belongs, into a folder that is there the bundle itself last.

    Returns the bytes of the copy.
    """
    for original, path in copy.staged.items():
        shutil.copystat(original, path)
        sync(path)
    size = sum(path.stat().st_size for path in copy.folder.rglob("*") if path.is_file())
    made, parent = copy.place(copy.bundle), copy.out.parent
    if copy.out.name == made.name and not parent.exists():
        os.replace(copy.folder, parent)
        sync(parent.parent)
    else:
        parent.mkdir(exist_ok=True)
        for path in sorted(copy.folder.iterdir(), key=lambda path: path == made):
            os.replace(path, copy.out if path == made else parent / path.name)
        sync(parent)
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
