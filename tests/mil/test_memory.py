"""A table as large as E2B's (262,144 x 8,960, int8: 2.35 GB) is looked up in little memory.

Its file is sparse and takes no room on disk; the runs are in a process of their own, whose peak is measured.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROWS, WIDTH = 262_144, 8_960
LIMIT_MB = 500

SCRIPT = """
import resource, sys
from pathlib import Path
import numpy as np
from google.protobuf import text_format
from g4patch.formats.coreml.proto import mil_pb2
from g4patch.runtimes.mil import MilProbe, read_function

folder = Path(sys.argv[1])
function = text_format.Parse((folder / "function.txt").read_text(), mil_pb2().Function())
probe = MilProbe(read_function(function, "main"), folder)
for start in range(0, 262_144, 131_072 // 8):
    ids = np.arange(start, start + 1024)
    found = probe.lookup("ids", "rows", ids)
    assert found.shape == (1024, 8960) and found.dtype == np.float16
    # Each row's first byte is 1 + row % 100, stored for the rows that are asked for; its scale is 0.5.
    assert (found[:, 0] == 0.5 * (1 + ids % 100)).all() and not found[:, 1:].any()
assert "torch" not in sys.modules and "coremltools" not in sys.modules
kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
print(kilobytes // 1024)
"""


def _tensor(kind: str, *shape: int) -> str:
    dims = " ".join(f"dimensions {{ constant {{ size: {dim} }} }}" for dim in shape)
    return f"type {{ tensorType {{ dataType: {kind} rank: {len(shape)} {dims} }} }}"


def _stored(name: str, kind: str, offset: int, *shape: int) -> str:
    blob = f'blobFileValue {{ fileName: "@model_path/weights/weight.bin" offset: {offset} }}'
    value = f'attributes {{ key: "val" value {{ {_tensor(kind, *shape)} {blob} }} }}'
    return f'operations {{ type: "const" outputs {{ name: "{name}" {_tensor(kind, *shape)} }} {value} }}'


def _operation(kind: str, operands: dict[str, str], output: str, declared: str) -> str:
    inputs = " ".join(
        f'inputs {{ key: "{key}" value {{ arguments {{ name: "{name}" }} }} }}' for key, name in operands.items()
    )
    return f'operations {{ type: "{kind}" {inputs} outputs {{ name: "{output}" {declared} }} }}'


def _write(folder: Path) -> None:
    scales, table = 256, 256 + 2 * ROWS
    with (folder / "weight.bin").open("wb") as file:
        file.write(struct.pack("<II", 2, 2).ljust(64, b"\0"))
        file.write(struct.pack("<IIQQQ", 0xDEADBEEF, 1, 2 * ROWS, scales, 0).ljust(64, b"\0"))
        file.write(struct.pack("<IIQQQ", 0xDEADBEEF, 4, ROWS * WIDTH, table, 0).ljust(64, b"\0"))
        file.seek(scales)
        file.write(struct.pack("<e", 0.5) * ROWS)
        for start in range(0, ROWS, 131_072 // 8):
            for row in range(start, start + 1024):
                file.seek(table + row * WIDTH)
                file.write(bytes([1 + row % 100]))
        file.truncate(table + ROWS * WIDTH)
    wide = _tensor("FLOAT16", ROWS, WIDTH)
    operations = (
        _stored("scale", "FLOAT16", 64, ROWS, 1),
        _stored("data", "INT8", 128, ROWS, WIDTH),
        _operation("constexpr_blockwise_shift_scale", {"data": "data", "scale": "scale"}, "table", wide),
        _operation("gather", {"x": "table", "indices": "ids"}, "rows", _tensor("FLOAT16", 1, 8, WIDTH)),
    )
    block = f'block_specializations {{ key: "CoreML8" value {{ outputs: "rows" {" ".join(operations)} }} }}'
    head = f'opset: "CoreML8" inputs {{ name: "ids" {_tensor("INT32", 1, 8)} }}'
    (folder / "function.txt").write_text(f"{head} {block}")


@pytest.mark.skipif(sys.platform == "win32", reason="files are not sparse, and memory is counted otherwise")
def test_a_table_of_2_gb(tmp_path: Path) -> None:
    _write(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    peak = int(run.stdout)
    print(f"peak {peak} MB")
    assert peak < LIMIT_MB
