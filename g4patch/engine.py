"""inspect, check, fix: the only orchestration. Each yields one Report and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from g4patch import delta, digests, formats, publish, receipts, reference, sidecars, towers, verify, whole
from g4patch.bundle import Bundle, find
from g4patch.copying import Progress, copied, publish_copy, silent
from g4patch.delta import Span
from g4patch.digests import Hashed
from g4patch.edits import Plan
from g4patch.errors import BundleError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.ple import GraphAnalysis, analyse
from g4patch.reference import Reference
from g4patch.report import Check, Finding, ModelReport, Outcome, Publication, Report, Status, Subject
from g4patch.rules import Rule, find_rule, find_rules
from g4patch.thresholds import Thresholds
from g4patch.tokens import TokenFacts, TokenFlags, resolve
from g4patch.verdicts import INCONCLUSIVE, Verdict


@dataclass(frozen=True)
class Options:
    """What a user may ask for.

    `select` and `ignore` name rules: all are run where `select` is empty. `unsafe` also applies edits that are not
    safe. `reference` is used in place of the one beside the bundle, `gates` in place of the thresholds in it.
    `required` names checks that must not be skipped. `compute_unit` is cpu, gpu, ane or all: `verify` also runs the
    bundle there. `hashed` says which files are hashed where the work ends well.
    """

    tokens: TokenFlags = field(default_factory=TokenFlags)
    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    unsafe: bool = False
    reference: Path | None = None
    gates: Thresholds | None = None
    required: frozenset[str] = frozenset()
    compute_unit: str = ""
    hashed: Hashed = Hashed.NOTHING
    progress: Progress = silent


def open_model(path: Path, options: Options = Options(), staged: Staged = NOT_STAGED) -> Subject:
    """Open one model and analyse its graphs. Files in `staged` are read from there. Raises BundleError."""
    subject = _subject(formats.load(path).open_model(path, staged), resolve(path, options.tokens))
    _refuse_contradiction(subject.analyses, subject.tokens)
    return subject


def _subject(model: Model, tokens: TokenFacts) -> Subject:
    if model.host_table is not None:
        tokens = tokens.within(model.host_table.table.rows)
        return Subject(model, tokens, (), host_rows=sidecars.analyse(model.host_table, tokens))
    analyses = tuple(analyse(graph, tokens) for graph in model.graphs)
    rows = [lookup.table.rows for analysis in analyses for lookup in analysis.lookups]
    if rows and (within := tokens.within(max(rows))) != tokens:
        tokens = within
        analyses = tuple(analyse(graph, tokens) for graph in model.graphs)
    # A tower looks nothing up, nor does a model without graphs: what the configuration promises is in another model.
    others = not all(towers.stands_alone(graph, tokens.patch_size) for graph in model.graphs)
    return Subject(model, tokens, analyses, bool(tokens.layer_width) and others)


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
    return _judge("inspect", find(path), options)


def check(path: Path | None = None, options: Options = Options()) -> Report:
    """Findings. Nothing is written."""
    return _judge("check", find(path), options)


def _judge(command: str, bundle: Bundle, options: Options) -> Report:
    started = time.monotonic()
    publish.recover_if_needed(bundle.path)
    subjects = [open_model(path, options) for path in bundle.models]
    if any(subject.verdict not in (Verdict.NO_PLE, Verdict.AMBIGUOUS) for subject in subjects):
        # The promised lookup was found: models that have nothing to do with it are not suspicious.
        subjects = [replace(subject, expects_ple=False) for subject in subjects]
    findings = _findings(subjects, options)
    models = tuple(ModelReport(subject, said) for subject, said in zip(subjects, findings, strict=True))
    report = Report(command, bundle.path, models, options.unsafe, options.required)
    if not (bundle.is_folder and _is_stuck(report)):
        models = tuple(replace(model, plan=_plan(model, options.unsafe)) for model in models)
    return replace(report, models=models, seconds=time.monotonic() - started)


def _findings(subjects: Sequence[Subject], options: Options) -> list[tuple[Finding, ...]]:
    """What the rules say of each model."""
    said = [pair for rule in _rules(options) for pair in rule.run(subjects)]
    return [tuple(_edited(subject, finding) for of, finding in said if of is subject) for subject in subjects]


def _edited(subject: Subject, finding: Finding) -> Finding:
    """A finding without its edits where the lookup is not understood: then nothing else is edited either."""
    if not finding.edits or subject.verdict not in INCONCLUSIVE:
        return finding
    reason = f"the verdict is {subject.verdict}: a bundle that is not understood is not edited"
    return replace(finding, edits=(), withheld=reason)


def _is_stuck(report: Report) -> bool:
    """Whether an error somewhere in a folder cannot be mended: all of its models are, or none.

    What its rule never mends, such as a tower's lost bounds, is another fault and holds nothing up.
    """
    mending = {rule.id for rule in find_rules() if rule.fix != "none"}
    return any(finding.rule in mending and not report.mends(finding) for finding in report.remaining)


def _rules(options: Options) -> tuple[Rule, ...]:
    """The rules to run. Raises RuleError for a name that is no rule."""
    for name in options.select | options.ignore:
        find_rule(name)
    chosen = (rule for rule in find_rules() if rule.id not in options.ignore)
    return tuple(rule for rule in chosen if not options.select or rule.id in options.select)


def _plan(model: ModelReport, unsafe: bool) -> Plan:
    edits = [edit for finding in model.findings if unsafe or not finding.unsafe for edit in finding.edits]
    return formats.of(model.subject.model).complete(model.subject.model, Plan(tuple(edits))) if edits else Plan()


def fix(
    path: Path | None = None, options: Options = Options(), *, out: Path | None = None, dry_run: bool = False
) -> Report:
    """Plan, apply, verify on the stage, publish: in place, or to `out`. `dry_run` stops after the plan.

    A bundle in which there is nothing to fix goes to `out` as it is.
    """
    started = time.monotonic()
    bundle = find(path)
    state = _state(bundle)
    report = _judge("fix", bundle, options)
    if out is not None and not dry_run and (report.plan.edits or report.outcome is Outcome.CLEAN):
        report = _fix_copy(report, bundle, options, out)
    elif report.plan.edits and not dry_run:
        report = _fix_in_place(report, state, bundle, options)
    else:
        report = _hashed(report, digests.taken(report, options.hashed))
    return replace(report, seconds=time.monotonic() - started)


def _hashed(report: Report, before: Mapping[Path, str]) -> Report:
    """The report with its files, where there is something to vouch for."""
    return replace(report, files=digests.compared(report, before)) if before and report.exit_code == 0 else report


# Of each file of a bundle its identity, size and time: as long as they are the same, so is what was read.
_State = Mapping[Path, tuple[int, int, int]]


def _state(bundle: Bundle) -> _State:
    found = {}
    for file in (file for model in bundle.models for file in (model, *model.rglob("*"))):
        with suppress(OSError):  # it has just gone
            state = file.lstat()
            found[file] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return found


def _fix_in_place(report: Report, state: _State, bundle: Bundle, options: Options) -> Report:
    """Fix under the lock. `state` is that of the bundle before `report` was made."""
    with publish.locked(bundle.path):
        publish.recover(bundle.path)
        if _state(bundle) != state:
            # Once more: only under the lock is nobody else changing the bundle.
            report = _judge("fix", bundle, options)
        targets, before = _targets(report), digests.taken(report, options.hashed)
        if not targets:
            return _hashed(report, before)
        in_place = _targets(report, in_place=True)
        with publish.stage(bundle.path, targets, in_place) as staged:
            report = _write_and_verify(report, bundle, options, staged)
            if not _stopped(report):
                receipt = receipts.receipt(report)
                shared = {path: spans for model in report.models for path, spans in _shared(model)}
                published = publish.publish_in_place(bundle.path, staged, receipt, shared, in_place)
                report = replace(report, publication=published)
    return _hashed(report, before)


def _fix_copy(report: Report, bundle: Bundle, options: Options, out: Path) -> Report:
    files = [path for model in report.models for path in model.subject.model.files]
    before = digests.taken(report, options.hashed)
    with copied(bundle, files, _targets(report), out, options.progress) as copy:
        report = _write_and_verify(report, bundle, options, copy.staged, copy.place)
        if not _stopped(report):
            report = replace(report, publication=Publication(copy.bundle, copy.out, publish_copy(copy)))
    return _hashed(report, before)


def _targets(report: Report, in_place: bool = False) -> tuple[Path, ...]:
    """The files that the plan replaces, or of these only those that it changes in place."""
    models = [model.subject.model for model in report.models if model.plan.edits]
    return tuple(path for model in models if model.in_place or not in_place for path in model.replaced)


def _write_and_verify(
    report: Report, bundle: Bundle, options: Options, staged: Staged, copied_to: Callable[[Path], Path] | None = None
) -> Report:
    """Write the replaced files of every model to their stages, then judge each model as it is now, and all of them.

    `copied_to` says where in a copy a model is: there the stages are the files themselves.
    """
    given = reference.of_bundle(bundle.path, bundle.models, options.reference)
    models = [
        _mend(model, options, staged, copied_to, given[model.subject.model.path]) if model.plan.edits else model
        for model in report.models
    ]
    before = [model.subject for model in models]
    after = [model.mended or model.subject for model in models]
    models = [
        replace(model, checks=(*model.checks, _found_again(model, said, options.unsafe))) if model.mended else model
        for model, said in zip(models, _findings(after, options), strict=True)
    ]
    chain_too = "chain" in options.required
    together = whole.checks(
        bundle.path, bundle.models, before, after, given[bundle.path], options.gates, chain_too=chain_too
    )
    return _with_required(replace(report, models=tuple(models), whole=together))


def _found_again(model: ModelReport, said: Sequence[Finding], unsafe: bool) -> Check:
    """Whether the rules would mend again what the plan has mended. `said` is what they say of the model as written."""
    mended = {edit.rule for edit in model.plan.edits}
    again = [found for found in said if found.rule in mended and found.edits and (unsafe or not found.unsafe)]
    if again:
        return Check("rules", Status.FAILED, f"{again[0].rule} finds again: {again[0].message}")
    rules = sorted({found.rule for found in model.findings} & mended)
    return Check("rules", Status.PASSED, f"{', '.join(rules)}: nothing is left to mend")


def _mend(
    model: ModelReport,
    options: Options,
    staged: Staged,
    copied_to: Callable[[Path], Path] | None,
    against: Reference | None,
) -> ModelReport:
    before = model.subject
    fmt = formats.of(before.model)
    fmt.write(before.model, model.plan, {target: staged[target] for target in before.model.replaced})
    if copied_to is None:
        written = fmt.open_model(before.model.path, staged)
    else:
        if before.model.in_place:
            _apply(before.model, staged)
        written = fmt.open_model(copied_to(before.model.path))
    after = _subject(written, before.tokens)
    checks = verify.verify_patch(before, after, model.plan, against, options.gates)
    return replace(model, mended=after, checks=checks)


def _apply(model: Model, staged: Staged) -> None:
    """Make whole files of the deltas that were written for a copy of a model."""
    for target in model.replaced:
        patches = staged[target].rename(staged[target].with_name(staged[target].name + ".patches"))
        delta.rebuild(patches, target, staged[target])
        patches.unlink()


def _shared(model: ModelReport) -> Iterator[tuple[Path, list[Span]]]:
    """Weights that the replaced file of a model and its replacement both hold."""
    if model.mended is not None:
        old, new = model.subject.model.weights, model.mended.model.weights
        alike = [name for name in old.keys() & new.keys() if old[name][1] == new[name][1]]
        yield model.subject.model.replaced[0], [(old[name][0], *new[name]) for name in alike]


def verify_bundle(path: Path | None = None, options: Options = Options()) -> Report:
    """Judge a bundle as it stands, patched by g4patch or not; nothing is written."""
    started = time.monotonic()
    bundle = find(path)
    report = _judge("verify", bundle, options)
    given = reference.of_bundle(bundle.path, bundle.models, options.reference)
    kept = [_unpatched(model.subject, bundle) for model in report.models]
    models = tuple(
        replace(
            model,
            checks=verify.verify_bundle(
                subject, before, given[subject.model.path], options.gates, options.compute_unit
            ),
        )
        for model, before in zip(report.models, kept, strict=True)
        for subject in [model.subject]
    )
    subjects = [model.subject for model in models]
    before = [old or subject for old, subject in zip(kept, subjects, strict=True)] if any(kept) else []
    together = whole.checks(
        bundle.path, bundle.models, before, subjects, given[bundle.path], options.gates, chain_too=True
    )
    report = _with_required(replace(report, models=models, whole=together))
    report = _hashed(report, digests.taken(report, options.hashed))
    return replace(report, seconds=time.monotonic() - started)


def _with_required(report: Report) -> Report:
    """A report in which a check of the whole model that is required and was not made is skipped, not forgotten."""
    lacking = sorted((report.required & {"chain", "gates"}) - {check.name for check in report.checks})
    skipped = (Check(name, Status.SKIPPED, "there is no reference that it could be made with") for name in lacking)
    return replace(report, whole=(*report.whole, *skipped))


def _unpatched(subject: Subject, bundle: Bundle) -> Subject | None:
    """A model as it was before it was patched in place, if that is kept."""
    model = subject.model
    kept = publish.originals(bundle.path, model.replaced)
    return _subject(formats.of(model).open_model(model.path, kept), subject.tokens) if kept else None


def _stopped(report: Report) -> bool:
    return report.outcome in (Outcome.CHECK_FAILED, Outcome.CHECK_MISSING)


def revert(path: Path | None = None) -> tuple[Path, ...]:
    """Undo the last in-place fix of a bundle, byte for byte. Returns the files that were put back."""
    return publish.revert(find(path).path)
