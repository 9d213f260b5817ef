"""The Core AI sample: ``stage.aimodel``, a broken stage of Hugging Face's decoder layers."""

from pathlib import Path

import torch
from coreai_torch import TorchConverter, get_decomp_table

from .model import STAGE_EXPECTED, STAGE_INPUTS, Stage, Tiny, write_reference


def stage(folder: Path) -> None:
    """float32, 1 to 64 rows, exported in release mode: the ops carry no names."""
    tiny = Tiny()
    model = tiny.build()
    numbers = write_reference(folder / "stage.aimodel", tiny, model, 14, STAGE_EXPECTED, STAGE_INPUTS)
    inputs = {
        "hidden_states": numbers["inputs_embeds"],
        "input_ids": numbers["input_ids"].int(),
        "position_ids": numbers["position_ids"].int(),
    }
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(
        Stage(model), (), inputs, dynamic_shapes={name: {1: rows} for name in inputs}
    ).run_decompositions(get_decomp_table())
    converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
    converter.add_exported_program(program, input_names=list(inputs), output_names=["hidden_states_out"])
    converter.to_coreai().save_asset(folder / "stage.aimodel")
