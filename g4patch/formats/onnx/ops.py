"""What ONNX operators mean in the words of `g4patch.view.Op`; whatever says more than the view can is opaque."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto

from g4patch.formats.onnx.tensors import type_name
from g4patch.view import Node, Op, Value

Attributes = Mapping[str, AttributeProto]
Constants = Mapping[str, NDArray[Any]]
Values = Mapping[str, Value]

_BINARY = ("x", "y")
_UNARY = ("x",)
_ONNX: dict[str, tuple[Op, tuple[str, ...]]] = {
    "Gather": (Op.GATHER, ("data", "index")),
    "GatherND": (Op.GATHER, ("data", "index")),
    "GatherElements": (Op.GATHER, ("data", "index")),
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
    "Unsqueeze": (Op.EXPAND_DIMS, ("x", "axes")),
    "Squeeze": (Op.SQUEEZE, ("x", "axes")),
    "Shape": (Op.SHAPE, _UNARY),
    "Concat": (Op.CONCAT, ()),
    "Slice": (Op.SLICE, ("x", "starts", "ends", "axes", "steps")),
    "Expand": (Op.EXPAND, ("x", "shape")),
    "Tile": (Op.TILE, ("x", "repeats")),
    "ConstantOfShape": (Op.EXPAND, ("shape",)),
    "DequantizeLinear": (Op.PASS, ("x", "scale", "zero_point")),
    "QuantizeLinear": (Op.PASS, ("x", "scale", "zero_point")),
    "MatMul": (Op.MATMUL, ()),
    "Gemm": (Op.MATMUL, ()),
    "Conv": (Op.MATMUL, ()),
}
_MICROSOFT: dict[str, tuple[Op, tuple[str, ...]]] = {
    "GatherBlockQuantized": (Op.GATHER, ("data", "index", "scale", "zero_point")),
    "DequantizeLinear": (Op.PASS, ("x", "scale", "zero_point")),
    "MatMulNBits": (Op.MATMUL, ()),
    "MatMulIntegerToFloat": (Op.MATMUL, ()),
}
_DOMAINS = {"": _ONNX, "ai.onnx": _ONNX, "com.microsoft": _MICROSOFT}
_BOOLEAN = frozenset({Op.EQUAL, Op.OR, Op.AND, Op.NOT, Op.GT, Op.GE, Op.LT, Op.LE})


@dataclass(frozen=True)
class Meaning:
    """A node in the view's words. `made` are constants that the view writes as operands and ONNX as attributes."""

    op: Op
    operands: Mapping[str, str]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, NDArray[Any] | TensorProto] = field(default_factory=dict)


def operand_names(node: NodeProto) -> tuple[str, ...]:
    """What the view calls each input of a node."""
    names = _DOMAINS.get(node.domain, {}).get(node.op_type, (Op.OPAQUE, ()))[1]
    return tuple(names[i] if i < len(names) else str(i) for i in range(len(node.input)))


def meaning(
    node: NodeProto,
    attributes: Attributes,
    operands: Mapping[str, str],
    output: str,
    constants: Constants,
    values: Values,
) -> Meaning:
    """What a node means. `operands` are values of the view by `operand_names`, absent inputs left out.

    `output` is its first output.
    """
    op = _DOMAINS.get(node.domain, {}).get(node.op_type, (Op.OPAQUE, ()))[0]
    opaque = Meaning(Op.OPAQUE, operands)
    ints = {key: a.i for key, a in attributes.items() if a.type == AttributeProto.INT}
    if node.op_type == "Transpose" and node.domain in ("", "ai.onnx"):
        return Meaning(Op.OPAQUE, operands, {"perm": tuple(attributes["perm"].ints) if "perm" in attributes else ()})
    if op is Op.OPAQUE or not _complete(op, node, operands):
        return opaque
    if op is Op.GATHER:
        found = _gather(node, ints, operands)
        return opaque if found is None else Meaning(op, operands, found)
    if op is Op.CAST:
        dtype = type_name(ints.get("to", 0))
        return Meaning(op, operands, {"dtype": dtype}) if dtype else opaque
    if op in (Op.EXPAND_DIMS, Op.SQUEEZE):
        axes = _axes(attributes, operands.get("axes"), constants)
        unknown = axes is None and (op is Op.EXPAND_DIMS or "axes" in operands)
        one = {"x": operands["x"]}
        return opaque if unknown else Meaning(op, one, {"axes": axes} if axes is not None else {})
    if op is Op.CONCAT:
        return Meaning(op, operands, {"axis": ints.get("axis", 1)})
    if op is Op.SHAPE:
        return Meaning(op, operands, {"range": (ints.get("start"), ints.get("end"))})
    if op is Op.SLICE:
        ranges = _ranges(attributes, operands, constants)
        return opaque if ranges is None else Meaning(op, operands, {"ranges": ranges})
    if op is Op.RESHAPE:
        return _reshape(node, attributes, ints, operands, f"{output}@shape") or opaque
    if node.op_type == "ConstantOfShape":
        fill = attributes["value"].t if "value" in attributes else np.zeros(1, np.float32)
        return Meaning(op, {"x": f"{output}@value", **operands}, {}, {f"{output}@value": fill})
    if op is Op.CLIP and node.op_type == "Clip" and {"min", "max"} & set(attributes):
        return _clip(attributes, operands, output)
    if node.op_type == "QuantizeLinear":
        return Meaning(op, operands, {"dtype": _quantised(ints, operands, values)})
    if op is Op.PASS and "output_dtype" in ints:
        return Meaning(op, operands, {"dtype": type_name(ints["output_dtype"])})
    return Meaning(op, operands)


_REQUIRED = {
    Op.GATHER: ("data", "index"),
    Op.WHERE: ("condition", "x", "y"),
    Op.PASS: ("x", "scale"),
    Op.CONCAT: (),
    Op.MATMUL: (),
    Op.EXPAND: ("shape",),
    Op.TILE: ("x", "repeats"),
    **dict.fromkeys((Op.EQUAL, Op.OR, Op.AND, Op.GT, Op.GE, Op.LT, Op.LE, Op.ADD, Op.SUB, Op.MUL), _BINARY),
}


def _complete(op: Op, node: NodeProto, operands: Mapping[str, str]) -> bool:
    """Whether a node has the operands that it must have and no more than the view has words for."""
    required = _REQUIRED.get(op, _UNARY)
    if node.op_type in ("Max", "Min") and len(node.input) != 2:
        return False
    known = op in (Op.CONCAT, Op.MATMUL) or not any(name.isdigit() for name in operands)
    return known and all(name in operands for name in required) and len([name for name in node.output if name]) == 1


def _gather(node: NodeProto, ints: Mapping[str, int], operands: Mapping[str, str]) -> dict[str, Any] | None:
    if node.op_type == "Gather":
        return {"axis": ints.get("axis", 0)}
    if node.op_type == "GatherElements":
        return {"axis": ints.get("axis", 0), "along": True}
    if node.op_type == "GatherND":
        return None if ints.get("batch_dims") else {"axis": 0, "nd": True}
    bits, block = ints.get("bits", 4), ints.get("block_size", 128)
    if bits not in (2, 4, 8) or "scale" not in operands:
        return None
    return {"axis": ints.get("gather_axis", 0), "bits": bits, "quantisation": f"{bits}-bit, blocks of {block}"}


def _integers(name: str | None, constants: Constants) -> tuple[int, ...] | None:
    constant = constants.get(name) if name else None
    return None if constant is None or constant.dtype.kind not in "iu" else tuple(constant.reshape(-1).tolist())


def _axes(attributes: Attributes, operand: str | None, constants: Constants) -> tuple[int, ...] | None:
    """Axes are an attribute before opset 13 and an operand since."""
    return tuple(attributes["axes"].ints) if "axes" in attributes else _integers(operand, constants)


def _ranges(
    attributes: Attributes, operands: Mapping[str, str], constants: Constants
) -> dict[int, tuple[int, int]] | None:
    """Axis -> (begin, end) of a Slice with constant bounds and steps of 1, attributes before opset 10."""

    def numbers(key: str) -> tuple[int, ...] | None:
        return tuple(attributes[key].ints) if key in attributes else _integers(operands.get(key), constants)

    starts, ends, axes, steps = (numbers(key) for key in ("starts", "ends", "axes", "steps"))
    if (
        starts is None
        or ends is None
        or (axes is None and "axes" in operands)
        or (steps is None and "steps" in operands)
    ):
        return None
    axes = tuple(range(len(starts))) if axes is None else axes
    if not len(starts) == len(ends) == len(axes) or set(steps or ()) - {1}:
        return None
    return dict(zip(axes, zip(starts, ends, strict=True), strict=True))


def _reshape(
    node: NodeProto, attributes: Attributes, ints: Mapping[str, int], operands: Mapping[str, str], made: str
) -> Meaning | None:
    """Reshape, the attribute form of opset 1 to 4, and Flatten, all with a shape operand of the same meaning."""
    target: tuple[int, ...] | None = None
    if "shape" in operands:
        return Meaning(Op.RESHAPE, operands, {"allowzero": bool(ints.get("allowzero"))})
    if node.op_type == "Flatten":
        target = {0: (1, -1), 1: (0, -1)}.get(ints.get("axis", 1))
    elif "shape" in attributes:
        target = tuple(attributes["shape"].ints)
    if target is None:
        return None
    return Meaning(Op.RESHAPE, {**operands, "shape": made}, {}, {made: np.array(target, np.int64)})


def _clip(attributes: Attributes, operands: Mapping[str, str], output: str) -> Meaning:
    """Clip before opset 11, which takes float32 and has its bounds as attributes."""
    read, made = dict(operands), {}
    for operand, name in (("low", "min"), ("high", "max")):
        if name in attributes:
            read[operand] = f"{output}@{name}"
            made[read[operand]] = np.array(attributes[name].f, np.float32)
    return Meaning(Op.CLIP, read, {}, made)


def _quantised(ints: Mapping[str, int], operands: Mapping[str, str], values: Values) -> str | None:
    """The dtype that QuantizeLinear makes: as stated, else that of the zero point, else uint8."""
    if ints.get("output_dtype"):
        return type_name(ints["output_dtype"])
    zero = values.get(operands.get("zero_point", ""))
    return zero.dtype if zero is not None else "uint8"


def constant(attributes: Attributes) -> NDArray[Any] | TensorProto | None:
    """What a Constant node holds; None for strings and sparse tensors."""
    if "value" in attributes:
        return attributes["value"].t
    numbers: dict[str, tuple[str, str]] = {
        "value_int": ("i", "int64"),
        "value_ints": ("ints", "int64"),
        "value_float": ("f", "float32"),
        "value_floats": ("floats", "float32"),
    }
    for key, (attribute, dtype) in numbers.items():
        if key in attributes:
            return np.array(getattr(attributes[key], attribute), dtype)
    return None


def result_dtype(node: Node, values: Values) -> str | None:
    """The dtype of an output that the file does not state: masks need it, and it follows from the operands."""
    if node.op in _BOOLEAN:
        return "bool"
    if node.op is Op.SHAPE:
        return "int64"
    if "dtype" in node.attributes:
        dtype: str | None = node.attributes["dtype"]
        return dtype
    for key in ("scale", "data", "x", "0"):
        if key in node.operands:
            value = values.get(node.operands[key])
            return value.dtype if value else None
    return None
