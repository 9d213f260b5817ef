"""A picture of what the checks measured: cosines by layer and divergences by row, before a patch and after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4patch.errors import MissingExtra, UsageError
from g4patch.report import Check, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg")
# What a diagram shows at least of the values it may hold.
_COSINES, _DIVERGENCES = (0.99, 1.0), (0.0, 1e-6)
# Text stays text in SVG, and the same report gives the same bytes.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "g4patch"}


@dataclass(frozen=True)
class Panel:
    """One diagram: a series of points, and the same before the patch, empty where that is not known.

    `low` and `high` are shown at least.
    """

    title: str
    across: str
    up: str
    x: tuple[int, ...]
    now: tuple[float, ...]
    before: tuple[float, ...]
    low: float
    high: float


def require(path: Path) -> None:
    """Raise UsageError for another kind of file, MissingExtra without the library that draws."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path} is no picture that can be drawn", f"give a name that ends in {' or '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no {path.parent}", "choose another --plot")
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib, which draws pictures, is not installed", "pip install 'g4patch[plot]'")


def save(reports: Sequence[Report], path: Path) -> None:
    """Draw all numbers of some reports. Raises UsageError where there are none, or the file cannot be written."""
    require(path)
    found = [panel for report in reports for panel in panels(report)]
    if not found:
        raise UsageError("no check gave numbers to plot", "give a --reference that has a prompt with media")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    across = min(2, len(found))
    down = math.ceil(len(found) / across)
    with rc_context(_STYLE):
        figure = Figure(figsize=(6 * across, 3.2 * down), layout="constrained")
        places = figure.subplots(down, across, squeeze=False).reshape(-1)
        for panel, axes in zip(found, places, strict=False):
            _draw(panel, axes)
        for axes in places[len(found) :]:
            axes.set_axis_off()
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", "choose another --plot") from error


def panels(report: Report) -> Iterator[Panel]:
    """A diagram for each model's looked-up rows, for each run of the chain, and for each run's logits."""
    for model in report.models:
        for check in model.checks:
            yield from _looked_up(model.subject.model.path.name, check)
            yield from _logits(check)
    for check in report.whole:
        yield from _chain(check)
        yield from _logits(check)


def _looked_up(model: str, check: Check) -> Iterator[Panel]:
    for graph in dict.fromkeys(one.graph for one in check.layers):
        ones = [one for one in check.layers if one.graph == graph]
        before = tuple(one.unpatched.cosine for one in ones if one.unpatched is not None)
        now, layers = tuple(one.found.cosine for one in ones), tuple(one.layer for one in ones)
        yield Panel(f"{model}: PLE of media rows", "layer", "cosine", layers, now, before, *_COSINES)


def _chain(check: Check) -> Iterator[Panel]:
    cosines = [one for stage in check.stages for one in stage.cosines]
    unpatched = [one for stage in check.stages for one in stage.unpatched]
    for run in dict.fromkeys(one.run for one in cosines):
        ones = [one for one in cosines if one.run == run]
        before = tuple(one.cosine for one in unpatched if one.run == run)
        now, layers = tuple(one.cosine for one in ones), tuple(one.layer for one in ones)
        yield Panel(f"chain: {run}", "layer", "cosine", layers, now, before, *_COSINES)


def _logits(check: Check) -> Iterator[Panel]:
    if check.logits is not None:
        before = dict(check.logits.unpatched_rows)
        for run, rows in check.logits.rows:
            yield Panel(
                f"logits: {run}", "row", "KL in nats", tuple(range(len(rows))), rows, before.get(run, ()), *_DIVERGENCES
            )


def _draw(panel: Panel, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    if len(panel.before) == len(panel.x):
        axes.plot(panel.x, panel.before, "x--", color="tab:red", label="before")
    axes.plot(panel.x, panel.now, "o-", color="tab:blue", label="now", markersize=4)
    axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
    # Rounding is not to fill a diagram.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, panel.low), max(high, panel.high))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
