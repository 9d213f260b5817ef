"""The tiny random Gemma 4 models behind the samples, and Hugging Face's numbers for them.

Everything here is float32 and Hugging Face's own code. The stage modules at the end are the
only code of ours that takes part in a forward pass; they call Hugging Face's methods and
decoder layers and add what an exporter adds: the splice and the ids of the lookup.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

from g4patch.record import model as record

PAD = 0
BOS = 2
REAL_VOCAB = 262_144
# Rows of keys and values that a state holds.
CAPACITY = 16


@dataclass(frozen=True)
class TokenIds:
    """Placeholder and marker ids. Image, audio and video are media; the rest is text."""

    boi: int
    boa: int
    image: int
    audio: int
    eoi: int
    eoa: int
    video: int

    @classmethod
    def for_vocab(cls, vocab: int) -> "TokenIds":
        """Gemma 4's own ids for its own vocabulary, else the same layout near the end.

        The layout matters: EOI and EOA lie between audio and video, so a range mask over the
        media ids would swallow two text ids.
        """
        if vocab == REAL_VOCAB:
            return cls(255_999, 256_000, 258_880, 258_881, 258_882, 258_883, 258_884)
        image = vocab - 10
        return cls(image - 55, image - 54, image, image + 1, image + 2, image + 3, image + 4)


@dataclass(frozen=True)
class Tiny:
    """The size of a tiny model: V ids, L layers, D per-layer width, H hidden width."""

    vocab: int = 320
    layers: int = 3
    ple_dim: int = 8
    hidden: int = 16
    head_dim: int = 8
    seed: int = 0
    towers: bool = False

    @property
    def ids(self) -> TokenIds:
        return TokenIds.for_vocab(self.vocab)

    @property
    def media(self) -> list[int]:
        """The placeholder ids of all media."""
        return [self.ids.image, self.ids.audio, self.ids.video]

    def config(self) -> Gemma4Config:
        """The Hugging Face config, as small as Gemma 4's code allows."""
        ids = self.ids
        return Gemma4Config(
            text_config={
                "vocab_size": self.vocab,
                "vocab_size_per_layer_input": self.vocab,
                "hidden_size": self.hidden,
                "hidden_size_per_layer_input": self.ple_dim,
                "intermediate_size": 2 * self.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": self.head_dim,
                "global_head_dim": 2 * self.head_dim,
                "layer_types": ["sliding_attention"] * (self.layers - 1) + ["full_attention"],
                "max_position_embeddings": 1024,
                "pad_token_id": PAD,
                "bos_token_id": BOS,
            },
            vision_config=_tiny_vision(self.hidden) if self.towers else None,
            audio_config=_tiny_audio(self.hidden) if self.towers else None,
            boi_token_id=ids.boi,
            boa_token_id=ids.boa,
            image_token_id=ids.image,
            audio_token_id=ids.audio,
            eoi_token_id=ids.eoi,
            eoa_token_index=ids.eoa,
            video_token_id=ids.video,
            attn_implementation="eager",
        )

    def build(self, config: Gemma4Config | None = None) -> Gemma4ForConditionalGeneration:
        """The float32 model, or one of another config, with every parameter redrawn from the seed.

        Hugging Face's own initialisation will not do: it zeroes the pad row of both tables (a
        trained Gemma 4 has a pad row like any other, and here it must be told from a row of
        zeros) and leaves the norms at one.
        """
        model = Gemma4ForConditionalGeneration(config or self.config()).eval()
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                parameter.copy_(_draw(name, parameter.shape, generator))
        return model

    def prompts(self, rows: int) -> dict[str, Tensor]:
        """Token ids by run, int64 [1, rows] each; 8 rows for static graphs, 14 for dynamic ones.

        ``media`` has text, markers, pad rows and all three media; ``left padding`` is padded as a
        batch would be; ``text`` has the ids around the media ids and none of theirs. For graphs
        that decode, 1 row: each kind of media by itself, and one text token.
        """
        i, last = self.ids, self.vocab - 1
        if rows == 1:
            alone = {"one image": i.image, "one audio": i.audio, "one video": i.video, "one text": 7}
            return {run: torch.tensor([[token]]) for run, token in alone.items()}
        audio = [i.boa, i.audio, i.eoa]
        media = {
            8: [PAD, 7, i.boi, i.image, i.eoi, i.audio, i.video, last],
            14: [PAD, PAD, BOS, 7, i.boi, i.image, i.image, i.eoi, *audio, i.video, 200, last],
        }[rows]
        padded = [PAD] * (rows - 5) + [BOS, i.image, i.video, 7, last]
        text = ([BOS, i.boi, i.eoi, i.boa, i.eoa, i.video + 1, last, 7] * 2)[:rows]
        return {
            "media": torch.tensor([media]),
            "left padding": torch.tensor([padded]),
            "text": torch.tensor([text]),
        }


def _tiny_vision(hidden: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }


def _tiny_audio(hidden: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": hidden,
    }


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random values of a size that keeps activations near one.

    Tables are uniform, so that their rows stay apart when 4 bits are left of each value.
    """
    if "embed_tokens" in name:
        return torch.rand(shape, generator=generator) - 0.5
    noise = torch.randn(shape, generator=generator)
    if "norm" in name and len(shape) == 1:
        return 1.0 + 0.1 * noise
    return noise * shape[-1] ** -0.5


def hf_numbers(model: Gemma4ForConditionalGeneration, input_ids: Tensor, blind: bool = False) -> dict[str, Tensor]:
    """Hugging Face's forward over one prompt with fixed random media features, or blind: without any.

    Returns ``input_ids`` and ``position_ids`` (int64 [1,S]) and, in float32, ``inputs_embeds``
    [1,S,H] after the features were spliced in, ``per_layer_identity`` [1,S,L,D] (the rows looked
    up times sqrt(D)), ``per_layer_inputs`` [1,S,L,D] (what the layers get), ``hidden_states``
    [1,S,H] after the last layer, before the final norm, ``hidden_states_0`` and so on after each
    layer, ``logits`` [1,S,V], and ``keys_0``, ``values_0`` and so on, what each layer leaves in
    Hugging Face's own cache, with zeros up to the size of a state, [1,KV heads,CAPACITY,head width].
    """
    layers = model.config.text_config.num_hidden_layers
    features = {} if blind else record.stand_ins(model.config, input_ids, ("image", "audio", "video"))
    cache = DynamicCache()
    seen = record.watched(model, input_ids, record.Media(features=features), range(layers + 1), cache)
    for index, held in enumerate(cache.layers):
        for kind, rows in (("keys", held.keys), ("values", held.values)):
            seen[f"{kind}_{index}"] = nn.functional.pad(rows, (0, 0, 0, CAPACITY - rows.shape[2]))
    after = {f"hidden_states_{layer}": seen.pop(f"hidden_states.{layer + 1}") for layer in range(layers)}
    seen["inputs_embeds"] = seen.pop("hidden_states.0")
    return {**seen, **after, "hidden_states": after[f"hidden_states_{layers - 1}"].clone()}


# How far an export of each kind may be off, in rows and sums (values up to 3) and in hidden
# states after all layers (values up to 11), keys and values on the way there (up to 4), and why.
_TOLERANCES = {
    "float32": (2e-6, 3e-5, "float32 rounds to 6e-8 of a value; tens of roundings, in another order"),
    "float16": (4e-3, 2e-1, "float16 rounds to 5e-4 of a value; torch's own float16 is off by 6e-2 after the layers"),
    # Rows alone: the palettes' own error in the sums would hide the fault.
    "8-bit": (
        6e-3,
        6e-3,
        "255 levels over [-0.5, 0.5]: off by half a step, 1/508, times sqrt(8), the scale of the rows",
    ),
    "4-bit": (8e-2, 8e-2, "16 levels over [-0.5, 0.5): off by half a step, 1/30, times sqrt(3), and float16"),
    "int4": (8e-2, 8e-2, "steps of at most 0.5 / 7 a block: off by half of one, 1/28, times sqrt(3), and float16"),
    "4-bit k-means": (8e-2, 8e-2, "16 levels that k-means spreads over [-0.5, 0.5): off by about 1/30, times sqrt(3)"),
}


def write_reference(
    bundle: Path,
    tiny: Tiny,
    model: Gemma4ForConditionalGeneration,
    rows: int | tuple[int, ...],
    expected: Mapping[str, str],
    inputs: Mapping[str, str] = {"input_ids": "input_ids"},
    precision: str = "float32",
    more: Mapping[str, Tensor] = {},
    text_expected: Mapping[str, str] = {},
) -> dict[str, Tensor]:
    """Writes ``config.json`` and ``<bundle>.reference.safetensors`` beside a bundle.

    ``expected`` and ``inputs`` map names in the reference to keys of :func:`hf_numbers`, for every
    run; ``text_expected`` adds to the run ``text`` what is right only without media rows; ``more``
    are tensors of other runs. Returns the numbers of the run ``media``.
    """
    bundle.parent.mkdir(parents=True, exist_ok=True)
    tiny.config().to_json_file(bundle.parent / "config.json", use_diff=False)
    lengths = (rows,) if isinstance(rows, int) else rows
    prompts = {run: ids for length in lengths for run, ids in tiny.prompts(length).items()}
    numbers = {run: hf_numbers(model, ids) for run, ids in prompts.items()}
    tensors = dict(more)
    for run, seen in numbers.items():
        wanted = {**expected, **text_expected} if run == "text" else expected
        tensors |= run_tensors(run, seen, inputs, wanted)
    target = bundle.with_name(f"{bundle.name}.reference.safetensors")
    # One key, for safetensors writes several in no fixed order.
    names = sorted({name.rsplit("/", 1)[1] for name in tensors if "/expected/" in name})
    save_file(tensors, target, metadata={"g4patch": json.dumps(_metadata(tiny, names, precision))})
    target.chmod(0o644)  # safetensors writes files that only their owner can read
    return numbers["media"]


def write_whole_reference(
    folder: Path, tiny: Tiny, model: Gemma4ForConditionalGeneration, prompts: Mapping[str, Tensor], steps: int = 0
) -> None:
    """Writes ``config.json`` and ``reference.safetensors``, the numbers of the whole model, into a bundle folder.

    A prompt with media is continued by ``steps`` tokens, greedily but never with media ids, and has a twin
    without features.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tiny.config().to_json_file(folder / "config.json", use_diff=False)
    tensors: dict[str, Tensor] = {}
    runs: dict[str, dict[str, object]] = {}
    for run, ids in prompts.items():
        if not torch.isin(ids, torch.tensor(tiny.media)).any():
            tensors |= _whole_tensors(run, tiny, hf_numbers(model, ids))
            continue
        prompt = ids.shape[1]
        for _ in range(steps):
            logits = hf_numbers(model, ids)["logits"][:, -1]
            logits[:, tiny.media] = -torch.inf
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        tensors |= _whole_tensors(run, tiny, hf_numbers(model, ids))
        tensors |= _whole_tensors(f"{run} without media", tiny, hf_numbers(model, ids, blind=True))
        runs[run] = {"prompt": prompt, "steps": steps, "without_media": f"{run} without media"}
    names = sorted({name.rsplit("/", 1)[1] for name in tensors if "/expected/" in name})
    told = {**_metadata(tiny, names, "float32"), "layers": tiny.layers, "runs": runs}
    target = folder / "reference.safetensors"
    save_file(tensors, target, metadata={"g4patch": json.dumps(told)})
    target.chmod(0o644)


def _whole_tensors(run: str, tiny: Tiny, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    hidden = {"hidden_states.0": "inputs_embeds"}
    hidden |= {f"hidden_states.{layer + 1}": f"hidden_states_{layer}" for layer in range(tiny.layers)}
    same = {name: name for name in ("per_layer_identity", "per_layer_inputs", "logits")}
    inputs = {"input_ids": "input_ids", "hidden_states": "inputs_embeds"}
    # Apart, for safetensors takes no two names of one tensor.
    return {name: tensor.clone() for name, tensor in run_tensors(run, numbers, inputs, hidden | same).items()}


def run_tensors(
    run: str, numbers: Mapping[str, Tensor], inputs: Mapping[str, str], expected: Mapping[str, str]
) -> dict[str, Tensor]:
    """One run as a reference holds it: see ``g4patch/reference.py``."""
    tensors = {f"{run}/input/{name}": numbers[key].contiguous() for name, key in inputs.items()}
    return tensors | {f"{run}/expected/{name}": numbers[key].contiguous() for name, key in expected.items()}


def _metadata(tiny: Tiny, names: list[str], precision: str) -> dict[str, object]:
    """What a reference says of itself: see ``g4patch/reference.py``."""
    rows, layers, reason = _TOLERANCES[precision]
    bounds = {name: rows if name.startswith("per_layer") else layers for name in names}
    ids = tiny.ids
    return {
        "schema": 1,
        "model": "right",
        "source": {
            "model": "Gemma4ForConditionalGeneration, random weights, float32",
            "tiny": asdict(tiny),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "token_ids": {"image": ids.image, "audio": ids.audio, "video": ids.video, "pad": PAD},
        "tolerances": {
            name: {"max_abs": bound, "norm_ratio": bound, "reason": reason} for name, bound in bounds.items()
        },
    }


# What a stage with decoder layers takes and gives, by hf_numbers' keys.
STAGE_INPUTS = {"hidden_states": "inputs_embeds", "input_ids": "input_ids", "position_ids": "position_ids"}
STAGE_EXPECTED = {
    "per_layer_identity": "per_layer_identity",
    "per_layer_inputs": "per_layer_inputs",
    "hidden_states_out": "hidden_states",
}
IDENTITY_EXPECTED = {"per_layer_identity": "per_layer_identity"}


def run_layers(
    language: Gemma4TextModel,
    hidden_states: Tensor,
    per_layer: Tensor | Sequence[Tensor],
    positions: Tensor,
    cache: "StateCache | None" = None,
    part: slice = slice(None),
) -> Tensor:
    """All decoder layers, or a part, with a cache or without. [B,S,H], [B,S,L,D], [B,S] -> [B,S,H].

    ``per_layer`` may also be [B,S,D] for each layer.
    The prompts are far shorter than the sliding window (512), so one causal mask serves both
    kinds of layer.
    """
    kinds = language.config.layer_types
    rotary = {kind: language.rotary_emb(hidden_states, positions, kind) for kind in sorted(set(kinds))}
    keys = positions if cache is None else torch.arange(CAPACITY).unsqueeze(0)
    visible = positions.unsqueeze(-1) >= keys.unsqueeze(-2)
    # -1e4 and not the dtype's minimum: finite in float16 too, and exp() of it is zero as well.
    mask = ((visible.to(hidden_states.dtype) - 1.0) * 1e4).unsqueeze(1)
    shared_kv: dict = {}
    for index, layer in list(enumerate(language.layers))[part]:
        hidden_states = layer(
            hidden_states,
            per_layer[:, :, index, :] if isinstance(per_layer, Tensor) else per_layer[index],
            shared_kv_states=shared_kv,
            position_embeddings=rotary[kinds[index]],
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
        )
    return hidden_states


class PerLayerInputs(nn.Module):
    """The PLE part of a stage: ids and rows handed in -> what the layers get.

    Inputs: ``hidden_states`` [B,S,H], the spliced embeddings; ``input_ids`` integer [B,S].
    Output: [B,S,L,D].

    As broken: the lookup reads raw ids, and only image rows take ``hidden_states``. As right
    (``right=True``): the lookup reads the pad row for every media id, and every media row and
    every pad row takes ``hidden_states``.
    """

    def __init__(self, model: Gemma4ForConditionalGeneration, right: bool = False) -> None:
        super().__init__()
        self.language = model.model.language_model
        self.config = model.config
        self.right = right

    def forward(self, hidden_states: Tensor, input_ids: Tensor) -> Tensor:
        lookup_ids, from_stage = self.read_and_taken(input_ids)
        embeds = self.language.embed_tokens(input_ids)
        spliced = torch.where(from_stage.unsqueeze(-1), hidden_states, embeds)
        identity = self.language.get_per_layer_inputs(lookup_ids)
        return self.language.project_per_layer_inputs(spliced, identity)

    def read_and_taken(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The ids that the lookup reads, and which rows take ``hidden_states``."""
        is_image = input_ids == self.config.image_token_id
        if not self.right:
            return input_ids, is_image
        is_audio = input_ids == self.config.audio_token_id
        is_video = input_ids == self.config.video_token_id
        is_media = torch.logical_or(torch.logical_or(is_image, is_audio), is_video)
        return self.masked(input_ids, is_media), torch.logical_or(is_media, input_ids == PAD)

    def masked(self, input_ids: Tensor, is_media: Tensor) -> Tensor:
        """The ids that a right lookup reads."""
        return torch.where(is_media, torch.full_like(input_ids, PAD), input_ids)


class Stage(nn.Module):
    """A stage: ``hidden_states`` [B,S,H], ``input_ids`` and ``position_ids`` [B,S] ->
    ``hidden_states`` [B,S,H] after those of Hugging Face's decoder layers that are its ``part``."""

    def __init__(self, model: Gemma4ForConditionalGeneration, right: bool = False, part: slice = slice(None)) -> None:
        super().__init__()
        self.per_layer_inputs = PerLayerInputs(model, right)
        self.language = model.model.language_model
        self.part = part

    def forward(self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        per_layer = self.per_layer_inputs(hidden_states, input_ids)
        return run_layers(self.language, hidden_states, per_layer, position_ids, part=self.part)


class LastStage(Stage):
    """A stage that ends in ``logits`` [B,S,V], capped as Hugging Face caps them."""

    def __init__(self, model: Gemma4ForConditionalGeneration, part: slice) -> None:
        super().__init__(model, part=part)
        self.head = model.lm_head
        self.cap = model.config.text_config.final_logit_softcapping

    def forward(self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.capped(super().forward(hidden_states, input_ids, position_ids))

    def capped(self, hidden_states: Tensor) -> Tensor:
        logits = self.head(self.language.norm(hidden_states))
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class HandingStage(Stage):
    """A first stage that hands on the per-layer inputs too: ``hidden_states`` [B,S,H] and [B,S,L,D]."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        per_layer = self.per_layer_inputs(hidden_states, input_ids)
        return run_layers(self.language, hidden_states, per_layer, position_ids, part=self.part), per_layer


class HandedStage(LastStage):
    """A last stage that is handed the per-layer inputs, [B,S,L,D], and looks nothing up."""

    def forward(self, hidden_states: Tensor, per_layer_inputs: Tensor, position_ids: Tensor) -> Tensor:
        return self.capped(run_layers(self.language, hidden_states, per_layer_inputs, position_ids, part=self.part))


@dataclass(frozen=True)
class Part:
    """What becomes one model of a bundle folder: a module, the inputs it is traced with, and its outputs' names."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]


def two_parts(
    model: Gemma4ForConditionalGeneration, numbers: Mapping[str, Tensor], integers: torch.dtype = torch.int32
) -> tuple[Part, Part]:
    """A broken model in two stages, each with half of the layers, traced with :func:`hf_numbers` of a prompt.

    The first hands on the per-layer inputs of all layers, and the last looks nothing up: with the first one mended
    the whole is right, media rows too. ``integers`` is the dtype of ids and positions.
    """
    half = model.config.text_config.num_hidden_layers // 2
    positions = {"position_ids": numbers["position_ids"].to(integers)}
    first = {"hidden_states": numbers["inputs_embeds"], "input_ids": numbers["input_ids"].to(integers)}
    last = {"hidden_states": numbers[f"hidden_states_{half - 1}"], "per_layer_inputs": numbers["per_layer_inputs"]}
    return (
        Part(HandingStage(model, part=slice(half)), first | positions, ("hidden_states_out", "per_layer_inputs_out")),
        Part(HandedStage(model, slice(half, None)), last | positions, ("logits",)),
    )


class StateCache(nn.Module):
    """Keys and values of earlier prompts, in buffers that an exporter can turn into states.

    A buffer a layer for either, [1, KV heads, CAPACITY, head width]; a prompt is written at its
    first position. Stands in for Hugging Face's cache: the attention calls ``update`` alone.
    """

    def __init__(self, language: Gemma4TextModel) -> None:
        super().__init__()
        self.begin: Tensor | None = None
        for index, layer in enumerate(language.layers):
            attention = layer.self_attn
            heads = attention.k_proj.out_features // attention.head_dim
            for kind in ("keys", "values"):
                self.register_buffer(f"{kind}_{index}", torch.zeros(1, heads, CAPACITY, attention.head_dim))

    def update(self, keys: Tensor, values: Tensor, index: int, **_: object) -> tuple[Tensor, Tensor]:
        """All keys and all values of a layer, these among them. [1,KV,S,head] -> [1,KV,CAPACITY,head]."""
        return self._write(f"keys_{index}", keys), self._write(f"values_{index}", values)

    def _write(self, name: str, new: Tensor) -> Tensor:
        held = getattr(self, name)
        held[:, :, self.begin : self.begin + new.shape[2]] = new
        return held


class StatefulStage(nn.Module):
    """A stage with a cache: as :class:`Stage`, for prompts that follow one another."""

    def __init__(self, model: Gemma4ForConditionalGeneration, right: bool = False) -> None:
        super().__init__()
        self.per_layer_inputs = PerLayerInputs(model, right)
        self.language = model.model.language_model
        self.cache = StateCache(self.language)

    def forward(self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        per_layer = self.per_layer_inputs(hidden_states, input_ids)
        self.cache.begin = position_ids[0, 0]
        return run_layers(self.language, hidden_states, per_layer, position_ids, self.cache)


class Identity(nn.Module):
    """The lookup alone: ``input_ids`` [B,S] -> [B,S,L,D], not yet projected or summed."""

    def __init__(self, model: Gemma4ForConditionalGeneration) -> None:
        super().__init__()
        self.language = model.model.language_model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.language.get_per_layer_inputs(input_ids)
