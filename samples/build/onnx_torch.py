"""Samples from torch's two ONNX exporters: ``torch.export`` (dynamo) and TorchScript."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir
import torch
from torch import Tensor, nn

from .model import (
    IDENTITY_EXPECTED,
    STAGE_EXPECTED,
    STAGE_INPUTS,
    Identity,
    Part,
    PerLayerInputs,
    Stage,
    Tiny,
    write_reference,
)


def _export_dynamo(module: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str], folder: Path) -> None:
    """Exports with dynamic batch and sequence, weights in ``model.onnx.data``."""
    dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    # Two rows in the batch: torch.export takes a size of one for a constant.
    doubled = {name: tensor.repeat(2, *[1] * (tensor.ndim - 1)) for name, tensor in inputs.items()}
    program = torch.onnx.export(
        module,
        (),
        kwargs=doubled,
        dynamo=True,
        dynamic_shapes=dict.fromkeys(inputs, dims),
        output_names=list(outputs),
        verbose=False,
    )
    _shorten_paths(program.model)
    program.save(folder / "model.onnx", external_data=True)


def _shorten_paths(model: onnx_ir.Model) -> None:
    """Cuts the builder's folders out of the stack traces that torch keeps on every node.

    The traces stay, since real exports carry them and their source text names functions of
    other nodes: a tool that searches metadata must not be fooled by that.
    """
    roots = [f"{Path(torch.__file__).parents[1]}/", f"{Path(__file__).parents[2]}/"]
    for node in model.graph.all_nodes():
        for key, text in node.metadata_props.items():
            for root in roots:
                text = text.replace(root, "")
            node.metadata_props[key] = text


def _stage(folder: Path, tiny: Tiny, right: bool) -> None:
    model = tiny.build()
    numbers = write_reference(folder / "model.onnx", tiny, model, 14, STAGE_EXPECTED, STAGE_INPUTS)
    inputs = {
        "hidden_states": numbers["inputs_embeds"],
        "input_ids": numbers["input_ids"],
        "position_ids": numbers["position_ids"],
    }
    _export_dynamo(Stage(model, right), inputs, ["hidden_states_out"], folder)


def stage(folder: Path) -> None:
    """A broken stage, float32, dynamic shapes, external data."""
    _stage(folder, Tiny(), right=False)


def right_stage(folder: Path) -> None:
    """The same stage exported from a module that masks the ids and splices every media row."""
    _stage(folder, Tiny(), right=True)


def fp16(folder: Path) -> None:
    """The PLE part of a broken stage in float16: TorchScript, opset 17, weights inline."""
    tiny = Tiny()
    model = tiny.build()
    inputs = {name: STAGE_INPUTS[name] for name in ("hidden_states", "input_ids")}
    expected = {name: STAGE_EXPECTED[name] for name in ("per_layer_identity", "per_layer_inputs")}
    numbers = write_reference(folder / "model.onnx", tiny, model, 14, expected, inputs, "float16")
    names = ["hidden_states", "input_ids", "per_layer_inputs"]
    torch.onnx.export(
        PerLayerInputs(model.half()),
        (numbers["inputs_embeds"].half(), numbers["input_ids"]),
        folder / "model.onnx",
        dynamo=False,
        opset_version=17,
        input_names=names[:2],
        output_names=names[2:],
        dynamic_axes={name: {0: "batch", 1: "sequence"} for name in names},
    )


def identity_262144(folder: Path) -> None:
    """The lookup alone over Gemma 4's 262,144 ids, float16, as the graph's own output."""
    tiny = Tiny(vocab=262_144, layers=1, ple_dim=3, hidden=4)
    model = tiny.build()
    numbers = write_reference(folder / "model.onnx", tiny, model, 14, IDENTITY_EXPECTED, precision="float16")
    inputs = {"input_ids": numbers["input_ids"]}
    _export_dynamo(Identity(model.half()), inputs, ["per_layer_inputs"], folder)


def save_parts(folder: Path, parts: Sequence[Part]) -> None:
    """Saves ``stage_0/model.onnx`` and so on: float32, dynamic shapes, external data."""
    for number, part in enumerate(parts):
        place = folder / f"stage_{number}"
        place.mkdir(parents=True)
        _export_dynamo(part.module, part.inputs, part.outputs, place)
