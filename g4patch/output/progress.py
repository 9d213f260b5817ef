"""Progress on stderr, only on a terminal, only for work that takes long enough to wonder."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from g4patch.copying import Progress as Reporter


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
