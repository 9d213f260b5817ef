"""The cone view: the few things rules need to see of a graph, the same for every format.

A format translates the integer and boolean ops around token ids into the closed set `Op`; everything else is
`Op.OPAQUE` with its native name and is never translated back. Edits go the other way as data (`g4patch.edits`), so
nothing that the view does not show can be lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int | None, ...]

# Constants up to this many elements are read into the view; larger ones are weights and stay where they are.
SMALL_CONSTANT = 64


class Op(StrEnum):
    """What a node does. Operands are named by meaning.

    ===================================================  ===================  ======================================
    op                                                   operands             attributes
    ===================================================  ===================  ======================================
    gather                                               data, index          axis: int; nd: the last axis of index
                                                                              holds coordinates of the first axes of
                                                                              data; along: each element of index
                                                                              reads one, as index and data have the
                                                                              same other axes
    where                                                condition, x, y
    equal or and ge gt le lt add sub mul                 x, y
    not identity                                         x
    cast                                                 x                    dtype: numpy name
    clip                                                 x, low, high         (either bound may be missing)
    reshape                                              x, shape             allowzero: bool, else 0 in the shape
                                                                              copies; -1 is inferred
    expand_dims squeeze                                  x                    axes: tuple of int
    shape                                                x
    concat                                               0, 1, ...            axis: int
    stack                                                0, 1, ...            axis: int, which is new
    tile                                                 x, repeats           (a number of times for each axis)
    slice                                                x                    ranges: axis -> (begin, end), where
                                                                              constant (followed, not evaluated)
    expand                                               x, shape             (ONNX meaning: two-way broadcast)
    branch                                               condition, x, y      (`x` or `y` as a whole, known only in
                                                                              a run; followed, not evaluated)
    pass                                                 x                    (rows go through, as in quantising and
                                                                              dequantising; followed, not evaluated)
    matmul                                               0, 1, ...            (named for recognition, not evaluated)
    opaque                                               0, 1, ...
    ===================================================  ===================  ======================================
    """

    GATHER = "gather"
    WHERE = "where"
    EQUAL = "equal"
    OR = "or"
    AND = "and"
    NOT = "not"
    GE = "ge"
    GT = "gt"
    LE = "le"
    LT = "lt"
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    CLIP = "clip"
    CAST = "cast"
    IDENTITY = "identity"
    RESHAPE = "reshape"
    EXPAND_DIMS = "expand_dims"
    SQUEEZE = "squeeze"
    SHAPE = "shape"
    CONCAT = "concat"
    EXPAND = "expand"
    STACK = "stack"
    TILE = "tile"
    SLICE = "slice"
    BRANCH = "branch"
    PASS = "pass"
    MATMUL = "matmul"
    OPAQUE = "opaque"


# Operands that say what shape a result has, and not what is in it.
SIZES = frozenset({"shape", "repeats"})
# Ops that hand on their operand `x` under another shape or dtype.
VIEW_OPS = frozenset({Op.CAST, Op.IDENTITY, Op.RESHAPE, Op.EXPAND_DIMS, Op.SQUEEZE, Op.EXPAND, Op.PASS})
# Ops that hand on the numbers of their operands, perhaps repeated, or put together with others.
MOVING_OPS = VIEW_OPS | {Op.TILE, Op.STACK, Op.CONCAT}


@dataclass(frozen=True)
class Value:
    """A tensor in a graph. `dtype` is a numpy name, or the format's own where numpy has none; None is unknown."""

    name: str
    dtype: str | None = None
    shape: Shape | None = None


@dataclass(frozen=True)
class Node:
    """One operation. `address` is unique and stable in its graph; `native` is the format's own name for the op.

    `editable` is False where an edit would be felt elsewhere too: in the body of a function that is called.
    """

    op: Op
    native: str
    address: str
    operands: Mapping[str, str]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    editable: bool = True

    @property
    def output(self) -> str:
        """The first output: all ops but opaque ones have exactly one."""
        return self.outputs[0]


@dataclass(frozen=True)
class Use:
    """The place where a node reads a value: the smallest thing an edit can redirect."""

    node: str
    operand: str


@dataclass(frozen=True)
class Table:
    """A tensor that a gather may read: what is known of it without reading it.

    `shape` and `dtype` are those of the values as the gather sees them (after dequantisation); `nbytes` is what is
    stored. `quantisation` is "" for plain values. `storage` says where the bytes are, for a person to read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: str
    nbytes: int
    quantisation: str = ""

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        """Elements in one row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class Graph:
    """One function of one model, nodes in an order in which operands stand before their uses.

    `states` names the inputs that are kept between runs; as a value, such a one is what it holds after a run.
    `constants` holds values of at most `SMALL_CONSTANT` elements. `tables` holds every tensor that a gather reads
    and that is not computed from a graph input, and every graph input that a gather reads as its data.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, NDArray[Any]]
    tables: Mapping[str, Table]
    states: frozenset[str] = frozenset()

    @cached_property
    def _producers(self) -> dict[str, Node]:
        return {output: node for node in self.nodes for output in node.outputs}

    @cached_property
    def _uses(self) -> dict[str, list[Use]]:
        uses: dict[str, list[Use]] = {}
        for node in self.nodes:
            for operand, value in node.operands.items():
                uses.setdefault(value, []).append(Use(node.address, operand))
        return uses

    @cached_property
    def _by_address(self) -> dict[str, Node]:
        return {node.address: node for node in self.nodes}

    @cached_property
    def _inputs(self) -> dict[str, Value]:
        return {value.name: value for value in self.inputs}

    def node(self, address: str) -> Node:
        """The node at an address. Raises KeyError."""
        return self._by_address[address]

    def producer(self, value: str) -> Node | None:
        """The node that computes a value; None for graph inputs and constants."""
        return self._producers.get(value)

    def uses(self, value: str) -> tuple[Use, ...]:
        return tuple(self._uses.get(value, ()))

    def consumers(self, value: str) -> Iterator[tuple[Use, Node]]:
        for use in self.uses(value):
            yield use, self._by_address[use.node]

    def input(self, name: str) -> Value | None:
        return self._inputs.get(name)

    def value(self, name: str) -> Value:
        """What is known of a value: only its name, if the format recorded nothing."""
        return self._inputs.get(name) or self.values.get(name) or Value(name)

    def scalar(self, name: str) -> float | int | bool | None:
        """A constant of one element, also behind casts and reshapes, as a Python number; else None."""
        constant = self.constants.get(name)
        node = self.producer(name)
        if constant is None and node is not None and node.op in VIEW_OPS:
            return self.scalar(node.operands["x"])
        if constant is None or constant.size != 1:
            return None
        number: float | int | bool = constant.reshape(()).item()
        return number

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A small integer constant as a tuple, else None."""
        constant = self.constants.get(name)
        if constant is None or not np.issubdtype(constant.dtype, np.integer):
            return None
        return tuple(int(item) for item in constant.reshape(-1))
