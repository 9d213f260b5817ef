"""What a user asks `record` for. Needs nothing but Python, so that it can be refused before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from g4patch.errors import UsageError

INSTALL = "pip install 'g4patch[reference]'"

# Told, before a model is loaded, at most how many bytes will be written, and of what.
Announce = Callable[[int, str], None]

Stages = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Request:
    """A model, by hub name or folder, and what to run it on.

    `prompt` goes through the model's processor, `ids` are used as they are. `steps`: how many tokens it goes on for, at
    most. `stages`: the first layer of each and the one after its last; all layers are one stage without. `dtype` is
    what the model computes in, `precision` what the bundles do that it is a reference for.
    """

    model: str
    image: Path | None = None
    audio: Path | None = None
    prompt: str | None = None
    ids: tuple[int, ...] | None = None
    steps: int = 64
    stages: Stages | None = None
    dtype: str = "float32"
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.ids is not None and self.prompt is not None:
            raise UsageError("--prompt and --ids are both given", "give one of them")
        if self.steps < 0:
            raise UsageError(f"--steps is {self.steps}", "give 0 or more")


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids from a list, or from a file that holds one; between ids are commas, spaces or lines."""
    hint = "give ids, such as 2,7,258880, or a file of them"
    try:
        ids = _integers(text) if text[:1].isdigit() else _integers(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--ids {text[:40]}: neither token ids nor a file of them", hint) from error
    if not ids:
        raise UsageError(f"--ids {text[:40]}: there are none", hint)
    return ids


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.split(r"[\s,\[\]]+", text) if part)


def parse_stages(text: str) -> Stages:
    """Stages from `0:21,21:42`. Raises UsageError unless they follow one another from layer 0."""
    found = re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text.replace(" ", ""))
    pairs = [part.split(":") for part in text.split(",")] if found else []
    stages = tuple((int(first), int(end)) for first, end in pairs)
    starts = (0, *(end for _, end in stages))
    if not stages or any(first != start or end <= first for (first, end), start in zip(stages, starts, strict=False)):
        raise UsageError(
            f"--split {text} are no stages that follow one another from layer 0", "such as --split 0:21,21:42"
        )
    return stages
