"""What a format must answer, and the table of formats. A format's module is imported only when a bundle needs it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, cast

from g4patch.configs import Config
from g4patch.edits import Plan
from g4patch.runtimes import Device, Probe, Unavailable
from g4patch.sidecars import HostTable
from g4patch.view import Graph

# For a file that is to be replaced, where its replacement is until it is published.
Staged = Mapping[Path, Path]
NOT_STAGED: Staged = MappingProxyType({})


@dataclass(frozen=True)
class Model:
    """An opened model.

    `files` are all that belong to it, `replaced` those that an edit replaces: the graph's own file first, then files
    that are derived from it. `graph_file` is what the graph was read from: the first of `replaced`, or its stage.

    `host_table` or `config` is what a model without graphs is: a table that hosts look up, or a file that says how
    models are wired. Where a model is changed `in_place`, what is written for each file in `replaced` is a delta of
    patches, and of the file only these change.

    `format` is the format's NAME. `native` is the format's own object; nobody else looks into it. `weights` says where
    weights lie in `graph_file`: name -> (offset, size). Names and bytes stay the same when a plan is applied.
    """

    path: Path
    format: str
    details: tuple[str, ...]
    files: tuple[Path, ...]
    replaced: tuple[Path, ...]
    graph_file: Path
    graphs: tuple[Graph, ...]
    native: object
    weights: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    host_table: HostTable | None = None
    in_place: bool = False
    config: Config | None = None


class Format(Protocol):
    """A module in `g4patch.formats`. All functions raise BundleError for bytes they cannot work with."""

    @property
    def NAME(self) -> str:
        """What a person calls the format."""

    @property
    def MASK_DTYPES(self) -> frozenset[str]:
        """Integer dtypes in which `equal` and `where` can be inserted."""

    def open_model(self, path: Path, staged: Staged = NOT_STAGED) -> Model:
        """Read a model without its weights. Files in `staged` are read from there, all else from `path`."""

    def complete(self, model: Model, plan: Plan) -> Plan:
        """The plan with the companion nodes that the format needs, each with its reason; often the plan itself."""

    def write(self, model: Model, plan: Plan, staged: Staged) -> None:
        """Write each of the model's `replaced` files, with the plan applied, to its stage, which does not exist yet.

        Raises EditError where the plan does not fit the model.
        """

    def differences(self, before: Model, after: Model, plan: Plan) -> tuple[str, ...]:
        """What differs between two models beyond the plan, a line each; empty if nothing does."""

    def validate(self, model: Model) -> tuple[str, ...]:
        """What the format's own validator says against a model; empty if nothing.

        Raises runtimes.Unavailable where there is no validator for this model here.
        """

    def probe(self, model: Model, graph: str) -> Probe:
        """A runtime for the lookups of one graph. Raises runtimes.Unavailable where there is none here."""


# Pattern -> module. What a folder or file is called decides which format opens it.
FORMATS: dict[str, str] = {
    "*.onnx": "g4patch.formats.onnx",
    "*.mlpackage": "g4patch.formats.coreml",
    "*.aimodel": "g4patch.formats.coreai",
    "*_ple.safetensors": "g4patch.formats.sidecar",
    "embed_tokens_per_layer_q8.bin": "g4patch.formats.sidecar",
    "embed_per_layer.i8": "g4patch.formats.sidecar",
    "genai_config.json": "g4patch.formats.genai",
}
# Of these, what belongs to a folder of models and is no bundle by itself.
COMPANIONS = frozenset({"genai_config.json"})
# Bundle -> the one file beside it that is edited together with it: the scales of a table of codes.
BESIDE = {
    "embed_tokens_per_layer_q8.bin": "embed_tokens_per_layer_scales.bin",
    "embed_per_layer.i8": "embed_per_layer.scale.f32",
}


def pattern(path: Path) -> str | None:
    """The pattern of the format that opens a folder or file of this name, None if there is none."""
    return next((pattern for pattern in FORMATS if fnmatch(path.name.lower(), pattern)), None)


def load(path: Path) -> Format:
    """The format for a folder or file. Raises KeyError where there is none."""
    return cast(Format, importlib.import_module(FORMATS[pattern(path) or ""]))


def of(model: Model) -> Format:
    """The format that opened a model."""
    return load(model.path)


def device(model: Model, graph: str, unit: str) -> Device:
    """A graph on a compute unit of the user's own device: formats with such a runtime have a function `device` too.

    Raises runtimes.Unavailable for the others.
    """
    make = getattr(of(model), "device", None)
    if make is None:
        raise Unavailable(f"{model.format} has no runtime that can be told which unit to use")
    return cast(Device, make(model, graph, unit))
