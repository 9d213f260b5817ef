"""Core ML samples: ``stage.mlpackage``, broken stages of Hugging Face's decoder layers."""

from pathlib import Path

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import torch

from .model import IDENTITY_EXPECTED, STAGE_EXPECTED, STAGE_INPUTS, Stage, Tiny, write_reference


def _convert(
    folder: Path,
    tiny: Tiny,
    target: ct.target,
    precision: ct.precision,
    rows: int = 8,
    dynamic: bool = False,
    weights: str = "",
) -> ct.models.MLModel:
    """Traces the broken stage, converts it and writes a reference beside it.

    Graph inputs: ``hidden_states`` [1,S,H] in float16 for float16 stages from iOS16 on, else
    float32; ``input_ids`` and ``position_ids`` int32 [1,S]. S is 8, or 1 to 64 if dynamic.
    """
    model = tiny.build()
    kind = weights or ("float16" if precision is ct.precision.FLOAT16 else "float32")
    bundle = folder / "stage.mlpackage"
    expected = IDENTITY_EXPECTED if weights else STAGE_EXPECTED
    numbers = write_reference(bundle, tiny, model, rows, expected, STAGE_INPUTS, kind)
    example = (
        numbers["inputs_embeds"],
        numbers["input_ids"].int(),
        numbers["position_ids"].int(),
    )
    traced = torch.jit.trace(Stage(model).eval(), example)
    # One dimension object for all inputs: coremltools takes two of them for unrelated sizes.
    seq = ct.RangeDim(1, 64, default=rows) if dynamic else rows
    floats = np.float16 if precision is ct.precision.FLOAT16 else np.float32
    return ct.convert(
        traced,
        inputs=[
            ct.TensorType("hidden_states", (1, seq, tiny.hidden), floats),
            ct.TensorType("input_ids", (1, seq), np.int32),
            ct.TensorType("position_ids", (1, seq), np.int32),
        ],
        outputs=[ct.TensorType("hidden_states_out", dtype=floats)],
        minimum_deployment_target=target,
        compute_precision=precision,
        skip_model_load=True,
    )


def fp16(folder: Path) -> None:
    """float16, iOS18, static [1,8]; the vocabulary is too large for 16-bit casts of the ids."""
    tiny = Tiny(vocab=33_000, layers=2, ple_dim=3, hidden=8, head_dim=4)
    model = _convert(folder, tiny, ct.target.iOS18, ct.precision.FLOAT16)
    model.save(str(folder / "stage.mlpackage"))


def fp32(folder: Path) -> None:
    """float32, iOS17, static [1,8], a small vocabulary; both tables have the same shape."""
    tiny = Tiny(layers=2, ple_dim=8, hidden=16)
    model = _convert(folder, tiny, ct.target.iOS17, ct.precision.FLOAT32)
    model.save(str(folder / "stage.mlpackage"))


def cast16(folder: Path) -> None:
    """float16, iOS17, static [1,8], a small vocabulary: coremltools casts the ids to 16 bits.

    It does so once per lookup and not alike: the token embedding keeps its guard for negative
    ids, the PLE lookup loses it.
    """
    tiny = Tiny()
    model = _convert(folder, tiny, ct.target.iOS17, ct.precision.FLOAT16)
    model.save(str(folder / "stage.mlpackage"))


def ios16(folder: Path) -> None:
    """float16, iOS16, 1 to 64 rows: no guard before the gathers, unknown dimensions."""
    model = _convert(folder, Tiny(), ct.target.iOS16, ct.precision.FLOAT16, rows=14, dynamic=True)
    model.save(str(folder / "stage.mlpackage"))


def palette_262144(folder: Path) -> None:
    """4-bit palettes over Gemma 4's 262,144 ids, iOS18, static [1,8].

    Uniform palettes: the tables' values are uniform, so k-means would find nothing better.
    """
    tiny = Tiny(vocab=262_144, layers=2, ple_dim=3, hidden=4, head_dim=4)
    model = _convert(folder, tiny, ct.target.iOS18, ct.precision.FLOAT16, weights="4-bit")
    palettes = cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=2048)
    model = cto.palettize_weights(model, cto.OptimizationConfig(global_config=palettes))
    model.save(str(folder / "stage.mlpackage"))
