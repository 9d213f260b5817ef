"""Judge a bundle: what the rules say of its models, and the plan that would mend them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from g4patch import formats, publish
from g4patch.bundle import Bundle
from g4patch.edits import Plan
from g4patch.options import Options
from g4patch.report import Finding, ModelReport, Report, Subject
from g4patch.rules import Rule, find_rule, find_rules
from g4patch.subjects import open_model
from g4patch.verdicts import BEYOND_REPAIR, INCONCLUSIVE, Verdict


def judge(command: str, bundle: Bundle, options: Options) -> Report:
    """The report of a command before anything is written. What a killed process left is tidied up first."""
    started = time.monotonic()
    publish.recover_if_needed(bundle.path)
    subjects = [open_model(path, options) for path in bundle.models]
    if any(subject.verdict not in (Verdict.NO_PLE, Verdict.AMBIGUOUS) for subject in subjects):
        # The promised lookup was found: models that have nothing to do with it are not suspicious.
        subjects = [replace(subject, expects_ple=False) for subject in subjects]
    findings = findings_of(subjects, options)
    models = tuple(ModelReport(subject, said) for subject, said in zip(subjects, findings, strict=True))
    report = Report(command, bundle.path, models, options.unsafe, options.required)
    if not (bundle.is_folder and _is_stuck(report)):
        models = tuple(replace(model, plan=_plan(model, options.unsafe)) for model in models)
    return replace(report, models=models, seconds=time.monotonic() - started)


def findings_of(subjects: Sequence[Subject], options: Options) -> list[tuple[Finding, ...]]:
    """What the rules say of each model."""
    said = [pair for rule in _rules(options) for pair in rule.run(subjects)]
    return [tuple(_edited(subject, finding) for of, finding in said if of is subject) for subject in subjects]


def _edited(subject: Subject, finding: Finding) -> Finding:
    """A finding without its edits where the lookup is not understood, or stays wrong whatever else is edited."""
    what = "cannot be mended" if _is_beyond_repair(subject) else ""
    what = "is not understood" if subject.verdict in INCONCLUSIVE else what
    if not finding.edits or not what:
        return finding
    reason = f"the verdict is {subject.verdict}: a bundle that {what} is not edited"
    return replace(finding, edits=(), withheld=reason)


def _is_beyond_repair(subject: Subject) -> bool:
    return subject.verdict in BEYOND_REPAIR and subject.host_rows is None


def _is_stuck(report: Report) -> bool:
    """Whether an error somewhere in a folder cannot be mended: all of its models are, or none.

    What its rule never mends, such as a tower's lost bounds, is another fault and holds nothing up.
    """
    mending = {rule.id for rule in find_rules() if rule.fix != "none"}
    unmended = any(finding.rule in mending and not report.mends(finding) for finding in report.remaining)
    return unmended or any(_is_beyond_repair(model.subject) for model in report.models)


def _rules(options: Options) -> tuple[Rule, ...]:
    """The rules to run. Raises RuleError for a name that is no rule."""
    for name in options.select | options.ignore:
        find_rule(name)
    chosen = (rule for rule in find_rules() if rule.id not in options.ignore)
    return tuple(rule for rule in chosen if not options.select or rule.id in options.select)


def _plan(model: ModelReport, unsafe: bool) -> Plan:
    edits = [edit for finding in model.findings if finding.is_mended(unsafe) for edit in finding.edits]
    return formats.of(model.subject.model).complete(model.subject.model, Plan(tuple(edits))) if edits else Plan()
