"""Folders of several models: all are inspected, those that need it are mended together or not at all, one report."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from g4patch import check, fix, judging, revert
from g4patch.bundle import find
from g4patch.cli import main
from g4patch.errors import UsageError
from g4patch.report import Finding, Outcome, Subject
from g4patch.verdicts import Verdict
from tests.cases import load
from tests.conftest import SAMPLES, tree


@pytest.fixture
def mobius(tmp_path: Path) -> Path:
    """mobius' layout: one folder a model, the configuration above."""
    folder = tmp_path / "gemma"
    for name, source in (("embedding", "mobius-embedding"), ("decoder", "onnx-host-side")):
        (folder / name).mkdir(parents=True)
        for path in (SAMPLES / source).glob("model.onnx*"):
            shutil.copy(path, folder / name)
    shutil.copy(SAMPLES / "mobius-embedding" / "config.json", folder)
    return folder


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """transformers.js' layout: all models side by side, in two precisions."""
    folder = tmp_path / "gemma"
    (folder / "onnx").mkdir(parents=True)
    shutil.copy(SAMPLES / "onnx-fp16" / "model.onnx", folder / "onnx" / "embed_tokens_fp16.onnx")
    shutil.copy(SAMPLES / "onnx-stage" / "model.onnx", folder / "onnx" / "embed_tokens.onnx")
    shutil.copy(SAMPLES / "onnx-stage" / "model.onnx.data", folder / "onnx")
    shutil.copy(SAMPLES / "onnx-stage" / "config.json", folder)
    return folder


def test_every_model_is_reported_and_the_lookup_is_mended(mobius: Path) -> None:
    before = tree(mobius)
    report = check(mobius)
    verdicts = {model.subject.model.path.parent.name: model.subject.verdict for model in report.models}
    assert verdicts == {"embedding": Verdict.PARTIAL, "decoder": Verdict.HOST_SIDE}
    assert (report.verdict, report.exit_code) == (Verdict.PARTIAL, 1)
    assert fix(mobius).outcome is Outcome.FIXED
    changed = {path for path, digest in tree(mobius).items() if before.get(path) != digest}
    assert changed == {"embedding/model.onnx"}
    assert check(mobius).exit_code == 0
    assert revert(mobius)
    assert tree(mobius) == before
    assert not list(mobius.parent.glob("*.g4patch"))


def test_all_models_are_mended_in_one_step(flat: Path, tmp_path: Path) -> None:
    before = tree(flat)
    report = fix(flat)
    assert report.outcome is Outcome.FIXED
    assert {model.subject.verdict for model in report.models} == {Verdict.RAW}
    assert check(flat).verdict is Verdict.PATCHED
    assert fix(flat).outcome is Outcome.CLEAN
    revert(flat)
    assert tree(flat) == before
    assert fix(flat, out=tmp_path / "mended").outcome is Outcome.FIXED
    assert tree(flat) == before
    assert check(tmp_path / "mended").verdict is Verdict.PATCHED
    assert set(tree(tmp_path / "mended")) == set(before)


def test_one_that_cannot_be_mended_keeps_the_others_from_it(flat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = judging._edited

    def stuck(subject: Subject, finding: Finding) -> Finding:
        if subject.model.path.name == "embed_tokens.onnx":
            return replace(finding, edits=(), withheld="in this test")
        return real(subject, finding)

    monkeypatch.setattr(judging, "_edited", stuck)
    before = tree(flat.parent)
    report = fix(flat)
    assert (report.outcome, report.exit_code) == (Outcome.FOUND, 1)
    assert tree(flat.parent) == before


def test_models_without_a_lookup_are_not_suspicious_beside_one_that_has_it(flat: Path) -> None:
    case = SAMPLES.parent / "rules" / "ple-raw-ids" / "cases" / "no-ple.onnxtxt"
    alone = load(case).write(flat.parent)
    shutil.copy(flat / "config.json", flat.parent)
    assert check(alone).verdict is Verdict.AMBIGUOUS
    shutil.copy(alone, flat / "onnx" / "head.onnx")
    report = check(flat)
    assert {model.subject.verdict for model in report.models} == {Verdict.RAW, Verdict.NO_PLE}


def test_what_is_found(flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(find(flat).models) == 2
    (flat / "onnx" / "embed_tokens.onnx").unlink()
    assert find(flat).path == flat / "onnx" / "embed_tokens_fp16.onnx"
    assert not find(flat).is_folder
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no bundle"):
        find(tmp_path / "empty")


def test_the_folder_that_one_is_in(mobius: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(mobius)
    for place, inside in ((".", mobius), ("..", mobius / "decoder")):
        monkeypatch.chdir(inside)
        assert fix(Path(place)).outcome is Outcome.FIXED
        assert (mobius.parent / "gemma.g4patch").is_dir()
        revert(Path(place))
        assert tree(mobius) == before


def test_the_report_of_a_folder(mobius: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fix", str(mobius)]) == 0
    out = capsys.readouterr().out
    assert "gemma/  2 models" in out
    assert "HOST-SIDE" in out
    assert "undo: g4patch revert" in out


def test_a_copy_does_not_go_into_what_is_copied(mobius: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(mobius)
    monkeypatch.chdir(mobius)
    for out in (mobius / "mended", Path("mended"), Path("embedding") / "mended"):
        with pytest.raises(UsageError, match="is inside"):
            fix(mobius, out=out)
    assert tree(mobius) == before


def test_a_configuration_is_no_model_without_a_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(SAMPLES / "mobius-package", tmp_path / "package")
    assert main(["verify", str(folder)]) == 3
    assert main(["fix", str(folder)]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    assert "nothing to fix: verified against the reference" in capsys.readouterr().out
