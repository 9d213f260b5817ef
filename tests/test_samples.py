"""The samples are what their scripts build: graphs alike, numbers within the exporters' own rounding."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from g4patch import engine
from tests.conftest import SAMPLES, models, needs_build_python

ROOT = SAMPLES.parent
NAMES = sorted(path.parent.name for path in SAMPLES.glob("*/config.json"))


def test_samples_are_small() -> None:
    sizes = {name: sum(path.stat().st_size for path in (SAMPLES / name).rglob("*") if path.is_file()) for name in NAMES}
    assert max(sizes.values()) <= 2_000_000
    assert sum(sizes.values()) <= 20_000_000


@pytest.fixture(scope="module")
def rebuilt(build_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All samples, built again with the exporters pinned in samples/build/requirements.txt."""
    out = tmp_path_factory.mktemp("samples")
    subprocess.run([build_python, "-m", "samples.build", "-o", out], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    return out


def same_sidecar(old: Path, new: Path) -> None:
    """Tensors and metadata alike: the bytes are not, for safetensors writes several entries in no fixed order."""
    was, now = load_file(old), load_file(new)
    assert was.keys() == now.keys()
    assert all(np.array_equal(was[key], now[key]) for key in was)
    with safe_open(old, framework="np") as was_file, safe_open(new, framework="np") as now_file:
        assert was_file.metadata() == now_file.metadata()


@pytest.mark.slow
@needs_build_python
@pytest.mark.parametrize("name", NAMES)
def test_rebuilt_sample_is_the_same(name: str, rebuilt: Path) -> None:
    old, new = SAMPLES / name, rebuilt / name
    assert (old / "config.json").read_text() == (new / "config.json").read_text()
    for path in old.glob("*reference.safetensors"):
        was, now = load_file(path), load_file(new / path.name)
        assert was.keys() == now.keys()
        for key, tensor in was.items():
            # The same torch on another processor may sum in another order.
            np.testing.assert_allclose(now[key], tensor, rtol=0, atol=1e-5, err_msg=key)
    assert [path.relative_to(old) for path in models(old)] == [path.relative_to(new) for path in models(new)]
    for name in ("metadata.json", "genai_config.json"):
        assert not (old / name).exists() or (old / name).read_text() == (new / name).read_text()
    for bundle in models(old):
        if bundle.suffix == ".safetensors":
            same_sidecar(bundle, new / bundle.relative_to(old))
        was_model, now_model = engine.open_model(bundle), engine.open_model(new / bundle.relative_to(old))
        for was_graph, now_graph in zip(was_model.model.graphs, now_model.model.graphs, strict=True):
            assert (was_graph.inputs, was_graph.outputs) == (now_graph.inputs, now_graph.outputs)
            assert [(node.op, node.native) for node in was_graph.nodes] == [
                (node.op, node.native) for node in now_graph.nodes
            ]
            assert was_graph.tables.keys() == now_graph.tables.keys()
        assert was_model.verdict is now_model.verdict
