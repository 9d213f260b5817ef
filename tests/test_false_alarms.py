"""No false alarms: what is right passes every check, whatever its shape and however coarse its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from g4patch import check, fix, verify_bundle
from g4patch.report import Outcome, Status
from tests.cases import all_cases, load
from tests.conftest import Copy
from tests.test_conformance import FAULTY

# For ONNX and Core ML, tests/test_reference.py has the same and what the reference check says.
CORE_AI = [name for name in FAULTY if name.startswith("coreai-")]
RIGHT = [path for path in all_cases() if load(path).verdict == "patched"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "coreai-palette4" else pytest.mark.slow) for name in CORE_AI]
)
def test_a_right_fix_passes_every_check(name: str, copy: Copy) -> None:
    """Among them int8 and 4-bit tables: what quantisation rounds, it rounds in both models alike."""
    bundle = copy(name)
    report = fix(bundle)
    assert report.outcome is Outcome.FIXED
    assert {found.name: found.status for found in report.checks if found.status is not Status.PASSED} == {}
    standing = verify_bundle(bundle)
    assert (standing.outcome, standing.exit_code) == (Outcome.CLEAN, 0)
    assert {found.status for found in standing.checks} == {Status.PASSED}


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_a_graph_that_is_right_in_its_own_way(path: Path, tmp_path: Path) -> None:
    bundle = load(path).write(tmp_path)
    assert not [finding for finding in check(bundle).findings if finding.rule == "ple-raw-ids"]
    found = {one.name: one.status for one in verify_bundle(bundle).checks}
    assert found == {"row map": Status.PASSED, "reference": Status.SKIPPED}
