"""What a command did. The outcome and the exit code are pure functions of a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from g4patch.edits import Edit, Plan
from g4patch.errors import G4PatchError, Interrupted
from g4patch.evidence import LogitEvidence, StageEvidence
from g4patch.formats import Model
from g4patch.metrics import Distance
from g4patch.ple import GraphAnalysis
from g4patch.sidecars import HostRows
from g4patch.tokens import TokenFacts
from g4patch.verdicts import INCONCLUSIVE, Verdict, worst


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
    COPIED = "nothing to fix, copied as it is"
    PARTLY_FIXED = "fixed in part: findings remain"
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
    edits: tuple[Edit, ...] = ()
    unsafe: str = ""
    withheld: str = ""

    def is_mended(self, unsafe: bool) -> bool:
        """Whether its edits are made, where `unsafe` ones were asked for or not."""
        return bool(self.edits) and (unsafe or not self.unsafe)


@dataclass(frozen=True)
class LayerDistance:
    """How far one layer's part of the looked-up rows is from the reference, over the media rows of all prompts.

    `unpatched` is the same for the model as it was, None where there is no such model.
    """

    graph: str
    layer: int
    found: Distance
    unpatched: Distance | None


@dataclass(frozen=True)
class Check:
    """The result of one check of verify: `passed` only if something was compared.

    `layers` is what the check of a reference with media rows says of each layer, `stages` what a chain says of each
    stage, `logits` the numbers of the gates.
    """

    name: str
    status: Status
    summary: str
    details: tuple[str, ...] = ()
    layers: tuple[LayerDistance, ...] = ()
    stages: tuple[StageEvidence, ...] = ()
    logits: LogitEvidence | None = None


@dataclass(frozen=True)
class Subject:
    """A model, the token ids that count for it, and what its graphs do about PLE.

    `host_rows` is what the media rows of a table are that a host looks up.
    `expects_ple`: the configuration promises PLE, and no other model of the bundle has to do with it.
    """

    model: Model
    tokens: TokenFacts
    analyses: tuple[GraphAnalysis, ...]
    expects_ple: bool = False
    host_rows: HostRows | None = None

    @property
    def looks_up(self) -> bool:
        """Whether there is anything here that could look PLE up: graphs, or a table for hosts."""
        return bool(self.model.graphs) or self.host_rows is not None

    @property
    def verdict(self) -> Verdict:
        if self.host_rows is not None:
            return self.host_rows.verdict
        verdict = worst(analysis.verdict for analysis in self.analyses)
        return Verdict.AMBIGUOUS if verdict is Verdict.NO_PLE and self.expects_ple else verdict

    @property
    def portable(self) -> Subject:
        """The same without the format's own object, which belongs to the process that opened the model."""
        return replace(self, model=replace(self.model, native=None))


@dataclass(frozen=True)
class Publication:
    """Where a mended bundle went. `backup` is empty where the original, `source`, was left alone."""

    source: Path
    target: Path
    written: int
    backup: Path | None = None


@dataclass(frozen=True)
class HashedFile:
    """A file of a bundle where the command left it, its SHA-256, and the one that it had before."""

    path: Path
    sha256: str
    before: str


@dataclass(frozen=True)
class ModelReport:
    """What one command found, planned and checked in one model. `mended` is the model as it was written, if it was."""

    subject: Subject
    findings: tuple[Finding, ...] = ()
    plan: Plan = field(default_factory=Plan)
    checks: tuple[Check, ...] = ()
    mended: Subject | None = None


@dataclass(frozen=True)
class Report:
    """Everything that one command did to one bundle. `unsafe` and `required` are what was asked for.

    `whole` are the checks of all models together. `files` are hashed on request, where the exit code is 0: those that
    hold the graphs, or all.
    """

    command: str
    path: Path
    models: tuple[ModelReport, ...]
    unsafe: bool = False
    required: frozenset[str] = frozenset()
    publication: Publication | None = None
    files: tuple[HashedFile, ...] = ()
    seconds: float = 0.0
    whole: tuple[Check, ...] = ()

    @property
    def subject(self) -> Subject:
        """The subject of a bundle of one model. Raises ValueError for a folder of several."""
        (model,) = self.models
        return model.subject

    @property
    def place(self) -> Path:
        """Where the bundle is after the command: elsewhere if a copy was made."""
        return self.publication.target if self.publication is not None else self.path

    @property
    def plan(self) -> Plan:
        """All edits, of all models."""
        return Plan(tuple(edit for model in self.models for edit in model.plan.edits))

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for model in self.models for finding in model.findings)

    @property
    def checks(self) -> tuple[Check, ...]:
        return (*(check for model in self.models for check in model.checks), *self.whole)

    @property
    def verdict(self) -> Verdict:
        """The verdict that decides: the worst of all models."""
        return worst(model.subject.verdict for model in self.models)

    @property
    def remaining(self) -> tuple[Finding, ...]:
        """Errors that were not mended."""
        errors = (finding for finding in self.findings if finding.severity is Severity.ERROR)
        return tuple(finding for finding in errors if not self.mended(finding))

    def mends(self, finding: Finding) -> bool:
        """Whether the plan mends what a finding says."""
        return finding.is_mended(self.unsafe)

    def mended(self, finding: Finding) -> bool:
        """Whether it did: the mended bundle was published."""
        return self.publication is not None and self.mends(finding)

    @property
    def outcome(self) -> Outcome:
        if any(check.status is Status.FAILED for check in self.checks):
            return Outcome.CHECK_FAILED
        if any(check.name in self.required and check.status is Status.SKIPPED for check in self.checks):
            return Outcome.CHECK_MISSING
        if self.publication is not None:
            if not self.plan.edits:
                return Outcome.COPIED
            return Outcome.PARTLY_FIXED if self.remaining else Outcome.FIXED
        if self.verdict in INCONCLUSIVE:
            return Outcome.INCONCLUSIVE
        if self.plan.edits and self.command == "fix":
            return Outcome.PLANNED
        return Outcome.FOUND if self.remaining else Outcome.CLEAN

    @property
    def exit_code(self) -> int:
        if self.command == "inspect":
            return 0
        return _EXIT_CODES[self.outcome]


_EXIT_CODES = {
    Outcome.CLEAN: 0,
    Outcome.FIXED: 0,
    Outcome.COPIED: 0,
    Outcome.PARTLY_FIXED: 1,
    Outcome.FOUND: 1,
    Outcome.PLANNED: 1,
    Outcome.INCONCLUSIVE: 1,
    Outcome.CHECK_FAILED: 3,
    Outcome.CHECK_MISSING: 4,
}


@dataclass(frozen=True)
class Failure:
    """A bundle that could not be worked on."""

    bundle: str
    error: G4PatchError

    @property
    def exit_code(self) -> int:
        return 130 if isinstance(self.error, Interrupted) else 2


Result = Report | Failure

# From the best to the worst. A bundle that failed a check is known to be unfit, but at least it was read; an
# interruption stands above all, because nothing is said of what was not reached.
_FROM_BEST_TO_WORST = (0, 1, 4, 3, 2, 130)


def worst_exit_code(codes: Iterable[int]) -> int:
    """The exit code of a run over several bundles."""
    return max(codes, key=_FROM_BEST_TO_WORST.index, default=0)
