"""How text is laid out: rows with labels, words for verdicts, styles. All of it reads without colour."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from g4patch.report import Severity, Status
from g4patch.verdicts import Verdict

GOOD, BAD, UNSURE = "bold green", "bold red", "bold yellow"
VERDICT_STYLE = {
    Verdict.PATCHED: GOOD,
    Verdict.HOST_SIDE: GOOD,
    Verdict.NO_PLE: GOOD,
    Verdict.OTHER_SCHEME: GOOD,
    Verdict.AMBIGUOUS: UNSURE,
    Verdict.CONDITIONAL: UNSURE,
}
STATUS_STYLE = {Status.PASSED: GOOD, Status.FAILED: BAD, Status.SKIPPED: UNSURE}
SEVERITY_STYLE = {Severity.ERROR: BAD, Severity.WARNING: UNSURE, Severity.NOTE: "bold"}

# What a verdict means, for people who have not read the documentation.
MEANING = {
    Verdict.PATCHED: "media ids read the pad row, as they should",
    Verdict.PARTIAL: "some media ids read their own row instead of the pad row",
    Verdict.RAW: "media ids read their own rows: the model does not see the picture",
    Verdict.CLOBBERED: "ids that should read their own row read another",
    Verdict.ZERO_ROW: "media rows are zeros instead of the pad row",
    Verdict.CONDITIONAL: "another input decides which row is read: not decided here",
    Verdict.HOST_SIDE: "the rows come in as an input: the host looks them up, not this graph",
    Verdict.OTHER_SCHEME: "media rows are marked by ids outside the vocabulary: nothing to mask",
    Verdict.NO_PLE: "nothing here looks per-layer embeddings up",
    Verdict.AMBIGUOUS: "there may be a lookup that is not understood: nothing is claimed",
}


def spread(left: Text, right: Text) -> RenderableType:
    """One line with something at either end; the left part wraps."""
    grid = Grid.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(safe(left), safe(right))
    return grid


def indented(content: RenderableType) -> Padding:
    """Two columns in."""
    return Padding(safe(content) if isinstance(content, Text) else content, (0, 0, 0, 2))


def rows(rows: Iterable[tuple[str | Text, str | Text]], width: int = 12) -> Padding:
    """Labels with their contents, which wrap below themselves, two columns in."""
    return indented(hanging(rows, width))


def hanging(rows: Iterable[tuple[str | Text, str | Text]], width: int) -> Grid:
    """Labels with their contents, which wrap below themselves."""
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, content in rows:
        grid.add_row(*(safe(cell) if isinstance(cell, Text) else Text(printable(cell)) for cell in (label, content)))
    return grid


def printable(text: str) -> str:
    """Names and messages hold bytes of strangers: nothing in them is a control code."""
    return "".join(character if character.isprintable() else "?" for character in text)


def safe(text: Text) -> Text:
    """The text without the control codes of strangers; its own lines stay."""
    text.plain = "\n".join(printable(line) for line in text.plain.split("\n"))
    return text


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(printable(str(path)))


def in_units(size: float) -> str:
    """A number of bytes as a person says it, in powers of ten."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def change(form: str, was: float, now: float, both: bool) -> str:
    """A number, or what it was and what it is now, in 19 columns."""
    return f"{f'{form.format(was)} -> ' if both else ''}{form.format(now)}".ljust(18) + " "
