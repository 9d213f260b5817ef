"""What the models of a bundle hand each other, and where that does not fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from g4patch.report import Subject
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

    def __str__(self) -> str:
        return f"{self.giver} puts out {_described(self.given)}, and {self.taker} takes {_described(self.taken)}"


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
        return f"{value.name} ({value.dtype or 'of a dtype that is not known'})"
    sizes = ", ".join("?" if size is None else str(size) for size in value.shape)
    return f"{value.name} ({value.dtype or '?'} [{sizes}])"


def model_of(config: Subject, subjects: Sequence[Subject], role: str) -> Subject | None:
    """The model that an onnxruntime-genai configuration gives a role to, if it is in the bundle."""
    if config.model.config is None:
        return None
    filename = config.model.config.section("model", role).get("filename")
    place = config.model.path.parent / filename if isinstance(filename, str) else None
    return next((subject for subject in subjects if subject.model.path == place), None)
