"""Run by the interpreter that has torch: a tiny model saved, `g4patch record` on it, and broken exports of that model.

Usage: python -m tests.end_to_end_models FOLDER IDS STEPS. It leaves the model in FOLDER/gemma, the reference in
FOLDER/recorded.safetensors, and bundle folders of two stages in FOLDER/onnx, FOLDER/coreai and FOLDER/coreml.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Gemma4ForConditionalGeneration

from g4patch.cli import main
from samples.build import coreai, coreml, onnx_torch
from samples.build.model import Tiny, hf_numbers, two_parts

EXPORTERS = {"onnx": onnx_torch.save_parts, "coreai": coreai.save_parts, "coreml": coreml.save_parts}


def export(checkpoint: Path, reference: Path, exports: Path) -> None:
    """Bundles of a checkpoint; those that are static are for prompts as long as the recorded one."""
    model = Gemma4ForConditionalGeneration.from_pretrained(checkpoint, attn_implementation="eager").eval()
    numbers = hf_numbers(model, load_file(reference)["media/input/input_ids"].long())
    for name, save_parts in EXPORTERS.items():
        folder = exports / name
        folder.mkdir()
        shutil.copy(checkpoint / "config.json", folder)
        save_parts(folder, two_parts(model, numbers, torch.int64 if name == "onnx" else torch.int32))


if __name__ == "__main__":
    folder, ids, steps = Path(sys.argv[1]), *sys.argv[2:]
    Tiny(layers=2).build().save_pretrained(folder / "gemma")
    recorded = folder / "recorded.safetensors"
    wanted = ["--ids", ids, "--steps", steps, "--split", "0:1,1:2"]
    if main(["record", "--hf", str(folder / "gemma"), *wanted, "-o", str(recorded)]) != 0:
        sys.exit("record failed")
    with torch.no_grad():
        export(folder / "gemma", recorded, folder)
