"""Samples from mobius, which writes Gemma 4 as a package of ONNX models."""

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import mobius
import torch
import transformers
from mobius.integrations.ort_genai.auto_export import write_ort_genai_config
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from . import towers
from .model import IDENTITY_EXPECTED, Tiny, hf_numbers, write_reference, write_whole_reference

# mobius masks audio ids only where the config has an audio tower.
TINY = Tiny(towers=True)

_from_pretrained = AutoConfig.from_pretrained


def load_config(*args: object, **kwargs: object) -> PreTrainedConfig:
    """``AutoConfig.from_pretrained`` for a reader of two flat attributes.

    mobius reads ``head_dim`` and ``global_head_dim`` from the text config, as older versions of
    transformers kept them; today's keeps head widths per layer and refuses the flat reading.
    """
    config = _from_pretrained(*args, **kwargs)
    text = config.get_text_config()
    text.allow_global_per_layer_attribute_access = True
    text.global_head_dim = 2 * TINY.head_dim
    return config


def _build(model: PreTrainedModel, lost: str = "_tower.") -> mobius.ModelPackage:
    """Runs mobius on a saved checkpoint without the weights whose names contain ``lost``.

    mobius' audio tower cannot be as small as ours.
    """
    logging.getLogger("mobius").setLevel(logging.ERROR)  # it warns of the towers' lost weights
    transformers.utils.logging.disable_progress_bar()
    weights = {k: v for k, v in model.state_dict().items() if lost not in k}
    with tempfile.TemporaryDirectory() as checkpoint:
        model.save_pretrained(checkpoint, state_dict=weights)
        with patch.object(AutoConfig, "from_pretrained", load_config):
            return mobius.build(checkpoint)


def _keep(package: mobius.ModelPackage, components: Sequence[str], folder: Path) -> None:
    """Saves some models of a package."""
    for component in components:
        # mobius names the graph after the path it read.
        package[component].graph.name = f"tiny-gemma4/{component}"
    kept = mobius.ModelPackage({component: package[component] for component in components})
    kept.save(str(folder), progress_bar=False)


def _export(model: PreTrainedModel, component: str, folder: Path) -> None:
    """Keeps one model of the package that mobius makes of a model."""
    _keep(_build(model), [component], folder)


def embedding(folder: Path) -> None:
    """mobius' embedding model: image and audio ids are masked, video ids are not."""
    model = TINY.build()
    more = _without_video(model, TINY.prompts(14)["media"])
    write_reference(folder / "model.onnx", TINY, model, 14, IDENTITY_EXPECTED, more=more)
    _export(model, "embedding", folder)


def _without_video(model: Gemma4ForConditionalGeneration, ids: Tensor) -> dict[str, Tensor]:
    """A run that the embedding model can reproduce to its end: it takes no video features."""
    ids = torch.where(ids == TINY.ids.video, 9, ids)
    numbers = hf_numbers(model, ids)
    embeds, names = numbers["inputs_embeds"][0], ("per_layer_identity", "per_layer_inputs")
    return {
        "no video/input/input_ids": ids,
        "no video/input/image_features": embeds[ids[0] == TINY.ids.image],
        "no video/input/audio_features": embeds[ids[0] == TINY.ids.audio],
        **{f"no video/expected/{name}": numbers[name] for name in names},
    }


def decoder(folder: Path) -> None:
    """mobius' decoder: it takes ``per_layer_inputs``, so the lookup is on the host's side."""
    model = TINY.build()
    folder.mkdir(parents=True)
    TINY.config().to_json_file(folder / "config.json", use_diff=False)
    _export(model, "decoder", folder)


def package(folder: Path) -> None:
    """mobius' embedding model and decoder, and the configuration by which onnxruntime-genai wires them.

    The reference is of the whole model, for prompts without video: it is right for those to the logits.
    """
    model = TINY.build()
    prompts = TINY.prompts(14)
    seen = torch.where(prompts["media"] == TINY.ids.video, 9, prompts["media"])
    write_whole_reference(folder, TINY, model, {"no video": seen, "text": prompts["text"]}, steps=4)
    exported = _build(model)
    _keep(exported, ["embedding", "decoder"], folder)
    with tempfile.TemporaryDirectory() as written:
        write_ort_genai_config(exported, written)
        shutil.copy(Path(written) / "genai_config.json", folder)


def vision(folder: Path) -> None:
    """mobius' vision encoder of a model whose bounds were never loaded: Hugging Face's infinite ones."""
    config = towers.config()
    folder.mkdir(parents=True)
    config.to_json_file(folder / "config.json", use_diff=False)
    _keep(_build(TINY.build(config), lost="audio_tower."), ["vision_encoder"], folder)


def text(folder: Path) -> None:
    """mobius' text-only model: the lookup reads raw ids and nothing is spliced."""
    model = TINY.build()
    write_reference(folder / "model.onnx", TINY, model, 14, IDENTITY_EXPECTED)
    with torch.no_grad():
        text_model = Gemma4ForCausalLM(model.config.text_config).eval()
        text_model.model.load_state_dict(model.model.language_model.state_dict())
        text_model.tie_weights()
    _export(text_model, "model", folder)
