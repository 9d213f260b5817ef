"""Element-wise ops of the MIL interpreter against coremltools' value inference and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb

from tests.mil.oracles import IOS16, IOS17, check, floats, fold, interpret, ints, onnx_run, same

ARITHMETIC = ("add", "sub", "mul", "maximum", "minimum")
COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")
LOGICAL = ("logical_and", "logical_or", "logical_xor")


@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS, "real_div", "floor_div", "mod"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_binary_floats_broadcast(name: str, dtype: str) -> None:
    inputs = {"x": floats(3, 1, 4, dtype=dtype), "y": floats(5, 1, dtype=dtype, seed=1)}
    inputs["y"][0] = inputs["x"][1, 0, 2]  # one pair is equal
    check(lambda x, y: getattr(mb, name)(x=x, y=y), inputs)


@pytest.mark.parametrize("name", [*ARITHMETIC, *COMPARISONS, "floor_div", "mod"])
def test_binary_integers_of_both_signs(name: str) -> None:
    inputs = {"x": ints(-9, 10, 6, 7), "y": np.array([[-4, -3, -2, 2, 3, 4, 5]], np.int32)}
    check(lambda x, y: getattr(mb, name)(x=x, y=y), inputs)


@pytest.mark.parametrize("name", LOGICAL)
def test_logical(name: str) -> None:
    def build(x: Any, y: Any) -> Any:
        left, right = mb.greater(x=x, y=0), mb.greater(x=y, y=0)
        return mb.cast(x=getattr(mb, name)(x=left, y=right), dtype="int32")

    check(build, {"x": np.array([0, 0, 1, 1], np.int32), "y": np.array([0, 1, 0, 1], np.int32)})


def test_integers_add_beyond_fp16() -> None:
    """Token ids lie above 65504: nothing on their path may go through fp16."""
    check(lambda x: mb.add(x=x, y=np.int32(262144)), {"x": np.array([-1, 258880], np.int32)})


def test_real_div_of_integers_is_cut_off() -> None:
    (found,) = interpret(
        lambda x, y: mb.real_div(x=x, y=y),
        {"x": np.array([7, -7, 6, 0], np.int32), "y": np.array([2, 2, 3, 5], np.int32)},
    )
    np.testing.assert_array_equal(found, [3, -3, 2, 0])


@pytest.mark.parametrize("exponent", [2.0, -0.5, 0.0, 3.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_pow(dtype: Any, exponent: float) -> None:
    inputs = {"x": np.abs(floats(4, 5)).astype(dtype) + dtype(0.1)}
    check(lambda x: mb.pow(x=x, y=dtype(exponent)), inputs, ulps=8)


UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "relu", "round"),
    *("sigmoid", "sign", "sin", "sinh", "softplus", "square", "tan", "tanh"),
)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: str) -> None:
    inside = np.linspace(-1, 1, 41).astype(dtype).reshape(1, 41)
    check(lambda x: getattr(mb, name)(x=x), {"x": inside}, ulps=8)


@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "log", "inverse"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unary_of_positive_numbers(name: str, dtype: str) -> None:
    check(lambda x: getattr(mb, name)(x=x), {"x": np.linspace(0.05, 40, 33).astype(dtype)}, ulps=8)


@pytest.mark.parametrize("name", ["rsqrt", "log", "inverse"])
def test_epsilon_is_added_inside(name: str) -> None:
    x = np.array([0.0, 0.25, 4.0], np.float32)
    check(lambda x: getattr(mb, name)(x=x, epsilon=np.float32(0.5)), {"x": x})


def test_halves_round_to_even() -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5], np.float32)
    check(lambda x: mb.round(x=x), {"x": x})
    np.testing.assert_array_equal(interpret(lambda x: mb.round(x=x), {"x": x})[0], [-2, -2, 0, 0, 2, 2, 4])


def test_logical_not() -> None:
    check(
        lambda x: mb.cast(x=mb.logical_not(x=mb.greater(x=x, y=0)), dtype="int32"),
        {"x": np.array([0, 1], np.int32)},
    )


def test_clip() -> None:
    check(lambda x: mb.clip(x=x, alpha=np.float32(-0.5), beta=np.float32(1)), {"x": floats(9)})


@pytest.mark.parametrize("mode", ["EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gelu(mode: str, dtype: str) -> None:
    x = np.linspace(-8, 8, 65).astype(dtype)
    if dtype == "float16":
        # coremltools folds in fp16 throughout; the reference is its result in float32, rounded once.
        (wide,) = fold(lambda x: mb.gelu(x=x, mode=mode), {"x": x.astype(np.float32)})
        same(interpret(lambda x: mb.gelu(x=x, mode=mode), {"x": x}), [wide.astype(np.float16)], ulps=1)
    else:
        check(lambda x: mb.gelu(x=x, mode=mode), {"x": x})


def test_gelu_keeps_small_negative_values() -> None:
    """Against onnxruntime, whose tail does not cancel: relative, not of the largest element."""
    x = np.linspace(-3, -0.001, 40).astype(np.float32)
    (wanted,) = onnx_run("Gelu", [x], opset=20, approximate="tanh")
    (found,) = interpret(lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"), {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=2e-4)


def test_silu() -> None:
    x = floats(5, 3) * 4
    (gate,) = onnx_run("Sigmoid", [x])
    same(interpret(lambda x: mb.silu(x=x), {"x": x}), [x * gate])


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int32", "bool", "int16", "uint16", "int8", "uint8"])
def test_cast_of_floats(dtype: str) -> None:
    x = np.array([0.0, 0.49, 1.5, 2.5, 100.75], np.float32)
    back = "int32" if dtype != "fp16" else "fp32"
    check(lambda x: mb.cast(x=mb.cast(x=x, dtype=dtype), dtype=back), {"x": x}, IOS17)


def test_cast_cuts_off_towards_zero() -> None:
    check(lambda x: mb.cast(x=x, dtype="int32"), {"x": np.array([-2.9, -0.5, 0.5, 2.9], np.float32)}, IOS17)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "fp16", "fp32"])
def test_cast_of_token_ids(dtype: str) -> None:
    """What fits comes back unchanged; int16 and uint16 wrap, and fp16 loses odd ids above 2048."""
    x = np.array([0, 1, 2049, 32767], np.int32)
    check(lambda x: mb.cast(x=mb.cast(x=x, dtype=dtype), dtype="int32"), {"x": x}, IOS17)


def test_fp16_overflows_to_infinity() -> None:
    x = np.array([60000.0, -60000.0, 65504.0], np.float16)
    (found,) = interpret(lambda x: mb.add(x=x, y=np.float16(10000)), {"x": x}, IOS16)
    np.testing.assert_array_equal(found, np.array([np.inf, -50000, np.inf], np.float16))


def test_fp16_is_rounded_after_each_op() -> None:
    """2048 + 1 is 2048 in fp16, twice over; in float32 it would be 2050."""
    x = np.array([2048.0], np.float16)
    (found,) = interpret(lambda x: mb.add(x=mb.add(x=x, y=np.float16(1)), y=np.float16(1)), {"x": x}, IOS16)
    np.testing.assert_array_equal(found, np.array([2048], np.float16))


def test_select_broadcasts() -> None:
    inputs = {"x": ints(0, 2, 1, 4), "a": floats(1, 1), "b": floats(3, 4)}
    check(lambda x, a, b: mb.select(cond=mb.greater(x=x, y=0), a=a, b=b), inputs, IOS17)


def test_empty_tensors() -> None:
    def build(x: Any) -> Any:
        return mb.add(x=mb.slice_by_index(x=x, begin=[0, 0], end=[0, 3]), y=x)

    (found,) = interpret(build, {"x": floats(1, 3)})
    assert found.shape == (0, 3)
