"""What is still wrong with a bundle after a command, as services that collect findings want it: a list, with places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from g4patch.output.layout import MEANING
from g4patch.report import Check, Finding, Outcome, Report, Severity, Status

# What is no rule's finding, and what it means.
CHECK_FAILED, CHECK_MISSING, INCONCLUSIVE = "check-failed", "check-missing", "inconclusive"
OTHER_RULES = {
    CHECK_FAILED: "A check of the bundle failed: it does not do what it should, and nothing was published.",
    CHECK_MISSING: "A check that was required could not run here: nothing was published.",
    INCONCLUSIVE: "What the bundle does about per-layer embeddings is not understood: nothing is claimed.",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `file` holds the graph that is meant; `graph` is empty where it is no single one."""

    rule: str
    severity: Severity
    message: str
    file: Path
    graph: str = ""
    nodes: tuple[str, ...] = ()


def problems(report: Report) -> Iterator[Problem]:
    """Findings that were not mended, checks that failed, and required checks that could not run."""
    for model in report.models:
        file = model.subject.model.replaced[0]
        for finding in model.findings:
            if not report.mended(finding):
                yield _problem(finding, report, file)
        yield from _checks(model.checks, report, file)
    yield from _checks(report.whole, report, report.models[0].subject.model.replaced[0])
    if report.outcome is Outcome.INCONCLUSIVE and not report.remaining:
        file = report.models[0].subject.model.replaced[0]
        yield Problem(INCONCLUSIVE, Severity.ERROR, f"{report.verdict}: {MEANING[report.verdict]}", file)


def _problem(finding: Finding, report: Report, file: Path) -> Problem:
    message = finding.message
    if finding.withheld:
        message += f". Not fixed: {finding.withheld}"
    elif report.plan.edits and report.mends(finding):
        message += ". g4patch fix mends it"
    elif finding.unsafe:
        message += f". Fixed only with --unsafe: {finding.unsafe}"
    return Problem(finding.rule, finding.severity, message, file, finding.graph, finding.nodes)


def _checks(checks: Iterable[Check], report: Report, file: Path) -> Iterator[Problem]:
    for check in checks:
        if check.status is Status.FAILED:
            yield Problem(CHECK_FAILED, Severity.ERROR, f"{check.name}: {check.summary}", file)
        elif check.status is Status.SKIPPED and check.name in report.required:
            yield Problem(CHECK_MISSING, Severity.ERROR, f"{check.name}: {check.summary}", file)


def shown_path(path: Path) -> str:
    """A file's path as a repository knows it: relative to the current folder where it is inside, with slashes."""
    absolute, here = path.absolute(), Path.cwd()
    return (absolute.relative_to(here) if absolute.is_relative_to(here) else absolute).as_posix()
