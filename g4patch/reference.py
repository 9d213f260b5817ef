"""References: stored activations that a bundle must reproduce.

A reference is one safetensors file, found as `<bundle>.reference.safetensors` or named by the user. Layout, schema 1
(S rows, V ids, L layers of the whole model, D per-layer width, H hidden width):

- tensors `<run>/input/<name>`: what is fed, one prompt a run, by the names of the graph's inputs; only what the outputs
  need. Names that `g4patch record` writes and that stand for a graph's own, whatever it calls them: `input_ids` integer
  `[1,S]`, `position_ids` integer `[1,S]`, `hidden_states` float `[1,S,H]` (the spliced embeddings, at the entry of
  layer 0), and `image_features`, `audio_features` and `video_features` float `[N,H]` (what was spliced in, by row).
  States start empty (zeros) unless they are given like inputs.
- tensors `<run>/expected/<name>`: what must come out. `per_layer_identity` float `[1,S,L,D]`, the looked-up rows times
  their scale; `per_layer_inputs` float `[1,S,L,D]`, what the layers get; `hidden_states.<k>` float `[1,S,H]`, at the
  entry of layer k (k = 0: the spliced embeddings; k = L: after the last layer, before the final norm); `logits` float
  `[1,S,V]`; any other name is a graph output's, or that of a state: what it holds after the run.
- metadata `g4patch`: a JSON object with `schema` (1), `model` ("right", or "broken" for activations of a model with
  the fault), `source` (which model and code produced it), `token_ids` (image, audio, video, pad; a modality may be
  missing), and `tolerances`: for each expected name `max_abs` (largest difference allowed), `norm_ratio` (how far the
  ratio of the norms may be from 1) and a `reason` for both.

Metadata that may be missing:

- `layers`: L, and `stages`: `[[0, 21], [21, 42]]`, the first layer of each stage and the one after its last.
- `runs`: `{run: {"prompt": P, "steps": N, "media": ["image", ...], "without_media": twin}}`. The ids of a run are P
  tokens of the prompt and then N that the model itself generated from it, greedily: row P-1+i must predict token P+i,
  so that teacher forcing is one prompt. `without_media` names the run of the same ids, continuation included, in which
  no features were spliced in: the media rows of its embeddings are the pad id's, as Hugging Face leaves them where it
  is handed no picture.
- `image`, `audio`, `video`: what the media were.
- `gates`: `{"source": ..., "after": {"max_kl": x, "argmax": y, "reason": ...}, "teacher_forced": {...}}`, thresholds
  for the logits of the rows after the media and for the continuation.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch import thresholds
from g4patch.errors import BundleError
from g4patch.thresholds import Thresholds

Array = NDArray[Any]

SCHEMA = 1
# What reading metadata of strangers may raise: numbers that fit nothing and endless nesting are among it.
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_SUFFIX = ".reference.safetensors"
# The reference of a bundle folder as a whole, in it.
_OF_FOLDER = "reference.safetensors"


@dataclass(frozen=True)
class Tolerance:
    """How far a tensor may be off. A cosine cannot see a missing scale; these two can."""

    max_abs: float
    norm_ratio: float
    reason: str


@dataclass(frozen=True)
class Run:
    """One prompt: what is fed, and what must come out.

    The last `steps` of its ids are what the model itself generated after the first `prompt` of them. `without_media`
    names the run of the same ids without the features, "" if there is none.
    """

    name: str
    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]
    prompt: int = 0
    steps: int = 0
    without_media: str = ""


@dataclass(frozen=True)
class Reference:
    """A reference file as read. `token_ids` holds the ids that the activations were made with.

    `layers` is the number of layers of the whole model, None for a reference of one graph, in that graph's own names.
    """

    path: Path
    model: str
    source: Mapping[str, Any]
    token_ids: Mapping[str, int]
    tolerances: Mapping[str, Tolerance]
    runs: tuple[Run, ...]
    layers: int | None = None
    gates: Thresholds | None = None


def beside(bundle: Path) -> Path | None:
    """The reference that lies beside a bundle, if there is one."""
    if not bundle.name:  # the root of a file system
        return None
    path = bundle.with_name(bundle.name + _SUFFIX)
    return path if path.is_file() else None


def of_bundle(bundle: Path, models: Sequence[Path], named: Path | None) -> dict[Path, Reference | None]:
    """For each model of a bundle the reference `named`, else the one beside it, else the one in the bundle's folder.

    Under the bundle's own path is the one for all models together: for a folder the one in it, else the one beside it.
    Raises BundleError.
    """
    inside = bundle / _OF_FOLDER
    of_all = inside if bundle not in models and inside.is_file() else beside(bundle)
    places = {bundle: named or of_all} | {path: named or beside(path) or of_all for path in models}
    loaded = {place: load(place) for place in dict.fromkeys(places.values()) if place is not None}
    return {path: loaded[place] if place is not None else None for path, place in places.items()}


def load(path: Path) -> Reference:
    """Read a reference. Raises BundleError where it is not one, or contradicts itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            metadata = json.loads((file.metadata() or {}).get("g4patch", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
        return _reference(path, metadata, tensors)
    except (*_MALFORMED, SafetensorError) as error:
        raise BundleError(
            f"{path} is not a reference: {error}", "see the layout in g4patch/reference.py, or record it again"
        ) from error


def _reference(path: Path, metadata: Any, tensors: Mapping[str, Array]) -> Reference:
    if not isinstance(metadata, dict) or metadata.get("schema") != SCHEMA:
        raise ValueError(f"its metadata has no g4patch entry of schema {SCHEMA}")
    if metadata["model"] not in ("right", "broken"):
        raise ValueError(f"it is of a {metadata['model']!r} model, neither right nor broken")
    runs: dict[str, dict[str, dict[str, Array]]] = {}
    for name, tensor in sorted(tensors.items()):
        run, kind, what = (*name.split("/", 2), "", "")[:3]
        if kind not in ("input", "expected"):
            raise ValueError(f"tensor {name} is neither an input nor expected")
        if what == "input_ids" and (tensor.dtype.kind not in "iu" or tensor.ndim != 2 or len(tensor) != 1):
            raise ValueError(f"tensor {name} is no row of token ids: {tensor.dtype}{list(tensor.shape)}")
        runs.setdefault(run, {"input": {}, "expected": {}})[kind][what] = tensor
    tolerances = {
        name: Tolerance(float(entry["max_abs"]), float(entry["norm_ratio"]), str(entry["reason"]))
        for name, entry in metadata["tolerances"].items()
    }
    unbounded = {name for run in runs.values() for name in run["expected"]} - tolerances.keys()
    if unbounded:
        raise ValueError(f"it states no tolerance for {', '.join(sorted(unbounded))}")
    if not all(0 <= bound.max_abs < np.inf and 0 <= bound.norm_ratio < np.inf for bound in tolerances.values()):
        raise ValueError("a tolerance is not a number of 0 or more")
    return Reference(
        path,
        metadata["model"],
        dict(metadata.get("source", {})),
        {name: int(token) for name, token in metadata["token_ids"].items()},
        tolerances,
        tuple(
            Run(name, parts["input"], parts["expected"], **_told(name, parts["input"], metadata.get("runs", {}), runs))
            for name, parts in runs.items()
        ),
        _layers(metadata.get("layers")),
        thresholds.of_metadata(metadata.get("gates")),
    )


def _told(name: str, inputs: Mapping[str, Array], told: Mapping[str, Any], runs: Collection[str]) -> dict[str, Any]:
    """What the metadata says of a run. Raises ValueError where its tensors, or the other runs, contradict it."""
    entry = told.get(name, {})
    prompt, steps, twin = int(entry.get("prompt", 0)), int(entry.get("steps", 0)), entry.get("without_media") or ""
    if twin and twin not in runs:
        raise ValueError(f"run {name} names {twin} as the one without media, and there is none")
    ids = inputs.get("input_ids")
    if steps and (steps < 0 or prompt < 1 or ids is None or ids.size != prompt + steps):
        raise ValueError(f"run {name} has not the {prompt} + {steps} token ids that it speaks of")
    return {"prompt": prompt, "steps": steps, "without_media": str(twin)}


def _layers(value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"it is of a model of {value!r} layers")
    return value
