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
    norm_a, norm_e = float(np.linalg.norm(a)), float(np.linalg.norm(e))
    delta_norm = float(np.linalg.norm(a - e))
    if not norm_e:
        return Distance(float(np.abs(a).max()), 1.0 if not norm_a else np.inf, 1.0 if not norm_a else 0.0, delta_norm)
    # Scaled before the product: squares of large values would pass float64's range, those of small ones vanish.
    cosine = float((a / norm_a) @ (e / norm_e)) if norm_a else 0.0
    return Distance(float(np.abs(a - e).max()), norm_a / norm_e, cosine, delta_norm)
