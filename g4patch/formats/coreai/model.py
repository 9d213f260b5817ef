"""Open a Core AI asset: checked here, loaded in the worker, shown as a graph for each function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from g4patch.errors import BundleError, EditError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.formats.coreai.asset import HASH, METADATA, PROGRAM, Asset, open_asset
from g4patch.formats.coreai.draft import Reading
from g4patch.formats.coreai.program import Program, number
from g4patch.formats.coreai.view import read
from g4patch.runtimes import coreai as runtime

NAME = "Core AI"

# Small constants are read into the view: 64 elements of at most 8 bytes.
_LARGEST_BLOB = 512


@dataclass(frozen=True)
class Native:
    """The checked asset, its program by number, the readings of its functions by name.

    `faults` is what the dialect's own verifier said against the program when it was loaded.
    """

    asset: Asset
    program: Program
    readings: Mapping[str, Reading]
    faults: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The bytecode that was read: main.mlirb, or its stage."""
        return self.asset.program.path

    @cached_property
    def blobs(self) -> dict[str, tuple[int, int]]:
        """Where the bytes of each blob lie in the file: key -> (offset, size)."""
        return {key: (blob.offset, blob.size) for key, blob in self.asset.program.resources.items()}


def native(model: Model) -> Native:
    """The format's own part of a model. Raises EditError for a model of another format."""
    if not isinstance(model.native, Native):
        raise EditError(f"{model.path} was not opened as a Core AI asset")
    return model.native


def open_model(path: Path, staged: Staged = NOT_STAGED) -> Model:
    """Read an asset without its weights. Files in `staged` are read from there.

    Raises BundleError for anything but a whole source asset, MissingExtra without coreai-core.
    """
    asset = open_asset(path, staged)
    loaded = _load(asset)
    program, readings = _read(asset, loaded["module"])
    replaced = (path / PROGRAM, path / HASH)
    return Model(
        path=path,
        format=NAME,
        details=_details(asset.metadata),
        files=(*replaced, path / METADATA),
        replaced=replaced,
        graph_file=asset.program.path,
        graphs=tuple(reading.graph for reading in readings.values()),
        native=(own := Native(asset, program, readings, tuple(loaded["faults"]))),
        weights=own.blobs,
    )


def _read(asset: Asset, dump: Any) -> tuple[Program, dict[str, Reading]]:
    def blob(key: str) -> bytes | None:
        found = asset.program.resources.get(key)
        if found is None or found.size > _LARGEST_BLOB:
            return None
        return asset.program.read(found.offset, found.size)

    try:
        program = number(dump)
        readings = {reading.graph.name: reading for reading in read(program, blob)}
    except (KeyError, ValueError, IndexError, RecursionError) as error:
        raise BundleError(f"{asset.path} has a form that g4patch does not know: {error}", "export it again") from error
    if not readings:
        raise BundleError(f"{asset.path} has no function", "export the model again")
    return program, readings


def _load(asset: Asset) -> Any:
    """The worker's account of the program."""
    with runtime.workspace() as folder:
        try:
            return runtime.run("read", {"path": str(asset.program.path.absolute())}, folder, asset.path)
        except runtime.WorkerError as error:
            raise BundleError(f"coreai-core cannot read {asset.path}: {error}", "export it again") from error


def _details(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    producer = metadata.get("producer")
    return ("asset version 2.0", *((f"from {producer}",) if isinstance(producer, str) else ()))
