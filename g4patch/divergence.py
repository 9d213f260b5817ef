"""Where a value first leaves a reference: the layer and the row, and how near each layer is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.evidence import Divergence, LayerCosine
from g4patch.metrics import Distance, distance
from g4patch.reference import Tolerance
from g4patch.stages import COMBINED, HIDDEN, IDENTITY

Array = NDArray[Any]

# In the order in which a layer computes them: what it reads, what it gets, what it hands on.
_STEPS = (IDENTITY, COMBINED, HIDDEN)
# Embeddings come before all layers, logits after.
_BEFORE, _AFTER = -1, 1 << 30


@dataclass(frozen=True)
class Compared:
    """One value of one run against the reference: where it diverges, and each layer's part.

    `share` is how much of the tolerance the largest difference takes: 1.0 is all of it.
    """

    name: str
    share: float
    divergence: Divergence | None
    cosines: tuple[LayerCosine, ...]

    @property
    def order(self) -> tuple[int, int]:
        """Where its divergence comes in the order of computation."""
        assert self.divergence is not None
        layer = self.divergence.layer
        step = next((at for at, name in enumerate(_STEPS) if self.name.startswith(name)), len(_STEPS))
        if layer is None:
            return (_BEFORE if self.name == f"{HIDDEN}0" else _AFTER, step)
        return (layer, step)


def beyond(found: Distance, bound: Tolerance) -> Iterator[str]:
    """What of a distance is more than a tolerance allows, a line each."""
    if found.max_abs > bound.max_abs:
        yield f"max |d| {found.max_abs:.1e} is over {bound.max_abs:.0e}, cosine {found.cosine:.4f}"
    if abs(found.norm_ratio - 1) > bound.norm_ratio:
        yield f"the norm is {found.norm_ratio:.4f} times what is expected"


def compare(
    run: str, name: str, actual: Array, expected: Array, bound: Tolerance, layers: Sequence[int], kinds: Sequence[str]
) -> Compared:
    """Compare a value `[1, S, ..]` with a reference; of `[1, S, L, D]` only the slices of `layers`, if there are any.

    `kinds` says of each row what its token is. What came out may hold NaN, which diverges. Raises ValueError where the
    shapes differ, there is nothing to compare, or the reference holds NaN or infinities.
    """
    parts = list(_parts(name, actual, expected, layers))
    finite = all(np.isfinite(part).all() for _, part, _ in parts)
    if not finite and all(np.isfinite(right).all() for _, _, right in parts):
        return Compared(name, np.inf, _first(run, name, parts, bound, kinds), ())
    found = distance(_joined(part for _, part, _ in parts), _joined(right for _, _, right in parts))
    cosines = tuple(
        LayerCosine(run, layer, name, near.cosine, near.max_abs)
        for layer, part, right in parts
        if layer is not None
        for near in [distance(part, right)]
    )
    off = any(beyond(found, bound))
    share = found.max_abs / bound.max_abs if bound.max_abs else float(bool(found.max_abs))
    return Compared(name, share, _first(run, name, parts, bound, kinds) if off else None, cosines)


# A layer, or None, with what came out for it and what was expected, `[S, ..]` both.
_Part = tuple[int | None, Array, Array]


def _parts(name: str, actual: Array, expected: Array, layers: Sequence[int]) -> Iterator[_Part]:
    if actual.shape != expected.shape:
        raise ValueError(f"the shape is {list(actual.shape)}, expected {list(expected.shape)}")
    if not expected.size or expected.ndim < 3 or expected.shape[0] != 1:
        raise ValueError(f"there is nothing to compare in shape {list(expected.shape)}")
    if name in (IDENTITY, COMBINED):
        if expected.ndim != 4 or max(layers, default=0) >= expected.shape[2]:
            raise ValueError(f"the shape is {list(expected.shape)}, and layer {max(layers, default=0)} is asked for")
        for layer in layers or range(expected.shape[2]):
            yield layer, actual[0, :, layer], expected[0, :, layer]
    elif name.startswith(HIDDEN) and (layer := int(name.removeprefix(HIDDEN))):
        yield layer - 1, actual[0], expected[0]
    else:
        yield None, actual[0], expected[0]


def _joined(parts: Iterator[Array]) -> Array:
    return np.concatenate([part.reshape(-1) for part in parts])


def _first(run: str, name: str, parts: Sequence[_Part], bound: Tolerance, kinds: Sequence[str]) -> Divergence:
    """The first layer with a row that is off, and that row; else the layer whose norm is off the most."""
    for layer, part, right in parts:
        errors = np.abs(part.astype(np.float64) - right).reshape(len(right), -1).max(axis=1)
        errors[~np.isfinite(errors)] = np.inf
        rows = np.flatnonzero(errors > bound.max_abs)
        if len(rows):
            row = int(rows[0])
            kind = kinds[row] if row < len(kinds) else "text"
            return Divergence(run, name, layer, row, kind, float(errors[rows].max()), bound.max_abs)
    near = [(distance(part, right), layer) for layer, part, right in parts]
    worst, layer = max(near, key=lambda item: abs(item[0].norm_ratio - 1))
    return Divergence(run, name, layer, None, "", worst.max_abs, bound.max_abs)


def first(compared: Sequence[Compared]) -> Divergence | None:
    """The divergence that comes first in the order of computation; None where nothing diverges."""
    off = [item for item in compared if item.divergence is not None]
    return min(off, key=lambda item: item.order).divergence if off else None


def row_kinds(ids: Array | None, media: Mapping[str, int], pad: int) -> tuple[str, ...]:
    """What each token of a prompt is: a modality, pad, or text."""
    names = {token: kind for kind, token in media.items()} | {pad: "pad"}
    return tuple(names.get(int(token), "text") for token in ids.reshape(-1)) if ids is not None else ()


def nearest(compared: Sequence[Compared]) -> tuple[LayerCosine, ...]:
    """For each run and layer, the cosine of the value that the layer computes last."""
    cosines = [cosine for item in compared for cosine in item.cosines]
    best: dict[tuple[str, int], LayerCosine] = {}
    for one in sorted(cosines, key=lambda one: _STEPS.index(one.name if one.name in _STEPS else HIDDEN)):
        best[one.run, one.layer] = one
    return tuple(sorted(best.values(), key=lambda one: (one.run, one.layer)))
