"""Ops that cut a part out of a tensor, or put one back in."""

from __future__ import annotations

import numpy as np

from g4patch.runtimes.mil.ops.registry import integers, op
from g4patch.runtimes.mil.types import Array


def _flags(mask: Array | None, rank: int) -> list[bool]:
    return [False] * rank if mask is None else [bool(item) for item in mask.reshape(-1)]


def _index(
    shape: tuple[int, ...],
    begin: Array,
    end: Array,
    stride: Array | None,
    begin_mask: Array | None,
    end_mask: Array | None,
    squeeze_mask: Array | None,
) -> tuple[slice | int, ...]:
    """What `slice_by_index` means, as a numpy index.

    Negative bounds count from the end; a masked bound is the end that the stride starts from or runs to; a squeezed
    axis is the one element at `begin`.
    """
    rank = len(shape)
    starts, stops = integers(begin), integers(end)
    steps = [1] * rank if stride is None else integers(stride)
    open_start, open_stop, squeezed = (_flags(mask, rank) for mask in (begin_mask, end_mask, squeeze_mask))
    if {len(starts), len(stops), len(steps), len(open_start), len(open_stop), len(squeezed)} != {rank}:
        raise ValueError(f"bounds do not fit the rank {rank}")
    index: list[slice | int] = []
    for axis in range(rank):
        if squeezed[axis]:
            index.append(0 if open_start[axis] else starts[axis])
            continue
        start = None if open_start[axis] else starts[axis]
        stop = None if open_stop[axis] else stops[axis]
        index.append(slice(start, stop, steps[axis]))
    return tuple(index)


@op("slice_by_index", moves=True)
def slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    return np.asarray(x[_index(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)])


@op("slice_update", moves=True)
def slice_update(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    index = _index(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    updated = x.copy()
    if updated[index].shape != update.shape:
        raise ValueError(f"an update of shape {update.shape} does not fit a slice of shape {updated[index].shape}")
    updated[index] = update
    return updated


@op("slice_by_size", moves=True)
def slice_by_size(x: Array, begin: Array, size: Array) -> Array:
    """A size of -1 takes what is left of an axis; a negative begin counts from its end."""
    index = []
    for start, length, dim in zip(integers(begin), integers(size), x.shape, strict=True):
        first = start + dim if start < 0 else start
        index.append(slice(first, dim if length == -1 else first + length))
    return x[tuple(index)]
