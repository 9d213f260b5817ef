"""What exporters make of faults that no sample shows, and of models that are right: found, or left alone.

The bundles are made by `samples/build/rule_variants.py` with the exporters, in an environment of its own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import onnxruntime
import pytest

from g4patch import check
from g4patch.report import Severity
from g4patch.verdicts import Verdict
from tests.conftest import SAMPLES, needs_build_python

pytestmark = [pytest.mark.slow, needs_build_python]

# Bundle -> verdict, and for each finding its rule, its severity and words of its message.
EXPECTED: dict[str, tuple[Verdict, list[tuple[str, Severity, str]]]] = {
    "coreml-tower": (Verdict.NO_PLE, []),
    "coreml-tower-lost": (
        Verdict.NO_PLE,
        [("clip-bounds", Severity.ERROR, "so that nothing is clipped: 56 of 56 (layers 0 to 1)")],
    ),
    "coreai-tower": (Verdict.NO_PLE, []),
    "coreai-tower-spoilt": (
        Verdict.NO_PLE,
        [
            ("clip-bounds", Severity.ERROR, "NaN: 1 of 56 (layer 0 k_proj input_max)"),
            ("clip-bounds", Severity.ERROR, "2 of 56 (layer 0 up_proj output_min, output_max)"),
            ("clip-bounds", Severity.ERROR, "so that nothing is clipped: 28 of 56 (layer 1)"),
        ],
    ),
    "onnx-tower-spoilt": (
        Verdict.NO_PLE,
        [
            ("clip-bounds", Severity.ERROR, "NaN: 1 of 56 (layer 0 k_proj input_max)"),
            ("clip-bounds", Severity.ERROR, "2 of 56 (layer 0 up_proj output_min, output_max)"),
            ("clip-bounds", Severity.ERROR, "so that nothing is clipped: 28 of 56 (layer 1)"),
        ],
    ),
    "onnx-tower-dynamo": (
        Verdict.NO_PLE,
        [("clip-bounds", Severity.ERROR, "no runtime can load it: 12 of 56 (layer 0 q_proj input_min, input_max; ")],
    ),
    "onnx-scale-missing": (
        Verdict.PATCHED,
        [("ple-scale", Severity.WARNING, "nothing multiplies the looked-up rows by sqrt(8)")],
    ),
    "coreml-scale-twice": (Verdict.PATCHED, [("ple-scale", Severity.ERROR, "multiplied by 8: by sqrt(8)")]),
    "onnx-e2b": (
        Verdict.PARTIAL,
        [
            # Two of the three media ids are masked: 262,144 - 239,674 - 2 others.
            ("gather-overflow", Severity.WARNING, "22,468 ids, the first of them 239674"),
            ("ple-raw-ids", Severity.ERROR, "video 258884"),
        ],
    ),
    "gemma-3n": (Verdict.PATCHED, []),
    "gemma-3n-mobius": (
        Verdict.CLOBBERED,
        [("ple-raw-ids", Severity.ERROR, "ids from 320 on have no row of their own and should read row 0")],
    ),
}


@pytest.fixture(scope="module")
def variants(build_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    command = [build_python, "-m", "samples.build.rule_variants", str(folder)]
    subprocess.run(command, cwd=SAMPLES.parent, check=True, stderr=subprocess.DEVNULL)
    return folder


def test_every_variant_is_expected(variants: Path) -> None:
    assert {path.name for path in variants.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_variant(name: str, variants: Path) -> None:
    report = check(variants / name)
    verdict, findings = EXPECTED[name]
    assert report.subject.verdict is verdict
    assert [(found.rule, found.severity) for found in report.findings] == [item[:2] for item in findings]
    for found, (*_, words) in zip(report.findings, findings, strict=True):
        assert words in found.message


def test_onnxruntime_refuses_what_lost_its_bounds(variants: Path) -> None:
    """So the message is right; and it loads the tower that kept them."""
    onnxruntime.InferenceSession(SAMPLES / "onnx-vision" / "model.onnx")
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="not a graph input"):
        onnxruntime.InferenceSession(variants / "onnx-tower-dynamo" / "model.onnx")
