"""Whatever arrives as an `.onnx` file is read or refused: one sentence, a hint, nothing written, no crash."""

from __future__ import annotations

import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from g4patch import inspect
from g4patch.cli import main
from g4patch.errors import G4PatchError
from g4patch.report import Report
from tests.conftest import SAMPLES, Copy, sample, tree
from tests.test_onnx_variants import VARIANTS

ONNX_SAMPLES = sorted(path.parent.name for path in SAMPLES.glob("*/model.onnx"))
# A sample is read in a tenth of a second: what a file unfolds to may not take minutes, or all memory.
_SECONDS, _BYTES = 60.0, 1_500_000_000


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `fix` says of a bundle that it must refuse."""
    before = tree(path.parent)
    started = time.monotonic()
    code = main(["fix", str(path)])
    assert time.monotonic() - started < _SECONDS
    captured = capsys.readouterr()
    assert tree(path.parent) == before
    assert (code, captured.out) == (2, ""), captured.out
    message, hint = " ".join(captured.err.split("\n       ", 1)[0].split()), captured.err.partition("\n       ")[2]
    assert message.startswith("error: ")
    assert hint.strip(), message
    assert "Traceback" not in captured.err
    return message


def edited(bundle: Path, edit: Callable[[ModelProto], object]) -> Path:
    """A bundle whose proto was changed in place."""
    proto = onnx.load(bundle, load_external_data=False)
    edit(proto)
    bundle.write_bytes(proto.SerializeToString())
    return bundle


def external(proto: ModelProto) -> list[TensorProto]:
    """The tensors with external data, the largest last: that is a table."""
    stored = [tensor for tensor in proto.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    return sorted(stored, key=lambda tensor: int(np.prod(tensor.dims)))


def entry(proto: ModelProto, key: str, value: str) -> None:
    """Change an entry of every tensor's place."""
    for tensor in external(proto):
        kept = [item for item in tensor.external_data if item.key != key]
        del tensor.external_data[:]
        tensor.external_data.extend([*kept, onnx.StringStringEntryProto(key=key, value=value)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no graph"),
        (b"\x00" * 64, "not an ONNX model"),
        (np.random.default_rng(2).bytes(4096), "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
        (b"PK\x03\x04 a zip", "not an ONNX model"),
        (b'{"model": "json"}', "not an ONNX model"),
    ],
    ids=["empty", "zeros", "random", "lfs", "zip", "json"],
)
def test_not_a_model(content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert said.casefold() in refused(path, capsys).casefold()


def test_a_folder_that_ends_in_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").mkdir()
    refused(tmp_path / "model.onnx", capsys)


def test_wrong_suffix(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    refused(bundle.rename(bundle.with_suffix(".pb")), capsys)
    refused(bundle.with_name("model.onnx.data"), capsys)


def test_another_format_under_this_suffix(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    bundle.write_bytes(next((sample("coreml-fp32")).rglob("model.mlmodel")).read_bytes())
    refused(bundle, capsys)


@pytest.mark.parametrize("part", range(1, 12))
def test_truncated(part: int, copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("mobius-text")
    content = bundle.read_bytes()
    bundle.write_bytes(content[: len(content) * part // 12])
    refused(bundle, capsys)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("../model.onnx.data", "outside"),
        ("/etc/passwd", "outside"),
        ("below/../../model.onnx.data", "outside"),
        ("..\\model.onnx.data", "outside"),
        ("C:\\model.onnx.data", "outside"),
        ("", "outside"),
        (".", "outside"),
        ("model\0.data", "outside"),
        ("elsewhere.data", "missing"),
        ("x" * 300, "cannot be read"),
        ("x" * 5000, "outside"),
        ("two\nlines", "outside"),
    ],
)
def test_external_data_elsewhere(location: str, said: str, copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    shutil.copy(bundle.with_name("model.onnx.data"), bundle.parent.parent / "model.onnx.data")
    assert said in refused(edited(bundle, lambda proto: entry(proto, "location", location)), capsys)


def test_external_data_behind_a_link_out_of_the_folder(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    data = bundle.with_name("model.onnx.data")
    outside = bundle.parent.parent / "outside"
    outside.mkdir()
    shutil.move(data, outside / data.name)
    data.symlink_to(outside / data.name)
    assert "outside" in refused(bundle, capsys)
    data.unlink()
    (bundle.parent / "below").symlink_to(outside)
    assert "outside" in refused(edited(bundle, lambda p: entry(p, "location", f"below/{data.name}")), capsys)


def test_external_data_behind_a_link_within_the_folder(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    data = bundle.with_name("model.onnx.data")
    data.rename(bundle.with_name("blob"))
    data.symlink_to("blob")
    assert inspect(bundle).subject.verdict == "raw"


@pytest.mark.parametrize("size", [0, 1, 100])
def test_external_data_too_short(size: int, copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    os.truncate(bundle.with_name("model.onnx.data"), size)
    assert "ends at" in refused(bundle, capsys)


def test_external_data_is_a_pointer(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    bundle.with_name("model.onnx.data").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git-LFS" in refused(bundle, capsys)


def test_external_data_is_a_pipe(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    bundle.with_name("model.onnx.data").unlink()
    os.mkfifo(bundle.with_name("model.onnx.data"))
    started = time.monotonic()
    assert main(["fix", str(bundle)]) == 2
    assert time.monotonic() - started < _SECONDS
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "-4"),
        ("offset", "four"),
        ("offset", str(2**70)),
        ("length", "-1"),
        ("length", "1"),
        ("length", str(2**63)),
        ("length", "9" * 5000),
    ],
)
def test_external_data_at_no_place(key: str, value: str, copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    refused(edited(copy("onnx-stage"), lambda proto: entry(proto, key, value)), capsys)


@pytest.mark.parametrize("dims", [[-1, 24], [2**62, 2**62], [2**40, 24], [320, -24], [0, 24], [2**24 + 1, 1]])
def test_dimensions_that_cannot_be(dims: list[int], copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    def declare(proto: ModelProto) -> None:
        tensor = external(proto)[-1]
        del tensor.dims[:]
        tensor.dims.extend(dims)

    refused(edited(copy("onnx-stage"), declare), capsys)


@pytest.mark.parametrize("dims", [[2**62], [2**40], [-5]])
def test_prompts_that_cannot_be(dims: list[int], copy: Copy) -> None:
    def declare(proto: ModelProto) -> None:
        ids = next(info for info in proto.graph.input if info.name == "input_ids")
        shape = ids.type.tensor_type.shape
        del shape.dim[:]
        for size in (1, *dims):
            shape.dim.add(dim_value=size)

    bundle = edited(copy("onnx-stage"), declare)
    before = tree(bundle.parent)
    assert main(["fix", str(bundle)]) in (1, 2)
    assert tree(bundle.parent) == before


def test_attributes_of_the_wrong_type(copy: Copy) -> None:
    """An attribute of each kind in turn as each other type: read as something else, or refused."""
    bundle = copy("onnx-stage")
    proto = onnx.load(bundle, load_external_data=False)
    kinds = {
        (node.op_type, a.name): (i, j) for i, node in enumerate(proto.graph.node) for j, a in enumerate(node.attribute)
    }
    assert len(kinds) > 5
    wrong = [
        AttributeProto(type=AttributeProto.FLOAT, f=float("nan")),
        AttributeProto(type=AttributeProto.INT, i=-(2**63)),
        AttributeProto(type=AttributeProto.STRING, s=b"\xff\xfe"),
        AttributeProto(type=AttributeProto.INTS, ints=[2**62, -7]),
        AttributeProto(type=AttributeProto.TENSOR, t=TensorProto(data_type=77, dims=[3])),
        AttributeProto(type=AttributeProto.GRAPH, g=GraphProto()),
    ]
    for number, position in kinds.values():
        for attribute in wrong:
            changed = ModelProto()
            changed.CopyFrom(proto)
            target = changed.graph.node[number].attribute[position]
            name = target.name
            target.CopyFrom(attribute)
            target.name = name
            bundle.write_bytes(changed.SerializeToString())
            looked_at(bundle)


def looked_at(bundle: Path) -> Report | None:
    """What inspect makes of a bundle: a report, or a refusal in words. Anything else is raised."""
    try:
        return inspect(bundle)
    except G4PatchError as error:
        refusal = error
    assert refusal.message
    assert refusal.hint
    return None


def stage(nodes: list[NodeProto], functions: list[onnx.FunctionProto] | None = None) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "stage",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "S"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.zeros((4, 2), np.float32), "table")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, functions=functions or [], opset_imports=opsets)


def function(name: str, nodes: list[NodeProto], outputs: list[str]) -> onnx.FunctionProto:
    return helper.make_function("f", name, ["x"], outputs, nodes, [helper.make_opsetid("", 20)])


def call(name: str, output: str, source: str = "x") -> NodeProto:
    return helper.make_node(name, [source], [output], domain="f")


def function_bomb(*, empty: bool) -> ModelProto:
    """Thirty functions, each of which calls the next ten times: 10^29 nodes, or as many calls of nothing."""
    last = function("f0", [] if empty else [helper.make_node("Neg", ["x"], ["y"])], [] if empty else ["y"])
    functions = [last]
    for level in range(1, 30):
        calls = [call(f"f{level - 1}", f"c{i}") for i in range(10)]
        functions.append(function(f"f{level}", calls, [] if empty else ["c9"]))
    return stage([call("f29", "y", "input_ids")], functions)


def function_that_calls_itself() -> ModelProto:
    return stage([call("f0", "y", "input_ids")], [function("f0", [call("f0", "y")], ["y"])])


def functions_that_call_each_other() -> ModelProto:
    functions = [function("f0", [call("f1", "y")], ["y"]), function("f1", [call("f0", "y")], ["y"])]
    return stage([call("f0", "y", "input_ids")], functions)


def function_with_a_long_name() -> ModelProto:
    name = "f" * 1_000_000
    body = [helper.make_node("Neg", ["x"], [f"n{i}"]) for i in range(1000)]
    return stage([call(name, "y", "input_ids")], [function(name, body, ["n9"])])


def ifs(depth: int) -> ModelProto:
    inner = helper.make_node("Gather", ["table", "input_ids"], ["y"])
    for _ in range(depth):
        graph = helper.make_graph([inner], "g", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
        inner = helper.make_node("If", ["input_ids"], ["y"], then_branch=graph, else_branch=GraphProto())
    return stage([inner])


def many_ifs() -> ModelProto:
    """A graph with many names and many branches that see them all."""
    nodes = [helper.make_node("Neg", ["input_ids"], [f"v{i}"]) for i in range(20_000)]
    output = helper.make_tensor_value_info("b", TensorProto.INT64, None)
    for i in range(5_000):
        graph = helper.make_graph([helper.make_node("Neg", ["v7"], ["b"])], "g", [], [output])
        nodes.append(helper.make_node("If", ["v1"], [f"if{i}"], then_branch=graph, else_branch=graph))
    return stage([*nodes, helper.make_node("Gather", ["table", "v3"], ["y"])])


def circle() -> ModelProto:
    return stage(
        [
            helper.make_node("Identity", ["b"], ["a"]),
            helper.make_node("Identity", ["a"], ["b"]),
            helper.make_node("Gather", ["b", "input_ids"], ["y"]),
        ]
    )


def node_that_reads_itself() -> ModelProto:
    return stage([helper.make_node("Identity", ["a"], ["a"]), helper.make_node("Gather", ["a", "input_ids"], ["y"])])


def value_that_is_made_twice() -> ModelProto:
    nodes = [helper.make_node("Identity", ["input_ids"], ["a"]), helper.make_node("Identity", ["a"], ["input_ids"])]
    return stage([*nodes, helper.make_node("Gather", ["table", "input_ids"], ["y"])])


def long_chain() -> ModelProto:
    nodes = [helper.make_node("Identity", ["input_ids"], ["v0"])]
    nodes += [helper.make_node("Identity", [f"v{i}"], [f"v{i + 1}"]) for i in range(20_000)]
    return stage([*nodes, helper.make_node("Gather", ["table", "v20000"], ["y"])])


def long_chain_to_a_scale() -> ModelProto:
    nodes = [helper.make_node("Constant", [], ["v0"], value_float=2.0)]
    nodes += [helper.make_node("Identity", [f"v{i}"], [f"v{i + 1}"]) for i in range(20_000)]
    nodes.append(helper.make_node("Cast", ["v20000"], ["scale"], to=1))
    rows = helper.make_node("Gather", ["table", "input_ids"], ["rows"])
    return stage([*nodes, rows, helper.make_node("Mul", ["rows", "scale"], ["y"])])


def doubling_shape() -> ModelProto:
    """Expand after Expand: a cone whose evaluation would fill any memory."""
    nodes = [helper.make_node("Constant", [], ["wide"], value_ints=[1 << 14, 1 << 14, 1, 1])]
    nodes.append(helper.make_node("Expand", ["input_ids", "wide"], ["huge"]))
    return stage([*nodes, helper.make_node("Gather", ["table", "huge"], ["y"])])


def doubling_concat() -> ModelProto:
    nodes = [helper.make_node("Constant", [], ["c0"], value_ints=[1] * 8)]
    nodes += [helper.make_node("Concat", [f"c{i}", f"c{i}"], [f"c{i + 1}"], axis=0) for i in range(40)]
    nodes.append(helper.make_node("Add", ["input_ids", "c40"], ["ids"]))
    return stage([*nodes, helper.make_node("Gather", ["table", "ids"], ["y"])])


BOMBS: dict[str, Callable[[], ModelProto]] = {
    "functions that unfold": lambda: function_bomb(empty=False),
    "functions that unfold to nothing": lambda: function_bomb(empty=True),
    "function that calls itself": function_that_calls_itself,
    "functions that call each other": functions_that_call_each_other,
    "function with a long name": function_with_a_long_name,
    "ifs in ifs": lambda: ifs(20),
    "many ifs": many_ifs,
    "circle": circle,
    "node that reads itself": node_that_reads_itself,
    "value that is made twice": value_that_is_made_twice,
    "long chain": long_chain,
    "long chain to a scale": long_chain_to_a_scale,
    "huge expand": doubling_shape,
    "doubling concat": doubling_concat,
}
REFUSED = {
    "functions that unfold",
    "functions that unfold to nothing",
    "function that calls itself",
    "functions that call each other",
    "function with a long name",
    "circle",
    "node that reads itself",
    "value that is made twice",
}


@contextmanager
def little_memory() -> Iterator[None]:
    """An address space that is not much larger than it is now: what fills the memory fails at once."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + _BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="measures memory as Linux tells it")
@pytest.mark.parametrize("name", BOMBS)
def test_bomb(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(BOMBS[name]().SerializeToString())
    with little_memory():
        if name in REFUSED:
            refused(path, capsys)
        else:
            started = time.monotonic()
            looked_at(path)
            assert time.monotonic() - started < _SECONDS


def mutated(content: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Pieces of a file replaced by others: flipped bits, cuts, insertions, repetitions."""
    for at, removed, put in edits:
        at %= len(content) + 1
        content = content[:at] + put + content[at + removed :]
    return content


MUTATIONS = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=4
)


def fuzz(name: str, edits: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    folder = tmp_path / name
    if not folder.exists():
        shutil.copytree(SAMPLES / name, folder)
    bundle = folder / "model.onnx"
    bundle.write_bytes(mutated(sample(name).read_bytes(), edits))
    looked_at(bundle)


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize("name", ONNX_SAMPLES)
@settings(relaxed, max_examples=40, derandomize=True)
@given(edits=MUTATIONS)
@example(edits=[(0, 1, b"")])
def test_mutated_files(name: str, edits: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    fuzz(name, edits, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONNX_SAMPLES)
@settings(relaxed, max_examples=2000)
@given(edits=MUTATIONS)
def test_mutated_files_by_the_thousand(name: str, edits: list[tuple[int, int, bytes]], tmp_path: Path) -> None:
    fuzz(name, edits, tmp_path)


Field = FieldDescriptor
NUMBERS = [0, 1, -1, 2, 7, 9, 11, 16, 32, 48, 1000, 2**31 - 1, 2**40, 2**62, 2**63 - 1, -(2**63)]
NAMES = [
    "",
    "input_ids",
    "table",
    "rows",
    "Gather",
    "Where",
    "Reshape",
    "Squeeze",
    "Slice",
    "Concat",
    "Cast",
    "If",
    "Loop",
]


def messages(message: Message) -> Iterator[Message]:
    """A message and all that it holds."""
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.type == Field.TYPE_MESSAGE:
            for item in value if descriptor.is_repeated else [value]:
                yield from messages(item)


def another(descriptor: FieldDescriptor, draw: random.Random) -> Any:
    """A value for a field, plausible or absurd."""
    values: dict[int, list[Any]] = {
        Field.TYPE_STRING: NAMES,
        Field.TYPE_BYTES: [b"", b"\xff\xfe", bytes(64)],
        Field.TYPE_FLOAT: [0.0, 4.0, float("nan"), float("inf")],
        Field.TYPE_INT32: [number for number in [*range(30), *NUMBERS] if abs(number) < 2**31],
        Field.TYPE_INT64: NUMBERS,
        Field.TYPE_ENUM: [value.number for value in descriptor.enum_type.values] if descriptor.enum_type else [],
    }
    return draw.choice(values.get(descriptor.type, [0]))


def alter(message: Message, draw: random.Random) -> None:
    """Change one field of a message: set it, drop it, or repeat, drop, swap or change one of its items."""
    fields: list[Any] = [d for d, _ in message.ListFields()] or list(message.DESCRIPTOR.fields)
    descriptor = draw.choice(fields)
    field = getattr(message, descriptor.name)
    if not descriptor.is_repeated and descriptor.type != Field.TYPE_MESSAGE:
        setattr(message, descriptor.name, another(descriptor, draw))
    elif not descriptor.is_repeated or not field:
        message.ClearField(descriptor.name)
    elif draw.random() < 0.3:
        del field[draw.randrange(len(field))]
    elif descriptor.type == Field.TYPE_MESSAGE:
        field.append(draw.choice(field)) if draw.random() < 0.5 else field.reverse()
    else:
        field[draw.randrange(len(field))] = another(descriptor, draw)


def fuzz_fields(variant: str, draw: random.Random, folder: Path) -> None:
    path = VARIANTS[variant].write(folder)
    proto = onnx.load(path)
    for _ in range(draw.choice([1, 1, 2, 4])):
        alter(draw.choice(list(messages(proto))), draw)
    path.write_bytes(proto.SerializeToString())
    looked_at(path)


@settings(relaxed, max_examples=300, derandomize=True)
@given(variant=st.sampled_from(sorted(VARIANTS)), draw=st.randoms(use_true_random=False))
def test_altered_fields(variant: str, draw: random.Random, tmp_path: Path) -> None:
    fuzz_fields(variant, draw, tmp_path)


@pytest.mark.slow
@settings(relaxed, max_examples=8_000)
@given(variant=st.sampled_from(sorted(VARIANTS)), draw=st.randoms(use_true_random=False))
def test_altered_fields_by_the_thousand(variant: str, draw: random.Random, tmp_path: Path) -> None:
    fuzz_fields(variant, draw, tmp_path)
