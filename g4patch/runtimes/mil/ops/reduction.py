"""Reductions, normalisations, and what else looks along an axis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from g4patch.runtimes.mil.ops.registry import axis_tuple, op
from g4patch.runtimes.mil.types import Array


def _register(name: str, function: Callable[..., Array], moves: bool = False) -> None:
    @op(name, moves=moves)
    def reduce(x: Array, axes: Array | None = None, keep_dims: Array | bool = False) -> Array:
        return np.asarray(function(x, axis=axis_tuple(axes), keepdims=bool(keep_dims)))


def _l1(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    return np.sum(np.abs(x), axis=axis, keepdims=keepdims)


def _l2(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    return np.sqrt(_sum_square(x, axis, keepdims))


def _sum_square(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    return np.sum(np.square(x), axis=axis, keepdims=keepdims)


def _log_sum_exp(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    largest = np.max(x, axis=axis, keepdims=True)
    total: Array = np.log(np.sum(np.exp(x - largest), axis=axis, keepdims=True)) + largest
    return total if keepdims else np.squeeze(total, axis)


_register("reduce_mean", np.mean)
_register("reduce_sum", np.sum)
_register("reduce_max", np.max, moves=True)
_register("reduce_min", np.min, moves=True)
_register("reduce_prod", np.prod)
_register("reduce_l1_norm", _l1)
_register("reduce_l2_norm", _l2)
_register("reduce_sum_square", _sum_square)
_register("reduce_log_sum_exp", _log_sum_exp)


@op("reduce_argmax")
def reduce_argmax(
    x: Array, axis: Array | int = -1, keep_dims: Array | bool = False, output_dtype: str = "int32"
) -> Array:
    return np.asarray(np.argmax(x, axis=int(axis), keepdims=bool(keep_dims)), output_dtype)


@op("reduce_argmin")
def reduce_argmin(
    x: Array, axis: Array | int = -1, keep_dims: Array | bool = False, output_dtype: str = "int32"
) -> Array:
    return np.asarray(np.argmin(x, axis=int(axis), keepdims=bool(keep_dims)), output_dtype)


@op("cumsum")
def cumsum(x: Array, axis: Array | int = 0, exclusive: Array | bool = False, reverse: Array | bool = False) -> Array:
    """Exclusive: each element is the sum of those before it, without itself."""
    source = np.flip(x, int(axis)) if reverse else x
    total: Array = np.cumsum(source, axis=int(axis), dtype=x.dtype)
    if exclusive:
        total = total - source
    return np.flip(total, int(axis)) if reverse else total


@op("softmax")
def softmax(x: Array, axis: Array | int = -1) -> Array:
    return softmax_of(x, int(axis))


def softmax_of(x: Array, axis: int) -> Array:
    powers: Array = np.exp(x - np.max(x, axis=axis, keepdims=True))
    powers /= np.sum(powers, axis=axis, keepdims=True)
    return powers


@op("layer_norm")
def layer_norm(
    x: Array,
    axes: Array | None = None,
    gamma: Array | None = None,
    beta: Array | None = None,
    epsilon: Array | float = 1e-5,
) -> Array:
    over = axis_tuple(axes)
    centred = x - np.mean(x, axis=over, keepdims=True)
    variance = np.mean(np.square(centred), axis=over, keepdims=True)
    normed: Array = centred / np.sqrt(variance + epsilon)
    scale_shape = [dim if over is None or axis in _positive(over, x.ndim) else 1 for axis, dim in enumerate(x.shape)]
    if gamma is not None:
        normed = normed * gamma.reshape(scale_shape)
    if beta is not None:
        normed = normed + beta.reshape(scale_shape)
    return normed


def _positive(axes: tuple[int, ...], rank: int) -> set[int]:
    return {axis % rank for axis in axes}


@op("l2_norm")
def l2_norm(x: Array, epsilon: Array | float = 1e-6) -> Array:
    """Over the last three axes."""
    squares = np.sum(np.square(x), axis=(-3, -2, -1), keepdims=True)
    return np.asarray(x / np.sqrt(squares + epsilon))


@op("argsort")
def argsort(x: Array, axis: Array | int = -1, ascending: Array | bool = False) -> Array:
    return _order(x, int(axis), bool(ascending)).astype(np.int32)


@op("topk", moves=True)
def topk(
    x: Array,
    k: Array | int = 1,
    axis: Array | int = -1,
    ascending: Array | bool = False,
    sort: Array | bool = True,
    return_indices: Array | bool = True,
    output_indices_dtype: str = "int32",
) -> Array | tuple[Array, Array]:
    """The k largest (or smallest), in order, the first of equal ones first: (values, indices)."""
    order = _order(x, int(axis), bool(ascending))
    indices = np.take(order, np.arange(int(k)), int(axis))
    values: Array = np.take_along_axis(x, indices, int(axis))
    return (values, indices.astype(output_indices_dtype)) if return_indices else values


def _order(x: Array, axis: int, ascending: bool) -> Array:
    if ascending:
        return np.argsort(x, axis=axis, kind="stable")
    # Sorted from behind and turned round, equal elements keep their order.
    last_first = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
    return np.asarray(x.shape[axis] - 1 - np.flip(last_first, axis))
