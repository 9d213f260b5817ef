"""Replace files of a bundle so that a kill at any moment leaves the old bundle or the new one.

In place, everything that was replaced is kept in `<bundle>.g4patch/`, one numbered folder a publication:

    bundle.onnx.g4patch/
        0001/receipt.json        what was changed, why, with which checks
        0001/files/bundle.onnx   the file as it was

Of a file with large weights inside, which its replacement holds too, only the rest stays: `files/NAME.delta`.

A folder's suffix is its journal. `0001.partial`: the originals are being collected, or are of no use any more.
`0001.pending`: files are being replaced; the next command that opens the bundle puts the originals back. Without a
suffix: done. To revert is to mark a folder pending again and to put its originals back.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from g4patch import delta
from g4patch.bundle import BACKUP_SUFFIX
from g4patch.copying import copy_file, sync
from g4patch.delta import Span
from g4patch.errors import BundleError, UsageError
from g4patch.formats import Staged
from g4patch.report import Publication

_STAGE_SUFFIX = ".g4patch-stage"
_PARTIAL, _PENDING = ".partial", ".pending"
_RECEIPT = "receipt.json"
NOTHING_SHARED: Mapping[Path, Sequence[Span]] = MappingProxyType({})


@contextmanager
def stage(targets: Sequence[Path]) -> Iterator[Staged]:
    """For each file that is to be replaced, a path beside it to write the replacement to; gone afterwards.

    To be used under the lock. Raises BundleError where a target cannot be replaced safely.
    """
    for target in targets:
        _refuse_unsafe(target)
    staged = {target: _stage_of(target) for target in targets}
    try:
        yield staged
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


def _stage_of(target: Path) -> Path:
    return target.with_name(f".{target.name}{_STAGE_SUFFIX}")


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


def backup_folder(bundle: Path) -> Path:
    """Where the files that were replaced in a bundle are kept."""
    return bundle.with_name(bundle.name + BACKUP_SUFFIX)


@contextmanager
def locked(bundle: Path) -> Iterator[None]:
    """Hold the bundle's lock. Raises BundleError where another process holds it.

    The lock lives in the backup folder, which is removed again where it holds nothing else. A lock file that is there
    while nobody holds it was left by a process that was killed.
    """
    folder = backup_folder(bundle)
    try:
        descriptor = _lock(folder / "lock")
    except OSError as error:
        raise BundleError(f"{folder} cannot be written: {error.strerror}", "write elsewhere with -o OUT") from error
    try:
        yield
    finally:
        (folder / "lock").unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Lock a file; again if its last holder removed it in between."""
    while True:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise BundleError(f"another g4patch is working on {path.parent.stem}", "wait until it is done") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name[:4].isdigit() and path.is_dir())


def publish_in_place(
    bundle: Path, staged: Staged, receipt: Mapping[str, Any], shared: Mapping[Path, Sequence[Span]] = NOTHING_SHARED
) -> Publication:
    """Replace the bundle's files by their stages, under the lock. `receipt` is kept beside the originals.

    `shared` says what a target and its stage have in common: no second copy of that is kept.
    """
    folder = backup_folder(bundle)
    number = 1 + max((int(path.name[:4]) for path in _steps(folder)), default=0)
    partial = folder / f"{number:04}{_PARTIAL}"
    files = [_file_entry(bundle, target, path) for target, path in staged.items()]
    for target, path in staged.items():
        shutil.copystat(target, path)
        sync(path)
    _collect(bundle, tuple(staged), partial, {**receipt, "files": files})
    pending = _rename(partial, folder / f"{number:04}{_PENDING}")
    for target, path in staged.items():
        _rename(path, target)
    done = _rename(pending, folder / f"{number:04}")
    for target, spans in shared.items():
        delta.thin(done / "files" / target.relative_to(bundle.parent), spans)
    return Publication(bundle, sum(entry["size"] for entry in files), done)


def _file_entry(bundle: Path, target: Path, path: Path) -> dict[str, Any]:
    """What a receipt says of a file: only what was written is hashed."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": str(target.relative_to(bundle.parent)), "size": path.stat().st_size, "sha256": digest}


def _collect(bundle: Path, targets: Sequence[Path], partial: Path, receipt: Mapping[str, Any]) -> None:
    """Keep the originals and the receipt in `partial`, all on disk."""
    partial.mkdir()
    for target in targets:
        kept = partial / "files" / target.relative_to(bundle.parent)
        kept.parent.mkdir(parents=True, exist_ok=True)
        _keep(target, kept)
        sync(kept.parent)
    path = partial / _RECEIPT
    path.write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    sync(path)
    sync(partial)


def _keep(original: Path, kept: Path) -> None:
    """Give a file a second name, without copying it where the file system can."""
    try:
        os.link(original, kept)
    except OSError:
        copy_file(original, kept)
        shutil.copystat(original, kept)


def _rename(source: Path, target: Path) -> Path:
    os.replace(source, target)
    sync(target.parent)
    return target


def recover_if_needed(bundle: Path) -> None:
    """Tidy up after a process that was killed, unless one is at work. Costs one look where there is nothing to do."""
    if not (backup_folder(bundle) / "lock").exists():
        return
    with suppress(BundleError), locked(bundle):
        recover(bundle)


def recover(bundle: Path) -> None:
    """Finish what a killed process left, under the lock: put originals back, remove what is half done."""
    for step in _steps(backup_folder(bundle)):
        if step.suffix == _PENDING:
            _put_back(bundle, step)
            _discard(step)
        elif step.suffix == _PARTIAL:
            shutil.rmtree(step)
        delta.tidy(step)
    for leftover in (_stage_of(bundle), *bundle.rglob(f".*{_STAGE_SUFFIX}")):
        leftover.unlink(missing_ok=True)


def _discard(step: Path) -> None:
    """Remove a step whose originals are in their places. First under a name that says so: half of it is no journal."""
    shutil.rmtree(_rename(step, step.with_suffix(_PARTIAL)))


def _put_back(bundle: Path, step: Path) -> None:
    """Replace the files of a bundle by the originals that a step kept. Killed in between, it can run again."""
    for entry in _receipt(step)["files"]:
        kept, target = step / "files" / entry["path"], bundle.parent / entry["path"]
        staged, thin = _stage_of(target), delta.of(kept)
        staged.unlink(missing_ok=True)
        if kept.exists() or not thin.exists():
            _keep(kept, staged)
        elif _is_published(target, entry):
            delta.rebuild(thin, target, staged)
            shutil.copystat(thin, staged)
            sync(staged)
        else:  # it was put back before the kill
            continue
        _rename(staged, target)


def _receipt(step: Path) -> dict[str, Any]:
    try:
        receipt: dict[str, Any] = json.loads((step / _RECEIPT).read_text(encoding="utf-8"))
        for entry in receipt["files"]:
            if Path(entry["path"]).is_absolute() or ".." in Path(entry["path"]).parts:
                raise ValueError(f"{entry['path']} is outside the bundle")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"{step / _RECEIPT} cannot be read: {error}", "restore it, or move the folder away"
        ) from error
    return receipt


def revert(bundle: Path) -> tuple[Path, ...]:
    """Undo the last publication, byte for byte. Returns the files that were put back.

    Raises UsageError where there is none, BundleError where a file is no longer the one that was published.
    """
    folder = backup_folder(bundle)
    nothing = UsageError(f"{bundle} was not changed by g4patch in place", f"there is no {folder.name} beside it")
    if not folder.is_dir():
        raise nothing
    with locked(bundle):
        recover(bundle)
        steps = _steps(folder)
        if not steps:
            raise nothing
        files = _receipt(steps[-1])["files"]
        for entry in files:
            _refuse_changed(bundle.parent / entry["path"], entry, steps[-1])
            thin = delta.of(steps[-1] / "files" / entry["path"])
            if thin.exists():
                _refuse_unsafe(bundle.parent / entry["path"])
                delta.refuse_unfit(thin, bundle.parent / entry["path"])
        pending = _rename(steps[-1], steps[-1].with_name(steps[-1].name + _PENDING))
        _put_back(bundle, pending)
        _discard(pending)
    return tuple(bundle.parent / entry["path"] for entry in files)


def originals(bundle: Path, targets: Sequence[Path]) -> Staged:
    """Where files of a bundle are as they were before the first publication; empty if they are not kept whole."""
    folder = backup_folder(bundle)
    steps = [step for step in _steps(folder) if step.name.isdigit()] if folder.is_dir() else []
    if not steps:
        return {}
    kept = {target: steps[0] / "files" / target.relative_to(bundle.parent) for target in targets}
    if any(delta.of(path).exists() and not path.exists() for path in kept.values()):
        return {}
    return {target: path for target, path in kept.items() if path.is_file()}


def _refuse_changed(target: Path, entry: Mapping[str, Any], step: Path) -> None:
    kept = step / "files" / entry["path"]
    if _is_published(target, entry):
        return
    where = f"the original is {kept}" if kept.exists() else f"what it did not share with the original is in {step}"
    raise BundleError(f"{target} is not the file that g4patch wrote: it was changed since", where)


def _is_published(target: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file is the one that a receipt tells of."""
    try:
        with target.open("rb") as file:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"])
    except OSError:
        return False
