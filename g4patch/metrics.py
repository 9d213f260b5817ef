"""Distances between what came out and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from what was expected, computed in float64.

    `norm_ratio` is |actual| / |expected|, 1.0 where both are zero. `cosine` is that of the flattened tensors.
    `delta_norm` is |actual - expected|.
    """

    max_abs: float
    norm_ratio: float
    cosine: float
    delta_norm: float


def distance(actual: NDArray[Any], expected: NDArray[Any]) -> Distance:
    """The distance between tensors of one shape. Raises ValueError for other shapes, empty tensors, NaN, infinities."""
    if actual.shape != expected.shape:
        raise ValueError(f"the shape is {list(actual.shape)}, expected {list(expected.shape)}")
    if not expected.size:
        raise ValueError("there is nothing to compare")
    a, e = actual.reshape(-1), expected.reshape(-1)
    for name, values in (("what came out", a), ("what was expected", e)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or infinities")
    with np.errstate(over="ignore"):  # an infinite difference is over every tolerance
        tops = np.max([_largest(*part) for part in _chunks(a, e)], axis=0)
        # Scaled before they are squared: squares of large values pass float64's range, those of small ones vanish.
        scales = np.where((tops > 0) & np.isfinite(tops), tops, 1.0)
        squares = np.sum([_products(*part, scales) for part in _chunks(a, e)], axis=0)
        most_a, most_e, max_abs = (float(top) for top in tops)
        norm_a, norm_e, norm_delta = (float(norm) for norm in np.sqrt(squares[:3]))
        delta_norm = float(scales[2]) * norm_delta
    if not most_e:
        return Distance(max_abs, np.inf if most_a else 1.0, 0.0 if most_a else 1.0, delta_norm)
    cosine = float(squares[3]) / (norm_a * norm_e) if most_a else 0.0
    return Distance(max_abs, most_a / most_e * (norm_a / norm_e), cosine, delta_norm)


# Logits are hundreds of megabytes: their float64 copies are made piece by piece.
_CHUNK = 2**22


def _chunks(a: NDArray[Any], e: NDArray[Any]) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    for at in range(0, len(a), _CHUNK):
        yield a[at : at + _CHUNK].astype(np.float64), e[at : at + _CHUNK].astype(np.float64)


def _largest(a: NDArray[np.float64], e: NDArray[np.float64]) -> list[float]:
    """The largest |actual|, |expected| and |actual - expected|."""
    return [float(np.abs(values).max()) for values in (a, e, a - e)]


def _products(a: NDArray[np.float64], e: NDArray[np.float64], scales: NDArray[np.float64]) -> list[float]:
    """Sums of the squares of both and of their difference, and of their product, each divided by its scale."""
    a, e, delta = a / scales[0], e / scales[1], (a - e) / scales[2]
    return [float(left @ right) for left, right in ((a, a), (e, e), (delta, delta), (a, e))]


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """log(softmax) of one row of logits `[V]` in float64, shifted by its maximum: finite for logits of any size.

    Logits may be -inf: such a token has no probability. Raises ValueError for NaN, +inf, and a row of -inf alone.
    """
    row = logits.astype(np.float64)
    top = row.max(initial=-np.inf)
    if not np.isfinite(top):
        raise ValueError("a row of logits holds NaN or +inf, or no finite number")
    shifted = row - top
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found


def kl_divergence(actual: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """KL(expected || actual) of the softmax of each row of logits `[N, V]`: float64 `[N]`, nats.

    Infinite where a token that is expected has no probability at all. Raises ValueError for other shapes, no rows, and
    rows that `log_softmax` refuses.
    """
    if actual.shape != expected.shape or actual.ndim != 2:
        raise ValueError(f"the shape is {list(actual.shape)}, expected {list(expected.shape)}")
    if not expected.size:
        raise ValueError("there is nothing to compare")
    return np.array([_kl(*pair) for pair in zip(actual, expected, strict=True)], np.float64)


def _kl(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """For one row. Rounding can take a divergence of 0 below it."""
    log_q, log_p = log_softmax(actual), log_softmax(expected)
    counted = np.exp(log_p) > 0
    return max(0.0, float((np.exp(log_p[counted]) * (log_p[counted] - log_q[counted])).sum()))
