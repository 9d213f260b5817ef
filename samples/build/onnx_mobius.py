"""Samples from mobius, which writes Gemma 4 as a package of ONNX models."""

import logging
import tempfile
from pathlib import Path
from unittest.mock import patch

import mobius
import torch
import transformers
from transformers import AutoConfig, Gemma4ForCausalLM, PreTrainedConfig, PreTrainedModel

from .model import Tiny, hf_numbers, write_reference

# mobius masks audio ids only where the config has an audio tower.
TINY = Tiny(towers=True)

_from_pretrained = AutoConfig.from_pretrained


def _load_config(*args: object, **kwargs: object) -> PreTrainedConfig:
    """``AutoConfig.from_pretrained`` for a reader of two flat attributes.

    mobius reads ``head_dim`` and ``global_head_dim`` from the text config, as older versions of
    transformers kept them; today's keeps head widths per layer and refuses the flat reading.
    """
    config = _from_pretrained(*args, **kwargs)
    text = config.get_text_config()
    text.allow_global_per_layer_attribute_access = True
    text.global_head_dim = 2 * TINY.head_dim
    return config


def _export(model: PreTrainedModel, component: str, folder: Path) -> None:
    """Runs mobius on a saved checkpoint and keeps one model of its package."""
    logging.getLogger("mobius").setLevel(logging.ERROR)  # it warns of the towers' lost weights
    transformers.utils.logging.disable_progress_bar()
    # The towers are not part of any sample, and mobius' audio tower cannot be this small.
    weights = {k: v for k, v in model.state_dict().items() if "_tower." not in k}
    with tempfile.TemporaryDirectory() as checkpoint:
        model.save_pretrained(checkpoint, state_dict=weights)
        with patch.object(AutoConfig, "from_pretrained", _load_config):
            package = mobius.build(checkpoint)
        # mobius names the graph after the path it read.
        package[component].graph.name = f"tiny-gemma4/{component}"
        kept = mobius.ModelPackage({component: package[component]})
        kept.save(str(folder), progress_bar=False)


def embedding(folder: Path) -> None:
    """mobius' embedding model: image and audio ids are masked, video ids are not."""
    model = TINY.build()
    numbers = hf_numbers(model, TINY.prompt(14))
    write_reference(folder, TINY, {k: v for k, v in numbers.items() if k != "hidden_states"})
    _export(model, "embedding", folder)


def decoder(folder: Path) -> None:
    """mobius' decoder: it takes ``per_layer_inputs``, so the lookup is on the host's side."""
    model = TINY.build()
    write_reference(folder, TINY, hf_numbers(model, TINY.prompt(14)))
    _export(model, "decoder", folder)


def text(folder: Path) -> None:
    """mobius' text-only model: the lookup reads raw ids and nothing is spliced."""
    model = TINY.build()
    numbers = hf_numbers(model, TINY.prompt(14))
    write_reference(folder, TINY, {k: v for k, v in numbers.items() if k != "hidden_states"})
    with torch.no_grad():
        text_model = Gemma4ForCausalLM(model.config.text_config).eval()
        text_model.model.load_state_dict(model.model.language_model.state_dict())
        text_model.tie_weights()
    _export(text_model, "model", folder)
