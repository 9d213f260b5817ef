"""Progress on stderr, only on a terminal, only for work that takes long enough to wonder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from g4patch.batch import Watch
from g4patch.copying import Progress as Reporter
from g4patch.output.layout import printable


def reporter(console: Console) -> Reporter:
    """A function that shows `(what, bytes done, bytes in all)` as a bar; silent where there is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bar.start()
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)
        if all(task.finished for task in bar.tasks):
            bar.stop()

    return report


@contextmanager
def bundles(console: Console, total: int) -> Iterator[Watch]:
    """A function that shows how many bundles of several are done, and which are being worked on."""
    if total == 1 or not console.is_terminal:
        yield lambda done, names: None
        return
    bar = Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task("", total=total)

    def watch(done: int, names: Sequence[str]) -> None:
        bar.update(task, completed=done, description=printable(", ".join(names)))
        # Results may go to the same terminal: the bar is out of their way.
        if names:
            bar.start()
        else:
            bar.stop()

    try:
        yield watch
    finally:
        bar.stop()
