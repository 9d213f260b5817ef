"""What was asked to be shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shown:
    """`ple`: each lookup; `digests`: the SHA-256 of each file; `several`: the run is over more than one bundle."""

    ple: bool = False
    digests: bool = False
    several: bool = False
