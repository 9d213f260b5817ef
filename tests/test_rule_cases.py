"""Every case of every rule gives the verdict and the plan that its comments state."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4patch import inspect
from g4patch.edits import Const, GraphEdit, RowCopy
from g4patch.report import Finding, Report
from g4patch.verdicts import Verdict
from g4patch.view import Op
from tests.cases import all_cases, load


def described(finding: Finding) -> str:
    """The plan of a finding, in the words of the cases."""
    (edit,) = finding.edits
    if isinstance(edit, RowCopy):
        return f"copy row {edit.source} over {' '.join(str(row) for row in edit.rows)}"
    assert isinstance(edit, GraphEdit)
    constants = [node.operands["y"] for node in edit.nodes if node.op is Op.EQUAL]
    ids = [str(constant.value) for constant in constants if isinstance(constant, Const)]
    uses = sorted(f"{redirect.use.node}.{redirect.use.operand}" for redirect in edit.redirects)
    verb = "mask" if any(node.op is Op.WHERE for node in edit.nodes) else "take"
    return f"{'unsafe, ' if finding.unsafe else ''}{verb} {' '.join(ids)} at {' '.join(uses)}"


def said(finding: Finding) -> str:
    if finding.withheld:
        return f"{finding.rule}: withheld"
    return f"{finding.rule}: {described(finding) if finding.edits else finding.severity}"


def plan(report: Report) -> str:
    """What all rules say, those that edit first; what ple-raw-ids says of most other verdicts is the verdict."""
    findings = sorted(report.findings, key=lambda found: (not (found.edits or found.withheld), found.rule))
    known = (Verdict.RAW, Verdict.PARTIAL, Verdict.PATCHED, Verdict.CLOBBERED)
    if len(report.models) == 1 and report.subject.host_rows is None and report.subject.verdict not in known:
        assert not report.plan.edits
        findings = [found for found in findings if found.rule != "ple-raw-ids"]
    return " and ".join(said(found) for found in findings)


def verdicts(report: Report) -> str:
    """The verdicts of all models that can have one, in the order of their names."""
    return " ".join(model.subject.verdict for model in report.models if model.subject.looks_up)


@pytest.mark.parametrize("path", all_cases(), ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_case(path: Path, tmp_path: Path) -> None:
    case = load(path)
    report = inspect(case.write(tmp_path))
    assert (verdicts(report), plan(report)) == (case.verdict, case.plan)
    assert case.says in " ".join(found.message for found in report.findings)


def test_every_verdict_has_a_case() -> None:
    assert {verdict for path in all_cases() for verdict in load(path).verdict.split()} == set(Verdict)
