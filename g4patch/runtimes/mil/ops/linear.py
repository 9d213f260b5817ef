"""Matrix products, convolution and attention. Constant weights are decoded a block at a time and used at once."""

from __future__ import annotations

import math

import numpy as np

from g4patch.runtimes.mil.ops.reduction import softmax_of
from g4patch.runtimes.mil.ops.registry import integers, op
from g4patch.runtimes.mil.types import Array
from g4patch.runtimes.mil.weights import Lazy


def _times_rows(x: Array, weight: Lazy) -> Array:
    """`x @ weight.T` for `[..., K]` and `[N, K]`: `[..., N]`."""
    flat = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    product = np.empty((flat.shape[0], weight.shape[0]), np.result_type(x.dtype, weight.dtype))
    for rows in weight.blocks():
        np.matmul(flat, weight.read(rows).reshape(rows.stop - rows.start, -1).T, out=product[:, rows])
    return product.reshape(*x.shape[:-1], weight.shape[0])


@op("linear", lazy=("weight",))
def linear(x: Array, weight: Array | Lazy, bias: Array | None = None) -> Array:
    product = _times_rows(x, weight) if isinstance(weight, Lazy) else x @ weight.T
    if bias is not None:
        product += bias
    return product


@op("matmul", lazy=("y",))
def matmul(x: Array, y: Array | Lazy, transpose_x: Array | bool = False, transpose_y: Array | bool = False) -> Array:
    left = np.swapaxes(x, -1, -2) if transpose_x and x.ndim > 1 else x
    if isinstance(y, Lazy):
        if transpose_y and len(y.shape) == 2:
            return _times_rows(left, y)
        y = y.dense()
    right = np.swapaxes(y, -1, -2) if transpose_y and y.ndim > 1 else y
    return np.asarray(left @ right)


@op("einsum", many=("values",))
def einsum(values: list[Array], equation: str) -> Array:
    return np.asarray(np.einsum(equation, *values))


@op("scaled_dot_product_attention")
def scaled_dot_product_attention(query: Array, key: Array, value: Array, attn_mask: Array | None = None) -> Array:
    """A boolean mask says what takes part, a float one is added to the scores."""
    scores = (query @ np.swapaxes(key, -1, -2)) * np.float32(1 / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        bias = np.where(attn_mask, np.float32(0), np.float32(-np.inf)) if attn_mask.dtype == bool else attn_mask
        scores = scores + bias
    return softmax_of(scores, -1) @ value


@op("conv", lazy=("weight",))
def conv(
    x: Array,
    weight: Array | Lazy,
    bias: Array | None = None,
    strides: Array | None = None,
    pad_type: str = "valid",
    pad: Array | None = None,
    dilations: Array | None = None,
    groups: Array | int = 1,
) -> Array:
    """`[N, C, *D]` with `[O, C / groups, *K]` -> `[N, O, *D']`, over one to three axes."""
    rank = x.ndim - 2
    steps = [1] * rank if strides is None else integers(strides)
    spread = [1] * rank if dilations is None else integers(dilations)
    kernel = weight.shape[2:]
    padded = np.pad(x, [(0, 0), (0, 0), *_padding(x.shape[2:], kernel, steps, spread, pad_type, pad)])
    windows = _windows(padded, kernel, steps, spread)
    outputs = _grouped(windows, weight, int(groups))
    if bias is not None:
        outputs = outputs + bias
    return np.moveaxis(outputs, -1, 1)


def _padding(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: list[int],
    dilations: list[int],
    pad_type: str,
    pad: Array | None,
) -> list[tuple[int, int]]:
    """(before, after) of each spatial axis. `same` puts an odd element behind, `same_lower` in front."""
    if pad_type == "custom":
        if pad is None:
            raise ValueError("custom padding is not given")
        return [(int(low), int(high)) for low, high in pad.reshape(-1, 2)]
    if pad_type == "valid":
        return [(0, 0)] * len(shape)
    if pad_type not in ("same", "same_lower"):
        raise ValueError(f"conv has no padding {pad_type}")
    widths = []
    for dim, size, stride, dilation in zip(shape, kernel, strides, dilations, strict=True):
        total = max(0, (math.ceil(dim / stride) - 1) * stride + (size - 1) * dilation + 1 - dim)
        small, large = total // 2, total - total // 2
        widths.append((small, large) if pad_type == "same" else (large, small))
    return widths


def _windows(x: Array, kernel: tuple[int, ...], strides: list[int], dilations: list[int]) -> Array:
    """What each output looks at: `[N, *D', C, *K]`, a view."""
    spatial = tuple(range(2, x.ndim))
    spans = tuple((size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(x, spans, axis=spatial)
    every = tuple(slice(None, None, step) for step in strides)
    within = tuple(slice(None, None, dilation) for dilation in dilations)
    return np.moveaxis(windows[(slice(None), slice(None), *every, *within)], 1, x.ndim - 1)


def _grouped(windows: Array, weight: Array | Lazy, groups: int) -> Array:
    """`[N, *D', C, *K]` -> `[N, *D', O]`: each group of channels with its own rows of the weight."""
    spatial = len(weight.shape) - 2
    leading = windows.shape[: 1 + spatial]
    if groups == 1 and isinstance(weight, Lazy):
        return _times_rows(windows.reshape(*leading, -1), weight)
    rows = (weight.dense() if isinstance(weight, Lazy) else weight).reshape(groups, weight.shape[0] // groups, -1)
    channels = np.split(windows, groups, axis=1 + spatial)
    parts = [part.reshape(*leading, -1) @ matrix.T for part, matrix in zip(channels, rows, strict=True)]
    return np.concatenate(parts, -1)
