"""Is a model well formed? Our own checks first, then coremltools' loader in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from g4patch.formats import Model
from g4patch.formats.coreml.model import functions, native
from g4patch.formats.coreml.proto import Message
from g4patch.formats.coreml.values import dtype_name, elements, field_for, shape_of, tensor_type, text
from g4patch.formats.coreml.weights import Weights, open_weights
from g4patch.runtimes import Unavailable

# Seconds. Importing coremltools takes 2 to 5, reading the largest Gemma 4 stage less than that.
_TIME_LIMIT = 180
_LOADER = Path(__file__).with_name("loader.py")


def validate(model: Model) -> tuple[str, ...]:
    """What is wrong with a model, a line each; empty if nothing.

    Raises Unavailable where our own checks find nothing and coremltools' loader cannot judge this model here.
    """
    return tuple(_own_checks(model)) or _loader(model)


def _own_checks(model: Model) -> Iterator[str]:
    """What coremltools' loader lets through: repeated names, constants of another type, int64, no name."""
    message = native(model).message
    with open_weights(model.replaced[0]) as weights:
        for graph, (function, opset) in functions(message).items():
            checker = _Checker(graph, weights)
            names = {item.name for item in function.inputs}
            yield from checker.block(function.block_specializations[opset], names)


class _Checker:
    """The names that one function has defined so far, and what is wrong with its ops."""

    def __init__(self, graph: str, weights: Weights) -> None:
        self.graph = graph
        self.weights = weights

    def block(self, block: Message, visible: set[str]) -> Iterator[str]:
        """`visible` are the names in scope, to which the block's own are added."""
        visible |= {item.name for item in block.inputs}
        for operation in block.operations:
            title = f"{self.graph}: {operation.type} {_name(operation)}"
            for parameter, argument in operation.inputs.items():
                for binding in argument.arguments:
                    if binding.WhichOneof("binding") == "name" and binding.name not in visible:
                        yield f"{title} reads {binding.name} as {parameter}, which is not defined before it"
            for inner in operation.blocks:
                yield from self.block(inner, set(visible))
            if not (text(operation.attributes["name"]) if "name" in operation.attributes else None):
                yield f"{title} has no name attribute"
            yield from self._outputs(title, operation, visible)
            if operation.type == "const":
                yield from self._constant(title, operation)
        for name in block.outputs:
            if name not in visible:
                yield f"{self.graph}: the output {name} is not defined"

    def _outputs(self, title: str, operation: Message, visible: set[str]) -> Iterator[str]:
        for item in operation.outputs:
            if item.name in visible:
                yield f"{title} defines {item.name}, which is defined before it"
            visible.add(item.name)
            tensor = tensor_type(item.type)
            if tensor is not None and tensor.rank >= 0 and tensor.rank != len(tensor.dimensions):
                yield f"{title} declares rank {tensor.rank} and {len(tensor.dimensions)} dimensions"

    def _constant(self, title: str, operation: Message) -> Iterator[str]:
        value = operation.attributes["val"]
        declared, stored = tensor_type(operation.outputs[0].type), tensor_type(value.type)
        if declared is None or stored is None:
            return
        dtype = dtype_name(stored.dataType)
        if declared.dataType != stored.dataType or shape_of(declared) != shape_of(stored):
            yield f"{title} is declared as {_type(declared)}, its value as {_type(stored)}"
        if dtype in ("int64", "uint64"):
            yield f"{title} is {dtype}, which Core ML does not run"
        if value.WhichOneof("value") == "blobFileValue":
            blob = self.weights.blob(value.blobFileValue.fileName, value.blobFileValue.offset)
            if blob.dtype != dtype:
                yield f"{title} is declared as {dtype}, and {blob.path.name} holds {blob.dtype}"
            return
        field = value.immediateValue.tensor.WhichOneof("value")
        if field not in (field_for(dtype), "bytes") and elements(value) != 0:
            yield f"{title} is declared as {dtype}, and its value is stored as {field}"


def _type(tensor: Message) -> str:
    dims = ",".join("?" if size is None else str(size) for size in shape_of(tensor) or ())
    return f"{dtype_name(tensor.dataType)}[{dims}]"


def _name(operation: Message) -> str:
    return operation.outputs[0].name if operation.outputs else ""


def _loader(model: Model) -> tuple[str, ...]:
    """What coremltools' loader says against a model that it can load without our edit."""
    (unpatched,) = model.replaced
    control = [str(unpatched)] if unpatched != model.graph_file else []
    command = [sys.executable, "-P", str(_LOADER), str(unpatched.parent), str(model.graph_file), *control]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"deep check not available: coremltools took more than {_TIME_LIMIT} s") from error
    except OSError as error:
        raise Unavailable(f"deep check not available: {error}") from error
    verdict = _verdict(done.stdout)
    if verdict is None:
        raise Unavailable(f"deep check not available: coremltools {_ending(done)}")
    if verdict.get("unavailable"):
        raise Unavailable(f"deep check not available: {verdict['unavailable']}")
    return tuple(f"coremltools: {line}" for line in verdict.get("problems", ()))


def _verdict(output: bytes) -> dict[str, Any] | None:
    """The last line that the loader process wrote is its verdict; None where it did not come so far."""
    try:
        verdict = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return verdict if isinstance(verdict, dict) else None


def _ending(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        return f"was killed by {signal.Signals(-done.returncode).name}"
    return f"ended with code {done.returncode}"
