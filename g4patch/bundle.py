"""Find the bundle that a user means."""

from __future__ import annotations

from pathlib import Path

from g4patch.errors import BundleError, UsageError
from g4patch.formats import FORMATS

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
