"""inspect, check, fix: the only orchestration. Each yields one Report and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from g4patch import bundle, formats, verify
from g4patch.edits import Plan
from g4patch.errors import BundleError
from g4patch.ple import GraphAnalysis, analyse
from g4patch.report import Check, Finding, Publication, Report, Status, Subject
from g4patch.rules import find_rules
from g4patch.tokens import TokenFacts, TokenFlags, resolve


def _silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class Options:
    """What a user may ask for. `required` names checks that must not be skipped."""

    tokens: TokenFlags = field(default_factory=TokenFlags)
    required: frozenset[str] = frozenset()
    progress: bundle.Progress = _silent


def open_bundle(path: Path, options: Options = Options(), staged: Path | None = None) -> Subject:
    """Open a model and analyse its graphs. `staged` is read in place of its graph file. Raises BundleError."""
    model = formats.load(path.suffix.lower()).open_model(path, staged)
    tokens = resolve(path, options.tokens)
    analyses = tuple(analyse(graph, tokens) for graph in model.graphs)
    _refuse_contradiction(analyses, tokens)
    return Subject(model, tokens, analyses)


def _refuse_contradiction(analyses: Sequence[GraphAnalysis], tokens: TokenFacts) -> None:
    """A graph that splices by ids none of which is a media id belongs to other token ids."""
    spliced = {token for analysis in analyses for splice in analysis.splices for token in splice.ids}
    spliced.discard(tokens.pad_id)
    media = set(tokens.media.values())
    if spliced and media and not spliced & media:
        ids = ", ".join(str(token) for token in sorted(spliced)[:3])
        raise BundleError(
            f"the graph splices rows of id {ids}, which {' and '.join(tokens.sources)} do not call media ids",
            "pass the model's own ids: --image-token-id, --audio-token-id, --video-token-id",
        )


def inspect(path: Path | None = None, options: Options = Options()) -> Report:
    """What a bundle is and what it does about PLE, with findings and the plan that `fix` would apply."""
    return _judge("inspect", bundle.find(path), options)


def check(path: Path | None = None, options: Options = Options()) -> Report:
    """Findings. Nothing is written."""
    return _judge("check", bundle.find(path), options)


def _judge(command: str, path: Path, options: Options) -> Report:
    started = time.monotonic()
    subject = open_bundle(path, options)
    findings = tuple(finding for rule in find_rules() for finding in rule.run(subject))
    plan = _plan(subject, findings)
    return Report(command, subject, findings, plan, seconds=time.monotonic() - started)


def _plan(subject: Subject, findings: Sequence[Finding]) -> Plan:
    edits = [edit for finding in findings for edit in finding.edits]
    return formats.of(subject.model).complete(subject.model, Plan(tuple(edits))) if edits else Plan()


def fix(
    path: Path | None = None, options: Options = Options(), *, out: Path | None = None, dry_run: bool = False
) -> Report:
    """Plan, apply, verify on the stage, publish: in place, or to `out`. `dry_run` stops after the plan."""
    started = time.monotonic()
    report = _judge("fix", bundle.find(path), options)
    if dry_run or not report.plan.edits:
        return report
    checks, publication = _apply(report.subject, report.plan, options, out)
    return Report(
        "fix",
        report.subject,
        report.findings,
        report.plan,
        checks,
        options.required,
        publication,
        time.monotonic() - started,
    )


def _apply(
    before: Subject, plan: Plan, options: Options, out: Path | None
) -> tuple[tuple[Check, ...], Publication | None]:
    model = before.model
    with bundle.stage(model) as staged:
        formats.of(model).write(model, plan, staged)
        after = open_bundle(model.path, options, staged)
        checks = verify.verify_patch(before, after, plan)
        if any(_stops(result, options.required) for result in checks):
            return checks, None
        if out is not None:
            return checks, bundle.publish_elsewhere(model, staged, out, options.progress)
        return checks, bundle.publish_in_place(model, staged)


def _stops(result: Check, required: frozenset[str]) -> bool:
    return result.status is Status.FAILED or (result.status is Status.SKIPPED and result.name in required)
