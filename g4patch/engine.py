"""inspect, check, fix: the only orchestration. Each yields one Report and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from g4patch import bundle, formats, publish, receipts, reference, verify
from g4patch.copying import Progress, copied, publish_copy
from g4patch.edits import Plan
from g4patch.errors import BundleError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.ple import GraphAnalysis, analyse
from g4patch.reference import Reference
from g4patch.report import Finding, Outcome, Publication, Report, Subject
from g4patch.rules import Rule, find_rule, find_rules
from g4patch.tokens import TokenFacts, TokenFlags, resolve


def _silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class Options:
    """What a user may ask for.

    `select` and `ignore` name rules: all are run where `select` is empty. `unsafe` also applies edits that are not
    safe. `reference` is used in place of the one beside the bundle. `required` names checks that must not be skipped.
    """

    tokens: TokenFlags = field(default_factory=TokenFlags)
    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    unsafe: bool = False
    reference: Path | None = None
    required: frozenset[str] = frozenset()
    progress: Progress = _silent


def open_bundle(path: Path, options: Options = Options(), staged: Staged = NOT_STAGED) -> Subject:
    """Open a model and analyse its graphs. Files in `staged` are read from there. Raises BundleError."""
    publish.recover_if_needed(path)
    subject = _subject(formats.load(path.suffix.lower()).open_model(path, staged), resolve(path, options.tokens))
    _refuse_contradiction(subject.analyses, subject.tokens)
    return subject


def _subject(model: Model, tokens: TokenFacts) -> Subject:
    analyses = tuple(analyse(graph, tokens) for graph in model.graphs)
    rows = [lookup.table.rows for analysis in analyses for lookup in analysis.lookups]
    if rows and (within := tokens.within(max(rows))) != tokens:
        tokens = within
        analyses = tuple(analyse(graph, tokens) for graph in model.graphs)
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
    findings = tuple(finding for rule in _rules(options) for finding in rule.run(subject))
    plan = _plan(subject, findings, options.unsafe)
    return Report(command, subject, findings, plan, seconds=time.monotonic() - started)


def _rules(options: Options) -> tuple[Rule, ...]:
    """The rules to run. Raises RuleError for a name that is no rule."""
    for name in options.select | options.ignore:
        find_rule(name)
    chosen = (rule for rule in find_rules() if rule.id not in options.ignore)
    return tuple(rule for rule in chosen if not options.select or rule.id in options.select)


def _plan(subject: Subject, findings: Sequence[Finding], unsafe: bool) -> Plan:
    edits = [edit for finding in findings if unsafe or not finding.unsafe for edit in finding.edits]
    return formats.of(subject.model).complete(subject.model, Plan(tuple(edits))) if edits else Plan()


def fix(
    path: Path | None = None, options: Options = Options(), *, out: Path | None = None, dry_run: bool = False
) -> Report:
    """Plan, apply, verify on the stage, publish: in place, or to `out`. `dry_run` stops after the plan."""
    started = time.monotonic()
    path = bundle.find(path)
    report = _judge("fix", path, options)
    if report.plan.edits and not dry_run:
        report = _fix_in_place(path, options) if out is None else _fix_copy(report, options, out)
    return replace(report, seconds=time.monotonic() - started)


def _fix_in_place(path: Path, options: Options) -> Report:
    with publish.locked(path):
        publish.recover(path)
        # Once more: only from here on is nobody else changing the bundle.
        report = _judge("fix", path, options)
        if not report.plan.edits:
            return report
        model = report.subject.model
        with publish.stage(model) as staged:
            report = _write_and_verify(report, options, path, staged, staged)
            if not _stopped(report):
                receipt = receipts.receipt(report)
                report = replace(report, publication=publish.publish_in_place(model, staged, receipt))
    return report


def _fix_copy(report: Report, options: Options, out: Path) -> Report:
    with copied(report.subject.model, out, options.progress) as copy:
        report = _write_and_verify(report, options, copy.bundle, copy.staged, NOT_STAGED)
        if not _stopped(report):
            report = replace(report, publication=Publication(copy.out, publish_copy(copy)))
    return report


def _write_and_verify(report: Report, options: Options, path: Path, writes: Staged, reads: Staged) -> Report:
    """Write the replaced files to `writes`, then judge the bundle at `path` as it is with `reads` in place."""
    before, plan = report.subject, report.plan
    fmt = formats.of(before.model)
    fmt.write(before.model, plan, writes)
    after = _subject(fmt.open_model(path, reads), before.tokens)
    against = _reference(before.model.path, options)
    return replace(report, checks=verify.verify_patch(before, after, plan, against), required=options.required)


def _reference(path: Path, options: Options) -> Reference | None:
    """The reference that was named, else the one beside the bundle."""
    place = options.reference or reference.beside(path)
    return reference.load(place) if place is not None else None


def verify_bundle(path: Path | None = None, options: Options = Options()) -> Report:
    """Judge a bundle as it stands, patched by g4patch or not; nothing is written."""
    started = time.monotonic()
    path = bundle.find(path)
    report = _judge("verify", path, options)
    kept = publish.originals(report.subject.model)
    before = _subject(formats.of(report.subject.model).open_model(path, kept), report.subject.tokens) if kept else None
    checks = verify.verify_bundle(report.subject, before, _reference(path, options))
    return replace(report, checks=checks, required=options.required, seconds=time.monotonic() - started)


def _stopped(report: Report) -> bool:
    return report.outcome in (Outcome.CHECK_FAILED, Outcome.CHECK_MISSING)


def revert(path: Path | None = None) -> tuple[Path, ...]:
    """Undo the last in-place fix of a bundle, byte for byte. Returns the files that were put back."""
    return publish.revert(bundle.find(path))
