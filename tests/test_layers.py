"""What the reference check says of each layer: the same for every format, and little enough to read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from g4patch import fix
from g4patch.layers import MediaRows, by_layer, telling
from g4patch.metrics import Distance
from g4patch.output import text
from g4patch.report import Check, LayerDistance, Outcome, Report, Status
from tests.conftest import Copy


def reference(report: Report) -> Check:
    (found,) = (check for check in report.checks if check.name == "reference")
    return found


@pytest.mark.parametrize(
    ("name", "graphs", "layers", "close"),
    [
        ("onnx-stage", 1, 3, 1e-6),
        ("mobius-embedding", 1, 3, 1e-6),
        ("onnx-fp16", 1, 3, 1e-3),  # float16 rounds to 5e-4 of a value
        ("coreml-fp32", 1, 2, 1e-6),
        ("coreai-multifunction", 2, 3, 1e-6),
    ],
)
def test_every_format_tells_them(name: str, graphs: int, layers: int, close: float, copy: Copy) -> None:
    found = reference(fix(copy(name)))
    assert found.status is Status.PASSED
    assert [one.layer for one in found.layers] == [*range(layers)] * graphs
    assert len({one.graph for one in found.layers}) == graphs
    for one in found.layers:
        assert one.unpatched is not None
        assert abs(one.found.cosine - 1) < close
        assert abs(one.found.norm_ratio - 1) < close
        # mobius masks image and audio: there, only the video rows were wrong.
        assert one.unpatched.delta_norm > 0.5
        assert one.unpatched.cosine < 0.95
        assert one.found.delta_norm < 20 * close


def test_without_media_rows_there_is_nothing_to_tell(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    path = Path(f"{bundle}.reference.safetensors")
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    save_file({key: value for key, value in load_file(path).items() if key.startswith("text/")}, path, metadata)
    report = fix(bundle)
    assert report.outcome is Outcome.FIXED
    assert reference(report).layers == ()


def test_distances_by_hand() -> None:
    """Two media rows of three, two layers of two: the second layer is twice what it should be."""
    expected = np.array([[[[3.0, 0], [1, 0]], [[9, 9], [9, 9]], [[4.0, 0], [0, 1]]]])
    actual = expected * np.array([1, 2]).reshape(1, 1, 2, 1)
    rows = MediaRows()
    rows.add(actual, expected, np.array([True, False, True]))
    rows.add(actual[:, :1], expected[:, :1], np.array([False]))  # a prompt without media
    first, second = by_layer({"main": rows}, {})
    assert (first.layer, first.found, first.unpatched) == (0, Distance(0.0, 1.0, 1.0, 0.0), None)
    assert second.found.max_abs == 1
    assert second.found.norm_ratio == 2
    assert second.found.cosine == pytest.approx(1)
    assert second.found.delta_norm == pytest.approx(2**0.5)


def layer(number: int, delta: float) -> LayerDistance:
    return LayerDistance("main", number, Distance(delta, 1, 1, delta), Distance(-1e5, 12345.678, -0.98765, 12345.678))


def test_of_many_layers_three_are_shown() -> None:
    layers = [layer(number, 0.5 if number == 7 else 0.25) for number in range(35)]
    assert [one.layer for one in telling(layers, 8)] == [0, 7, 34]
    assert [one.layer for one in telling(layers[:8], 8)] == [*range(8)]
    furthest_is_first = [layer(0, 1.0), *layers[1:]]
    assert [one.layer for one in telling(furthest_is_first, 8)] == [0, 34]


def test_lines_fit_beside_the_labels() -> None:
    """80 columns, of which the labels take 17."""
    lines = list(text._layers([layer(number, 1.23456e-7) for number in range(12)]))
    assert len(lines) == 4  # two of a head, the first layer, and the last
    assert max(len(line.plain) for line in lines) <= 63


def test_an_infinite_ratio_is_no_json(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that should be zero and are not: JSON has no infinity."""
    from g4patch.plain import distance

    assert json.loads(json.dumps(distance(Distance(1, np.inf, 0, 1)), allow_nan=False))["norm_ratio"] is None
