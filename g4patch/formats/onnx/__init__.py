"""ONNX models: a `ModelProto` that is read with its external data left alone, and edited in place."""

from g4patch.formats.onnx.check import differences, validate
from g4patch.formats.onnx.edit import complete, write
from g4patch.formats.onnx.read import open_model, probe

NAME = "ONNX"
# Equal and Where take these in every opset that has Where.
MASK_DTYPES = frozenset({"int32", "int64"})

__all__ = ["MASK_DTYPES", "NAME", "complete", "differences", "open_model", "probe", "validate", "write"]
