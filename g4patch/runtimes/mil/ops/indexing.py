"""Gathers and scatters. Of a constant table only the rows that are asked for are decoded.

Up to iOS 16 a negative index counts from the end. From iOS 17 on it is out of range like one past the end, and what
comes out of such an index is undefined: NaN here, so that nothing can be proven from it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil.ops.registry import op
from g4patch.runtimes.mil.types import Array
from g4patch.runtimes.mil.weights import Lazy

_WITHOUT_NEGATIVE = 7

Index = NDArray[np.int64]


def _checked(indices: Array, size: int, opset: int, validate: Array | bool) -> tuple[Index, NDArray[np.bool_]]:
    """Indices that are in range, and which of them were not and stand at 0."""
    index = indices.astype(np.int64)
    if opset < _WITHOUT_NEGATIVE:
        index = np.where(index < 0, index + size, index)
    outside = (index < 0) | (index >= size)
    if validate and outside.any():
        raise Unavailable(f"index {index[outside][0]} is out of range in an op that asks for a check: it stops Core ML")
    return np.where(outside, 0, index), outside


def _poison(found: Array, outside: NDArray[np.bool_]) -> Array:
    """NaN where the index was out of range; `outside` broadcasts over the leading axes of `found`."""
    if not outside.any():
        return found
    if found.dtype.kind != "f":
        raise Unavailable("an index is out of range, and what it reads is not a float that could say so")
    spread = outside.reshape(*outside.shape, *(1,) * (found.ndim - outside.ndim))
    return np.where(spread, np.float32(np.nan), found)


def _rows(table: Array | Lazy, index: Index) -> tuple[Array, Index]:
    """The rows that are read, each decoded once, and the index into them."""
    if not isinstance(table, Lazy):
        return table, index
    needed, positions = np.unique(index, return_inverse=True)
    return table.read(needed), positions.reshape(index.shape)


def _batched(run: Callable[[Array, Array], Array], x: Array | Lazy, indices: Array, batch_dims: int) -> Array:
    """Run once for each position in the leading axes that `x` and `indices` share."""
    dense = x.dense() if isinstance(x, Lazy) else x
    batch = indices.shape[:batch_dims]
    parts = [run(dense[at], indices[at]) for at in product(*map(range, batch))]
    return np.stack(parts).reshape(*batch, *parts[0].shape)


@op("gather", moves=True, lazy=("x",))
def gather(
    x: Array | Lazy,
    indices: Array,
    axis: Array | int = 0,
    batch_dims: Array | int = 0,
    validate_indices: Array | bool = False,
    *,
    opset: int,
) -> Array:
    along = int(axis) % len(x.shape)
    if batch_dims:
        rest = along - int(batch_dims)

        def one(data: Array, index: Array) -> Array:
            return gather(data, index, rest, validate_indices=validate_indices, opset=opset)

        return _batched(one, x, indices, int(batch_dims))
    index, outside = _checked(indices, x.shape[along], opset, validate_indices)
    if along:
        found = np.take(x.dense() if isinstance(x, Lazy) else x, index, along)
        return np.moveaxis(
            _poison(np.moveaxis(found, range(along, along + index.ndim), range(index.ndim)), outside),
            range(index.ndim),
            range(along, along + index.ndim),
        )
    rows, index = _rows(x, index)
    return _poison(np.take(rows, index, 0), outside)


@op("gather_along_axis", moves=True, lazy=("x",))
def gather_along_axis(
    x: Array | Lazy,
    indices: Array,
    axis: Array | int = 0,
    validate_indices: Array | bool = False,
    *,
    opset: int,
) -> Array:
    along = int(axis) % len(x.shape)
    index, outside = _checked(indices, x.shape[along], opset, validate_indices)
    if along:
        rows = x.dense() if isinstance(x, Lazy) else x
    else:
        rows, index = _rows(x, index)
    return _poison(np.take_along_axis(rows, index, along), outside)


@op("gather_nd", moves=True, lazy=("x",))
def gather_nd(
    x: Array | Lazy,
    indices: Array,
    batch_dims: Array | int = 0,
    validate_indices: Array | bool = False,
    *,
    opset: int,
) -> Array:
    """The last axis of `indices` holds coordinates into the first axes of `x`."""
    if batch_dims:

        def one(data: Array, index: Array) -> Array:
            return gather_nd(data, index, validate_indices=validate_indices, opset=opset)

        return _batched(one, x, indices, int(batch_dims))
    coordinates, outside = [], np.zeros(indices.shape[:-1], bool)
    for axis in range(indices.shape[-1]):
        index, beyond = _checked(indices[..., axis], x.shape[axis], opset, validate_indices)
        coordinates.append(index)
        outside = outside | beyond
    rows, coordinates[0] = _rows(x, coordinates[0])
    return _poison(rows[tuple(coordinates)], outside)


_SCATTER = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}


def _scattered(data: Array, at: tuple[Index | slice, ...], updates: Array, mode: str) -> Array:
    written = data.copy()
    if mode == "update":
        written[at] = updates
    else:
        _SCATTER[mode].at(written, at, updates)  # type: ignore[arg-type]
    return written


def _in_range(indices: Array, size: int, opset: int) -> Index:
    index, outside = _checked(indices, size, opset, False)
    if outside.any():
        raise Unavailable("a scatter writes out of range")
    return index


@op("scatter")
def scatter(
    data: Array,
    indices: Array,
    updates: Array,
    axis: Array | int = 0,
    mode: str = "add",
    validate_indices: Array | bool = False,
    *,
    opset: int,
) -> Array:
    along = int(axis) % data.ndim
    index = _in_range(indices, data.shape[along], opset)
    return _scattered(data, (*(slice(None),) * along, index), updates, mode)


@op("scatter_along_axis")
def scatter_along_axis(
    data: Array,
    indices: Array,
    updates: Array,
    axis: Array | int = 0,
    mode: str = "add",
    validate_indices: Array | bool = False,
    *,
    opset: int,
) -> Array:
    along = int(axis) % data.ndim
    at: list[Index] = list(np.indices(indices.shape))
    at[along] = _in_range(indices, data.shape[along], opset)
    return _scattered(data, tuple(at), updates, mode)


@op("scatter_nd")
def scatter_nd(
    data: Array,
    indices: Array,
    updates: Array,
    mode: str = "add",
    validate_indices: Array | bool = False,
    *,
    opset: int,
) -> Array:
    at = tuple(_in_range(indices[..., axis], data.shape[axis], opset) for axis in range(indices.shape[-1]))
    return _scattered(data, at, updates, mode)


@op("one_hot")
def one_hot(
    indices: Array,
    one_hot_vector_size: Array,
    axis: Array | int = -1,
    on_value: Array | int = 1,
    off_value: Array | int = 0,
) -> Array:
    """Negative indices are no class: their vector is off throughout."""
    hot = indices[..., None] == np.arange(int(one_hot_vector_size))
    return np.moveaxis(np.where(hot, on_value, off_value), -1, int(axis))
