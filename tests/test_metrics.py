"""Distances against scipy, on random inputs and on those that arithmetic trips over."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from scipy.spatial.distance import chebyshev, cosine, euclidean

from g4patch.metrics import distance

Array = NDArray[Any]


def agrees_with_scipy(actual: Array, expected: Array) -> None:
    """All four numbers. scipy's cosine squares its inputs: it gets them divided by a power of two, which is exact."""
    found = distance(actual, expected)
    a, e = (array.astype(np.float64).ravel() for array in (actual, expected))
    assert found.max_abs == chebyshev(a, e)
    assert found.delta_norm == pytest.approx(float(scipy.linalg.norm(a - e, check_finite=False)), rel=1e-12)
    norm_a, norm_e = (float(scipy.linalg.norm(array)) for array in (a, e))  # BLAS nrm2, which scales by itself
    if norm_e:
        with np.errstate(over="ignore"):
            assert found.norm_ratio == pytest.approx(float(np.float64(norm_a) / norm_e), rel=1e-9)
    if norm_a and norm_e:
        near_one = [np.ldexp(array, -int(np.frexp(np.abs(array).max())[1])) for array in (a, e)]
        assert found.cosine == pytest.approx(1 - cosine(*near_one), abs=1e-9)


def numbers(width: int, dtype: Any) -> st.SearchStrategy[tuple[Array, Array]]:
    """Pairs of arrays of one shape: any finite numbers, denormal ones among them."""
    floats = st.floats(allow_nan=False, allow_infinity=False, width=width, allow_subnormal=True)  # type: ignore[arg-type]
    shapes = array_shapes(min_dims=1, max_dims=3, max_side=5)
    return shapes.flatmap(lambda shape: st.tuples(*(arrays(dtype, shape, elements=floats) for _ in range(2))))


@given(numbers(32, np.float32))
def test_float32(pair: tuple[Array, Array]) -> None:
    agrees_with_scipy(*pair)


@given(numbers(16, np.float16))
def test_float16(pair: tuple[Array, Array]) -> None:
    agrees_with_scipy(*pair)


@given(numbers(32, np.float32))
def test_bfloat16(pair: tuple[Array, Array]) -> None:
    with np.errstate(over="ignore"):
        actual, expected = (array.astype(ml_dtypes.bfloat16) for array in pair)
    if np.isfinite(actual.astype(np.float32)).all() and np.isfinite(expected.astype(np.float32)).all():
        agrees_with_scipy(actual, expected)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-40, 1.0, 1e40, 1e200, 1e306])
def test_a_scale_is_seen_at_every_size(size: float) -> None:
    """In float64, whose squares overflow above 1e154 and vanish below 1e-162: twice as much is never as much."""
    expected = np.random.default_rng(0).uniform(1, 2, (1, 64)) * size
    agrees_with_scipy(expected * 2, expected)
    found = distance(expected * 2, expected)
    assert found.norm_ratio == pytest.approx(2, rel=1e-2)  # of denormal numbers few bits are left
    assert found.cosine == pytest.approx(1, rel=1e-2)


def test_sizes_far_apart() -> None:
    huge, tiny = np.full(4, 1e300), np.full(4, 1e-300)
    assert distance(huge, tiny).norm_ratio == np.inf
    assert distance(tiny, huge).norm_ratio == 0
    assert distance(-huge * 1e8, huge * 1e8).max_abs == np.inf
    assert distance(-huge * 1e8, huge * 1e8).delta_norm == np.inf


def test_zeros() -> None:
    zeros, ones = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)
    assert distance(zeros, zeros).norm_ratio == distance(zeros, zeros).cosine == 1
    assert distance(ones, zeros).norm_ratio == np.inf
    assert distance(zeros, ones).norm_ratio == distance(zeros, ones).cosine == 0
    assert distance(ones, zeros).max_abs == 1
    assert distance(zeros, ones).delta_norm == pytest.approx(euclidean(np.zeros(3), np.ones(3)))


def test_what_cannot_be_compared_is_refused() -> None:
    ones = np.ones((2, 2), np.float32)
    for actual, expected in ((ones, ones[:1]), (ones[:0], ones[:0]), (ones * np.nan, ones), (ones, ones * np.inf)):
        with pytest.raises(ValueError, match=r"shape|nothing|NaN"):
            distance(actual, expected)
