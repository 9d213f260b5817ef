"""What the models of a bundle hand each other, and where that does not fit together."""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from g4patch import chain
from g4patch.chain import Link
from g4patch.report import Subject
from g4patch.runtimes import Unavailable
from g4patch.stages import COMBINED, HIDDEN, Stage
from g4patch.view import Value


@dataclass(frozen=True)
class Handover:
    """A value that one model puts out and another takes, with what each of them calls itself in a sentence."""

    giver: str
    given: Value
    taker: str
    taken: Value

    @property
    def differences(self) -> tuple[str, ...]:
        """In what the two ends differ. What is not known, and dimensions that a run decides, agree with anything."""
        return tuple(_differences(self.given, self.taken))

    @property
    def mismatch(self) -> str:
        """The differences in a sentence."""
        ends = f"{self.giver} puts out {_described(self.given)}, and {self.taker} takes {_described(self.taken)}"
        return f"{ends}: they differ in {' and '.join(self.differences)}"


def _differences(given: Value, taken: Value) -> Iterator[str]:
    if given.dtype and taken.dtype and given.dtype != taken.dtype:
        yield "dtype"
    if given.shape is None or taken.shape is None:
        return
    rank = len(given.shape)
    if rank != len(taken.shape):
        yield "rank"
        return
    for axis, (one, other) in enumerate(zip(given.shape, taken.shape, strict=True)):
        if one is not None and other is not None and one != other:
            yield "width" if axis == rank - 1 else f"dimension {axis}"


def _described(value: Value) -> str:
    if value.shape is None:
        return f"{value.name} ({value.dtype or '?'})"
    sizes = ", ".join("?" if size is None else str(size) for size in value.shape)
    return f"{value.name} ({value.dtype or '?'} [{sizes}])"


def model_of(config: Subject, subjects: Sequence[Subject], role: str) -> Subject | None:
    """The model that an onnxruntime-genai configuration gives a role to, if it is in the bundle."""
    if config.model.config is None:
        return None
    filename = config.model.config.section("model", role).get("filename")
    place = config.model.path.parent / filename if isinstance(filename, str) else None
    return next((subject for subject in subjects if subject.model.path == place), None)


def between_stages(subjects: Sequence[Subject]) -> Iterator[tuple[Subject, str, Handover]]:
    """What stages of the model hand on: hidden states and per-layer inputs. Yields the taker, its graph, and the value.

    Of several functions of a stage that put a value out, the one counts that fits best. Nothing where it is not clear
    which models are stages, and in which order.
    """
    layers = next((subject.tokens.layers for subject in subjects if subject.tokens.layers), None)
    paths = {subject.model.path: subject for subject in subjects}
    if layers is None or len(paths) < 2:
        return
    folder = Path(os.path.commonpath(paths))
    places = {path.relative_to(folder).as_posix(): subject for path, subject in paths.items()}
    try:
        links = chain.ordered(folder, places, layers)
    except Unavailable:
        return
    for at, link in enumerate(links):
        for stage in link.stages:
            for name, meaning in stage.inputs.items():
                ends = _ends(links[:at], link, stage, name) if meaning.startswith((HIDDEN, COMBINED)) else []
                if ends:
                    yield link.subject, stage.graph.name, min(ends, key=lambda end: len(end.differences))


def _ends(before: Sequence[Link], taker: Link, stage: Stage, name: str) -> list[Handover]:
    """What the nearest earlier stage that puts out what an input takes puts it out as: one a function."""
    for giver in reversed(before):
        ends = [
            Handover(giver.name, one.graph.value(output), taker.name, stage.graph.value(name))
            for one in giver.stages
            for output, meaning in one.outputs.items()
            if meaning == stage.inputs[name]
        ]
        if ends:
            return ends
    return []
