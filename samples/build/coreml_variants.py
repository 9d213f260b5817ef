"""Core ML packages that need not be kept: every form that coremltools gives a stage, broken and mended.

    python -m samples.build.coreml_variants FOLDER [NAME ...]

Each variant is a folder with ``stage.mlpackage``, ``config.json`` and a reference, as the samples
are, and ``mended/stage.mlpackage``: what coremltools makes of the module that is right.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Gemma4ForConditionalGeneration

from .coreml import convert, save_functions
from .model import (
    IDENTITY_EXPECTED,
    PAD,
    STAGE_EXPECTED,
    STAGE_INPUTS,
    PerLayerInputs,
    Stage,
    StatefulStage,
    Tiny,
    hf_numbers,
    run_layers,
    write_reference,
)

IOS15, IOS16, IOS17, IOS18 = ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18
LARGE = Tiny(vocab=33_000, layers=2, ple_dim=4, hidden=16)
# More ids than 16 bits hold.
LARGER = Tiny(vocab=70_000, layers=2, ple_dim=4, hidden=16)
SMALL = Tiny()

Weights = Callable[[ct.models.MLModel], ct.models.MLModel]


class Lookup(nn.Module):
    """Another way to write Hugging Face's scaled embedding: ids [B,S] -> rows [B,S,W]."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().clone())
        self.scale = embedding.scalar_embed_scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids) * self.scale

    def rows(self, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Indexed(Lookup):
    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class IndexSelected(Lookup):
    def rows(self, ids: Tensor) -> Tensor:
        return torch.index_select(self.weight, 0, ids.reshape(-1)).reshape(*ids.shape, -1)


class AlongAxis(Lookup):
    def rows(self, ids: Tensor) -> Tensor:
        width = self.weight.shape[1]
        index = ids.reshape(-1, 1).expand(ids.numel(), width)
        return torch.gather(self.weight, 0, index).reshape(*ids.shape, width)


class RankThree(Lookup):
    """A table [V,L,D], L being 2, that is made flat again."""

    def rows(self, ids: Tensor) -> Tensor:
        table = self.weight.reshape(self.weight.shape[0], 2, -1)
        return nn.functional.embedding(ids, table.flatten(1)).reshape(*ids.shape, 2, -1).flatten(2)


class ByCoordinates(Lookup):
    """Rows of a table [V,L,D] by coordinates of two axes: coremltools' ``gather_nd``."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding)
        self.table = nn.Parameter(self.weight.detach().reshape(self.weight.shape[0], 2, -1))

    def rows(self, ids: Tensor) -> Tensor:
        return self.table[ids.unsqueeze(-1), torch.arange(2)].flatten(2)


class Cube(ByCoordinates):
    """Rows of a table [V,L,D] as they are."""

    def rows(self, ids: Tensor) -> Tensor:
        return self.table[ids].flatten(2)


class Split(Lookup):
    """A table [V,D] for each layer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding)
        self.tables = nn.ParameterList(part.clone() for part in self.weight.detach().chunk(2, dim=1))

    def rows(self, ids: Tensor) -> Tensor:
        return torch.cat([nn.functional.embedding(ids, table) for table in self.tables], dim=-1)


class Layers(nn.Module):
    """The decoder layers behind a :class:`PerLayerInputs`: [B,S,H], [B,S,L,D], [B,S] -> [B,S,H]."""

    def __init__(self, model: Gemma4ForConditionalGeneration) -> None:
        super().__init__()
        self.language = model.model.language_model

    def forward(self, hidden_states: Tensor, per_layer: Tensor, position_ids: Tensor) -> Tensor:
        return run_layers(self.language, hidden_states, per_layer, position_ids)


class FirstChunk(nn.Module):
    """The first ``count`` layers where the host looks PLE up, written as for the Neural Engine.

    [1,S,H], the rows times sqrt(D) [1,S,L*D], [1,S] -> [1,S,H] and what all layers get [1,S,L*D]: a
    projection by a 1x1 convolution, and an RMS norm by the layer norm of [x, -x], whose mean is zero.
    """

    def __init__(self, model: Gemma4ForConditionalGeneration, count: int) -> None:
        super().__init__()
        self.language = model.model.language_model
        self.count = count

    def forward(self, hidden_states: Tensor, raw: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        language = self.language
        weight = language.per_layer_model_projection.weight[..., None, None]
        columns = hidden_states.transpose(1, 2).unsqueeze(2)
        projected = nn.functional.conv2d(columns, weight).squeeze(2).transpose(1, 2)
        projected = projected * language.per_layer_model_projection_scale
        combined = (self.norm(projected) + raw) * language.per_layer_input_scale
        parts = combined.split(language.hidden_size_per_layer_input, dim=2)
        return run_layers(language, hidden_states, parts, position_ids, part=slice(self.count)), combined

    def norm(self, rows: Tensor) -> Tensor:
        norm = self.language.per_layer_projection_norm
        width = self.language.hidden_size_per_layer_input
        layers = rows.unflatten(2, (-1, width))
        doubled = torch.cat([layers, -layers], dim=-1)
        return (nn.functional.layer_norm(doubled, [2 * width], eps=norm.eps)[..., :width] * norm.weight).flatten(2)


class LaterChunk(nn.Module):
    """The layers behind a :class:`FirstChunk`: [1,S,H], what all layers get [1,S,L*D], [1,S] -> [1,S,H]."""

    def __init__(self, model: Gemma4ForConditionalGeneration, first: int) -> None:
        super().__init__()
        self.language = model.model.language_model
        self.part = slice(first, None)

    def forward(self, hidden_states: Tensor, combined: Tensor, position_ids: Tensor) -> Tensor:
        width = self.language.hidden_size_per_layer_input
        parts = [combined[:, :, start : start + width] for start in range(0, combined.shape[2], width)]
        return run_layers(self.language, hidden_states, parts, position_ids, part=self.part)


class Stacked(Split):
    def rows(self, ids: Tensor) -> Tensor:
        return torch.stack([nn.functional.embedding(ids, table) for table in self.tables], dim=2).flatten(2)


class Halves(Lookup):
    """A vocabulary that is split over two tables; ids of one half read row 0 of the other, which is not taken."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding)
        self.lower, self.upper = (nn.Parameter(part.clone()) for part in self.weight.detach().chunk(2))

    def rows(self, ids: Tensor) -> Tensor:
        half = self.lower.shape[0]
        is_lower = ids < half
        lower = nn.functional.embedding(torch.where(is_lower, ids, 0), self.lower)
        upper = nn.functional.embedding(torch.where(is_lower, 0, ids - half), self.upper)
        return torch.where(is_lower.unsqueeze(-1), lower, upper)


class Clamped(Halves):
    """The same with ``clamp``, which coremltools computes in fp16."""

    def rows(self, ids: Tensor) -> Tensor:
        half = self.lower.shape[0]
        lower = nn.functional.embedding(ids.clamp(max=half - 1), self.lower)
        upper = nn.functional.embedding((ids - half).clamp(min=0), self.upper)
        return torch.where((ids < half).unsqueeze(-1), lower, upper)


class Flat(PerLayerInputs):
    """PLE in rank 3, as CoreML-LLM writes it: the sum is [B,S,L*D], and each layer takes a slice of it."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor) -> Tensor:
        language = self.language
        lookup_ids, from_stage = self.read_and_taken(input_ids)
        spliced = torch.where(from_stage.unsqueeze(-1), hidden_states, language.embed_tokens(input_ids))
        projected = language.per_layer_model_projection(spliced) * language.per_layer_model_projection_scale
        normed = [language.per_layer_projection_norm(part) for part in self.parts(projected)]
        summed = torch.cat(normed, dim=-1) + language.embed_tokens_per_layer(lookup_ids)
        return torch.stack(self.parts(summed * language.per_layer_input_scale), dim=2)

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Each layer's slice of [B,S,L*D]."""
        width = self.language.hidden_size_per_layer_input
        return [rows[..., at : at + width] for at in range(0, rows.shape[-1], width)]


def masked(_: PerLayerInputs, ids: Tensor, is_media: Tensor) -> Tensor:
    """The right lookup's ids with a scalar pad, as our edit writes it."""
    return ids.masked_fill(is_media, PAD)


@dataclass(frozen=True)
class Variant:
    """How a stage is made. ``stage`` None is its PLE part alone, without decoder layers."""

    target: ct.target = IOS18
    precision: ct.precision = ct.precision.FLOAT16
    tiny: Tiny = LARGE
    stage: Callable[[Gemma4ForConditionalGeneration, bool], nn.Module] | None = None
    lookup: type[Lookup] | None = None
    weights: tuple[str, Weights] | None = None
    options: Mapping[str, object] = field(default_factory=dict)


def stateful(model: Gemma4ForConditionalGeneration, right: bool) -> nn.Module:
    return StatefulStage(model, right)


def _palettes(model: ct.models.MLModel) -> ct.models.MLModel:
    config = cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=2048)
    return cto.palettize_weights(model, cto.OptimizationConfig(global_config=config))


def _linear(**how: object) -> Weights:
    def quantise(model: ct.models.MLModel) -> ct.models.MLModel:
        config = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=2048, **how)
        return cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))

    return quantise


FLOAT32 = ct.precision.FLOAT32
PALETTES = ("4-bit", _palettes)
INT8 = ("8-bit", _linear(dtype="int8", granularity="per_channel"))
INT4 = ("int4", _linear(dtype="int4", granularity="per_block", block_size=4))
RANGE, ENUMERATED, EXPORT = {"dynamic": True}, {"lengths": (8, 14)}, {"export": True}

VARIANTS = {
    "ios15 fp32": Variant(IOS15, FLOAT32),
    "ios15 fp16": Variant(IOS15),
    "ios16 fp16": Variant(IOS16),
    "ios17 fp32": Variant(IOS17, FLOAT32),
    "ios17 fp16": Variant(IOS17),
    "ios18 fp32": Variant(IOS18, FLOAT32),
    "ios18 fp16": Variant(IOS18),
    "export fp32": Variant(IOS17, FLOAT32, options=EXPORT),
    "export fp16 stage": Variant(IOS18, stage=Stage, options=EXPORT),
    "range": Variant(IOS17, options=RANGE),
    "range fp32 stage": Variant(IOS18, FLOAT32, stage=Stage, options=RANGE),
    "enumerated": Variant(IOS18, options=ENUMERATED),
    "state": Variant(IOS18, stage=stateful),
    "enumerated, state": Variant(IOS18, stage=stateful, options=ENUMERATED),
    "palettes ios17": Variant(IOS17, weights=PALETTES),
    "palettes ios18": Variant(IOS18, weights=PALETTES),
    "int8 ios17": Variant(IOS17, weights=INT8),
    "int8 ios18": Variant(IOS18, weights=INT8),
    "int4 blocks": Variant(IOS18, weights=INT4),
    "small vocabulary ios17": Variant(IOS17, tiny=SMALL),
    "small vocabulary ios18 range": Variant(IOS18, tiny=SMALL, options=RANGE),
    "indexed": Variant(IOS17, lookup=Indexed),
    "index_select": Variant(IOS18, lookup=IndexSelected),
    "rank 3": Variant(IOS18, lookup=RankThree),
    "gather_nd": Variant(IOS17, lookup=ByCoordinates),
    "gather_along_axis": Variant(IOS18, lookup=AlongAxis),
    "split tables": Variant(IOS18, lookup=Split),
    "stacked tables": Variant(IOS18, lookup=Stacked),
    "table of rank 3": Variant(IOS18, lookup=Cube),
    "flat": Variant(IOS18, stage=Flat),
    "split vocabulary": Variant(IOS18, lookup=Halves),
    "gather_nd in 16 bits": Variant(IOS17, tiny=LARGER, lookup=ByCoordinates),
    "clamp in 16 bits": Variant(IOS18, lookup=Clamped),
}


def build(folder: Path, variant: Variant) -> None:
    """Writes a variant: broken with its reference, and mended."""
    model = variant.tiny.build()
    bundle = folder / "stage.mlpackage"
    kind, quantise = variant.weights or ("float32" if variant.precision is FLOAT32 else "float16", lambda same: same)
    expected, inputs = dict(STAGE_EXPECTED), dict(STAGE_INPUTS)
    if variant.stage in (None, Flat):
        del expected["hidden_states_out"], inputs["position_ids"]
    if variant.lookup in (Split, Stacked):  # no single lookup reads the rows of all layers
        expected = {"per_layer_inputs_out": "per_layer_inputs"}
    rows = 14 if variant.options.get("dynamic") else variant.options.get("lengths", 8)
    numbers = write_reference(
        bundle, variant.tiny, model, rows, IDENTITY_EXPECTED if variant.weights else expected, inputs, kind
    )
    language = model.model.language_model
    if variant.lookup is not None:
        language.embed_tokens_per_layer = variant.lookup(language.embed_tokens_per_layer)
    for path, right in ((bundle, False), (folder / "mended" / "stage.mlpackage", True)):
        stage = (variant.stage or PerLayerInputs)(model, right)
        converted = convert(stage, numbers, variant.target, variant.precision, **variant.options)
        quantise(converted).save(str(path))


def build_functions(folder: Path) -> None:
    """Several functions, and what Hugging Face computes for a ninth row after a prompt of 8.

    ``continued.safetensors``: ``hidden_states`` [1,9,H], ``input_ids`` and ``position_ids`` [1,9],
    and ``hidden_states_out`` [1,9,H] of one prompt of 9 rows.
    """
    model = SMALL.build()
    bundle = folder / "stage.mlpackage"
    media = write_reference(bundle, SMALL, model, (8, 1), STAGE_EXPECTED, STAGE_INPUTS, "float16")
    prompts = {"prefill": media, "decode": hf_numbers(model, SMALL.prompts(1)["one image"])}
    for path, right in ((bundle, False), (folder / "mended" / "stage.mlpackage", True)):
        path.parent.mkdir(exist_ok=True)
        save_functions(path, model, prompts, right)
    nine = hf_numbers(model, torch.cat([media["input_ids"], torch.tensor([[7]])], dim=1))
    names = {**STAGE_INPUTS, "hidden_states_out": "hidden_states"}
    save_file({name: nine[key].contiguous() for name, key in names.items()}, folder / "continued.safetensors")


def build_pipeline(folder: Path) -> None:
    """A pipeline of two programs with weights of their own: the PLE part, then the layers."""
    model = SMALL.build()
    bundle = folder / "stage.mlpackage"
    numbers = write_reference(bundle, SMALL, model, 8, STAGE_EXPECTED, STAGE_INPUTS, "float16")
    inputs = {
        "hidden_states": numbers["inputs_embeds"],
        "per_layer_inputs_out": numbers["per_layer_inputs"],
        "position_ids": numbers["position_ids"],
    }
    layers = convert_part(Layers(model), inputs, "hidden_states_out")
    for path, right in ((bundle, False), (folder / "mended" / "stage.mlpackage", True)):
        lookup = convert(PerLayerInputs(model, right), numbers, IOS18, ct.precision.FLOAT16)
        ct.utils.make_pipeline(lookup, layers).save(str(path))


def build_chunks(folder: Path) -> None:
    """Two packages that are handed their PLE rows, and Hugging Face's numbers for what they take and give.

    ``numbers.safetensors``: ``RUN/NAME`` for ``hidden_states`` [1,S,H], ``per_layer_raw`` and
    ``per_layer_combined`` [1,S,L*D], ``position_ids`` [1,S], and what comes out of either package,
    ``first`` and ``second`` [1,S,H].
    """
    model, count = SMALL.build(), 1
    SMALL.config().to_json_file(folder / "config.json", use_diff=False)
    runs = {}
    for run, ids in SMALL.prompts(8).items():
        seen = hf_numbers(model, ids)
        runs[run] = {
            "hidden_states": seen["inputs_embeds"],
            "per_layer_raw": seen["per_layer_identity"].flatten(2),
            "per_layer_combined": seen["per_layer_inputs"].flatten(2),
            "position_ids": seen["position_ids"],
            "first": seen[f"hidden_states_{count - 1}"],
            "second": seen["hidden_states"],
        }
    save_file(
        {f"{run}/{name}": tensor.contiguous() for run, of in runs.items() for name, tensor in of.items()},
        folder / "numbers.safetensors",
    )
    numbers = runs["media"]
    shared = {"position_ids": numbers["position_ids"]}
    first = {"hidden_states": numbers["hidden_states"], "per_layer_raw": numbers["per_layer_raw"], **shared}
    outputs = ("hidden_states_out", "per_layer_combined_out")
    convert_part(FirstChunk(model, count), first, *outputs).save(str(folder / "chunk1.mlpackage"))
    later = {"hidden_states": numbers["first"], "per_layer_combined": numbers["per_layer_combined"], **shared}
    convert_part(LaterChunk(model, count), later, "hidden_states_out").save(str(folder / "chunk2.mlpackage"))


def convert_part(module: nn.Module, inputs: Mapping[str, Tensor], *outputs: str) -> ct.models.MLModel:
    """Converts a module by tracing it, float16, iOS18, for inputs of just these shapes."""
    example = {name: tensor if tensor.is_floating_point() else tensor.int() for name, tensor in inputs.items()}
    return ct.convert(
        torch.jit.trace(module.eval(), tuple(example.values())),
        inputs=[
            ct.TensorType(name, tuple(tensor.shape), np.float16 if tensor.is_floating_point() else np.int32)
            for name, tensor in example.items()
        ],
        outputs=[ct.TensorType(name, dtype=np.float16) for name in outputs],
        minimum_deployment_target=IOS18,
        skip_model_load=True,
    )


# Of other shapes than a stage with one function.
OTHERS = {"functions": build_functions, "pipeline": build_pipeline, "chunks": build_chunks}


def main(out: Path, names: list[str]) -> None:
    with patch.object(PerLayerInputs, "masked", masked):
        for name in names or [*VARIANTS, *OTHERS]:
            folder = out / name
            folder.mkdir(parents=True)
            if name in OTHERS:
                OTHERS[name](folder)
            else:
                build(folder, VARIANTS[name])
            print(name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
