"""Thresholds for logits: what a reference asks for, what a user asks for, and presets named after their source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from g4patch.errors import UsageError


@dataclass(frozen=True)
class Thresholds:
    """Limits for logits; None asks for nothing. `source` says who set them.

    `max_kl` (nats) and `argmax` (a fraction) hold for the rows after the media. `top1` is the least fraction of a
    continuation that must be predicted with the media in the prompt, `lead` how far it must be above that without.
    """

    source: str = ""
    max_kl: float | None = None
    argmax: float | None = None
    top1: float | None = None
    lead: float | None = None

    @property
    def set(self) -> dict[str, float]:
        """The limits that are set, by name."""
        limits = {name: getattr(self, name) for name in _NAMES}
        return {name: limit for name, limit in limits.items() if limit is not None}


_NAMES = tuple(field.name for field in fields(Thresholds) if field.name != "source")

# maxtext: the limits of its logit check for Gemma 4 with an image (AI-Hypercomputer/maxtext#4790).
# issue-83: apple/coreai-models#83 accepted a run that predicted 58 of 64 tokens with the image and 43 without. A right
# bundle must predict at least as many, and the image must be worth at least as many tokens.
PRESETS = {
    "maxtext": Thresholds("preset maxtext", max_kl=1.26e-3, argmax=0.995),
    "issue-83": Thresholds("preset issue-83", top1=58 / 64, lead=(58 - 43) / 64),
}


def parse(text: str) -> Thresholds:
    """Thresholds from `PRESET` or `name=number`, or several of them with commas. Raises UsageError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        limit = _number(name, number) if name in _NAMES else None
        if not equals and name in PRESETS:
            found |= PRESETS[name].set
        elif equals and limit is not None:
            found[name] = limit
        else:
            known = f"{', '.join(PRESETS)}, or {', '.join(f'{known}=NUMBER' for known in _NAMES)}"
            raise UsageError(f"--gates does not know {part.strip()!r}", f"give {known}")
    return Thresholds(PRESETS[text].source if text in PRESETS else f"--gates {text}", **found)


def of_metadata(entry: Any) -> Thresholds | None:
    """The thresholds of a reference's metadata `gates`. Raises ValueError where they are none."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or not all(isinstance(part, Mapping) for part in _parts(entry)):
        raise ValueError("its gates are no object of objects")
    given = {name: value for part in _parts(entry) for name, value in part.items() if name != "reason"}
    limits: dict[str, float] = {}
    for name, value in given.items():
        limit = _number(name, value) if name in _NAMES else None
        if limit is None:
            raise ValueError(f"its gates hold {name}: {value!r}")
        limits[name] = limit
    return Thresholds(f"the reference ({entry.get('source', 'no source')})", **limits) if limits else None


def _parts(entry: Mapping[str, Any]) -> list[Any]:
    return [entry.get("after", {}), entry.get("teacher_forced", {})]


def _number(name: str, text: Any) -> float | None:
    """A limit, if it is one: of 0 or more, fractions up to 1."""
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    most = math.inf if name == "max_kl" else 1.0
    return number if math.isfinite(number) and 0 <= number <= most else None
