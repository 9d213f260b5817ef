"""inspect, check, fix: the only orchestration. Each yields one Report and prints nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from g4patch import digests, formats, publish, receipts, reference, verify, whole
from g4patch.bundle import Bundle, find
from g4patch.copying import copied, publish_copy
from g4patch.judging import judge
from g4patch.mending import in_common, targets, with_required, write_and_verify
from g4patch.options import DEFAULTS, Options
from g4patch.report import Outcome, Publication, Report, Subject
from g4patch.subjects import open_model, subject_of

__all__ = ["Options", "check", "fix", "inspect", "open_model", "revert", "verify_bundle"]


def inspect(path: Path | None = None, options: Options = DEFAULTS) -> Report:
    """What a bundle is and what it does about PLE, with findings and the plan that `fix` would apply."""
    return judge("inspect", find(path), options)


def check(path: Path | None = None, options: Options = DEFAULTS) -> Report:
    """Findings. Nothing is written."""
    return judge("check", find(path), options)


def fix(
    path: Path | None = None, options: Options = DEFAULTS, *, out: Path | None = None, dry_run: bool = False
) -> Report:
    """Plan, apply, verify on the stage, publish: in place, or to `out`. `dry_run` stops after the plan.

    A bundle in which there is nothing to fix goes to `out` as it is.
    """
    started = time.monotonic()
    bundle = find(path)
    state = _state(bundle)
    report = judge("fix", bundle, options)
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
            report = judge("fix", bundle, options)
        replaced, before = targets(report), digests.taken(report, options.hashed)
        if not replaced:
            return _hashed(report, before)
        in_place = targets(report, in_place=True)
        with publish.stage(bundle.path, replaced, in_place) as staged:
            report = write_and_verify(report, bundle, options, staged)
            if not _stopped(report):
                receipt = receipts.receipt(report)
                shared = {path: spans for model in report.models for path, spans in in_common(model)}
                published = publish.publish_in_place(bundle.path, staged, receipt, shared, in_place)
                report = replace(report, publication=published)
    return _hashed(report, before)


def _fix_copy(report: Report, bundle: Bundle, options: Options, out: Path) -> Report:
    files = [path for model in report.models for path in model.subject.model.files]
    before = digests.taken(report, options.hashed)
    with copied(bundle, files, targets(report), out, options.progress) as copy:
        report = write_and_verify(report, bundle, options, copy.staged, copy.place)
        if not _stopped(report):
            report = replace(report, publication=Publication(copy.bundle, copy.out, publish_copy(copy)))
    return _hashed(report, before)


def verify_bundle(path: Path | None = None, options: Options = DEFAULTS) -> Report:
    """Judge a bundle as it stands, patched by g4patch or not; nothing is written."""
    started = time.monotonic()
    bundle = find(path)
    report = judge("verify", bundle, options)
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
    report = with_required(replace(report, models=models, whole=together))
    report = _hashed(report, digests.taken(report, options.hashed))
    return replace(report, seconds=time.monotonic() - started)


def _unpatched(subject: Subject, bundle: Bundle) -> Subject | None:
    """A model as it was before it was patched in place, if that is kept."""
    model = subject.model
    kept = publish.originals(bundle.path, model.replaced)
    return subject_of(formats.of(model).open_model(model.path, kept), subject.tokens) if kept else None


def _stopped(report: Report) -> bool:
    return report.outcome in (Outcome.CHECK_FAILED, Outcome.CHECK_MISSING)


def revert(path: Path | None = None) -> tuple[Path, ...]:
    """Undo the last in-place fix of a bundle, byte for byte. Returns the files that were put back."""
    return publish.revert(find(path).path)
