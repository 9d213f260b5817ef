"""What a user may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from g4patch.copying import Progress, silent
from g4patch.digests import Hashed
from g4patch.thresholds import Thresholds
from g4patch.tokens import TokenFlags


@dataclass(frozen=True)
class Options:
    """What a user may ask for.

    `select` and `ignore` name rules: all are run where `select` is empty. `unsafe` also applies edits that are not
    safe. `reference` is used in place of the one beside the bundle, `gates` in place of the thresholds in it.
    `required` names checks that must not be skipped. `compute_unit` is cpu, gpu, ane or all: `verify` also runs the
    bundle there. `hashed` says which files are hashed where the work ends well.
    """

    tokens: TokenFlags = field(default_factory=TokenFlags)
    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    unsafe: bool = False
    reference: Path | None = None
    gates: Thresholds | None = None
    required: frozenset[str] = frozenset()
    compute_unit: str = ""
    hashed: Hashed = Hashed.NOTHING
    progress: Progress = silent


DEFAULTS = Options()
