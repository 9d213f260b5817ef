"""Running functions: taps, slices of the program, states, and programs that are not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from g4patch.errors import BundleError
from g4patch.formats.coreml.proto import mil_pb2
from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil import Interpreter, Weights, read_function, run
from tests.mil.oracles import IOS17, IOS18, convert, floats


def test_taps_name_any_value_and_come_in_its_dtype() -> None:
    def build(x: Any) -> Any:
        half = mb.cast(x=x, dtype="fp16", name="half")
        return mb.cast(x=mb.greater(x=half, y=np.float16(0), name="sign"), dtype="int32")

    function, weights = convert(build, {"x": floats(2, 3)}, IOS17)
    found = Interpreter(function, weights).run({"x": floats(2, 3)}, ["half", "sign", "x"])
    assert [found[name].dtype.name for name in ("half", "sign", "x")] == ["float16", "bool", "float32"]


def test_only_what_a_tap_depends_on_is_run() -> None:
    """The other branch has an op that the interpreter lacks, and an input that is not given."""

    def build(x: Any, y: Any) -> Any:
        return mb.relu(x=x, name="wanted"), mb.non_zero(x=y, name="lacking")

    function, weights = convert(build, {"x": floats(2, 3), "y": floats(2, 3)}, IOS17)
    interpreter = Interpreter(function, weights)
    np.testing.assert_array_equal(
        interpreter.run({"x": floats(2, 3)}, ["wanted"])["wanted"], np.maximum(floats(2, 3), 0)
    )
    with pytest.raises(Unavailable, match="lacks non_zero"):
        interpreter.run({"x": floats(2, 3), "y": floats(2, 3)}, ["lacking"])


def test_blocks_inside_ops_are_not_run() -> None:
    def build(x: Any) -> Any:
        positive = mb.greater(x=mb.reduce_sum(x=x, keep_dims=False), y=np.float32(0))
        return mb.cond(pred=positive, _true_fn=lambda: mb.relu(x=x), _false_fn=lambda: mb.exp(x=x))

    function, weights = convert(build, {"x": floats(3)}, IOS17)
    with pytest.raises(Unavailable, match="lacks cond"):
        Interpreter(function, weights).run({"x": floats(3)}, function.outputs)


def test_an_override_takes_the_place_of_a_value() -> None:
    def build(x: Any) -> Any:
        return mb.add(x=mb.exp(x=x, name="inner"), y=np.float32(1), name="outer")

    function, weights = convert(build, {"x": floats(3)}, IOS17)
    found = Interpreter(function, weights).run({}, ["outer"], overrides={"inner": np.array([1, 2, 3])})
    np.testing.assert_array_equal(found["outer"], [2, 3, 4])


def test_a_missing_input_is_named() -> None:
    function, weights = convert(lambda x: mb.relu(x=x), {"x": floats(3)}, IOS17)
    with pytest.raises(Unavailable, match="needs x"):
        Interpreter(function, weights).run({}, function.outputs)


def test_ids_that_an_input_cannot_hold() -> None:
    function, weights = convert(lambda x: mb.add(x=x, y=np.int32(1)), {"x": np.zeros(3, np.int32)}, IOS17)
    with pytest.raises(Unavailable, match="cannot hold"):
        Interpreter(function, weights).run({"x": np.array([0, 1, 2**40])}, function.outputs)


def test_an_unknown_tap() -> None:
    function, weights = convert(lambda x: mb.relu(x=x), {"x": floats(3)}, IOS17)
    with pytest.raises(Unavailable, match="no value nonsense"):
        Interpreter(function, weights).run({"x": floats(3)}, ["nonsense"])


def _cache() -> Any:
    """Writes `x` into row 0 of a state, then row 0 plus 1 into row 1; gives the state in between and after."""

    def build(x: Any, cache: Any) -> Any:
        start = mb.read_state(input=cache, name="start")
        once = mb.slice_update(x=start, update=x, begin=[0, 0], end=[1, 3])
        middle = mb.coreml_update_state(state=cache, value=once, name="middle")
        row = mb.add(x=mb.slice_by_index(x=middle, begin=[0, 0], end=[1, 3]), y=np.float16(1))
        twice = mb.slice_update(x=middle, update=row, begin=[1, 0], end=[2, 3])
        return mb.coreml_update_state(state=cache, value=twice, name="end")

    inputs = {
        "x": mb.TensorSpec((1, 3), dtype=types.fp16),
        "cache": mb.StateTensorSpec((2, 3), dtype=types.fp16),
    }
    return convert(build, inputs, IOS18)


X = np.array([[1, 2, 3]], np.float16)


def test_states_start_at_zero() -> None:
    function, weights = _cache()
    found = Interpreter(function, weights).run({"x": X}, ["start", "middle", "end"])
    np.testing.assert_array_equal(found["start"], np.zeros((2, 3)))
    np.testing.assert_array_equal(found["middle"], [[1, 2, 3], [0, 0, 0]])
    np.testing.assert_array_equal(found["end"], [[1, 2, 3], [2, 3, 4]])


def test_states_come_in_and_go_out() -> None:
    function, weights = _cache()
    state = {"cache": np.full((2, 3), 9, np.float16)}
    interpreter = Interpreter(function, weights)
    found = interpreter.run({"x": X}, ["start"], state=state)
    np.testing.assert_array_equal(found["start"], np.full((2, 3), 9))
    np.testing.assert_array_equal(state["cache"], [[1, 2, 3], [2, 3, 4]])
    assert state["cache"].dtype == np.float16
    interpreter.run({"x": X + 1}, [], state=state)
    np.testing.assert_array_equal(state["cache"], [[2, 3, 4], [3, 4, 5]])


def test_a_state_of_another_shape() -> None:
    function, weights = _cache()
    with pytest.raises(Unavailable, match="cache takes the shape"):
        Interpreter(function, weights).run({"x": X}, ["end"], state={"cache": np.zeros((3, 3), np.float16)})


def _message(text: str) -> Any:
    """A function in protobuf's text form."""
    from google.protobuf import text_format

    return text_format.Parse(text, mil_pb2().Function())


FLOAT3 = "type { tensorType { dataType: FLOAT32 rank: 1 dimensions { constant { size: 3 } } } }"
HEAD = f'opset: "CoreML7" inputs {{ name: "x" {FLOAT3} }}'


def _operation(kind: str, output: str, operands: str) -> str:
    return f'operations {{ type: "{kind}" {operands} outputs {{ name: "{output}" {FLOAT3} }} }}'


def _operand(key: str, name: str) -> str:
    return f'inputs {{ key: "{key}" value {{ arguments {{ name: "{name}" }} }} }}'


def _function(operations: str) -> Any:
    block = f'block_specializations {{ key: "CoreML7" value {{ outputs: "y" {operations} }} }}'
    return _message(f"{HEAD} {block}")


def test_constants_in_place_of_a_name() -> None:
    value = f"value {{ {FLOAT3} immediateValue {{ tensor {{ floats {{ values: [1, 2, 3] }} }} }} }}"
    inline = f'inputs {{ key: "y" value {{ arguments {{ {value} }} }} }}'
    function = read_function(_function(_operation("add", "y", _operand("x", "x") + inline)), "main")
    found = run(function, {"x": np.ones(3, np.float32)}, ["y"], weights_dir=Path("/nonexistent"))
    np.testing.assert_array_equal(found["y"], [2, 3, 4])


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (_operation("relu", "y", _operand("x", "z")), "not defined before"),
        (_operation("relu", "x", _operand("x", "x")), "defines x twice"),
        (_operation("const", "y", ""), "has no val"),
        (_operation("read_state", "y", _operand("input", "x")), "has no state"),
        (_operation("read_state", "y", ""), "has no state"),
        (_operation("write_state", "y", _operand("input", "x")), "has no state"),
    ],
    ids=["undefined", "twice", "no value", "an input as a state", "no state", "nothing to write"],
)
def test_programs_that_contradict_themselves(operations: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        run(read_function(_function(operations), "main"), {"x": np.ones(3)}, ["y"], weights_dir=Path("/nonexistent"))


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (_operation("add", "y", _operand("x", "x")), "cannot carry out add y"),
        (_operation("shape", "y", _operand("x", "x")), "shape y gives the shape"),
    ],
    ids=["an operand missing", "another shape than declared"],
)
def test_operations_that_cannot_be_carried_out(operation: str, message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        run(read_function(_function(operation), "main"), {"x": np.ones(3)}, ["y"], weights_dir=Path("/nonexistent"))


def test_an_operand_that_is_not_known() -> None:
    function = read_function(_function(_operation("relu", "y", _operand("x", "x") + _operand("slope", "x"))), "main")
    with pytest.raises(Unavailable, match="slope of relu"):
        Interpreter(function, Weights(Path("/nonexistent"))).run({"x": np.ones(3)}, ["y"])


def test_a_block_for_another_opset() -> None:
    with pytest.raises(BundleError, match="no block for the opset"):
        read_function(_message(HEAD), "main")


@pytest.mark.parametrize(
    "value",
    [
        "immediateValue { tensor { floats { values: [1, 2] } } }",
        'immediateValue { tensor { bytes { values: "abc" } } }',
        "immediateValue { }",
        "",
    ],
)
def test_constants_that_do_not_fit_their_type(value: str) -> None:
    constant = f'attributes {{ key: "val" value {{ {FLOAT3} {value} }} }}'
    with pytest.raises(BundleError):
        read_function(_function(_operation("const", "y", constant)), "main")
