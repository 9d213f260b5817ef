"""The table of ops. An op is a function whose parameters are the op's inputs under MIL's own names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from g4patch.runtimes.mil.types import Array

# An array, a Lazy, or a tuple of them where an op has several outputs.
Result = Any


@dataclass(frozen=True)
class Kernel:
    """How one op is computed.

    `run` gets arrays, and texts as str. Parameters in `lazy` come as `Lazy` where they are constants that are not
    decoded yet; those in `many` come as a list. `moves`: the op only hands numbers on, so nothing is to be rounded.
    """

    run: Callable[..., Result]
    parameters: frozenset[str]
    lazy: frozenset[str]
    many: frozenset[str]
    moves: bool
    wants_opset: bool
    wants_element: bool


KERNELS: dict[str, Kernel] = {}

_Run = TypeVar("_Run", bound=Callable[..., Result])


def op(name: str, moves: bool = False, lazy: Iterable[str] = (), many: Iterable[str] = ()) -> Callable[[_Run], _Run]:
    """Register a function as an op.

    The interpreter fills two parameters itself: `opset`, the number in the function's opset (7 for CoreML7), and
    `element`, the declared element type of the first output.
    """

    def register(run: _Run) -> _Run:
        parameters = frozenset(inspect.signature(run).parameters)
        KERNELS[name] = Kernel(
            run=run,
            parameters=parameters - {"opset", "element"},
            lazy=frozenset(lazy),
            many=frozenset(many),
            moves=moves,
            wants_opset="opset" in parameters,
            wants_element="element" in parameters,
        )
        return run

    return register


def axis_tuple(axes: Array | None) -> tuple[int, ...] | None:
    """An `axes` input as numpy takes it; None, and an empty one, stand for all axes."""
    return None if axes is None or axes.size == 0 else tuple(integers(axes))


def integers(values: Array) -> list[int]:
    return [int(value) for value in values.reshape(-1)]
