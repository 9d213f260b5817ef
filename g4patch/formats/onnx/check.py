"""Prove that a written model is the old one plus the plan, and ask onnx's own checker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from google.protobuf.message import Message
from onnx import ModelProto, NodeProto

from g4patch.edits import Plan
from g4patch.formats import Model
from g4patch.formats.onnx.edit import apply
from g4patch.formats.onnx.read import native
from g4patch.formats.onnx.walk import blocks


def validate(model: Model) -> tuple[str, ...]:
    """What `onnx.checker` says against the file, by path: it does not read external data."""
    try:
        onnx.checker.check_model(str(model.graph_file))
    except onnx.checker.ValidationError as error:
        return (str(error).strip().splitlines()[0],)
    return ()


def differences(before: Model, after: Model, plan: Plan) -> tuple[str, ...]:
    """What differs beyond the plan: without the added nodes, and with the old inputs put back, the bytes are equal."""
    old, new = native(before), ModelProto()
    new.CopyFrom(native(after).proto)
    expected = apply(old.proto, plan, before.path.parent)
    found = list(_added_differ(old.proto, expected, new))
    _take_back(old.proto, expected, new)
    if new.SerializeToString() != old.proto.SerializeToString():
        found.extend(_fields_that_differ(old.proto, new, "model"))
    return tuple(dict.fromkeys(found))


def _blocks(proto: ModelProto) -> dict[str, Any]:
    """The list of nodes of each block, by address."""
    return {block.address: block.nodes for block in blocks(proto)}


def _outputs(nodes: Any) -> set[str]:
    return {name for node in nodes for name in node.output if name}


def _is_added(node: NodeProto, known: set[str]) -> bool:
    """Whether a node is none of the old ones: all that we add put something out."""
    outputs = {name for name in node.output if name}
    return bool(outputs) and not known & outputs


def _added_differ(old: ModelProto, expected: ModelProto, new: ModelProto) -> Iterator[str]:
    """Whether the nodes that `new` has and `old` has not are those of the plan, wired as the plan says."""
    before, wanted, got = _blocks(old), _blocks(expected), _blocks(new)
    for address, nodes in got.items():
        known = _outputs(before.get(address, ()))
        ours = _canonical(nodes, known)
        if address not in before:
            yield f"a block was added: {address}"
        elif ours != _canonical(wanted[address], known):
            where = f" in {address}" if address else ""
            yield f"the added nodes{where} are not those of the plan: {', '.join(op for op, *_ in ours) or 'none'}"


def _canonical(nodes: Any, known: set[str]) -> list[tuple[str, tuple[str, ...], bytes]]:
    """Added nodes, and the uses of what they put out, with the names they chose replaced by numbers."""
    numbers: dict[str, str] = {}
    canonical = []
    for node in nodes:
        added = _is_added(node, known)
        if added:
            numbers.update({name: f"#{len(numbers)}" for name in node.output if name})
        if added or any(name in numbers for name in node.input):
            inputs = tuple(numbers.get(name, name) for name in node.input)
            attributes = b"".join(a.SerializeToString() for a in node.attribute) if added else b""
            name = ".".join(filter(None, (node.domain, node.op_type))) if added else f"use by {node.output[0]}"
            canonical.append((name, inputs, attributes))
    return canonical


def _take_back(old: ModelProto, expected: ModelProto, new: ModelProto) -> None:
    """Remove from `new` the nodes that `old` lacks, and restore the inputs that the plan redirected."""
    before, wanted = _blocks(old), _blocks(expected)
    for address, nodes in _blocks(new).items():
        known = _outputs(before.get(address, ()))
        added = [node for node in nodes if _is_added(node, known)]
        gone = _outputs(added)
        for node in added:
            nodes.remove(node)
        olds = {tuple(node.output): node for node in before.get(address, ())}
        plans = {tuple(node.output): node for node in wanted.get(address, ())}
        for node in nodes:
            if tuple(node.output) in olds:
                _restore(node, olds[tuple(node.output)], plans.get(tuple(node.output)), gone)


def _restore(node: NodeProto, old: NodeProto, planned: NodeProto | None, gone: set[str]) -> None:
    if planned is None or len(node.input) != len(old.input):
        return
    for position, name in enumerate(node.input):
        if name in gone and planned.input[position] != old.input[position]:
            node.input[position] = old.input[position]


def _fields_that_differ(old: Message, new: Message, name: str) -> Iterator[str]:
    """The smallest named parts in which two messages differ, one line each."""
    for descriptor in old.DESCRIPTOR.fields:
        left, right = getattr(old, descriptor.name), getattr(new, descriptor.name)
        if left == right:
            continue
        where = f"{name}.{descriptor.name}"
        if not descriptor.is_repeated and isinstance(left, Message):
            yield from _fields_that_differ(left, right, where)
        elif descriptor.is_repeated and len(left) != len(right):
            yield f"{where} has {len(right)} entries instead of {len(left)}"
        elif descriptor.is_repeated:
            index = next(i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
            yield f"{where}[{index}] {_label(left[index])} differs"
        else:
            yield f"{where} differs"
    if old == new:
        yield f"{name}: the bytes differ"


def _label(item: Any) -> str:
    label = getattr(item, "name", "") or getattr(item, "key", "")
    return f"({label})" if label else ""
