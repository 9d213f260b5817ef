"""Core AI samples: ``stage.aimodel``, broken stages of Hugging Face's decoder layers."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from coreai.authoring import AIProgram
from coreai_opt.coreai_utils import DType, palettize_weights, quantize_weights
from coreai_torch import TorchConverter, get_decomp_table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Gemma4ForConditionalGeneration

from .model import (
    IDENTITY_EXPECTED,
    STAGE_EXPECTED,
    STAGE_INPUTS,
    LastStage,
    Part,
    Stage,
    StateCache,
    StatefulStage,
    Tiny,
    hf_numbers,
    run_layers,
    run_tensors,
    write_reference,
)

_ROWS = torch.export.Dim("rows", min=1, max=64)


def _add(
    converter: TorchConverter,
    module: nn.Module,
    hidden_states: Tensor,
    numbers: dict[str, Tensor],
    output: str = "hidden_states_out",
    name: str = "main",
    static: bool = False,
) -> None:
    """Stages a module with the inputs ``hidden_states``, ``input_ids`` and ``position_ids`` (int32)."""
    inputs = {
        "hidden_states": hidden_states,
        "input_ids": numbers["input_ids"].int(),
        "position_ids": numbers["position_ids"].int(),
    }
    shapes = None if static else {name: {1: _ROWS} for name in inputs}
    program = torch.export.export(module, (), inputs, dynamic_shapes=shapes).run_decompositions(get_decomp_table())
    states = [buffer.replace(".", "_") for buffer in program.graph_signature.buffers_to_mutate.values()]
    converter.add_exported_program(
        program, input_names=list(inputs), output_names=[output], state_names=states, entrypoint_name=name
    )


_RELEASE, _DEBUG = TorchConverter.Mode.RELEASE, TorchConverter.Mode.DEBUG


def _release() -> TorchConverter:
    """In release mode: the ops carry no names."""
    return TorchConverter(mode=_RELEASE)


def _one_stage(folder: Path, tiny: Tiny, precision: str, expected: dict[str, str]) -> AIProgram:
    """A whole stage, 1 to 64 rows; ``precision`` names the tolerances of the reference beside it."""
    model = tiny.build()
    numbers = write_reference(folder / "stage.aimodel", tiny, model, 14, expected, STAGE_INPUTS, precision)
    return _converted(Stage(model), numbers, half=precision == "float16")


def _converted(
    module: nn.Module,
    numbers: dict[str, Tensor],
    half: bool,
    static: bool = False,
    mode: TorchConverter.Mode = _RELEASE,
) -> AIProgram:
    """A stage in float32 or, ``half``, in float16."""
    hidden_states = numbers["inputs_embeds"]
    converter = TorchConverter(mode=mode)
    if half:
        module, hidden_states = module.half(), hidden_states.half()
    _add(converter, module, hidden_states, numbers, static=static)
    return converter.to_coreai()


def stage(folder: Path) -> None:
    """float32."""
    _one_stage(folder, Tiny(), "float32", STAGE_EXPECTED).save_asset(folder / "stage.aimodel")


def fp16(folder: Path) -> None:
    """float16."""
    _one_stage(folder, Tiny(), "float16", STAGE_EXPECTED).save_asset(folder / "stage.aimodel")


def int8(folder: Path) -> None:
    """Weights of at least 1024 elements in int8, with a scale a row of the table."""
    program = _one_stage(folder, Tiny(), "8-bit", IDENTITY_EXPECTED)
    quantize_weights(program, DType.INT8).save_asset(folder / "stage.aimodel")


def palette4(folder: Path) -> None:
    """Weights of at least 1024 elements as indices of 4 bits into a palette each."""
    program = _one_stage(folder, Tiny(layers=2, ple_dim=3), "4-bit k-means", IDENTITY_EXPECTED)
    palettize_weights(program, None, n_bits=4, num_kmeans_workers=1).save_asset(folder / "stage.aimodel")


def multifunction(folder: Path) -> None:
    """Two functions of fixed sizes, 8 and 14 rows, over one set of weights; float32."""
    tiny = Tiny()
    model = tiny.build()
    small = {run: hf_numbers(model, ids) for run, ids in tiny.prompts(8).items()}
    more: dict[str, Tensor] = {}
    for run, numbers in small.items():
        more |= run_tensors(f"{run}, 8 rows", numbers, STAGE_INPUTS, STAGE_EXPECTED)
    large = write_reference(folder / "stage.aimodel", tiny, model, 14, STAGE_EXPECTED, STAGE_INPUTS, more=more)
    converter = _release()
    for rows, numbers in ((8, small["media"]), (14, large)):
        _add(converter, Stage(model), numbers["inputs_embeds"], numbers, name=f"extend_64_{rows}", static=True)
    converter.to_coreai().save_asset(folder / "stage.aimodel")


class _FirstPrompt(StateCache):
    """A cache that a prompt is written to the front of: Core AI takes no slice that begins at a tensor's value."""

    def _write(self, name: str, new: Tensor) -> Tensor:
        held: Tensor = getattr(self, name)
        held.copy_(torch.cat([new, held[:, :, new.shape[2] :]], dim=2))
        return held


def state(folder: Path) -> None:
    """float32, static [1,8], keys and values of 16 rows in states.

    The reference holds the states after the run too, by the names that the export gives them.
    """
    _stateful(folder, "float32")


def state_fp16_debug(folder: Path) -> None:
    """The same in float16, in debug mode: the ops carry the names of the modules they come from."""
    _stateful(folder, "float16", _DEBUG)


def _stateful(folder: Path, precision: str, mode: TorchConverter.Mode = _RELEASE) -> None:
    tiny = Tiny()
    model = tiny.build()
    held = {f"cache_{kind}_{layer}": f"{kind}_{layer}" for layer in range(tiny.layers) for kind in ("keys", "values")}
    expected = {**STAGE_EXPECTED, **held}
    numbers = write_reference(folder / "stage.aimodel", tiny, model, 8, expected, STAGE_INPUTS, precision)
    module = StatefulStage(model)
    module.cache = _FirstPrompt(module.language)
    program = _converted(module, numbers, precision == "float16", static=True, mode=mode)
    program.save_asset(folder / "stage.aimodel")


# The layer that the second of two stages begins with.
_SPLIT = 2


def two_stage(folder: Path) -> None:
    """A bundle folder: two stages, float32, logits at the end, and the metadata of an exported LLM.

    Each stage works out the per-layer inputs of all layers from the ``hidden_states`` and
    ``input_ids`` it is given, and takes the slices of its own layers. The second is handed the
    first one's output, which for media rows is no embedding: there the contract gives wrong
    projections whatever the ids are, so with media rows its reference holds the looked-up rows
    alone. Text rows take the embeddings of their ids: a prompt of text is right to the logits.
    """
    tiny = Tiny(layers=4)
    model = tiny.build()
    handed = {**STAGE_INPUTS, "hidden_states": f"hidden_states_{_SPLIT - 1}"}
    first = {**STAGE_EXPECTED, "hidden_states_out": handed["hidden_states"]}
    whole = {"per_layer_inputs": "per_layer_inputs", "logits": "logits"}
    numbers = write_reference(folder / "stage_0.aimodel", tiny, model, 14, first, STAGE_INPUTS)
    write_reference(folder / "stage_1.aimodel", tiny, model, 14, IDENTITY_EXPECTED, handed, text_expected=whole)
    beginning, end = _release(), _release()
    _add(beginning, Stage(model, part=slice(_SPLIT)), numbers["inputs_embeds"], numbers)
    _add(end, LastStage(model, slice(_SPLIT, None)), numbers[handed["hidden_states"]], numbers, "logits")
    for number, converter in enumerate((beginning, end)):
        converter.to_coreai().save_asset(folder / f"stage_{number}.aimodel")
    (folder / "metadata.json").write_text(json.dumps(_llm_metadata(tiny), indent=2) + "\n")


def save_parts(folder: Path, parts: Sequence[Part]) -> None:
    """Saves ``stage_0.aimodel`` and so on: float32, 1 to 64 rows."""
    for number, part in enumerate(parts):
        shapes = {name: {1: _ROWS} for name in part.inputs}
        program = torch.export.export(part.module, (), dict(part.inputs), dynamic_shapes=shapes)
        converter = _release()
        converter.add_exported_program(
            program.run_decompositions(get_decomp_table()),
            input_names=list(part.inputs),
            output_names=list(part.outputs),
        )
        converter.to_coreai().save_asset(folder / f"stage_{number}.aimodel")


def _llm_metadata(tiny: Tiny) -> dict[str, object]:
    """A bundle's own metadata, version 0.2: of the token ids it names the image's alone."""
    return {
        "metadata_version": "0.2",
        "kind": "vlm",
        "name": "tiny-gemma4",
        "assets": {"stage_0": "stage_0.aimodel", "stage_1": "stage_1.aimodel"},
        "language": {"vocab_size": tiny.vocab, "max_context_length": 64},
        "vision": {"image_token_id": tiny.ids.image},
    }


class HostStage(nn.Module):
    """A stage that is handed its PLE rows: ``hidden_states`` [B,S,H], ``ple_embeddings`` int8 [B,S,L*D] and
    ``position_ids`` [B,S] -> ``hidden_states`` [B,S,H] after all layers.

    ``scale`` is that of the rows, with sqrt(D) in it; their zero point is 0.
    """

    def __init__(self, model: Gemma4ForConditionalGeneration, scale: float) -> None:
        super().__init__()
        self.language = model.model.language_model
        text = model.config.text_config
        self.rows = (text.num_hidden_layers, text.hidden_size_per_layer_input)
        self.register_buffer("scale", torch.tensor(scale))
        self.register_buffer("zero_point", torch.tensor(0.0))

    def forward(self, hidden_states: Tensor, ple_embeddings: Tensor, position_ids: Tensor) -> Tensor:
        rows = (ple_embeddings.to(hidden_states.dtype) - self.zero_point) * self.scale
        identity = rows.reshape(*rows.shape[:2], *self.rows)
        per_layer = self.language.project_per_layer_inputs(hidden_states, identity)
        return run_layers(self.language, hidden_states, per_layer, position_ids)


def host_ple(folder: Path) -> None:
    """A bundle folder: a stage, float16, static [1,8], and the table that its host reads PLE rows from.

    The table is int8, symmetric, with one scale for all of it that sqrt(D) is folded into, as the metadata of its
    file says.
    """
    tiny = Tiny()
    model = tiny.build()
    folder.mkdir(parents=True)
    tiny.config().to_json_file(folder / "config.json", use_diff=False)
    table, embed_scale = model.model.language_model.embed_tokens_per_layer.weight.detach(), tiny.ple_dim**0.5
    scale = (table.abs().max() * embed_scale / 127).item()
    codes = torch.round(table * embed_scale / scale).to(torch.int8)
    metadata = {"embed_scale": str(embed_scale), "ple_scale": str(scale), "ple_zero_point": "0", "dtype": "SI8"}
    sidecar = folder / "stage_ple.safetensors"
    save_file({"embed_tokens_per_layer": codes}, sidecar, metadata=metadata)
    sidecar.chmod(0o644)  # safetensors writes files that only their owner can read
    ids = tiny.prompts(8)["media"]
    inputs = {
        "hidden_states": hf_numbers(model, ids)["inputs_embeds"].half(),
        "ple_embeddings": codes[ids],
        "position_ids": torch.arange(8).int().unsqueeze(0),
    }
    program = torch.export.export(HostStage(model, scale).half(), (), inputs).run_decompositions(get_decomp_table())
    converter = _release()
    converter.add_exported_program(program, input_names=list(inputs), output_names=["hidden_states_out"])
    converter.to_coreai().save_asset(folder / "stage.aimodel")
    named = {
        "assets": {"main": "stage.aimodel"},
        "auxiliary_assets": {"per_layer_embeddings": sidecar.name},
    }
    (folder / "metadata.json").write_text(json.dumps(_llm_metadata(tiny) | named, indent=2) + "\n")
