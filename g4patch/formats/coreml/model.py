"""Open a package: its parsed `Model`, a graph for each function, and the way back from graphs to ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from g4patch.errors import BundleError, EditError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.formats.coreml.package import Program, programs, read_model, root_file
from g4patch.formats.coreml.proto import Message
from g4patch.formats.coreml.view import Reading, read_function
from g4patch.formats.coreml.weights import open_weights

if TYPE_CHECKING:
    from g4patch.runtimes.mil.program import Function

NAME = "Core ML"

# Specification version -> the system that reads it first (coremltools' `_SPECIFICATION_VERSION_IOS_*`).
_SYSTEMS = {6: "iOS 15", 7: "iOS 16", 8: "iOS 17", 9: "iOS 18", 10: "iOS 26"}


@dataclass(frozen=True)
class Native:
    """`message` is the parsed `Model`, `readings` are the graphs by name.

    `programs` are those that the interpreter has asked for so far: reading one takes a while.
    """

    message: Message
    readings: Mapping[str, Reading]
    programs: dict[str, Function] = field(default_factory=dict)


def native(model: Model) -> Native:
    """The format's own part of a model. Raises EditError for a model of another format."""
    if not isinstance(model.native, Native):
        raise EditError(f"{model.path} was not opened as a Core ML package")
    return model.native


def open_model(path: Path, staged: Staged = NOT_STAGED) -> Model:
    """Read a package without its weights; its `model.mlmodel` may be staged. Raises BundleError."""
    target = root_file(path)
    source = staged.get(target, target)
    message = read_model(source)
    with open_weights(target) as weights:
        readings = {name: read_function(name, *item, weights) for name, item in functions(message).items()}
        weight_files = weights.paths
    return Model(
        path=path,
        format=NAME,
        details=_details(message),
        files=(path / "Manifest.json", target, *weight_files),
        replaced=(target,),
        graph_file=source,
        graphs=tuple(reading.graph for reading in readings.values()),
        native=Native(message, readings),
    )


@dataclass(frozen=True)
class _Entry:
    """What a graph is read from: one specialisation of a function; its `suffix` tells it from the function's others."""

    program: Program
    function: str
    opset: str
    suffix: str

    @property
    def graph(self) -> str:
        return "/".join(part for part in (self.program.name, self.function) if part) + self.suffix


def _entries(message: Message) -> Iterator[_Entry]:
    """Every specialisation of every function, of a pipeline's models one after the other as they run."""
    for program in programs(message):
        for name in sorted(program.message.functions):
            for opset, suffix in _specialisations(name, program.message.functions[name]):
                yield _Entry(program, name, opset, suffix)


def functions(message: Message) -> dict[str, tuple[Message, str]]:
    """Graph name -> (function, opset): every specialisation of every function of every model of a pipeline."""
    found: dict[str, tuple[Message, str]] = {}
    for entry in _entries(message):
        if entry.graph in found:
            raise BundleError(f"two models of the pipeline are called {entry.program.name}", "name them apart")
        found[entry.graph] = (entry.program.message.functions[entry.function], entry.opset)
    if not found:
        raise BundleError("the model holds no function", "export it again with coremltools")
    return found


def default_shapes(message: Message, graph: str) -> dict[str, tuple[int, ...]]:
    """The shape in which each tensor input of a graph is described: of open dimensions, their defaults."""
    for entry in _entries(message):
        if entry.graph == graph:
            described = {function.name: function.input for function in entry.program.description.functions}
            features = described.get(entry.function, entry.program.description.input)
            return {item.name: tuple(item.type.multiArrayType.shape) for item in features}
    return {}


def shown_by(message: Message, graph: str) -> tuple[str | None, Message]:
    """The function that Core ML is to be asked for, None for the only one, and the description of what it shows.

    Of a pipeline that is the pipeline's own. Raises EditError where there is no such graph.
    """
    entry = next((entry for entry in _entries(message) if entry.graph == graph), None)
    if entry is None:
        raise EditError(f"the model has no function {graph}")
    described = {function.name: function for function in message.description.functions}
    if entry.function in described:
        return entry.function, described[entry.function]
    return None, message.description


def leading_to(message: Message, graph: str) -> tuple[str, ...]:
    """A graph and, before it, those that run before it in its pipeline: of each model the function of the same name."""
    entries = {entry.graph: entry for entry in _entries(message)}
    own = entries[graph]
    before: list[str] = []
    for name, entry in entries.items():
        if entry.program.name == own.program.name:
            break
        if (entry.function, entry.suffix) == (own.function, own.suffix):
            before.append(name)
    return (*before, graph)


def _specialisations(name: str, function: Message) -> Iterator[tuple[str, str]]:
    """(opset, suffix) of each specialisation; the one that the function names comes first, without suffix."""
    if function.opset not in function.block_specializations:
        raise BundleError(f"function {name} lacks a block for its opset {function.opset}", "export the package again")
    yield function.opset, ""
    for opset in sorted(set(function.block_specializations) - {function.opset}):
        yield opset, f"@{opset}"


def block(message: Message, graph: str) -> Message:
    """The outermost block of a graph in a `Model`. Raises EditError where there is none of that name."""
    try:
        function, opset = functions(message)[graph]
    except KeyError as error:
        raise EditError(f"the model has no function {graph}") from error
    return function.block_specializations[opset]


def _details(message: Message) -> tuple[str, ...]:
    parts = len(list(programs(message)))
    kind = "ML Program" if message.WhichOneof("Type") == "mlProgram" else f"pipeline of {parts} ML Programs"
    version = message.specificationVersion
    system = f" ({_SYSTEMS[version]})" if version in _SYSTEMS else ""
    return (kind, f"spec {version}{system}")
