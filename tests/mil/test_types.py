"""Rounding to fp16 against the processor's own conversion."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from g4patch.runtimes.mil.types import round_to_fp16


def assert_rounds(values: NDArray[np.float32]) -> None:
    with np.errstate(all="ignore"):
        found, wanted = round_to_fp16(values), values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_every_fp16_value_stays() -> None:
    assert_rounds(np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32))


@pytest.mark.parametrize("toward", [-np.inf, 0.0, np.inf])
def test_halfway_and_next_to_it(toward: float) -> None:
    """Between any two neighbours, subnormals and the step to infinity (65520) among them."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    steps = np.append(finite, np.float32(65536))
    halfway = (steps[:-1] + steps[1:]) / 2
    beside: NDArray[np.float32] = np.nextafter(halfway, np.float32(toward), dtype=np.float32)
    for values in (halfway.astype(np.float32), beside):
        assert_rounds(values)
        assert_rounds(-values)


def test_float32_of_any_size() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 400_000, dtype=np.uint32)
    values = bits.view(np.float32)
    assert_rounds(values[~np.isnan(values)])


def test_infinities_nan_and_layouts() -> None:
    assert_rounds(np.array([np.inf, -np.inf, 1e30, -1e30, 3.4e38], np.float32))
    assert np.isnan(round_to_fp16(np.array([np.nan], np.float32))).all()
    table = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    assert_rounds(table.T)
    assert_rounds(table[::2, 1:1])
    assert round_to_fp16(np.array(1 / 3, np.float32)).shape == ()
