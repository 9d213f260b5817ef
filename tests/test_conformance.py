"""What every format must do alike: once per sample, with nothing that knows the format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from g4patch import check, engine, fix, inspect
from g4patch.cli import main
from g4patch.report import Outcome, Status
from g4patch.tokens import TokenFlags
from g4patch.verdicts import Verdict
from tests.conftest import SAMPLES, Copy, sample, tree


@dataclass(frozen=True)
class Expected:
    """By hand, from what each exporter does (samples/README.md)."""

    verdict: Verdict
    rows: int = 320
    layers: tuple[int, int] = (3, 8)


EXPECTED = {
    "mobius-embedding": Expected(Verdict.PARTIAL),
    "mobius-text": Expected(Verdict.RAW),
    "onnx-stage": Expected(Verdict.RAW),
    "onnx-fp16": Expected(Verdict.RAW),
    "onnx-identity-262144": Expected(Verdict.RAW, 262144, (1, 3)),
    "onnx-right": Expected(Verdict.PATCHED),
    "onnx-host-side": Expected(Verdict.HOST_SIDE),
    "coreml-fp16": Expected(Verdict.RAW, 33000, (2, 3)),
    "coreml-fp32": Expected(Verdict.RAW, 320, (2, 8)),
    "coreml-cast16": Expected(Verdict.RAW),
    "coreml-ios16": Expected(Verdict.RAW),
    "coreml-palette-262144": Expected(Verdict.RAW, 262144, (2, 3)),
    "coreml-int4-262144": Expected(Verdict.RAW, 262144, (2, 3)),
    "coreml-state": Expected(Verdict.RAW, 33000, (2, 3)),
    "coreml-multifunction": Expected(Verdict.RAW),
    "coreai-stage": Expected(Verdict.RAW),
    "coreai-fp16": Expected(Verdict.RAW),
    "coreai-int8": Expected(Verdict.RAW),
    "coreai-palette4": Expected(Verdict.RAW, 320, (2, 3)),
    "coreai-multifunction": Expected(Verdict.RAW),
    "coreai-state": Expected(Verdict.RAW),
}
# See test_stages.py, test_chain.py, test_contracts.py.
SEVERAL_MODELS = {"coreai-two-stage", "coreml-two-stage", "mobius-package", "host-ple"}
TOWERS = {"mobius-vision", "onnx-vision"}  # see test_towers.py
FAULTY = [name for name, expected in EXPECTED.items() if expected.verdict in (Verdict.RAW, Verdict.PARTIAL)]
RIGHT = [name for name in EXPECTED if name not in FAULTY]


def test_every_sample_is_expected() -> None:
    assert {path.parent.name for path in SAMPLES.glob("*/config.json")} == set(EXPECTED) | SEVERAL_MODELS | TOWERS


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict(name: str) -> None:
    report = check(sample(name))
    assert report.subject.verdict is EXPECTED[name].verdict
    assert report.exit_code == (1 if name in FAULTY else 0)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "onnx-host-side"])
def test_lookup_and_row_map(name: str) -> None:
    expected, subject = EXPECTED[name], engine.open_model(sample(name))
    media = subject.tokens.media
    masked = {"mobius-embedding": [media["image"], media["audio"]], "onnx-right": [*media.values()]}.get(name, [])
    lookups = [lookup for analysis in subject.analyses for lookup in analysis.lookups]
    assert lookups
    for lookup in lookups:
        assert (lookup.table.rows, (lookup.layers, lookup.layer_width)) == (expected.rows, expected.layers)
        row_map = lookup.judgement.row_map
        assert row_map is not None
        ids = np.arange(expected.rows)
        assert np.array_equal(row_map.take(ids), np.where(np.isin(ids, masked), 0, ids))


@pytest.mark.parametrize("name", FAULTY)
def test_fix_mends_and_changes_nothing_else(name: str, copy: Copy) -> None:
    bundle = copy(name)
    before = tree(bundle.parent)
    model = engine.open_model(bundle).model
    report = fix(bundle)
    assert report.outcome is Outcome.FIXED, report.checks
    assert report.exit_code == 0
    assert {result.name for result in report.checks if result.status is Status.PASSED} >= {"structure", "row map"}
    after = tree(bundle.parent)
    changed = {path for path in before if after[path] != before[path]}
    added = set(after) - set(before)
    assert changed == {str(path.relative_to(bundle.parent)) for path in model.replaced}
    assert all(path.startswith(f"{bundle.name}.g4patch/") for path in added)

    subject = engine.open_model(bundle)
    media = list(subject.tokens.media.values())
    for lookup in (lookup for analysis in subject.analyses for lookup in analysis.lookups):
        assert lookup.judgement.row_map is not None
        ids = np.arange(lookup.table.rows)
        assert np.array_equal(lookup.judgement.row_map.take(ids), np.where(np.isin(ids, media), 0, ids))


@pytest.mark.parametrize("name", FAULTY)
def test_second_fix_writes_nothing(name: str, copy: Copy) -> None:
    bundle = copy(name)
    assert fix(bundle).outcome is Outcome.FIXED
    before = {path: path.stat().st_mtime_ns for path in sorted(bundle.parent.rglob("*"))}
    report = fix(bundle)
    assert report.outcome is Outcome.CLEAN
    assert report.exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in sorted(bundle.parent.rglob("*"))} == before


@pytest.mark.parametrize("name", FAULTY)
def test_output_elsewhere_leaves_the_input_alone(name: str, copy: Copy, tmp_path: Path) -> None:
    bundle = copy(name)
    before = tree(bundle.parent)
    report = fix(bundle, out=tmp_path / "out")
    assert report.outcome is Outcome.FIXED
    assert tree(bundle.parent) == before
    assert report.publication is not None
    tokens = inspect(bundle).subject.tokens
    flags = TokenFlags(tokens.image.id, tokens.audio.id, tokens.video.id)
    mended = engine.open_model(report.publication.target, engine.Options(flags))
    assert mended.verdict is Verdict.PATCHED
    assert not [path for path in (tmp_path / "out").rglob("*") if "g4patch" in path.name]


@pytest.mark.parametrize("name", FAULTY)
def test_dry_run_writes_nothing(name: str, copy: Copy) -> None:
    bundle = copy(name)
    before = tree(bundle.parent)
    report = fix(bundle, dry_run=True)
    assert (report.outcome, report.exit_code) == (Outcome.PLANNED, 1)
    assert tree(bundle.parent) == before
    assert report.plan.digest == fix(bundle, dry_run=True).plan.digest


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_left_alone(name: str, copy: Copy) -> None:
    bundle = copy(name)
    before = tree(bundle.parent)
    report = fix(bundle)
    assert (report.outcome, report.exit_code, report.findings) == (Outcome.CLEAN, 0, ())
    assert tree(bundle.parent) == before


def damaged(content: bytes) -> dict[str, bytes]:
    """Ways in which a graph file arrives broken."""
    junk = np.random.default_rng(7).bytes(len(content))
    cuts = np.linspace(1, len(content) - 1, 12, dtype=int)
    flips = {f"flipped at {at}": content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :] for at in cuts}
    return {
        "empty": b"",
        "junk": junk,
        "git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        **{f"cut at {at}": content[:at] for at in cuts},
        **flips,
    }


@pytest.mark.parametrize("name", ["onnx-stage", "coreml-fp32", "coreai-stage"])
def test_damaged_files_give_one_line_and_a_hint(name: str, copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy(name)
    graph_file = engine.open_model(bundle).model.graph_file
    content = graph_file.read_bytes()
    for how, bad in damaged(content).items():
        graph_file.write_bytes(bad)
        before = tree(bundle.parent)
        code = main(["fix", "--dry-run", str(bundle)])
        captured = capsys.readouterr()
        assert tree(bundle.parent) == before, how
        if how.startswith("flipped") and code != 2:
            continue  # a flipped bit may leave a model that reads well
        assert code == 2, f"{how}: {captured.out}"
        assert captured.out == ""
        assert captured.err.startswith("error: "), how
        assert len(captured.err.strip().split("\n       ")) >= 2, how
        assert "Traceback" not in captured.err


@pytest.mark.parametrize("name", FAULTY)
def test_read_only_target_is_refused(name: str, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = copy(name)
    before = tree(bundle.parent)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert main(["fix", str(bundle)]) == 2
    assert tree(bundle.parent) == before
