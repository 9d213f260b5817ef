"""GitHub's workflow commands: each problem becomes an annotation of the file, and a line tells how each bundle ended.

Layout and escapes: <https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions>, and for the
escapes `packages/core/src/command.ts` of <https://github.com/actions/toolkit>.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from g4patch.output.layout import printable
from g4patch.output.problems import problems, shown_path
from g4patch.output.shown import Shown
from g4patch.report import Failure, Result, Severity

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def render(results: Iterable[Result], file: IO[str], shown: Shown) -> None:
    """Write the commands of each result as it comes."""
    for result in results:
        if isinstance(result, Failure):
            hint = f". {result.error.hint}" if result.error.hint else ""
            file.write(_command("error", result.bundle, "not worked on", f"{result.error.message}{hint}"))
        else:
            for problem in problems(result):
                where = f"{problem.graph}: " if problem.graph else ""
                name = _COMMANDS[problem.severity]
                file.write(_command(name, shown_path(problem.file), problem.rule, where + problem.message))
            file.write(_plain(f"{result.path}: {result.outcome}"))
        file.flush()


def _command(name: str, file: str, title: str, message: str) -> str:
    return f"::{name} file={_property(file)},title={_property(title)}::{_data(message)}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _plain(text: str) -> str:
    """A line that is no command, whatever strangers called their files: a colon cannot start it, nor `##[` occur."""
    return f"g4patch: {printable(text)}\n".replace("##[", "## [")
