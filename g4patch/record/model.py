"""Hugging Face's Gemma 4: loaded, called, and watched by hooks while it computes. Nothing of its maths is repeated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, DynamicCache, Gemma4Config, GenerationConfig
from transformers import Gemma4ForConditionalGeneration as Model
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModelOutput

from g4patch.errors import BundleError

Tensors = dict[str, Tensor]

# The seed of the features that stand in for a tower's, and of the signs of a nudge.
SEED = 1

# As in Hugging Face's processors: what kind of token a row is. It matters where vision rows attend to each other.
_TOKEN_TYPES = {"image": 1, "video": 2, "audio": 3}


@dataclass(frozen=True)
class Media:
    """What a model is handed beside ids: what a processor made, and features of modalities that have no such thing.

    `inputs` are arguments of the model's forward; `features` float `[N,H]` by modality, in the order of the rows.
    """

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    features: Mapping[str, Tensor] = field(default_factory=dict)


NO_MEDIA = Media()


def load_config(name: str) -> Gemma4Config:
    """The config of a hub name or a local folder. Raises BundleError for anything but a Gemma 4 with PLE."""
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise BundleError(f"{name} is no folder", "pass a Hugging Face hub name, or a folder with config.json")
    with _refused(name):
        config = AutoConfig.from_pretrained(name)
    if not isinstance(config, Gemma4Config):
        raise BundleError(f"{name} is a {config.model_type} model", "record takes Gemma 4 with its towers: gemma4")
    if not config.text_config.hidden_size_per_layer_input:
        raise BundleError(f"{name} has no per-layer embeddings", "E2B and E4B have them; here is nothing to mend")
    return config


def load_model(name: str, config: Gemma4Config, dtype: str) -> Model:
    """The model on the CPU, in `dtype`. Raises BundleError where it cannot be loaded, or lacks weights."""
    with _refused(name):
        model, report = Model.from_pretrained(
            name,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            use_safetensors=True,  # the other format is pickled: loading it runs what is in it
            output_loading_info=True,
        )
    lacking = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if lacking:
        raise BundleError(
            f"{name} lacks weights: {lacking[0]}{' and others' if len(lacking) > 1 else ''}",
            "random ones would stand in for them; take the whole checkpoint",
        )
    # Greedy and nothing else, whatever the checkpoint prefers.
    stops = {
        token
        for source in (model.generation_config, config.text_config)
        for token in _ids(getattr(source, "eos_token_id", None))
    }
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=sorted(stops | set(media_ids(config).values())), pad_token_id=pad_id(config)
    )
    model.eval()
    return model


@contextmanager
def _refused(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many classes: of the hub, of configs, of torch
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise BundleError(
            f"{name} cannot be loaded: {first_line}", "pass a Hugging Face hub name, or a folder with config.json"
        ) from error


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def media_ids(config: Gemma4Config) -> dict[str, int]:
    """Modality -> placeholder id, for the modalities that the config names."""
    ids = {modality: getattr(config, f"{modality}_token_id") for modality in ("image", "audio", "video")}
    return {modality: token for modality, token in ids.items() if token is not None}


def pad_id(config: Gemma4Config) -> int:
    """The id whose rows media rows are looked up with."""
    return int(config.text_config.pad_token_id)


def stand_ins(config: Gemma4Config, ids: Tensor, modalities: Collection[str]) -> Tensors:
    """Features for media rows that no tower made: normal values, float32 `[N,H]` by modality, the same every time."""
    generator = torch.Generator().manual_seed(SEED)
    hidden, counts = config.text_config.hidden_size, rows(config, ids)
    # One draw after the other, in this order.
    drawn = {name: torch.randn(counts[name], hidden, generator=generator) for name in _TOKEN_TYPES if name in counts}
    return {name: features for name, features in drawn.items() if name in modalities}


def rows(config: Gemma4Config, ids: Tensor) -> dict[str, int]:
    """How many media rows of each modality there are in some ids."""
    return {name: int((ids == token).sum()) for name, token in media_ids(config).items()}


def forward(model: Model, ids: Tensor, media: Media = NO_MEDIA, cache: DynamicCache | None = None) -> Tensor:
    """The logits of all rows, `[1,S,V]`, for ids `[1,S]`. Without media, media rows keep the pad id's embeddings.

    What the layers keep for later prompts is left in `cache`.
    """
    with torch.no_grad(), _handed(model, ids, media) as arguments:
        kept = {"cache": cache, "use_cache": cache is not None}
        logits: Tensor = model(input_ids=ids, **kept, **arguments).logits
    return logits


def continuation(model: Model, ids: Tensor, media: Media, steps: int) -> Tensor:
    """What the model itself generates after a prompt `[1,P]`, greedily: ids `[1,N]`, N at most `steps`.

    It ends before an end-of-sequence token and before a media id, for which there would be no features.
    """
    if not steps:
        return ids[:, :0]
    with torch.no_grad(), _handed(model, ids, media) as arguments:
        # All of a prompt's rows count, pad ids too: without a mask, pad ids would be hidden from the others.
        mask = torch.ones_like(ids)
        generated = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps, **arguments)
    new: Tensor = generated[:, ids.shape[1] :]
    stopped = new.shape[1] and int(new[0, -1]) in model.generation_config.eos_token_id
    return new[:, :-1] if stopped else new


@contextmanager
def _handed(model: Model, ids: Tensor, media: Media) -> Iterator[dict[str, Any]]:
    """The arguments that hand a model its media. Raises BundleError where the model cannot be run with them."""
    try:
        with _replaced(model, ids, media) as arguments:
            yield arguments
    except Exception as error:  # whatever torch makes of a config that contradicts itself
        first_line = str(error).strip().partition("\n")[0]
        raise BundleError(f"the model cannot be run: {first_line}", "does Hugging Face's own code run it?") from error


@contextmanager
def _replaced(model: Model, ids: Tensor, media: Media) -> Iterator[dict[str, Any]]:
    """The arguments, with the audio tower replaced where there are features in its place."""
    types = torch.zeros_like(ids)
    for modality, token in media_ids(model.config).items():
        types[ids == token] = _TOKEN_TYPES[modality]
    arguments: dict[str, Any] = {"mm_token_type_ids": types, **media.inputs}
    encoded = {
        name: BaseModelOutputWithPooling(pooler_output=(media.features[name],))
        for name in ("image", "video")
        if name in media.features
    }
    if encoded:
        arguments["mm_encoder_outputs"] = encoded
    audio = media.features.get("audio")
    if audio is None:
        yield arguments
        return
    mask = torch.ones(1, len(audio), dtype=torch.bool)

    def audio_features(*_args: object, **_kwargs: object) -> Gemma4AudioModelOutput:
        return Gemma4AudioModelOutput(pooler_output=audio.unsqueeze(0), attention_mask=mask)

    # Image and video features can be handed to the model; for audio there is no such argument, so the method that
    # would run the tower is replaced.
    with patch.object(model.model, "get_audio_features", audio_features):
        yield {**arguments, "input_features": audio.unsqueeze(0), "input_features_mask": mask}


def watched(
    model: Model, ids: Tensor, media: Media, boundaries: Collection[int], cache: DynamicCache | None = None
) -> Tensors:
    """One forward pass, and what went through it; keys and values are left in `cache`.

    `input_ids`, `position_ids` integer `[1,S]`; in the model's dtype `per_layer_identity` and `per_layer_inputs`
    `[1,S,L,D]`, `hidden_states.<k>` `[1,S,H]` at the entry of layer k for each k of `boundaries` (L: after the last
    layer, before the final norm), and `logits` `[1,S,V]`.
    """
    seen: Tensors = {"input_ids": ids}
    per_layer: list[Tensor] = []
    language = model.model.language_model

    def keep_inputs(_module: object, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["per_layer_identity"] = kwargs["per_layer_inputs"].clone()
        seen["position_ids"] = kwargs["position_ids"].clone()

    def keep_per_layer(_module: object, args: tuple[Any, ...]) -> None:
        per_layer.append(args[1].clone())

    def keep_hidden(boundary: int) -> Callable[[object, tuple[Any, ...]], None]:
        def keep(_module: object, args: tuple[Any, ...]) -> None:
            seen[f"hidden_states.{boundary}"] = args[0].clone()

        return keep

    entered = [*language.layers, language.norm]  # what enters the final norm is what the last layer gave
    hooks = [language.register_forward_pre_hook(keep_inputs, with_kwargs=True)]
    hooks += [layer.register_forward_pre_hook(keep_per_layer) for layer in language.layers]
    hooks += [entered[k].register_forward_pre_hook(keep_hidden(k)) for k in sorted(boundaries)]
    with _removed(hooks):
        seen["logits"] = forward(model, ids, media, cache)
    return {**seen, "per_layer_inputs": torch.stack(per_layer, dim=2)}


def moved(model: Model, ids: Tensor, media: Media, seen: Tensors, rounding: float) -> dict[str, float]:
    """How far each tensor that the layers make moves when the input of every layer is off by one rounding.

    `seen` is what the pass gave without that. What is too small for the model's dtype, or lost in its own roundings,
    is put in enlarged, and what comes out is made smaller in proportion.
    """
    nudge = max(rounding, 2.0**-20, torch.finfo(model.dtype).eps)
    generator = torch.Generator().manual_seed(SEED)

    def off(_module: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
        signs = torch.randint(0, 2, args[0].shape, generator=generator) * 2 - 1
        return ((args[0].float() * (1 + nudge * signs)).to(args[0].dtype), *args[1:])

    boundaries = [int(name.partition(".")[2]) for name in seen if name.startswith("hidden_states.")]
    language = model.model.language_model
    with _removed([layer.register_forward_pre_hook(off) for layer in language.layers]):
        other = watched(model, ids, media, boundaries)
    names = [f"hidden_states.{boundary}" for boundary in boundaries if boundary] + ["logits"]
    return {name: float((other[name] - seen[name]).abs().max()) * rounding / nudge for name in names}


@contextmanager
def _removed(hooks: Collection[Any]) -> Iterator[None]:
    """Hooks, gone afterwards."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
