"""The lookups of one function, sliced out of it and run by the interpreter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil.interpreter import Interpreter
from g4patch.runtimes.mil.program import Function
from g4patch.runtimes.mil.slicing import inputs_of
from g4patch.runtimes.mil.types import Array, TensorType
from g4patch.runtimes.mil.weights import Weights

# What an open dimension is fed where the bundle names no default.
_OPEN_LENGTH = 8
# More elements than any input of a stage has.
_MOST_ELEMENTS = 2**28


class MilProbe:
    """`g4patch.runtimes.Probe` for a function of an ML Program.

    `shapes` gives the default shape of inputs with open dimensions (from the model's description); where it names
    none that the function takes, an open first axis of several is fed as 1 and other open axes as 8.

    `before` are the models that run before this one in a pipeline. What they put out takes the place of inputs of the
    same name when a prompt is run, as in Core ML's pipelines; a lookup is run by itself.
    """

    def __init__(
        self,
        function: Function,
        weights_dir: Path,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        before: Sequence[MilProbe] = (),
    ) -> None:
        self._interpreter = Interpreter(function, Weights(weights_dir))
        self._function = function
        self._shapes = dict(shapes or {})
        self._before = before

    @property
    def runtime(self) -> str:
        return f"g4patch MIL interpreter (numpy {np.__version__})"

    def lookup(self, ids_input: str, output: str, ids: NDArray[np.int64]) -> Array:
        """The value `output` for token ids `[N]`: `[N, W]` in its dtype. Raises Unavailable if more is needed."""
        self._only(output, {ids_input}, given=())
        if ids_input not in self._function.inputs:
            raise Unavailable(f"function {self._function.name} has no input {ids_input}")
        shape = self._shape(ids_input, self._function.inputs[ids_input])
        inputs = self._placeholders()
        chunks = []
        for chunk in _chunks(ids, math.prod(shape)):
            inputs[ids_input] = chunk.reshape(shape)
            found = self._interpreter.run(inputs, [output])[output]
            chunks.append(_per_id(found, chunk.size, output))
        return np.concatenate(chunks)[: len(ids)]

    def table(self, index: str, output: str, rows: NDArray[np.int64]) -> Array:
        """The same with rows `[N]` in place of the value `index`. Raises Unavailable if more than it is needed."""
        self._only(output, set(), given=(index,))
        inputs = self._placeholders()
        shape, axis = self._index_shape(index, inputs)
        length = math.prod(shape) if axis is None else shape[axis]
        chunks = []
        for chunk in _chunks(rows, length):
            fed = chunk.reshape(shape if axis is None else [-1 if at == axis else 1 for at in range(len(shape))])
            found = self._interpreter.run(inputs, [output], overrides={index: np.broadcast_to(fed, shape)})[output]
            chunks.append(_per_id(found, chunk.size, output))
        return np.concatenate(chunks)[: len(rows)]

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, Array]:
        """Values for one prompt. Feeds that are neither an input of a function that runs nor a state are left."""
        values = dict(feeds)
        for probe, needed in self._leading():
            values |= probe._alone(values, needed)
        return self._alone(values, outputs)

    def _alone(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, Array]:
        inputs = {name: array for name, array in feeds.items() if name in self._function.inputs}
        state = {name: array for name, array in feeds.items() if name in self._function.states}
        wanted = [name for name in outputs if name not in self._function.states]
        if not state and len(wanted) == len(outputs):
            return self._interpreter.run(inputs, outputs)
        found = self._interpreter.run(inputs, wanted, state=state)
        return {name: found[name] if name in found else state[name] for name in outputs}

    def _leading(self) -> list[tuple[MilProbe, tuple[str, ...]]]:
        """The models that lead to the inputs, in order, and what is needed of each."""
        steps = []
        wanted = set(self._function.inputs)
        for probe in reversed(self._before):
            needed = tuple(name for name in probe._function.outputs if name in wanted)
            if needed:
                steps.append((probe, needed))
                wanted = (wanted - set(needed)) | set(probe._function.inputs)
        return steps[::-1]

    def _only(self, output: str, allowed: set[str], given: tuple[str, ...]) -> None:
        others = inputs_of(self._function, [output], given) - allowed
        if others:
            raise Unavailable(f"{output} also depends on {', '.join(sorted(others))}")

    def _shape(self, name: str, declared: TensorType) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None or not declared.admits(shape) or not all(dim > 0 for dim in shape):
            shape = _assumed(name, declared)
        if not 0 < math.prod(shape) <= _MOST_ELEMENTS:
            raise Unavailable(f"{name} of shape {shape} is empty or too large to be fed")
        return shape

    def _placeholders(self) -> dict[str, Array]:
        """Zeros for inputs of which only the shape is asked for."""
        return {
            name: np.zeros(self._shape(name, declared), declared.element.outside)
            for name, declared in self._function.inputs.items()
        }

    def _index_shape(self, index: str, inputs: Mapping[str, Array]) -> tuple[tuple[int, ...], int | None]:
        """The shape of a gather's index, and the axis that counts the rows where each row is repeated along others."""
        declared = self._function.types.get(index)
        shape = declared.static_shape() if declared else None
        if shape is None:
            shape = self._interpreter.run(inputs, [index])[index].shape
        for operation in self._function.operations:
            if operation.type == "gather_along_axis" and (index,) == operation.inputs.get("indices"):
                return shape, 0
        return shape, None


def _assumed(name: str, declared: TensorType) -> tuple[int, ...]:
    """A shape that a declared type admits."""
    if declared.shape is None:
        raise Unavailable(f"the rank of {name} is not known")
    single = len(declared.shape) == 1
    return tuple(
        dim if dim is not None else (1 if axis == 0 and not single else _OPEN_LENGTH)
        for axis, dim in enumerate(declared.shape)
    )


def _chunks(ids: NDArray[np.int64], length: int) -> list[NDArray[np.int64]]:
    """Pieces of one length, at least one; the last is filled up from the front."""
    count = max(1, -(-len(ids) // length))
    return list(np.resize(ids, count * length).reshape(count, length))


def _per_id(found: Array, ids: int, output: str) -> Array:
    """`[N, W]` out of a value whose leading axes are the ids'."""
    leading = 1
    for dim in found.shape:
        leading *= dim
        if leading == ids:
            return found.reshape(ids, -1)
    raise Unavailable(f"{output} of shape {found.shape} has no row for each of {ids} ids")
