"""One renderer a module: results in, something to print out. The table is what `--format` may name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO

from g4patch.output import github, json, sarif, text
from g4patch.output.shown import Shown
from g4patch.report import Result

# Takes the results of a run as they come, in the order given, and writes to the file.
Renderer = Callable[[Iterable[Result], IO[str], Shown], None]

RENDERERS: dict[str, Renderer] = {
    "text": text.render,
    "json": json.render,
    "sarif": sarif.render,
    "github": github.render,
}
