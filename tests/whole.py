"""Bundle folders with a reference of the whole model, one for each format that has stages, and faults to plant."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from g4patch.report import Check, Report
from tests.conftest import SAMPLES

Tensors = dict[str, NDArray[Any]]
Metadata = dict[str, Any]
NAME = "reference.safetensors"


def folder(name: str, place: Path) -> Path:
    """A copy of a sample of several models, with a reference of the whole in it."""
    copy = shutil.copytree(SAMPLES / name, place / name)
    if not (copy / NAME).exists():
        _compose(copy)
    return copy


def _compose(bundle: Path) -> None:
    """`coreai-two-stage` has Hugging Face's numbers of each stage: put together, they are those of the whole."""
    paths = [bundle / f"stage_{number}.aimodel.reference.safetensors" for number in (0, 1)]
    first, last = (load_file(path) for path in paths)
    first_metadata, last_metadata = (_metadata(path) for path in paths)
    tensors: Tensors = {}
    for name, tensor in first.items():
        tensors[name.replace("expected/hidden_states_out", "expected/hidden_states.2")] = tensor
    tensors |= {name: tensor for name, tensor in last.items() if name.endswith("/expected/logits")}
    bounds = first_metadata["tolerances"]
    bounds["hidden_states.2"] = bounds.pop("hidden_states_out")
    bounds["logits"] = last_metadata["tolerances"]["logits"]
    save_file(tensors, bundle / NAME, {"g4patch": json.dumps({**first_metadata, "layers": 4})})
    for path in paths:
        path.unlink()


def _metadata(path: Path) -> Metadata:
    with safe_open(path, framework="np") as file:
        found: Metadata = json.loads(file.metadata()["g4patch"])
    return found


def rewrite(path: Path, change: Callable[[Tensors, Metadata], object]) -> None:
    """Change a reference file."""
    tensors, metadata = load_file(path), _metadata(path)
    change(tensors, metadata)
    save_file(tensors, path, {"g4patch": json.dumps(metadata)})


def keep_runs(bundle: Path, *runs: str) -> None:
    """Leave only some runs in the reference of a folder."""

    def drop(tensors: Tensors, metadata: Metadata) -> None:
        for name in [name for name in tensors if name.split("/")[0] not in runs]:
            del tensors[name]
        metadata["runs"] = {run: told for run, told in metadata.get("runs", {}).items() if run in runs}
        for told in metadata["runs"].values():
            told["without_media"] = told["without_media"] if told["without_media"] in runs else ""

    rewrite(bundle / NAME, drop)


def result(report: Report, name: str) -> Check:
    """The check of the whole model of this name."""
    (found,) = [check for check in report.whole if check.name == name]
    return found
