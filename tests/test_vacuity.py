"""Nothing passes by not being compared: for each check, the ways to give it nothing, or nonsense, to compare.

What is wrong with reference files as such is in tests/test_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from g4patch import engine, fix, formats, inspect, verify
from g4patch.edits import Plan
from g4patch.reference import Reference, Run, beside, load
from g4patch.report import Check, Status, Subject
from g4patch.runtimes import Probe, Unavailable
from g4patch.verdicts import Judgement, Verdict
from tests.conftest import Copy, sample

Array = NDArray[Any]


@pytest.fixture
def fixed(copy: Copy) -> tuple[Subject, Subject, Plan]:
    """A stage before and after the right fix, and its plan."""
    bundle = copy("onnx-stage")
    report = inspect(bundle)
    staged = {bundle: bundle.with_name("staged")}
    formats.of(report.subject.model).write(report.subject.model, report.plan, staged)
    return report.subject, engine.open_model(bundle, staged=staged), report.plan


def statuses(checks: Sequence[Check]) -> dict[str, Status]:
    return {check.name: check.status for check in checks}


def the_reference(subject: Subject) -> Reference:
    place = beside(subject.model.path)
    assert place is not None
    return load(place)


def with_lookups(subject: Subject, *lookups: Any) -> Subject:
    (analysis,) = subject.analyses
    return replace(subject, analyses=(replace(analysis, lookups=lookups),))


def test_the_fix_itself_passes(fixed: tuple[Subject, Subject, Plan]) -> None:
    before, after, plan = fixed
    found = statuses(verify.verify_patch(before, after, plan, the_reference(before)))
    assert set(found.values()) == {Status.PASSED}


def test_a_plan_that_was_not_applied(fixed: tuple[Subject, Subject, Plan]) -> None:
    """The model that comes out is the one that went in: every check says so."""
    before, _, plan = fixed
    found = statuses(verify.verify_patch(before, before, plan, the_reference(before)))
    assert set(found.values()) == {Status.FAILED}


def test_without_a_lookup_there_is_nothing_to_pass() -> None:
    subject = engine.open_model(sample("onnx-host-side"))
    assert not [lookup for analysis in subject.analyses for lookup in analysis.lookups]
    found = (verify.row_map(subject, subject), verify.differential(subject, subject), verify.standing(subject))
    assert {check.status for check in found} == {Status.SKIPPED}


def test_a_lookup_that_is_gone_fails(fixed: tuple[Subject, Subject, Plan]) -> None:
    """All of them, or one of two: what is left does not speak for it."""
    before, after, _ = fixed
    (old,), (new,) = before.analyses[0].lookups, after.analyses[0].lookups
    second = replace(old, gather=replace(old.gather, address="another"))
    for pair in ((before, with_lookups(after)), (with_lookups(before, old, second), with_lookups(after, new))):
        for check in (verify.row_map(*pair), verify.differential(*pair)):
            assert check.status is Status.FAILED
            assert "is gone" in str(check.details)


def test_rows_that_cannot_be_evaluated_fail(fixed: tuple[Subject, Subject, Plan]) -> None:
    before, after, _ = fixed
    (lookup,) = after.analyses[0].lookups
    for verdict in (Verdict.AMBIGUOUS, Verdict.CONDITIONAL, Verdict.PATCHED):
        unknown = with_lookups(after, replace(lookup, judgement=Judgement(verdict, reason="of the test")))
        assert verify.row_map(before, unknown).status is Status.FAILED
        assert verify.differential(before, unknown).status is Status.FAILED


class Runtime:
    """A probe whose answers are of the test."""

    runtime = "the test"

    def __init__(self, real: Probe, rows: Callable[[Array], Array]) -> None:
        self.real, self.rows = real, rows

    def lookup(self, ids_input: str, output: str, ids: NDArray[np.int64]) -> Array:
        return self.rows(self.real.lookup(ids_input, output, ids))

    def table(self, index: str, output: str, rows: NDArray[np.int64]) -> Array:
        return self.rows(self.real.table(index, output, rows))

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return {name: self.rows(value) for name, value in self.real.run(feeds, outputs).items()}


ANSWERS: dict[str, Callable[[Array], Array]] = {
    "none": lambda rows: rows[:0],
    "truncated": lambda rows: rows[: len(rows) // 2],
    "NaN": lambda rows: np.full_like(rows, np.nan),
    "zeros": np.zeros_like,
    "no columns": lambda rows: rows[..., :0],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_runtime_that_answers_nothing_of_use(
    answer: str, fixed: tuple[Subject, Subject, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same nonsense from both models is alike bit for bit, and proves nothing."""
    before, after, plan = fixed
    fmt = formats.of(before.model)
    real = fmt.probe
    monkeypatch.setattr(fmt, "probe", lambda model, graph: Runtime(real(model, graph), ANSWERS[answer]))
    found = statuses(verify.verify_patch(before, after, plan, the_reference(before)))
    assert (found["differential"], found["reference"]) == (Status.FAILED, Status.FAILED)


def test_a_runtime_that_is_not_there(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = copy("onnx-stage")

    def unavailable(model: formats.Model, graph: str) -> Probe:
        raise Unavailable("of the test")

    monkeypatch.setattr(formats.of(engine.open_model(bundle).model), "probe", unavailable)
    found = statuses(fix(bundle).checks)
    assert (found["differential"], found["reference"]) == (Status.SKIPPED, Status.SKIPPED)


def test_a_validator_that_is_not_there_is_named(
    fixed: tuple[Subject, Subject, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with the original stands; that nobody validated it is said."""
    before, after, plan = fixed

    def unavailable(model: formats.Model) -> tuple[str, ...]:
        raise Unavailable("no validator here")

    monkeypatch.setattr(formats.of(before.model), "validate", unavailable)
    assert "no validator here" in verify.structure(before, after, plan).summary
    assert verify.structure(before, before, plan).status is Status.FAILED


def runs_with(runs: Callable[[Run], Sequence[Run]]) -> Callable[[Reference], Reference]:
    return lambda against: replace(against, runs=tuple(new for run in against.runs for new in runs(run)))


NAN = np.full((1, 14, 16), np.nan, np.float32)
EMPTY_REFERENCES: dict[str, Callable[[Reference], Reference]] = {
    "no runs": runs_with(lambda run: []),
    "nothing expected": runs_with(lambda run: [replace(run, expected={})]),
    "nothing expected of media": runs_with(lambda run: [run if run.name == "text" else replace(run, expected={})]),
    "no rows": runs_with(lambda run: [replace(run, expected={n: t[:, :0] for n, t in run.expected.items()})]),
    "too many rows": runs_with(lambda run: [replace(run, expected={n: t[:, :-1] for n, t in run.expected.items()})]),
    "NaN expected": runs_with(lambda run: [replace(run, expected={n: t * np.nan for n, t in run.expected.items()})]),
    "NaN fed": runs_with(lambda run: [replace(run, inputs={**run.inputs, "hidden_states": NAN})]),
    "infinity expected": runs_with(
        lambda run: [replace(run, expected={n: np.full_like(t, np.inf) for n, t in run.expected.items()})]
    ),
    "of another model": lambda against: replace(against, token_ids={"image": 5}),
    "of a broken model": lambda against: replace(against, model="broken"),
}


@pytest.mark.parametrize("emptied", EMPTY_REFERENCES)
@pytest.mark.parametrize("standing", [False, True], ids=["fix", "verify"])
def test_a_reference_that_says_nothing(emptied: str, standing: bool, fixed: tuple[Subject, Subject, Plan]) -> None:
    before, after, plan = fixed
    against = EMPTY_REFERENCES[emptied](the_reference(before))
    if standing:
        checks = verify.verify_bundle(after, before, against)
    else:
        checks = verify.verify_patch(before, after, plan, against)
    assert statuses(checks)["reference"] is Status.FAILED


def test_without_a_reference_it_is_skipped(fixed: tuple[Subject, Subject, Plan]) -> None:
    before, after, plan = fixed
    for checks in (verify.verify_patch(before, after, plan, None), verify.verify_bundle(after, before, None)):
        assert statuses(checks)["reference"] is Status.SKIPPED
