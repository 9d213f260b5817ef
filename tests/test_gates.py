"""The gates: metrics against scipy, thresholds, the control, and logits that never pass without being judged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy import special

from g4patch import Options, gates, metrics, verify_bundle
from g4patch.cli import main
from g4patch.errors import BundleError, UsageError
from g4patch.metrics import kl_divergence, log_softmax
from g4patch.output.evidence import bars_for, sparkline
from g4patch.reference import Reference, Run, Tolerance, load
from g4patch.report import Check, Status
from g4patch.thresholds import PRESETS, Thresholds, of_metadata, parse
from tests import faults
from tests.test_json import SCHEMA
from tests.whole import NAME, Metadata, Tensors, folder, result, rewrite

Array = NDArray[Any]

IMAGE, PAD = 90, 0
V = 100

logits = arrays(np.float32, (3, 7), elements=st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=True))
near = arrays(np.float32, (3, 7), elements=st.floats(-30, 30, width=32, allow_subnormal=True))


@given(logits)
def test_log_softmax_is_scipys(rows: NDArray[np.float32]) -> None:
    """Also for values whose exponentials pass float64's range. Both are exact to a few units of the last place."""
    wanted = special.log_softmax(rows.astype(np.float64), axis=-1)
    for row, right in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(log_softmax(row), right, rtol=1e-12, atol=1e-12)


@given(near, near)
def test_divergence_is_scipys(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """rel_entr works on probabilities, which lose what is below 1e-16 of them: 1e-9."""
    p, q = (special.softmax(rows.astype(np.float64), axis=-1) for rows in (expected, actual))
    np.testing.assert_allclose(kl_divergence(actual, expected), special.rel_entr(p, q).sum(-1), atol=1e-9)


@pytest.mark.parametrize(
    ("actual", "expected", "divergence"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 0),
        ([5e-324, 0, 0, 0], [0, 0, 0, 0], 0),
        ([1e38, 0, 0, 0], [1e38, 0, 0, 0], 0),
        ([0, 1e38, 0, 0], [1e38, 0, 0, 0], 1e38),  # all on one token that has e^-1e38 of the probability
        ([0, 0, -np.inf, -np.inf], [0, 0, -np.inf, -np.inf], 0),
        ([0, 0, 0, 0], [0, 0, -np.inf, -np.inf], math.log(2)),  # half of 4 tokens
        ([0, 0, -np.inf, -np.inf], [0, 0, 0, 0], math.inf),  # tokens that are expected and cannot come
        ([0, 0, 0, -np.inf], [0, 0, 0, -1e9], 0),  # e^-1e9 is 0 in float64
    ],
)
def test_divergence_by_hand(actual: list[float], expected: list[float], divergence: float) -> None:
    found = kl_divergence(np.array([actual]), np.array([expected]))
    assert found.shape == (1,)
    assert found[0] == pytest.approx(divergence, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (np.zeros((2, 3)), np.zeros((1, 3)), "shape"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "nothing"),
        (np.zeros((2, 0)), np.zeros((2, 0)), "nothing"),
        (np.zeros(3), np.zeros(3), "shape"),
        (np.array([[np.nan, 0]]), np.zeros((1, 2)), "NaN"),
        (np.zeros((1, 2)), np.array([[np.inf, 0]]), "inf"),
        (np.full((1, 2), -np.inf), np.zeros((1, 2)), "no finite"),
    ],
)
def test_logits_that_cannot_be_compared(actual: Array, expected: Array, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kl_divergence(actual, expected)


@given(logits, logits)
def test_distances_are_numpys_whatever_the_pieces(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Large arrays are taken piece by piece: 21 numbers in pieces of 4. Two sums in another order: 1e-12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_CHUNK", 4)
        found = metrics.distance(actual, expected)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    assert found.max_abs == np.abs(a - e).max()
    assert found.delta_norm == pytest.approx(np.linalg.norm(a - e), rel=1e-12, abs=1e-320)
    if a.any() and e.any():
        assert found.norm_ratio == pytest.approx(np.linalg.norm(a) / np.linalg.norm(e), rel=1e-12)
    assert metrics.distance(actual, expected).max_abs == found.max_abs


# A prompt: text, two image rows, text; then three tokens that the model went on with.
IDS = np.array([[5, 6, IMAGE, IMAGE, 7, 8, 11, 12, 13]])
PROMPT, STEPS = 6, 3


def predicting(*tokens: int, sure: float = 9.0) -> NDArray[np.float32]:
    """Logits `[1, S, V]` that predict a token in each row."""
    rows = np.zeros((1, len(tokens), V), np.float32)
    rows[0, np.arange(len(tokens)), tokens] = sure
    return rows


RIGHT = predicting(6, 1, 2, 7, 8, 11, 12, 13, 14)


def reference(limits: Thresholds | None = None, ids: Array = IDS, steps: int = STEPS, twin: str = "blind") -> Reference:
    runs = (
        Run("seen", {"input_ids": ids}, {"logits": RIGHT}, PROMPT, steps, twin),
        Run("blind", {"input_ids": ids}, {"logits": RIGHT}, PROMPT, steps),
    )
    tolerance = {"logits": Tolerance(1e-3, 1e-3, "by hand")}
    return Reference(Path("by-hand"), "right", {}, {"image": IMAGE, "pad": PAD}, tolerance, runs, 1, limits)


def judged(
    found: Array = RIGHT,
    unpatched: Array | None = None,
    limits: Thresholds | None = None,
    against: Reference | None = None,
    blind: Array = RIGHT,
    changed: tuple[int, ...] = (IMAGE,),
) -> Check:
    old = {"seen": unpatched, "blind": blind} if unpatched is not None else None
    return gates.check({"seen": found, "blind": blind}, old, against or reference(), [IMAGE], changed, limits)


def test_segments_are_those_before_in_and_after_the_media() -> None:
    off = RIGHT.copy()
    off[0, 4] = predicting(50)[0, 0]
    check = judged(off)
    assert check.logits is not None
    parts = {one.part: (one.found.rows, one.found.argmax) for one in check.logits.segments}
    assert parts == {"before": (2, 1.0), "in": (2, 1.0), "after": (5, 0.8)}
    p = special.softmax(RIGHT[0, 4].astype(np.float64))
    q = special.softmax(off[0, 4].astype(np.float64))
    (after,) = [one.found for one in check.logits.segments if one.part == "after"]
    assert after.max_kl == pytest.approx(special.rel_entr(p, q).sum(), rel=1e-9)
    assert after.mean_kl == pytest.approx(after.max_kl / 5, rel=1e-9)


def test_teacher_forcing_by_hand() -> None:
    """Row 5 is the last of the prompt: rows 5, 6 and 7 predict tokens 11, 12 and 13."""
    seen, blind = predicting(0, 0, 0, 0, 0, 11, 40, 13, 0), predicting(0, 0, 0, 0, 0, 11, 41, 42, 12)
    check = judged(seen, seen, blind=blind)
    assert check.logits is not None
    (forced,) = check.logits.teacher_forced
    assert (forced.steps, forced.right, forced.without, forced.parted, forced.unpatched) == (3, 2, 1, 1, 2)
    (forced,) = judged(seen, blind=seen).logits.teacher_forced  # type: ignore[union-attr]
    assert (forced.right, forced.without, forced.parted, forced.unpatched) == (2, 2, None, None)


OFF_AFTER = np.concatenate([RIGHT[:, :4], predicting(50, 50, 50, 50, 50)], axis=1)
OFF_BEFORE = np.concatenate([predicting(50, 50), RIGHT[:, 2:]], axis=1)


@pytest.mark.parametrize(
    ("limits", "found", "status"),
    [
        (PRESETS["maxtext"], RIGHT, Status.PASSED),
        (PRESETS["maxtext"], OFF_AFTER, Status.FAILED),
        (PRESETS["maxtext"], OFF_BEFORE, Status.PASSED),  # its limits are for the rows after the media
        (PRESETS["maxtext"], RIGHT * 0.5, Status.FAILED),  # the argmax is right, the divergence is not
        (Thresholds("by hand", argmax=1.0), RIGHT * 0.5, Status.PASSED),
        (Thresholds("by hand", max_kl=9.0, argmax=1.0), OFF_AFTER, Status.FAILED),
        (Thresholds("by hand", top1=1.0), RIGHT, Status.PASSED),
        (Thresholds("by hand", top1=0.1), OFF_AFTER, Status.FAILED),
    ],
)
def test_thresholds(limits: Thresholds, found: Array, status: Status) -> None:
    check = judged(found, limits=limits)
    assert check.status is status
    assert check.logits is not None
    assert check.logits.source == limits.source


def test_the_image_must_be_worth_something() -> None:
    """The run that issue-83 is named after: 58 of 64 with the image, 43 without. One that is blind leads by nothing."""
    tokens = np.arange(64) + 10
    ids = np.concatenate([[5, IMAGE], tokens])[None]
    right = predicting(0, *tokens, 0)

    def wrong(count: int) -> Array:
        logits = right.copy()
        logits[0, 1 : 1 + count] = predicting(1)[0, 0]
        return logits

    run = Run("seen", {"input_ids": ids}, {"logits": right}, 2, 64, "blind")
    against = replace(reference(), runs=(run, replace(run, name="blind", without_media="")))

    def status(seen: int, blind: int) -> Status:
        return judged(wrong(64 - seen), limits=PRESETS["issue-83"], against=against, blind=wrong(64 - blind)).status

    assert status(58, 43) is Status.PASSED
    assert status(64, 43) is Status.PASSED
    assert status(57, 42) is Status.FAILED
    assert status(58, 44) is Status.FAILED
    assert status(64, 64) is Status.FAILED


@pytest.mark.parametrize(
    ("limits", "against", "reason"),
    [
        (Thresholds("by hand", top1=0.5), reference(steps=0), "no run of the reference measures top1"),
        (Thresholds("by hand", top1=0.5, lead=0.0), reference(twin=""), "no run of the reference measures lead"),
        (PRESETS["maxtext"], reference(ids=np.full((1, 9), 5)), "no run of the reference measures max_kl"),
        (None, reference(ids=np.full((1, 9), 5)), "no media row"),
        (None, reference(), "no unpatched bundle"),
        (Thresholds("by hand"), reference(), "no unpatched bundle"),
        (PRESETS["maxtext"], replace(reference(), runs=()), "no logits"),
    ],
)
def test_what_is_not_measured_has_not_passed(limits: Thresholds | None, against: Reference, reason: str) -> None:
    check = judged(limits=limits, against=against)
    assert (check.status, reason in check.summary) == (Status.SKIPPED, True), check.summary


def test_a_failed_limit_is_not_hidden_by_one_that_cannot_be_measured() -> None:
    limits = Thresholds("by hand", max_kl=1e-3, lead=0.1)
    assert judged(OFF_AFTER, limits=limits, against=reference(twin="")).status is Status.FAILED


@pytest.mark.parametrize(
    ("found", "reason"),
    [(RIGHT * np.nan, "NaN"), (RIGHT[:, :-1], "shape"), (RIGHT[..., :-1], "shape"), (RIGHT[0], "shape")],
)
def test_logits_that_are_none(found: Array, reason: str) -> None:
    check = judged(found, limits=PRESETS["maxtext"])
    assert (check.status, reason in check.summary) == (Status.FAILED, True), check.summary


def test_no_logits_at_all() -> None:
    assert gates.check({}, None, reference(), [IMAGE], [IMAGE], PRESETS["maxtext"]).status is Status.SKIPPED


@pytest.mark.parametrize(
    ("found", "unpatched", "status"),
    [
        (RIGHT, OFF_AFTER, Status.PASSED),
        (OFF_AFTER, OFF_AFTER, Status.FAILED),  # no better
        (RIGHT, RIGHT, Status.FAILED),  # the reference cannot tell the two apart
        (OFF_AFTER, RIGHT, Status.FAILED),
        (RIGHT * 0.5, OFF_AFTER, Status.PASSED),  # better, if not right: without thresholds no more is asked
        (RIGHT, OFF_BEFORE, Status.FAILED),  # better only where no media were seen yet
    ],
)
def test_without_thresholds_it_must_improve(found: Array, unpatched: Array, status: Status) -> None:
    check = judged(found, unpatched)
    assert check.status is status
    assert check.logits is not None
    assert "no thresholds" in check.logits.source


def test_a_prompt_that_the_patch_does_not_touch_is_no_control() -> None:
    """As where video is mended, and the prompt has a picture: the same logits then speak neither for nor against."""
    check = judged(RIGHT, RIGHT, changed=(IMAGE + 1,))
    assert (check.status, "that the patch changes" in check.summary) == (Status.SKIPPED, True)


def test_flags() -> None:
    assert parse("maxtext") == PRESETS["maxtext"]
    assert parse("max_kl=1e-3, argmax=0.9").set == {"max_kl": 1e-3, "argmax": 0.9}
    assert parse("issue-83,lead=0.1").set == {"top1": 58 / 64, "lead": 0.1}
    assert parse("top1=1").source == "--gates top1=1"
    for text in ("", "maxtex", "max_kl", "max_kl=", "max_kl=-1", "max_kl=nan", "argmax=1.1", "source=1", "maxtext=1"):
        with pytest.raises(UsageError, match="--gates does not know"):
            parse(text)


def test_thresholds_of_a_reference() -> None:
    entry = {"source": "a run", "after": {"max_kl": 0.1, "reason": "."}, "teacher_forced": {"top1": 0.9, "reason": "."}}
    assert of_metadata(entry) == Thresholds("the reference (a run)", max_kl=0.1, top1=0.9)
    assert of_metadata(None) is None
    assert of_metadata({"source": "nothing"}) is None
    malformed: list[Any] = [
        [],
        {"after": 1},
        {"after": {"max_kl": "x"}},
        {"after": {"unheard": 1}},
        {"after": {"argmax": 2}},
    ]
    for bad in malformed:
        with pytest.raises(ValueError, match="gates"):
            of_metadata(bad)


def test_a_fix_improves_the_logits_and_shows_it(mended: Path) -> None:
    """The unpatched chain is run from the backup."""
    found = result(verify_bundle(mended), "gates")
    assert found.status is Status.PASSED
    assert found.logits is not None
    for segment in found.logits.segments:
        assert segment.unpatched is not None
        worse = segment.part in ("in", "after")
        assert (segment.unpatched.mean_kl > 1e-3) is worse
        assert segment.found.mean_kl < 1e-9
    named = verify_bundle(mended, Options(gates=parse("maxtext")))
    assert "preset maxtext" in result(named, "gates").summary
    missing = verify_bundle(mended, Options(gates=parse("issue-83"), required=frozenset({"gates"})))
    assert (result(missing, "gates").status, missing.exit_code) == (Status.SKIPPED, 4)


def test_gates_of_the_reference_decide(mended: Path, tmp_path: Path) -> None:
    """Thresholds in the reference, which flags take the place of. A weight of the last layer is altered."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for part in ("config.json", NAME):
        (bundle / part).write_bytes((mended / part).read_bytes())
    for number in (0, 1):
        (bundle / f"stage_{number}.mlpackage").symlink_to(mended / f"stage_{number}.mlpackage")
    after = {"max_kl": 1e-6, "argmax": 1.0, "reason": "float32"}
    rewrite(bundle / NAME, lambda tensors, metadata: metadata.update(gates={"source": "by hand", "after": after}))
    found = result(verify_bundle(bundle), "gates")
    assert (found.status, "the reference (by hand)" in found.summary) == (Status.PASSED, True)

    def softer(tensors: Tensors, metadata: Metadata) -> None:
        tensors["media/expected/logits"][0, -1] *= 0.5

    rewrite(bundle / NAME, softer)
    assert result(verify_bundle(bundle), "gates").status is Status.FAILED
    assert result(verify_bundle(bundle, Options(gates=parse("max_kl=9"))), "gates").status is Status.PASSED


def test_teacher_forcing_of_a_whole_package(tmp_path: Path) -> None:
    """Hugging Face's own greedy continuation is predicted whole; without the media it is another."""
    bundle = folder("mobius-package", tmp_path)
    tensors = load_file(bundle / NAME)
    ids, blind = tensors["no video/input/input_ids"][0], tensors["no video without media/expected/logits"][0]
    right = int((blind[len(ids) - 5 : -1].argmax(-1) == ids[-4:]).sum())
    found = result(verify_bundle(bundle, Options(gates=parse("top1=1"))), "gates")
    assert found.status is Status.PASSED
    (forced,) = found.logits.teacher_forced  # type: ignore[union-attr]
    assert (forced.steps, forced.right, forced.without) == (4, 4, right)
    faults.onnx_weight(bundle / "decoder" / "model.onnx", "decoder.model.layers.2.mlp.up_proj.weight_t")
    assert result(verify_bundle(bundle, Options(gates=parse("top1=1"))), "gates").status is Status.FAILED


@pytest.mark.parametrize(
    "told",
    [
        {"runs": {"media": {"prompt": 6, "steps": 3}}},
        {"runs": {"media": {"prompt": 0, "steps": 8}}},
        {"runs": {"media": {"prompt": 9, "steps": -1}}},
        {"runs": {"media": {"without_media": "nowhere"}}},
        {"layers": 0},
        {"layers": "4"},
        {"gates": {"after": {"max_kl": -1}}},
    ],
)
def test_metadata_that_contradicts_itself_is_refused(told: Metadata, tmp_path: Path) -> None:
    path = folder("coreml-two-stage", tmp_path) / NAME
    rewrite(path, lambda tensors, metadata: metadata.update(told))
    with pytest.raises(BundleError, match="is not a reference"):
        load(path)


def test_the_json_report_carries_the_numbers(mended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(mended), "--gates", "maxtext", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    found, judged = document["reports"][0]["whole"]
    assert [stage["layers"] for stage in found["stages"]] == [[0, 1], [2, 3]]
    assert [part["part"] for part in judged["logits"]["segments"]] == ["before", "in", "after", "text"]
    assert len(judged["logits"]["kl_by_row"]["media"]) == len(judged["logits"]["unpatched_kl_by_row"]["media"]) == 8
    assert main(["verify", str(mended), "--gates", "maxtext"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "KL by row before" in text
    assert main(["verify", str(mended), "--gates", "nothing"]) == 2


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 7], 0, 7, max) == "▁▂▃█"
    assert sparkline([1, 1], 1, 1, max) == "▁▁"
    assert len(sparkline([0.0] * 999, 0, 1, max)) <= 40
    assert sparkline([0.0] * 998 + [1.0], 0, 1, max).endswith("█")
    assert sparkline([0, 1], 0, 1, max, bars_for("ascii")) == "_#"
    assert bars_for("utf-8") != bars_for("cp1252")
