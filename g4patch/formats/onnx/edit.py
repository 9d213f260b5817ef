"""Apply a plan to a ModelProto. Only nodes are added and inputs renamed: nothing else in the proto is touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import EncodeError
from onnx import ModelProto, NodeProto, helper, numpy_helper

from g4patch.cone import NotAMap
from g4patch.edits import Const, GraphEdit, NewNode, Operand, Plan, Redirect
from g4patch.errors import EditError
from g4patch.formats import Model, Staged
from g4patch.formats.onnx.layout import Place
from g4patch.formats.onnx.read import native
from g4patch.formats.onnx.view import OnnxGraph, build
from g4patch.lanes import EVALUATORS
from g4patch.recognise import ids_input
from g4patch.rows import rows_rank
from g4patch.view import SIZES, Graph, Node, Op, Use

_FP16_REASON = (
    "a mask before an fp16 Gather makes onnxruntime's CPU provider convert the whole table to fp32; "
    "this reshape, which changes nothing, prevents it"
)
_WHERE_OPSET = 9
_FIRST_OPSET = 7


def opset(proto: ModelProto) -> int:
    """The version of the default operator set."""
    return next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)


def complete(model: Model, plan: Plan) -> Plan:
    """One edit a block of nodes, and the reshape that keeps fp16 tables as small as they were."""
    graph = native(model).graph
    edits = [part for edit in plan.graph_edits for part in _by_block(graph, edit)]
    masked = {redirect.use for edit in edits for redirect in edit.redirects}
    companions = [
        edit for gather in _gathers_behind(graph.view, masked) if (edit := _keep_fp16(graph, gather)) is not None
    ]
    return Plan((*edits, *companions))


def _by_block(graph: OnnxGraph, edit: GraphEdit) -> Iterator[GraphEdit]:
    """A mask is inserted in each block (graph or branch) that uses it: values do not leave the block they stand in."""
    blocks: dict[str, list[Redirect]] = {}
    for redirect in edit.redirects:
        blocks.setdefault(_place(graph, redirect.use).block, []).append(redirect)
    for redirects in blocks.values():
        yield replace(edit, redirects=tuple(redirects))


def _gathers_behind(view: Graph, uses: Iterable[Use]) -> Iterator[Node]:
    """The gathers whose index comes from these uses, each once."""
    stack = [view.node(use.node) for use in sorted(uses, key=lambda use: (use.node, use.operand), reverse=True)]
    seen: set[str] = set()
    while stack:
        node = stack.pop()
        if node.address in seen:
            continue
        seen.add(node.address)
        if node.op is Op.GATHER:
            yield node
        elif node.op in EVALUATORS:
            stack.extend(reader for use, reader in view.consumers(node.output) if use.operand not in SIZES | {"data"})


def _keep_fp16(graph: OnnxGraph, gather: Node) -> GraphEdit | None:
    """The companion of a masked fp16 gather; None where the trap does not apply."""
    view = graph.view
    table = view.tables.get(gather.operands["data"])
    rows = _returned(view, gather.output)
    uses = view.uses(rows)
    root = ids_input(view, gather.operands["index"])
    if table is None or table.dtype != "float16" or rows in view.outputs or not uses or root is None:
        return None
    places = [graph.places.get((use.node, use.operand)) for use in uses]
    block = rows.removesuffix(graph.own_names.get(rows, rows))
    if any(place is None or place.block != block for place in places):
        return None
    try:
        rank = rows_rank(view, gather, len(table.shape), root)
    except NotAMap:
        return None
    shape = Const("int64", (*(0,) * (rank - 1), -1))
    node = NewNode(Op.RESHAPE, {"x": rows, "shape": shape}, "$rows", reason=_FP16_REASON)
    return GraphEdit(view.name, "onnxruntime-fp16", (node,), tuple(Redirect(use, "$rows") for use in uses))


def _returned(view: Graph, value: str) -> str:
    """A value where the caller has it, if all that a called function does with it is to hand it back."""
    while len(readers := [node for _, node in view.consumers(value)]) == 1:
        if readers[0].op is not Op.IDENTITY or readers[0].editable:
            break
        value = readers[0].output
    return value


def _place(graph: OnnxGraph, use: Use) -> Place:
    try:
        return graph.places[use.node, use.operand]
    except KeyError:
        raise EditError(f"{use.node} has no operand {use.operand} that can be edited", "plan again") from None


def write(model: Model, plan: Plan, staged: Staged) -> None:
    """Serialise the model with the plan applied. Raises EditError where it does not fit or passes protobuf's 2 GB."""
    own = native(model)
    proto = apply(own.proto, plan, model.path.parent)
    try:
        content = proto.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise EditError(
            "the model file would pass protobuf's limit of 2 GB", "save its weights as external data first"
        ) from error
    staged[model.path].write_bytes(content)


def apply(proto: ModelProto, plan: Plan, folder: Path) -> ModelProto:
    """A copy of a model with a plan applied."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    if opset(copy) < _FIRST_OPSET:
        raise EditError(
            f"opset {opset(copy)} has no Equal for token ids", "convert the model to opset 9 or later first"
        )
    graph = build(copy, folder)
    taken = set(graph.names)
    for edit in plan.graph_edits:
        _apply_edit(graph, edit, taken, opset(copy))
    return copy


def _apply_edit(graph: OnnxGraph, edit: GraphEdit, taken: set[str], version: int) -> None:
    places = [_place(graph, redirect.use) for redirect in edit.redirects]
    nodes = places[0].nodes
    uses = [list(place.node.output) for place in places]
    first = next(i for i, node in enumerate(nodes) if list(node.output) in uses)
    lowered = _Lowering(graph.own_names, taken, version)
    for node in edit.nodes:
        lowered.lower(node)
    for offset, proto in enumerate(lowered.protos):
        nodes.insert(first + offset, proto)
    for redirect, place in zip(edit.redirects, places, strict=True):
        place.node.input[place.position] = lowered.names[redirect.value]


_OPS: Mapping[Op, str] = {Op.EQUAL: "Equal", Op.OR: "Or", Op.NOT: "Not", Op.WHERE: "Where", Op.RESHAPE: "Reshape"}


@dataclass
class _Lowering:
    """The protos of one edit, in order, and what its local names became."""

    own_names: Mapping[str, str]
    taken: set[str]
    version: int
    names: dict[str, str] = field(default_factory=dict)
    protos: list[NodeProto] = field(default_factory=list)

    def lower(self, node: NewNode) -> None:
        if node.op not in _OPS:
            raise EditError(f"{node.op} cannot be inserted into an ONNX model", "report this as a defect")
        if node.op is Op.WHERE and self.version < _WHERE_OPSET:
            self.names[node.output] = self.zero(node)
        else:
            inputs = [self.input(operand) for operand in node.operands.values()]
            self.names[node.output] = self.emit(_OPS[node.op], inputs, node.output)

    def zero(self, node: NewNode) -> str:
        """`where(mask, 0, ids)` for opsets without Where: `ids * not(mask)`."""
        zero, ids = node.operands["x"], self.input(node.operands["y"])
        if not isinstance(zero, Const) or zero.value != 0:
            raise EditError(
                f"opset {self.version} has no Where, and the pad id is not 0",
                "convert the model to opset 9 or later first",
            )
        kept = self.emit("Not", [self.input(node.operands["condition"])], "$kept")
        to = helper.np_dtype_to_tensor_dtype(np.dtype(zero.dtype))
        return self.emit("Mul", [ids, self.emit("Cast", [kept], "$factor", to=to)], node.output)

    def input(self, operand: Operand) -> str:
        if isinstance(operand, Const):
            tensor = numpy_helper.from_array(np.array(operand.value, operand.dtype))
            return self.emit("Constant", [], "const", value=tensor)
        return self.names.get(operand) or self.own_names.get(operand, operand)

    def emit(self, op: str, inputs: list[str], local: str, **attributes: Any) -> str:
        name = self.fresh("g4patch/" + local.removeprefix("$"))
        self.protos.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def fresh(self, stem: str) -> str:
        numbered = (f"{stem}_{number}" for number in count(1))
        name = next(name for name in chain([stem], numbered) if name not in self.taken)
        self.taken.add(name)
        return name
