"""Bundles that show what rules without a fix look for, as exporters write them; they need not be kept.

    python -m samples.build.rule_variants FOLDER

Each is a folder with a model and its ``config.json``.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import coremltools as ct
import mobius
import numpy as np
import onnx_ir
import torch
from coreai_torch import TorchConverter, get_decomp_table
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    Gemma3nConfig,
    Gemma3nTextConfig,
    Gemma3nTextModel,
    Gemma4ForConditionalGeneration,
    PreTrainedConfig,
)

from . import towers
from .coreml import convert
from .model import PerLayerInputs, Tiny, hf_numbers
from .onnx_mobius import load_config


def _tower(change: Callable[[nn.Module], None] = lambda tower: None) -> tuple[nn.Module, dict[str, Tensor]]:
    tower = towers.build()
    change(tower)
    return towers.Encoder(tower), towers.image()


def _spoil(tower: nn.Module) -> None:
    """The last layer without its bounds, one NaN, and one minimum above its maximum in the first."""
    linears = towers.clipped(tower)
    towers.lose_bounds(tower.get_submodule(f"encoder.layers.{towers.LAYERS - 1}"))
    linears[1].input_max.fill_(torch.nan)
    linears[5].output_min.fill_(9.0)


def coreml_tower(folder: Path) -> None:
    _coreml(folder, *_tower())


def coreml_tower_lost(folder: Path) -> None:
    _coreml(folder, *_tower(towers.lose_bounds))


def _coreml(folder: Path, module: nn.Module, given: dict[str, Tensor]) -> None:
    traced = torch.jit.trace(module.eval(), tuple(given.values()), check_trace=False)
    inputs = [
        ct.TensorType(name=name, shape=tensor.shape, dtype=np.float32 if tensor.is_floating_point() else np.int32)
        for name, tensor in given.items()
    ]
    model = ct.convert(traced, inputs=inputs, minimum_deployment_target=ct.target.iOS18)
    model.save(str(folder / "vision.mlpackage"))


def coreai_tower(folder: Path) -> None:
    _coreai(folder, *_tower())


def coreai_tower_spoilt(folder: Path) -> None:
    _coreai(folder, *_tower(_spoil))


def _coreai(folder: Path, module: nn.Module, given: dict[str, Tensor]) -> None:
    program = torch.export.export(module, (), given).run_decompositions(get_decomp_table())
    converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
    converter.add_exported_program(program, input_names=list(given), output_names=["features"])
    converter.to_coreai().save_asset(folder / "vision.aimodel")


def onnx_tower_spoilt(folder: Path) -> None:
    module, given = _tower(_spoil)
    torch.onnx.export(
        module, tuple(given.values()), folder / "model.onnx", dynamo=False, opset_version=17, input_names=list(given)
    )


def onnx_tower_dynamo(folder: Path) -> None:
    """A right tower, of which torch's exporter loses bounds where it merges clips of one value."""
    module, given = _tower()
    torch.onnx.export(module, (), kwargs=given, dynamo=True, verbose=False).save(folder / "model.onnx")


def _scaled(factor: float) -> tuple[Gemma4ForConditionalGeneration, dict[str, Tensor]]:
    """The tiny model with another factor behind the PLE table, and Hugging Face's numbers."""
    model = towers.TINY.build()
    numbers = hf_numbers(model, Tiny().prompts(8)["media"])
    model.model.language_model.embed_tokens_per_layer.embed_scale.fill_(factor)
    return model, numbers


def onnx_scale_missing(folder: Path) -> None:
    model, numbers = _scaled(1.0)
    torch.onnx.export(
        PerLayerInputs(model, right=True),
        (numbers["inputs_embeds"], numbers["input_ids"]),
        folder / "model.onnx",
        dynamo=False,
        opset_version=17,
        input_names=["hidden_states", "input_ids"],
    )


def coreml_scale_twice(folder: Path) -> None:
    model, numbers = _scaled(float(Tiny().ple_dim))
    package = convert(PerLayerInputs(model, right=True), numbers, ct.target.iOS18, ct.precision.FLOAT16)
    package.save(str(folder / "stage.mlpackage"))


def onnx_e2b(folder: Path) -> None:
    """mobius' embedding model with E2B's table, 262,144 x 8,960."""
    config = Tiny(vocab=262_144, layers=35, ple_dim=256, towers=True).config()
    config.architectures = ["Gemma4ForConditionalGeneration"]
    _mobius(folder, config, "embedding")


# Gemma 3n in small: placeholders and markers lie beyond the 320 rows of the PLE table.
_GEMMA3N = {
    "vocab_size": 336,
    "vocab_size_per_layer_input": 320,
    "hidden_size": 16,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.0] * 3,
    "laurel_rank": 4,
    "pad_token_id": 0,
}


class _Gemma3n(nn.Module):
    """The PLE part of Hugging Face's Gemma 3n: ``inputs_embeds`` [B,S,H], ``input_ids`` [B,S] -> [B,S,L,D]."""

    def __init__(self, model: Gemma3nTextModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs_embeds: Tensor, input_ids: Tensor) -> Tensor:
        return self.model.project_per_layer_inputs(inputs_embeds, self.model.get_per_layer_inputs(input_ids))


def gemma_3n(folder: Path) -> None:
    """Hugging Face's own code, whose range mask is right for Gemma 3n."""
    text = Gemma3nTextConfig(**_GEMMA3N)
    ids = torch.tensor([[2, 7, 321, 335, 319, 0, 9, 8]])
    torch.onnx.export(
        _Gemma3n(Gemma3nTextModel(text).eval()),
        (torch.zeros(1, 8, 16), ids),
        folder / "model.onnx",
        dynamo=False,
        opset_version=17,
        input_names=["inputs_embeds", "input_ids"],
    )
    Gemma3nConfig(text_config=text, image_token_id=321, audio_token_id=335).to_json_file(folder / "config.json")


def gemma_3n_mobius(folder: Path) -> None:
    """mobius' text model of Gemma 3n, which has no range mask."""
    config = Gemma3nTextConfig(**_GEMMA3N)
    config.architectures = ["Gemma3nForCausalLM"]
    _mobius(folder, config, "model")


def _load_config(*args: object, **kwargs: object) -> PreTrainedConfig:
    """The config, with one width for all layers where mobius cannot read one for each."""
    config = load_config(*args, **kwargs)
    if isinstance(config, Gemma3nTextConfig):
        config.intermediate_size = config.intermediate_size[0]
    return config


def _mobius(folder: Path, config: PreTrainedConfig, component: str) -> None:
    """One model of mobius' package for a config, without weights: its data file has no contents."""
    with tempfile.TemporaryDirectory() as checkpoint:
        config.save_pretrained(checkpoint)
        with patch.object(AutoConfig, "from_pretrained", _load_config):
            package = mobius.build(checkpoint, load_weights=False)
    model, size = package[component], 0
    model.graph.sort()  # mobius 0.1.0 leaves fused nodes of Gemma 3n behind their readers
    for weight in model.graph.initializers.values():
        if weight.const_value is None:
            assert weight.name is not None
            assert weight.dtype is not None
            assert isinstance(weight.shape, onnx_ir.Shape)
            length = int(weight.dtype.itemsize * math.prod(weight.shape.numpy()))
            weight.const_value = onnx_ir.ExternalTensor(
                "model.onnx.data", size, length, weight.dtype, shape=weight.shape, name=weight.name, base_dir=folder
            )
            size += length
    with (folder / "model.onnx.data").open("wb") as file:
        file.truncate(size)
    onnx_ir.save(model, folder / "model.onnx")
    config.to_json_file(folder / "config.json", use_diff=False)


BUNDLES: tuple[Callable[[Path], None], ...] = (
    coreml_tower,
    coreml_tower_lost,
    coreai_tower,
    coreai_tower_spoilt,
    onnx_tower_spoilt,
    onnx_tower_dynamo,
    onnx_scale_missing,
    coreml_scale_twice,
    onnx_e2b,
    gemma_3n,
    gemma_3n_mobius,
)


def main(folder: Path) -> None:
    for build in BUNDLES:
        bundle = folder / build.__name__.replace("_", "-")
        bundle.mkdir(parents=True)
        towers.config().to_json_file(bundle / "config.json", use_diff=False)
        build(bundle)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
