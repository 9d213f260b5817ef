"""What is not the fix stays: every byte of a model that has a bit of everything that ONNX can hold.

The inserted nodes are taken out here by hand, by what an edit is: nodes of a name that starts with `g4patch/` and is
not in the original, and inputs that read what those put out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx.parser
import pytest
from google.protobuf.message import EncodeError, Message
from onnx import ModelProto, TensorProto, helper, numpy_helper

from g4patch import fix, inspect
from g4patch.cli import main
from g4patch.report import Outcome, Status
from g4patch.verdicts import Verdict
from tests.conftest import SAMPLES, Copy, tree

V, L, D = 32, 3, 16
IMAGE, AUDIO, VIDEO = 20, 21, 24
# A field that no version of ONNX has: number 3000, bytes.
UNKNOWN = b"\xc2\xbb\x01\x05hello"

T = TypeVar("T", bound=Message)


def strange(message: T) -> T:
    """Give a message a field that its schema does not know."""
    message.MergeFromString(UNKNOWN)
    return message


GRAPH = """
<ir_version: 11, opset_import: ["" : 20, "local" : 1, "com.example" : 3]>
stage (int64[B,S] input_ids, float[B,S,5] hidden, bool use) => (float[B,S,3,16] per_layer_inputs, float extra)
{
  g4patch_const = Constant <value_int = 1> ()
  ids = Identity(input_ids)
  rows = local.look(table, ids)
  again = local.look(projection, four)
  scaled = Mul(rows, scale)
  layers = Reshape(scaled, tail)
  projected = MatMul(hidden, projection)
  split = Reshape(projected, tail)
  total = Add(layers, split)
  per_layer_inputs = Mul(total, half)
  kept, mask = Dropout(again)
  counted = If (use) <
    then_branch = yes () => (float t) { t = ReduceMax <keepdims = 0> (kept) },
    else_branch = no () => (float t) { s = Gather(projection, four) t = ReduceMin <keepdims = 0> (s) }>
  extra = com.example.Note(counted)
}
<domain: "local", opset_import: ["" : 20]> look (t, i) => (r) { s = Identity(i) r = Gather(t, s) }
<domain: "local", opset_import: ["" : 20]> look (t, i) => (r) { r = Gather(t, i) }
<domain: "com.example", opset_import: ["" : 20]> Note (x) => (y) { y = Identity(x) }
"""


def kitchen_sink(folder: Path) -> ModelProto:
    """A model with a bit of everything; its table is at an odd offset of a file in `folder`."""
    rng = np.random.default_rng(6)
    proto = onnx.parser.parse_model(GRAPH)
    table = rng.standard_normal((V, L * D)).astype(np.float32)
    (folder / "odd.bin").write_bytes(b"#" * 37 + table.tobytes() + b"more")
    tensor = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=table.shape, doc_string="PLE")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("vendor", "x"), ("offset", "37"), ("location", "odd.bin"), ("checksum", "none")):
        tensor.external_data.add(key=key, value=value)
    tensor.external_data.add(key="length", value=str(table.nbytes))
    arrays = {
        "scale": np.array(4, np.float32),
        "tail": np.array([0, 0, L, D]),
        "projection": rng.standard_normal((5, L * D)).astype(np.float32),
        "four": np.array([4]),
        "half": np.array(0.5**0.5, np.float32),
        "g4patch/masked": np.array(1),
    }
    graph = proto.graph
    graph.initializer.extend([tensor, *(numpy_helper.from_array(array, name) for name, array in arrays.items())])
    values = numpy_helper.from_array(np.array([1.5], np.float32), "sparse")
    indices = numpy_helper.from_array(np.array([2]), "")
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [7]))
    graph.quantization_annotation.add(tensor_name="rows").quant_parameter_tensor_names.add(key="SCALE", value="scale")
    graph.value_info.append(helper.make_tensor_value_info("g4patch/is_20", TensorProto.BOOL, ["B", "S"]))
    graph.doc_string = "a stage\twith ütf-8"

    by_type = {node.op_type: node for node in graph.node}
    by_type["Identity"].name = "g4patch/any_1"
    first, second = (node for node in graph.node if node.op_type == "look")
    first.overload, second.overload = "one", "two"
    proto.functions[0].overload, proto.functions[1].overload = "one", "two"
    proto.functions[0].doc_string = "looks up"
    by_type["Note"].attribute.append(helper.make_attribute("raw", b"\xff\xfe\x00bytes"))
    by_type["Note"].attribute.append(helper.make_attribute("many", [b"\x80", b"text"]))
    by_type["Dropout"].output[1] = ""
    by_type["MatMul"].doc_string = "projection"

    proto.producer_name, proto.producer_version, proto.domain, proto.model_version = "kitchen", "9", "sink", 7
    training = proto.training_info.add()
    training.algorithm.CopyFrom(
        helper.make_graph([helper.make_node("Neg", ["scale"], ["g4patch/const"])], "step", [], [])
    )
    training.update_binding.add(key="scale", value="g4patch/const")
    proto.configuration.add(name="two", num_devices=2, device=["a", "b"])
    by_type["MatMul"].device_configurations.add(configuration_id="two", pipeline_stage=1)
    described = [proto, graph, *graph.node, *proto.functions, graph.input[0], tensor, proto.functions[0].node[0]]
    for number, message in enumerate(described):
        message.metadata_props.add(key=f"at {number}", value="kept")  # type: ignore[attr-defined]
    unknown: list[Message] = [proto, graph, *graph.node, *graph.initializer, *graph.input, *proto.functions, training]
    branch = by_type["If"].attribute[0].g
    unknown += [by_type["If"].attribute[0], branch, branch.node[0], proto.configuration[0], proto.opset_import[0]]
    for message in unknown:
        strange(message)
    return proto


def write(folder: Path, proto: ModelProto) -> Path:
    media = {"image_token_id": IMAGE, "audio_token_id": AUDIO, "video_token_id": VIDEO}
    (folder / "config.json").write_text(json.dumps({**media, "text_config": {"pad_token_id": 0, "vocab_size": V}}))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def bodies(nodes: Any) -> Iterator[Any]:
    """A list of nodes and those of all branches in it."""
    yield nodes
    for node in nodes:
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from bodies(graph.node)


def without_the_fix(path: Path, original: ModelProto) -> tuple[bytes, int, int]:
    """The mended file with the new nodes taken out and what read them put back; how many of each there were."""
    proto = ModelProto.FromString(path.read_bytes())
    removed = restored = 0
    for old, new in zip(bodies(original.graph.node), list(bodies(proto.graph.node)), strict=True):
        known = {name for node in old for name in node.output}
        added = [node for node in new if not known.intersection(node.output) and node.name.startswith("g4patch/")]
        names = {name for node in added for name in node.output}
        for node in added:
            new.remove(node)
        removed += len(added)
        for was, now in zip(old, new, strict=True):
            for position, name in enumerate(now.input):
                if name in names:
                    now.input[position] = was.input[position]
                    restored += 1
    return proto.SerializeToString(), removed, restored


def mended(path: Path) -> None:
    report = fix(path)
    assert report.outcome is Outcome.FIXED, (report.subject.verdict, report.findings, report.checks)
    passed = {check.name for check in report.checks if check.status is Status.PASSED}
    assert passed >= {"structure", "row map", "differential"}
    assert inspect(path).subject.verdict is Verdict.PATCHED


def test_reading_and_writing_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, kitchen_sink(tmp_path))
    content = path.read_bytes()
    assert content.count(UNKNOWN) > 30
    assert ModelProto.FromString(content).SerializeToString() == content


def test_kitchen_sink_without_the_fix_is_the_original(tmp_path: Path) -> None:
    proto = kitchen_sink(tmp_path)
    path = write(tmp_path, proto)
    original, data = path.read_bytes(), (tmp_path / "odd.bin").read_bytes()
    mended(path)
    assert path.read_bytes() != original
    back, removed, restored = without_the_fix(path, proto)
    assert (removed, restored) == (10, 1)
    assert back == original
    assert (tmp_path / "odd.bin").read_bytes() == data


def test_names_in_the_model_are_left_to_it(tmp_path: Path) -> None:
    proto = kitchen_sink(tmp_path)
    path = write(tmp_path, proto)
    taken = {"g4patch/masked", "g4patch/is_20", "g4patch/any_1", "g4patch/const"}
    assert all(name.encode() in path.read_bytes() for name in taken)
    mended(path)
    outputs = [
        name
        for nodes in bodies(onnx.load(path, load_external_data=False).graph.node)
        for n in nodes
        for name in n.output
    ]
    ours = [name for name in outputs if name.startswith("g4patch/")]
    assert len(ours) == len(set(ours)) == 10
    assert not taken & set(ours)


def test_a_second_edit_after_the_first(tmp_path: Path) -> None:
    """Mended for two modalities, then for the third: both edits come out again."""
    proto = kitchen_sink(tmp_path)
    path = write(tmp_path, proto)
    original = path.read_bytes()
    (tmp_path / "config.json").write_text(
        json.dumps({"image_token_id": IMAGE, "audio_token_id": AUDIO, "text_config": {"pad_token_id": 0}})
    )
    mended(path)
    once = path.read_bytes()
    write(tmp_path, ModelProto.FromString(once))
    mended(path)
    assert path.read_bytes() != once
    back, removed, restored = without_the_fix(path, proto)
    assert back == original
    assert restored == 1
    assert removed > 10


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SAMPLES.glob("*/model.onnx")))
def test_sample_without_the_fix_is_the_original(name: str, copy: Copy) -> None:
    bundle = copy(name)
    original = bundle.read_bytes()
    proto = ModelProto.FromString(original)
    assert proto.SerializeToString() == original
    fix(bundle)
    assert without_the_fix(bundle, proto)[0] == original


def test_fields_in_another_order(tmp_path: Path) -> None:
    """Other writers put the graph first; nothing is lost, though the fields come out in their order."""
    proto = kitchen_sink(tmp_path)
    path = write(tmp_path, proto)
    head, graph = ModelProto(), ModelProto()
    head.CopyFrom(proto)
    head.ClearField("graph")
    graph.graph.CopyFrom(proto.graph)
    path.write_bytes(graph.SerializeToString() + head.SerializeToString())
    mended(path)
    assert without_the_fix(path, proto)[0] == proto.SerializeToString()


def test_a_mended_model_past_two_gigabytes_is_refused(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = copy("onnx-stage")
    before = tree(bundle.parent)

    def too_large(self: ModelProto) -> bytes:
        raise EncodeError("Failed to serialize proto")

    monkeypatch.setattr(ModelProto, "SerializeToString", too_large)
    assert main(["fix", str(bundle)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "2 GB" in error
    assert "external data" in error
    assert tree(bundle.parent) == before


def test_a_model_past_two_gigabytes_is_refused(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    with bundle.open("r+b") as file:
        file.truncate(2**31)  # a hole: it takes no room
    assert main(["fix", str(bundle)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "2 GB" in error
    assert "external data" in error
