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
        states = {}
        for name in function.desc.state_names:
            empty = function.desc.state_descriptor(name)
            states[name] = NDArray(np.zeros(empty.shape, empty.dtype))
        result = await function({name: NDArray(np.load(f"{folder}/{name}.npy")) for name in feeds}, state=states)
        np.save(f"{folder}/{output}.npy", {**result, **states}[output].numpy())

asset, folder, output, *feeds = sys.argv[1:]
asyncio.run(run(asset, folder, output, feeds))
os._exit(0)  # coreai-core 1.0.0b3 aborts now and then when the interpreter shuts down
"""


def whole(asset: Path, feeds: Mapping[str, NDArray[Any]], output: str = "hidden_states_out") -> NDArray[Any]:
    """An output of the function `main` for one prompt, or a state after it; states start empty."""
    with tempfile.TemporaryDirectory() as folder:
        for name, array in feeds.items():
            np.save(f"{folder}/{name}.npy", array.astype(np.int32) if array.dtype == np.int64 else array)
        subprocess.run([sys.executable, "-c", _RUN, asset, folder, output, *feeds], check=True)
        result: NDArray[Any] = np.load(f"{folder}/{output}.npy")
    return result
