"""The reference check: it passes on what is right, and an empty, odd or foreign reference never does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from g4patch import Options, fix, verify_bundle
from g4patch.cli import main
from g4patch.errors import BundleError
from g4patch.reference import beside, load
from g4patch.report import Check, Outcome, Report, Status
from tests.conftest import SAMPLES, Copy, tree

ONNX = ["mobius-embedding", "mobius-text", "onnx-stage", "onnx-fp16", "onnx-identity-262144"]
CORE_ML = sorted(path.parent.name for path in SAMPLES.glob("coreml-*/stage.mlpackage"))

Tensors = dict[str, NDArray[Any]]
Metadata = dict[str, Any]


def result(report: Report, name: str = "reference") -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


def rewrite(path: Path, change: Callable[[Tensors, Metadata], object]) -> None:
    """Change a reference file."""
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
        metadata = json.loads(file.metadata()["g4patch"])
    change(tensors, metadata)
    save_file(tensors, path, {"g4patch": json.dumps(metadata)})


@pytest.mark.parametrize("name", [*ONNX, *CORE_ML, "coreai-state"])
def test_samples_fail_before_and_pass_after(name: str, copy: Copy) -> None:
    bundle = copy(name)
    before = verify_bundle(bundle)
    assert result(before).status is Status.FAILED
    assert before.exit_code == 3
    report = fix(bundle)
    assert report.outcome is Outcome.FIXED
    assert result(report).status is Status.PASSED
    assert "unpatched fails" in result(report).summary
    assert {check.status for check in report.checks} == {Status.PASSED}
    after = verify_bundle(bundle)
    assert (after.outcome, after.exit_code) == (Outcome.CLEAN, 0)
    assert "unpatched fails" in result(after).summary  # the original is kept in the backup
    assert result(after, "row map").status is Status.PASSED


def test_a_right_bundle_is_verified_without_an_unpatched_one(copy: Copy) -> None:
    report = verify_bundle(copy("onnx-right"))
    assert result(report).status is Status.PASSED
    assert "no unpatched bundle" in result(report).summary


def test_required_reference_that_is_missing(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    (reference := beside(bundle) or Path()).unlink()
    assert not reference.exists()
    before = tree(bundle.parent)
    report = fix(bundle, Options(required=frozenset({"reference"})))
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_MISSING, 4)
    assert tree(bundle.parent) == before
    assert fix(bundle).outcome is Outcome.FIXED


def drop_expected(tensors: Tensors, metadata: Metadata) -> None:
    for name in [name for name in tensors if "/expected/" in name]:
        del tensors[name]


def not_a_number(tensors: Tensors, metadata: Metadata) -> None:
    tensors["media/expected/per_layer_identity"][0, 0, 0, 0] = np.nan


def other_ids(tensors: Tensors, metadata: Metadata) -> None:
    metadata["token_ids"]["audio"] += 1


def other_shape(tensors: Tensors, metadata: Metadata) -> None:
    tensors["media/expected/per_layer_identity"] = tensors["media/expected/per_layer_identity"][:, :-1].copy()


def unknown_value(tensors: Tensors, metadata: Metadata) -> None:
    tensors["media/expected/no_such_value"] = np.zeros(3, np.float32)
    metadata["tolerances"]["no_such_value"] = metadata["tolerances"]["per_layer_identity"]


def of_a_broken_model(tensors: Tensors, metadata: Metadata) -> None:
    metadata["model"] = "broken"


def cannot_tell(tensors: Tensors, metadata: Metadata) -> None:
    for bound in metadata["tolerances"].values():
        bound.update(max_abs=1e6, norm_ratio=1e6)


def lost_scale(tensors: Tensors, metadata: Metadata) -> None:
    """Cosine is blind to this one; with a wide max_abs the norm still sees it."""
    metadata["tolerances"]["per_layer_identity"]["max_abs"] = 1e6
    tensors["media/expected/per_layer_identity"] *= 1.5


def lacks_an_input(tensors: Tensors, metadata: Metadata) -> None:
    del tensors["media/input/input_ids"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop_expected, "nothing was compared"),
        (not_a_number, "NaN"),
        (other_ids, "is for audio id"),
        (other_shape, "shape"),
        (unknown_value, "no such value"),
        (of_a_broken_model, "broken model"),
        (cannot_tell, "cannot tell right from wrong"),
        (lost_scale, "the norm is"),
    ],
)
def test_what_does_not_pass(change: Callable[[Tensors, Metadata], object], reason: str, copy: Copy) -> None:
    bundle = copy("onnx-stage")
    before = bundle.read_bytes()
    rewrite(bundle.with_name("model.onnx.reference.safetensors"), change)
    report = fix(bundle)
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_FAILED, 3)
    assert reason in str(result(report).details)
    assert bundle.read_bytes() == before


def test_a_reference_that_cannot_be_run_has_not_passed(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    rewrite(bundle.with_name("model.onnx.reference.safetensors"), lacks_an_input)
    report = fix(bundle, Options(required=frozenset({"reference"})))
    assert result(report).status is Status.SKIPPED
    assert report.exit_code == 4


def test_a_reference_without_media_is_no_control(copy: Copy) -> None:
    bundle = copy("onnx-stage")

    def text_only(tensors: Tensors, metadata: Metadata) -> None:
        for name in [name for name in tensors if not name.startswith("text/")]:
            del tensors[name]

    rewrite(bundle.with_name("model.onnx.reference.safetensors"), text_only)
    report = fix(bundle)
    assert result(report).status is Status.PASSED
    assert "no media row" in result(report).summary


FUNCTIONS = "coreml-multifunction"  # `prefill` takes 8 rows, `decode` takes one


def test_each_function_is_compared_with_the_prompts_that_fit_it(copy: Copy) -> None:
    """3 prompts of 8 rows and 4 of one, with 3 tensors each."""
    report = fix(copy(FUNCTIONS))
    assert result(report).status is Status.PASSED
    assert result(report).summary.startswith("21 tensors")


@pytest.mark.parametrize(("prompt", "function"), [("media", "prefill"), ("one audio", "decode")])
def test_no_function_is_passed_over(prompt: str, function: str, copy: Copy) -> None:
    bundle = copy(FUNCTIONS)

    def another_number(tensors: Tensors, metadata: Metadata) -> None:
        tensors[f"{prompt}/expected/per_layer_inputs"] += 1

    rewrite(bundle.with_name("stage.mlpackage.reference.safetensors"), another_number)
    report = fix(bundle)
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_FAILED, 3)
    assert [line.split(",")[0] for line in result(report).details] == [f"{function}: per_layer_inputs"] * 2


def test_a_function_that_no_prompt_fits_is_named(copy: Copy) -> None:
    bundle = copy(FUNCTIONS)

    def without_single_rows(tensors: Tensors, metadata: Metadata) -> None:
        for name in [name for name in tensors if name.startswith("one ")]:
            del tensors[name]

    rewrite(bundle.with_name("stage.mlpackage.reference.safetensors"), without_single_rows)
    report = fix(bundle)
    assert result(report).status is Status.PASSED
    assert result(report).summary.endswith("no prompt in it fits decode")


@pytest.mark.parametrize("at", [0, 7, 100, 5000])
def test_truncated_references_are_refused(at: int, copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-stage")
    path = bundle.with_name("model.onnx.reference.safetensors")
    path.write_bytes(path.read_bytes()[:at])
    before = tree(bundle.parent)
    assert main(["fix", str(bundle)]) == 2
    assert "is not a reference" in " ".join(capsys.readouterr().err.split())
    assert tree(bundle.parent) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, metadata: metadata.update(schema=2),
        lambda tensors, metadata: metadata.update(model="perfect"),
        lambda tensors, metadata: metadata["tolerances"].popitem(),
        lambda tensors, metadata: metadata["tolerances"]["per_layer_identity"].update(max_abs=float("nan")),
        lambda tensors, metadata: metadata["tolerances"]["per_layer_identity"].update(max_abs=10**400),
        lambda tensors, metadata: metadata["token_ids"].update(image=float("inf")),
        lambda tensors, metadata: tensors.update({"stray": np.zeros(1)}),
    ],
)
def test_malformed_references_are_refused(change: Callable[[Tensors, Metadata], object], copy: Copy) -> None:
    path = copy("onnx-stage").with_name("model.onnx.reference.safetensors")
    rewrite(path, change)
    with pytest.raises(BundleError, match="is not a reference"):
        load(path)


def test_metadata_that_is_nested_without_end(copy: Copy) -> None:
    path = copy("onnx-stage").with_name("model.onnx.reference.safetensors")
    save_file({"media/input/input_ids": np.zeros((1, 2), np.int64)}, path, metadata={"g4patch": "[" * 100_000})
    with pytest.raises(BundleError, match="is not a reference"):
        load(path)


def test_the_last_line_names_what_failed(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a reference that was not checked, or one that passed."""
    bundle = copy("onnx-stage")
    assert main(["verify", str(bundle)]) == 3
    assert capsys.readouterr().out.rstrip().endswith("a check failed: row map, reference")
    bundle.with_name("model.onnx.reference.safetensors").unlink()
    assert main(["verify", "--require", "reference", str(bundle)]) == 3
    assert capsys.readouterr().out.rstrip().endswith("a check failed: row map")
    assert main(["verify", "--require", "reference", str(fixed_without_reference(bundle))]) == 4
    assert capsys.readouterr().out.rstrip().endswith("a required check could not run: reference")


def fixed_without_reference(bundle: Path) -> Path:
    fix(bundle)
    return bundle
