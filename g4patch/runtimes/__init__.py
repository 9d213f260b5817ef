"""Runtimes that run a small part of a model: what the checks ask of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Unavailable(Exception):
    """Something cannot be checked here. The check is skipped with this reason; it has not passed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Refused(Exception):
    """A runtime that is there does not take a model, or does not get through it."""


class Probe(Protocol):
    """Runs parts of one graph, sliced out of it, on the model's own weights. All raise Unavailable."""

    @property
    def runtime(self) -> str:
        """Name and version of the runtime that judges."""

    def lookup(self, ids_input: str, output: str, ids: NDArray[np.int64]) -> NDArray[Any]:
        """The value `output` for token ids `[N]` fed through the graph input `ids_input`: `[N, W]` in its dtype."""

    def table(self, index: str, output: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The same with rows `[N]` fed as the gather's index, past everything that computes it: `[N, W]`."""

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Values for one prompt. `feeds` are by graph input, cast to its dtype; those that are not needed are left.

        States start with what is fed to them, else with zeros; one among `outputs` is what it holds after the run.
        """


class Device(Protocol):
    """Runs a whole graph where users run it. Of its values only outputs can be seen."""

    @property
    def runtime(self) -> str:
        """Name and version of the runtime that judges, and what it runs on."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The graph's outputs that can be seen."""

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All outputs for one prompt, by name. `feeds` are cast to the inputs' dtypes; others are left.

        Raises Unavailable where the runtime is not here, Refused where it is and cannot do it.
        """
