"""Reductions and normalisations of the MIL interpreter against coremltools' value inference and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb

from tests.mil.oracles import IOS15, IOS16, IOS17, check, floats, fold, interpret, ints, onnx_run, same

REDUCTIONS = (
    *("reduce_mean", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_l1_norm"),
    *("reduce_l2_norm", "reduce_sum_square", "reduce_log_sum_exp"),
)
AXES: list[tuple[list[int] | None, bool]] = [([-1], True), ([0, -1], False), ([1], False), (None, False), (None, True)]


@pytest.mark.parametrize(("axes", "keep"), AXES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name: str, axes: list[int] | None, keep: bool) -> None:
    arguments = {} if axes is None else {"axes": axes}
    x = np.abs(floats(2, 3, 4)) + np.float32(0.1)
    (wanted,) = fold(lambda x: getattr(mb, name)(x=x, keep_dims=keep, **arguments), {"x": x})
    (found,) = interpret(lambda x: getattr(mb, name)(x=x, keep_dims=keep, **arguments), {"x": x})
    # Reduced over all axes, coremltools declares a vector of one element or a scalar, as the opset has it.
    same([found.reshape(wanted.shape)], [wanted], ulps=16)


def test_mean_of_fp16_does_not_overflow() -> None:
    """The squares of an RMS norm add up beyond 65504: the sum is held in float32."""
    x = np.full((1, 4096), 100.0, np.float16)
    (found,) = interpret(lambda x: mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1]), {"x": x}, IOS16)
    np.testing.assert_array_equal(found.reshape(-1), np.array([10000], np.float16))


@pytest.mark.parametrize("name", ["reduce_argmax", "reduce_argmin"])
@pytest.mark.parametrize(("axis", "keep"), [(-1, False), (0, True)])
def test_arguments_of_the_extremes(name: str, axis: int, keep: bool) -> None:
    x = floats(4, 5)
    x[0, 3] = x[0, 1]
    check(lambda x: getattr(mb, name)(x=x, axis=axis, keep_dims=keep), {"x": x}, IOS17)


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_softmax(axis: int, dtype: str) -> None:
    check(lambda x: mb.softmax(x=x, axis=axis), {"x": floats(2, 3, 5, dtype=dtype) * 3}, IOS16, ulps=16)


def test_softmax_of_large_and_masked_scores() -> None:
    x = np.array([[1e4, 1e4, -1e4], [-np.inf, 0, 1]], np.float32)
    check(lambda x: mb.softmax(x=x, axis=-1), {"x": x})


@pytest.mark.parametrize("axes", [[-1], [1, 2]])
def test_layer_norm(axes: list[int]) -> None:
    shape = tuple((2, 3, 8)[axis] for axis in axes)
    gamma, beta = floats(*shape, seed=1), floats(*shape, seed=2)

    def build(x: Any) -> Any:
        return mb.layer_norm(x=x, axes=axes, gamma=gamma, beta=beta, epsilon=np.float32(1e-3))

    check(build, {"x": floats(2, 3, 8) + np.float32(5)}, ulps=16)


def test_layer_norm_against_onnxruntime() -> None:
    x, gamma = floats(2, 3, 8), floats(8, seed=1)
    wanted = onnx_run("LayerNormalization", [x, gamma], axis=-1, epsilon=1e-5)
    same(interpret(lambda x: mb.layer_norm(x=x, axes=[-1], gamma=gamma), {"x": x}), wanted, ulps=16)


def test_l2_norm() -> None:
    check(lambda x: mb.l2_norm(x=x, epsilon=np.float32(1e-3)), {"x": floats(2, 3, 2, 4)}, ulps=8)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
def test_cumsum(axis: int, exclusive: bool, reverse: bool) -> None:
    x = floats(3, 4)
    wanted = onnx_run("CumSum", [x, np.array(axis, np.int64)], exclusive=int(exclusive), reverse=int(reverse))
    found = interpret(lambda x: mb.cumsum(x=x, axis=axis, exclusive=exclusive, reverse=reverse), {"x": x})
    same(found, wanted, ulps=8)


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("axis", [-1, 0])
def test_topk(axis: int, ascending: bool) -> None:
    check(lambda x: mb.topk(x=x, k=2, axis=axis, ascending=ascending), {"x": floats(4, 5)}, IOS17)


def test_topk_of_equal_values_takes_the_first() -> None:
    x = np.array([[1, 3, 3, 2, 3]], np.float32)
    wanted = onnx_run("TopK", [x, np.array([2], np.int64)], outputs=2, axis=-1)
    same(interpret(lambda x: mb.topk(x=x, k=2, axis=-1), {"x": x}), wanted)


@pytest.mark.parametrize("ascending", [False, True])
def test_argsort(ascending: bool) -> None:
    check(lambda x: mb.argsort(x=x, axis=-1, ascending=ascending), {"x": floats(3, 6)}, IOS15)


def test_sum_of_integers() -> None:
    check(lambda x: mb.reduce_sum(x=x, axes=[1], keep_dims=False), {"x": ints(-9, 9, 3, 4)})
