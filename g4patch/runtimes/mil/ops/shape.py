"""Ops that lay out the same numbers anew, cut them, or make new ones from a shape."""

from __future__ import annotations

import math

import numpy as np

from g4patch.runtimes.mil.ops.registry import axis_tuple, integers, op
from g4patch.runtimes.mil.types import Array, ElementType


@op("reshape", moves=True)
def reshape(x: Array, shape: Array) -> Array:
    """0 keeps a dimension where the rank stays, -1 is what is left over."""
    target = integers(shape)
    if 0 in target and x.size and len(target) == x.ndim:
        target = [x.shape[axis] if dim == 0 else dim for axis, dim in enumerate(target)]
    return x.reshape(target)


@op("expand_dims", moves=True)
def expand_dims(x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(integers(axes)))


@op("squeeze", moves=True)
def squeeze(x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, axis_tuple(axes))


@op("transpose", moves=True)
def transpose(x: Array, perm: Array) -> Array:
    return np.transpose(x, integers(perm))


@op("concat", moves=True, many=("values",))
def concat(values: list[Array], axis: Array, interleave: Array | bool = False) -> Array:
    """Interleaved: the first slice of each value, then the second of each, and so on."""
    if not interleave:
        return np.concatenate([np.atleast_1d(value) for value in values], int(axis))
    stacked = np.stack(values, axis=int(axis) % values[0].ndim + 1)
    shape = list(values[0].shape)
    shape[int(axis)] *= len(values)
    return stacked.reshape(shape)


@op("stack", moves=True, many=("values",))
def stack(values: list[Array], axis: Array) -> Array:
    return np.stack(values, int(axis))


@op("split", moves=True)
def split(
    x: Array, axis: Array, num_splits: Array | None = None, split_sizes: Array | None = None
) -> tuple[Array, ...]:
    if split_sizes is None:
        if num_splits is None:
            raise ValueError("split has neither sizes nor a number")
        return tuple(np.split(x, int(num_splits), int(axis)))
    sizes = integers(split_sizes)
    if sum(sizes) != x.shape[int(axis)]:
        raise ValueError(f"sizes {sizes} do not add up to {x.shape[int(axis)]}")
    return tuple(np.split(x, np.cumsum(sizes)[:-1], int(axis)))


@op("tile", moves=True)
def tile(x: Array, reps: Array) -> Array:
    return np.tile(x, integers(reps))


@op("reverse", moves=True)
def reverse(x: Array, axes: Array | None = None) -> Array:
    return np.flip(x, axis_tuple(axes))


@op("pad", moves=True)
def pad(x: Array, pad: Array, mode: str = "constant", constant_val: Array | float = 0.0) -> Array:
    """`pad` holds (before, after) for the last axes."""
    widths = [(0, 0)] * (x.ndim - pad.size // 2) + [(int(low), int(high)) for low, high in pad.reshape(-1, 2)]
    if mode == "constant":
        return np.pad(x, widths, constant_values=np.asarray(constant_val).astype(x.dtype).item())
    if mode == "reflect":
        return np.pad(x, widths, mode="reflect")
    if mode == "replicate":
        return np.pad(x, widths, mode="edge")
    raise ValueError(f"pad has no mode {mode}")


@op("shape")
def shape(x: Array) -> Array:
    return np.array(x.shape, np.int32)


@op("fill")
def fill(shape: Array, value: Array | float = 0.0) -> Array:
    return np.full(integers(shape), value)


@op("fill_like")
def fill_like(ref_tensor: Array, value: Array | float = 0.0) -> Array:
    return np.full(ref_tensor.shape, value)


@op("range_1d")
def range_1d(start: Array, end: Array, step: Array, element: ElementType) -> Array:
    """In float64, so that no step is lost to rounding; the length is `ceil((end - start) / step)`."""
    first, last, by = start.item(), end.item(), step.item()
    length = max(0, math.ceil((last - first) / by))
    return np.asarray(first + np.arange(length) * by).astype(element.held)


@op("band_part", moves=True)
def band_part(x: Array, lower: Array | int = -1, upper: Array | int = -1) -> Array:
    """Zeroes but for a band around the diagonal; a negative bound keeps all of that side."""
    rows, columns = np.ogrid[: x.shape[-2], : x.shape[-1]]
    keep = np.ones(x.shape[-2:], bool)
    if lower >= 0:
        keep &= rows - columns <= lower
    if upper >= 0:
        keep &= columns - rows <= upper
    return np.where(keep, x, np.zeros((), x.dtype))
