"""What onnxruntime needs to open a bundle with a 256 MB fp16 PLE table: broken, fixed, and fixed without the reshape.

    python -m tests.benchmarks.onnx_fp16 [FOLDER]

Wanted: the fixed model opens no slower and no bigger than the broken one. Without the companion reshape, onnxruntime's
CPU provider converts the whole table to fp32 when it opens the model.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

import g4patch
from g4patch.edits import Plan
from g4patch.formats.onnx.edit import apply
from tests.benchmarks.measure import Cost, cost

_IDS, _LAYERS, _WIDTH = 262144, 16, 32
_RUNS = 3


def build(folder: Path) -> Path:
    """A stage whose raw fp16 lookup goes on in fp16: scaled, reshaped, summed with a projection."""
    folder.mkdir()
    width = _LAYERS * _WIDTH
    rows = np.random.default_rng(1).standard_normal((4096, width), np.float32).astype(np.float16)
    with (folder / "model.onnx.data").open("wb") as file:
        for _ in range(_IDS // len(rows)):
            file.write(rows.tobytes())
    table = TensorProto(name="table", data_type=TensorProto.FLOAT16, dims=[_IDS, width])
    table.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "model.onnx.data"), ("offset", 0), ("length", _IDS * width * 2)):
        table.external_data.add(key=key, value=str(value))
    constants = {
        "scale": np.array(_WIDTH**0.5, np.float16),
        "tail": np.array([0, 0, _LAYERS, _WIDTH]),
        "weights": np.ones((8, width), np.float16),
        "half": np.array(0.5**0.5, np.float16),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Mul", ["rows", "scale"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "tail"], ["layers"]),
        helper.make_node("MatMul", ["hidden", "weights"], ["projected"]),
        helper.make_node("Reshape", ["projected", "tail"], ["split"]),
        helper.make_node("Add", ["layers", "split"], ["total"]),
        helper.make_node("Mul", ["total", "half"], ["per_layer_inputs"]),
    ]
    graph = helper.make_graph(
        nodes,
        "stage",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "S"]),
            helper.make_tensor_value_info("hidden", TensorProto.FLOAT16, [1, "S", 8]),
        ],
        [helper.make_tensor_value_info("per_layer_inputs", TensorProto.FLOAT16, [1, "S", _LAYERS, _WIDTH])],
        [table, *(numpy_helper.from_array(array, name) for name, array in constants.items())],
    )
    path = folder / "model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def without_companion(broken: Path) -> Path:
    """The fix with nothing but the mask."""
    plan = g4patch.inspect(broken).plan
    masks = tuple(edit for edit in plan.edits if edit.rule == "ple-raw-ids")
    assert len(masks) < len(plan.edits)
    path = broken.with_name("mask-alone.onnx")
    path.write_bytes(apply(ModelProto.FromString(broken.read_bytes()), Plan(masks), broken.parent).SerializeToString())
    return path


def with_companion(broken: Path) -> Path:
    path = Path(shutil.copy(broken, broken.with_name("fixed.onnx")))
    report = g4patch.fix(path)
    assert report.exit_code == 0, report.checks
    return path


def opened(path: Path) -> Cost:
    """Open a model and run one prompt, the best of a few times."""
    code = f"""
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession({str(path)!r}, providers=["CPUExecutionProvider"])
session.run(None, {{"input_ids": np.array([[2, 7, 258880, 9]]), "hidden": np.ones((1, 4, 8), np.float16)}})
"""
    runs = [cost(code) for _ in range(_RUNS)]
    return Cost(min(run.seconds for run in runs), min(run.peak for run in runs))


def main() -> None:
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        broken = build(Path(name) / "bundle")
        models = {"broken": broken, "fixed": with_companion(broken), "mask alone": without_companion(broken)}
        print(f"onnxruntime {onnxruntime.__version__}")
        costs = {what: opened(path) for what, path in models.items()}
        for what, measured in costs.items():
            print(f"{what:<12}{measured}")
        for what in ("fixed", "mask alone"):
            slower, bigger = costs[what].seconds / costs["broken"].seconds, costs[what].peak / costs["broken"].peak
            print(f"{what} against broken: {slower:.2f} times the time, {bigger:.2f} times the memory")


if __name__ == "__main__":
    main()
