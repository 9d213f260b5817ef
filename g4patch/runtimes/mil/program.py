"""From the protobuf messages of an ML Program to what the interpreter runs.

The messages are handed in by whoever read the file, so nothing here imports protobuf. Layout: `MIL.proto` of Core
ML's model specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from g4patch.errors import BundleError
from g4patch.runtimes.mil.types import ELEMENT_TYPES, Array, TensorType, decode, pack_bytes
from g4patch.runtimes.mil.weights import Blob

_HINT = "export the model again"
READ_STATE = "read_state"
WRITE_STATE = "write_state"

# A constant as the program holds it: numbers, text, or where in the weight file they are.
Literal = Array | str | Blob


@dataclass(frozen=True)
class Output:
    """A value that an op computes. A type of None is not a tensor's (lists and dictionaries)."""

    name: str
    type: TensorType | None


@dataclass(frozen=True)
class Operation:
    """One operation of a function. `inputs` are names of values, `constants` its attributes but for `name`."""

    type: str
    inputs: Mapping[str, tuple[str, ...]]
    outputs: tuple[Output, ...]
    constants: Mapping[str, Literal]

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.type} {self.outputs[0].name}" if self.outputs else self.type

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the values it reads."""
        return tuple(name for names in self.inputs.values() for name in names)

    @property
    def state(self) -> str:
        """The state that `read_state` and `write_state` work on."""
        return self.inputs["input"][0]


@dataclass(frozen=True)
class Function:
    """One function of an ML Program, in the order of execution.

    `inputs` are tensors, `states` the tensors inside states. `opset` is such as `CoreML7` (iOS 17).
    """

    name: str
    opset: str
    inputs: Mapping[str, TensorType]
    states: Mapping[str, TensorType]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]

    @cached_property
    def producers(self) -> Mapping[str, Operation]:
        return {output.name: op for op in self.operations for output in op.outputs}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The declared types of all tensors, the inputs' among them."""
        computed = {output.name: output.type for op in self.operations for output in op.outputs if output.type}
        return {**computed, **self.inputs}


def read_function(message: Any, name: str, opset: str = "") -> Function:
    """Read a `MILSpec.Function` message: its block for `opset`, or for the opset that it names itself.

    Raises BundleError for one that contradicts itself.
    """
    opset = opset or message.opset
    block = message.block_specializations.get(opset)
    if block is None:
        raise BundleError(f"function {name} has no block for the opset {opset!r}", _HINT)
    inputs, states = {}, {}
    for item in message.inputs:
        kind = item.type.WhichOneof("type")
        if kind == "tensorType":
            inputs[item.name] = _tensor_type(item.type)
        elif kind == "stateType":
            states[item.name] = _tensor_type(item.type.stateType.wrappedType)
        else:
            raise BundleError(f"input {item.name} of function {name} is no tensor", _HINT)
    operations = tuple(read for op in block.operations for read in _operations(op))
    function = Function(name, opset, inputs, states, tuple(block.outputs), operations)
    _check_names(function)
    _check_states(function)
    return function


def _check_names(function: Function) -> None:
    """Every value is defined once and before it is read."""
    defined = {*function.inputs, *function.states}
    for op in function.operations:
        missing = next((name for name in op.operands if name not in defined), None)
        if missing is not None:
            raise BundleError(f"{op.label} reads {missing}, which is not defined before it", _HINT)
        for output in op.outputs:
            if output.name in defined:
                raise BundleError(f"function {function.name} defines {output.name} twice", _HINT)
            defined.add(output.name)


def _check_states(function: Function) -> None:
    """What reads and writes states names one, and what is written has one value."""
    for op in function.operations:
        if op.type not in (READ_STATE, WRITE_STATE):
            continue
        needs = {"input": 1} if op.type == READ_STATE else {"input": 1, "data": 1}
        if {key: len(names) for key, names in op.inputs.items()} != needs or op.state not in function.states:
            raise BundleError(f"{op.label} of function {function.name} has no state or no value for it", _HINT)
        if len(op.outputs) != (op.type == READ_STATE):
            raise BundleError(f"{op.label} of function {function.name} has {len(op.outputs)} outputs", _HINT)


def _operations(message: Any) -> list[Operation]:
    """An operation, after `const` operations for the constants that stand in place among its inputs."""
    outputs = tuple(
        Output(item.name, _tensor_type(item.type) if item.type.WhichOneof("type") == "tensorType" else None)
        for item in message.outputs
    )
    read: list[Operation] = []
    inputs = {}
    for key, argument in message.inputs.items():
        names = []
        for number, item in enumerate(argument.arguments):
            if item.WhichOneof("binding") == "name":
                names.append(item.name)
                continue
            # No identifier of MIL contains a space.
            names.append(f"{outputs[0].name if outputs else message.type} {key} {number}")
            declared = _tensor_type(item.value.type)
            read.append(Operation("const", {}, (Output(names[-1], declared),), {"val": _literal(item.value)}))
        inputs[key] = tuple(names)
    constants = {key: _literal(value) for key, value in message.attributes.items() if key != "name"}
    return [*read, Operation(message.type, inputs, outputs, constants)]


def _tensor_type(message: Any) -> TensorType:
    tensor = message.tensorType
    element = ELEMENT_TYPES.get(tensor.dataType)
    if element is None:
        raise BundleError(f"a tensor has the element type {tensor.dataType}, which is not known", _HINT)
    dims = []
    for dim in tensor.dimensions:
        if dim.WhichOneof("dimension") == "constant":
            dims.append(dim.constant.size)
        elif dim.unknown.variadic:
            return TensorType(element, None)
        else:
            dims.append(None)
    return TensorType(element, tuple(dims))


def _literal(message: Any) -> Literal:
    """A `Value` message. What is neither a tensor nor text (documentation, dictionaries) comes back as text."""
    kind = message.WhichOneof("value")
    if message.type.WhichOneof("type") != "tensorType":
        return str(message)
    declared = _tensor_type(message.type)
    if kind == "blobFileValue":
        return Blob(message.blobFileValue.fileName, message.blobFileValue.offset, declared)
    if kind != "immediateValue" or message.immediateValue.WhichOneof("value") != "tensor":
        raise BundleError("a constant has no value", _HINT)
    return _immediate(message.immediateValue.tensor, declared)


def _immediate(message: Any, declared: TensorType) -> Array | str:
    kind = message.WhichOneof("value")
    shape, element = declared.static_shape(), declared.element
    if shape is None or kind is None:
        # Protobuf leaves out an empty list of values: that is a tensor without elements.
        if shape is not None and math.prod(shape) == 0:
            return np.empty(shape, element.held)
        raise BundleError("a constant has no value or no fixed shape", _HINT)
    values = getattr(message, kind).values
    if kind == "strings":
        if len(values) != 1:
            raise BundleError("a constant holds several texts, which is not supported", _HINT)
        text: str = values[0]
        return text
    count = math.prod(shape)
    if kind == "bytes":
        if len(values) != pack_bytes(count, element.bits):
            raise BundleError(f"a constant of shape {shape} has {len(values)} bytes", _HINT)
        return decode(np.frombuffer(values, np.uint8), element)[:count].reshape(shape)
    if len(values) != count:
        raise BundleError(f"a constant of shape {shape} has {len(values)} elements", _HINT)
    try:
        return np.array(values, element.held).reshape(shape)
    except (ValueError, OverflowError, TypeError) as error:
        raise BundleError(f"a constant cannot be read as {element.name}: {error}", _HINT) from error
