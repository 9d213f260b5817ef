"""Lay a model's nodes out in one flat list: branches, bodies of loops and called functions where they stand.

Their values get the address of the node that holds them as a prefix, since ONNX scopes may repeat names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

from g4patch.errors import BundleError
from g4patch.formats.onnx import ops
from g4patch.formats.onnx.tables import gathered
from g4patch.formats.onnx.tensors import small_constant, type_name
from g4patch.formats.onnx.walk import block_address, graphs
from g4patch.view import Node, Op, Shape, Table, Value

# Function calls are laid out inline: a few lines of proto could otherwise unfold to any size.
_MOST_NODES = 100_000
_MOST_CHARACTERS = 100_000_000
_DEEPEST_CALL = 30


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
class Scope:
    """Where nodes are being laid out: a prefix for new names, and what names mean here."""

    prefix: str
    own_names: dict[str, str]
    nodes: Any
    outer: Scope | None = None
    editable: bool = True
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)
    depth: int = 0
    known: dict[str, str] = field(default_factory=dict)

    def inner(self, prefix: str, nodes: Any) -> Scope:
        """A block in this scope: it sees the names of this one."""
        return replace(self, prefix=prefix, nodes=nodes, outer=self, known={})

    def define(self, name: str) -> str:
        self.known[name] = self.prefix + name
        self.own_names[self.prefix + name] = name
        return self.known[name]

    def resolve(self, name: str) -> str:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.known:
                return scope.known[name]
            scope = scope.outer
        return self.prefix + name


@dataclass
class Layout:
    """The flat list as it grows, and the ways back. Raises BundleError for what cannot be a model."""

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
    own_names: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    visited: int = 0
    characters: int = 0

    def initializers(self, graph: GraphProto, scope: Scope) -> None:
        for tensor in graph.initializer:
            self.names.add(tensor.name)
            self.hold(scope.define(tensor.name), tensor)
        for sparse in graph.sparse_initializer:
            self.names.add(sparse.values.name)
            self.define(name := scope.define(sparse.values.name))
            self.values[name] = Value(name, type_name(sparse.values.data_type), tuple(sparse.dims))

    def inputs(self, inputs: Sequence[Value], scope: Scope) -> None:
        for value in inputs:
            self.define(scope.define(value.name))
            self.values[value.name] = value

    def hold(self, name: str, stored: TensorProto | NDArray[Any]) -> None:
        """A value that the file stores."""
        self.define(name)
        if isinstance(stored, TensorProto):
            self.tensors[name] = stored
            self.values[name] = Value(name, type_name(stored.data_type), tuple(stored.dims))
            constant = small_constant(stored, self.folder)
        else:
            constant = stored
            self.values[name] = Value(name, str(stored.dtype), stored.shape)
        if constant is not None:
            self.constants[name] = constant

    def define(self, name: str) -> None:
        """Each value is made once and before it is read, so that no walk over the view goes in circles."""
        if name in self.given:
            raise BundleError(f"the value {_short(name)} is made twice", "is the file damaged? onnx.checker says more")
        if name in self.awaited:
            raise BundleError(
                f"the value {_short(name)} is read before it is made",
                "sort the model's nodes, for instance with onnx_graphsurgeon's toposort",
            )
        self.given.add(name)
        self.characters += len(name)
        if self.characters > _MOST_CHARACTERS:
            raise BundleError("the model unfolds to names of absurd length", "is the file damaged?")

    def typed(self, graph: GraphProto, scope: Scope) -> None:
        for info in (*graph.value_info, *graph.output):
            name = scope.resolve(info.name)
            self.names.add(info.name)
            self.values.setdefault(name, value_of(info, name))
        self.names.update(info.name for info in graph.input)

    def nodes_of(self, nodes: Any, scope: Scope) -> None:
        for node in nodes:
            self.visited += 1
            if self.visited > _MOST_NODES:
                raise BundleError(f"the model unfolds to more than {_MOST_NODES:,} nodes", "is the file damaged?")
            self.node(node, scope)

    def node(self, node: NodeProto, scope: Scope) -> None:
        self.names.update((node.name, *node.input, *node.output))
        attributes = {a.name: _resolved(a, scope) for a in node.attribute}
        if not any(node.output):
            return
        function = self.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            self.call(node, function, scope)
        elif node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            self.constant(node, attributes, scope)
        elif any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in attributes.values()):
            self.block(node, attributes, scope)
        else:
            self.plain(node, attributes, scope)

    def constant(self, node: NodeProto, attributes: ops.Attributes, scope: Scope) -> None:
        name = scope.define(next(name for name in node.output if name))
        held = ops.constant(attributes)
        if held is None:
            self.add(Node(Op.OPAQUE, node.op_type, name, {}, (name,), {}, scope.editable))
        else:
            self.hold(name, held)

    def plain(self, node: NodeProto, attributes: ops.Attributes, scope: Scope) -> None:
        named = [(key, name, i) for i, (key, name) in enumerate(zip(ops.operand_names(node), node.input, strict=True))]
        operands = {key: scope.resolve(name) for key, name, _ in named if name}
        self.awaited.update(name for name in operands.values() if name not in self.given)
        outputs = tuple(scope.define(name) for name in node.output if name)
        meant = ops.meaning(node, attributes, operands, outputs[0], self.constants, self.values)
        for name, made in meant.made.items():
            self.hold(name, made)
        inputs = tuple(scope.resolve(name) if name else "" for name in node.input)
        self.sources[outputs[0]] = Source(node, inputs, outputs, tuple(_resolved(a, scope) for a in node.attribute))
        self.add(Node(meant.op, _native(node), outputs[0], meant.operands, outputs, meant.attributes, scope.editable))
        for key, name, position in named:
            if name:
                self.place(scope, outputs[0], key, node, position)
        if meant.op is Op.GATHER and (table := gathered(self, meant.operands["data"], meant.attributes)) is not None:
            self.tables[table.name] = table

    def add(self, node: Node) -> None:
        self.awaited.update(name for name in node.operands.values() if name not in self.given)
        for name in node.outputs:
            self.define(name)
            self.producers[name] = node
        self.nodes.append(node)
        if node.op is Op.IDENTITY and node.operands["x"] in self.constants:
            self.constants[node.output] = self.constants[node.operands["x"]]
        known = self.values.get(node.output)
        if (node.op is not Op.OPAQUE or "perm" in node.attributes) and (known is None or known.dtype is None):
            dtype = ops.result_dtype(node, self.values)
            self.values[node.output] = Value(node.output, dtype, known.shape if known else None)

    def place(self, scope: Scope, address: str, operand: str, node: NodeProto, position: int) -> None:
        if scope.editable:
            self.places[address, operand] = Place(scope.prefix, scope.nodes, node, position)

    def call(self, node: NodeProto, function: FunctionProto, scope: Scope) -> None:
        """Lay out a called function: identities hand its arguments in and its results out."""
        if scope.depth > _DEEPEST_CALL:
            raise BundleError(f"function {_short(function.name)} calls itself", "is the file damaged?")
        prefix = f"{scope.prefix}{next(name for name in node.output if name)}@{function.name}/"
        attributes = {a.name: _resolved(a, scope) for a in (*function.attribute_proto, *node.attribute)}
        body = Scope(prefix, self.own_names, function.node, None, False, attributes, scope.depth + 1)
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

    def block(self, node: NodeProto, attributes: ops.Attributes, scope: Scope) -> None:
        """Lay out the bodies of If, Loop, Scan and the like, then the node itself: it stands for what they put out."""
        operands = {str(i): scope.resolve(name) for i, name in enumerate(node.input) if name}
        results: dict[str, tuple[str, ...]] = {}
        for key, attribute in attributes.items():
            for number, graph in enumerate(graphs(attribute)):
                inner = scope.inner(block_address(scope.prefix, node, attribute, number), graph.node)
                self.body(node, graph, operands, inner)
                results[f"{key}{number or ''}"] = tuple(inner.resolve(output.name) for output in graph.output)
        outputs = tuple(scope.define(name) for name in node.output if name)
        then, other = results.get("then_branch", ()), results.get("else_branch", ())
        if _native(node) == "If" and "0" in operands and len(then) == len(other) == len(node.output):
            self.branches(node, operands["0"], then, other, scope)
        else:
            inside = {f"{key}.{i}": name for key, names in results.items() for i, name in enumerate(names)}
            self.add(Node(Op.OPAQUE, _native(node), outputs[0], {**operands, **inside}, outputs, {}, scope.editable))
            for position, name in enumerate(node.input):
                if name:
                    self.place(scope, outputs[0], str(position), node, position)
        source = Source(node, tuple(operands.values()), outputs, tuple(attributes.values()))
        self.sources.update(dict.fromkeys(outputs, source))

    def body(self, node: NodeProto, graph: GraphProto, operands: Mapping[str, str], inner: Scope) -> None:
        self.initializers(graph, inner)
        formals = tuple(dict.fromkeys(inner.define(info.name) for info in graph.input))
        formals = tuple(name for name in formals if name not in self.tensors)
        if formals:
            self.add(Node(Op.OPAQUE, f"{node.op_type} body", formals[0], operands, formals, {}, False))
            self.values.update({inner.prefix + i.name: value_of(i, inner.prefix + i.name) for i in graph.input})
        self.typed(graph, inner)
        self.nodes_of(graph.node, inner)

    def branches(
        self, node: NodeProto, condition: str, then: Sequence[str], other: Sequence[str], scope: Scope
    ) -> None:
        """A node for each output of an If: what one branch or the other puts out, so that rows are followed on."""
        for name, *results in zip(node.output, then, other, strict=True):
            if name:
                output = scope.resolve(name)
                operands = {"condition": condition, "x": results[0], "y": results[1]}
                self.add(Node(Op.BRANCH, "If", output, operands, (output,), {}, scope.editable))
                self.place(scope, output, "condition", node, 0)


def _native(node: NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _short(name: str) -> str:
    """A name for a message: strangers' names may be of any length."""
    return name if len(name) <= 100 else f"{name[:100]}..."


def _resolved(attribute: AttributeProto, scope: Scope) -> AttributeProto:
    """An attribute, or the one of the function call that it refers to."""
    return scope.attributes.get(attribute.ref_attr_name, attribute) if attribute.ref_attr_name else attribute


def value_of(info: ValueInfoProto, name: str) -> Value:
    tensor = info.type.tensor_type
    shape: Shape | None = None
    if tensor.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
    return Value(name, type_name(tensor.elem_type), shape)
