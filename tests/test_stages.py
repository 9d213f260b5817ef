"""A bundle folder of two stages: both mended or neither, and what stays wrong in the later one is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from g4patch import check, engine, fix, judging, revert, verify_bundle
from g4patch.cli import main
from g4patch.formats import coreai
from g4patch.report import Check, Finding, Outcome, Report, Severity, Status, Subject
from g4patch.verdicts import Verdict
from tests.apple_runtime import whole
from tests.conftest import SAMPLES, Copy, numbers, tree
from tests.test_coreai_format import MEDIA, needs_coreai

pytestmark = [pytest.mark.slow, needs_coreai]

Arrays = dict[str, NDArray[Any]]

LAYERS, FIRST_OF_STAGE_1 = 4, 2  # samples/build/coreai.py


@pytest.fixture
def bundle(copy: Copy) -> Path:
    return copy("coreai-two-stage")


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The sample, mended once for all tests that only look at it."""
    folder = shutil.copytree(SAMPLES / "coreai-two-stage", tmp_path_factory.mktemp("mended") / "coreai-two-stage")
    return folder, fix(folder)


def references(report: Report) -> list[Check]:
    return [found for found in report.checks if found.name == "reference"]


def remarks(report: Report) -> list[list[tuple[str, Severity]]]:
    return [[(finding.rule, finding.severity) for finding in model.findings] for model in report.models]


def test_both_stages_are_mended_and_what_stays_wrong_is_said(bundle: Path) -> None:
    before = tree(bundle)
    report = fix(bundle)
    assert (report.outcome, report.exit_code) == (Outcome.FIXED, 0)
    assert [model.subject.verdict for model in report.models] == [Verdict.RAW, Verdict.RAW]
    assert remarks(report) == [
        [("ple-raw-ids", Severity.ERROR), ("splice-misses-rows", Severity.ERROR)],
        [
            ("later-stage-projection", Severity.WARNING),
            ("ple-raw-ids", Severity.ERROR),
            ("splice-misses-rows", Severity.WARNING),
        ],
    ]
    assert {edit.rule for edit in report.models[1].plan.edits} == {"ple-raw-ids"}
    assert {found.status for found in report.checks} == {Status.PASSED}

    after = check(bundle)
    assert [model.subject.verdict for model in after.models] == [Verdict.PATCHED, Verdict.PATCHED]
    assert remarks(after) == [
        [],
        [("later-stage-projection", Severity.WARNING), ("splice-misses-rows", Severity.WARNING)],
    ]
    assert not any(after.mends(finding) for finding in after.findings if finding.rule == "later-stage-projection")
    changed = {path for path, digest in tree(bundle).items() if before[path] != digest}
    assert changed == {f"stage_{n}.aimodel/{name}" for n in (0, 1) for name in ("main.mlirb", "main.hash")}
    revert(bundle)
    assert tree(bundle) == before


def test_which_layers_a_stage_takes(bundle: Path) -> None:
    """In the table of all layers, the first stage takes the first slices and the second the others."""
    taken = [
        lookup.layers_used
        for stage in (0, 1)
        for lookup in engine.open_model(bundle / f"stage_{stage}.aimodel").analyses[0].lookups
    ]
    assert taken == [frozenset(range(FIRST_OF_STAGE_1)), frozenset(range(FIRST_OF_STAGE_1, LAYERS))]


@pytest.mark.parametrize("run", ["media", "left padding", "text"])
def test_the_first_stage_is_hugging_face_on_every_row(mended: tuple[Path, Report], run: str) -> None:
    """To 1e-5 of the largest value: float32 rounds to 6e-8, and tens of terms are summed in another order."""
    broken, right = SAMPLES / "coreai-two-stage" / "stage_0.aimodel", mended[0] / "stage_0.aimodel"
    fed, expected = numbers(broken, run)
    wanted = expected["hidden_states_out"]
    limit = 1e-5 * np.abs(wanted).max()
    assert (np.abs(whole(broken, fed) - wanted) > limit).any() == (run != "text")
    assert (np.abs(whole(right, fed) - wanted) <= limit).all()


def test_the_later_stage_is_right_for_text_and_not_for_media(mended: tuple[Path, Report]) -> None:
    """Media rows get a projection of layer outputs or of placeholders, whatever the ids are: nothing mends that.

    Hugging Face's own hidden states are fed. Tolerance: as for the first stage.
    """
    bundle, _ = mended
    stage = bundle / "stage_1.aimodel"
    fed, expected = numbers(stage, "text")
    right = expected["logits"]
    assert np.abs(whole(stage, fed, "logits") - right).max() <= 1e-5 * np.abs(right).max()

    fed, expected = numbers(stage, "media")
    assert expected.keys() == {"per_layer_identity"}
    right = numbers(bundle / "stage_0.aimodel", "media")[1]["per_layer_inputs"]
    subject = engine.open_model(stage)
    (lookup,) = subject.analyses[0].lookups
    assert lookup.combined is not None
    found = coreai.probe(subject.model, "main").run(fed, [lookup.combined])[lookup.combined]
    wrong = np.abs(found - right).max(axis=(0, 2, 3)) > 1e-2
    assert np.array_equal(wrong, np.isin(fed["input_ids"][0], MEDIA))


def test_each_layer_of_each_stage_before_and_after(mended: tuple[Path, Report]) -> None:
    """float32 rows times sqrt(D), a single product: 1e-6."""
    for stage, found in zip(range(2), references(mended[1]), strict=True):
        assert [one.layer for one in found.layers] == list(range(LAYERS))
        for one in found.layers:
            assert one.unpatched is not None
            assert abs(one.found.cosine - 1) < 1e-6
            assert abs(one.found.norm_ratio - 1) < 1e-6
            assert one.found.delta_norm < 1e-6
            assert one.unpatched.cosine < 0.9, stage
            assert one.unpatched.delta_norm > 1


def test_layers_before_by_hand(mended: tuple[Path, Report]) -> None:
    """The broken lookup reads the rows of the placeholders themselves, which the table gives."""
    bundle, report = mended
    tensors = load_file(f"{bundle / 'stage_0.aimodel'}.reference.safetensors")
    expected = []
    for run in ("left padding", "media"):
        is_media = np.isin(tensors[f"{run}/input/input_ids"][0], MEDIA)
        expected.append(tensors[f"{run}/expected/per_layer_identity"][0, is_media])
    right = np.concatenate(expected).astype(np.float64)
    subject = engine.open_model(bundle / "stage_0.aimodel")
    (lookup,) = subject.analyses[0].lookups
    ids = np.concatenate([tensors[f"{run}/input/input_ids"][0] for run in ("left padding", "media")])
    own = coreai.probe(subject.model, "main")
    rows = own.table(lookup.index, lookup.output, ids[np.isin(ids, MEDIA)]).reshape(right.shape) * np.sqrt(8.0)
    found, _ = references(report)
    for one in found.layers:
        a, e = rows[:, one.layer].ravel(), right[:, one.layer].ravel()
        assert one.unpatched is not None
        assert one.unpatched.cosine == pytest.approx(a @ e / np.sqrt((a @ a) * (e @ e)), abs=1e-6)
        assert one.unpatched.norm_ratio == pytest.approx(np.sqrt((a @ a) / (e @ e)), abs=1e-6)
        assert one.unpatched.delta_norm == pytest.approx(np.sqrt((a - e) @ (a - e)), abs=1e-5)


def test_the_report_shows_them(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", str(bundle)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [at for at, line in enumerate(lines) if "layer cosine" in line]
    assert len(heads) == 2
    for head in heads:
        for layer, line in enumerate(lines[head + 1 : head + 1 + LAYERS]):
            words = line.split()
            assert words[0] == str(layer)
            assert (words[3], words[6], words[9]) == ("1.0000", "1.000", "0")
    assert main(["verify", str(bundle), "--format", "json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    for model in report["models"]:
        layers = model["checks"][-1]["layers"]
        assert [layer["layer"] for layer in layers] == list(range(LAYERS))
        assert all(layer["found"]["delta_norm"] < 1e-6 < layer["unpatched"]["delta_norm"] for layer in layers)


def test_one_stage_that_cannot_be_mended_keeps_the_other_from_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = judging._edited

    def stuck(subject: Subject, finding: Finding) -> Finding:
        if subject.model.path.name == "stage_1.aimodel":
            return replace(finding, edits=(), withheld="in this test")
        return real(subject, finding)

    monkeypatch.setattr(judging, "_edited", stuck)
    before = tree(bundle.parent)
    report = fix(bundle)
    assert (report.outcome, report.exit_code) == (Outcome.FOUND, 1)
    assert tree(bundle.parent) == before


def test_one_stage_whose_check_fails_keeps_the_other_from_it(bundle: Path) -> None:
    path = Path(f"{bundle / 'stage_1.aimodel'}.reference.safetensors")
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["text/expected/logits"][0, 0, 0] += 1
    save_file(tensors, path, metadata)
    before = tree(bundle.parent)
    report = fix(bundle)
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_FAILED, 3)
    assert [found.status for found in references(report)] == [Status.PASSED, Status.FAILED]
    assert tree(bundle.parent) == before


def test_verify_without_the_originals(bundle: Path, tmp_path: Path) -> None:
    """A mended copy keeps no unpatched models: the distances are those of what is there."""
    assert fix(bundle, out=tmp_path / "mended").outcome is Outcome.FIXED
    for found in references(verify_bundle(bundle)):
        assert found.status is Status.FAILED
        assert all(one.unpatched is None and one.found.cosine < 0.9 for one in found.layers)
        assert len(found.layers) == LAYERS
