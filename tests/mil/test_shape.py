"""Shape and slicing ops of the MIL interpreter against coremltools' value inference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil import Interpreter
from tests.mil.oracles import IOS16, IOS17, IOS18, check, convert, floats, fold, interpret


@pytest.mark.parametrize("shape", [[6, 4], [-1, 2], [2, 3, 4], [24], [1, -1, 1]])
def test_reshape(shape: list[int]) -> None:
    check(lambda x: mb.reshape(x=x, shape=shape), {"x": floats(2, 3, 4)})


def test_reshape_with_zero_keeps_a_dimension() -> None:
    check(lambda x: mb.reshape(x=x, shape=[0, 0, 4]), {"x": floats(2, 3, 4)})
    check(lambda x: mb.reshape(x=x, shape=[0, -1, 2]), {"x": floats(2, 3, 4)})


def test_reshape_by_a_computed_shape() -> None:
    def build(x: Any, like: Any) -> Any:
        return mb.reshape(x=x, shape=mb.shape(x=like))

    check(build, {"x": floats(2, 6), "like": floats(3, 4)})


@pytest.mark.parametrize("axes", [[0], [-1], [1, 3], [-1, 0], [2, -4]])
def test_expand_dims(axes: list[int]) -> None:
    check(lambda x: mb.expand_dims(x=x, axes=axes), {"x": floats(2, 3)})


@pytest.mark.parametrize("axes", [[0], [-1], [0, 2], None])
def test_squeeze(axes: list[int] | None) -> None:
    arguments = {} if axes is None else {"axes": axes}
    check(lambda x: mb.squeeze(x=x, **arguments), {"x": floats(1, 3, 1)})


@pytest.mark.parametrize("perm", [[0, 2, 1], [2, 0, 1], [-1, 0, -2]])
def test_transpose(perm: list[int]) -> None:
    check(lambda x: mb.transpose(x=x, perm=perm), {"x": floats(2, 3, 4)})


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(axis: int) -> None:
    inputs = {"a": floats(2, 2, 2), "b": floats(2, 2, 2, seed=1)}
    check(lambda a, b: mb.concat(values=[a, b, a], axis=axis), inputs)


def test_concat_of_one_value() -> None:
    check(lambda x: mb.concat(values=[x], axis=0), {"x": floats(2, 2)})


def test_concat_interleaved() -> None:
    """The documentation's example: the first slices of all, then the second ones."""
    a, b = np.array([[1, 2], [3, 4]], np.float32), np.array([[5, 6], [7, 8]], np.float32)
    (found,) = interpret(lambda a, b: mb.concat(values=[a, b], axis=0, interleave=True), {"a": a, "b": b})
    np.testing.assert_array_equal(found, [[1, 2], [5, 6], [3, 4], [7, 8]])


@pytest.mark.parametrize("axis", [0, -1, 1])
def test_stack(axis: int) -> None:
    check(lambda a, b: mb.stack(values=[a, b], axis=axis), {"a": floats(2, 3), "b": floats(2, 3, seed=1)})


@pytest.mark.parametrize("axis", [1, -1])
def test_split(axis: int) -> None:
    check(lambda x: mb.split(x=x, num_splits=3, axis=axis), {"x": floats(2, 6)})
    check(lambda x: mb.split(x=x, split_sizes=[1, 2, 3], axis=axis), {"x": floats(2, 6)})


@pytest.mark.parametrize("reps", [[1, 3, 1], [2, 1, 2]])
def test_tile(reps: list[int]) -> None:
    check(lambda x: mb.tile(x=x, reps=reps), {"x": floats(2, 1, 3)})


@pytest.mark.parametrize("axes", [[0], [-1, 0]])
def test_reverse(axes: list[int]) -> None:
    check(lambda x: mb.reverse(x=x, axes=axes), {"x": floats(3, 4)})


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_pad_of_the_last_axes(mode: str) -> None:
    check(lambda x: mb.pad(x=x, pad=[0, 0, 2, 1], mode=mode, constant_val=np.float32(-3)), {"x": floats(2, 2, 4)})


def test_fill_and_fill_like() -> None:
    def filled(x: Any) -> Any:
        return mb.add(x=mb.fill(shape=[2, 3], value=np.float32(2.5)), y=x)

    check(filled, {"x": floats(2, 3)})
    check(lambda x: mb.fill_like(ref_tensor=x, value=np.int32(4)), {"x": floats(2, 3)}, IOS16)


def test_range() -> None:
    def build(n: Any) -> Any:
        return mb.range_1d(start=np.int32(2), end=mb.squeeze(x=n), step=np.int32(3))

    (found,) = interpret(build, {"n": np.array([12], np.int32)})
    np.testing.assert_array_equal(found, [2, 5, 8, 11])


@pytest.mark.parametrize(("lower", "upper"), [(-1, 0), (0, -1), (1, 2), (-1, -1)])
def test_band_part(lower: int, upper: int) -> None:
    check(lambda x: mb.band_part(x=x, lower=lower, upper=upper), {"x": floats(2, 4, 5)})


SLICES = [
    ({"begin": [1, 0, 2], "end": [2, 3, 4]}, "plain"),
    ({"begin": [-1, 0, -3], "end": [2, -1, -1]}, "negative bounds"),
    ({"begin": [0, 0, 0], "end": [2, 3, 4], "stride": [1, 2, 3]}, "strides"),
    ({"begin": [0, 2, 3], "end": [2, 0, 0], "stride": [1, -1, -2]}, "negative strides stop before the end"),
    (
        {
            "begin": [0, 0, 0],
            "end": [0, 0, 0],
            "stride": [1, -1, -2],
            "begin_mask": [True] * 3,
            "end_mask": [True] * 3,
        },
        "negative strides over all",
    ),
    ({"begin": [9, 1, 9], "end": [9, 2, 9], "begin_mask": [1, 0, 1], "end_mask": [1, 0, 1]}, "masks override"),
    ({"begin": [1, 0, -2], "end": [9, 3, 0], "squeeze_mask": [True, False, True]}, "squeezed"),
    ({"begin": [0, 1, 0], "end": [2, 1, 4]}, "an empty axis"),
    ({"begin": [0, 0, 0], "end": [2, 99, 4]}, "an end beyond the axis"),
]


def _bools(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: np.array(value, bool) if "mask" in key else value for key, value in arguments.items()}


@pytest.mark.parametrize("arguments", [item for item, _ in SLICES], ids=[label for _, label in SLICES])
def test_slice_by_index(arguments: dict[str, Any]) -> None:
    check(lambda x: mb.slice_by_index(x=x, **_bools(arguments)), {"x": floats(2, 3, 4)}, IOS17)


def test_slice_by_a_computed_index() -> None:
    def build(x: Any, at: Any) -> Any:
        return mb.slice_by_index(x=x, begin=at, end=mb.add(x=at, y=np.int32(2)))

    x = floats(5, 6)
    (found,) = interpret(build, {"x": x, "at": np.array([1, 3], np.int32)})
    np.testing.assert_array_equal(found, x[1:3, 3:5])


UPDATES = {label: item for item, label in SLICES if "negative strides" not in label and label != "an empty axis"}


@pytest.mark.parametrize("arguments", UPDATES.values(), ids=UPDATES)
def test_slice_update(arguments: dict[str, Any]) -> None:
    x, masks = floats(2, 3, 4), _bools(arguments)
    (part,) = fold(lambda x: mb.slice_by_index(x=x, **masks), {"x": x})
    inputs = {"x": x, "update": floats(*part.shape, seed=1)}
    check(lambda x, update: mb.slice_update(x=x, update=update, **masks), inputs, IOS18)


@pytest.mark.parametrize(("begin", "size"), [([0, 1], [2, 3]), ([-2, 0], [1, -1]), ([1, 2], [-1, -1])])
def test_slice_by_size(begin: list[int], size: list[int]) -> None:
    check(lambda x: mb.slice_by_size(x=x, begin=begin, size=size), {"x": floats(3, 5)})


@pytest.mark.filterwarnings("ignore:Some dimensions in the input shape are unknown")
def test_open_dimensions_take_any_length() -> None:
    open_shape = mb.TensorSpec((1, get_new_symbol(), 4), dtype=types.fp32)
    function, weights = convert(lambda x: mb.reshape(x=x, shape=[1, -1, 2, 2]), {"x": open_shape}, IOS17)
    assert function.inputs["x"].shape == (1, None, 4)
    for length in (3, 7):
        x = floats(1, length, 4)
        found = Interpreter(function, weights).run({"x": x}, function.outputs)
        np.testing.assert_array_equal(found[function.outputs[0]], x.reshape(1, length, 2, 2))


def test_a_shape_the_program_does_not_declare_is_refused() -> None:
    function, weights = convert(lambda x: mb.relu(x=x), {"x": floats(2, 3)})
    with pytest.raises(Unavailable, match="takes the shape"):
        Interpreter(function, weights).run({"x": floats(3, 2)}, function.outputs)
