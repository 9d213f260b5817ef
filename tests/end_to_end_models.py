"""Run by the interpreter that has torch: a tiny model as a user has it, and broken exports of that very model.

Usage: python -m tests.end_to_end_models FOLDER REFERENCE. From a model saved in FOLDER/gemma it writes bundle folders of
two stages, FOLDER/onnx, FOLDER/coreai and FOLDER/coreml, traced with the prompt `media` of a reference of it. Without
REFERENCE it saves the model.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Gemma4ForConditionalGeneration

from samples.build import coreai, coreml, onnx_torch
from samples.build.model import Tiny, hf_numbers, two_parts

EXPORTERS = {"onnx": onnx_torch.save_parts, "coreai": coreai.save_parts, "coreml": coreml.save_parts}


def save(folder: Path) -> None:
    """A model of random weights, four layers deep."""
    Tiny(layers=4).build().save_pretrained(folder)


def export(checkpoint: Path, reference: Path, exports: Path) -> None:
    """Folders of a checkpoint, for the length of a recorded prompt where they are static."""
    model = Gemma4ForConditionalGeneration.from_pretrained(checkpoint, attn_implementation="eager").eval()
    numbers = hf_numbers(model, load_file(reference)["media/input/input_ids"].long())
    for name, save_parts in EXPORTERS.items():
        folder = exports / name
        folder.mkdir()
        shutil.copy(checkpoint / "config.json", folder)
        save_parts(folder, two_parts(model, numbers, torch.int64 if name == "onnx" else torch.int32))


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    if len(sys.argv) == 2:
        save(FOLDER / "gemma")
    else:
        with torch.no_grad():
            export(FOLDER / "gemma", Path(sys.argv[2]), FOLDER)
