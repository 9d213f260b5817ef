"""Gathers and scatters of the MIL interpreter against coremltools' value inference and onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb

from g4patch.runtimes import Unavailable
from tests.mil.oracles import IOS15, IOS16, IOS17, Array, check, floats, interpret, ints, onnx_run, same


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_gather(axis: int, shape: tuple[int, ...]) -> None:
    inputs = {"x": floats(5, 6, 7), "i": ints(0, 5, *shape)}
    check(lambda x, i: mb.gather(x=x, indices=i, axis=axis), inputs, IOS17)


def test_gather_of_a_stored_table_reads_rows_in_the_order_asked() -> None:
    table = floats(40, 6)
    ids = np.array([[3, 39, 3, 0]], np.int32)
    (found,) = interpret(lambda i: mb.gather(x=table, indices=i, axis=0), {"i": ids}, IOS17)
    np.testing.assert_array_equal(found, table[[[3, 39, 3, 0]]])


def test_gather_of_a_stored_table_that_is_cast() -> None:
    table = floats(40, 6)
    ids = np.array([3, 39, 3], np.int32)

    def build(i: Any) -> Any:
        return mb.gather(x=mb.cast(x=table, dtype="fp16"), indices=i, axis=0)

    (found,) = interpret(build, {"i": ids}, IOS17)
    np.testing.assert_array_equal(found, table.astype(np.float16)[ids])


def test_gather_counts_negative_indices_from_the_end_up_to_ios16() -> None:
    inputs = {"x": floats(5, 3), "i": np.array([-1, 0, -5], np.int32)}
    for target in (IOS15, IOS16):
        check(lambda x, i: mb.gather(x=x, indices=i, axis=0), inputs, target)


@pytest.mark.parametrize("index", [-1, 5])
def test_gather_out_of_range_proves_nothing(index: int) -> None:
    """Undefined from iOS 17 on, so the row is NaN; its neighbours are not touched."""
    x = floats(5, 3)
    inputs = {"x": x, "i": np.array([1, index, 2], np.int32)}
    (found,) = interpret(lambda x, i: mb.gather(x=x, indices=i, axis=0), inputs, IOS17)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], x[[1, 2]])


def test_gather_of_integers_out_of_range_is_refused() -> None:
    inputs = {"x": ints(0, 9, 5), "i": np.array([7], np.int32)}
    with pytest.raises(Unavailable, match="out of range"):
        interpret(lambda x, i: mb.gather(x=x, indices=i, axis=0), inputs, IOS17)


def test_gather_that_validates_is_refused_out_of_range() -> None:
    inputs = {"x": floats(5, 3), "i": np.array([7], np.int32)}
    with pytest.raises(Unavailable, match="index 7"):
        interpret(lambda x, i: mb.gather(x=x, indices=i, axis=0, validate_indices=True), inputs, IOS17)


@pytest.mark.parametrize("axis", [1, 2])
def test_gather_in_batches(axis: int) -> None:
    inputs = {"x": floats(2, 5, 6), "i": ints(0, 5, 2, 3)}
    check(lambda x, i: mb.gather(x=x, indices=i, axis=axis, batch_dims=1), inputs, IOS16)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_along_axis(axis: int) -> None:
    shape = [4, 5]
    shape[axis] = 3
    inputs = {"x": floats(4, 5), "i": ints(0, 4, *shape)}
    check(lambda x, i: mb.gather_along_axis(x=x, indices=i, axis=axis), inputs, IOS17)


def test_gather_along_axis_of_a_stored_table() -> None:
    table = floats(50, 4)
    index = np.array([[7] * 4, [49] * 4, [7] * 4], np.int32)
    (found,) = interpret(lambda i: mb.gather_along_axis(x=table, indices=i, axis=0), {"i": index}, IOS17)
    np.testing.assert_array_equal(found, table[[7, 49, 7]])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gather_nd(depth: int) -> None:
    x, index = floats(4, 5, 6), ints(0, 4, 2, 3, depth)
    wanted = onnx_run("GatherND", [x, index.astype(np.int64)])
    same(interpret(lambda x, i: mb.gather_nd(x=x, indices=i), {"x": x, "i": index}, IOS17), wanted)


def test_gather_nd_in_batches() -> None:
    x, index = floats(2, 5, 6), ints(0, 5, 2, 3, 1)
    wanted = onnx_run("GatherND", [x, index.astype(np.int64)], batch_dims=1)
    same(interpret(lambda x, i: mb.gather_nd(x=x, indices=i, batch_dims=1), {"x": x, "i": index}, IOS17), wanted)


def test_gather_nd_of_a_stored_table() -> None:
    table, index = floats(30, 4), np.array([[[29], [0], [29]]], np.int32)
    (wanted,) = onnx_run("GatherND", [table, index.astype(np.int64)])
    (found,) = interpret(lambda i: mb.gather_nd(x=table, indices=i), {"i": index}, IOS17)
    np.testing.assert_array_equal(found, wanted)


REDUCTIONS = {"add": "add", "mul": "mul", "max": "max", "min": "min", "update": "none"}


@pytest.mark.parametrize("mode", REDUCTIONS)
def test_scatter_nd(mode: str) -> None:
    data, updates = floats(5, 3), floats(2, 2, 3, seed=1)
    index = np.array([[[0], [4]], [[2], [3]]] if mode == "update" else [[[0], [4]], [[4], [3]]], np.int32)
    wanted = onnx_run("ScatterND", [data, index.astype(np.int64), updates], reduction=REDUCTIONS[mode])
    found = interpret(
        lambda data, i, updates: mb.scatter_nd(data=data, indices=i, updates=updates, mode=mode),
        {"data": data, "i": index, "updates": updates},
        IOS17,
    )
    same(found, wanted)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("mode", REDUCTIONS)
def test_scatter_along_axis(mode: str, axis: int) -> None:
    data = floats(4, 4)
    index = np.array([[0, 3, 2, 1], [2, 1, 0, 3]], np.int32) if axis == 0 else np.array([[0, 3]] * 4, np.int32)
    updates = floats(*index.shape, seed=1)
    wanted = onnx_run("ScatterElements", [data, index.astype(np.int64), updates], axis=axis, reduction=REDUCTIONS[mode])
    found = interpret(
        lambda data, i, updates: mb.scatter_along_axis(data=data, indices=i, updates=updates, axis=axis, mode=mode),
        {"data": data, "i": index, "updates": updates},
        IOS17,
    )
    same(found, wanted)


def test_scatter_is_scatter_nd_along_an_axis() -> None:
    data, updates, index = floats(5, 3), floats(2, 3, seed=1), np.array([4, 1], np.int32)
    wanted = onnx_run("ScatterND", [data, index[:, None].astype(np.int64), updates])
    found = interpret(
        lambda data, i, updates: mb.scatter(data=data, indices=i, updates=updates, axis=0, mode="update"),
        {"data": data, "i": index, "updates": updates},
        IOS17,
    )
    same(found, wanted)


@pytest.mark.parametrize("axis", [-1, 0])
def test_one_hot(axis: int) -> None:
    index = ints(0, 4, 2, 3)
    wanted: list[Array] = onnx_run(
        "OneHot", [index.astype(np.int64), np.array([4], np.int64), np.array([-2, 5], np.int64)], axis=axis
    )
    found: list[Any] = interpret(
        lambda i: mb.one_hot(indices=i, one_hot_vector_size=4, axis=axis, on_value=5, off_value=-2), {"i": index}
    )
    same(found, wanted)
