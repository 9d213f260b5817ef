"""A Core AI asset as a folder: what must be in it, and what to say where it cannot be worked on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4patch.errors import BundleError
from g4patch.formats import Staged
from g4patch.formats.coreai import bytecode
from g4patch.formats.coreai.bytecode import Bytecode
from g4patch.links import stays_inside

PROGRAM = "main.mlirb"
HASH = "main.hash"
METADATA = "metadata.json"
_ASSET_VERSION = "2.0"
_HASH_SIZE = 32
_LARGEST_METADATA = 4 * 1024 * 1024
_LFS = b"version https://git-lfs"
_COMPILED_HINT = "patch the .aimodel that it was compiled from, and compile again"


@dataclass(frozen=True)
class Asset:
    """A checked asset: `program` is its walked bytecode, `metadata` the content of metadata.json."""

    path: Path
    program: Bytecode
    metadata: dict[str, Any]


def open_asset(path: Path, staged: Staged) -> Asset:
    """Check an `.aimodel` folder without native code. Files in `staged` are read from there.

    Raises BundleError for anything but a whole source asset of version 2.0.
    """
    if not path.is_dir():
        state = "is a file, and a Core AI asset is a folder" if path.exists() else "does not exist"
        raise BundleError(f"{path} {state}", "point at the .aimodel folder")
    _refuse_compiled(path)
    program, hashed = (staged.get(path / name) or _file(path, name) for name in (PROGRAM, HASH))
    if hashed.stat().st_size != _HASH_SIZE:
        raise BundleError(f"{path / HASH} does not hold a SHA-256", "was the copy interrupted?")
    metadata = _metadata(_file(path, METADATA))
    return Asset(path, bytecode.parse(program), metadata)


def _refuse_compiled(path: Path) -> None:
    compiled = path.suffix in (".aimodelc", ".aimodelx")
    compiled = compiled or any(child.name.startswith("main-") for child in path.iterdir())
    if compiled and not (path / PROGRAM).is_file():
        raise BundleError(f"{path} is a compiled asset", _COMPILED_HINT)


def _file(folder: Path, name: str) -> Path:
    """A file of the asset that may be read: there, regular, inside the asset, and not a git-LFS pointer."""
    path = folder / name
    if not path.is_file():
        raise BundleError(f"{path} is missing", "was the copy, or the program that saved it, interrupted?")
    if not stays_inside(path, folder):
        raise BundleError(f"{path} is a link out of the asset", "copy the asset with its files in place of links")
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise BundleError(f"{path} is a git-LFS pointer", "run: git lfs pull")
    return path


def _metadata(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_METADATA:
            raise ValueError("it is larger than any metadata.json")
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read as JSON: {error}", "save the asset again") from error
    version = metadata.get("assetVersion") if isinstance(metadata, dict) else None
    if version != _ASSET_VERSION:
        raise BundleError(
            f"{path} says asset version {version}; g4patch knows version {_ASSET_VERSION}",
            "export the model again with a coreai-core that writes version 2.0",
        )
    assert isinstance(metadata, dict)
    if "sourceHash" in metadata:
        raise BundleError(f"{path.parent} is a compiled asset", _COMPILED_HINT)
    return metadata
