"""Print the table mutant x check: `python -m tests.mutants [onnx|coreml|coreai ...]`, all formats by default.

Exits with 1 where a mutant survives, or a check kills none.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from g4patch.report import Status
from tests.mutants import Judged, Mutant, Workshop, benches

_WORDS = {Status.FAILED: "killed", Status.PASSED: "-", Status.SKIPPED: "skipped"}


def table(name: str, results: Sequence[tuple[Mutant, Judged]]) -> Table:
    """A row a mutant, a column a check, and how many each check killed."""
    grid = Table(title=name, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    checks = list(results[0][1].checks)
    grid.add_column("mutant")
    for check in checks:
        grid.add_column(check)
    for mutant, judged in results:
        style = None if judged.killers else "bold red"
        grid.add_row(mutant.name, *(_WORDS[judged.checks[check].status] for check in checks), style=style)
    kills = [sum(check in judged.killers for _, judged in results) for check in checks]
    grid.add_row(f"killed, of {len(results)}", *map(str, kills), style="bold")
    return grid


def main(arguments: Sequence[str] | None = None) -> int:
    logging.getLogger("coremltools").setLevel(logging.ERROR)  # it says what it lacks off a Mac
    found = benches()
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which check kills which wrong fix?")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"{', '.join(found)}; default: all")
    chosen = parser.parse_args(arguments).formats or list(found)
    if unknown := set(chosen) - found.keys():
        parser.error(f"there is no format {', '.join(sorted(unknown))}")
    console, sound = Console(highlight=False), True
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            results = list(Workshop(found[name], Path(folder)).judge_all())
        console.print(table(found[name].name, results), "")
        killers = [judged.killers for _, judged in results]
        sound &= all(killers) and frozenset.union(*killers) == results[0][1].checks.keys()
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
