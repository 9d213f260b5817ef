"""Write a plan into a `Model`: insert ops before the redirected uses, redirect those, touch nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from g4patch.edits import GraphEdit, NewNode, Plan
from g4patch.errors import BundleError, EditError
from g4patch.formats import Model, Staged
from g4patch.formats.coreml import build, note
from g4patch.formats.coreml.model import block, functions, native
from g4patch.formats.coreml.proto import Message
from g4patch.formats.coreml.values import text
from g4patch.formats.coreml.view import Path as OpPath
from g4patch.formats.coreml.view import Reading
from g4patch.view import Use, Value


def write(model: Model, plan: Plan, staged: Staged) -> None:
    """Write `model.mlmodel` with the plan applied to its stage, under the mode of the file it stands for.

    Raises EditError where the plan does not fit the model.
    """
    own = native(model)
    edited = type(own.message)()
    edited.CopyFrom(own.message)
    for graph in dict.fromkeys(edit.graph for edit in plan.graph_edits):
        if graph not in own.readings:
            raise EditError(f"the model has no function {graph}")
        _apply(edited, graph, [edit for edit in plan.graph_edits if edit.graph == graph], own.readings[graph])
    note.write(edited, plan.note)
    (target,) = model.replaced
    content = _serialise(edited)
    with staged[target].open("xb") as file:
        os.chmod(staged[target], target.stat().st_mode & 0o777)
        file.write(content)


def _serialise(message: Message) -> bytes:
    """Deterministic, so that the same plan gives the same bytes."""
    from google.protobuf.message import EncodeError

    try:
        content: bytes = message.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise BundleError(
            "the edited model.mlmodel would exceed the 2 GiB that protobuf can write",
            "export with weights in weight.bin",
        ) from error
    return content


def _apply(message: Message, graph: str, edits: Iterable[GraphEdit], reading: Reading) -> None:
    """Apply the edits to one graph. Paths hold for the graph before all of them: ops go in from the end."""
    outer = block(message, graph)
    taken = _names(functions(message)[graph][0])
    insertions: list[tuple[OpPath, int, list[Message]]] = []
    for number, edit in enumerate(edits):
        scribe = _Scribe(reading, edit, taken)
        operations = [operation for node in edit.nodes for operation in scribe.write(node)]
        paths = []
        for redirect in edit.redirects:
            paths.append(place(reading, redirect.use)[0])
            binding(outer, reading, redirect.use).name = scribe.resolve(redirect.value)
        insertions.append((_before_all(paths), number, operations))
    for path, _, operations in sorted(insertions, key=lambda insertion: insertion[:2], reverse=True):
        home = _enter(outer, path[:-1])
        for operation in reversed(operations):
            home.operations.insert(path[-1], operation)


@dataclass
class _Scribe:
    """Gives the values of one edit names of the function and writes its nodes as ops."""

    reading: Reading
    edit: GraphEdit
    taken: set[str]
    values: dict[str, Value] = field(default_factory=dict)

    def write(self, node: NewNode) -> Iterator[Message]:
        name = self._name(node.output)
        constants = {parameter: self._name(f"{node.output}_{parameter}") for parameter in build.constants(node)}
        output = build.result(node, name, self.value)
        self.values[node.output] = output
        return build.operations(node, output, constants, self.resolve)

    def value(self, name: str) -> Value:
        return self.values.get(name) or self.reading.graph.value(name)

    def resolve(self, name: str) -> str:
        return self.values[name].name if name in self.values else mil_name(self.reading, name)

    def _name(self, local: str) -> str:
        """An identifier that nothing in the function has: the loader would let a second one through."""
        base = re.sub(r"\W", "_", f"{self.edit.rule}_{local.removeprefix('$')}", flags=re.ASCII)
        base = base if re.match(r"[A-Za-z_]", base) else f"_{base}"
        name = next(
            name for number in count(1) if (name := base if number == 1 else f"{base}_{number}") not in self.taken
        )
        self.taken.add(name)
        return name


def mil_name(reading: Reading, value: str) -> str:
    """What a value of the view is called in the file. Raises EditError for values that have no name there."""
    if value not in reading.names:
        raise EditError(f"{reading.graph.name} has no value {value}")
    return reading.names[value]


def place(reading: Reading, use: Use) -> tuple[OpPath, str, int]:
    """Path of the op, parameter and position of a use. Raises EditError where nothing is bound there."""
    found = reading.places.get(use.node)
    if found is None or use.operand not in found.operands:
        raise EditError(f"{reading.graph.name} has no operand {use.operand} at {use.node}")
    return found.path, *found.operands[use.operand]


def binding(outer: Message, reading: Reading, use: Use) -> Message:
    """The binding in a graph's outermost block that a use stands for."""
    path, parameter, position = place(reading, use)
    return _enter(outer, path[:-1]).operations[path[-1]].inputs[parameter].arguments[position]


def _enter(outer: Message, path: OpPath) -> Message:
    """The block at a path of op and block indices."""
    found = outer
    for operation, number in zip(path[::2], path[1::2], strict=True):
        found = found.operations[operation].blocks[number]
    return found


def _before_all(paths: list[OpPath]) -> OpPath:
    """The place before the first of some ops, in the innermost block that holds them all."""
    if not paths:
        raise EditError("an edit without a redirect would have no effect")
    depth = 0
    while len({path[: depth + 2] for path in paths}) == 1 and depth + 2 < min(map(len, paths)):
        depth += 2
    return min(path[: depth + 1] for path in paths)


def _names(function: Message) -> set[str]:
    """Every name in a function: of values, and of ops."""
    names = {item.name for item in function.inputs}
    stack = list(function.block_specializations.values())
    while stack:
        inner = stack.pop()
        names.update(item.name for item in inner.inputs)
        for operation in inner.operations:
            names.update(item.name for item in operation.outputs)
            if "name" in operation.attributes:
                names.add(text(operation.attributes["name"]) or "")
            stack.extend(operation.blocks)
    return names
