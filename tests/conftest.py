"""Samples as fixtures: each test gets its own copy."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from numpy.typing import NDArray
from safetensors.numpy import load_file

SAMPLES = Path(__file__).parent.parent / "samples"

# In CI the same examples each time: what is new there is the change, not the draw. Elsewhere every run draws anew.
settings.register_profile("ci", derandomize=True)
if "CI" in os.environ:
    settings.load_profile("ci")

Copy = Callable[[str], Path]
Arrays = dict[str, NDArray[Any]]


def sample(name: str) -> Path:
    """The bundle of a sample, in the repository: its only model, or the folder where it holds several."""
    found = models(SAMPLES / name)
    return found[0] if len(found) == 1 else SAMPLES / name


def models(folder: Path) -> list[Path]:
    """The models of a sample, at any depth."""
    suffixes = (".onnx", ".mlpackage", ".aimodel", "_ple.safetensors")
    return sorted(path for path in folder.rglob("*") if path.name.endswith(suffixes))


def numbers(bundle: Path, run: str = "media") -> tuple[Arrays, Arrays]:
    """What is fed and what Hugging Face's model gave, for one prompt, read without g4patch's own reader."""
    tensors = load_file(f"{bundle}.reference.safetensors")

    def part(kind: str) -> Arrays:
        prefix = f"{run}/{kind}/"
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    return part("input"), part("expected")


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with the digest of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copies a sample, with what lies beside it, and returns the bundle in the copy."""

    def copy_sample(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(SAMPLES / name, folder)
        return folder / sample(name).relative_to(SAMPLES / name)

    return copy_sample


@pytest.fixture(scope="session")
def mended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`coreml-two-stage` after a fix, its backup beside it, with three runs of its reference. Not to be changed."""
    from g4patch import Options, fix
    from g4patch.report import Outcome, Status
    from tests.whole import folder, keep_runs

    bundle = folder("coreml-two-stage", tmp_path_factory.mktemp("mended"))
    keep_runs(bundle, "media", "media without media", "text")
    report = fix(bundle, Options(required=frozenset({"reference", "chain", "gates"})))
    assert report.outcome is Outcome.FIXED
    assert {check.status for check in report.checks} == {Status.PASSED}
    assert [check.name for check in report.whole] == ["chain", "gates"]
    return bundle


@pytest.fixture
def cached(tmp_path: Path) -> Copy:
    """Lays a sample out as the Hugging Face cache does, links to blobs; returns the bundle in the snapshot."""

    def cached_sample(name: str) -> Path:
        repository = tmp_path / "models--org--name"
        snapshot = repository / "snapshots" / "0123abc"
        (repository / "blobs").mkdir(parents=True)
        for path in sorted(path for path in (SAMPLES / name).rglob("*") if path.is_file()):
            blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, blob)
            link = snapshot / path.relative_to(SAMPLES / name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        return snapshot / sample(name).relative_to(SAMPLES / name)

    return cached_sample


# For tests that build bundles; without the variable, the pinned exporters are installed, for Python 3.11 alone.
needs_build_python = pytest.mark.skipif(
    "G4PATCH_BUILD_PYTHON" not in os.environ and sys.version_info[:2] != (3, 11),
    reason="the pinned exporters have wheels for Python 3.11",
)


@pytest.fixture(scope="session")
def build_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the exporters pinned in samples/build/requirements.txt.

    `G4PATCH_BUILD_PYTHON` may name one; else they are installed, which takes minutes.
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
    return python
