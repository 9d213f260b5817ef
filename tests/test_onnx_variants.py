"""Every way of writing the lookup that exporters and optimisers have, each a small model, mended end to end.

The oracle is not ours: a mended model must give, bit for bit, what onnxruntime makes of the original model when the
media ids in its prompt were replaced by pad beforehand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from g4patch import check, fix, inspect
from g4patch.cli import main
from g4patch.report import Outcome, Severity, Status
from g4patch.verdicts import Verdict
from tests.conftest import tree

Arrays = Mapping[str, NDArray[Any] | TensorProto]

# 32 ids: image 20, audio 21, EOI 22, EOA 23, video 24. Three layers of 16, as blocks of a quantised table want it.
V, L, D, H = 32, 3, 16, 5
W = L * D
IMAGE, AUDIO, VIDEO = 20, 21, 24
MEDIA = (IMAGE, AUDIO, VIDEO)
CONFIG = {
    "image_token_id": IMAGE,
    "audio_token_id": AUDIO,
    "video_token_id": VIDEO,
    "text_config": {"pad_token_id": 0, "vocab_size": V},
}
RNG = np.random.default_rng(3)
# Every id once, and the media ids among others in another prompt.
IDS = np.stack([np.arange(V), np.random.default_rng(5).permutation(V)])


def floats(*shape: int, dtype: str = "float32") -> NDArray[Any]:
    return RNG.standard_normal(shape).astype(dtype)


def scalar(number: float, dtype: str = "float32") -> NDArray[Any]:
    return np.array(number, dtype)


def integers(dtype: str, *shape: int) -> NDArray[Any]:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


# What the bodies below may name; a model stores those that it uses.
STORED: Arrays = {
    "table": floats(V, W),
    "scale": scalar(D**0.5),
    "tail": np.array([0, 0, L, D]),
    "projection": floats(H, W),
    "half": scalar(0.5**0.5),
    "flat": np.array([-1]),
    "last": np.array([-1]),
    "axis0": np.array([0]),
    "axis1": np.array([1]),
    "axis2": np.array([2]),
    "axis3": np.array([3]),
    "pad": np.array(0),
    "image": np.array(IMAGE),
    "audio": np.array(AUDIO),
    "video": np.array(VIDEO),
    "zero": np.array(0),
    "one": np.array(1),
    "many": np.array(V),
}

# From rows [B, S, W] to what the layers get.
TAIL = """
  scaled = Mul(rows, scale)
  layers = Reshape(scaled, tail)
  projected = MatMul(hidden, projection)
  split = Reshape(projected, tail)
  total = Add(layers, split)
  per_layer_inputs = Mul(total, half)
"""


@dataclass(frozen=True)
class Variant:
    """`body` stands between `input_ids` and `rows`, or is all there is if it makes `per_layer_inputs` itself."""

    body: str
    stored: Arrays = field(default_factory=dict)
    verdict: Verdict = Verdict.RAW
    opset: int = 20
    ids: str = "int64[B,S]"
    inputs: str = ""
    feeds: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    output: str = f"float[B,S,{L},{D}]"
    functions: str = ""
    lookups: int = 1
    edits: int = 1
    overridable: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> ModelProto:
        whole = "per_layer_inputs" in self.body
        body = self.body if whole else self.body + TAIL
        inputs = f"{self.ids} input_ids" + ("" if whole else f", float[B,S,{H}] hidden") + self.inputs
        model = onnx.parser.parse_model(f"""
            <ir_version: {10 if self.opset > 9 else 4},
             opset_import: ["" : {self.opset}, "com.microsoft" : 1, "local" : 1]>
            stage ({inputs}) => ({self.output} per_layer_inputs) {{ {body} }}
            {self.functions}
        """)
        named = set(re.findall(r"\w+", body))
        for name, array in {**STORED, **self.stored}.items():
            if name in named:
                tensor = array if isinstance(array, TensorProto) else numpy_helper.from_array(np.asarray(array))
                model.graph.initializer.append(tensor)
                model.graph.initializer[-1].name = name
                if self.overridable:
                    model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        return model

    def write(self, folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **self.config}))
        path = folder / "model.onnx"
        path.write_bytes(self.model().SerializeToString())
        return path

    def run(self, path: Path, ids: NDArray[np.int64]) -> NDArray[Any]:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        hidden = np.random.default_rng(4).standard_normal((*ids.shape, H)).astype(np.float32)
        given = {
            "input_ids": ids.astype("int32" if self.ids.startswith("int32") else "int64"),
            "hidden": hidden,
            **self.feeds,
        }
        wanted = {info.name for info in session.get_inputs()}
        result: NDArray[Any] = session.run(None, {key: value for key, value in given.items() if key in wanted})[0]
        return result


def packed(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Unsigned numbers of a few bits along the last axis, the first in the lowest bits of each byte."""
    per_byte = 8 // bits
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % per_byte)]
    parts = np.pad(values, padding).reshape(*values.shape[:-1], -1, per_byte)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(parts << shifts, axis=-1).astype(np.uint8)
    return packed


def block_quantised(bits: int, ids: str, scales: str, zero_points: bool, nibbles: bool = False) -> Variant:
    """com.microsoft GatherBlockQuantized over blocks of 16."""

    def numbers(*shape: int) -> NDArray[Any] | TensorProto:
        unpacked = RNG.integers(0, 2**bits, shape, np.uint8)
        if not nibbles:
            return packed(unpacked, bits)
        return helper.make_tensor("", TensorProto.UINT4, shape, packed(unpacked.reshape(-1), 4).tobytes(), raw=True)

    stored: dict[str, NDArray[Any] | TensorProto] = {
        "codes": numbers(V, W),
        "scales": (np.abs(floats(V, W // 16)) + 0.1).astype(scales),
    }
    if zero_points:
        stored["zeros"] = numbers(V, W // 16)
    operands = "codes, input_ids, scales" + (", zeros" if zero_points else "")
    attributes = "block_size = 16, gather_axis = 0, quantize_axis = 1" + ("" if nibbles else f", bits = {bits}")
    body = f"looked_up = com.microsoft.GatherBlockQuantized <{attributes}> ({operands})\n"
    cast = "rows = Cast <to = 1> (looked_up)" if scales == "float16" else "rows = Identity(looked_up)"
    return Variant(body + cast, stored, ids=f"{ids}[B,S]")


BLOCKS = {
    f"{name}, {ids}, {scales}{', zero points' if zero_points else ''}": block_quantised(
        bits, ids, scales, zero_points, nibbles
    )
    for name, bits, nibbles in (("2 bits", 2, False), ("4 bits", 4, False), ("8 bits", 8, False), ("uint4", 4, True))
    for ids in ("int32", "int64")
    for scales in ("float32", "float16")
    for zero_points in (False, True)
}

CODES = {"codes": integers("int8", V, W), "row_scales": np.abs(floats(V, 1)) + 0.1}
SLICES = {f"t{i}": floats(V, D) for i in range(L)}
SPLIT = "\n".join(
    f"r{i} = Gather(t{i}, input_ids) s{i} = Mul(r{i}, scale) u{i} = Unsqueeze(s{i}, axis2)" for i in range(L)
)
SUM = """
  projected = MatMul(hidden, projection)
  split = Reshape(projected, tail)
  total = Add(layers, split)
  per_layer_inputs = Mul(total, half)
"""
HIDDEN = f", float[B,S,{H}] hidden"
HALVES = """
    low = Less(input_ids, half_many) above = Sub(input_ids, half_many)
    low_index = Where(low, input_ids, zero) high_index = Where(low, zero, above)
    lower = Gather(t_low, low_index) upper = Gather(t_high, high_index)
    column = Unsqueeze(low, last) rows = Where(column, lower, upper)
"""
SHARDS = {"half_many": np.array(V // 2), "t_low": floats(V // 2, W), "t_high": floats(V // 2, W)}
# As torch.onnx writes table[ids.unsqueeze(-1), arange(L)] and torch.gather(table, 0, ids.expand(..)).
COORDINATES = (
    """
    column = Unsqueeze(input_ids, axis2) largest = Max(column, arange) shape = Shape(largest)
    wide = Expand(column, shape) upright = Unsqueeze(wide, last)
    every = Expand(arange, shape) layer = Unsqueeze(every, last)
    at = Concat <axis = -1> (upright, layer) found = GatherND(cube, at) layers = Mul(found, scale)
    """
    + SUM
)
CUBE = {"cube": floats(V, L, D), "arange": np.arange(L)}
ELEMENTS = """
    at = Reshape(input_ids, flat) upright = Unsqueeze(at, axis1) shape = Shape(input_ids)
    b = Gather(shape, zero) s = Gather(shape, one) n = Mul(b, s) line = Reshape(n, flat)
    wide = Concat <axis = 0> (line, width) {} found = GatherElements <axis = 0> (table, all)
    back = Concat <axis = 0> (shape, last) rows = Reshape(found, back)
"""
BOUNDS = {f"at{i}": np.array([i * D]) for i in range(L + 1)}
LOOK = '<domain: "local", opset_import: ["" : 20]> look (t, i) => (r) { r = Gather(t, i) }'
USE = {"inputs": ", bool use", "feeds": {"use": np.array(True)}}


def branch(then: str, other: str) -> str:
    return f"""
      rows = If (use) <
        then_branch = yes () => (float[B,S,{W}] a) {{ {then} }},
        else_branch = no () => (float[B,S,{W}] b) {{ {other} }}>
    """


ZEROS = "shape = Shape(input_ids) wide = Concat <axis = 0> (shape, width) {} = ConstantOfShape(wide)"

VARIANTS: dict[str, Variant] = {
    "plain": Variant("rows = Gather(table, input_ids)"),
    "ids int32": Variant("rows = Gather(table, input_ids)", ids="int32[B,S]"),
    "ids cast": Variant("ids = Cast <to = 7> (input_ids) rows = Gather(table, ids)", ids="int32[B,S]"),
    "ids through identity": Variant("ids = Identity(input_ids) rows = Gather(table, ids)"),
    "ids flattened": Variant(
        "ids = Flatten <axis = 0> (input_ids) found = Gather(table, ids) "
        "shape = Shape(input_ids) back = Concat <axis = 0> (shape, last) rows = Reshape(found, back)"
    ),
    "ids of rank 1": Variant(
        "ids = Reshape(input_ids, flat) found = Gather(table, ids) "
        "shape = Shape(input_ids) back = Concat <axis = 0> (shape, last) rows = Reshape(found, back)"
    ),
    "rows of rank 2 to the end": Variant(
        """
        ids = Reshape(input_ids, flat) rows = Gather(table, ids) scaled = Mul(rows, scale)
        layers = Reshape(scaled, to) projected = MatMul(hidden, projection) split = Reshape(projected, to)
        total = Add(layers, split) per_layer_inputs = Mul(total, half)
        """,
        {"to": np.array([-1, L, D])},
        inputs=HIDDEN,
        output=f"float[N,{L},{D}]",
    ),
    **{f"block quantised: {name}": variant for name, variant in BLOCKS.items()},
    "dequantised before": Variant(
        "whole = DequantizeLinear(codes, s) rows = Gather(whole, input_ids)", {**CODES, "s": scalar(0.03)}
    ),
    "dequantised before, a scale a row": Variant(
        "whole = DequantizeLinear <axis = 0> (codes, s) rows = Gather(whole, input_ids)",
        {**CODES, "s": np.abs(floats(V)) + 0.1},
    ),
    "dequantised before, in blocks": Variant(
        "whole = DequantizeLinear <axis = 1, block_size = 16> (codes, s) rows = Gather(whole, input_ids)",
        {**CODES, "s": np.abs(floats(V, W // 16)) + 0.1},
        opset=21,
    ),
    "dequantised after": Variant(
        "found = Gather(codes, input_ids) rows = DequantizeLinear(found, s, z)",
        {"codes": integers("uint8", V, W), "s": scalar(0.03), "z": scalar(7, "uint8")},
    ),
    "dequantised after, in blocks": Variant(
        "found = Gather(codes, input_ids) s = Gather(blocks, input_ids) "
        "rows = DequantizeLinear <axis = 2, block_size = 16> (found, s)",
        {**CODES, "blocks": np.abs(floats(V, W // 16)) + 0.1},
        opset=21,
        lookups=2,
    ),
    "row scales": Variant(
        "found = Gather(codes, input_ids) wide = Cast <to = 1> (found) "
        "s = Gather(row_scales, input_ids) rows = Mul(wide, s)",
        CODES,
        lookups=2,
    ),
    "row scales, most alike": Variant(
        "found = Gather(codes, input_ids) wide = Cast <to = 1> (found) "
        "s = Gather(row_scales, input_ids) rows = Mul(s, wide)",
        {**CODES, "row_scales": np.full((V, 1), 0.25, np.float32)},
        lookups=2,
    ),
    "row scales of rank 1": Variant(
        "found = Gather(codes, input_ids) wide = Cast <to = 1> (found) s = Gather(row_scales, input_ids) "
        "column = Unsqueeze(s, last) rows = Mul(wide, column)",
        {**CODES, "row_scales": np.abs(floats(V)) + 0.1},
        lookups=2,
    ),
    "row scales and offsets": Variant(
        "found = Gather(codes, input_ids) wide = Cast <to = 1> (found) s = Gather(row_scales, input_ids) "
        "z = Gather(row_zeros, input_ids) centred = Sub(wide, z) rows = Mul(centred, s)",
        {**CODES, "row_zeros": floats(V, 1)},
        lookups=3,
    ),
    "split tables": Variant(
        SPLIT + f"layers = Concat <axis = 2> ({', '.join(f'u{i}' for i in range(L))})" + SUM,
        SLICES,
        inputs=HIDDEN,
        opset=24,
        lookups=L,
    ),
    "split tables, side by side": Variant(
        " ".join(f"r{i} = Gather(t{i}, input_ids)" for i in range(L))
        + f"rows = Concat <axis = -1> ({', '.join(f'r{i}' for i in range(L))})",
        SLICES,
        lookups=L,
    ),
    "slices of a bigger table": Variant(
        " ".join(f"t{i} = Slice(table, at{i}, at{i + 1}, axis1) " for i in range(L))
        + SPLIT
        + f"layers = Concat <axis = 2> ({', '.join(f'u{i}' for i in range(L))})"
        + SUM,
        BOUNDS,
        inputs=HIDDEN,
        lookups=L,
    ),
    "one lookup, sliced for each layer": Variant(
        "found = Gather(table, input_ids)"
        + " ".join(
            f"r{i} = Slice(found, at{i}, at{i + 1}, axis2) s{i} = Mul(r{i}, scale) u{i} = Unsqueeze(s{i}, axis2) "
            for i in range(L)
        )
        + f"layers = Concat <axis = 2> ({', '.join(f'u{i}' for i in range(L))})"
        + SUM,
        BOUNDS,
        inputs=HIDDEN,
    ),
    "table [V, L, D]": Variant(
        "found = Gather(table, input_ids) layers = Mul(found, scale)" + SUM,
        {"table": floats(V, L, D)},
        inputs=HIDDEN,
    ),
    "transposed table": Variant(
        "turned = Transpose(across) rows = Gather(turned, input_ids)", {"across": floats(W, V)}
    ),
    "by GatherND": Variant("at = Unsqueeze(input_ids, last) rows = GatherND(table, at)"),
    "by GatherND, two coordinates": Variant(COORDINATES, CUBE, inputs=HIDDEN),
    "by GatherND, three coordinates": Variant(
        """
        upright = Unsqueeze(input_ids, axis2) deep = Unsqueeze(upright, axis2) shape = Shape(input_ids)
        whole = Concat <axis = 0> (shape, inner) ids = Expand(deep, whole) layer = Expand(by_layer, whole)
        element = Expand(by_element, whole) a = Unsqueeze(ids, last) b = Unsqueeze(layer, last)
        c = Unsqueeze(element, last) at = Concat <axis = -1> (a, b, c) found = GatherND(cube, at)
        layers = Mul(found, scale)"""
        + SUM,
        {
            **CUBE,
            "inner": np.array([L, D]),
            "by_layer": np.arange(L)[:, None],
            "by_element": np.arange(D)[None],
        },
        inputs=HIDDEN,
    ),
    "by GatherND, ids cast behind the repeat": Variant(
        COORDINATES.replace(
            "upright = Unsqueeze(wide, last)", "n = Cast <to = 7> (wide) upright = Unsqueeze(n, last)"
        ).replace("Max(column, arange)", "Max(column, small)"),
        {**CUBE, "small": np.arange(L, dtype=np.int32)},
        inputs=HIDDEN,
        ids="int32[B,S]",
    ),
    "by GatherND, two coordinates, fp16": Variant(
        COORDINATES.replace("found = GatherND(cube, at)", "low = GatherND(cube, at) found = Cast <to = 1> (low)"),
        {**CUBE, "cube": floats(V, L, D, dtype="float16")},
        inputs=HIDDEN,
        edits=2,
    ),
    "by GatherElements, Expand": Variant(ELEMENTS.format("all = Expand(upright, wide)"), {"width": np.array([W])}),
    "by GatherElements, Tile": Variant(
        ELEMENTS.format("all = Tile(upright, times)"), {"width": np.array([W]), "times": np.array([1, W])}
    ),
    "by GatherElements, fp16": Variant(
        ELEMENTS.format("all = Tile(upright, times)")
        .replace("found = ", "low = ")
        .replace("rows = Reshape(found", "found = Cast <to = 1> (low) rows = Reshape(found"),
        {"width": np.array([W]), "times": np.array([1, W]), "table": floats(V, W, dtype="float16")},
        edits=2,
    ),
    "split vocabulary": Variant(HALVES, SHARDS),
    "split vocabulary, the upper part first": Variant(
        HALVES.replace("Less(input_ids, half_many)", "GreaterOrEqual(input_ids, half_many)")
        .replace("Where(low, input_ids, zero)", "Where(low, zero, input_ids)")
        .replace("Where(low, zero, above)", "Where(low, above, zero)")
        .replace("Where(column, lower, upper)", "Where(column, upper, lower)"),
        SHARDS,
    ),
    "split vocabulary, by GatherND": Variant(
        HALVES.replace(
            "lower = Gather(t_low, low_index)", "at = Unsqueeze(low_index, last) lower = GatherND(t_low, at)"
        ),
        SHARDS,
    ),
    "split vocabulary, ids clipped": Variant(
        HALVES.replace("Where(low, input_ids, zero)", "Min(input_ids, last_low)").replace(
            "Where(low, zero, above)", "Max(above, zero)"
        ),
        {**SHARDS, "last_low": np.array(V // 2 - 1)},
    ),
    "split vocabulary, int32": Variant(
        "ids = Cast <to = 7> (input_ids)" + HALVES.replace("input_ids", "ids"), SHARDS, ids="int32[B,S]"
    ),
    "split vocabulary, fp16": Variant(
        HALVES.replace("rows = ", "found = ") + "rows = Cast <to = 1> (found)",
        {**SHARDS, "t_low": floats(V // 2, W, dtype="float16"), "t_high": floats(V // 2, W, dtype="float16")},
        edits=3,
    ),
    "split vocabulary, a comparison that feeds something else": Variant(
        HALVES
        + "positive = GreaterOrEqual(input_ids, zero) used = Not(positive)"
        + TAIL.replace("per_layer_inputs =", "whole =")
        + "no = Cast <to = 1> (used) nothing = ReduceMax <keepdims = 0> (no) per_layer_inputs = Add(whole, nothing)",
        SHARDS,
        inputs=HIDDEN,
    ),
    "split vocabulary, in three": Variant(
        """
        first = Less(input_ids, eight) most = Less(input_ids, sixteen)
        i0 = Where(first, input_ids, zero) from8 = Sub(input_ids, eight) over = Max(from8, zero)
        i1 = Min(over, seven) from16 = Sub(input_ids, sixteen) i2 = Max(from16, zero)
        r0 = Gather(t_0, i0) r1 = Gather(t_1, i1) r2 = Gather(t_2, i2)
        c0 = Unsqueeze(first, last) c1 = Unsqueeze(most, last) r12 = Where(c1, r1, r2) rows = Where(c0, r0, r12)
        """,
        {
            "eight": np.array(8),
            "seven": np.array(7),
            "sixteen": np.array(16),
            "t_0": floats(8, W),
            "t_1": floats(8, W),
            "t_2": floats(16, W),
        },
    ),
    "lookup is the output": Variant("per_layer_inputs = Gather(table, input_ids)", {"table": floats(V, L, D)}),
    "flat lookup is the output": Variant(
        "per_layer_inputs = Gather(table, input_ids)",
        output=f"float[B,S,{W}]",
        config={
            "text_config": {**CONFIG["text_config"], "num_hidden_layers": L, "hidden_size_per_layer_input": D}  # type: ignore[dict-item]
        },
    ),
    "hidden as wide as L x D": Variant(
        """
        embedded = Gather(embeddings, input_ids) scaled_up = Mul(embedded, root)
        where = Unsqueeze(media, last)
        spliced = Where(where, hidden, scaled_up) projected = MatMul(spliced, projection)
        rows = Gather(table, input_ids) scaled = Mul(rows, scale)
        layers = Reshape(scaled, tail) split = Reshape(projected, tail)
        total = Add(layers, split) per_layer_inputs = Mul(total, half)
        """,
        {"embeddings": floats(V, W), "root": scalar(W**0.5), "projection": floats(W, W)},
        inputs=f", float[B,S,{W}] hidden, bool[B,S] media",
        feeds={"hidden": floats(2, V, W), "media": np.isin(IDS, MEDIA)},
        config={"text_config": {**CONFIG["text_config"], "hidden_size": W}},  # type: ignore[dict-item]
    ),
    "If: then": Variant(
        branch("a = Gather(table, input_ids)", ZEROS.format("b")),
        {"width": np.array([W])},
        **USE,  # type: ignore[arg-type]
    ),
    "If: else": Variant(
        branch(ZEROS.format("a"), "b = Gather(table, input_ids)"),
        {"width": np.array([W])},
        inputs=", bool use",
        feeds={"use": np.array(False)},
    ),
    "If: both": Variant(
        branch("a = Gather(table, input_ids)", "c = Gather(table, input_ids) b = Identity(c)"),
        lookups=2,
        edits=2,
        **USE,  # type: ignore[arg-type]
    ),
    "If in an If": Variant(
        branch(
            f"""a = If (use) <
              then_branch = deep () => (float[B,S,{W}] c) {{ c = Gather(table, input_ids) }},
              else_branch = else_deep () => (float[B,S,{W}] d) {{ d = Gather(table, input_ids) }}>""",
            "b = Gather(table, input_ids)",
        ),
        lookups=3,
        edits=3,
        **USE,  # type: ignore[arg-type]
    ),
    "If: all of it in a branch": Variant(
        f"""per_layer_inputs = If (use) <
          then_branch = yes () => (float[B,S,{L},{D}] a) {{
            rows = Gather(table, input_ids) scaled = Mul(rows, scale) layers = Reshape(scaled, tail)
            projected = MatMul(hidden, projection) split = Reshape(projected, tail)
            total = Add(layers, split) a = Mul(total, half) }},
          else_branch = no () => (float[B,S,{L},{D}] b) {{
            alone = MatMul(hidden, projection) b = Reshape(alone, tail) }}>""",
        inputs=HIDDEN + ", bool use",
        feeds={"use": np.array(True)},
    ),
    "function": Variant("rows = local.look(table, input_ids)", functions=LOOK),
    "function called twice": Variant(
        "first = local.look(table, input_ids) second = local.look(other, input_ids) "
        "rows = Concat <axis = 2> (first, second)",
        {"table": floats(V, D), "other": floats(V, 2 * D)},
        functions=LOOK,
        lookups=2,
    ),
    "function with row scales": Variant(
        "rows = local.scaled(codes, row_scales, input_ids)",
        CODES,
        functions="""<domain: "local", opset_import: ["" : 20]> scaled (t, scales, i) => (r) {
            found = Gather(t, i) wide = Cast <to = 1> (found) s = Gather(scales, i) shape = Shape(i)
            both = Mul(wide, s) r = Identity(both) }""",
        lookups=2,
    ),
    "function in a function": Variant(
        "rows = local.outer(table, input_ids)",
        functions=f"""{LOOK} <domain: "local", opset_import: ["" : 20, "local" : 1]>
            outer (t, i) => (r) {{ c = Identity(i) r = local.look(t, c) }}""",
    ),
    "function that does it all": Variant(
        "per_layer_inputs = local.all(table, input_ids, hidden, projection, scale, tail, half)",
        inputs=HIDDEN,
        functions="""<domain: "local", opset_import: ["" : 20]>
          all (table, ids, hidden, projection, scale, tail, half) => (y) {
            rows = Gather(table, ids) scaled = Mul(rows, scale) layers = Reshape(scaled, tail)
            projected = MatMul(hidden, projection) split = Reshape(projected, tail)
            total = Add(layers, split) y = Mul(total, half) }""",
    ),
    "token embedding with row scales too": Variant(
        """
        found = Gather(codes, input_ids) wide = Cast <to = 1> (found)
        s = Gather(row_scales, input_ids) rows = Mul(wide, s)
        e = Gather(e_codes, input_ids) e_wide = Cast <to = 1> (e)
        e_s = Gather(e_scales, input_ids) e_rows = Mul(e_wide, e_s) embeddings = Mul(e_rows, root)
        used = Tanh(embeddings)
        """,
        {**CODES, "e_codes": integers("int8", V, H), "e_scales": floats(V, 1), "root": scalar(H**0.5)},
        inputs="",
        lookups=2,
    ),
    "initializers that are inputs": Variant("rows = Gather(table, input_ids)", overridable=True),
    "fp16": Variant(
        "found = Gather(table, input_ids) much = Mul(found, scale16) rows = Cast <to = 1> (much)",
        {"table": floats(V, W, dtype="float16"), "scale16": scalar(4, "float16"), "scale": scalar(1)},
        edits=2,
    ),
    "fp16 by ids of rank 1": Variant(
        "ids = Reshape(input_ids, flat) found = Gather(table, ids) much = Mul(found, scale16) "
        "wide = Cast <to = 1> (much) shape = Shape(input_ids) back = Concat <axis = 0> (shape, last) "
        "rows = Reshape(wide, back)",
        {"table": floats(V, W, dtype="float16"), "scale16": scalar(4, "float16"), "scale": scalar(1)},
        edits=2,
    ),
    "fp16 in a function": Variant(
        "found = local.look(table, input_ids) much = Mul(found, scale16) rows = Cast <to = 1> (much)",
        {"table": floats(V, W, dtype="float16"), "scale16": scalar(4, "float16"), "scale": scalar(1)},
        functions=LOOK,
        edits=2,
    ),
    "image masked by Where": Variant(
        "m = Equal(input_ids, image) ids = Where(m, pad, input_ids) rows = Gather(table, ids)",
        verdict=Verdict.PARTIAL,
    ),
    "image masked by a choice of the pad row": Variant(
        "m = Equal(input_ids, image) column = Unsqueeze(m, last) own = Gather(table, input_ids) "
        "pad_row = Gather(table, first) rows = Where(column, pad_row, own)",
        {"first": np.array([[0]])},
        verdict=Verdict.PARTIAL,
    ),
    "image masked by Where(Not)": Variant(
        "m = Equal(input_ids, image) keep = Not(m) ids = Where(keep, input_ids, zero) rows = Gather(table, ids)",
        verdict=Verdict.PARTIAL,
    ),
    "image and audio masked by Mul": Variant(
        "i = Equal(input_ids, image) a = Equal(input_ids, audio) m = Or(i, a) keep = Not(m) "
        "factor = Cast <to = 7> (keep) ids = Mul(input_ids, factor) rows = Gather(table, ids)",
        verdict=Verdict.PARTIAL,
    ),
    "a range mask that masks nothing": Variant(
        "low = GreaterOrEqual(input_ids, zero) high = Less(input_ids, many) inside = And(low, high) "
        "ids = Where(inside, input_ids, zero) rows = Gather(table, ids)",
    ),
    "a range mask over image and audio": Variant(
        "low = GreaterOrEqual(input_ids, image) high = LessOrEqual(input_ids, audio) m = And(low, high) "
        "ids = Where(m, pad, input_ids) rows = Gather(table, ids)",
        verdict=Verdict.PARTIAL,
    ),
    **{
        f"opset {opset}": Variant("rows = Gather(table, input_ids)", opset=opset, overridable=opset < 9)
        for opset in (7, 8, 9, 10, 11, 13, 17, 21, 24)
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_mended(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    path = variant.write(tmp_path)
    inputs, outputs = (list(field) for field in (onnx.load(path).graph.input, onnx.load(path).graph.output))
    broken = variant.run(path, IDS)
    expected = variant.run(path, np.where(np.isin(IDS, MEDIA), 0, IDS))
    assert broken.tobytes() != expected.tobytes()

    report = inspect(path)
    assert report.subject.verdict is variant.verdict
    (analysis,) = report.subject.analyses
    assert len(analysis.lookups) == variant.lookups
    assert len(report.plan.graph_edits) == variant.edits
    report = fix(path)
    assert (report.outcome, report.exit_code) == (Outcome.FIXED, 0), report.checks
    passed = {result.name for result in report.checks if result.status is Status.PASSED}
    assert passed >= {"structure", "row map", "differential"}, report.checks

    assert inspect(path).subject.verdict is Verdict.PATCHED
    assert check(path).exit_code == 0
    mended = variant.run(path, IDS)
    assert mended.dtype == expected.dtype
    assert mended.shape == expected.shape
    assert mended.tobytes() == expected.tobytes()
    now = onnx.load(path).graph
    assert (list(now.input), list(now.output)) == (inputs, outputs)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert fix(path).outcome is Outcome.CLEAN
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


NOT_UNDERSTOOD: dict[str, Variant] = {
    "in the body of a Scan": Variant(f"""
        rows = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
          body = each (int64[B] one) => (float[B,{W}] r) {{ r = Gather(table, one) }}> (input_ids)
    """),
    "in the body of a Loop": Variant(f"""
        ids = Reshape(input_ids, flat) n = Size(input_ids)
        found = Loop <body = each (int64 i, bool go) => (bool on, float[{W}] r) {{
          on = Identity(go) id = Gather(ids, i) r = Gather(table, id) }}> (n, )
        shape = Shape(input_ids) back = Concat <axis = 0> (shape, last) rows = Reshape(found, back)
    """),
    "in a Loop that carries the table": Variant(f"""
        ids = Reshape(input_ids, flat) n = Size(input_ids)
        same, found = Loop <body = each
          (int64 i, bool go, float[{V},{W}] t) => (bool on, float[{V},{W}] u, float[{W}] r)
          {{ on = Identity(go) u = Identity(t) id = Gather(ids, i) r = Gather(t, id) }}> (n, , table)
        shape = Shape(input_ids) back = Concat <axis = 0> (shape, last) rows = Reshape(found, back)
    """),
    "in a SequenceMap": Variant(f"""
        parts = SplitToSequence <axis = 1> (input_ids)
        found = SequenceMap <body = each (int64[B,N] one) => (float[B,N,{W}] r) {{ r = Gather(table, one) }}> (parts)
        rows = ConcatFromSequence <axis = 1> (found)
    """),
    "by GatherND, layers in another order": Variant(
        COORDINATES, {**CUBE, "arange": np.arange(L)[::-1].copy()}, inputs=HIDDEN
    ),
    "by GatherND, some layers": Variant(COORDINATES, {**CUBE, "cube": floats(V, L + 1, D)}, inputs=HIDDEN),
    "by GatherND, each layer its own id": Variant(
        COORDINATES.replace(
            "at = Concat <axis = -1> (upright,", "moved = Add(upright, layer) at = Concat <axis = -1> (moved,"
        ),
        CUBE,
        inputs=HIDDEN,
    ),
    "by GatherElements, a part of each row": Variant(
        ELEMENTS.format("all = Tile(upright, times)"),
        {"width": np.array([W]), "times": np.array([1, W]), "table": floats(V, W + 1)},
    ),
    "by GatherElements, a row for each column": Variant(
        ELEMENTS.format("many_ids = Tile(upright, times) all = Add(many_ids, step)"),
        {"width": np.array([W]), "times": np.array([1, W]), "step": np.arange(W)[None] % 2},
    ),
    "by GatherElements, as wide as an operator says": Variant(
        "at = Reshape(input_ids, flat) upright = Unsqueeze(at, axis1) "
        "shape = Shape(input_ids) n = Size(input_ids) line = Reshape(n, flat) wide = Concat <axis = 0> (line, width) "
        "all = Expand(upright, wide) found = GatherElements <axis = 0> (table, all) "
        "back = Concat <axis = 0> (shape, last) rows = Reshape(found, back)",
        {"width": np.array([W])},
    ),
    "by a product with one-hot rows": Variant(
        "hot = OneHot(input_ids, many, values) rows = MatMul(hot, table)",
        {"values": np.array([0, 1], np.float32)},
    ),
    "by a product with compared ids": Variant(
        "ids = Unsqueeze(input_ids, last) same = Equal(ids, every) hot = Cast <to = 1> (same) "
        "rows = MatMul(hot, table)",
        {"every": np.arange(V)},
    ),
    "by an operator of a stranger": Variant("rows = com.microsoft.Lookup(table, input_ids)"),
    "split vocabulary, with a row too many": Variant(HALVES, {**SHARDS, "t_low": floats(V // 2 + 1, W)}),
    "split vocabulary, odd and even": Variant(
        "odd = Mod(input_ids, two) is_odd = Cast <to = 9> (odd) index = Div(input_ids, two) "
        "lower = Gather(t_low, index) upper = Gather(t_high, index) "
        "column = Unsqueeze(is_odd, last) rows = Where(column, upper, lower)",
        {**SHARDS, "two": np.array(2)},
    ),
    "split vocabulary, scaled before": Variant(
        HALVES.replace("upper = Gather", "much = Gather").replace("column =", "upper = Mul(much, half) column ="),
        SHARDS,
    ),
    "split vocabulary, in ways not understood": Variant(
        HALVES.replace(
            "rows = Where(column, lower, upper)", "a = Tanh(lower) b = Tanh(upper) rows = Where(column, a, b)"
        ),
        SHARDS,
    ),
    "along the columns": Variant(
        "found = Gather <axis = 1> (across, input_ids) rows = Transpose <perm = [1, 2, 0]> (found)",
        {"across": floats(W, V)},
    ),
    "in a table that an operator computes": Variant(
        "deep = Tanh(table) rows = Gather(deep, input_ids) strange = Tanh(rows) "
        "per_layer_inputs = Reshape(strange, tail)"
    ),
    "in two tables put together": Variant(
        "both = Concat <axis = 0> (table, more) rows = Gather(both, input_ids) strange = Tanh(rows) "
        "per_layer_inputs = Reshape(strange, tail)",
        {"table": floats(V // 2, W), "more": floats(V // 2, W)},
    ),
    "rows that go through a stranger's operator": Variant(
        "found = Gather(table, input_ids) rows = Tanh(found)",
    ),
    "parts that are never put together": Variant(
        " ".join(f"r{i} = Gather(t{i}, input_ids) s{i} = Mul(r{i}, scale) " for i in range(L))
        + " ".join(f"m{i} = MatMul(s{i}, up{i}) " for i in range(L))
        + "a = Add(m0, m1) per_layer_inputs = Add(a, m2)",
        {**SLICES, **{f"up{i}": floats(D, D) for i in range(L)}},
        output=f"float[B,S,{D}]",
    ),
    "ids that a branch chooses": Variant(
        """ids = If (use) <then_branch = yes () => (int64[B,S] a) { a = Identity(input_ids) },
             else_branch = no () => (int64[B,S] b) { b = Mul(input_ids, zero) }>
           rows = Gather(table, ids)""",
        inputs=", bool use",
    ),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_ambiguous(name: str, tmp_path: Path) -> None:
    path = NOT_UNDERSTOOD[name].write(tmp_path)
    before = tree(tmp_path)
    report = fix(path)
    assert report.subject.verdict is Verdict.AMBIGUOUS
    assert (report.outcome, report.exit_code) == (Outcome.INCONCLUSIVE, 1)
    assert report.findings
    assert tree(tmp_path) == before


WITHHELD: dict[str, Variant] = {
    "a split vocabulary with a comparison that other rows need too": Variant(
        HALVES
        + "other = Unsqueeze(low, last) hidden_too = Where(other, hidden, zeros)"
        + TAIL.replace("MatMul(hidden,", "MatMul(hidden_too,"),
        {**SHARDS, "zeros": floats(1, 1, H) * 0},
        inputs=HIDDEN,
    ),
    "a function that uses its ids for the token embedding too": Variant(
        "rows, embedded = local.both(table, embeddings, input_ids) embeds = Mul(embedded, root) used = Tanh(embeds)",
        {"embeddings": floats(V, H), "root": scalar(H**0.5)},
        functions="""<domain: "local", opset_import: ["" : 20]>
          both (t, e, i) => (r, s) { r = Gather(t, i) s = Gather(e, i) }""",
    ),
    "one of two lookups": Variant(
        "first = Gather(table, input_ids) second, strange = local.both(other, input_ids) "
        "rows = Concat <axis = 2> (first, second)",
        {"table": floats(V, D), "other": floats(V, 2 * D)},
        functions="""<domain: "local", opset_import: ["" : 20]>
          both (t, i) => (r, s) { r = Gather(t, i) s = CumSum(i, i) }""",
    ),
}


@pytest.mark.parametrize("name", WITHHELD)
def test_what_cannot_be_edited_is_withheld(name: str, tmp_path: Path) -> None:
    path = WITHHELD[name].write(tmp_path)
    before = tree(tmp_path)
    report = fix(path)
    assert report.subject.verdict is Verdict.RAW
    assert report.exit_code == 1
    assert all(finding.withheld for finding in report.findings if finding.severity is Severity.ERROR)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("opset", [7, 8])
def test_a_pad_that_is_not_zero_needs_where(opset: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Variant("rows = Gather(table, input_ids)", opset=opset, overridable=True).write(tmp_path)
    before = tree(tmp_path)
    assert main(["fix", "--pad-token-id", "1", str(path)]) == 2
    assert "opset 9" in capsys.readouterr().err
    assert tree(tmp_path) == before
