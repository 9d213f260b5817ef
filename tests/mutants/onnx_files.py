"""Wrong files, made with onnx: faults that no plan asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from g4patch.ple import Lookup
from g4patch.report import Subject
from tests.mutants import STAGE, TWO_FUNCTIONS, TWO_LOOKUPS, Bench, FileChange, Mutant, sample
from tests.mutants.plans import TEXT_ID, WRONG_PLANS
from tests.test_onnx_variants import VARIANTS

Change = Callable[[ModelProto, Lookup], None]


def rewriting(change: Change) -> FileChange:
    """A change of the proto; external data is left where it is."""

    def rewrite(bundle: Path, before: Subject) -> None:
        model = onnx.load(bundle, load_external_data=False)
        change(model, before.analyses[0].lookups[0])
        bundle.write_bytes(model.SerializeToString())

    return rewrite


def producer(graph: GraphProto, value: str) -> NodeProto:
    (found,) = (node for node in graph.node if value in node.output)
    return found


def readers(graph: GraphProto, value: str) -> list[NodeProto]:
    return [node for node in graph.node if value in node.input]


def constant(graph: GraphProto, value: str) -> TensorProto:
    """The tensor behind an initializer or a Constant."""
    for tensor in graph.initializer:
        if tensor.name == value:
            return tensor
    (attribute,) = (entry for entry in producer(graph, value).attribute if entry.name == "value")
    return attribute.t


def put(tensor: TensorProto, array: Any) -> None:
    """Another value in place of a constant's."""
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def insert_before(graph: GraphProto, user: NodeProto, nodes: list[NodeProto], old: str, new: str) -> None:
    """Nodes in front of one that reads `old`, which then reads `new`."""
    at = next(i for i, node in enumerate(graph.node) if list(node.output) == list(user.output))
    for offset, node in enumerate(nodes):
        graph.node.insert(at + offset, node)
    user.input[list(user.input).index(old)] = new


def pad_rows_zeroed(model: ModelProto, lookup: Lookup) -> None:
    """rows * (index != pad): what a float mask behind the lookup would do."""
    graph = model.graph
    (user,) = readers(graph, lookup.output)
    index = producer(graph, lookup.output).input[1]
    pad = numpy_helper.from_array(np.array(0, np.int64), "m_pad")
    last = numpy_helper.from_array(np.array([-1], np.int64), "m_last")
    graph.initializer.extend([pad, last])
    nodes = [
        helper.make_node("Equal", [index, "m_pad"], ["m_is"]),
        helper.make_node("Not", ["m_is"], ["m_kept"]),
        helper.make_node("Cast", ["m_kept"], ["m_factor"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["m_factor", "m_last"], ["m_column"]),
        helper.make_node("Mul", [lookup.output, "m_column"], ["m_rows"]),
    ]
    insert_before(graph, user, nodes, lookup.output, "m_rows")


def scale_dropped(model: ModelProto, lookup: Lookup) -> None:
    (user,) = readers(model.graph, lookup.output)
    (factor,) = (name for name in user.input if name != lookup.output)
    put(constant(model.graph, factor), np.array(1, np.float32))


def table_one_row_off(model: ModelProto, lookup: Lookup) -> None:
    (offset,) = (entry for entry in constant(model.graph, lookup.table.name).external_data if entry.key == "offset")
    offset.value = str(int(offset.value) + 4 * lookup.table.width)


def splice_narrowed(model: ModelProto, lookup: Lookup) -> None:
    """The splice's own condition asks for a text id in place of the image's."""
    graph = model.graph
    first = next(n for n in graph.node if n.op_type == "Equal" and not n.name.startswith("g4patch/"))
    tensor = constant(graph, first.input[1])
    put(tensor, np.array(TEXT_ID, numpy_helper.to_array(tensor).dtype))


def mask_overflows(model: ModelProto, lookup: Lookup) -> None:
    """The PLE mask compares ids after a cast to eight bits, in which text ids equal media ids."""
    graph = model.graph
    graph.node.insert(0, helper.make_node("Cast", ["input_ids"], ["m_narrow"], to=TensorProto.INT8))
    graph.node.insert(1, helper.make_node("Cast", ["m_narrow"], ["m_wide"], to=TensorProto.INT64))
    for token in lookup.judgement.missing:
        equal = producer(graph, f"g4patch/is_{token}")
        equal.input[0] = "m_wide"
        put(constant(graph, equal.input[1]), np.array(np.int64(token).astype(np.int8), np.int64))


def output_renamed(model: ModelProto, lookup: Lookup) -> None:
    output = model.graph.output[0]
    producer(model.graph, output.name).output[0] = "renamed"
    output.name = "renamed"


def output_retyped(model: ModelProto, lookup: Lookup) -> None:
    output = model.graph.output[0]
    producer(model.graph, output.name).output[0] = "m_out"
    model.graph.node.append(helper.make_node("Cast", ["m_out"], [output.name], to=TensorProto.DOUBLE))
    output.type.tensor_type.elem_type = TensorProto.DOUBLE


def extra_op(model: ModelProto, lookup: Lookup) -> None:
    """One more op that changes no number, where nothing was planned."""
    user = readers(model.graph, "hidden_states")[0]
    insert_before(
        model.graph, user, [helper.make_node("Identity", ["hidden_states"], ["m_same"])], "hidden_states", "m_same"
    )


def metadata_changed(model: ModelProto, lookup: Lookup) -> None:
    model.producer_version += ".1"


def _flip(bundle: Path, name: str, at: int) -> None:
    """Alter the top byte of one float32 of a tensor, in the data file."""
    model = onnx.load(bundle, load_external_data=False)
    entries = {entry.key: entry.value for entry in constant(model.graph, name).external_data}
    data = bundle.parent / entries["location"]
    content = bytearray(data.read_bytes())
    content[int(entries.get("offset", 0)) + 4 * at + 3] ^= 0x01
    data.write_bytes(content)


def table_byte(bundle: Path, before: Subject) -> None:
    """One byte of a text row of the PLE table."""
    table = before.analyses[0].lookups[0].table
    _flip(bundle, table.name, TEXT_ID * table.width)


def matrix_byte(bundle: Path, before: Subject) -> None:
    """One byte of a matrix that no lookup reads: the first that a layer is multiplied by."""
    graph = onnx.load(bundle, load_external_data=False).graph
    outside = {tensor.name for tensor in graph.initializer if tensor.external_data}
    matrix = next(node.input[1] for node in graph.node if node.op_type == "MatMul" and node.input[1] in outside)
    _flip(bundle, matrix, 0)


BENCH = Bench(
    "ONNX",
    {
        STAGE: sample("onnx-stage"),
        TWO_LOOKUPS: VARIANTS["split tables, side by side"].write,
        TWO_FUNCTIONS: VARIANTS["If: both"].write,  # ONNX has no functions beside one another: two branches
    },
    (
        *WRONG_PLANS,
        Mutant("PAD rows zeroed", file=rewriting(pad_rows_zeroed)),
        Mutant("mask overflows eight bits", file=rewriting(mask_overflows)),
        Mutant("splice narrowed", file=rewriting(splice_narrowed)),
        Mutant("scale dropped", file=rewriting(scale_dropped)),
        Mutant("table read one row off", file=rewriting(table_one_row_off)),
        Mutant("a byte of the PLE table altered", file=table_byte),
        Mutant("a byte of another weight altered", file=matrix_byte),
        Mutant("output renamed", file=rewriting(output_renamed)),
        Mutant("output retyped", file=rewriting(output_retyped)),
        Mutant("an op more elsewhere", file=rewriting(extra_op)),
        Mutant("metadata changed", file=rewriting(metadata_changed)),
    ),
)
