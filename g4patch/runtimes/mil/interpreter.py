"""Run a function of an ML Program in numpy.

Numbers: every op computes in float32 and its result is rounded to fp16 where the program declares fp16. A value
differs from Core ML's by how each accumulates inside one op, not by the precision between ops; what the Neural
Engine or the GPU keep in wider or narrower registers is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from g4patch.errors import BundleError
from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil.ops import KERNELS, Kernel
from g4patch.runtimes.mil.program import READ_STATE, WRITE_STATE, Function, Operation
from g4patch.runtimes.mil.slicing import is_constant, last_uses, needed
from g4patch.runtimes.mil.types import FP16, Array, TensorType, round_to_fp16
from g4patch.runtimes.mil.weights import Blob, Lazy, Weights

Value = Array | Lazy | str
# Gives the value of a name; where the flag is set, a constant may come undecoded.
Fetch = Callable[[str, bool], Value]

_HINT = "export the model again"


def run(
    function: Function,
    inputs: Mapping[str, Array],
    taps: Sequence[str],
    *,
    state: MutableMapping[str, Array] | None = None,
    weights_dir: Path,
) -> dict[str, Array]:
    """The values named in `taps`, any of the function's, each in its own dtype. See `Interpreter.run`."""
    return Interpreter(function, Weights(weights_dir)).run(inputs, taps, state=state)


@dataclass(frozen=True)
class _Step:
    """One operation of a run, and the values that nothing reads after it."""

    operation: Operation
    kernel: Kernel | None
    frees: tuple[str, ...]


class Interpreter:
    """One function with its weights. What a run finds out about constants is kept for the next; weights are not."""

    def __init__(self, function: Function, weights: Weights) -> None:
        self.function = function
        self._weights = weights
        self._opset = _opset_number(function.opset)
        self._constants: dict[str, Value] = {}
        self._plans: dict[tuple[Any, ...], tuple[_Step, ...]] = {}

    def run(
        self,
        inputs: Mapping[str, Array],
        taps: Sequence[str],
        *,
        state: MutableMapping[str, Array] | None = None,
        overrides: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Compute the values named in `taps`.

        Only what they depend on is evaluated, and freed after its last use. `inputs` holds the tensors that are
        needed, in shapes the function admits. `overrides` puts arrays in place of values that would be computed.
        States start as zeros; with `state` they start from it, all writes are carried out, and it is updated.

        Raises Unavailable for what cannot be carried out: an op that the interpreter lacks, inputs that do not fit,
        too little memory. Raises BundleError for weights that cannot be read and programs that are not well formed.
        """
        given = {name: self._accepted(name, array) for name, array in {**inputs, **(overrides or {})}.items()}
        plan = self._plan(tuple(taps), tuple(overrides or ()), state is not None)
        try:
            frame = _Frame(self, given, self._start(state))
            with np.errstate(all="ignore"):
                for step in plan:
                    frame.execute(step)
                found = {name: _outside(frame.array(name), self.function.types[name]) for name in taps}
        except MemoryError as error:
            raise Unavailable("the run takes more memory than there is") from error
        if state is not None:
            state.update({name: _outside(array, self.function.states[name]) for name, array in frame.states.items()})
        return found

    def _plan(self, taps: tuple[str, ...], given: tuple[str, ...], keep_states: bool) -> tuple[_Step, ...]:
        key = (taps, given, keep_states)
        if key not in self._plans:
            operations = needed(self.function, taps, given, keep_states)
            lacking = sorted({operation.type for operation in operations} - KERNELS.keys() - _BUILT_IN)
            if lacking:
                raise Unavailable(f"the MIL interpreter lacks {', '.join(lacking)}")
            steps = [operation for operation in operations if not is_constant(operation)]
            frees = last_uses(steps, keep=taps)
            self._plans[key] = tuple(
                _Step(operation, KERNELS.get(operation.type), names)
                for operation, names in zip(steps, frees, strict=True)
            )
        return self._plans[key]

    def _start(self, state: Mapping[str, Array] | None) -> dict[str, Array]:
        started = {}
        for name, declared in self.function.states.items():
            if state is not None and name in state:
                started[name] = _held(name, np.asarray(state[name]), declared)
            else:
                started[name] = np.zeros(declared.static_shape() or (), declared.element.held)
        return started

    def _accepted(self, name: str, array: Array) -> Array:
        declared = self.function.types.get(name)
        if declared is None:
            raise Unavailable(f"function {self.function.name} has no tensor {name}")
        return _held(name, np.asarray(array), declared)

    def constant(self, name: str) -> Value:
        """The value of a `const` or `constexpr_*` operation: a large one is not decoded here."""
        if name not in self._constants:
            operation = self.function.producers.get(name)
            if operation is None or not is_constant(operation):
                raise Unavailable(f"a run needs {name}, which was not given")
            if operation.type == "const":
                self._constants[name] = self._literal(operation, "val")
            else:
                (self._constants[name],) = self.compute(operation, KERNELS[operation.type], self._constant_operand)
        return self._constants[name]

    def _constant_operand(self, name: str, lazy: bool) -> Value:
        value = self.constant(name)
        return value if lazy or not isinstance(value, Lazy) else value.dense()

    def _literal(self, operation: Operation, key: str) -> Value:
        literal = operation.constants.get(key)
        if literal is None:
            raise BundleError(f"{operation.label} has no {key}", _HINT)
        return self._weights.tensor(literal) if isinstance(literal, Blob) else literal

    def compute(self, operation: Operation, kernel: Kernel, fetch: Fetch) -> list[Value]:
        """The outputs of an operation, each as its declared type is held."""
        arguments = self._arguments(operation, kernel, fetch)
        try:
            results = kernel.run(**arguments)
        except (ValueError, IndexError, TypeError, KeyError, ArithmeticError, AttributeError) as error:
            raise Unavailable(f"the MIL interpreter cannot carry out {operation.label}: {error}") from error
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(operation.outputs):
            raise Unavailable(f"{operation.label} has {len(operation.outputs)} outputs, here {len(results)}")
        return [
            _conformed(operation, output.type, result, kernel)
            for output, result in zip(operation.outputs, results, strict=True)
        ]

    def _arguments(self, operation: Operation, kernel: Kernel, fetch: Fetch) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for key, names in operation.inputs.items():
            values = [fetch(name, key in kernel.lazy) for name in names]
            if key not in kernel.many and len(values) != 1:
                raise Unavailable(f"{key} of {operation.label} has {len(values)} values")
            arguments[key] = values if key in kernel.many else values[0]
        for key in operation.constants:
            value = self._literal(operation, key)
            arguments[key] = value.dense() if isinstance(value, Lazy) and key not in kernel.lazy else value
        unknown = sorted(arguments.keys() - kernel.parameters)
        if unknown:
            raise Unavailable(f"the MIL interpreter does not know {', '.join(unknown)} of {operation.type}")
        if kernel.wants_opset:
            arguments["opset"] = self._opset
        if kernel.wants_element:
            declared = operation.outputs[0].type
            arguments["element"] = declared.element if declared else None
        return arguments


_BUILT_IN = {"const", READ_STATE, WRITE_STATE}


class _Frame:
    """The values of one run."""

    def __init__(self, interpreter: Interpreter, given: dict[str, Array], states: dict[str, Array]) -> None:
        self._interpreter = interpreter
        self._values: dict[str, Value] = dict(given)
        self.states = states

    def execute(self, step: _Step) -> None:
        operation = step.operation
        if operation.type == READ_STATE:
            self._values[operation.outputs[0].name] = self.states[operation.state]
        elif operation.type == WRITE_STATE:
            self._write_state(operation)
        elif step.kernel is not None:
            results = self._interpreter.compute(operation, step.kernel, self._fetch)
            for output, result in zip(operation.outputs, results, strict=True):
                self._values[output.name] = result
        for name in step.frees:
            self._values.pop(name, None)

    def _write_state(self, operation: Operation) -> None:
        state = operation.state
        (name,) = operation.inputs["data"]
        value = self.array(name)
        if not self._interpreter.function.states[state].admits(value.shape):
            raise Unavailable(f"what is written to state {state} does not fit it")
        self.states[state] = value

    def _fetch(self, name: str, lazy: bool) -> Value:
        value = self._values.get(name)
        if value is None:
            value = self._interpreter.constant(name)
        if lazy or not isinstance(value, Lazy):
            return value
        # Decoded once for all its uses in this run.
        self._values[name] = dense = value.dense()
        return dense

    def array(self, name: str) -> Array:
        value = self._fetch(name, False)
        if not isinstance(value, np.ndarray):
            raise Unavailable(f"{name} is not a tensor")
        return value


def _opset_number(opset: str) -> int:
    digits = opset.removeprefix("CoreML")
    if not digits.isdigit():
        raise Unavailable(f"the MIL interpreter does not know the opset {opset}")
    return int(digits)


def _held(name: str, array: Array, declared: TensorType) -> Array:
    """What a caller hands in, as the interpreter holds it."""
    if not declared.admits(array.shape):
        raise Unavailable(f"{name} takes the shape {declared.shape}, not {array.shape}")
    held = array.astype(declared.element.held)
    if held.dtype.kind in "iu" and not np.array_equal(held, array):
        raise Unavailable(f"{name} is {declared.element.name} and cannot hold the numbers it is given")
    return round_to_fp16(held) if declared.element is FP16 else held


def _conformed(operation: Operation, declared: TensorType | None, result: Any, kernel: Kernel) -> Value:
    """A result in the dtype that its declared type is held in, after comparing shapes."""
    if declared is None:
        raise Unavailable(f"{operation.label} does not give a tensor")
    shape = tuple(result.shape)
    if not declared.admits(shape):
        raise Unavailable(f"{operation.label} gives the shape {shape}, declared is {declared.shape}")
    if isinstance(result, Lazy):
        return result
    array = np.asarray(result)
    if declared.element is FP16 and not kernel.moves:
        return round_to_fp16(array)
    return array.astype(declared.element.held, copy=False)


def _outside(array: Array, declared: TensorType) -> Array:
    return array.astype(declared.element.outside)
