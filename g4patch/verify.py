"""Judge a model, before it is published, against what it was: verify knows no rules.

Each check is passed, failed or skipped with a reason. A check that compared nothing has not passed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from g4patch import compare, formats, whole
from g4patch.differential import differential
from g4patch.edits import Plan
from g4patch.reference import Reference
from g4patch.report import Check, Status, Subject
from g4patch.row_maps import row_map, standing
from g4patch.runtimes import Unavailable
from g4patch.thresholds import Thresholds

__all__ = ["differential", "row_map", "standing", "structure", "verify_bundle", "verify_patch"]


def verify_patch(
    before: Subject,
    after: Subject,
    plan: Plan,
    reference: Reference | None = None,
    limits: Thresholds | None = None,
) -> tuple[Check, ...]:
    """All checks of a patched model against the unpatched one, and against a reference if there is one."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        # A validator may be a process of its own that takes seconds: it runs beside the other checks.
        validated = pool.submit(_validated, before, after)
        others = (
            row_map(before, after, plan),
            differential(before, after, plan),
            _reference(before, after, reference),
            *whole.gates_of(before, after, reference, limits),
        )
        return (structure(before, after, plan, validated.result()), *others)


def verify_bundle(
    subject: Subject,
    before: Subject | None,
    reference: Reference | None,
    limits: Thresholds | None = None,
    unit: str = "",
) -> tuple[Check, ...]:
    """The checks of a bundle as it stands, patched by g4patch or not. `before` is its unpatched original, if kept.

    With `unit`, also that of its outputs on a compute unit of the device that it is for.
    """
    checks = (standing(subject), _reference(before, subject, reference))
    judged = whole.gates_of(before, subject, reference, limits)
    return (*checks, *judged, *((_device(subject, reference, unit),) if unit else ()))


def _device(subject: Subject, reference: Reference | None, unit: str) -> Check:
    if reference is None:
        return Check("device", Status.SKIPPED, "there is no reference to compare its outputs with")
    return compare.on_device(subject, reference, unit)


def _reference(before: Subject | None, after: Subject, reference: Reference | None) -> Check:
    if not after.model.graphs:
        return Check("reference", Status.SKIPPED, "this computes nothing that could be compared")
    if reference is None:
        return Check("reference", Status.SKIPPED, "none beside the bundle, and none named: g4patch record makes one")
    return compare.reference(before, after, reference)


# What the format's own validator has against a model and not against the one before, and a remark on it.
_Validated = tuple[tuple[str, ...], str]


def _validated(before: Subject, after: Subject) -> _Validated:
    fmt = formats.of(before.model)
    try:
        said = fmt.validate(after.model)
        old = fmt.validate(before.model) if said else ()
    except Unavailable as unavailable:
        return (), f"; {unavailable.reason}"
    return tuple(line for line in said if line not in old), "; the validator rejects the original too" if old else ""


def structure(before: Subject, after: Subject, plan: Plan, validated: _Validated | None = None) -> Check:
    """The file is the old one plus the plan, and the format's own validator has nothing new to say."""
    faults, remark = _validated(before, after) if validated is None else validated
    problems = [*formats.of(before.model).differences(before.model, after.model, plan), *faults]
    if _signature(before) != _signature(after):
        problems.append("inputs or outputs changed")
    if problems:
        return Check("structure", Status.FAILED, problems[0], tuple(problems))
    told = ", a note in the metadata" if plan.note else ""
    return Check("structure", Status.PASSED, f"{plan.done}{told}, nothing else changed{remark}")


def _signature(subject: Subject) -> list[Any]:
    return [(a.graph.name, a.graph.inputs, a.graph.outputs) for a in subject.analyses]
