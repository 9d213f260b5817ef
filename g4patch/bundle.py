"""Find the bundle that a user means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from g4patch.errors import BundleError, UsageError
from g4patch.formats import COMPANIONS, FORMATS, pattern

# A folder beside a bundle with what was replaced in it.
BACKUP_SUFFIX = ".g4patch"

# What people point at that is not a bundle g4patch can work on, and what to do instead.
_REFUSED = {
    ".mlmodelc": "it is compiled: patch the .mlpackage and compile it again",
    ".aimodelc": "it is compiled: patch the .aimodel and compile it again",
    ".aimodelx": "it is compiled: patch the .aimodel and compile it again",
    ".mlarchive": "it is compiled and may be encrypted: patch the .mlpackage and compile it again",
    ".mlmodel": "point at the .mlpackage around it; on its own it is no ML Program: export one",
    ".onnx_data": "point at the .onnx file that it belongs to",
    ".data": "point at the .onnx file that it belongs to",
    ".gguf": "GGUF runtimes read the pad row for media by themselves",
    ".safetensors": "point at an exported model, or at a sidecar: *_ple.safetensors",
    ".bin": "of a table and its scales, point at embed_tokens_per_layer_q8.bin",
    ".f32": "of a table and its scales, point at embed_per_layer.i8",
}


# How deep models may lie in a bundle folder: onnxruntime-genai and mobius keep one folder a model.
_DEPTH = 2


@dataclass(frozen=True)
class Bundle:
    """What the user points at: one model, or a folder that holds several with their metadata.

    `folder` is the folder that was named, where it holds one model only: that model is the bundle.
    """

    path: Path
    models: tuple[Path, ...]
    folder: Path | None = None

    @property
    def is_folder(self) -> bool:
        return self.models != (self.path,)


def find(path: Path | None) -> Bundle:
    """The bundle that is meant: a model, a folder of models, or the only model in the current folder.

    Raises UsageError or BundleError with the candidates or with what to do instead.
    """
    place = path if path is not None else Path()
    if place.name in ("", ".."):  # what is kept beside a bundle is named after it
        place = place.resolve()
    if pattern(place) in COMPANIONS:
        raise BundleError(f"{place} is no bundle by itself", "give the folder that it is in")
    if pattern(place):
        if not place.exists():
            raise BundleError(f"{place} does not exist", "check the path")
        return Bundle(place, (place,))
    instead = _REFUSED.get(place.suffix.lower())
    if instead and place.exists():
        raise BundleError(f"{place} cannot be patched", instead)
    if not place.is_dir():
        known = ", ".join(name for name in FORMATS if name not in COMPANIONS)
        reason = "is not a bundle" if place.exists() else "does not exist"
        raise BundleError(f"{place} {reason}", f"bundles are called {known}")
    found = tuple(sorted(_models(place, _DEPTH)))
    bundles = [model for model in found if pattern(model) not in COMPANIONS]
    if not bundles:
        raise UsageError(f"there is no bundle in {place.resolve()}", "give one: g4patch COMMAND BUNDLE")
    if len(found) == 1:
        return Bundle(found[0], found, place if path is not None else None)
    if path is None and len(bundles) > 1:
        names = ", ".join(str(model) for model in bundles)
        raise UsageError(f"there are several bundles here: {names}", "give one of them, or the folder: .")
    return Bundle(place, found)


@contextmanager
def outputs(bundles: Sequence[Path | None], out: Path | None, *, make: bool) -> Iterator[list[Path | None]]:
    """Where the mended copy of each bundle goes; None in place. Of several, each goes into the folder `out`.

    With `make` the folder is made, and removed again if nothing was put into it. Raises UsageError for bundles that
    are given twice or lie in each other, and for those that would go to the same place.
    """
    if len(bundles) == 1:
        yield [out]
        return
    places = [(path or Path()).resolve() for path in bundles]
    for first, second in combinations(places, 2):
        if first.is_relative_to(second) or second.is_relative_to(first):
            raise UsageError(f"{first} and {second} are the same bundle, or one holds the other", "give each once")
    if out is None:
        yield [None for _ in bundles]
        return
    if pattern(out) or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is the name of one bundle, and several are given", "name a folder to put them into")
    names = [place.name for place in places]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"{names.count(name)} bundles would become {out / name}", "give the folders that they are in instead"
            )
    made = make and not out.exists()
    if made:
        _make(out)
    try:
        yield [out / name for name in names]
    finally:
        if made:
            with suppress(OSError):  # it is not empty
                out.rmdir()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}", "choose another place") from error


def _models(folder: Path, depth: int) -> Iterator[Path]:
    for child in folder.iterdir():
        if child.name.startswith(".") or child.name.endswith(BACKUP_SUFFIX):
            continue
        if pattern(child):
            yield child
        elif depth and child.is_dir() and not child.is_symlink():
            yield from _models(child, depth - 1)
