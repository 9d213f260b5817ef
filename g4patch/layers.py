"""Layer by layer, how far the looked-up rows of media ids are from the reference: where the fault shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.metrics import distance
from g4patch.report import LayerDistance

Array = NDArray[Any]


@dataclass
class MediaRows:
    """Media rows of a graph's `per_layer_identity`, `[N, L, D]` a piece: what came out and what was expected.

    `layers` numbers the slices, where they are not those of layer 0 and on.
    """

    layers: tuple[int, ...] = ()
    actual: list[Array] = field(default_factory=list)
    expected: list[Array] = field(default_factory=list)

    def add(self, actual: Array, expected: Array, is_media: NDArray[np.bool_]) -> None:
        """Keep the media rows of one prompt. `[1, S, L, D]` both; `is_media` `[S]`."""
        if expected.ndim == 4 and expected.shape[:2] == (1, len(is_media)) and is_media.any():
            self.actual.append(actual[0, is_media])
            self.expected.append(expected[0, is_media])


def by_layer(found: Mapping[str, MediaRows], unpatched: Mapping[str, MediaRows]) -> tuple[LayerDistance, ...]:
    """Distances of each graph and layer; `unpatched` may lack graphs, and all of them where there is no such model."""
    distances: list[LayerDistance] = []
    for graph, rows in found.items():
        if not rows.actual:
            continue
        actual, expected = np.concatenate(rows.actual), np.concatenate(rows.expected)
        before = unpatched.get(graph)
        old = np.concatenate(before.actual) if before is not None and before.actual else None
        for at, layer in enumerate(rows.layers or range(expected.shape[1])):
            right = expected[:, at]
            was = distance(old[:, at], right) if old is not None else None
            distances.append(LayerDistance(graph, layer, distance(actual[:, at], right), was))
    return tuple(distances)


def telling(layers: Sequence[LayerDistance], most: int) -> tuple[LayerDistance, ...]:
    """The layers of one graph if they are at most `most`, else the first, the one furthest off, and the last."""
    if len(layers) <= most:
        return tuple(layers)
    furthest = max(layers, key=lambda one: (one.found.delta_norm, one.unpatched.delta_norm if one.unpatched else 0.0))
    return tuple(dict.fromkeys((layers[0], furthest, layers[-1])))
