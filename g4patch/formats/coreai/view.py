"""A program -> one `Graph` for each function, and the way back from its names to the program.

Calls are read through: the body of a called graph stands in its caller's graph, under the address of the
call. What lies inside is never edited (others may call it too); a mask goes in front of the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from g4patch.errors import BundleError
from g4patch.formats.coreai import types
from g4patch.formats.coreai.draft import Draft, Place, Reading
from g4patch.formats.coreai.ops import Meaning, Native, meaning, slice_rows, stretched
from g4patch.formats.coreai.program import Dump, Program
from g4patch.formats.coreai.tables import table
from g4patch.view import SMALL_CONSTANT, Graph, Op, Value

Blob = Callable[[str], bytes | None]
# The name of a value, and where the program reads it: operation and operand number.
_Operand = tuple[str, tuple[int, int]]


def read(program: Program, blob: Blob) -> tuple[Reading, ...]:
    """A reading of every function. `blob` gives the bytes of a blob of at most a few hundred bytes."""
    return tuple(_Builder(program, blob, *entry).reading() for entry in program.entries.items())


@dataclass
class _Scope:
    """One graph as it is called from one place: the names of its values, and the prefix of new names."""

    prefix: str
    calls: tuple[int, ...]
    graphs: tuple[int, ...]
    names: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def next_name(self, op: Dump) -> str:
        """As MLIR prints it. What g4patch inserted is counted apart, so that the others keep their names."""
        kind = "%" if op["results"] else f"{op['name']} "
        kind += "+" if op["ours"] else ""
        self.counts[kind] += 1
        return f"{kind}{self.counts[kind] - 1}"


class _Builder:
    """Builds the graph of one function."""

    def __init__(self, program: Program, blob: Blob, name: str, entry: int) -> None:
        self.name = name
        self.program = program
        self.blob = blob
        self.entry = entry
        self.draft = Draft()

    def reading(self) -> Reading:
        op = self.program.ops[self.entry]
        scope = _Scope("", (), (self.entry,))
        block = self._block(self.entry)
        inputs = []
        for position, (type, name) in enumerate(zip(block["arguments"], _input_names(op), strict=True)):
            value = self.program.arguments[self.entry, 0, 0] + position
            inputs.append(self._define(scope, value, name, type))
        terminator = self._body(scope, block)
        outputs = [self._output(scope, op, terminator, position) for position in range(len(terminator["operands"]))]
        names = {value.name for value in inputs}
        tables = {}
        for node in self.draft.nodes:
            if node.op is Op.GATHER and (data := node.operands["data"]) not in tables:
                found = table(data, self.draft.producers, self.draft.values, self.draft.weights, names)
                if found is not None:
                    tables[data] = found
        graph = Graph(
            name=self.name,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            nodes=tuple(self.draft.nodes),
            values=self.draft.values,
            constants=self.draft.constants,
            tables=tables,
            states=frozenset(
                value.name for value, type in zip(inputs, block["arguments"], strict=True) if types.is_state(type)
            ),
        )
        return Reading(graph, self.draft.uses, self.draft.places)

    def _block(self, graph: int) -> Dump:
        block: Dump = self.program.ops[graph]["regions"][0][0]
        return block

    def _define(self, scope: _Scope, number: int, name: str, type: str) -> Value:
        scope.names[number] = name
        return self.draft.define(name, type, Place(scope.calls, number))

    def _output(self, scope: _Scope, op: Dump, terminator: Dump, position: int) -> str:
        """Results have names of their own, by which hosts know them."""
        name = _at(op["outputs"], position)
        if name is None or name.startswith("%") or name in self.draft.values:
            name = f"%result{position}"
        inner = scope.names[terminator["operands"][position]]
        self.draft.values[name] = Value(name, self.draft.values[inner].dtype, self.draft.values[inner].shape)
        self.draft.places[name] = self.draft.places[inner]
        number = self.program.numbers[id(terminator)]
        self.draft.emit(Op.IDENTITY, terminator["name"], name, {"x": inner}, (name,), uses={"x": (number, position)})
        return name

    def _body(self, scope: _Scope, block: Dump) -> Dump:
        """Emit the operations of a block but the last, which is returned: what the block hands back."""
        *body, terminator = block["ops"]
        for op in body:
            self._operation(scope, op)
        last: Dump = terminator
        return last

    def _operation(self, scope: _Scope, op: Dump) -> None:
        number = self.program.numbers[id(op)]
        base = scope.prefix + scope.next_name(op)
        many = len(op["results"]) > 1
        results = tuple(f"{base}#{i}" if many else base for i in range(len(op["results"])))
        for position, (name, type) in enumerate(zip(results, op["results"], strict=True)):
            self._define(scope, self.program.results[number] + position, name, type)
        if op["name"] == "coreai.constant":
            self._constant(results[0], op)
        elif op["name"] == "coreai.invoke":
            self._call(scope, op, number, base, results)
        elif op["regions"]:
            self._nested(scope, op, number, base, results)
        else:
            self._leaf(scope, op, number, base, results)

    def _constant(self, name: str, op: Dump) -> None:
        declared, attribute = self.draft.values[name], op["attributes"]["value"]
        self.draft.weights.add(name)
        if types.elements(declared) > SMALL_CONSTANT:
            return
        key = types.blob_key(attribute)
        data = self.blob(key) if key is not None else None
        constant = types.inline(attribute, declared) if data is None else types.stored(data, declared)
        if constant is not None:
            self.draft.constants[name] = constant

    def _call(self, scope: _Scope, op: Dump, number: int, address: str, results: tuple[str, ...]) -> None:
        """The body of the called graph, between nodes that hand its arguments in and its results out."""
        graph = self.program.callees[number]
        if graph in scope.graphs:
            raise BundleError(f"the graph {self.program.ops[graph]['symbol']} calls itself", "export the model again")
        inner = _Scope(f"{address}/", (*scope.calls, number), (*scope.graphs, graph))
        block = self._block(graph)
        for position, (operand, type) in enumerate(zip(op["operands"], block["arguments"], strict=True)):
            name = f"{address}/%arg{position}"
            self._define(inner, self.program.arguments[graph, 0, 0] + position, name, type)
            self._alias(scope, scope.names[operand], name, f"{address}({position})", (number, position))
        terminator = self._body(inner, block)
        for returned, name in zip(terminator["operands"], results, strict=True):
            self._alias(inner, inner.names[returned], name, name, None)

    def _alias(self, scope: _Scope, x: str, name: str, address: str, use: tuple[int, int] | None) -> None:
        uses = {"x": use} if use is not None else {}
        self.draft.emit(Op.IDENTITY, "coreai.invoke", address, {"x": x}, (name,), uses=uses, editable=not scope.calls)

    def _nested(self, scope: _Scope, op: Dump, number: int, address: str, results: tuple[str, ...]) -> None:
        """Control flow: its body is shown, so that no lookup is overlooked."""
        operands = [(scope.names[value], (number, at)) for at, value in enumerate(op["operands"])]
        handed_back = []
        for region, blocks in enumerate(op["regions"]):
            for position, block in enumerate(blocks):
                place = f"{address} region {region}.{position}"
                first = self.program.arguments[number, region, position]
                names = tuple(f"{place} %arg{i}" for i in range(len(block["arguments"])))
                for i, (name, type) in enumerate(zip(names, block["arguments"], strict=True)):
                    self._define(scope, first + i, name, type)
                if names:
                    self._opaque(scope, op["name"], place, operands, names)
                terminator = self._body(scope, block)
                at = self.program.numbers[id(terminator)]
                handed_back.append([(scope.names[value], (at, i)) for i, value in enumerate(terminator["operands"])])
        if op["name"] == "coreai.if" and len(handed_back) == 2:
            self._branches(scope, operands[0], zip(results, *handed_back, strict=True))
        else:
            self._opaque(scope, op["name"], address, [*operands, *chain(*handed_back)], results)

    def _branches(self, scope: _Scope, condition: _Operand, choices: Iterable[tuple[str, _Operand, _Operand]]) -> None:
        """Each result of an `if`: what the one or the other branch hands back."""
        for result, then, other in choices:
            read = dict(zip(("condition", "x", "y"), (condition, then, other), strict=True))
            operands = {name: value for name, (value, _) in read.items()}
            uses = {name: use for name, (_, use) in read.items()}
            editable = not scope.calls
            self.draft.emit(Op.BRANCH, "coreai.if", result, operands, (result,), uses=uses, editable=editable)

    def _opaque(
        self,
        scope: _Scope,
        native: str,
        address: str,
        operands: list[_Operand],
        results: tuple[str, ...],
    ) -> None:
        named = {str(i): name for i, (name, _) in enumerate(operands)}
        uses = {str(i): use for i, (_, use) in enumerate(operands)}
        self.draft.emit(Op.OPAQUE, native, address, named, results, uses=uses, editable=not scope.calls)

    def _leaf(self, scope: _Scope, op: Dump, number: int, address: str, results: tuple[str, ...]) -> None:
        names = [scope.names[value] for value in op["operands"]]
        operands = [(name, (number, at)) for at, name in enumerate(names)]
        if len(results) != 1:
            self._opaque(scope, op["name"], address, operands, results)
            return
        native = Native(op["name"], names, results[0], self.draft.values, self.draft.constants)
        rows, shape = slice_rows(native), stretched(native)
        if rows is not None:
            self._slice(native, address, rows)
        elif shape is not None:
            self._stretch(scope, native, address, number, shape)
        elif op["name"].removeprefix("coreai.").endswith("not_equal"):
            self._not_equal(scope, native, number, address)
        else:
            self._meant(scope, native, meaning(native), number, address)

    def _slice(self, native: Native, address: str, rows: NDArray[np.int64]) -> None:
        """A slice of a shape: a gather with an index that the program does not have."""
        index = f"{native.result} index"
        self.draft.constants[index] = rows
        operands = {"data": native.operands[0], "index": index}
        self.draft.emit(Op.GATHER, native.name, address, operands, (native.result,), {"axis": 0})

    def _stretch(self, scope: _Scope, native: Native, address: str, number: int, to: NDArray[np.int64]) -> None:
        """A broadcast along some axes: an expansion to a shape that the program does not have."""
        shape = f"{native.result} shape"
        self.draft.constants[shape] = to
        operands, uses = {"x": native.operands[0], "shape": shape}, {"x": (number, 0)}
        editable = not scope.calls
        self.draft.emit(Op.EXPAND, native.name, address, operands, (native.result,), uses=uses, editable=editable)

    def _not_equal(self, scope: _Scope, native: Native, number: int, address: str) -> None:
        equal = f"{native.result} equal"
        self.draft.values[equal] = Value(equal, "bool", self.draft.values[native.result].shape)
        uses = {"x": (number, 0), "y": (number, 1)}
        operands = dict(zip("xy", native.operands, strict=True))
        self.draft.emit(Op.EQUAL, native.name, equal, operands, (equal,), uses=uses, editable=not scope.calls)
        self.draft.emit(Op.NOT, native.name, address, {"x": equal}, (native.result,))

    def _meant(self, scope: _Scope, native: Native, found: Meaning, number: int, address: str) -> None:
        operands = {name: native.operands[at] for name, at in found.operands.items()}
        uses = {name: (number, at) for name, at in found.operands.items()}
        editable = not scope.calls
        if found.op is Op.GATHER:
            operands["data"] = self.draft.behind_calls(operands["data"])
        self.draft.emit(found.op, native.name, address, operands, (native.result,), found.attributes, uses, editable)


def _input_names(op: Dump) -> Iterator[str]:
    """The names of a graph's arguments: its own where they are there and unmistakable."""
    named = op["inputs"]
    for position in range(len(op["regions"][0][0]["arguments"])):
        name = _at(named, position)
        sound = name and named.count(name) == 1 and not name.startswith("%")
        yield name if name and sound else f"%arg{position}"


def _at(names: list[str | None], position: int) -> str | None:
    return names[position] if position < len(names) else None
