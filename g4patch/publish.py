"""Replace files of a bundle so that a kill at any moment leaves the old bundle or the new one.

In place, everything that was replaced is kept in `<bundle>.g4patch/`, one numbered folder a publication:

    bundle.onnx.g4patch/
        0001/receipt.json        what was changed, why, with which checks
        0001/files/bundle.onnx   the file as it was

Of a file with large weights inside, which its replacement holds too, only the rest stays: `files/NAME.delta`. So it
does of a file that is changed in place.

A folder's suffix is its journal. `0001.partial`: the originals are being collected, or are of no use any more.
`0001.pending`: files are being replaced; the next command that opens the bundle puts the originals back. Without a
suffix: done. To revert is to mark a folder pending again and to put its originals back.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from g4patch import delta, replacing
from g4patch.bundle import BACKUP_SUFFIX
from g4patch.copying import sync
from g4patch.delta import Span
from g4patch.errors import BundleError, UsageError
from g4patch.formats import BESIDE, Staged
from g4patch.replacing import Entry, rename
from g4patch.report import Publication

_PARTIAL, _PENDING = ".partial", ".pending"
_RECEIPT, _LOCK = "receipt.json", "lock"
NOTHING_SHARED: Mapping[Path, Sequence[Span]] = MappingProxyType({})


@contextmanager
def stage(bundle: Path, targets: Sequence[Path], in_place: Collection[Path] = ()) -> Iterator[Staged]:
    """For each file that is to be replaced, a path beside it to write the replacement to; gone afterwards.

    For those that are changed `in_place` a delta of patches is to be written. To be used under the lock. Raises
    BundleError where a target cannot be replaced safely.
    """
    for target in targets:
        replacing.refuse_unsafe(target, target in in_place)
    staged = {target: replacing.stage_of(target) for target in targets}
    # The lock of a process that was killed says what it left beside the bundle.
    beside = [target.name for target in targets if target.parent == bundle.parent]
    (backup_folder(bundle) / _LOCK).write_text("\n".join(beside), encoding="utf-8")
    try:
        yield staged
    finally:
        for path in staged.values():
            path.unlink(missing_ok=True)


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
    if folder.is_symlink():
        raise BundleError(f"{folder} is a link", "move it away, or write elsewhere with -o OUT")
    try:
        descriptor = _lock(folder / _LOCK)
    except OSError as error:
        raise BundleError(f"{folder} cannot be written: {error.strerror}", "write elsewhere with -o OUT") from error
    try:
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Lock a file; again if its last holder removed it in between."""
    while True:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
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
    """What was published, oldest first. Nothing is looked up through links: they may lead out of the bundle."""
    if folder.is_symlink():
        return []
    steps = (path for path in folder.iterdir() if path.name[:4].isdecimal())
    return sorted(path for path in steps if path.is_dir() and not path.is_symlink())


def publish_in_place(
    bundle: Path,
    staged: Staged,
    receipt: Mapping[str, Any],
    shared: Mapping[Path, Sequence[Span]] = NOTHING_SHARED,
    in_place: Collection[Path] = (),
) -> Publication:
    """Make the bundle's files what their stages are, under the lock. `receipt` is kept beside the originals.

    `shared` says what a target and its stage have in common: no second copy of that is kept. The stages of those that
    are changed `in_place` are deltas.
    """
    folder = backup_folder(bundle)
    number = 1 + max((int(path.name[:4]) for path in _steps(folder)), default=0)
    partial = folder / f"{number:04}{_PARTIAL}"
    told = {target: replacing.entry(bundle, target, path, target in in_place) for target, path in staged.items()}
    for target, path in staged.items():
        shutil.copystat(target, path)
        sync(path)
    _collect(bundle, told, partial, receipt)
    pending = rename(partial, folder / f"{number:04}{_PENDING}")
    for target, path in staged.items():
        replacing.replace(target, path, told[target])
    done = rename(pending, folder / f"{number:04}")
    for target, spans in shared.items():
        delta.thin(done / "files" / target.relative_to(bundle.parent), spans)
    return Publication(bundle, bundle, sum(entry["size"] for entry in told.values()), done)


def _collect(bundle: Path, told: Mapping[Path, Entry], partial: Path, receipt: Mapping[str, Any]) -> None:
    """Keep the originals and the receipt in `partial`, all on disk."""
    partial.mkdir()
    for target, entry in told.items():
        kept = partial / "files" / target.relative_to(bundle.parent)
        kept.parent.mkdir(parents=True, exist_ok=True)
        replacing.keep(target, kept, entry)
        sync(kept.parent)
    path = partial / _RECEIPT
    content = {**receipt, "files": list(told.values())}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(path)
    sync(partial)


def recover_if_needed(bundle: Path) -> None:
    """Tidy up after a process that was killed, unless one is at work. Costs one look where there is nothing to do."""
    if not (backup_folder(bundle) / _LOCK).exists():
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
    named = (backup_folder(bundle) / _LOCK).read_text(encoding="utf-8", errors="replace").splitlines()
    beside = [replacing.stage_of(bundle.with_name(name)) for name in named if name and name == Path(name).name]
    for leftover in (*beside, *bundle.rglob(f".*{replacing.STAGE_SUFFIX}")):
        with suppress(OSError, ValueError):  # it is gone, or a name that no file has
            leftover.unlink()


def _discard(step: Path) -> None:
    """Remove a step whose originals are in their places. First under a name that says so: half of it is no journal."""
    shutil.rmtree(rename(step, step.with_suffix(_PARTIAL)))


def _put_back(bundle: Path, step: Path) -> None:
    """Make the files of a bundle what they were before a step. Killed in between, it can run again."""
    for entry in _receipt(step)["files"]:
        replacing.put_back(bundle.parent / entry["path"], step / "files" / entry["path"], entry)


def _receipt(step: Path) -> dict[str, Any]:
    """What a step says of itself. Raises BundleError where it says nothing that can be true of this bundle."""
    try:
        receipt: dict[str, Any] = json.loads((step / _RECEIPT).read_text(encoding="utf-8"))
        for entry in receipt["files"]:
            _refuse_stray(step, Path(entry["path"]))
            replacing.refuse_malformed(entry)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(
            f"{step / _RECEIPT} cannot be read: {error}", "restore it, or move the folder away"
        ) from error
    return receipt


def _refuse_stray(step: Path, name: Path) -> None:
    """Raise ValueError for a file that is not the bundle's own, or that a link leads to.

    A stranger may have written the receipt, and every command puts back what a pending one names.
    """
    bundle, files = step.parent.name.removesuffix(BACKUP_SUFFIX), step / "files"
    inside = (name.parts[:1] == (bundle,) and ".." not in name.parts) or str(name) == BESIDE.get(bundle.lower())
    places = ((step.parent.parent, name), (files, name), (files, delta.of(name)))
    linked = (Path(os.path.realpath(root / path)) != Path(os.path.realpath(root)) / path for root, path in places)
    if not inside or any(linked):
        raise ValueError(f"{name} is outside the bundle")


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
                replacing.refuse_unsafe(bundle.parent / entry["path"], "written" in entry)
                delta.refuse_unfit(thin, bundle.parent / entry["path"])
        pending = rename(steps[-1], steps[-1].with_name(steps[-1].name + _PENDING))
        _put_back(bundle, pending)
        _discard(pending)
    return tuple(bundle.parent / entry["path"] for entry in files)


def originals(bundle: Path, targets: Sequence[Path]) -> Staged:
    """Where files of a bundle are as they were before the first publication; empty if they are not kept whole."""
    folder = backup_folder(bundle)
    steps = [step for step in _steps(folder) if step.name.isdigit()] if folder.is_dir() else []
    if not steps:
        return {}
    files = {bundle.parent / entry["path"]: entry for entry in _receipt(steps[0])["files"]}
    told = {target: files[target] for target in targets if target in files}
    kept = {target: replacing.original(steps[0] / "files" / entry["path"], entry) for target, entry in told.items()}
    return {target: path for target, path in kept.items() if path is not None} if None not in kept.values() else {}


def _refuse_changed(target: Path, entry: Mapping[str, Any], step: Path) -> None:
    kept = step / "files" / entry["path"]
    if not kept.exists() and not delta.of(kept).exists():
        raise BundleError(f"{kept} is missing: what {target} was is not kept", "restore it from elsewhere")
    if replacing.is_published(target, entry):
        return
    where = f"the original is {kept}" if kept.exists() else f"what it did not share with the original is in {step}"
    raise BundleError(f"{target} is not the file that g4patch wrote: it was changed since", where)
