"""Vision towers: their bounds are judged, and where they are lost nothing else is held up."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from g4patch import check, engine, fix, revert, towers
from g4patch.formats.coreai import types
from g4patch.report import Outcome, Severity
from g4patch.tokens import TokenFlags, resolve
from g4patch.verdicts import Verdict
from g4patch.view import Value
from tests.conftest import SAMPLES, Copy, sample, tree

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_each_linear_is_named_as_its_weights_are() -> None:
    """torch's exporter names products by their modules, which the rule does not look at."""
    model = engine.open_model(sample("onnx-vision"))
    tower = towers.find(model.analyses[0].graph, model.tokens.patch_size)
    assert tower is not None
    assert [(site.layer, site.projection) for site in tower.sites] == [(n, name) for n in (0, 1) for name in LINEARS]
    for site in tower.sites:
        assert f"layers.{site.layer}/" in site.linear.node.address
        assert f"/{site.projection}/" in site.linear.node.address


def test_bounds_are_those_of_the_file() -> None:
    model = engine.open_model(sample("onnx-vision"))
    tower = towers.find(model.analyses[0].graph, model.tokens.patch_size)
    assert tower is not None
    proto = onnx.load(sample("onnx-vision"))
    stored = {item.name: float(numpy_helper.to_array(item)) for item in proto.graph.initializer if not item.dims}
    clips = {node.output[0]: node for node in proto.graph.node if node.op_type == "Clip"}
    products = {node.output[0]: node for node in proto.graph.node if node.op_type == "MatMul"}
    for site in tower.sites:
        before = clips[products[site.linear.node.output].input[0]]
        (behind,) = (clip for clip in clips.values() if clip.input[0] == site.linear.node.output)
        wanted = [stored[name] for clip in (before, behind) for name in clip.input[1:]]
        assert [site.linear.bounds[name].number for name in towers.BOUNDS] == wanted


def test_a_tower_alone_is_not_inconclusive() -> None:
    """Its configuration promises PLE, which a tower does not look up."""
    report = check(sample("onnx-vision"))
    assert (report.outcome, report.subject.verdict, report.findings) == (Outcome.CLEAN, Verdict.NO_PLE, ())


def test_lost_bounds_do_not_hold_up_the_lookup(copy: Copy) -> None:
    folder = copy("mobius-embedding").parent
    shutil.copy(sample("mobius-vision"), folder / "vision.onnx")
    shutil.copy(SAMPLES / "mobius-vision" / "model.onnx.data", folder / "vision.onnx.data")
    model = onnx.load(folder / "vision.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "vision.onnx.data" if entry.key == "location" else entry.value
    onnx.save(model, folder / "vision.onnx")
    before = tree(folder)
    report = fix(folder)
    assert (report.outcome, report.exit_code) == (Outcome.PARTLY_FIXED, 1)
    assert [found.rule for found in report.remaining] == ["clip-bounds"]
    assert check(folder / "model.onnx").subject.verdict is Verdict.PATCHED
    revert(folder)
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("section", "layers"),
    [
        ({"model_type": "gemma4_vision", "use_clipped_linears": True, "num_hidden_layers": 27}, 27),
        ({"model_type": "gemma4_vision", "use_clipped_linears": True}, 16),
        ({"model_type": "gemma4_vision"}, None),
        ({"model_type": "siglip_vision_model", "use_clipped_linears": True}, None),
    ],
)
def test_layers_of_the_configuration(section: dict[str, object], layers: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": section}))
    assert resolve(tmp_path / "model.onnx", TokenFlags()).clipped_vision_layers == layers


def test_fewer_layers_than_configured(copy: Copy) -> None:
    bundle = copy("onnx-vision")
    config = json.loads((bundle.parent / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 16
    (bundle.parent / "config.json").write_text(json.dumps(config))
    (found,) = check(bundle).findings
    assert (found.rule, found.severity) == ("clip-bounds", Severity.ERROR)
    assert "448 bounds; the graph has 14 of 112" in found.message


def test_a_tower_that_is_not_recognised_is_not_judged() -> None:
    """Without products that could be its layers' there is nothing to count: a note, not an error."""
    model = engine.open_model(sample("onnx-vision"))
    (analysis,) = model.analyses
    graph = replace(analysis.graph, nodes=(), outputs=())
    tower = towers.find(graph, model.tokens.patch_size)
    assert tower is not None
    assert (tower.kind, tower.sites) == ("vision", ())


@pytest.mark.parametrize(
    ("text", "dtype", "wanted"),
    [
        ("dense<0xFF800000> : tensor<f32>", "float32", -np.inf),
        ("dense<0x7F800000> : tensor<f32>", "float32", np.inf),
        ("dense<0x7FC00000> : tensor<f32>", "float32", np.nan),
        ("dense<0x7C00> : tensor<f16>", "float16", np.inf),
        ("dense<0xFF80> : tensor<bf16>", "bfloat16", -np.inf),
        ("dense<-2.5> : tensor<f32>", "float32", -2.5),
    ],
)
def test_numbers_that_mlir_prints_as_bits(text: str, dtype: str, wanted: float) -> None:
    """Infinities and NaN of IEEE 754, by hand."""
    found = types.inline(text, Value("bound", dtype, ()))
    np.testing.assert_array_equal(found, np.array(wanted))
