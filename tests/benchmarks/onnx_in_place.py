"""In-place `fix` of a generated ONNX bundle with its checks, against `onnx.load` + `onnx.save`.

    python -m tests.benchmarks.onnx_in_place [FOLDER]

Wanted: at least 50 times faster on 2 GiB, under 150 MB peak, and no slower on 2 GiB than 1.2 times on 64 MiB.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tests.benchmarks.measure import Cost, cost

# Gemma 4's vocabulary at every size: half of the bundle is the table, its rows as wide as that allows.
_IDS, _WIDTH = 262144, 16


def build(folder: Path, size: int) -> Path:
    """A stage of `size` bytes: a raw fp16 PLE lookup, and decoder weights in the same data file beside the table."""
    folder.mkdir(parents=True)
    layers = size // 2 // (_IDS * _WIDTH * 2)
    # As many nodes at every size, as in models of one family.
    blocks, inner = 32, 512
    width = size // 2 // (blocks * inner * 2)
    shapes = {"table": [_IDS, layers * _WIDTH], **{f"w{i}": [inner, width] for i in range(blocks)}}
    rng = np.random.default_rng(1)
    tensors = []
    with (folder / "model.onnx.data").open("wb") as file:
        for name, shape in shapes.items():
            tensor = TensorProto(
                name=name, data_type=TensorProto.FLOAT16, dims=shape, data_location=TensorProto.EXTERNAL
            )
            length = int(np.prod(shape)) * 2
            for key, value in (("location", "model.onnx.data"), ("offset", file.tell()), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            for start in range(0, length, 1 << 24):
                count = min(1 << 24, length - start) // 2
                file.write(rng.standard_normal(count, np.float32).astype(np.float16).tobytes())
    tensors += [
        numpy_helper.from_array(np.array(_WIDTH**0.5, np.float16), "scale"),
        numpy_helper.from_array(np.array([0, 0, layers, _WIDTH]), "tail"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Mul", ["rows", "scale"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "tail"], ["per_layer_inputs"]),
    ]
    for i in range(blocks):
        nodes.append(helper.make_node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Slice", [f"m{i}", "from", "to", "last"], [f"h{i + 1}"]))
    tensors += [numpy_helper.from_array(np.array([v]), n) for n, v in (("from", 0), ("to", inner), ("last", -1))]
    graph = helper.make_graph(
        nodes,
        "stage",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "S"]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, [1, "S", inner]),
        ],
        [
            helper.make_tensor_value_info("per_layer_inputs", TensorProto.FLOAT16, [1, "S", layers, _WIDTH]),
            helper.make_tensor_value_info(f"h{blocks}", TensorProto.FLOAT16, [1, "S", inner]),
        ],
        tensors,
    )
    path = folder / "model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def fix(path: Path) -> Cost:
    return cost(f"""
from pathlib import Path
import g4patch
report = g4patch.fix(Path({str(path)!r}))
assert report.exit_code == 0, report.checks
assert [check.name for check in report.checks if check.status != "passed"] == ["reference"], report.checks
""")


def load_and_save(path: Path) -> Cost:
    out = path.parent / "saved" / "model.onnx"
    out.parent.mkdir()
    try:
        return cost(f"""
import onnx
model = onnx.load({str(path)!r})
onnx.save(model, {str(out)!r}, save_as_external_data=True, location="model.onnx.data")
""")
    finally:
        shutil.rmtree(out.parent)


def main() -> None:
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        small, large = build(Path(name) / "small", 64 << 20), build(Path(name) / "large", 2 << 30)
        print(f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}")
        costs = {"fix, 64 MiB": fix(small), "fix, 2 GiB": fix(large), "load + save, 2 GiB": load_and_save(large)}
        for what, measured in costs.items():
            print(f"{what:<20}{measured}")
        on_small, on_large, baseline = costs.values()
        print(f"faster than load + save: {baseline.seconds / on_large.seconds:.0f} times")
        print(f"2 GiB against 64 MiB:    {on_large.seconds / on_small.seconds:.2f} times")


if __name__ == "__main__":
    main()
