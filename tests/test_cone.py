"""The evaluator against onnx's reference implementation, on random cones, and what it must refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from g4patch.cone import NotAMap, evaluated, map_ids, prompts
from g4patch.formats.onnx.view import build
from g4patch.view import Graph

IDS = np.arange(-12, 60)
_COMPARE = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
_ARITHMETIC = ["Add", "Sub", "Mul", "Max", "Min"]
_VIEWS = ["Identity", "Unsqueeze", "Reshape", "Flatten", "Expand", "Cast32"]


@st.composite
def cones(draw: st.DrawFn) -> onnx.ModelProto:
    """A model from `ids` [1,S] to `index`: arithmetic, masks and views in any order, one element an id."""
    nodes: list[onnx.NodeProto] = []
    integers, flags = ["ids"], list[str]()
    constants: dict[str, Any] = {
        "axis": np.array([2], np.int64),
        "flat": np.array([1, -1], np.int64),
        "last": np.array([0, 0, 1], np.int64),
        "one": np.array([1], np.int64),
        "to_squeeze": np.array([2], np.int64),
    }

    def add(op: str, inputs: list[str], **attributes: Any) -> str:
        name = f"v{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def constant() -> str:
        name = f"c{len(constants)}"
        constants[name] = np.array(draw(st.integers(-20, 70)), np.int64)
        return name

    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["compare", "arithmetic", "logic", "where", "view", "clip", "as_integer"]))
        value = draw(st.sampled_from(integers))
        other = draw(st.sampled_from([*integers, constant()]))
        if kind == "compare":
            flags.append(add(draw(st.sampled_from(_COMPARE)), [value, other]))
        elif kind == "arithmetic":
            integers.append(add(draw(st.sampled_from(_ARITHMETIC)), [value, other]))
        elif kind == "clip":
            integers.append(add("Clip", [value, constant(), constant()]))
        elif kind == "view":
            integers.append(view(draw(st.sampled_from(_VIEWS)), value, add))
        elif flags and kind == "logic":
            flag = draw(st.sampled_from(flags))
            pair = [flag, draw(st.sampled_from(flags))]
            flags.append(draw(st.sampled_from([add("Not", [flag]), add("Or", pair), add("And", pair)])))
        elif flags and kind == "where":
            branches = draw(st.permutations([value, other]))
            integers.append(add("Where", [draw(st.sampled_from(flags)), *branches]))
        elif flags and kind == "as_integer":
            integers.append(add("Cast", [draw(st.sampled_from(flags))], to=TensorProto.INT64))
    result = add("Add", [integers[-1], add("Sub", ["ids", "ids"])])
    graph = helper.make_graph(
        nodes,
        "cone",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "S"])],
        [helper.make_tensor_value_info(result, TensorProto.INT64, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def view(kind: str, value: str, add: object) -> str:
    """A view of `value` and back, so that every value stays [1,S]."""
    assert callable(add)
    if kind == "Unsqueeze":
        return str(add("Squeeze", [add("Unsqueeze", [value, "axis"]), "to_squeeze"]))
    if kind == "Reshape":
        return str(add("Reshape", [add("Reshape", [value, "last"]), "flat"]))
    if kind == "Flatten":
        return str(add("Flatten", [value], axis=1))
    if kind == "Expand":
        return str(add("Expand", [value, "one"]))
    if kind == "Cast32":
        return str(add("Cast", [add("Cast", [value], to=TensorProto.INT32)], to=TensorProto.INT64))
    return str(add("Identity", [value]))


def graph_of(model: onnx.ModelProto) -> Graph:
    return build(model, Path()).view


@settings(max_examples=150, deadline=None)
@given(cones())
def test_evaluator_agrees_with_the_reference(model: onnx.ModelProto) -> None:
    output = model.graph.output[0].name
    (expected,) = ReferenceEvaluator(model).run(None, {"ids": IDS[np.newaxis]})
    assert np.array_equal(map_ids(graph_of(model), output, "ids", IDS), np.reshape(expected, -1))


@pytest.mark.parametrize(
    ("body", "consts"),
    [
        ("r = Unsqueeze(ids, a) y = Tile(r, t)", "int64[1] a = {2}, int64[3] t = {1, 1, 3}"),
        ("r = Unsqueeze(ids, a) s = Tile(r, t) y = Tile(s, t)", "int64[1] a = {2}, int64[3] t = {1, 1, 2}"),
        ("r = Unsqueeze(ids, a) y = Concat <axis = -1> (r, r)", "int64[1] a = {2}"),
        (
            "r = Unsqueeze(ids, a) n = Shape(r) s = Expand(one, n) y = Concat <axis = 2> (s, r)",
            "int64[1] a = {2}, int64[1] one = {7}",
        ),
    ],
)
def test_repeated_ids_agree_with_the_reference(body: str, consts: str) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 20]> g (int64[1,S] ids) => (int64[1,S,K] y) <{consts}> {{ {body} }}'
    model = onnx.parser.parse_model(text)
    (expected,) = ReferenceEvaluator(model).run(None, {"ids": IDS[np.newaxis]})
    found = evaluated(graph_of(model), "y", "ids", IDS, lambda value, count: value.reshape(count, -1))
    assert np.array_equal(found, expected[0])


def parsed(body: str, consts: str = "", inputs: str = "int64[1,S] ids") -> Graph:
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({inputs}) => (int64[1,S] y) <{consts}> {{ {body} }}'
    return graph_of(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    ("body", "consts", "inputs", "conditional", "reason"),
    [
        ("y = Mod(ids, c)", "int64 c = {7}", "int64[1,S] ids", False, "Mod"),
        ("y = Add(ids, types)", "", "int64[1,S] ids, int64[1,S] types", True, "types"),
        ("y = Add(ids, c)", "int64[1,3] c = {0, 0, 9}", "int64[1,3] ids", True, "position"),
        ("y = Identity(c)", "int64[1,3] c = {1, 2, 3}", "int64[1,3] ids", False, "does not depend"),
        ("a = Unsqueeze(ids, c) y = Add(a, ids)", "int64[1] c = {2}", "int64[1,4] ids", False, "16 elements for 4"),
        ("n = Shape(ids) l = Gather(n, c) y = Add(ids, l)", "int64 c = {1}", "int64[1,S] ids", True, "position"),
        ("y = Add(ids, big)", "int64[1,4000000] big", "int64[1,4000000] ids", False, "at once"),
    ],
)
def test_what_is_not_a_function_of_the_id(body: str, consts: str, inputs: str, conditional: bool, reason: str) -> None:
    with pytest.raises(NotAMap, match=reason) as caught:
        map_ids(parsed(body, consts, inputs), "y", "ids", IDS)
    assert caught.value.conditional is conditional


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 8), (2, 1, 8)), ((None, None), (1, 1, 9)), ((None,), (1, 9)), ((2, 3), (2, 2, 3)), (None, (1, 1, 9))],
)
def test_prompts_have_the_graphs_own_shape(shape: tuple[int | None, ...] | None, expected: tuple[int, ...]) -> None:
    fed = prompts(np.arange(9), shape, 9)
    assert fed.shape == expected
    assert fed.reshape(-1)[:9].tolist() == list(range(9))
