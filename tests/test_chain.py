"""Chains of stages: right ones pass, a planted fault is named by stage, layer and row, and no check passes blind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from g4patch import Options, chain, engine, fix, verify_bundle
from g4patch.cli import main
from g4patch.errors import BundleError
from g4patch.evidence import Divergence, StageEvidence
from g4patch.output import evidence
from g4patch.reference import load
from g4patch.report import Check, Outcome, Status
from g4patch.runtimes import Unavailable
from g4patch.stages import Stage, stage_of
from tests import faults
from tests.conftest import sample
from tests.test_coreai_format import needs_coreai
from tests.whole import NAME, Metadata, Tensors, folder, keep_runs, result, rewrite

pytestmark = pytest.mark.slow

CORE_ML, ONNX, CORE_AI = "coreml-two-stage", "mobius-package", "coreai-two-stage"
LAYERS = {CORE_ML: 4, ONNX: 3, CORE_AI: 4}


@pytest.fixture
def right(mended: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies of the folders that need no native runtime: mended, or right for the runs of their reference."""

    def copy(name: str) -> Path:
        if name == CORE_ML:
            return shutil.copytree(mended, tmp_path / name)
        return folder(name, tmp_path)

    return copy


def chained(bundle: Path) -> Check:
    return result(verify_bundle(bundle), "chain")


def faulty(found: Check) -> tuple[StageEvidence, Divergence]:
    """The first stage that diverges when fed from the last, and where."""
    assert found.status is Status.FAILED
    stage = next(stage for stage in found.stages if stage.chained)
    assert stage.chained is not None
    return stage, stage.chained


def same_place(left: Divergence | None, right: Divergence) -> bool:
    """Whether two divergences are in one place: by how much they are off differs by rounding."""
    return left is not None and replace(left, error=0.0) == replace(right, error=0.0)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        (CORE_ML, {"stage_0": (0, 1), "stage_1": (2, 3)}),
        (ONNX, {"embedding/model": (), "decoder/model": (0, 1, 2)}),
    ],
)
def test_a_right_chain_passes(name: str, stages: dict[str, tuple[int, ...]], right: Callable[[str], Path]) -> None:
    """All hidden states, sums, rows and logits are Hugging Face's, tapped where the structure says."""
    found = chained(right(name))
    assert found.status is Status.PASSED
    assert {stage.name: stage.layers for stage in found.stages} == stages
    assert not any(stage.chained or stage.alone or stage.alone_unknown or stage.unseen for stage in found.stages)
    tapped = {one.layer for stage in found.stages for one in stage.cosines if one.name.startswith("hidden")}
    assert tapped == set(range(LAYERS[name]))


@needs_coreai
def test_a_right_chain_of_core_ai(tmp_path: Path) -> None:
    bundle = folder(CORE_AI, tmp_path)
    keep_runs(bundle, "text")
    found = chained(bundle)
    assert found.status is Status.PASSED
    assert [stage.layers for stage in found.stages] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("layer", [2, 3])
def test_core_ml_a_weight_of_a_layer_of_stage_1(layer: int, right: Callable[[str], Path]) -> None:
    bundle = right(CORE_ML)
    faults.mil_weight(bundle / "stage_1.mlpackage", f"per_layer_inputs_language_layers_{layer}_mlp_up_proj_weight")
    found = chained(bundle)
    stage, off = faulty(found)
    assert (stage.name, off.layer, off.name) == ("stage_1", layer, f"hidden_states.{layer + 1}")
    assert same_place(stage.alone, off)
    assert "the fault is here" in found.summary
    assert f"stage_1, layer {layer}, row 0" in found.summary


@pytest.mark.parametrize("layer", [0, 2])
def test_onnx_a_weight_of_a_layer_of_the_decoder(layer: int, right: Callable[[str], Path]) -> None:
    bundle = right(ONNX)
    faults.onnx_weight(bundle / "decoder" / "model.onnx", f"decoder.model.layers.{layer}.mlp.up_proj.weight_t")
    stage, off = faulty(chained(bundle))
    assert (stage.name, off.layer, off.name) == ("decoder/model", layer, f"hidden_states.{layer + 1}")
    assert same_place(stage.alone, off)


def test_onnx_a_layer_of_the_table(right: Callable[[str], Path]) -> None:
    """The embedding model's own rows for layer 1; the decoder is right and inherits them."""
    bundle = right(ONNX)
    model = bundle / "embedding" / "model.onnx"
    faults.onnx_table(model, "embedding.embed_tokens_per_layer.weight", slice(8, 16))
    found = chained(bundle)
    stage, off = faulty(found)
    assert (stage.name, off.layer, off.row, off.name) == ("embedding/model", 1, 0, "per_layer_identity")
    decoder = found.stages[1]
    assert decoder.alone is None
    assert decoder.chained is not None
    assert (decoder.chained.layer, decoder.chained.name) == (1, "hidden_states.2")
    assert "inherited" in chain.said(decoder)


@needs_coreai
def test_core_ai_a_layer_of_the_table_of_stage_1(tmp_path: Path) -> None:
    bundle = folder(CORE_AI, tmp_path)
    keep_runs(bundle, "text")
    asset = bundle / "stage_1.aimodel"
    weights = engine.open_model(asset).model.weights
    (offset,) = [offset for offset, size in weights.values() if size == 320 * 32 * 4]
    faults.coreai_table(asset, offset, 320, 32, slice(24, 32))
    found = chained(bundle)
    stage, off = faulty(found)
    assert (stage.name, off.layer, off.row, off.name) == ("stage_1", 3, 0, "per_layer_identity")
    assert same_place(stage.alone, off)
    assert found.stages[0].chained is None


@pytest.mark.slow
@needs_coreai
def test_core_ai_what_stays_wrong_in_a_later_stage(tmp_path: Path) -> None:
    """Mended, stage 1 still projects hidden states: its own fault, from its first layer's first media row on."""
    bundle = folder(CORE_AI, tmp_path)
    reference = bundle / NAME
    kept = tmp_path / "kept.safetensors"
    reference.rename(kept)
    assert fix(bundle).outcome is Outcome.FIXED
    kept.rename(reference)
    keep_runs(bundle, "media")
    report = verify_bundle(bundle)
    found = result(report, "chain")
    rows = [check.layers for model in report.models for check in model.checks if check.name == "reference"]
    assert [[one.layer for one in of_stage] for of_stage in rows] == [[0, 1], [2, 3]]
    assert all(one.found.delta_norm < 1e-5 for of_stage in rows for one in of_stage)
    stage, off = faulty(found)
    assert (stage.name, off.layer, off.row, off.kind, off.name) == ("stage_1", 2, 5, "image", "per_layer_inputs")
    assert stage.alone is not None


def test_onnx_the_token_embedding(right: Callable[[str], Path]) -> None:
    """Before all layers; the sums of all of them and the decoder inherit it."""
    bundle = right(ONNX)
    faults.onnx_table(bundle / "embedding" / "model.onnx", "embedding.embed_tokens.weight", slice(0, 16))
    found = chained(bundle)
    stage, off = faulty(found)
    assert (stage.name, off.layer, off.row, off.name) == ("embedding/model", None, 0, "hidden_states.0")
    assert found.stages[1].alone is None
    assert "embeds, row 0" in str(list(evidence.stages(found.stages, "_#")))


def test_a_bundle_that_was_mended_for_other_media(right: Callable[[str], Path]) -> None:
    """mobius' fault is video's alone: prompts without it say nothing of the fix, for it or against it."""
    bundle = right(ONNX)
    report = fix(bundle)
    assert report.outcome is Outcome.FIXED
    assert result(report, "gates").status is Status.SKIPPED
    told = [check.summary for model in report.models for check in model.checks if check.name == "reference"]
    assert any("no media row in it that the patch changes" in summary for summary in told)


def test_numbers_that_are_none(right: Callable[[str], Path]) -> None:
    bundle = right(CORE_ML)
    name = "per_layer_inputs_language_layers_3_mlp_up_proj_weight"
    faults.mil_weight(bundle / "stage_1.mlpackage", name, np.nan)
    stage, off = faulty(chained(bundle))
    assert (stage.name, off.layer, off.row, off.error) == ("stage_1", 3, 0, np.inf)


def without_boundary(tensors: Tensors, metadata: Metadata) -> None:
    for name in [name for name in tensors if name.endswith("/hidden_states.2")]:
        del tensors[name]


def test_a_boundary_that_the_reference_lacks(right: Callable[[str], Path]) -> None:
    """The chain can be run all the same; whether stage 1 inherited its error cannot be told."""
    bundle = right(CORE_ML)
    rewrite(bundle / NAME, without_boundary)
    assert chained(bundle).status is Status.PASSED
    faults.mil_weight(bundle / "stage_1.mlpackage", "per_layer_inputs_language_layers_3_mlp_up_proj_weight")
    found = chained(bundle)
    stage, _ = faulty(found)
    assert (stage.alone, stage.alone_unknown) == (None, "the reference lacks hidden_states.2")
    assert "is not known" in found.summary


def expects_nothing(tensors: Tensors, metadata: Metadata) -> None:
    for name in [name for name in tensors if "/expected/" in name]:
        del tensors[name]


def nothing_of_stage_1(tensors: Tensors, metadata: Metadata) -> None:
    for name in [
        name for name in tensors if name.endswith(("per_layer_identity", "per_layer_inputs", "logits", "3", "4"))
    ]:
        del tensors[name]


def not_a_number(tensors: Tensors, metadata: Metadata) -> None:
    tensors["media/expected/hidden_states.1"][0, 0, 0] = np.nan


def a_row_short(tensors: Tensors, metadata: Metadata) -> None:
    tensors["media/expected/hidden_states.3"] = tensors["media/expected/hidden_states.3"][:, :-1].copy()


def fewer_layers(tensors: Tensors, metadata: Metadata) -> None:
    for name in [name for name in tensors if "per_layer" in name]:
        tensors[name] = tensors[name][:, :, :2].copy()


def other_ids(tensors: Tensors, metadata: Metadata) -> None:
    metadata["token_ids"]["audio"] += 1


def of_a_broken_model(tensors: Tensors, metadata: Metadata) -> None:
    metadata["model"] = "broken"


def no_embeddings(tensors: Tensors, metadata: Metadata) -> None:
    for name in [name for name in tensors if name.endswith(("/hidden_states", "/hidden_states.0"))]:
        del tensors[name]


def of_more_layers(tensors: Tensors, metadata: Metadata) -> None:
    metadata["layers"] = 6


def another_length(tensors: Tensors, metadata: Metadata) -> None:
    for name in list(tensors):
        tensors[name] = tensors[name][:, :-1].copy()


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        (expects_nothing, Status.SKIPPED, "the reference has no value of stage_0, stage_1"),
        (nothing_of_stage_1, Status.SKIPPED, "the reference has no value of stage_1"),
        (not_a_number, Status.FAILED, "NaN"),
        (a_row_short, Status.FAILED, "the shape is [1, 8, 16], expected [1, 7, 16]"),
        (fewer_layers, Status.FAILED, "the shape is"),
        (other_ids, Status.FAILED, "audio id 312"),
        (of_a_broken_model, Status.FAILED, "broken model"),
        (no_embeddings, Status.SKIPPED, "nothing is given for hidden_states"),
        (of_more_layers, Status.SKIPPED, "stage_0 has per-layer inputs of 4 of 6 layers"),
        (another_length, Status.SKIPPED, "stage_0 takes no prompt of 7 rows"),
    ],
)
def test_what_does_not_pass(
    change: Callable[[Tensors, Metadata], object], status: Status, reason: str, right: Callable[[str], Path]
) -> None:
    bundle = right(CORE_ML)
    rewrite(bundle / NAME, change)
    found = chained(bundle)
    assert (found.status, reason in found.summary) == (status, True), found.summary


def test_prompts_that_do_not_fit_are_left_out(right: Callable[[str], Path]) -> None:
    """A static graph takes prompts of its own length; those of others are named."""
    bundle = right(CORE_ML)

    def shorter(tensors: Tensors, metadata: Metadata) -> None:
        for name in [name for name in tensors if name.startswith("text/")]:
            tensors[name] = tensors[name][:, :-1].copy()

    rewrite(bundle / NAME, shorter)
    report = verify_bundle(bundle)
    found = result(report, "chain")
    assert found.status is Status.PASSED
    assert "left out: text: stage_0 takes no prompt of 7 rows, only of 8" in found.details
    judged = result(report, "gates")
    assert judged.logits is not None
    assert {segment.run for segment in judged.logits.segments} == {"media"}


def test_a_reference_of_other_lengths_says_which_would_fit(right: Callable[[str], Path]) -> None:
    bundle = right(CORE_ML)
    rewrite(bundle / NAME, another_length)
    report = verify_bundle(bundle)
    told = [check for model in report.models for check in model.checks if check.name == "reference"]
    assert {(check.status, check.summary) for check in told} == {
        (Status.SKIPPED, "this model takes no prompt of the lengths that are in it, only of 8")
    }
    assert result(report, "chain").summary == "stage_0 takes no prompt of 7 rows, only of 8"


def test_a_reference_beside_a_folder(right: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a model; one in the folder comes first, and the current folder has a name too."""
    bundle = right(CORE_ML)
    (bundle / NAME).rename(bundle.with_name(f"{bundle.name}.{NAME}"))
    assert chained(bundle).status is Status.PASSED
    monkeypatch.chdir(bundle)
    assert chained(Path()).status is Status.PASSED
    (bundle / NAME).write_bytes(b"")
    with pytest.raises(BundleError, match="is not a reference"):
        verify_bundle(bundle)


def test_a_truncated_reference_is_refused(right: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundle = right(CORE_ML)
    (bundle / NAME).write_bytes((bundle / NAME).read_bytes()[:5000])
    assert main(["verify", str(bundle)]) == 2
    assert "is not a reference" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("ids", [np.zeros((1, 8), np.float32), np.zeros(8, np.int32), np.zeros((2, 8), np.int32)])
def test_ids_that_are_none_are_refused(ids: NDArray[Any], tmp_path: Path) -> None:
    bundle = folder(CORE_ML, tmp_path)
    rewrite(bundle / NAME, lambda tensors, metadata: tensors.update({"media/input/input_ids": ids}))
    with pytest.raises(BundleError, match="no row of token ids"):
        load(bundle / NAME)


def test_a_chain_that_is_required_and_cannot_be_run(right: Callable[[str], Path]) -> None:
    bundle = right(CORE_ML)
    (bundle / NAME).unlink()
    required = Options(required=frozenset({"chain"}))
    report = verify_bundle(bundle, required)
    assert (result(report, "chain").status, report.exit_code) == (Status.SKIPPED, 4)
    report = verify_bundle(sample("onnx-stage"), required)
    assert (result(report, "chain").status, report.exit_code) == (Status.SKIPPED, 3)


def test_variants_of_a_stage(right: Callable[[str], Path]) -> None:
    """Two models of the same layers: no guess, unless the folder's metadata names one."""
    bundle = right(CORE_ML)
    shutil.copytree(bundle / "stage_1.mlpackage", bundle / "stage_1_int8.mlpackage")
    found = chained(bundle)
    assert (found.status, "both compute layer 2" in found.summary) == (Status.SKIPPED, True)
    named = {"assets": {"a": "stage_0.mlpackage", "b": "stage_1.mlpackage"}}
    (bundle / "metadata.json").write_text(json.dumps(named))
    found = chained(bundle)
    assert found.status is Status.PASSED
    assert [stage.name for stage in found.stages] == ["stage_0", "stage_1"]


def test_layers_that_no_model_computes(right: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = right(CORE_ML)

    def shifted(*arguments: object) -> Stage:
        stage = stage_of(*arguments)  # type: ignore[arg-type]
        return replace(stage, layers=(3, 4)) if stage.layers == (2, 3) else stage

    monkeypatch.setattr(chain, "stage_of", shifted)
    subjects = {f"{name}.mlpackage": engine.open_model(bundle / f"{name}.mlpackage") for name in ("stage_1", "stage_0")}
    with pytest.raises(Unavailable, match="no model here computes layers 2 to 2"):
        chain.ordered(bundle, subjects, 4)


def test_one_stage_alone(right: Callable[[str], Path]) -> None:
    """`verify MODEL --reference REF`: a chain of one, fed from the reference."""
    bundle = right(CORE_ML)
    report = verify_bundle(bundle / "stage_1.mlpackage", Options(reference=bundle / NAME))
    found = result(report, "chain")
    assert (found.status, found.summary.startswith("1 stage,")) == (Status.PASSED, True)
    (stage,) = found.stages
    assert (stage.layers, stage.chained, stage.alone, stage.alone_unknown) == ((2, 3), None, None, "")


def test_derived_inputs_are_told(right: Callable[[str], Path]) -> None:
    details = " ".join(chained(right(ONNX)).details)
    for what in ("position_ids = 0, 1, ..", "attention_mask = 1", "empty caches", "audio_features = its rows"):
        assert what in details


def test_the_text_report(right: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundle = right(CORE_ML)
    faults.mil_weight(bundle / "stage_1.mlpackage", "per_layer_inputs_language_layers_3_mlp_up_proj_weight")
    assert main(["verify", str(bundle)]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.split()[:1] in (["stage_0"], ["stage_1"])]
    assert rows == [
        ["stage_0", "0-1", "agrees", "agrees"],
        ["stage_1", "2-3", *["layer", "3,", "row", "0", "layer", "3,", "row", "0"]],
    ]
