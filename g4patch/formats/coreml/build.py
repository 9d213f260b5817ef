"""Ops as coremltools would write them: what an edit inserts, and what a check expects to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from g4patch.edits import Const, NewNode, Operand
from g4patch.errors import EditError
from g4patch.formats.coreml.proto import Message, mil_pb2
from g4patch.formats.coreml.values import cast_name, data_type, scalar_value
from g4patch.view import Op, Shape, Value

_XY = {"x": "x", "y": "y"}

# Op -> (MIL op, operand -> parameter). All of them exist since iOS 15, so that no opset needs to rise.
_OPS: dict[Op, tuple[str, Mapping[str, str]]] = {
    Op.EQUAL: ("equal", _XY),
    Op.GE: ("greater_equal", _XY),
    Op.GT: ("greater", _XY),
    Op.LE: ("less_equal", _XY),
    Op.LT: ("less", _XY),
    Op.OR: ("logical_or", _XY),
    Op.AND: ("logical_and", _XY),
    Op.NOT: ("logical_not", {"x": "x"}),
    Op.WHERE: ("select", {"condition": "cond", "x": "a", "y": "b"}),
    Op.CAST: ("cast", {"x": "x"}),
}
_SAME_TYPE = frozenset({Op.WHERE})


def parameters(node: NewNode) -> dict[str, Operand]:
    """Parameter of the MIL op -> operand. Raises EditError for an op or an operand that cannot be written."""
    if node.op not in _OPS:
        raise EditError(f"inserting {node.op} into a Core ML package is not supported")
    named = _OPS[node.op][1]
    if set(named) != set(node.operands):
        raise EditError(f"{node.op} needs the operands {', '.join(named)}")
    return {named[key]: operand for key, operand in node.operands.items()}


def constants(node: NewNode) -> dict[str, Message]:
    """Parameter -> value, for the constants that an op brings along."""
    found = {}
    for parameter, operand in parameters(node).items():
        if isinstance(operand, Const):
            if isinstance(operand.value, tuple) or operand.dtype == "int64":
                raise EditError(f"Core ML has no {operand.dtype} constant {operand.value}")
            found[parameter] = scalar_value(operand.dtype, operand.value)
    if node.op is Op.CAST:
        found["dtype"] = scalar_value("string", cast_name(str(node.attributes["dtype"])))
    return found


def operations(
    node: NewNode, output: Value, names: Mapping[str, str], resolve: Callable[[str], str]
) -> Iterator[Message]:
    """The ops of a node: its constants, then itself. `names` gives each constant's name by parameter."""
    values = constants(node)
    inputs = {key: resolve(operand) for key, operand in parameters(node).items() if isinstance(operand, str)}
    for parameter, value in values.items():
        inputs[parameter] = names[parameter]
        yield _constant(names[parameter], value)
    operation = _operation(_OPS[node.op][0], output.name)
    for parameter, name in inputs.items():
        operation.inputs[parameter].arguments.add(name=name)
    operation.outputs[0].type.CopyFrom(_type(output))
    yield operation


def result(node: NewNode, name: str, value: Callable[[str], Value]) -> Value:
    """The output of a node: its dtype and shape follow from its operands."""
    operands = [value(operand) for operand in node.operands.values() if isinstance(operand, str)]
    shape = _broadcast([operand.shape for operand in operands])
    if node.op is Op.CAST:
        return Value(name, str(node.attributes["dtype"]), shape)
    if node.op in _SAME_TYPE:
        chosen = [operand for key, operand in node.operands.items() if key != "condition"]
        dtypes = {item.dtype if isinstance(item, Const) else value(item).dtype for item in chosen}
        if len(dtypes) != 1:
            raise EditError(f"{node.op} would choose between {' and '.join(sorted(map(str, dtypes)))}")
        return Value(name, dtypes.pop(), shape)
    return Value(name, "bool", shape)


def _broadcast(shapes: list[Shape | None]) -> Shape:
    """The shape of an elementwise op. An open dimension is taken to equal what it meets."""
    result: list[int | None] = []
    for shape in shapes:
        if shape is None:
            raise EditError("the rank of a value to mask is not known")
        padded = [1] * (len(shape) - len(result)) + result
        for axis, size in enumerate(shape, len(padded) - len(shape)):
            if padded[axis] == 1 or (padded[axis] is None and size not in (1, None)):
                padded[axis] = size
            elif size not in (1, None, padded[axis]) and padded[axis] is not None:
                raise EditError(f"shapes {shapes} do not broadcast")
        result = padded
    return tuple(result)


def _constant(name: str, value: Message) -> Message:
    operation = _operation("const", name)
    operation.attributes["val"].CopyFrom(value)
    operation.outputs[0].type.CopyFrom(value.type)
    return operation


def _operation(kind: str, name: str) -> Message:
    operation = mil_pb2().Operation(type=kind)
    operation.attributes["name"].CopyFrom(scalar_value("string", name))
    operation.outputs.add(name=name)
    return operation


def _type(value: Value) -> Message:
    """A tensor type, with `unknown` for open dimensions."""
    assert value.dtype is not None
    assert value.shape is not None
    value_type = mil_pb2().ValueType()
    tensor = value_type.tensorType
    tensor.dataType = data_type(value.dtype)
    tensor.rank = len(value.shape)
    for size in value.shape:
        dimension = tensor.dimensions.add()
        if size is None:
            dimension.unknown.SetInParent()
        else:
            dimension.constant.size = size
    return value_type
