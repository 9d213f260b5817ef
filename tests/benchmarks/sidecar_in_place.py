"""In-place `fix` of a generated PLE sidecar with its checks, against start-up alone and against a copy of the file.

    python -m tests.benchmarks.sidecar_in_place [FOLDER]

Wanted for 2.4 GB: under a second beyond start-up, under 100 MB.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.benchmarks.measure import cost

# E2B: 35 layers of 256 for 262,144 ids, in int8.
_ROWS, _WIDTH = 262144, 35 * 256


def build(path: Path) -> None:
    """A sidecar in the layout of apple/coreai-models pull 137, written in pieces: 2.35 GB."""
    entry = {"dtype": "I8", "shape": [_ROWS, _WIDTH], "data_offsets": [0, _ROWS * _WIDTH]}
    metadata = {"ple_scale": "0.01", "ple_zero_point": "0", "embed_scale": "16.0", "dtype": "SI8"}
    header = json.dumps({"__metadata__": metadata, "embed_tokens_per_layer": entry}).encode()
    rng = np.random.default_rng(1)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(256):
            file.write(rng.integers(-128, 128, (_ROWS // 256, _WIDTH), np.int8).tobytes())
        file.flush()
        os.fsync(file.fileno())  # else the first who syncs the file pays for its gigabytes


def main(place: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=place))
    path = folder / "gemma_ple.safetensors"
    try:
        build(path)
        run = "from g4patch.cli import main\ntry: main({!r})\nexcept SystemExit: pass"
        start = cost(run.format(["--version"]))
        fix, revert = (cost(run.format([command, str(path)])) for command in ("fix", "revert"))
        started = time.perf_counter()
        shutil.copyfile(path, folder / "copy")
        copy = time.perf_counter() - started
    finally:
        shutil.rmtree(folder)
    print(f"start-up    {start}\nfix         {fix}\nrevert      {revert}\ncopy        {copy:7.2f} s")
    print(
        f"fix beyond start-up: {fix.seconds - start.seconds:.2f} s, a copy costs {copy / fix.seconds:.1f} times a fix"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()))
