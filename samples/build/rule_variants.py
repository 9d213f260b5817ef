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
from transformers import AutoConfig, Gemma4ForConditionalGeneration

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
    """mobius' embedding model with E2B's table, 262,144 x 8,960, in a data file without contents."""
    tiny = Tiny(vocab=262_144, layers=35, ple_dim=256, towers=True)
    with tempfile.TemporaryDirectory() as checkpoint:
        config = tiny.config()
        config.architectures = ["Gemma4ForConditionalGeneration"]
        config.save_pretrained(checkpoint)
        with patch.object(AutoConfig, "from_pretrained", load_config):
            package = mobius.build(checkpoint, load_weights=False)
    model, size = package["embedding"], 0
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
)


def main(folder: Path) -> None:
    for build in BUNDLES:
        bundle = folder / build.__name__.replace("_", "-")
        bundle.mkdir(parents=True)
        towers.config().to_json_file(bundle / "config.json", use_diff=False)
        build(bundle)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
