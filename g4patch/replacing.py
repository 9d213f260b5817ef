"""One file of a bundle: replaced, kept and put back. The journal around several of them is in `g4patch.publish`.

A file is replaced whole by its stage, in one step. A file that is changed in place has as its stage a delta of patches:
of it, what the patches overwrite is kept, as a delta too. What a receipt says of a file tells the two apart: `written`
lists the parts, `[offset, size]`, that were changed in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from g4patch import delta
from g4patch.copying import copy_file, sync
from g4patch.digests import sha256
from g4patch.errors import BundleError

STAGE_SUFFIX = ".g4patch-stage"
Entry = Mapping[str, Any]


def stage_of(target: Path) -> Path:
    """Where the stage of a file is: beside it, on the same file system."""
    return target.with_name(f".{target.name}{STAGE_SUFFIX}")


def refuse_unsafe(target: Path, in_place: bool = False) -> None:
    """Raise BundleError where a file cannot be replaced, or changed in place, without harm."""
    if target.is_symlink():
        raise BundleError(
            f"{target} is a link to {target.resolve()}, which other bundles may share",
            "copy it first, or write elsewhere with -o OUT",
        )
    if in_place and target.stat().st_nlink > 1:
        raise BundleError(
            f"{target} has {target.stat().st_nlink} names, and would change under all of them",
            "copy it first, or write elsewhere with -o OUT",
        )
    if not os.access(target.parent, os.W_OK) or not os.access(target, os.W_OK):
        raise BundleError(f"{target} cannot be replaced: no permission to write", "write elsewhere with -o OUT")
    free, needed = shutil.disk_usage(target.parent).free, 0 if in_place else target.stat().st_size
    if free < needed:
        raise BundleError(
            f"{target.parent} has {free:,} bytes free; a copy of {target.name} needs {needed:,}",
            "free some space, or write elsewhere with -o OUT",
        )


def entry(bundle: Path, target: Path, staged: Path, in_place: bool) -> dict[str, Any]:
    """What a receipt says of a file: only what was written is hashed."""
    name = str(target.relative_to(bundle.parent))
    if in_place:
        patches = delta.patches(staged)
        digest = hashlib.sha256(b"".join(data for _, data in patches))
        written = [[offset, len(data)] for offset, data in patches]
        size = sum(len(data) for _, data in patches)
        return {"path": name, "size": size, "sha256": digest.hexdigest(), "written": written}
    return {"path": name, "size": staged.stat().st_size, "sha256": sha256(staged)}


def refuse_malformed(told: Entry) -> None:
    """Raise KeyError, TypeError or ValueError for what no receipt says of a file."""
    told["sha256"]
    for offset, size in told.get("written", ()):
        if type(offset) is not int or type(size) is not int or offset < 0 or size < 0:
            raise ValueError(f"no file has {size} bytes at {offset}")


def is_published(target: Path, told: Entry) -> bool:
    """Whether a file is the one that a receipt tells of, as far as it tells."""
    try:
        if "written" not in told:
            return sha256(target) == str(told["sha256"])
        if any(offset + size > target.stat().st_size for offset, size in told["written"]):
            return False
        data = b"".join(data for _, data in _parts(target, told["written"]))
        return hashlib.sha256(data).hexdigest() == str(told["sha256"])
    except OSError:
        return False


def _parts(path: Path, parts: Sequence[Sequence[int]]) -> Iterator[delta.Patch]:
    with path.open("rb") as file:
        for offset, size in parts:
            file.seek(offset)
            yield offset, file.read(size)


def keep(target: Path, kept: Path, told: Entry) -> None:
    """Keep what a file is before it becomes what a receipt tells of."""
    if "written" in told:
        delta.write_patches(target.stat().st_size, list(_parts(target, told["written"])), delta.of(kept))
        shutil.copystat(target, delta.of(kept))
        sync(delta.of(kept))
    else:
        keep_whole(target, kept)


def keep_whole(original: Path, kept: Path) -> None:
    """Give a file a second name, without copying it where the file system can."""
    try:
        os.link(original, kept)
    except OSError:
        copy_file(original, kept)
        shutil.copystat(original, kept)


def original(kept: Path, told: Entry) -> Path | None:
    """What to read in place of a file to see what it was: the file, or a delta of patches. None if neither is kept."""
    if "written" in told:
        return delta.of(kept)
    return kept if kept.is_file() else None


def replace(target: Path, staged: Path, told: Entry) -> None:
    """Make a file what its stage is, on disk."""
    if "written" in told:
        _change(target, staged)
        staged.unlink()
    else:
        rename(staged, target)


def _change(target: Path, patches: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY)
    try:
        for offset, data in delta.patches(patches):
            os.pwrite(descriptor, data, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_back(target: Path, kept: Path, told: Entry) -> None:
    """Make a file what it was. Killed in between, it can run again."""
    staged, thin = stage_of(target), delta.of(kept)
    if not kept.exists() and not thin.exists():
        raise BundleError(f"{kept} is missing: what {target} was is not kept", "restore it from elsewhere")
    staged.unlink(missing_ok=True)
    if "written" in told:
        _change(target, thin)
        shutil.copystat(thin, target)
        return
    if kept.exists():
        keep_whole(kept, staged)
    elif is_published(target, told):
        delta.rebuild(thin, target, staged)
        shutil.copystat(thin, staged)
        sync(staged)
    else:  # it was put back before the kill
        return
    rename(staged, target)
    staged.unlink(missing_ok=True)  # of two names of one file, put back before a kill, renaming removes none


def rename(source: Path, target: Path) -> Path:
    """Give a file or folder another name, on disk. Returns it."""
    os.replace(source, target)
    sync(target.parent)
    return target
