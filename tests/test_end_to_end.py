"""From a Hugging Face folder and broken exports of it to proven ones, by `record`, `fix` and `verify`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from g4patch.cli import main
from tests.conftest import SAMPLES, needs_build_python
from tests.test_coreai_format import needs_coreai
from tests.whole import NAME

pytestmark = [pytest.mark.slow, needs_build_python]

# Image, audio and video rows in one prompt, by the tiny model's ids; then what the model goes on with.
IMAGE, AUDIO, VIDEO, PAD = 310, 311, 314, 0
PROMPT = [2, 7, 255, IMAGE, IMAGE, VIDEO, AUDIO, 312, 200, IMAGE, 9]
TEXT = [token for token in PROMPT if token not in (IMAGE, AUDIO, VIDEO)]
FIRST_MEDIA_ROW = 3
STEPS = 6
WIDTH = 8  # of a layer's slice of the PLE table
FORMATS = ["onnx", "coreml", pytest.param("coreai", marks=needs_coreai)]

Report = dict[str, Any]
Command = Callable[..., tuple[int, Report]]


@pytest.fixture(scope="module")
def made(build_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, its reference and its exports, as tests/end_to_end_models.py leaves them."""
    folder = tmp_path_factory.mktemp("made")
    subprocess.run(
        [build_python, "-m", "tests.end_to_end_models", folder, ",".join(map(str, PROMPT)), str(STEPS)],
        cwd=SAMPLES.parent,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return folder


@pytest.fixture
def g4patch(capsys: pytest.CaptureFixture[str]) -> Command:
    """A command's exit code and its report."""

    def run(*arguments: object) -> tuple[int, Report]:
        code = main([*map(str, arguments), "--format", "json"])
        (report,) = json.loads(capsys.readouterr().out)["reports"]
        return code, report

    return run


@pytest.mark.parametrize("name", FORMATS)
def test_from_a_broken_bundle_to_a_proven_one(
    name: str, made: Path, tmp_path: Path, g4patch: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(made / name, tmp_path / name)
    shutil.copy(made / "recorded.safetensors", bundle / NAME)
    fits = {"media", "without media"} if name == "coreml" else {"media", "without media", "text"}

    code, report = g4patch("check", bundle)
    first, last = report["models"]
    assert (code, report["verdict"], first["verdict"], last["verdict"]) == (1, "raw", "raw", "host-side")
    assert {one["rule"] for one in first["findings"]} == {"ple-raw-ids", "splice-misses-rows"}
    assert not last["findings"]

    code, report = g4patch("verify", bundle)
    assert (code, report["outcome"]) == (3, "a check failed")
    assert statuses(report) == {"row map": "failed", "reference": "failed", "chain": "failed", "gates": "skipped"}
    assert_only_media_are_off(report, fits)
    first, last = report["models"]
    assert [one["found"]["cosine"] for one in first["checks"][1]["layers"]] == pytest.approx([raw_cosine(made)])
    assert last["checks"][1]["status"] == "passed"  # fed from the reference

    needed = [f"--require={check}" for check in ("structure", "row map", "differential", "reference", "chain", "gates")]
    code, report = g4patch("fix", bundle, *needed)
    assert (code, report["outcome"]) == (0, "fixed")
    assert set(statuses(report).values()) == {"passed"}
    chain, gates = report["whole"]
    assert all(not stage["chained"] and not stage["alone"] and stage["compared"] for stage in chain["stages"])
    left_out = [line for line in chain["details"] if line.startswith("left out")]
    rows = len(PROMPT) + STEPS
    only = f"left out: text: stage_0 takes no prompt of {len(TEXT) + STEPS} rows, only of {rows}"
    assert left_out == ([only] if "text" not in fits else [])
    for part in gates["logits"]["segments"]:
        assert part["found"]["argmax"] == 1
        worse = part["part"] in ("in", "after")
        assert (part["unpatched"]["mean_kl"] > 1e3 * part["found"]["mean_kl"]) is worse
    forced = {one["run"]: one for one in gates["logits"]["teacher_forced"]}
    assert forced.keys() == fits - {"without media"}
    assert (forced["media"]["right"], forced["media"]["without"]) == (STEPS, right_without_media(made))
    assert forced["media"]["unpatched"] < STEPS

    capsys.readouterr()
    assert main(["verify", str(bundle), "--require", "reference", "--require", "chain", "--require", "gates"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "PATCHED" in said
    assert "chain passed 2 stages" in said
    assert "gates passed mean KL from the media on" in said
    assert f"media: {STEPS} of {STEPS} tokens predicted, {right_without_media(made)} without the media" in said
    assert said.endswith("nothing to fix: verified against the reference")


def statuses(report: Report) -> dict[str, str]:
    """The checks of the stage that has the lookup, and of the whole."""
    return {check["name"]: check["status"] for check in (*report["models"][0]["checks"], *report["whole"])}


def assert_only_media_are_off(report: Report, fits: set[str]) -> None:
    """What the chain and the logits of the broken bundle must show: the fault is stage 0's, in media rows."""
    chain, gates = report["whole"]
    first, last = chain["stages"]
    place = {"run": "media", "name": "per_layer_identity", "layer": 0, "row": FIRST_MEDIA_ROW, "kind": "image"}
    assert first["chained"].items() >= place.items()
    assert first["alone"] == first["chained"]
    assert (last["chained"]["row"], last["chained"]["kind"], last["alone"]) == (FIRST_MEDIA_ROW, "image", None)
    near = {(one["run"], one["cosine"] > 0.9999) for stage in chain["stages"] for one in stage["cosines"]}
    assert near == {(run, run == "text") for run in fits}
    agreements = {(one["run"], one["part"]): one["found"]["argmax"] for one in gates["logits"]["segments"]}
    assert agreements["media", "before"] == 1
    assert agreements["media", "in"] < 1
    assert agreements.get(("text", "text"), 1) == 1


def raw_cosine(made: Path) -> float:
    """Of the media rows of layer 0, the table's own against its pad row."""
    weights = load_file(made / "gemma" / "model.safetensors")
    table = weights["model.language_model.embed_tokens_per_layer.weight"].astype(np.float64)[:, :WIDTH]
    raw = np.concatenate([table[token] for token in PROMPT if token not in TEXT])
    right = np.tile(table[PAD], len(PROMPT) - len(TEXT))
    return float(raw @ right / np.linalg.norm(raw) / np.linalg.norm(right))


def right_without_media(made: Path) -> int:
    """How much of its own continuation Hugging Face's model predicts without the media."""
    tensors = load_file(made / "recorded.safetensors")
    ids, logits = tensors["media/input/input_ids"][0], tensors["without media/expected/logits"][0]
    return int((logits[-STEPS - 1 : -1].argmax(-1) == ids[-STEPS:]).sum())
