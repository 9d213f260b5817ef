"""`--format json`: every command's document is of the schema, and says what the text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import g4patch.output
from g4patch.cli import main
from g4patch.report import Outcome, Severity, Status
from g4patch.verdicts import Verdict
from tests.conftest import Copy, sample

SCHEMA = json.loads((Path(g4patch.output.__file__).parent / "report.schema.json").read_text())


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main([*arguments, "--format", "json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, SCHEMA)
    assert found["exit_code"] == code
    return found


def test_schema_is_a_schema_and_names_every_word() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    report, model = SCHEMA["$defs"]["report"]["properties"], SCHEMA["$defs"]["model"]["properties"]
    assert set(report["verdict"]["enum"]) == set(Verdict)
    assert set(report["outcome"]["enum"]) == set(Outcome)
    assert set(model["findings"]["items"]["properties"]["severity"]["enum"]) == set(Severity)
    assert set(SCHEMA["$defs"]["check"]["properties"]["status"]["enum"]) == set(Status)


def test_inspect_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "check"):
        (report,) = document(capsys, command, str(sample("onnx-stage")))["reports"]
        (model,) = report["models"]
        (lookup,) = model["graphs"][0]["lookups"]
        assert (report["verdict"], lookup["verdict"], lookup["missing"]) == ("raw", "raw", [310, 311, 314])
        assert lookup["media_rows"] == {"image": 310, "audio": 311, "video": 314}
        assert (lookup["layers"], lookup["layer_width"], lookup["table"]["shape"]) == (3, 8, [320, 24])
        assert model["token_ids"]["pad"] == {"id": 0, "source": "config.json"}
        assert [finding["fixable"] for finding in model["findings"]] == [True, True]


def test_fix_and_verify(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    (planned,) = document(capsys, "fix", "--dry-run", str(bundle))["reports"]
    (report,) = document(capsys, "fix", str(bundle))["reports"]
    assert (planned["outcome"], report["outcome"]) == ("would fix", "fixed")
    assert planned["models"][0]["plan"] == report["models"][0]["plan"]
    assert [check["status"] for check in report["models"][0]["checks"]] == ["passed"] * 5
    assert report["publication"]["target"] == str(bundle)
    (report,) = document(capsys, "verify", str(bundle))["reports"]
    assert report["outcome"] == "nothing to fix"


def test_errors_are_in_the_document_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"junk")
    found = document(capsys, "check", str(bad), str(sample("onnx-right")))
    assert found["exit_code"] == 2
    assert [error["bundle"] for error in found["errors"]] == [str(bad)]
    assert found["errors"][0]["hint"]
    assert len(found["reports"]) == 1


def test_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    arguments = ["check", str(sample("onnx-right")), "--output-file", str(out)]
    assert main([*arguments, "--format", "json"]) == 0
    jsonschema.validate(json.loads(out.read_text()), SCHEMA)
    assert main(arguments) == 0
    assert "PATCHED" in out.read_text()
    assert capsys.readouterr().out == ""
    assert main(["check", str(sample("onnx-right")), "--output-file", str(tmp_path / "no" / "where")]) == 2
