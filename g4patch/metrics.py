"""Distances between what came out and what was expected."""

from __future__ import annotations

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
    a, e = actual.astype(np.float64).reshape(-1), expected.astype(np.float64).reshape(-1)
    for name, values in (("what came out", a), ("what was expected", e)):
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or infinities")
    with np.errstate(over="ignore"):  # an infinite difference is over every tolerance
        difference = a - e
        (most_a, a, norm_a), (most_e, e, norm_e), (most_d, _, norm_d) = map(_scaled, (a, e, difference))
    if not most_e:
        return Distance(most_d, np.inf if most_a else 1.0, 0.0 if most_a else 1.0, most_d * norm_d)
    cosine = float((a / norm_a) @ (e / norm_e)) if most_a else 0.0
    return Distance(most_d, most_a / most_e * (norm_a / norm_e), cosine, most_d * norm_d)


def _scaled(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64], float]:
    """The largest magnitude, the values divided by it, and the norm of those.

    Squares of large values would pass float64's range, those of small ones vanish.
    """
    largest = float(np.abs(values).max())
    if not largest or not np.isfinite(largest):
        return largest, values, 1.0
    unit = values / largest
    return largest, unit, float(np.linalg.norm(unit))
