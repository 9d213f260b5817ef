"""In-place `fix` of a generated .mlpackage with its checks, against coremltools' own way to change a saved program.

    python -m tests.benchmarks.coreml_in_place [FOLDER]

That way is to load the program, run a graph pass over it (here the same mask) and save it again. Also: what `inspect`
of a small package costs to start, over `import numpy`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.proto import Model_pb2

from tests.benchmarks.measure import Cost, cost

# Gemma 4's ids, and a table of L x D = 128 x 32 halves a row: 2 GiB.
IDS, LAYERS, WIDTH = 262_144, 128, 32
# How many rows the table has when coremltools writes the package; the generated one takes its place.
_FEW = 512
_DATA = Path("Data/com.apple.CoreML")


def build(folder: Path, ids: int = IDS) -> Path:
    """A stage that adds rows of a raw fp16 PLE lookup to a projection; a table of `ids` rows."""
    rng = np.random.default_rng(1)
    table = rng.standard_normal((_FEW, LAYERS * WIDTH)).astype(np.float16)
    projection = rng.standard_normal((LAYERS * WIDTH, 64)).astype(np.float16)
    specs = [mb.TensorSpec((1, 8, 64), types.fp16), mb.TensorSpec((1, 8), types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)  # type: ignore[untyped-decorator]
    def program(hidden_states: Any, input_ids: Any) -> Any:
        rows = mb.mul(x=mb.gather(x=table, indices=input_ids, axis=0), y=np.float16(WIDTH**0.5))
        total = mb.linear(x=hidden_states, weight=projection)
        shape = [1, -1, LAYERS, WIDTH]
        return mb.add(x=mb.reshape(x=rows, shape=shape), y=mb.reshape(x=total, shape=shape), name="out")

    path = folder / "stage.mlpackage"
    passes = ct.PassPipeline()
    passes.remove_passes({"common::add_int16_cast"})  # the ids that come later do not fit into 16 bits
    ct.convert(program, minimum_deployment_target=ct.target.iOS17, skip_model_load=True, pass_pipeline=passes).save(
        str(path)
    )
    if ids != _FEW:
        _enlarge(path, ids)
    tokens = {f"{kind}_token_id": ids - 10 + step for kind, step in (("image", 0), ("audio", 1), ("video", 4))}
    config = {**tokens, "text_config": {"pad_token_id": 0, "vocab_size": ids}}
    (folder / "config.json").write_text(json.dumps(config))
    return path


def _enlarge(package: Path, ids: int) -> None:
    """Put a table of `ids` rows behind what is in weight.bin, and point the gather's constant at it."""
    model_file = package / _DATA / "model.mlmodel"
    model = Model_pb2.Model()
    model.ParseFromString(model_file.read_bytes())
    function = model.mlProgram.functions["main"]
    operations = function.block_specializations[function.opset].operations
    (gather,) = [op for op in operations if op.type == "gather"]
    name = gather.inputs["x"].arguments[0].name
    (table,) = [op for op in operations if op.type == "const" and op.outputs[0].name == name]
    value = table.attributes["val"]
    for declared in (value.type, table.outputs[0].type):
        declared.tensorType.dimensions[0].constant.size = ids
    value.blobFileValue.offset = _append(package / _DATA / "weights" / "weight.bin", ids)
    model_file.write_bytes(model.SerializeToString())


def _append(weights: Path, ids: int) -> int:
    """Write random halves in [0, 1) as one more blob (see g4patch/formats/coreml/weights.py); returns its offset."""
    rng = np.random.default_rng(2)
    with weights.open("r+b") as file:
        (count,) = struct.unpack("<I", file.read(4))
        file.seek(0)
        file.write(struct.pack("<I", count + 1))
        offset = -(-file.seek(0, os.SEEK_END) // 64) * 64
        file.seek(offset)
        size = ids * LAYERS * WIDTH * 2
        file.write(struct.pack("<IIQQQ", 0xDEADBEEF, 1, size, offset + 64, 0).ljust(64, b"\0"))
        for _ in range(0, size, 1 << 24):
            file.write(rng.integers(0, 0x3C00, 1 << 23, np.uint16).tobytes())
    return offset


def fix(path: Path) -> Cost:
    return cost(f"""
from pathlib import Path
import g4patch
report = g4patch.fix(Path({str(path)!r}))
assert report.exit_code == 0 and {{check.name for check in report.checks if check.status == "passed"}} >= {{
    "structure", "row map", "differential"}}, report.checks
""")


def graph_pass(path: Path) -> Cost:
    """coremltools' route. Its graph pass does what our edit does."""
    out = path.parent / "saved.mlpackage"
    try:
        return cost(f"""
import logging
logging.disable(logging.CRITICAL)
import coremltools as ct
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.models.utils import _apply_graph_pass
import numpy as np

class Mask(AbstractGraphPass):
    def apply(self, program):
        block = program.functions["main"]
        (gather,) = block.find_ops(op_type="gather")
        with block:
            is_media = None
            for step in (0, 1, 4):
                equal = mb.equal(x=gather.indices, y=np.int32({IDS} - 10 + step), before_op=gather)
                is_media = equal if is_media is None else mb.logical_or(x=is_media, y=equal, before_op=gather)
            masked = mb.select(cond=is_media, a=np.int32(0), b=gather.indices, before_op=gather)
            block.replace_uses_of_var_after_op(
                anchor_op=masked.op, old_var=gather.indices, new_var=masked, end_op=gather)

model = ct.models.MLModel({str(path)!r}, skip_model_load=True)
_apply_graph_pass(model, Mask(), skip_model_load=True).save({str(out)!r})
""")
    finally:
        shutil.rmtree(out, ignore_errors=True)


def start_up(path: Path, times: int = 5) -> tuple[float, float]:
    """Wall seconds of `inspect` on a package and of `import numpy`, the shortest of some runs of each in turns."""
    commands = ([sys.executable, "-m", "g4patch", "inspect", str(path)], [sys.executable, "-c", "import numpy"])
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for command, seconds in zip(commands, taken, strict=True):
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
    return min(taken[0]), min(taken[1])


def main() -> None:
    logging.disable(logging.CRITICAL)
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        small, large = Path(name) / "small", Path(name) / "large"
        small.mkdir()
        large.mkdir()
        small_package, package = build(small, _FEW), build(large)
        print(f"coremltools {ct.__version__}")
        inspected, started = start_up(small_package)
        baseline = graph_pass(package)
        on_small, on_large = fix(small_package), fix(package)
        rows = {"fix, 8 MiB": on_small, "fix, 2 GiB": on_large, "graph pass + save, 2 GiB": baseline}
        for what, measured in rows.items():
            print(f"{what:<26}{measured}")
        print(f"faster than graph pass + save: {baseline.seconds / on_large.seconds:.0f} times")
        print(f"2 GiB against 8 MiB:           {on_large.seconds / on_small.seconds:.2f} times")
        print(f"inspect over import numpy:     {inspected - started:.2f} s ({inspected:.2f} s, {started:.2f} s)")


if __name__ == "__main__":
    main()
