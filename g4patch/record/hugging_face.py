"""Record a reference from Hugging Face's own model: prompts, continuations, and what each forward pass computes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Gemma4Config
from transformers import Gemma4ForConditionalGeneration as Model

from g4patch import reference
from g4patch.copying import Progress, refuse_existing, refuse_full
from g4patch.errors import UsageError
from g4patch.record import tolerances
from g4patch.record.model import (
    NO_MEDIA,
    Media,
    Tensors,
    continuation,
    load_config,
    load_model,
    media_ids,
    moved,
    pad_id,
    rows,
    watched,
)
from g4patch.record.prompts import Prompts, prompts
from g4patch.record.request import Announce, Request, Stages
from g4patch.record.stream import Spec, Stream, bounds_json, float32, int32, streaming

# The run that has media, the same ids without their features, and the prompt's text alone.
_MEDIA, _TWIN, _TEXT = "media", "without media", "text"


@dataclass(frozen=True)
class Run:
    """One forward pass: ids `[1,S]`, of which the last `steps` are the model's own continuation."""

    name: str
    ids: Tensor
    media: Media
    steps: int
    twin: str | None = None

    @property
    def prompt(self) -> int:
        """How many of the ids are the prompt."""
        return int(self.ids.shape[1]) - self.steps


@dataclass(frozen=True)
class _Sizes:
    """What the shapes of a run's tensors are made of, and the layers at whose entry hidden states are kept."""

    config: Gemma4Config
    boundaries: tuple[int, ...]

    def specs(self, run: str, ids: Tensor, has_features: bool) -> dict[str, Spec]:
        """The tensors of a run, named as in the reference."""
        text, count = self.config.text_config, ids.shape[1]
        inputs = {"input_ids": int32(1, count), "position_ids": int32(1, count)}
        inputs["hidden_states"] = float32(1, count, text.hidden_size)
        for modality, number in rows(self.config, ids).items():
            if has_features and number:
                inputs[f"{modality}_features"] = float32(number, text.hidden_size)
        per_layer = float32(1, count, text.num_hidden_layers, text.hidden_size_per_layer_input)
        expected = {"per_layer_identity": per_layer, "per_layer_inputs": per_layer}
        expected |= {f"hidden_states.{k}": float32(1, count, text.hidden_size) for k in self.boundaries}
        expected["logits"] = float32(1, count, text.vocab_size)
        return {
            f"{run}/{kind}/{name}": spec
            for kind, specs in (("input", inputs), ("expected", expected))
            for name, spec in specs.items()
        }


def record(request: Request, out: Path, progress: Progress, say: Announce) -> list[Run]:
    """Run the model and write a reference to `out`. `say` is told at most how many bytes, and of what, beforehand.

    Raises UsageError where the request does not fit the model or `out` cannot be written, BundleError where the model
    cannot be used.
    """
    refuse_existing(out)
    transformers.utils.logging.set_verbosity_error()  # weights that are missing are refused here
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    config = load_config(request.model)
    stages = _stages(request, config)
    sizes = _Sizes(config, tuple(sorted({layer for stage in stages for layer in stage})))
    found = prompts(request, config)
    size = _at_most(found, request.steps, sizes)
    say(size, _listed(found, request.steps))
    refuse_full(out, size)
    model = load_model(request.model, config, request.dtype)
    runs = list(_runs(model, found, request.steps))
    metadata = _metadata(request, config, found, runs, stages)
    specs = {name: spec for run in runs for name, spec in sizes.specs(run.name, run.ids, _spliced(run)).items()}
    with streaming(out, specs, metadata, progress) as stream:
        bounds = _Bounds(tolerances.coarser(request.dtype, request.precision))
        for run in runs:
            _write(stream, run, model, sizes.boundaries, bounds)
        stream.finish({**metadata, "tolerances": bounds_json(bounds.tolerances())})
    return runs


def _stages(request: Request, config: Gemma4Config) -> Stages:
    layers = config.text_config.num_hidden_layers
    stages = request.stages or ((0, layers),)
    if stages[-1][1] != layers:
        raise UsageError(f"--split ends at layer {stages[-1][1]}, and {request.model} has {layers}", f"end at {layers}")
    return stages


def _at_most(found: Prompts, steps: int, sizes: _Sizes) -> int:
    """Bytes of a reference whose continuations do not end early."""
    specs: dict[str, Spec] = {}
    for name, prompt in ((_MEDIA, found.media), (_TWIN, found.media), (_TEXT, found.text)):
        if prompt is not None:
            ids = torch.cat([prompt.ids, prompt.ids.new_full((1, steps), pad_id(sizes.config))], dim=1)
            specs |= sizes.specs(name, ids, name == _MEDIA)
    return sum(spec.size for spec in specs.values())


def _listed(found: Prompts, steps: int) -> str:
    named = ((f"{_MEDIA} and {_TWIN}, each", found.media), (_TEXT, found.text))
    parts = [f"{name} {prompt.ids.shape[1]} tokens" for name, prompt in named if prompt is not None]
    return f"{'; '.join(parts)}; and up to {steps} more that the model goes on with" if steps else "; ".join(parts)


def _runs(model: Model, found: Prompts, steps: int) -> Iterator[Run]:
    """The prompts with what the model goes on with; with media also the twin, which keeps that continuation."""
    for name, prompt in ((_MEDIA, found.media), (_TEXT, found.text)):
        if prompt is None:
            continue
        new = continuation(model, prompt.ids, prompt.media, steps)
        ids, count = torch.cat([prompt.ids, new], dim=1), new.shape[1]
        if name == _MEDIA:
            yield Run(name, ids, prompt.media, count, twin=_TWIN)
            yield Run(_TWIN, ids, NO_MEDIA, count)
        else:
            yield Run(name, ids, prompt.media, count)


def _spliced(run: Run) -> bool:
    return bool(run.media.inputs or run.media.features)


def _write(stream: Stream, run: Run, model: Model, boundaries: tuple[int, ...], bounds: _Bounds) -> None:
    seen = watched(model, run.ids, run.media, boundaries)
    bounds.see(seen, moved(model, run.ids, run.media, seen, bounds.precision.rounding))
    inputs = {"input_ids": seen.pop("input_ids"), "position_ids": seen.pop("position_ids")}
    inputs["hidden_states"] = seen["hidden_states.0"]
    for modality, token in media_ids(model.config).items():
        inputs[f"{modality}_features"] = inputs["hidden_states"][run.ids == token]
    for kind, tensors in (("input", inputs), ("expected", seen)):
        for name, tensor in tensors.items():
            if (key := f"{run.name}/{kind}/{name}") in stream.specs:
                stream.write(key, tensor.to(torch.int32 if not tensor.is_floating_point() else torch.float32).numpy())


@dataclass
class _Bounds:
    """Collects, over the runs, what the tolerances depend on."""

    precision: tolerances.Precision
    largest: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    def see(self, seen: Tensors, nudged: Mapping[str, float]) -> None:
        """One run's values, and how far a nudge moved them."""
        for name in ("per_layer_identity", "per_layer_inputs", "hidden_states.0", *nudged):
            self.largest[name] = max(self.largest.get(name, 0.0), float(seen[name].abs().max()))
        for name, far in nudged.items():
            self.moved[name] = max(self.moved.get(name, 0.0), far)

    def tolerances(self) -> dict[str, reference.Tolerance]:
        """One for each name."""
        return {
            name: tolerances.of_nudge(largest, self.moved[name], self.precision)
            if name in self.moved
            else tolerances.of_rounding(name, largest, self.precision)
            for name, largest in self.largest.items()
        }


def _metadata(
    request: Request, config: Gemma4Config, found: Prompts, runs: list[Run], stages: Stages
) -> dict[str, Any]:
    """All that the reference says of itself but the tolerances: see `g4patch/reference.py`."""
    local = Path(request.model).is_dir()
    return {
        "schema": reference.SCHEMA,
        "model": "right",
        "source": {
            "model": Path(request.model).resolve().name if local else request.model,
            "revision": getattr(config, "_commit_hash", None),
            "class": Model.__name__,
            "dtype": request.dtype,
            "attention": "eager",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "precision": request.precision,
        },
        "token_ids": {**media_ids(config), "pad": pad_id(config)},
        "layers": config.text_config.num_hidden_layers,
        "stages": [list(stage) for stage in stages],
        "runs": {run.name: _about(run, config) for run in runs},
        **found.about,
    }


def _about(run: Run, config: Gemma4Config) -> dict[str, Any]:
    spliced = [name for name, count in rows(config, run.ids).items() if count] if _spliced(run) else []
    about: dict[str, Any] = {"prompt": run.prompt, "steps": run.steps, "media": spliced}
    return {**about, "without_media": run.twin} if run.twin else about
