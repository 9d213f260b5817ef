"""Show a ModelProto as a `g4patch.view.Graph`, and keep the way back from each use to its place in the proto.

Branches of `If`, bodies of loops and called functions are laid out in one flat list, so that a lookup inside one is
seen. Their values get the address of the node that holds them as a prefix, since ONNX scopes may repeat names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from g4patch.errors import BundleError
from g4patch.formats.onnx.tensors import small_constant, stored_table, type_name
from g4patch.formats.onnx.walk import block_address, graphs
from g4patch.view import Graph, Node, Op, Shape, Table, Value

# Function calls are laid out inline: a few lines of proto could otherwise unfold to any size.
_MOST_NODES = 500_000

_BINARY = ("x", "y")
_UNARY = ("x",)
_SIMPLE: dict[str, tuple[Op, tuple[str, ...]]] = {
    "Gather": (Op.GATHER, ("data", "index")),
    "Where": (Op.WHERE, ("condition", "x", "y")),
    "Equal": (Op.EQUAL, _BINARY),
    "Or": (Op.OR, _BINARY),
    "And": (Op.AND, _BINARY),
    "Not": (Op.NOT, _UNARY),
    "Greater": (Op.GT, _BINARY),
    "GreaterOrEqual": (Op.GE, _BINARY),
    "Less": (Op.LT, _BINARY),
    "LessOrEqual": (Op.LE, _BINARY),
    "Add": (Op.ADD, _BINARY),
    "Sub": (Op.SUB, _BINARY),
    "Mul": (Op.MUL, _BINARY),
    "Clip": (Op.CLIP, ("x", "low", "high")),
    "Max": (Op.CLIP, ("x", "low")),
    "Min": (Op.CLIP, ("x", "high")),
    "Cast": (Op.CAST, _UNARY),
    "Identity": (Op.IDENTITY, _UNARY),
    "Reshape": (Op.RESHAPE, ("x", "shape")),
    "Flatten": (Op.RESHAPE, _UNARY),
    "Unsqueeze": (Op.EXPAND_DIMS, _UNARY),
    "Squeeze": (Op.SQUEEZE, _UNARY),
    "Shape": (Op.SHAPE, _UNARY),
    "Concat": (Op.CONCAT, ()),
    "Slice": (Op.SLICE, ("x", "starts", "ends", "axes", "steps")),
    "Expand": (Op.EXPAND, ("x", "shape")),
    "ConstantOfShape": (Op.EXPAND, ("shape",)),
    "DequantizeLinear": (Op.PASS, ("x", "scale", "zero_point")),
    "MatMul": (Op.MATMUL, ()),
    "Gemm": (Op.MATMUL, ()),
    "Conv": (Op.MATMUL, ()),
}
_MICROSOFT: dict[str, tuple[Op, tuple[str, ...]]] = {
    "GatherBlockQuantized": (Op.GATHER, ("data", "index", "scales", "zero_points")),
    "MatMulNBits": (Op.MATMUL, ()),
    "MatMulIntegerToFloat": (Op.MATMUL, ()),
}
_BOOLEAN = frozenset({Op.EQUAL, Op.OR, Op.AND, Op.NOT, Op.GT, Op.GE, Op.LT, Op.LE})


@dataclass(frozen=True)
class Place:
    """Where a use stands in the proto: the block of nodes, the node in it, and the number of its input.

    `nodes` is the repeated field itself, `block` the address of what holds it ("" for the main graph).
    """

    block: str
    nodes: Any
    node: NodeProto
    position: int


@dataclass(frozen=True)
class Source:
    """The proto behind a node of the view, with its names as the view writes them ("" for an absent input)."""

    node: NodeProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[AttributeProto, ...]


@dataclass(frozen=True)
class OnnxGraph:
    """The view and the ways back: each editable use `(address, operand)`, each node, each stored tensor.

    `own_names` gives the name in the proto for a name in the view. `names` are all names of values and nodes in the
    model, in whatever scope.
    """

    view: Graph
    places: Mapping[tuple[str, str], Place]
    sources: Mapping[str, Source]
    tensors: Mapping[str, TensorProto]
    own_names: Mapping[str, str]
    names: frozenset[str]


def build(proto: ModelProto, folder: Path) -> OnnxGraph:
    """Build the view of a model whose external data lies in `folder`. Raises BundleError for what cannot be one."""
    builder = _Builder(folder, {(f.domain, f.name, f.overload): f for f in proto.functions})
    graph = proto.graph
    scope = _Scope("", {}, {}, graph.node)
    builder.initializers(graph, scope)
    inputs = tuple(_value(info, info.name) for info in graph.input if info.name not in builder.tensors)
    builder.values.update({value.name: value for value in inputs})
    builder.typed(graph, scope)
    builder.nodes_of(graph.node, scope)
    view = Graph(
        graph.name or "main",
        inputs,
        tuple(output.name for output in graph.output),
        tuple(builder.nodes),
        builder.values,
        builder.constants,
        builder.tables,
    )
    return OnnxGraph(view, builder.places, builder.sources, builder.tensors, scope.own_names, frozenset(builder.names))


@dataclass(frozen=True)
class _Scope:
    """Where nodes are being laid out: a prefix for new names, and what names mean here."""

    prefix: str
    known: dict[str, str]
    own_names: dict[str, str]
    nodes: Any
    editable: bool = True
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)
    depth: int = 0

    def inner(self, prefix: str, nodes: Any) -> _Scope:
        """A block in this scope: it sees the names of this one."""
        return _Scope(prefix, dict(self.known), self.own_names, nodes, self.editable, self.attributes, self.depth + 1)

    def define(self, name: str) -> str:
        self.known[name] = self.prefix + name
        self.own_names[self.prefix + name] = name
        return self.known[name]

    def resolve(self, name: str) -> str:
        return self.known.get(name, self.prefix + name)


@dataclass
class _Builder:
    folder: Path
    functions: Mapping[tuple[str, str, str], FunctionProto]
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    tensors: dict[str, TensorProto] = field(default_factory=dict)
    places: dict[tuple[str, str], Place] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    producers: dict[str, Node] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def initializers(self, graph: GraphProto, scope: _Scope) -> None:
        for tensor in graph.initializer:
            self.names.add(tensor.name)
            self.tensor(scope.define(tensor.name), tensor)

    def tensor(self, name: str, tensor: TensorProto) -> None:
        self.tensors[name] = tensor
        self.values[name] = Value(name, type_name(tensor.data_type), tuple(tensor.dims))
        constant = small_constant(tensor, self.folder)
        if constant is not None:
            self.constants[name] = constant

    def typed(self, graph: GraphProto, scope: _Scope) -> None:
        for info in (*graph.value_info, *graph.output):
            name = scope.resolve(info.name)
            self.names.add(info.name)
            self.values.setdefault(name, _value(info, name))
        self.names.update(info.name for info in graph.input)

    def nodes_of(self, nodes: Any, scope: _Scope) -> None:
        for node in nodes:
            self.node(node, scope)
            if len(self.nodes) > _MOST_NODES:
                raise BundleError(f"the model unfolds to more than {_MOST_NODES:,} nodes", "is the file damaged?")

    def node(self, node: NodeProto, scope: _Scope) -> None:
        self.names.update((node.name, *node.input, *node.output))
        attributes = {a.name: _resolved(a, scope) for a in node.attribute}
        if not any(node.output):
            return
        function = self.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            self.call(node, function, scope)
        elif node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            self.constant(scope.define(node.output[0]), attributes)
        elif any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in attributes.values()):
            self.block(node, attributes, scope)
        else:
            self.plain(node, attributes, scope)

    def plain(self, node: NodeProto, attributes: Mapping[str, AttributeProto], scope: _Scope) -> None:
        op, names = _translate(node)
        operands = {
            names[i] if i < len(names) else str(i): (scope.resolve(name), i)
            for i, name in enumerate(node.input)
            if name
        }
        extra: dict[str, Any] = {}
        values = {key: value for key, (value, _) in operands.items()}
        if op is not Op.OPAQUE:
            op, extra, values = self.meaning(op, node, attributes, values, scope)
        self.emit(op, node, values, extra, scope)
        for key, (_, position) in operands.items():
            self.place(scope, self.nodes[-1].address, key, node, position)

    def emit(
        self, op: Op, node: NodeProto, operands: Mapping[str, str], extra: Mapping[str, Any], scope: _Scope
    ) -> None:
        inputs = tuple(scope.resolve(name) if name else "" for name in node.input)
        outputs = tuple(scope.define(name) for name in node.output if name)
        native = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        self.add(Node(op, native, outputs[0], operands, outputs, extra, scope.editable))
        attributes = tuple(_resolved(a, scope) for a in node.attribute)
        self.sources[outputs[0]] = Source(node, inputs, outputs, attributes)
        if op is Op.GATHER:
            self.table(operands["data"], extra)

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.producers.update(dict.fromkeys(node.outputs, node))
        self.infer(node)

    def place(self, scope: _Scope, address: str, operand: str, node: NodeProto, position: int) -> None:
        if scope.editable:
            self.places[address, operand] = Place(scope.prefix, scope.nodes, node, position)

    def infer(self, node: Node) -> None:
        """The dtype of an output that the file does not state: masks need it, and it follows from the operands."""
        known = self.values.get(node.output)
        if node.op is Op.OPAQUE or (known is not None and known.dtype is not None):
            return
        if node.op in _BOOLEAN:
            dtype: str | None = "bool"
        elif node.op is Op.SHAPE:
            dtype = "int64"
        elif node.op is Op.CAST:
            dtype = node.attributes["dtype"]
        else:
            source = node.operands.get("data") or node.operands.get("x") or node.operands.get("0", "")
            dtype = self.values[source].dtype if source in self.values else None
        self.values[node.output] = Value(node.output, dtype, known.shape if known else None)

    def meaning(
        self,
        op: Op,
        node: NodeProto,
        attributes: Mapping[str, AttributeProto],
        operands: dict[str, str],
        scope: _Scope,
    ) -> tuple[Op, dict[str, Any], dict[str, str]]:
        """What a translated op's attributes mean; OPAQUE where it says more than the view can."""
        ints = {key: a.i for key, a in attributes.items() if a.type == AttributeProto.INT}
        if op is Op.GATHER:
            return op, _gather_attributes(node, ints), operands
        if op is Op.CAST:
            dtype = type_name(ints.get("to", 0))
            return (op, {"dtype": dtype}, operands) if dtype else (Op.OPAQUE, {}, operands)
        if op in (Op.EXPAND_DIMS, Op.SQUEEZE):
            axes = self.axes(attributes, operands.pop("1", None))
            unknown = axes is None and (op is Op.EXPAND_DIMS or len(node.input) > 1)
            return (Op.OPAQUE if unknown else op), ({"axes": axes} if axes else {}), operands
        if op is Op.CONCAT:
            return op, {"axis": ints.get("axis", 0)}, operands
        if op is Op.SLICE:
            return op, {"ranges": self.ranges(attributes, operands)}, operands
        if op is Op.SHAPE:
            return op, {"range": (ints.get("start"), ints.get("end"))}, operands
        if op is Op.RESHAPE:
            return self.reshape(node, attributes, ints, operands, scope)
        if node.op_type == "ConstantOfShape":
            fill = attributes["value"].t if "value" in attributes else _FLOAT_ZERO
            self.tensor(name := scope.prefix + node.output[0] + "@value", fill)
            return op, {}, {"x": name, **operands}
        if op is Op.CLIP and (node.op_type != "Clip" and len(node.input) != 2):
            return Op.OPAQUE, {}, operands
        return op, {}, operands

    def ranges(self, attributes: Mapping[str, AttributeProto], operands: Mapping[str, str]) -> dict[int, tuple[int, int]]:
        """Axis -> (begin, end) of a slice; its bounds are attributes before opset 10. Steps other than 1 give none."""

        def integers(name: str) -> list[int] | None:
            if name in attributes:
                return list(attributes[name].ints)
            constant = self.constants.get(operands.get(name, ""))
            return [int(item) for item in constant.reshape(-1)] if constant is not None else None

        begins, ends, axes, steps = (integers(name) for name in ("starts", "ends", "axes", "steps"))
        if begins is None or ends is None or set(steps or [1]) != {1}:
            return {}
        return dict(zip(axes or range(len(begins)), zip(begins, ends, strict=False), strict=False))

    def axes(self, attributes: Mapping[str, AttributeProto], operand: str | None) -> tuple[int, ...] | None:
        """Axes are an attribute before opset 13 and an operand since."""
        if "axes" in attributes:
            return tuple(attributes["axes"].ints)
        constant = self.constants.get(operand) if operand else None
        return tuple(int(axis) for axis in constant.reshape(-1)) if constant is not None else None

    def reshape(
        self,
        node: NodeProto,
        attributes: Mapping[str, AttributeProto],
        ints: Mapping[str, int],
        operands: dict[str, str],
        scope: _Scope,
    ) -> tuple[Op, dict[str, Any], dict[str, str]]:
        """Reshape, the attribute form of opset 1 to 4, and Flatten, all with a shape operand of the same meaning."""
        target: tuple[int, ...] | None = None
        if node.op_type == "Flatten":
            target = {0: (1, -1), 1: (0, -1)}.get(ints.get("axis", 1))
        elif "shape" in attributes:
            target = tuple(attributes["shape"].ints)
        if "shape" in operands:
            return Op.RESHAPE, {"allowzero": bool(ints.get("allowzero"))}, operands
        if target is None:
            return Op.OPAQUE, {}, operands
        name = scope.prefix + node.output[0] + "@shape"
        self.constants[name] = np.array(target, np.int64)
        return Op.RESHAPE, {}, {**operands, "shape": name}

    def constant(self, name: str, attributes: Mapping[str, AttributeProto]) -> None:
        if "value" in attributes:
            self.tensor(name, attributes["value"].t)
            return
        for key, dtype in (("value_int", "int64"), ("value_ints", "int64"), ("value_float", "float32")):
            if key in attributes:
                attribute = attributes[key]
                number = {"value_int": attribute.i, "value_float": attribute.f}.get(key, list(attribute.ints))
                self.constants[name] = np.array(number, dtype)
                self.values[name] = Value(name, dtype, self.constants[name].shape)

    def table(self, name: str, extra: Mapping[str, Any]) -> None:
        """Record what a gather reads, behind casts and a dequantisation, if it is stored or handed in."""
        source, quantisation, dtype = (
            name,
            str(extra.get("quantisation", "")),
            self.values.get(name, Value(name)).dtype,
        )
        while (node := self.producers.get(source)) is not None and node.op in (Op.CAST, Op.IDENTITY, Op.PASS):
            source = node.operands["x"]
            if node.op is Op.PASS:
                quantisation = f"{self.values[source].dtype} dequantised" if source in self.values else ""
        value = self.values.get(source)
        if source in self.tensors:
            table = stored_table(name, self.tensors[source], self.folder, quantisation, dtype, extra)
        elif value is not None and source not in self.producers and value.shape and None not in value.shape:
            shape = tuple(size for size in value.shape if size is not None)
            table = Table(name, shape, value.dtype or "", "graph input", 0, quantisation)
        else:
            return
        self.tables[name] = table

    def call(self, node: NodeProto, function: FunctionProto, scope: _Scope) -> None:
        """Lay out a called function: identities hand its arguments in and its results out."""
        if scope.depth > 30:
            raise BundleError(f"function {function.name} calls itself", "is the file damaged?")
        prefix = f"{scope.prefix}{next(name for name in node.output if name)}@{function.name}/"
        attributes = {a.name: _resolved(a, scope) for a in (*function.attribute_proto, *node.attribute)}
        body = _Scope(prefix, {}, scope.own_names, function.node, False, attributes, scope.depth + 1)
        for position, (formal, actual) in enumerate(zip(function.input, node.input, strict=False)):
            if actual:
                name = body.define(formal)
                self.identity(f"call {function.name}", name, scope.resolve(actual), scope.editable)
                self.place(scope, name, "x", node, position)
        self.nodes_of(function.node, body)
        for formal, actual in zip(function.output, node.output, strict=False):
            if actual:
                self.identity(f"return {function.name}", scope.define(actual), body.resolve(formal), False)

    def identity(self, native: str, name: str, source: str, editable: bool) -> None:
        self.add(Node(Op.IDENTITY, native, name, {"x": source}, (name,), {}, editable))
        self.sources[name] = Source(NodeProto(op_type="Identity"), (source,), (name,), ())

    def block(self, node: NodeProto, attributes: Mapping[str, AttributeProto], scope: _Scope) -> None:
        """Lay out the bodies of If, Loop, Scan: the node itself then stands for what they put out."""
        operands = {str(i): scope.resolve(name) for i, name in enumerate(node.input) if name}
        results: dict[str, str] = {}
        for key, attribute in attributes.items():
            for number, graph in enumerate(graphs(attribute)):
                inner = scope.inner(block_address(scope.prefix, node, attribute, number), graph.node)
                self.initializers(graph, inner)
                formals = tuple(inner.define(info.name) for info in graph.input)
                if formals:
                    self.add(Node(Op.OPAQUE, f"{node.op_type} body", formals[0], operands, formals, {}, False))
                self.nodes_of(graph.node, inner)
                self.typed(graph, inner)
                results |= {f"{key}{number or ''}.{i}": inner.resolve(o.name) for i, o in enumerate(graph.output)}
        self.emit(Op.OPAQUE, node, {**operands, **results}, {}, scope)
        for position, name in enumerate(node.input):
            if name:
                self.place(scope, self.nodes[-1].address, str(position), node, position)


_FLOAT_ZERO = TensorProto(data_type=TensorProto.FLOAT, dims=[1], float_data=[0.0])


def _translate(node: NodeProto) -> tuple[Op, tuple[str, ...]]:
    tables = {"": _SIMPLE, "ai.onnx": _SIMPLE, "com.microsoft": _MICROSOFT}
    return tables.get(node.domain, {}).get(node.op_type, (Op.OPAQUE, ()))


def _resolved(attribute: AttributeProto, scope: _Scope) -> AttributeProto:
    """An attribute, or the one of the function call that it refers to."""
    return scope.attributes.get(attribute.ref_attr_name, attribute) if attribute.ref_attr_name else attribute


def _gather_attributes(node: NodeProto, ints: Mapping[str, int]) -> dict[str, Any]:
    if node.op_type == "Gather":
        return {"axis": ints.get("axis", 0)}
    bits, block = ints.get("bits", 4), ints.get("block_size", 128)
    return {
        "axis": ints.get("gather_axis", 0),
        "bits": bits,
        "quantisation": f"{bits}-bit, blocks of {block}",
    }


def _value(info: ValueInfoProto, name: str) -> Value:
    tensor = info.type.tensor_type
    shape: Shape | None = None
    if tensor.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return Value(name, type_name(tensor.elem_type), shape)
