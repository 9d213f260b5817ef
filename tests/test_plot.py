"""`--plot`: a picture of what was measured, or a reason why there is none."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from g4patch import Options, verify_bundle
from g4patch.cli import main
from g4patch.errors import MissingExtra, UsageError
from g4patch.output import plot
from g4patch.report import Report
from g4patch.thresholds import PRESETS
from tests.conftest import sample


@pytest.fixture(scope="module")
def report(mended: Path) -> Report:
    return verify_bundle(mended, Options(gates=PRESETS["maxtext"]))


def test_before_and_after_by_layer_and_by_row(report: Report) -> None:
    panels = {panel.title: panel for panel in plot.panels(report)}
    assert list(panels) == [
        "stage_0.mlpackage: PLE of media rows",
        "chain: media",
        "chain: media without media",
        "chain: text",
        "logits: media",
        "logits: text",
    ]
    chain, logits = panels["chain: media"], panels["logits: media"]
    assert chain.x == (0, 1, 2, 3)
    assert min(chain.now) > 0.9999 > 0.99 > max(chain.before)
    assert (len(logits.x), len(logits.now), len(logits.before)) == (8, 8, 8)
    assert max(logits.now) < 1e-9 < 0.1 < max(logits.before)


def test_pictures(report: Report, tmp_path: Path) -> None:
    drawn, again, raster = tmp_path / "a.svg", tmp_path / "b.svg", tmp_path / "c.png"
    for path in (drawn, again, raster):
        plot.save([report], path)
    text = drawn.read_text()
    for word in ("chain: media", "logits: media", "cosine", "KL in nats", "before", "now"):
        assert re.search(f">{re.escape(word)}<", text), word
    assert drawn.read_bytes() == again.read_bytes()
    assert raster.read_bytes().startswith(b"\x89PNG")


def test_the_command_line(mended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.svg"
    assert main(["verify", str(mended), "--gates", "maxtext", "--plot", str(picture)]) == 0
    assert picture.exists()
    assert "gates" in capsys.readouterr().out


def test_nothing_to_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.svg"
    bundle = shutil.copytree(sample("onnx-right").parent, tmp_path / "right") / "model.onnx"
    bundle.with_name("model.onnx.reference.safetensors").unlink()
    assert main(["verify", str(bundle), "--plot", str(picture)]) == 2
    shown = capsys.readouterr()
    assert "PATCHED" in shown.out
    assert "no check gave numbers" in shown.err
    assert not picture.exists()


def test_what_cannot_be_drawn(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no picture"):
        plot.require(Path("picture.pdf"))
    with pytest.raises(UsageError, match="cannot be written"):  # said before anything is mended
        plot.require(tmp_path / "no" / "where.png")
    with pytest.raises(UsageError, match="cannot be written"):
        plot.save([report], tmp_path / "no" / "where.png")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        plot.require(Path("picture.png"))
    assert importlib.util.find_spec("matplotlib") is not None
