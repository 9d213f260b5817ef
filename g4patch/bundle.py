"""Bundles on disk: find them, stage a replacement beside its target, publish it, keep what it replaced.

A stage is only the replaced file, in the folder of its target, so that everything else reads through to the original
and publishing is a rename on one file system. In place, the replaced file moves to `<bundle>.g4patch/`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from g4patch.errors import BundleError, UsageError
from g4patch.formats import FORMATS, Model
from g4patch.report import Publication

Progress = Callable[[str, int, int], None]

_STAGE_SUFFIX = ".g4patch-stage"
_BACKUP_SUFFIX = ".g4patch"
_CHUNK = 16 * 1024 * 1024

# What people point at that is not a bundle g4patch can work on, and what to do instead.
_REFUSED = {
    ".mlmodelc": "it is compiled: patch the .mlpackage and compile it again",
    ".aimodelc": "it is compiled: patch the .aimodel and compile it again",
    ".aimodelx": "it is compiled: patch the .aimodel and compile it again",
    ".mlmodel": "patch the .mlpackage that it belongs to",
    ".onnx_data": "point at the .onnx file that it belongs to",
    ".data": "point at the .onnx file that it belongs to",
    ".gguf": "GGUF runtimes read the pad row for media by themselves",
    ".safetensors": "point at an exported model",
}


def find(path: Path | None) -> Path:
    """The bundle that is meant: the path itself, or the only one in it (the current folder, if there is no path).

    Raises UsageError or BundleError with the candidates or with what to do instead.
    """
    place = path if path is not None else Path()
    suffix = place.suffix.lower()
    if suffix in FORMATS:
        if not place.exists():
            raise BundleError(f"{place} does not exist", "check the path")
        return place
    if suffix in _REFUSED and place.exists():
        raise BundleError(f"{place} cannot be patched", _REFUSED[suffix])
    if not place.is_dir():
        known = ", ".join(FORMATS)
        reason = "is not a bundle" if place.exists() else "does not exist"
        raise BundleError(f"{place} {reason}", f"bundles end in {known}")
    found = sorted(child for child in place.iterdir() if child.suffix.lower() in FORMATS)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"there is no bundle in {place.resolve()}", "give one: g4patch COMMAND BUNDLE")
    names = ", ".join(child.name for child in found)
    raise UsageError(f"there are several bundles in {place.resolve()}: {names}", "give one of them")


@contextmanager
def stage(model: Model) -> Iterator[Path]:
    """A path beside the model's graph file to write its replacement to; removed at the end if it is still there.

    Raises BundleError where the target cannot be replaced safely.
    """
    target = model.graph_file
    _refuse_unsafe(target)
    staged = target.with_name(f".{target.name}{_STAGE_SUFFIX}")
    staged.unlink(missing_ok=True)
    try:
        yield staged
    finally:
        staged.unlink(missing_ok=True)


def _refuse_unsafe(target: Path) -> None:
    if target.is_symlink():
        raise BundleError(
            f"{target} is a link to {target.resolve()}, which other bundles may share",
            "copy it first, or write elsewhere with -o OUT",
        )
    if not os.access(target.parent, os.W_OK) or not os.access(target, os.W_OK):
        raise BundleError(f"{target} cannot be replaced: no permission to write", "write elsewhere with -o OUT")
    free, needed = shutil.disk_usage(target.parent).free, target.stat().st_size
    if free < needed:
        raise BundleError(
            f"{target.parent} has {free:,} bytes free; a copy of {target.name} needs {needed:,}",
            "free some space, or write elsewhere with -o OUT",
        )


def publish_in_place(model: Model, staged: Path) -> Publication:
    """Replace the graph file by the staged one. The old one is kept in `<bundle>.g4patch/`."""
    target = model.graph_file
    backup = backup_folder(model.path) / target.relative_to(model.path.parent)
    if backup.exists():
        raise BundleError(f"{backup} already holds an original", "move it away: a backup is never overwritten")
    shutil.copystat(target, staged)
    _sync(staged)
    written = staged.stat().st_size
    backup.parent.mkdir(parents=True, exist_ok=True)
    _keep(target, backup)
    os.replace(staged, target)
    _sync(target.parent)
    return Publication(model.path, written, backup)


def backup_folder(bundle: Path) -> Path:
    """Where the files that were replaced in a bundle are kept."""
    return bundle.with_name(bundle.name + _BACKUP_SUFFIX)


def _keep(target: Path, backup: Path) -> None:
    """Give a file a second name, without copying it where the file system can."""
    try:
        os.link(target, backup)
    except OSError:
        copy_file(target, backup)
    _sync(backup.parent)


def publish_elsewhere(model: Model, staged: Path, out: Path, progress: Progress) -> Publication:
    """Write the whole mended bundle to `out`, which must not exist; the original is left as it is."""
    if out.suffix.lower() not in FORMATS:
        out = out / model.path.name
    if out.suffix.lower() != model.path.suffix.lower():
        raise UsageError(f"{out} does not end in {model.path.suffix}", "name the output like the input")
    if out.exists():
        raise UsageError(f"{out} exists already", "choose another name, or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    copy = _copy_folder if model.path.is_dir() else _copy_files
    written = copy(model, staged, out, progress)
    _sync(out.parent)
    return Publication(out, written)


def _copy_folder(model: Model, staged: Path, out: Path, progress: Progress) -> int:
    partial = out.with_name(out.name + ".g4patch-partial")
    shutil.rmtree(partial, ignore_errors=True)
    files = [path for path in sorted(model.path.rglob("*")) if path.is_file() and path != staged]
    try:
        for path in files:
            target = partial / path.relative_to(model.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(staged if path == model.graph_file else path, target, progress)
            shutil.copystat(path, target)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def _copy_files(model: Model, staged: Path, out: Path, progress: Progress) -> int:
    """A model file and the data files beside it; the model file comes last, so that it never lacks data."""
    sources = {path: out.parent / path.relative_to(model.path.parent) for path in model.files if path != model.path}
    taken = [target for target in sources.values() if target.exists()]
    if taken:
        raise UsageError(f"{taken[0]} exists already", "choose another folder for the output")
    written: list[Path] = []
    try:
        for path, target in (*sources.items(), (staged, out)):
            target.parent.mkdir(parents=True, exist_ok=True)
            written.append(target)
            copy_file(path, target, progress)
            shutil.copystat(model.path if path == staged else path, target)
    except BaseException:
        for target in written:
            target.unlink(missing_ok=True)
        raise
    return sum(target.stat().st_size for target in written)


def copy_file(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Copy bytes; file systems that can share them do (`copy_file_range`). `target` is on disk afterwards."""
    size = source.stat().st_size
    done = 0
    with source.open("rb") as reader, target.open("xb") as writer:
        while done < size:
            moved = _move(reader.fileno(), writer.fileno(), min(_CHUNK, size - done))
            if not moved:
                raise BundleError(f"{source} became shorter while it was copied", "run again")
            done += moved
            if progress is not None:
                progress(f"copying {source.name}", done, size)
        os.fsync(writer.fileno())


def _move(reader: int, writer: int, count: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(reader, writer, count)
        except OSError:
            pass
    return os.write(writer, os.read(reader, count))


def _sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
