"""What a command did. The outcome and the exit code are pure functions of a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from g4patch.edits import GraphEdit, Plan
from g4patch.formats import Model
from g4patch.ple import INCONCLUSIVE, GraphAnalysis, Verdict, model_verdict
from g4patch.tokens import TokenFacts


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Outcome(StrEnum):
    """How a command ended, in the words that are printed."""

    CLEAN = "nothing to fix"
    FOUND = "findings remain"
    INCONCLUSIVE = "inconclusive"
    PLANNED = "would fix"
    FIXED = "fixed"
    CHECK_FAILED = "a check failed"
    CHECK_MISSING = "a required check could not run"


@dataclass(frozen=True)
class Finding:
    """What a rule says of one or more nodes, the edits that would mend it, or why there are none.

    `unsafe` is set where the edits are applied only on request, and says why. `withheld` says why there are no edits.
    """

    rule: str
    severity: Severity
    message: str
    graph: str
    nodes: tuple[str, ...] = ()
    edits: tuple[GraphEdit, ...] = ()
    unsafe: str = ""
    withheld: str = ""


@dataclass(frozen=True)
class Check:
    """The result of one check of verify: `passed` only if something was compared."""

    name: str
    status: Status
    summary: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """A model, the token ids that count for it, and what its graphs do about PLE."""

    model: Model
    tokens: TokenFacts
    analyses: tuple[GraphAnalysis, ...]

    @property
    def verdict(self) -> Verdict:
        return model_verdict(self.analyses, self.tokens)


@dataclass(frozen=True)
class Publication:
    """Where a mended model went. `backup` is empty where the original was left alone."""

    target: Path
    written: int
    backup: Path | None = None


@dataclass(frozen=True)
class Report:
    """Everything that one command did to one bundle."""

    command: str
    subject: Subject
    findings: tuple[Finding, ...] = ()
    plan: Plan = field(default_factory=Plan)
    checks: tuple[Check, ...] = ()
    required: frozenset[str] = frozenset()
    publication: Publication | None = None
    seconds: float = 0.0

    @property
    def outcome(self) -> Outcome:
        if any(check.status is Status.FAILED for check in self.checks):
            return Outcome.CHECK_FAILED
        if any(check.name in self.required and check.status is Status.SKIPPED for check in self.checks):
            return Outcome.CHECK_MISSING
        if self.publication is not None:
            return Outcome.FIXED
        if self.subject.verdict in INCONCLUSIVE:
            return Outcome.INCONCLUSIVE
        if any(finding.severity is Severity.ERROR for finding in self.findings):
            return Outcome.PLANNED if self.command == "fix" and self.plan.edits else Outcome.FOUND
        return Outcome.CLEAN

    @property
    def exit_code(self) -> int:
        if self.command == "inspect":
            return 0
        return _EXIT_CODES[self.outcome]


_EXIT_CODES = {
    Outcome.CLEAN: 0,
    Outcome.FIXED: 0,
    Outcome.FOUND: 1,
    Outcome.PLANNED: 1,
    Outcome.INCONCLUSIVE: 1,
    Outcome.CHECK_FAILED: 3,
    Outcome.CHECK_MISSING: 4,
}
