"""Compare two models op by op: without the plan, the one after must be the one before, to the last field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from g4patch.edits import Const, GraphEdit, NewNode, Plan, Redirect
from g4patch.errors import EditError
from g4patch.formats import Model
from g4patch.formats.coreml import build, note
from g4patch.formats.coreml.edit import binding, mil_name
from g4patch.formats.coreml.model import block, functions, native
from g4patch.formats.coreml.package import programs
from g4patch.formats.coreml.proto import Message
from g4patch.formats.coreml.values import text
from g4patch.formats.coreml.view import Reading
from g4patch.view import Value


class _Mismatch(Exception):
    """A node of the plan is not in the file as planned."""


def differences(before: Model, after: Model, plan: Plan) -> tuple[str, ...]:
    """What differs beyond the plan, a line each that names function and op; empty if nothing does."""
    old, new = native(before), native(after)
    rest = type(new.message)()
    rest.CopyFrom(new.message)
    lines: list[str] = []
    for graph in dict.fromkeys(edit.graph for edit in plan.graph_edits):
        if graph not in old.readings or graph not in new.readings:
            lines.append(f"{graph}: the plan edits it, and it is not in both models")
            continue
        edits = [edit for edit in plan.graph_edits if edit.graph == graph]
        lines.extend(_take_back(rest, old.message, edits, old.readings[graph], new.readings[graph]))
    if not note.take_back(rest, old.message, plan.note):
        lines.append(f"model: the entry {note.KEY} of its metadata is not the one of the plan")
    lines.extend(_compare(old.message, rest))
    if not lines and not _same(old.message, rest):
        lines.append("the model differs in fields that are not known here")
    return tuple(lines)


def _take_back(
    rest: Message, old: Message, edits: Iterable[GraphEdit], before: Reading, after: Reading
) -> Iterator[str]:
    """Undo edits to one graph in `rest`, a copy of the model after. Yields what is not as planned."""
    graph = before.graph.name
    inner, outer = block(rest, graph), block(old, graph)
    producers = {item.name: operation for operation in _walk(inner) for item in operation.outputs}
    planned: set[str] = set()
    for edit in edits:
        finder = _Finder(edit, before, producers)
        for redirect in edit.redirects:
            try:
                bound = binding(inner, after, redirect.use)
                finder.expect(redirect.value, bound.name)
                bound.CopyFrom(binding(outer, before, redirect.use))
            except (_Mismatch, EditError) as error:
                yield f"{graph}: {_use(redirect)} does not read the value of the plan: {error}"
        planned |= finder.found
    _remove(inner, planned)


@dataclass
class _Finder:
    """Finds the nodes of an edit by structure, from the redirected uses back: names prove nothing."""

    edit: GraphEdit
    before: Reading
    producers: Mapping[str, Message]
    names: dict[str, Value] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)

    def expect(self, local: str, name: str) -> None:
        """A value of the plan is called `name` in the file. Raises _Mismatch where that is something else."""
        node = next((node for node in self.edit.nodes if node.output == local), None)
        if node is None:
            if name != mil_name(self.before, local):
                raise _Mismatch(f"{name or 'a literal'} instead of {local}")
            return
        if local in self.names:
            if self.names[local].name != name:
                raise _Mismatch(f"{name} and {self.names[local].name} both stand for {local}")
            return
        actual = self.producers.get(name)
        if actual is None or name in self.before.names:
            raise _Mismatch(f"{name or 'a literal'} is not {node.op}, which was planned")
        self._match(node, actual, name)

    def _match(self, node: NewNode, actual: Message, name: str) -> None:
        arguments = {
            key: argument.arguments[0].name for key, argument in actual.inputs.items() if len(argument.arguments) == 1
        }
        operands = build.parameters(node)
        for parameter, operand in operands.items():
            if not isinstance(operand, Const):
                self.expect(operand, arguments.get(parameter, ""))
        self.names[node.output] = build.result(node, name, self._value)
        constants = {parameter: arguments.get(parameter, "") for parameter in build.constants(node)}
        planned = list(build.operations(node, self.names[node.output], constants, self._resolve))
        for wanted in planned:
            own = wanted.outputs[0].name
            stored = self.producers.get(own)
            if stored is None or own in self.before.names or not _same(_named_like(wanted, stored), stored):
                raise _Mismatch(f"{own or 'a literal'} is not the {wanted.type} that was planned")
            self.found.add(own)

    def _value(self, name: str) -> Value:
        return self.names.get(name) or self.before.graph.value(name)

    def _resolve(self, name: str) -> str:
        return self.names[name].name if name in self.names else mil_name(self.before, name)


def _named_like(wanted: Message, stored: Message) -> Message:
    """The wanted op under the stored op's own name, which is free."""
    name = text(stored.attributes["name"]) if "name" in stored.attributes else None
    if name:
        wanted.attributes["name"].immediateValue.tensor.strings.values[0] = name
    return wanted


def _use(redirect: Redirect) -> str:
    return f"{redirect.use.operand} of {redirect.use.node}"


def _walk(outer: Message) -> Iterator[Message]:
    """All ops of a block and of the blocks in it."""
    stack = [outer]
    while stack:
        inner = stack.pop()
        for operation in inner.operations:
            yield operation
            stack.extend(operation.blocks)


def _remove(outer: Message, names: set[str]) -> None:
    """Remove the ops whose only output has one of the names."""
    stack = [outer]
    while stack:
        inner = stack.pop()
        for index in reversed(range(len(inner.operations))):
            operation = inner.operations[index]
            if len(operation.outputs) == 1 and operation.outputs[0].name in names:
                del inner.operations[index]
            else:
                stack.extend(operation.blocks)


def _same(left: Message, right: Message) -> bool:
    """Equal in every field, unknown ones too; maps in any order, NaN equal to itself."""
    same: bool = left.SerializeToString(deterministic=True) == right.SerializeToString(deterministic=True)
    return same


def _compare(before: Message, after: Message) -> Iterator[str]:
    old, new = functions(before), functions(after)
    for name in sorted(old.keys() ^ new.keys()):
        yield f"{name}: function {'removed' if name in old else 'added'}"
    for name in sorted(old.keys() & new.keys()):
        (left, opset), (right, _) = old[name], new[name]
        yield from _fields(name, left, right, ("block_specializations",))
        if opset in right.block_specializations:
            yield from _blocks(name, left.block_specializations[opset], right.block_specializations[opset])
    yield from _fields("model", _shell(before), _shell(after), ())


def _shell(message: Message) -> Message:
    """A model without its functions."""
    shell = type(message)()
    shell.CopyFrom(message)
    for program in programs(shell):
        program.message.functions.clear()
    return shell


def _fields(where: str, left: Message, right: Message, but: tuple[str, ...]) -> Iterator[str]:
    """Names of the fields that differ."""
    for descriptor in left.DESCRIPTOR.fields:
        if descriptor.name in but:
            continue
        parts = []
        for message in (left, right):
            part = type(message)()
            for known, value in message.ListFields():
                if known.name == descriptor.name:
                    _copy_field(part, descriptor.name, value)
            parts.append(part)
        if not _same(*parts):
            yield f"{where}: {descriptor.name} differs"


def _copy_field(target: Message, name: str, value: object) -> None:
    """Set one field of any kind: MergeFrom of a message that has only that field."""
    current = getattr(target, name)
    if hasattr(current, "MergeFrom"):
        current.MergeFrom(value)
    elif hasattr(current, "CopyFrom"):
        current.CopyFrom(value)
    else:
        setattr(target, name, value)


def _blocks(where: str, left: Message, right: Message) -> Iterator[str]:
    yield from _fields(where, left, right, ("operations",))
    old, new = _keyed(left), _keyed(right)
    for key in old:
        if key not in new:
            yield f"{where}: {_title(key, old[key])} is gone"
        elif not _same(old[key], new[key]):
            yield f"{where}: {_title(key, old[key])} differs in {_aspects(old[key], new[key])}"
    for key in new:
        if key not in old:
            yield f"{where}: {_title(key, new[key])} was added"
    common = [key for key in old if key in new]
    moved = next((key for key, other in zip(common, (k for k in new if k in old), strict=True) if key != other), None)
    if moved is not None:
        yield f"{where}: {_title(moved, old[moved])} has moved"


def _keyed(outer: Message) -> dict[str, Message]:
    """Ops by the name of their first output, else by their own name; numbered where that is not unique."""
    found: dict[str, Message] = {}
    for operation in outer.operations:
        name = operation.outputs[0].name if operation.outputs else None
        if name is None:
            name = f":{(text(operation.attributes['name']) if 'name' in operation.attributes else None) or ''}"
        key, number = name, 2
        while key in found:
            key, number = f"{name}#{number}", number + 1
        found[key] = operation
    return found


def _title(key: str, operation: Message) -> str:
    return f"{operation.type} {key.removeprefix(':')}"


def _aspects(left: Message, right: Message) -> str:
    """What of an op differs: its inputs and attributes by key, else its fields."""
    words = []
    for name in ("inputs", "attributes"):
        old, new = getattr(left, name), getattr(right, name)
        words += [
            f"{name.removesuffix('s')} {key}"
            for key in sorted({*old, *new})
            if key not in old or key not in new or not _same(old[key], new[key])
        ]
    for name in ("outputs", "blocks"):
        old, new = getattr(left, name), getattr(right, name)
        if len(old) != len(new) or not all(_same(a, b) for a, b in zip(old, new, strict=True)):
            words.append(name)
    if left.type != right.type:
        words.append(f"type ({right.type})")
    return ", ".join(words) or "fields that are not known here"
