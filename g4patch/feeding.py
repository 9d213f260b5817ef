"""Feed a stage with what a reference names, and read what it names out of the stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch import formats
from g4patch.cone import depends_on
from g4patch.downstream import is_integer
from g4patch.formats import Model
from g4patch.ple import GraphAnalysis
from g4patch.reference import Run
from g4patch.runtimes import Unavailable
from g4patch.stages import COMBINED, HIDDEN, IDENTITY, Stage
from g4patch.view import Graph, Value

Array = NDArray[Any]

# Of these inputs the second axis is that of the prompt's rows.
_BY_ROW = ("input_ids", "position_ids")


@dataclass(frozen=True)
class Feeds:
    """Arrays by graph input. `missing` are inputs that nothing gives, `filled` those derived, for a person to read."""

    arrays: Mapping[str, Array]
    missing: frozenset[str]
    filled: tuple[str, ...]


def given(run: Run) -> dict[str, Array]:
    """All tensors of a run of a whole model, by the names that references use: each may be fed to a later stage."""
    tensors = {**run.expected, **run.inputs}
    if "hidden_states" in tensors:
        tensors[f"{HIDDEN}0"] = tensors.pop("hidden_states")
    return tensors


def feeds(stage: Stage, tensors: Mapping[str, Array], media: Mapping[str, int]) -> Feeds:
    """The inputs of a stage: what `tensors` hold, else what follows from them and the prompt, else nothing.

    `media` are the placeholder ids by modality.
    """
    arrays: dict[str, Array] = {}
    missing, filled = set[str](), []
    for value in stage.graph.inputs:
        name = stage.inputs.get(value.name, value.name)
        if name in tensors:
            fitted = _fitted(tensors[name], value) if name == COMBINED else tensors[name]
        elif value.name in stage.graph.states:
            continue  # runtimes start them empty
        else:
            fitted, what = _derived(value, name, tensors, media)
            filled += [what] if what else []
        if fitted is not None:
            arrays[value.name] = fitted
        else:
            missing.add(value.name)
    return Feeds(arrays, frozenset(missing), tuple(filled))


def takes(stage: Stage, arrays: Mapping[str, Array]) -> bool:
    """Whether the declared shapes of a stage's inputs admit some arrays."""
    return admits(stage.graph, arrays)


def admits(graph: Graph, arrays: Mapping[str, Array]) -> bool:
    """Whether the declared shapes of a graph's inputs, as far as they are, admit some arrays."""
    for value in graph.inputs:
        shape = value.shape
        if value.name in arrays and shape is not None:
            own = arrays[value.name].shape
            if len(own) != len(shape) or any(size not in (None, dim) for size, dim in zip(shape, own, strict=True)):
                return False
    return True


def only_of(stages: Iterable[Stage]) -> str:
    """The lengths of prompts that stages take, as the end of a sentence; "" where no shape fixes one."""
    inputs = (
        (stage.inputs.get(value.name, value.name), value.shape or ())
        for stage in stages
        for value in stage.graph.inputs
    )
    rows = sorted({shape[1] for name, shape in inputs if name in _BY_ROW and len(shape) > 1 and shape[1]})
    return f", only of {' or '.join(map(str, rows))}" if rows else ""


def _fitted(rows: Array, value: Value) -> Array | None:
    """Per-layer inputs, `[1, S, L, D]` or `[1, S, L*D]`, in the shape of an input, which may be either."""
    shape = value.shape or ()
    if rows.ndim < 3 or not rows.size:
        return None
    flat = rows.reshape(*rows.shape[:2], -1)
    if len(shape) == 3 and shape[-1] in (None, flat.shape[-1]):
        return flat
    inner = [size for size in shape[-2:] if size is not None] if len(shape) == 4 else []
    return flat.reshape(*rows.shape[:2], *inner) if math.prod(inner) == flat.shape[-1] and len(inner) == 2 else None


def _derived(
    value: Value, name: str, tensors: Mapping[str, Array], media: Mapping[str, int]
) -> tuple[Array | None, str]:
    """An input that follows from the prompt: positions, a mask that hides nothing, empty caches, spliced rows."""
    ids = tensors.get("input_ids")
    shape = value.shape
    if ids is None or ids.ndim != 2 or shape is None:
        return None, ""
    length, label = ids.shape[-1], value.name.lower()
    if is_integer(value) and len(shape) == 2:
        if "position" in label:
            return np.arange(length, dtype=np.int64)[None], f"{value.name} = 0, 1, .."
        if "mask" in label:
            return np.ones((1, length), np.int64), f"{value.name} = 1"
    if len(shape) == 4 and not is_integer(value) and any(word in label for word in ("past", "cache")):
        # Of the sizes that are open, the first is the batch and the other the rows of earlier prompts: none.
        sizes = [size if size is not None else int(axis == 0) for axis, size in enumerate(shape)]
        return np.zeros(sizes, np.float32), "empty caches"
    spliced, token = tensors.get(f"{HIDDEN}0"), media.get(name.removesuffix("_features"))
    if name.endswith("_features") and spliced is not None and token is not None and spliced.shape[:2] == ids.shape:
        return spliced[0, ids[0] == token], f"{value.name} = its rows of the spliced embeddings"
    return None, ""


def computed(
    model: Model, stage: Stage, fed: Feeds, names: Collection[str], expected: Mapping[str, Array]
) -> dict[str, Array]:
    """Values of a stage by the names of `stage.taps`, in the shapes that are expected of them. Raises Unavailable."""
    taps = {name: stage.taps[name] for name in names}
    arrays = formats.of(model).probe(model, stage.graph.name).run(fed.arrays, list(dict.fromkeys(taps.values())))
    return {name: shaped(stage.analysis, name, arrays[value], expected.get(name)) for name, value in taps.items()}


def parts(stage: Stage, name: str, array: Array) -> Array:
    """Of a value `[1, S, L, D]` the slices of the layers that a stage computes; any other value as it is."""
    per_layer = name in (IDENTITY, COMBINED) and array.ndim == 4 and max(stage.layers, default=0) < array.shape[2]
    return array[:, :, list(stage.layers)] if per_layer and stage.layers else array


def within_reach(stage: Stage, fed: Feeds, name: str) -> bool:
    """Whether a value needs no input that is missing."""
    return not depends_on(stage.graph, stage.taps[name]) & fed.missing


def shaped(analysis: GraphAnalysis, name: str, array: Array, expected: Array | None) -> Array:
    """A value as references hold it: rows times the scale that the graph applies to them, `[1, S, L, D]`."""
    if name == IDENTITY and analysis.lookup is not None:
        if analysis.lookup.scale is None:
            raise Unavailable("the scale of the looked-up rows is not clear")
        array = array.astype(np.float32) * np.float32(analysis.lookup.scale)
    if name in (IDENTITY, COMBINED) and expected is not None and array.size == expected.size:
        return array.reshape(expected.shape)
    return array
