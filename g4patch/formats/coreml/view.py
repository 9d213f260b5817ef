"""One function of an ML Program as a `Graph`: every op is a node, those around token ids are translated.

Nested blocks (`cond`, `while_loop`) are flattened: their ops stand before the op that holds them, so that a lookup
inside one is seen like any other. What a block does not decide by itself, its inputs and the op's results, is opaque,
so nothing is claimed about ids or rows that pass through control flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from g4patch.errors import BundleError
from g4patch.formats.coreml import tables
from g4patch.formats.coreml.ops import Call, translate
from g4patch.formats.coreml.proto import Message
from g4patch.formats.coreml.tables import Stored
from g4patch.formats.coreml.values import Array, dtype_name, is_state, shape_of, small_array, tensor_type, text
from g4patch.formats.coreml.weights import Weights
from g4patch.view import VIEW_OPS, Graph, Node, Op, Table, Value

# Where an op stands in a function: its index in the outermost block, then block and op index for each nested block.
Path = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a node's op stands, and for each operand the parameter and the position in it."""

    path: Path
    operands: Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class Reading:
    """A graph and the way back from it: node addresses to ops, value names to MIL names."""

    graph: Graph
    places: Mapping[str, Place]
    names: Mapping[str, str]


def read_function(name: str, function: Message, opset: str, weights: Weights) -> Reading:
    """Read one specialisation of a function. Raises BundleError for contents that contradict each other."""
    reader = _Reader(name, int(opset.removeprefix("CoreML")) if opset[6:].isdigit() else 0, weights)
    return reader.read(function, function.block_specializations[opset])


@dataclass
class _Reader:
    name: str
    opset: int
    weights: Weights
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    strings: dict[str, str] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)
    varying: set[str] = field(default_factory=set)
    places: dict[str, Place] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def read(self, function: Message, block: Message) -> Reading:
        scope: dict[str, str] = {}
        declared = (*function.inputs, *block.inputs)
        inputs = [self._declare(item, scope, "") for item in declared]
        self.varying.update(inputs)
        outputs = self._block(block, scope, (), "")
        graph = Graph(
            name=self.name,
            inputs=tuple(self.values[name] for name in inputs),
            outputs=outputs,
            nodes=tuple(self.nodes),
            values=self.values,
            constants=self.constants,
            tables=dict(self._tables(inputs)),
            states=frozenset(name for name, item in zip(inputs, declared, strict=True) if is_state(item.type)),
        )
        return Reading(graph, self.places, self.names)

    def _block(self, block: Message, scope: dict[str, str], path: Path, prefix: str) -> tuple[str, ...]:
        """Read the ops of a block; returns the names of its outputs. `scope` maps MIL names to the view's."""
        for number, operation in enumerate(block.operations):
            self._operation(operation, scope, (*path, number), prefix)
        return tuple(scope.get(name, name) for name in block.outputs)

    def _declare(self, item: Message, scope: dict[str, str], prefix: str) -> str:
        """Bring a named value into scope. Nested blocks may reuse a name; one block may not."""
        name = item.name
        if not name:
            raise self._malformed("a value without a name")
        unique = name if name not in self.names else f"{prefix}{name}"
        if unique in self.names:
            raise self._malformed(f"two values called {name}")
        scope[name] = unique
        self.names[unique] = name
        tensor = tensor_type(item.type)
        dtype = dtype_name(tensor.dataType) if tensor is not None else None
        self.values[unique] = Value(unique, dtype, shape_of(tensor) if tensor is not None else None)
        return unique

    def _operation(self, operation: Message, scope: dict[str, str], path: Path, prefix: str) -> None:
        if operation.type == "const":
            self._const(operation, scope, prefix)
            return
        address = self._address(operation, prefix)
        arguments = {
            parameter: tuple(self._argument(binding, scope, f"{address}.{parameter}") for binding in argument.arguments)
            for parameter, argument in sorted(operation.inputs.items())
        }
        inner = self._nested(operation, scope, path, address, arguments)
        outputs = tuple(self._declare(item, scope, prefix) for item in operation.outputs)
        operands = [name for names in arguments.values() for name in names] + list(inner)
        if self.varying.intersection(operands):
            self.varying.update(outputs)
        else:
            self._store(operation, arguments, outputs)
        if operation.type.startswith("constexpr_"):
            return
        call = Call(operation.type, self.opset, arguments, outputs, self.values, self.constants, self.strings)
        for node, place in translate(call, address, inner):
            self.nodes.append(node)
            self.places[node.address] = Place(path, place)

    def _address(self, operation: Message, prefix: str) -> str:
        """The first output; for an op without outputs its type and name, numbered where not unique."""
        if operation.outputs:
            name = operation.outputs[0].name
            return name if name not in self.names else f"{prefix}{name}"
        name = text(operation.attributes["name"]) if "name" in operation.attributes else None
        base = address = f"{prefix}{operation.type}:{name or ''}"
        number = 2
        while address in self.places:
            address, number = f"{base}#{number}", number + 1
        return address

    def _nested(
        self,
        operation: Message,
        scope: dict[str, str],
        path: Path,
        address: str,
        arguments: Mapping[str, tuple[str, ...]],
    ) -> tuple[str, ...]:
        """Read the blocks of an op; returns their outputs. Block inputs hang on all the op's operands."""
        outputs: list[str] = []
        operands = tuple(name for names in arguments.values() for name in names)
        for number, block in enumerate(operation.blocks):
            prefix, inner = f"{address}/{number}/", dict(scope)
            for item in block.inputs:
                name = self._declare(item, inner, prefix)
                self.nodes.append(Node(Op.OPAQUE, "block input", name, _numbered(operands), (name,), editable=False))
                if self.varying.intersection(operands):
                    self.varying.add(name)
            outputs.extend(self._block(block, inner, (*path, number), prefix))
        return tuple(outputs)

    def _argument(self, binding: Message, scope: Mapping[str, str], place: str) -> str:
        if binding.WhichOneof("binding") != "value":
            return scope.get(binding.name, binding.name)
        name, number = place, 2
        while name in self.values:
            name, number = f"{place}#{number}", number + 1
        self._constant(name, binding.value)
        return name

    def _const(self, operation: Message, scope: dict[str, str], prefix: str) -> None:
        if len(operation.outputs) != 1 or "val" not in operation.attributes:
            raise self._malformed("a const without a value")
        self._constant(self._declare(operation.outputs[0], scope, prefix), operation.attributes["val"])

    def _constant(self, name: str, value: Message) -> None:
        stored = tables.constant(value, self.weights)
        self.values.setdefault(name, Value(name, stored.dtype, stored.shape))
        self.stored[name] = stored
        array, string = small_array(value, self.weights), text(value)
        if array is not None:
            self.constants[name] = array
        if string is not None:
            self.strings[name] = string

    def _store(self, operation: Message, arguments: Mapping[str, tuple[str, ...]], outputs: tuple[str, ...]) -> None:
        """What is stored for the results of an op that no graph input has a part in."""
        parts = {
            parameter: self.stored[name]
            for parameter, names in arguments.items()
            for name in names
            if name in self.stored
        }
        for key, value in operation.attributes.items():
            if key != "name":
                parts[key] = tables.constant(value, self.weights)
        for name in outputs:
            declared = self.values[name]
            self.stored[name] = tables.computed(operation.type, parts, declared.dtype or "", declared.shape)

    def _malformed(self, what: str) -> BundleError:
        return BundleError(f"function {self.name} holds {what}", "the package is malformed: export it again")

    def _tables(self, inputs: list[str]) -> Iterator[tuple[str, Table]]:
        producers = {node.output: node for node in self.nodes if node.outputs}
        for node in self.nodes:
            if node.op is not Op.GATHER:
                continue
            name = node.operands["data"]
            declared = self.values.get(name, Value(name))
            stored = self.stored.get(name)
            if stored is None and _is_handed_in(name, inputs, producers):
                stored = Stored(declared.shape, declared.dtype or "", 0, "handed in as a graph input")
            found = tables.table(name, stored) if stored is not None else None
            if found is not None:
                yield name, found


def _is_handed_in(name: str, inputs: list[str], producers: Mapping[str, Node]) -> bool:
    """Whether a value is a graph input or state, perhaps cast or reshaped."""
    while name not in inputs:
        node = producers.get(name)
        if node is None or (node.op not in VIEW_OPS and node.native != "read_state"):
            return False
        name = node.operands["0" if node.native == "read_state" else "x"]
    return True


def _numbered(names: tuple[str, ...]) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}
