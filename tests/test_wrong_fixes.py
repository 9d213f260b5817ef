"""Wrong fixes are caught: every mutant by some check, and by each check at least one with all others disabled.

`python -m tests.mutants` prints who kills what.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from g4patch import fix, formats, mending, rules, verify
from g4patch.edits import Plan
from g4patch.formats import Model, Staged
from g4patch.report import Check, Outcome, Status
from tests.conftest import tree
from tests.mutants import STAGE, Bench, Judged, Mutant, Workshop, benches, sample
from tests.mutants.plans import WRONG_PLANS

BENCHES = benches()
# What the table of `g4patch explain checks` says of each result.
CELLS = {Status.FAILED: "sees", Status.PASSED: "-", Status.SKIPPED: "not run"}


@pytest.fixture(scope="module")
def workshops(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Bench], Workshop]:
    """One for each bench, so that what mutants are made of is built once."""
    made: dict[int, Workshop] = {}
    return lambda bench: made.setdefault(id(bench), Workshop(bench, tmp_path_factory.mktemp("mutants")))


def assert_killed(mutant: Mutant, judged: Judged) -> None:
    assert judged.killers, {check.name: check.summary for check in judged.checks.values()}
    if mutant.plan:
        # The writer did what the plan says; that this is not the right fix shows in the file as well.
        assert judged.checks["structure"].status is Status.PASSED, judged.checks["structure"].details
        assert judged.differs
        assert "row map" in judged.killers


def mutants() -> Iterator[Any]:
    """The mutants of each format; those whose runtime is slow, or starts a process, count as slow."""
    for name, bench in BENCHES.items():
        for mutant in bench.mutants:
            marks = () if name == "onnx" else (pytest.mark.slow,)
            yield pytest.param(name, mutant, marks=marks, id=f"{name}-{mutant.name}")


@pytest.mark.parametrize(("name", "mutant"), [*mutants()])
def test_every_mutant_is_killed(name: str, mutant: Mutant, workshops: Callable[[Bench], Workshop]) -> None:
    judged = workshops(BENCHES[name]).judge(mutant)
    assert_killed(mutant, judged)
    if name == "onnx":
        stated = page()[mutant.name]
        assert stated == {check: CELLS[found.status] for check, found in judged.checks.items() if check in stated}


def page() -> dict[str, dict[str, str]]:
    """Fault -> check -> cell, of the table in the page that `g4patch explain checks` prints."""
    lines = [line for line in rules.checks_page().splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {fault: dict(zip(head[1:], cells, strict=True)) for fault, *cells in rows}


def test_the_page_names_the_mutants_there_are() -> None:
    assert list(page()) == [mutant.name for mutant in BENCHES["onnx"].mutants]


@pytest.mark.parametrize("name", BENCHES)
def test_there_are_twelve_kinds_of_each(name: str) -> None:
    names = [mutant.name for mutant in BENCHES[name].mutants]
    assert len(set(names)) == len(names) >= 12


# Check -> the function that makes it, and a mutant that it kills although no other check runs.
ALONE = {
    "structure": (verify, "structure", "an op more elsewhere"),
    "row map": (verify, "row_map", "token embedding masked as well"),
    "differential": (verify, "differential", "wrong pad id"),
    "reference": (verify, "_reference", "scale dropped"),
    "rules": (mending, "_found_again", "one media id missing"),
}


@pytest.mark.parametrize("check", ALONE)
@pytest.mark.parametrize("name", BENCHES)
def test_each_check_alone_stops_a_fix(
    name: str, check: str, workshops: Callable[[Bench], Workshop], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole of `fix`, with a writer that writes the mutant, and all other checks disabled."""
    workshop = workshops(BENCHES[name])
    (mutant,) = (mutant for mutant in workshop.bench.mutants if mutant.name == ALONE[check][2])
    unpatched, subject, _ = workshop.base(mutant.base)
    made, _ = workshop.make(replace(mutant, name=f"{mutant.name} {check}"))
    bundle = shutil.copytree(unpatched.parent, tmp_path / "bundle") / unpatched.name

    def write(model: Model, plan: Plan, staged: Staged) -> None:
        for target, stage in staged.items():
            shutil.copyfile(made.parent / target.relative_to(bundle.parent), stage)

    for other, (module, function, _) in ALONE.items():
        if other != check:
            disabled = Check(other, Status.SKIPPED, "disabled")
            monkeypatch.setattr(module, function, lambda *arguments, disabled=disabled: disabled)
    monkeypatch.setattr(formats.of(subject.model), "write", write)
    before = tree(bundle.parent)
    report = fix(bundle)
    assert {one.name: one.status for one in report.checks} == {
        other: Status.FAILED if other == check else Status.SKIPPED for other in ALONE
    }
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_FAILED, 3)
    assert tree(bundle.parent) == before


# Graphs of other shapes: without a splice, in float16, of unknown dimensions, with a large quantised table.
SHAPES = ["mobius-text", "onnx-fp16", "coreml-ios16", "coreml-int4-262144"]
ANY_GRAPH = [mutant for mutant in WRONG_PLANS if mutant.base == STAGE and mutant.name != "a text id spliced"]


def without_reference(name: str) -> Callable[[Path], Path]:
    """A sample that only the first three checks can judge."""

    def build(folder: Path) -> Path:
        bundle = sample(name)(folder)
        for path in folder.glob("*.reference.safetensors"):
            path.unlink()
        return bundle

    return build


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("coreml") else ()) for name in SHAPES]
)
def test_wrong_plans_for_graphs_of_other_shapes(name: str, tmp_path: Path) -> None:
    workshop = Workshop(Bench(name, {STAGE: without_reference(name)}, tuple(ANY_GRAPH)), tmp_path)
    for mutant, judged in workshop.judge_all():
        assert_killed(mutant, judged)
        alike = mutant.name == "token embedding masked as well"
        assert ("differential" in judged.killers) is not alike, mutant.name
