"""Find and parse the parts of an `.mlpackage`; refuse, by name, what cannot be patched.

Layout (Apple's ModelPackage, fileFormatVersion 1.0.0): `Manifest.json` names a root item by its identifier,
whose `path` is relative to `Data/`. The root item is a serialised `Model`; blob values in it name files as
`@model_path/...`, relative to the folder that holds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4patch.errors import BundleError
from g4patch.formats.coreml.proto import Message, model_pb2
from g4patch.links import stays_inside

_MANIFEST_LIMIT = 4 * 1024 * 1024
# protobuf does not parse or write messages of 2 GiB or more.
_MODEL_LIMIT = 2**31 - 1
_LFS = b"version https://git-lfs"
_MODEL_PATH = "@model_path/"
_PIPELINES = ("pipeline", "pipelineClassifier", "pipelineRegressor")

_REFUSALS = {
    "customModel": ("a custom model", "its code is not in the package: patch the model that it wraps"),
    "linkedModel": ("a link to a compiled model", "patch the .mlpackage that it was compiled from"),
    "serializedModel": ("a serialised model", "export it again as an ML Program with coremltools"),
}


@dataclass(frozen=True)
class Program:
    """One ML Program in a model: a pipeline's by its name, or the model itself, whose `name` is empty."""

    name: str
    message: Message
    description: Message


def root_file(package: Path) -> Path:
    """The `Model` of a package, where its manifest says. Raises BundleError."""
    _refuse_other_layouts(package)
    manifest = _read_manifest(package)
    root = manifest.get("rootModelIdentifier")
    items = manifest.get("itemInfoEntries")
    entry = items.get(root) if isinstance(items, dict) and isinstance(root, str) else None
    path = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(path, str) or not path:
        raise BundleError(f"{package}/Manifest.json names no root model", "save the package again with coremltools")
    return inside(package, f"Data/{path}", "Manifest.json")


def _refuse_other_layouts(package: Path) -> None:
    if package.suffix == ".mlmodelc" or (package / "coremldata.bin").is_file():
        raise BundleError(f"{package} is a compiled model", "patch the .mlpackage and compile again")
    if not package.exists():
        raise BundleError(f"{package} does not exist", "check the path")
    if not package.is_dir():
        raise BundleError(
            f"{package} is a file, and ML Programs are stored in folders", "pass the .mlpackage folder itself"
        )


def _read_manifest(package: Path) -> dict[str, Any]:
    hint = "a package is a folder with Manifest.json and Data/: was it copied whole?"
    path = package / "Manifest.json"
    if path.exists():
        _refuse_escape(package, path, "Manifest.json")
    content = read_bytes(path, _MANIFEST_LIMIT, hint)
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}", hint) from error
    if not isinstance(manifest, dict):
        raise BundleError(f"{path} is not a JSON object", hint)
    return manifest


def inside(root: Path, relative: str, named_by: str) -> Path:
    """`root / relative`, an existing file that neither its path nor a link takes out of `root`. Raises BundleError.

    See `g4patch.links` for the links that are followed.
    """
    path = root / relative
    what = f"{named_by} names {relative!r}, which"
    try:
        regular = path.resolve(strict=True).is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise BundleError(f"{what} is not in the package", "copy the package again, whole") from error
    _refuse_escape(root, path, what)
    if not regular:
        raise BundleError(f"{what} is not a file", "copy the package again, whole")
    return path


def _refuse_escape(root: Path, path: Path, what: str) -> None:
    if not stays_inside(path, root):
        raise BundleError(
            f"{what} leads out of the package",
            "a package holds all its files: where they are links, copy it with cp -RL, or download it to a folder",
        )


def read_bytes(path: Path, limit: int, hint: str) -> bytes:
    """The content of a file of at most `limit` bytes. Raises BundleError, also for an LFS pointer."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise BundleError(f"{path} has {size:,} bytes, more than the {limit:,} such a file can have", hint)
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}", hint) from error
    refuse_pointer(path, content)
    return content


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raises BundleError for what git checks out in place of a file when git-lfs did not fetch it."""
    if content.startswith(_LFS):
        raise BundleError(f"{path} is a git-lfs pointer, not the file itself", "run git lfs pull")


def read_model(path: Path) -> Message:
    """Parse a `Model` that holds at least one ML Program. Raises BundleError."""
    content = read_bytes(path, _MODEL_LIMIT, "copy the package again, whole")
    # Imported late: nothing else of protobuf is needed by name.
    from google.protobuf.message import DecodeError

    model = model_pb2().Model()
    try:
        model.ParseFromString(content)
    except (DecodeError, RecursionError) as error:
        raise BundleError(
            f"{path} is not a Core ML model, or it is truncated or encrypted",
            "copy or export the package again",
        ) from error
    if not list(programs(model)):
        raise BundleError(f"{path} holds no ML Program", "export it again with coremltools, for iOS 15 or later")
    return model


def programs(model: Message, name: str = "") -> Iterator[Program]:
    """The ML Programs of a model, pipelines included. Raises BundleError for kinds that cannot be patched."""
    kind = model.WhichOneof("Type")
    if kind == "mlProgram":
        yield Program(name, model.mlProgram, model.description)
    elif kind in _PIPELINES:
        pipeline = model.pipeline if kind == "pipeline" else getattr(model, kind).pipeline
        for number, part in enumerate(pipeline.models):
            own = pipeline.names[number] if number < len(pipeline.names) else f"model{number}"
            yield from _pipeline_part(part, f"{name}/{own}" if name else own)
    elif kind is None:
        raise BundleError("the model is empty", "it may be truncated or encrypted: copy or export the package again")
    else:
        _refuse(kind, model.specificationVersion)


def _pipeline_part(model: Message, name: str) -> Iterator[Program]:
    """A pipeline's other parts, such as scalers, hold no lookup; what may hide one is refused as anywhere."""
    kind = model.WhichOneof("Type") or ""
    if kind in ("", "mlProgram", *_PIPELINES, *_REFUSALS) or kind.startswith("neuralNetwork"):
        yield from programs(model, name)


def _refuse(kind: str, version: int) -> None:
    if kind in _REFUSALS:
        what, hint = _REFUSALS[kind]
        raise BundleError(f"the package holds {what} ({kind})", hint)
    if kind.startswith("neuralNetwork"):
        raise BundleError(
            f"the package holds a neural network ({kind}, specification {version}), not an ML Program",
            'export it again with convert_to="mlprogram"',
        )
    raise BundleError(f"the package holds a {kind}, not an ML Program", "is it the right file?")


def blob_path(model_file: Path, name: str) -> Path:
    """The file that a blob value names. Raises BundleError where it is not inside the model's folder."""
    if not name.startswith(_MODEL_PATH):
        raise BundleError(f"a weight is stored in {name!r}", f"weight files are named {_MODEL_PATH}weights/...")
    return inside(model_file.parent, name.removeprefix(_MODEL_PATH), model_file.name)
