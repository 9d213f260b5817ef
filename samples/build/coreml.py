"""Core ML samples: ``stage.mlpackage``, broken stages of Hugging Face's decoder layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import torch
from coremltools.models.utils import MultiFunctionDescriptor, save_multifunction
from torch import Tensor, nn
from transformers import Gemma4ForConditionalGeneration

from .model import (
    IDENTITY_EXPECTED,
    STAGE_EXPECTED,
    STAGE_INPUTS,
    Part,
    PerLayerInputs,
    Stage,
    StatefulStage,
    Tiny,
    hf_numbers,
    two_parts,
    write_reference,
    write_whole_reference,
)


def convert(
    stage: nn.Module,
    numbers: Mapping[str, Tensor],
    target: ct.target,
    precision: ct.precision,
    dynamic: bool = False,
    lengths: tuple[int, ...] = (),
    export: bool = False,
) -> ct.models.MLModel:
    """Converts a stage, or the PLE part of one, by tracing it on a prompt or by torch.export.

    Graph inputs: ``hidden_states`` [1,S,H] in float16 for float16 stages from iOS16 on, else
    float32; ``input_ids`` and, for whole stages, ``position_ids`` int32 [1,S]. S is that of the
    prompt, one of ``lengths``, or 1 to 64 if dynamic. The buffers of a cache become float16 states.
    """
    whole = not isinstance(stage, PerLayerInputs)
    example = {
        "hidden_states": numbers["inputs_embeds"],
        "input_ids": numbers["input_ids"].int(),
        "position_ids": numbers["position_ids"].int(),
    }
    if not whole:
        del example["position_ids"]
    wide = precision is ct.precision.FLOAT32 or target < ct.target.iOS16
    floats = np.float32 if wide else np.float16
    # One dimension object for all inputs: coremltools takes two of them for unrelated sizes.
    open_length = ct.RangeDim(1, 64, default=example["input_ids"].shape[1])

    def shape(tensor: Tensor) -> object:
        if lengths:
            return ct.EnumeratedShapes([(1, length, *tensor.shape[2:]) for length in lengths])
        return (1, open_length, *tensor.shape[2:]) if dynamic else tuple(tensor.shape)

    states = [
        ct.StateType(ct.TensorType(shape=tuple(buffer.shape), dtype=np.float16), name=name)
        for name, buffer in stage.named_buffers()
        if name.startswith("cache.")
    ]
    output = ct.TensorType("hidden_states_out" if whole else "per_layer_inputs_out", dtype=floats)
    return ct.convert(
        _exported(stage, example) if export else torch.jit.trace(stage.eval(), tuple(example.values())),
        inputs=[
            ct.TensorType(name, shape(tensor), floats if tensor.is_floating_point() else np.int32)
            for name, tensor in example.items()
        ],
        outputs=[output],
        states=states or None,
        minimum_deployment_target=target,
        compute_precision=precision,
        skip_model_load=True,
    )


def _exported(stage: nn.Module, example: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    return torch.export.export(stage.eval(), tuple(example.values())).run_decompositions({})


def _convert(
    folder: Path,
    tiny: Tiny,
    target: ct.target,
    precision: ct.precision,
    rows: int = 8,
    dynamic: bool = False,
    weights: str = "",
) -> ct.models.MLModel:
    """Converts the broken stage and writes a reference beside it, see :func:`convert`."""
    model = tiny.build()
    kind = weights or ("float16" if precision is ct.precision.FLOAT16 else "float32")
    bundle = folder / "stage.mlpackage"
    expected = IDENTITY_EXPECTED if weights else STAGE_EXPECTED
    numbers = write_reference(bundle, tiny, model, rows, expected, STAGE_INPUTS, kind)
    return convert(Stage(model), numbers, target, precision, dynamic)


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


def int4_262144(folder: Path) -> None:
    """int4 in blocks over Gemma 4's 262,144 ids, iOS18, static [1,8].

    A scale for 8 rows by 2 columns: with one for each row the sample would be too large.
    """
    tiny = Tiny(vocab=262_144, layers=2, ple_dim=3, hidden=4, head_dim=4)
    model = _convert(folder, tiny, ct.target.iOS18, ct.precision.FLOAT16, weights="int4")
    blocks = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=(8, 2), weight_threshold=2048
    )
    model = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=blocks))
    model.save(str(folder / "stage.mlpackage"))


def state(folder: Path) -> None:
    """float16, iOS18, static [1,8], keys and values of 16 rows in states; no 16-bit casts."""
    tiny = Tiny(vocab=33_000, layers=2, ple_dim=3, hidden=8, head_dim=4)
    model = tiny.build()
    bundle = folder / "stage.mlpackage"
    numbers = write_reference(bundle, tiny, model, 8, STAGE_EXPECTED, STAGE_INPUTS, "float16")
    convert(StatefulStage(model), numbers, ct.target.iOS18, ct.precision.FLOAT16).save(str(bundle))


def two_stage(folder: Path) -> None:
    """A bundle folder: two stages, float32, iOS17, static [1,8]; the first hands per-layer inputs on."""
    tiny = Tiny(layers=4)
    model = tiny.build()
    write_whole_reference(folder, tiny, model, tiny.prompts(8))
    save_parts(folder, two_parts(model, hf_numbers(model, tiny.prompts(8)["media"])))


def save_parts(folder: Path, parts: Sequence[Part]) -> None:
    """Saves ``stage_0.mlpackage`` and so on: float32, iOS17, the lengths of what the parts are traced with."""
    for number, part in enumerate(parts):
        package = ct.convert(
            torch.jit.trace(part.module.eval(), tuple(part.inputs.values())),
            inputs=[
                ct.TensorType(name, tuple(tensor.shape), np.float32 if tensor.is_floating_point() else np.int32)
                for name, tensor in part.inputs.items()
            ],
            outputs=[ct.TensorType(name, dtype=np.float32) for name in part.outputs],
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
        )
        package.save(str(folder / f"stage_{number}.mlpackage"))


def multifunction(folder: Path) -> None:
    """Functions ``prefill`` [1,8] and ``decode`` [1,1] over the same weights, float16, iOS18, states."""
    tiny = Tiny()
    model = tiny.build()
    bundle = folder / "stage.mlpackage"
    media = write_reference(bundle, tiny, model, (8, 1), STAGE_EXPECTED, STAGE_INPUTS, "float16")
    one = hf_numbers(model, tiny.prompts(1)["one image"])
    save_functions(bundle, model, {"prefill": media, "decode": one})


def save_functions(
    bundle: Path,
    model: Gemma4ForConditionalGeneration,
    prompts: Mapping[str, Mapping[str, Tensor]],
    right: bool = False,
) -> None:
    """Saves one package with a function for each prompt's length; coremltools shares the weights."""
    functions = MultiFunctionDescriptor()
    with TemporaryDirectory() as parts:
        for name, numbers in prompts.items():
            part = Path(parts) / f"{name}.mlpackage"
            convert(StatefulStage(model, right), numbers, ct.target.iOS18, ct.precision.FLOAT16).save(str(part))
            functions.add_function(str(part), "main", name)
        functions.default_function_name = next(iter(prompts))
        save_multifunction(functions, str(bundle))
