"""Whole Core AI programs on Apple's runtime, with none of g4patch between."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RUN = """
import asyncio, os, sys
import numpy as np
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray

async def run(asset, folder, output, feeds):
    async with AIModelAsset.load(asset).executable() as model:
        function = model.load_function("main")
        result = await function({name: NDArray(np.load(f"{folder}/{name}.npy")) for name in feeds})
        np.save(f"{folder}/{output}.npy", result[output].numpy())

asset, folder, output, *feeds = sys.argv[1:]
asyncio.run(run(asset, folder, output, feeds))
os._exit(0)  # coreai-core 1.0.0b3 aborts now and then when the interpreter shuts down
"""


def whole(asset: Path, feeds: Mapping[str, NDArray[Any]], output: str = "hidden_states_out") -> NDArray[Any]:
    """An output of the function `main` for one prompt."""
    with tempfile.TemporaryDirectory() as folder:
        for name, array in feeds.items():
            np.save(f"{folder}/{name}.npy", array if name == "hidden_states" else array.astype(np.int32))
        subprocess.run([sys.executable, "-c", _RUN, asset, folder, output, *feeds], check=True)
        result: NDArray[Any] = np.load(f"{folder}/{output}.npy")
    return result
