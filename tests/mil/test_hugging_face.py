"""The interpreter against Hugging Face: its own activations, stored beside each sample.

The samples are broken. What a mended stage would compute is put in place of two values: the lookup's index (media
ids read the pad row) and the splice condition (media and pad rows take `hidden_states`).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.mil.samples import Array, Run, Sample

PROMPTS = ("media", "text", "left padding")
# Largest difference allowed. fp16: torch in half precision is itself off by up to 0.06 on these prompts, whose outputs
# reach 11; the converted program rounds more often than torch does, since each norm is six ops.
STAGES = {"coreml-fp32": 1e-5, "coreml-fp16": 0.04, "coreml-cast16": 0.2, "coreml-ios16": 0.2}
# Rows read from the table, times sqrt(D): fp16 rounds the table once.
ROWS = {"coreml-fp32": 1e-6, "coreml-fp16": 2e-3, "coreml-cast16": 2e-3, "coreml-ios16": 2e-3}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", STAGES)
def test_a_mended_stage_agrees(name: str, prompt: str) -> None:
    sample = Sample(name)
    run = sample.run(prompt)
    found = sample.interpreter.run(run.inputs, [sample.output], overrides=sample.mended(run))[sample.output]
    assert np.abs(found - run.expected["hidden_states_out"]).max() < STAGES[name]


@pytest.mark.parametrize("name", STAGES)
def test_a_broken_stage_does_not(name: str) -> None:
    """The negative control: the fault is far larger than the tolerance."""
    sample = Sample(name)
    run = sample.run("media")
    found = sample.interpreter.run(run.inputs, [sample.output])[sample.output]
    assert np.abs(found - run.expected["hidden_states_out"]).max() > 3


def _identity(run: Run, rows: Array) -> Array:
    reference = run.expected["per_layer_identity"]
    depth = reference.shape[-1]
    return rows.astype(np.float32).reshape(reference.shape) * np.float32(depth**0.5)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_the_table(name: str) -> None:
    """Hugging Face's rows: unmended, text rows only; with masked ids, all of them."""
    sample = Sample(name)
    run = sample.run("media")
    wanted = run.expected["per_layer_identity"]
    raw = _identity(run, sample.probe.lookup("input_ids", sample.rows, run.ids.reshape(-1)))
    wrong = np.abs(raw - wanted).max(axis=(2, 3))
    assert (wrong[~run.is_media] < ROWS[name]).all()
    assert (wrong[run.is_media] > 0.1).all()
    masked = _identity(run, sample.probe.table(sample.index, sample.rows, run.masked_ids.reshape(-1)))
    assert np.abs(masked - wanted).max() < ROWS[name]


def test_rows_of_a_palette_over_the_real_vocabulary() -> None:
    """4 bits carry no more than 16 values, so rows are near Hugging Face's, and told apart all the same."""
    sample = Sample("coreml-palette-262144")
    run = sample.run("media")
    masked = _identity(run, sample.probe.table(sample.index, sample.rows, run.masked_ids.reshape(-1)))
    # Half a step of a uniform palette over 5 standard deviations (0.3 each) to both sides, times sqrt(3).
    assert np.abs(masked - run.expected["per_layer_identity"]).max() < 0.5 * (2 * 5 * 0.3 / 15) * 3**0.5
    raw = sample.probe.lookup("input_ids", sample.rows, run.ids.reshape(-1))
    assert len(np.unique(raw, axis=0)) == len(np.unique(run.ids))
