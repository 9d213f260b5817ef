"""What a gather reads: a stored tensor, perhaps dequantised, sliced or turned before, or a graph input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray
from onnx import TensorProto

from g4patch.formats.onnx.tensors import stored_table
from g4patch.view import Node, Op, Table, Value

_SAME_SHAPE = frozenset({Op.CAST, Op.IDENTITY, Op.PASS})
# What hands a table on, changed or not. Behind any other op with the token ids' own results in it stands no table.
_NOT_A_TABLE = frozenset({Op.MATMUL, Op.GATHER, Op.SHAPE})


class Laid(Protocol):
    """The part of a graph that has been laid out."""

    @property
    def folder(self) -> Path: ...
    @property
    def producers(self) -> Mapping[str, Node]: ...
    @property
    def values(self) -> Mapping[str, Value]: ...
    @property
    def constants(self) -> Mapping[str, NDArray[Any]]: ...
    @property
    def tensors(self) -> Mapping[str, TensorProto]: ...


@dataclass(frozen=True)
class _Root:
    """A stored tensor or a graph input, and the nodes between it and the gather, those nearest to the gather first."""

    name: str
    between: tuple[Node, ...]


def gathered(laid: Laid, name: str, attributes: Mapping[str, Any]) -> Table | None:
    """The facts of what a gather reads as `name`; None where it is no table.

    What is computed from a stored tensor in a way that is not understood counts as a table too, by its recorded shape
    or that of the tensor: such a gather must not pass for something else.
    """
    root = _root(laid, name)
    value = laid.values.get(root.name)
    if root.name in laid.tensors:
        table = _stored(laid, name, root.name, attributes)
        shape = _through(laid, table.shape, root.between)
        quantisation = _quantisation(laid, root.between) or table.quantisation
        return None if shape is None else replace(table, shape=shape, quantisation=quantisation)
    if root.name not in laid.producers:
        if value is None or not value.shape or None in value.shape:
            return None
        whole = tuple(size for size in value.shape if size is not None)
        shape = _through(laid, whole, root.between)
        return None if shape is None else Table(name, shape, value.dtype or "", "graph input", 0)
    return _computed(laid, name, attributes)


def _stored(laid: Laid, name: str, tensor: str, attributes: Mapping[str, Any]) -> Table:
    value = laid.values.get(name)
    quantisation = str(attributes.get("quantisation", ""))
    return stored_table(
        name, laid.tensors[tensor], laid.folder, quantisation, value.dtype if value else None, attributes
    )


def _root(laid: Laid, name: str) -> _Root:
    between: list[Node] = []
    while (node := laid.producers.get(name)) is not None and _understood(laid, node):
        source = _multiplied(laid, node) or node.operands.get("0" if node.op is Op.OPAQUE else "x")
        if source is None:
            break
        between.append(node)
        name = source
    return _Root(name, tuple(between))


def _understood(laid: Laid, node: Node) -> bool:
    if node.op is Op.RESHAPE:
        return node.operands["shape"] in laid.constants
    if node.op is Op.MUL:
        return _multiplied(laid, node) is not None
    return node.op in _SAME_SHAPE or node.op is Op.SLICE or "perm" in node.attributes


def _multiplied(laid: Laid, node: Node) -> str | None:
    """What a product with one constant number multiplies: a table times sqrt(D) is a table."""
    if node.op is not Op.MUL:
        return None
    others = [name for name in node.operands.values() if name not in laid.constants or laid.constants[name].size > 1]
    return others[0] if len(others) == 1 else None


def _through(laid: Laid, shape: tuple[int, ...], between: tuple[Node, ...]) -> tuple[int, ...] | None:
    """The shape of a tensor behind slices, transpositions and reshapes; None where they do not fit it."""
    for node in reversed(between):
        if node.op is Op.SLICE:
            sizes = list(shape)
            for axis, bounds in node.attributes["ranges"].items():
                if not -len(sizes) <= axis < len(sizes):
                    return None
                sizes[axis] = len(range(sizes[axis])[slice(*bounds)])
            shape = tuple(sizes)
        elif node.op is Op.RESHAPE:
            shape = _reshaped(shape, laid.constants[node.operands["shape"]].reshape(-1).tolist())
        elif "perm" in node.attributes:
            perm = node.attributes["perm"] or tuple(reversed(range(len(shape))))
            if sorted(perm) != list(range(len(shape))):
                return None
            shape = tuple(shape[axis] for axis in perm)
    return shape


def _reshaped(shape: tuple[int, ...], target: list[int]) -> tuple[int, ...]:
    sizes = [shape[i] if size == 0 and i < len(shape) else size for i, size in enumerate(target)]
    known = math.prod(size for size in sizes if size != -1)
    return tuple(math.prod(shape) // known if size == -1 and known else size for size in sizes)


def _quantisation(laid: Laid, between: tuple[Node, ...]) -> str:
    for node in between:
        if node.op is Op.PASS and (value := laid.values.get(node.operands["x"])) is not None:
            return f"{value.dtype} dequantised"
    return ""


def _computed(laid: Laid, name: str, attributes: Mapping[str, Any]) -> Table | None:
    """A table made of stored tensors, as the largest of them has it where the file does not state its shape."""
    largest = max(_stored_behind(laid, name), key=lambda tensor: math.prod(laid.tensors[tensor].dims), default=None)
    if largest is None:
        return None
    value = laid.values.get(name)
    table = _stored(laid, name, largest, attributes)
    stated = value.shape if value is not None else None
    if stated and None not in stated:
        return replace(table, shape=tuple(size or 0 for size in stated))
    longest = max(table.shape, default=1)
    return replace(table, shape=(longest, max(1, math.prod(table.shape) // max(1, longest))))


def _stored_behind(laid: Laid, name: str) -> Iterator[str]:
    stack, seen = [name], set[str]()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        node = laid.producers.get(name)
        if name in laid.tensors and name not in laid.constants:
            yield name
        elif node is not None and node.op not in _NOT_A_TABLE:
            stack.extend(node.operands.values())
