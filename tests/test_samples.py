"""The samples are what their scripts build: graphs alike, numbers within the exporters' own rounding."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from g4patch import engine
from tests.conftest import SAMPLES

ROOT = SAMPLES.parent
NAMES = sorted(path.parent.name for path in SAMPLES.glob("*/config.json"))


def test_samples_are_small() -> None:
    sizes = {name: sum(path.stat().st_size for path in (SAMPLES / name).rglob("*") if path.is_file()) for name in NAMES}
    assert max(sizes.values()) <= 2_000_000
    assert sum(sizes.values()) <= 20_000_000


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All samples, built again with the exporters pinned in samples/build/requirements.txt.

    `G4PATCH_BUILD_PYTHON` may name an interpreter that has them; else they are installed, which takes minutes.
    """
    python = os.environ.get("G4PATCH_BUILD_PYTHON")
    if python is None:
        folder = tmp_path_factory.mktemp("build") / "venv"
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        install = [python, "-m", "pip", "install", "-q"]
        # torch first and alone: others ask for a range of it, and the newest is not what built the samples.
        subprocess.run([*install, "torch==2.13.0"], check=True)
        subprocess.run([*install, "-r", SAMPLES / "build" / "requirements.txt"], check=True)
    out = tmp_path_factory.mktemp("samples")
    subprocess.run([python, "-m", "samples.build", "-o", out], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    return out


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the pinned exporters have wheels for Python 3.11")
@pytest.mark.parametrize("name", NAMES)
def test_rebuilt_sample_is_the_same(name: str, rebuilt: Path) -> None:
    old, new = SAMPLES / name, rebuilt / name
    assert (old / "config.json").read_text() == (new / "config.json").read_text()
    for path in old.glob("*.reference.safetensors"):
        was, now = load_file(path), load_file(new / path.name)
        assert was.keys() == now.keys()
        for key, tensor in was.items():
            # The same torch on another processor may sum in another order.
            np.testing.assert_allclose(now[key], tensor, rtol=0, atol=1e-5, err_msg=key)
    bundle = next(path for path in old.iterdir() if path.suffix in (".onnx", ".mlpackage", ".aimodel"))
    was_model, now_model = engine.open_model(bundle), engine.open_model(new / bundle.name)
    for was_graph, now_graph in zip(was_model.model.graphs, now_model.model.graphs, strict=True):
        assert (was_graph.inputs, was_graph.outputs) == (now_graph.inputs, now_graph.outputs)
        assert [(node.op, node.native) for node in was_graph.nodes] == [
            (node.op, node.native) for node in now_graph.nodes
        ]
        assert was_graph.tables.keys() == now_graph.tables.keys()
    assert was_model.verdict is now_model.verdict
