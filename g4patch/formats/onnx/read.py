"""Open an `.onnx` file: parse the proto, check where its external data lies, leave the weights alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from g4patch.errors import BundleError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.formats.onnx.slice import cut
from g4patch.formats.onnx.view import OnnxGraph, build
from g4patch.formats.onnx.walk import blocks, tensors
from g4patch.links import stays_inside
from g4patch.runtimes import Probe

_LARGEST_PROTO = 2**31 - 1
_LONGEST_LOCATION = 4096
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class OnnxModel:
    """The format's own object: the proto as parsed, and the view's way back into it."""

    proto: ModelProto
    graph: OnnxGraph


def open_model(path: Path, staged: Staged = NOT_STAGED) -> Model:
    """Read an ONNX model without its external data. Raises BundleError for anything that is not one."""
    source = staged.get(path, path)
    proto = parse(source)
    folder = path.parent
    data = _data_files(path, [t for t in tensors(proto) if t.data_location == TensorProto.EXTERNAL])
    graph = build(proto, folder)
    opsets = ", ".join(f"{entry.domain or 'opset'} {entry.version}" for entry in proto.opset_import)
    producer = " ".join(part for part in (proto.producer_name, proto.producer_version) if part)
    details = tuple(part for part in (opsets, f"from {producer}" if producer else "") if part)
    files = (path, *data)
    return Model(path, "ONNX", details, files, (path,), source, (graph.view,), OnnxModel(proto, graph))


def native(model: Model) -> OnnxModel:
    """The format's own object of a model that this format opened."""
    assert isinstance(model.native, OnnxModel)
    return model.native


def parse(path: Path) -> ModelProto:
    """Parse a file as a ModelProto and make sure that it is one: protobuf reads much as an empty message."""
    try:
        if path.stat().st_size > _LARGEST_PROTO:
            raise BundleError(
                f"{path} is larger than protobuf's limit of 2 GB", "save its weights as external data first"
            )
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}", "check the path") from error
    if content.startswith(_LFS):
        raise BundleError(f"{path} is a git-LFS pointer, not a model", "run: git lfs pull")
    try:
        proto = ModelProto.FromString(content)
    except DecodeError as error:
        raise BundleError(f"{path} is not an ONNX model, or is cut short", "copy or export it again") from error
    _refuse_unreadable_names(proto, path)
    if not proto.HasField("graph") or not proto.opset_import or not proto.graph.node:
        raise BundleError(f"{path} is not an ONNX model: it has no graph", "is it the right file?")
    return proto


def _refuse_unreadable_names(proto: ModelProto, path: Path) -> None:
    """Protobuf hands out names that are not UTF-8 as bytes. No exporter writes any; damage does."""

    def names() -> Iterator[object]:
        yield from (proto.graph.name, proto.producer_name, proto.producer_version)
        yield from (entry.domain for entry in proto.opset_import)
        for block in blocks(proto):
            yield from block.names
            for node in block.nodes:
                yield from (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
                yield from (text for a in node.attribute for text in (a.name, a.ref_attr_name))
        for tensor in tensors(proto):
            yield from (tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))

    if not all(isinstance(name, str) for name in names()):
        raise BundleError(f"{path} has names that are not text", "is the file damaged? copy it again")


def _data_files(model: Path, external: Sequence[TensorProto]) -> list[Path]:
    """The files that hold tensors. Raises BundleError where one is missing, too short, or outside the folder."""
    ends: dict[str, int] = {}
    for tensor in external:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        try:
            offset, length = int(entries.get("offset", 0)), int(entries.get("length", 0))
        except ValueError:
            offset = length = -1
        if min(offset, length) < 0:
            raise BundleError(f"the external data of {tensor.name} has no readable place", "export the model again")
        location = entries.get("location", "")
        ends[location] = max(ends.get(location, 0), offset + length)
    return sorted(_data_file(model, location, end) for location, end in ends.items())


def _data_file(model: Path, location: str, end: int) -> Path:
    place = PurePosixPath(location)
    bad = not location.isprintable() or "\\" in location or len(location) > _LONGEST_LOCATION
    if bad or not place.parts or place.is_absolute() or ".." in place.parts:
        raise _outside(location[:100])
    path = model.parent / place
    try:
        if not path.is_file():
            raise BundleError(f"the external data file {path} is missing", "copy it beside the model")
        # Where the model itself is a link, its target's folder counts too.
        if not any(stays_inside(path, home) for home in (model.parent, model.resolve().parent)):
            raise _outside(location)
    except (OSError, RuntimeError) as error:
        raise BundleError(
            f"the external data file {path} cannot be read: {error}", "copy it beside the model"
        ) from error
    if path.stat().st_size < end:
        raise _short(path, path.stat().st_size, end)
    return path


def _outside(location: str) -> BundleError:
    return BundleError(
        f"external data is at {location!r}, outside the model's folder",
        "external data must lie beside the model or below it: copy it there",
    )


def _short(path: Path, size: int, needed: int) -> BundleError:
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            return BundleError(f"{path} is a git-LFS pointer, not weights", "run: git lfs pull")
    return BundleError(
        f"{path} ends at {size:,} bytes; the model needs {needed:,}",
        "was the copy interrupted? copy it again",
    )


def probe(model: Model, graph: str) -> Probe:
    """onnxruntime on the slices around the lookups.

    It follows no link out of the folder that it is given: data files are named by where they really are.
    """
    from g4patch.runtimes.ort import OrtProbe

    own = native(model)
    home = model.path.parent.resolve()
    folder = Path(os.path.commonpath([path.resolve().parent for path in model.files[1:]] or [home]))

    def isolate(feeds: Sequence[str], outputs: Sequence[str]) -> ModelProto:
        isolated = cut(own.proto, own.graph, feeds, outputs)
        for entry in (entry for tensor in tensors(isolated) for entry in tensor.external_data):
            if entry.key == "location":
                entry.value = str((home / entry.value).resolve().relative_to(folder))
        return isolated

    return OrtProbe(isolate, folder, own.graph.view)
