"""Samples as fixtures: each test gets its own copy."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent.parent / "samples"

Copy = Callable[[str], Path]


def sample(name: str) -> Path:
    """The bundle of a sample, in the repository."""
    (found,) = [path for path in (SAMPLES / name).iterdir() if path.suffix in (".onnx", ".mlpackage", ".aimodel")]
    return found


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
        return folder / sample(name).name

    return copy_sample
