"""Faults planted in the weights of an exported stage, by the format's own layout, without g4patch."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import onnx
from coremltools.proto import Model_pb2

# A blob of weight.bin: a head of 64 bytes with the offset of its data at byte 16 (coremltools' MILBlob storage).
_BLOB_HEAD = struct.Struct("<IIQQ")


def add_to(path: Path, offset: int, count: int, value: float = 0.5, dtype: str = "<f4") -> None:
    """Add a number to each of some values in a file."""
    values = np.memmap(path, dtype, "r+", offset, (count,))
    values += np.array(value, dtype)
    values.flush()


def onnx_weight(model: Path, name: str, value: float = 0.5) -> None:
    """Add a number to an initializer that lies in the external data."""
    proto = onnx.load(model, load_external_data=False)
    (tensor,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    where = {entry.key: entry.value for entry in tensor.external_data}
    add_to(model.parent / where["location"], int(where["offset"]), int(where["length"]) // 4, value)


def mil_weight(package: Path, name: str, value: float = 0.5) -> None:
    """Add a number to a constant of an ML Program that lies in weight.bin."""
    inside = package / "Data" / "com.apple.CoreML"
    spec = Model_pb2.Model()
    spec.ParseFromString((inside / "model.mlmodel").read_bytes())
    function = spec.mlProgram.functions["main"]
    (block,) = function.block_specializations.values()
    (constant,) = [op for op in block.operations if op.type == "const" and op.outputs[0].name == name]
    weights, at = inside / "weights" / "weight.bin", constant.attributes["val"].blobFileValue.offset
    _, _, size, data = _BLOB_HEAD.unpack_from(weights.read_bytes(), at)
    add_to(weights, data, size // 4, value)


def coreai_table(asset: Path, offset: int, rows: int, width: int, columns: slice, value: float = 0.5) -> None:
    """Add a number to some columns of a float32 table `[rows, width]` inside a Core AI asset."""
    program = asset / "main.mlirb"
    table = np.memmap(program, "<f4", "r+", offset, (rows, width))
    table[:, columns] += value
    table.flush()
    (asset / "main.hash").write_bytes(hashlib.sha256(program.read_bytes()).digest())


def onnx_table(model: Path, name: str, columns: slice, value: float = 0.5) -> None:
    """Add a number to some columns of a table that lies in the external data."""
    proto = onnx.load(model, load_external_data=False)
    (tensor,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    where = {entry.key: entry.value for entry in tensor.external_data}
    table = np.memmap(model.parent / where["location"], "<f4", "r+", int(where["offset"]), tuple(tensor.dims))
    table[:, columns] += value
    table.flush()
