"""Configurations that wire models: what is missing is found, added where its producer is known, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from g4patch import Options, check, engine, fix, formats, revert, verify
from g4patch.configs import read
from g4patch.edits import ConfigSet, Plan
from g4patch.errors import BundleError, EditError
from g4patch.formats import genai
from g4patch.report import Check, Finding, Outcome, Report, Status
from tests.conftest import SAMPLES, tree

ONLY = Options(select=frozenset({"per-layer-inputs-unwired"}))
CONFIG = "genai_config.json"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """mobius' package, whose configuration is right."""
    folder = tmp_path / "package"
    shutil.copytree(SAMPLES / "mobius-package", folder)
    return folder


def without(folder: Path, *paths: tuple[str, ...]) -> bytes:
    """Take entries out of the configuration, as exporters left them out. Returns the file as it was."""
    file = folder / CONFIG
    before = file.read_bytes()
    content = json.loads(before)
    for *above, last in paths:
        place: Any = content
        for key in above:
            place = place[key]
        del place[last]
    file.write_text(json.dumps(content, indent=4))
    return before


FED, TAKEN = ("model", "embedding", "outputs", "per_layer_inputs"), ("model", "decoder", "inputs", "per_layer_inputs")


def unwired(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule == "per-layer-inputs-unwired"]


def test_what_mobius_wires_is_right(package: Path) -> None:
    assert unwired(check(package)) == []


@pytest.mark.parametrize("missing", [(FED,), (TAKEN,), (FED, TAKEN)], ids=["outputs", "inputs", "both"])
def test_entries_are_added(missing: tuple[tuple[str, ...], ...], package: Path) -> None:
    right = without(package, *missing)
    before = tree(package)
    report = fix(package, ONLY)
    assert (report.outcome, report.exit_code) == (Outcome.FIXED, 0)
    (finding,) = unwired(report)
    assert [edit.path for edit in finding.edits if isinstance(edit, ConfigSet)] == list(missing)
    assert json.loads((package / CONFIG).read_bytes()) == json.loads(right)
    assert {path for path, digest in tree(package).items() if before.get(path) != digest} == {CONFIG}
    assert fix(package, ONLY).outcome is Outcome.CLEAN
    revert(package)
    assert tree(package) == before


def test_it_is_mended_together_with_the_graph(package: Path, tmp_path: Path) -> None:
    without(package, FED)
    report = fix(package, out=tmp_path / "mended")
    assert report.outcome is Outcome.FIXED
    assert {model.subject.model.path.name for model in report.models if model.plan.edits} == {"model.onnx", CONFIG}
    assert check(tmp_path / "mended").exit_code == 0
    assert check(package).exit_code == 1


def test_nothing_is_added_where_nothing_computes_it(package: Path) -> None:
    without(package, FED)
    config = json.loads((package / CONFIG).read_text())
    config["model"]["embedding"]["filename"] = "elsewhere/model.onnx"
    (package / CONFIG).write_text(json.dumps(config, indent=4))
    (finding,) = unwired(report := check(package, ONLY))
    assert (finding.edits, report.exit_code) == ((), 1)
    assert "no output of the embedding model" in finding.withheld


def test_a_file_that_no_json_writer_lays_out_so_is_left_alone(package: Path) -> None:
    without(package, FED)
    file = package / CONFIG
    file.write_text(file.read_text().replace('"type":', '"type"  :'))
    before = file.read_bytes()
    report = fix(package, ONLY)
    assert report.exit_code == 1
    assert "by hand" in unwired(report)[0].withheld
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "write",
    [
        lambda content: json.dumps(content),
        lambda content: json.dumps(content, indent=2) + "\n",
        lambda content: json.dumps(content, indent="\t", ensure_ascii=False) + "\n",
        lambda content: json.dumps(content, indent=3) + "\r\n",
    ],
    ids=["one line", "two columns", "tabs", "three columns"],
)
def test_the_layout_stays(write: Callable[[Any], str], tmp_path: Path) -> None:
    content = {"a": {"ü": [1, 2.5, None, True]}, "b": "ß"}
    (tmp_path / CONFIG).write_bytes(write(content).encode())
    config = read(tmp_path / CONFIG)
    assert config.with_entries([ConfigSet("", ("a", "c"), "d")]) == write({"a": {**content["a"], "c": "d"}, "b": "ß"})  # type: ignore[dict-item]


def test_a_wrong_entry_is_caught(package: Path, tmp_path: Path) -> None:
    without(package, FED)
    (model,) = [item for item in check(package, ONLY).models if item.plan.edits]
    before = model.subject
    for number, path in enumerate([TAKEN, (*FED[:-1], "per_layer_input")]):
        staged = {before.model.path: tmp_path / str(number)}
        formats.of(before.model).write(before.model, Plan((ConfigSet("", path, "per_layer_inputs"),)), staged)
        after = engine.open_model(before.model.path, staged=staged)
        assert verify.structure(before, after, model.plan).status is Status.FAILED


def test_a_fix_after_which_the_rule_still_finds_the_fault_is_not_published(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(package, FED)
    before = tree(package)
    passed = (Check("structure", Status.PASSED, "not looked at in this test"),)
    monkeypatch.setattr(verify, "verify_patch", lambda *_: passed)
    monkeypatch.setattr(genai, "write", lambda model, plan, staged: shutil.copy(model.path, staged[model.path]))
    report = fix(package, ONLY)
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_FAILED, 3)
    assert [check.status for check in report.checks if check.name == "rules"] == [Status.FAILED]
    assert tree(package) == before


def test_a_plan_that_has_no_place_is_refused(package: Path, tmp_path: Path) -> None:
    model = engine.open_model(package / CONFIG).model
    with pytest.raises(EditError, match="no place"):
        formats.of(model).write(
            model, Plan((ConfigSet("", ("model", "type", "x"), "y"),)), {model.path: tmp_path / "s"}
        )


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "[" * 100_000, '"text"'], ids=["empty", "list", "cut", "deep", "text"]
)
def test_what_is_no_configuration_is_refused(content: str, package: Path) -> None:
    (package / CONFIG).write_text(content)
    with pytest.raises(BundleError):
        check(package)


def test_a_configuration_is_no_bundle_by_itself(package: Path) -> None:
    with pytest.raises(BundleError, match="no bundle by itself"):
        check(package / CONFIG)
