"""Core AI programs with states, whole: what they give and what they hold after a run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from g4patch import Options, fix
from g4patch.formats import coreai
from g4patch.report import Outcome, Status
from g4patch.runtimes import Probe, Unavailable
from tests.apple_runtime import whole
from tests.conftest import SAMPLES, Copy, needs_build_python, numbers, sample
from tests.test_coreai_format import needs_coreai, program
from tests.test_reference import Metadata, Tensors, result, rewrite

pytestmark = [pytest.mark.slow, needs_coreai]

NAME = "coreai-state"
STATES = [f"cache_{kind}_{layer}" for kind in ("keys", "values") for layer in range(3)]
PROMPT = 8
STEP = np.arange(6).reshape(2, 3)


def probe(bundle: Path) -> Probe:
    return coreai.probe(coreai.open_model(bundle), "main")


def test_states_are_told_from_inputs() -> None:
    (graph,) = coreai.open_model(sample(NAME)).graphs
    assert graph.states == set(STATES)
    assert {value.name for value in graph.inputs} - graph.states == {"hidden_states", "input_ids", "position_ids"}


def test_the_parts_are_what_the_whole_computes() -> None:
    """Outputs and states alike, bit for bit, with none of g4patch between."""
    feeds, _ = numbers(sample(NAME))
    names = ["hidden_states_out", *STATES]
    found = probe(sample(NAME)).run(feeds, names)
    for name in ("hidden_states_out", "cache_values_2"):
        assert np.array_equal(found[name], whole(sample(NAME), feeds, name)), name
    for name in STATES:
        assert found[name][:, :, :PROMPT].any()
        assert not found[name][:, :, PROMPT:].any()


def test_only_later_layers_hold_what_the_fault_spoils(copy: Copy) -> None:
    """The first layer's keys and values come before any per-layer input. 2e-5: float32, values up to 11."""
    bundle = copy(NAME)
    broken = shutil.copytree(bundle, bundle.with_name("broken.aimodel"))
    assert fix(bundle).outcome is Outcome.FIXED
    feeds, expected = numbers(sample(NAME))
    names = ["hidden_states_out", *STATES]
    right, wrong = (probe(path).run(feeds, names) for path in (bundle, broken))
    for name in names:
        assert np.abs(right[name] - expected[name]).max() < 2e-5
        spoilt = np.abs(wrong[name] - expected[name]).max() > 1
        assert spoilt == (name not in ("cache_keys_0", "cache_values_0")), name


def test_a_wrong_state_alone_fails(copy: Copy) -> None:
    bundle = copy(NAME)

    def another_row(tensors: Tensors, metadata: Metadata) -> None:
        tensors["text/expected/cache_values_1"][0, 0, 3] += 1e-3

    rewrite(bundle.with_name("stage.aimodel.reference.safetensors"), another_row)
    report = fix(bundle)
    assert report.outcome is Outcome.CHECK_FAILED
    assert {line.split(":")[0] for line in result(report).details} == {"cache_values_1, text"}


def test_a_prompt_may_start_with_full_states(copy: Copy) -> None:
    """This stage writes the front and masks what lies behind: that stays, and changes nothing else."""
    bundle = copy(NAME)

    def behind(tensors: Tensors, metadata: Metadata) -> None:
        for name in STATES:
            expected = tensors[f"media/expected/{name}"]
            tensors[f"media/input/{name}"] = np.full_like(expected, 0.5)
            expected[:, :, PROMPT:] = 0.5

    rewrite(bundle.with_name("stage.aimodel.reference.safetensors"), behind)
    assert result(fix(bundle)).status is Status.PASSED


@pytest.mark.parametrize("kind", ["state", "state-f16", "state-bf16", "state-si32", "state-called"])
def test_forms_of_states(kind: str, tmp_path: Path) -> None:
    """Two writes, see `tests.coreai_programs`: from zeros, and from ones. The numbers are exact in every dtype."""
    part = probe(program(kind, tmp_path))
    for outputs in (["seen"], ["held"], ["held", "seen"]):
        right = {"held": 2 * STEP, "seen": 2 * STEP}
        for name, found in part.run({"step": STEP}, outputs).items():
            assert np.array_equal(found, right[name])
        right = {"held": 2 * (1 + STEP), "seen": 100 + 2 * (1 + STEP)}
        for name, found in part.run({"step": STEP, "held": np.ones((2, 3))}, outputs).items():
            assert np.array_equal(found, right[name])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("state-open", "no fixed size"), ("state-large", r"about 16000\.0 GB"), ("state-branch", "inside coreai.if")],
)
def test_states_that_cannot_be_run(kind: str, reason: str, tmp_path: Path) -> None:
    part = probe(program(kind, tmp_path))
    for output in ("held", "seen"):
        with pytest.raises(Unavailable, match=reason):
            part.run({"step": STEP}, [output])


def test_a_state_of_any_size_is_run_from_what_is_given(tmp_path: Path) -> None:
    found = probe(program("state-open", tmp_path)).run({"step": STEP, "held": np.zeros((2, 3))}, ["held", "seen"])
    assert np.array_equal(found["held"], 2 * STEP)
    assert np.array_equal(found["seen"], 2 * STEP)


def test_feeds_that_do_not_fit(tmp_path: Path) -> None:
    part = probe(program("state", tmp_path))
    for feeds, output, reason in (
        ({}, "held", "nothing is given for step"),
        ({"step": STEP}, "%result0", "no tensor"),
        ({"step": STEP, "held": np.zeros((2, 4))}, "held", "invalid shape"),
    ):
        with pytest.raises(Unavailable, match=reason):
            part.run(feeds, [output])


@pytest.mark.slow
@needs_build_python
def test_float16_with_names(build_python: str, tmp_path: Path) -> None:
    """The sample as a float16 debug export: states and outputs within the tolerances that samples/build states."""
    code = "import pathlib, sys; from samples.build import coreai; coreai.state_fp16_debug(pathlib.Path(sys.argv[1]))"
    subprocess.run([build_python, "-c", code, tmp_path], cwd=SAMPLES.parent, check=True, stderr=subprocess.DEVNULL)
    bundle = tmp_path / "stage.aimodel"
    _, expected = numbers(bundle)
    assert set(STATES) < expected.keys()
    report = fix(bundle, Options(required=frozenset({"reference"})))
    assert report.outcome is Outcome.FIXED
    assert result(report).summary.startswith("27 tensors")
    assert "unpatched fails" in result(report).summary
