"""Write the models of a bundle as planned, and judge what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from g4patch import delta, formats, reference, verify, whole
from g4patch.bundle import Bundle
from g4patch.delta import Span
from g4patch.formats import Model, Staged
from g4patch.judging import findings_of
from g4patch.options import Options
from g4patch.reference import Reference
from g4patch.report import Check, Finding, ModelReport, Report, Status
from g4patch.subjects import subject_of


def targets(report: Report, in_place: bool = False) -> tuple[Path, ...]:
    """The files that the plan replaces, or of these only those that it changes in place."""
    models = [model.subject.model for model in report.models if model.plan.edits]
    return tuple(path for model in models if model.in_place or not in_place for path in model.replaced)


def write_and_verify(
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
        for model, said in zip(models, findings_of(after, options), strict=True)
    ]
    chain_too = "chain" in options.required
    together = whole.checks(
        bundle.path, bundle.models, before, after, given[bundle.path], options.gates, chain_too=chain_too
    )
    return with_required(replace(report, models=tuple(models), whole=together))


def _found_again(model: ModelReport, said: Sequence[Finding], unsafe: bool) -> Check:
    """Whether the rules would mend again what the plan has mended. `said` is what they say of the model as written."""
    mended = {edit.rule for edit in model.plan.edits}
    again = [found for found in said if found.rule in mended and found.is_mended(unsafe)]
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
            apply_deltas(before.model, staged)
        written = fmt.open_model(copied_to(before.model.path))
    after = subject_of(written, before.tokens)
    checks = verify.verify_patch(before, after, model.plan, against, options.gates)
    return replace(model, mended=after, checks=checks)


def apply_deltas(model: Model, staged: Staged) -> None:
    """Make whole files of the deltas that were written for a copy of a model."""
    for target in model.replaced:
        patches = staged[target].rename(staged[target].with_name(staged[target].name + ".patches"))
        delta.rebuild(patches, target, staged[target])
        patches.unlink()


def in_common(model: ModelReport) -> Iterator[tuple[Path, list[Span]]]:
    """Weights that the replaced file of a model and its replacement both hold."""
    if model.mended is not None:
        old, new = model.subject.model.weights, model.mended.model.weights
        alike = [name for name in old.keys() & new.keys() if old[name][1] == new[name][1]]
        yield model.subject.model.replaced[0], [(old[name][0], *new[name]) for name in alike]


_NOT_MADE = {
    "chain": "there is no reference that it could be made with",
    "gates": "there is no reference that it could be made with",
    "device": "no --compute-unit was named",
}


def with_required(report: Report) -> Report:
    """A report in which a check that is required, and that nothing else asked for, is skipped and not forgotten."""
    lacking = sorted(report.required & _NOT_MADE.keys() - {check.name for check in report.checks})
    skipped = (Check(name, Status.SKIPPED, _NOT_MADE[name]) for name in lacking)
    return replace(report, whole=(*report.whole, *skipped))
