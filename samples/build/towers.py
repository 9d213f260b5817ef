"""Vision towers of a tiny Gemma 4: Hugging Face's own layers, with bounds for each linear."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Gemma4Config
from transformers.models.gemma4.modeling_gemma4 import Gemma4ClippableLinear, Gemma4VisionModel

from .model import Tiny

TINY = Tiny(towers=True)
LAYERS = 2
# Patches of one image, in rows and columns.
_SIDE = 4


def config() -> Gemma4Config:
    """The tiny model's config with a vision tower of two layers, clipped as E2B's and E4B's are."""
    tiny = TINY.config()
    assert tiny.vision_config is not None
    tiny.vision_config.use_clipped_linears = True
    tiny.vision_config.num_hidden_layers = LAYERS
    return tiny


def build() -> Gemma4VisionModel:
    """A float32 tower with random weights, and bounds as a checkpoint has them: four for each linear, all different."""
    torch.manual_seed(TINY.seed)
    tower = Gemma4VisionModel(config().vision_config).eval()
    generator = torch.Generator().manual_seed(TINY.seed)
    for linear in clipped(tower):
        for side in ("input", "output"):
            low, high = 2 + torch.rand(2, generator=generator)
            getattr(linear, f"{side}_min").fill_(-low)
            getattr(linear, f"{side}_max").fill_(high)
    return tower


def clipped(module: nn.Module) -> list[Gemma4ClippableLinear]:
    """The clipped linears of a module, in order."""
    return [part for part in module.modules() if isinstance(part, Gemma4ClippableLinear)]


def lose_bounds(module: nn.Module) -> None:
    """What is left where an export does not load the bounds: those that Hugging Face's class starts with."""
    for linear in clipped(module):
        for side in ("input", "output"):
            getattr(linear, f"{side}_min").fill_(-torch.inf)
            getattr(linear, f"{side}_max").fill_(torch.inf)


def image() -> dict[str, Tensor]:
    """One image: ``pixel_values`` float32 [1, 16, 3 * patch_size^2], ``pixel_position_ids`` int64 [1, 16, 2]."""
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(_SIDE)
    vision = config().vision_config
    assert vision is not None
    return {
        "pixel_values": torch.rand(1, _SIDE**2, 3 * vision.patch_size**2, generator=generator),
        "pixel_position_ids": torch.cartesian_prod(places, places).unsqueeze(0),
    }


class Encoder(nn.Module):
    """A tower without the mask of padded patches and the pooler, which not all exporters can write.

    ``pixel_values`` [1,P,3*patch^2], ``pixel_position_ids`` [1,P,2] -> [1,P,H].
    """

    def __init__(self, tower: Gemma4VisionModel) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values: Tensor, pixel_position_ids: Tensor) -> Tensor:
        hidden: Tensor = self.tower.patch_embedder.input_proj(2 * (pixel_values - 0.5))
        encoder = self.tower.encoder
        rotary = encoder.rotary_emb(hidden, pixel_position_ids)
        for layer in encoder.layers:
            hidden = layer(hidden, position_embeddings=rotary, attention_mask=None, position_ids=pixel_position_ids)
        return hidden


class Features(nn.Module):
    """A whole tower: the same inputs -> soft tokens [N,H]."""

    def __init__(self, tower: Gemma4VisionModel) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixel_values: Tensor, pixel_position_ids: Tensor) -> Tensor:
        features: Tensor = self.tower(pixel_values, pixel_position_ids).last_hidden_state
        return features


def onnx(folder: Path) -> None:
    """A whole tower that is right: TorchScript, opset 17, weights inline."""
    folder.mkdir(parents=True)
    config().to_json_file(folder / "config.json", use_diff=False)
    given = image()
    torch.onnx.export(
        Features(build()),
        tuple(given.values()),
        folder / "model.onnx",
        dynamo=False,
        opset_version=17,
        input_names=list(given),
        output_names=["image_features"],
    )
