"""Compressed constants. Each op gives a tensor that is decompressed row by row, where it is read.

Up to iOS 17 the operands are attributes and packed by hand; from iOS 18 on they are inputs with sub-byte types.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from g4patch.runtimes.mil.ops.registry import integers, op
from g4patch.runtimes.mil.types import BY_NAME, FP16, Array, ElementType, round_to_fp16
from g4patch.runtimes.mil.weights import Lazy, Rows, packed


def _positions(rows: Rows) -> NDArray[np.int64]:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _unpacked(source: Lazy, shape: Array, bits: int) -> Lazy:
    """A tensor of packed fields out of a vector of bytes."""
    return packed(tuple(integers(shape)), BY_NAME[f"uint{bits}"], lambda first, last: source.read(slice(first, last)))


@op("constexpr_affine_dequantize", lazy=("quantized_data",))
def constexpr_affine_dequantize(
    quantized_data: Array | Lazy, zero_point: Array, scale: Array, axis: Array, element: ElementType
) -> Lazy:
    """`scale * (data - zero_point)`, both scalars or vectors along one axis."""
    shape = [1] * len(quantized_data.shape)

    def aligned(values: Array) -> Array:
        if values.size == 1:
            return values.reshape(shape)
        along = list(shape)
        along[int(axis)] = values.size
        return values.reshape(along)

    return _shift_scale(Lazy.of(quantized_data), aligned(scale), aligned(zero_point), element)


@op("constexpr_blockwise_shift_scale", lazy=("data",))
def constexpr_blockwise_shift_scale(
    data: Array | Lazy, scale: Array, element: ElementType, offset: Array | None = None
) -> Lazy:
    """`scale * (data - offset)`; each of them stands for a block whose sizes are `data.shape / scale.shape`."""
    if any(dim % blocks for dim, blocks in zip(data.shape, scale.shape, strict=True)):
        raise ValueError(f"scales of shape {scale.shape} do not divide data of shape {data.shape}")
    return _shift_scale(Lazy.of(data), scale, offset, element)


def _shift_scale(data: Lazy, scale: Array, offset: Array | None, element: ElementType) -> Lazy:
    shape = data.shape
    block = tuple(dim // blocks for dim, blocks in zip(shape, scale.shape, strict=True))

    def spread(values: Array, rows: NDArray[np.int64]) -> Array:
        """The scales of some rows, laid out as `[rows, B1, 1, B2, 1, ...]` to broadcast over their blocks."""
        mine: Array = values[rows // block[0]]
        return mine.reshape(len(rows), *(dim for blocks in values.shape[1:] for dim in (blocks, 1)))

    def read(rows: Rows) -> Array:
        at = _positions(rows)
        blocks = [dim for pair in zip(scale.shape[1:], block[1:], strict=True) for dim in pair]
        values = data.read(rows).astype(np.float32).reshape(len(at), *blocks)
        if offset is not None:
            values -= spread(offset, at)
            if offset.dtype.kind == "f" and element is FP16:
                values = round_to_fp16(values)
        values *= spread(scale, at)
        return (round_to_fp16(values) if element is FP16 else values).reshape(len(at), *shape[1:])

    return Lazy(shape, element.held, read)


@op("constexpr_lut_to_dense", lazy=("indices",))
def constexpr_lut_to_dense(
    indices: Array | Lazy,
    lut: Array,
    element: ElementType,
    shape: Array | None = None,
    vector_axis: Array | None = None,
) -> Lazy:
    """Palettes. `lut` is `[P]` with packed `indices` and `shape`, or `[*groups, P, vector]` with `indices` as they are.

    A group is a block of `indices.shape / groups` that has a palette to itself; a vector longer than 1 is laid out
    along `vector_axis`.
    """
    indices = Lazy.of(indices)
    if shape is not None:
        fields = _unpacked(indices, shape, int(math.log2(lut.size)))
        return Lazy(fields.shape, element.held, lambda rows: np.take(lut, fields.read(rows)))
    groups, (palette, vector) = lut.shape[:-2], lut.shape[-2:]
    if len(groups) != len(indices.shape) or any(dim % n for dim, n in zip(indices.shape, groups, strict=True)):
        raise ValueError(f"palettes of shape {lut.shape} do not divide indices of shape {indices.shape}")
    entries = lut.reshape(-1, vector)

    def entry(rows: Rows) -> Array:
        """Which entry each index stands for: `[rows, ...]`."""
        fields = indices.read(rows)
        if math.prod(groups) > 1:
            fields = np.add(fields, palette * _group(indices.shape, groups, _positions(rows)))
        return fields

    if vector == 1:
        return Lazy(indices.shape, element.held, lambda rows: np.take(entries[:, 0], entry(rows)))
    if vector_axis is None:
        raise ValueError("palettes of vectors need an axis")
    axis = int(vector_axis) % len(indices.shape)
    dense = tuple(dim * vector if at == axis else dim for at, dim in enumerate(indices.shape))

    def read(rows: Rows) -> Array:
        if axis == 0:
            at = _positions(rows)
            vectors: Array = np.moveaxis(np.take(entries, entry(at // vector), 0), -1, 1)
            return np.asarray(vectors[np.arange(len(at)), at % vector])
        found = np.moveaxis(np.take(entries, entry(rows), 0), -1, axis + 1)
        return found.reshape(-1, *dense[1:])

    return Lazy(dense, element.held, read)


def _group(shape: tuple[int, ...], groups: tuple[int, ...], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of the group that each element of some rows lies in, broadcasting over the rows' elements."""
    number = np.zeros((1,) * len(shape), np.int64)
    for axis, (dim, count) in enumerate(zip(shape, groups, strict=True)):
        along = rows if axis == 0 else np.arange(dim)
        place = [1] * len(shape)
        place[axis] = -1
        number = number * count + (along // (dim // count)).reshape(place)
    return number


@op("constexpr_sparse_to_dense", lazy=("nonzero_data", "mask"))
def constexpr_sparse_to_dense(nonzero_data: Lazy, mask: Lazy, element: ElementType, shape: Array | None = None) -> Lazy:
    """Zero but where the mask is set; there the values in order."""
    nonzero_data = Lazy.of(nonzero_data)
    bits = Lazy.of(mask) if shape is None else _unpacked(Lazy.of(mask), shape, 1)
    counts = [np.count_nonzero(bits.read(rows).reshape(rows.stop - rows.start, -1), axis=1) for rows in bits.blocks()]
    starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    if starts[-1] != nonzero_data.shape[0]:
        raise ValueError(f"a mask of {starts[-1]} bits does not fit {nonzero_data.shape[0]} values")

    def read(rows: Rows) -> Array:
        if not isinstance(rows, slice):
            return np.concatenate([read(slice(row, row + 1)) for row in rows.tolist()])
        where = bits.read(rows) != 0
        values = np.zeros(where.shape, element.held)
        values[where] = nonzero_data.read(slice(int(starts[rows.start]), int(starts[rows.stop])))
        return values

    return Lazy(bits.shape, element.held, read)


@op("constexpr_cast", lazy=("source_val",))
def constexpr_cast(source_val: Array | Lazy, output_dtype: str, element: ElementType) -> Lazy:
    read = Lazy.of(source_val).read
    return Lazy(source_val.shape, element.held, lambda rows: read(rows).astype(element.held))
