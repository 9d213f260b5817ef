"""Mended ONNX samples, run whole in onnxruntime, against the numbers of Hugging Face's own float32 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from g4patch import engine, fix, formats
from g4patch.report import Outcome
from tests.conftest import Copy, numbers

Arrays = dict[str, NDArray[Any]]

# Largest difference for values of about 3. float32: a few roundings of 6e-8 each, in sums of 24 terms. float16: values
# near 3 are 2e-3 apart, and the factors of the table and of sqrt(D) are rounded to it as well.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3}


def identity_part(bundle: Path, ids: NDArray[np.int64]) -> NDArray[Any]:
    """The looked-up rows times the scale that the graph applies, `[N, L, D]` in float32."""
    subject = engine.open_model(bundle)
    (lookup,) = (lookup for analysis in subject.analyses for lookup in analysis.lookups)
    probe = formats.of(subject.model).probe(subject.model, lookup.graph)
    rows = probe.lookup(lookup.ids_input, lookup.output, ids).astype(np.float32)
    assert lookup.scale is not None
    return (rows * np.float32(lookup.scale)).reshape(len(ids), lookup.layers, lookup.layer_width)


ONNX = ["mobius-embedding", "mobius-text", "onnx-stage", "onnx-fp16", "onnx-identity-262144"]


@pytest.mark.parametrize("name", ONNX)
def test_identity_part(name: str, copy: Copy) -> None:
    bundle = copy(name)
    inputs, outputs = numbers(bundle)
    ids, expected = inputs["input_ids"].reshape(-1), outputs["per_layer_identity"][0]
    lookup = engine.open_model(bundle).analyses[0].lookups[0]
    missing = np.isin(ids, lookup.judgement.missing)
    assert missing.any()

    broken = np.abs(identity_part(bundle, ids) - expected).max(axis=(1, 2))
    assert (broken > 0.1).tolist() == missing.tolist()
    assert fix(bundle).outcome is Outcome.FIXED
    mended = np.abs(identity_part(bundle, ids) - expected).max()
    assert mended <= TOLERANCE[lookup.table.dtype]


def run(bundle: Path, feeds: Arrays, output: str) -> NDArray[Any]:
    session = onnxruntime.InferenceSession(bundle, providers=["CPUExecutionProvider"])
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int64)": np.int64}
    inputs = {item.name: feeds[item.name].astype(types[item.type]) for item in session.get_inputs()}
    return np.asarray(session.run([output], inputs)[0], np.float32)


def tapped(bundle: Path, value: str) -> Path:
    """The model with one more output."""
    model = onnx.load(bundle, load_external_data=False)
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(value))
    path = bundle.with_name("tapped.onnx")
    path.write_bytes(model.SerializeToString())
    return path


# The value that the layers get, in each sample: found by reading the exported graphs.
COMBINED = {"mobius-embedding": "v_embedding.Mul_52", "onnx-stage": "mul_70", "onnx-fp16": "per_layer_inputs"}


@pytest.mark.parametrize("name", COMBINED)
def test_combined_per_layer_inputs(name: str, copy: Copy) -> None:
    """On every row, of every modality, and of padding; mobius' embedding model takes no video features."""
    bundle = copy(name)
    inputs, outputs = numbers(bundle, "no video" if name == "mobius-embedding" else "media")
    dtype = engine.open_model(bundle).analyses[0].lookups[0].table.dtype
    value, expected = COMBINED[name], outputs["per_layer_inputs"]

    def error() -> float:
        model = bundle if name == "onnx-fp16" else tapped(bundle, value)
        return float(np.abs(run(model, inputs, value).reshape(expected.shape) - expected).max())

    if name != "mobius-embedding":  # there, image and audio are right before: only video is not masked
        assert error() > 0.1
    assert fix(bundle).outcome is Outcome.FIXED
    assert error() <= TOLERANCE[dtype]


@pytest.mark.parametrize("prompt", ["media", "left padding"])
def test_whole_stage_is_hugging_faces(prompt: str, copy: Copy) -> None:
    """With both rules: every row, of every modality and of left padding, after all decoder layers."""
    bundle = copy("onnx-stage")
    inputs, outputs = numbers(bundle, prompt)

    def error() -> float:
        return float(np.abs(run(bundle, inputs, "hidden_states_out") - outputs["hidden_states_out"]).max())

    assert error() > 1
    assert fix(bundle).outcome is Outcome.FIXED
    # float32 through three layers of attention and MLPs, values up to 9 (1e-6 apart there), summed in another order.
    assert error() <= 2e-5
