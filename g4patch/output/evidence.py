"""The numbers behind the checks of a whole model as small tables and sparklines, 63 columns wide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from g4patch.evidence import Divergence, LayerCosine, LogitEvidence, Segment, StageEvidence, TeacherForced
from g4patch.output.layout import change
from g4patch.stages import LOGITS

_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_WIDTH = 40
# A cosine that is told as a number, no more; a divergence that is rounding, whose shape tells nothing.
_ALIKE, _ROUNDING = 0.9999, 1e-9


def sparkline(values: Sequence[float], low: float, high: float, pick: Callable[..., float], bars: str = _BARS) -> str:
    """Values as a line of bars, from `low` to `high`; `pick` (min or max) tells for those that share a bar."""
    step = max(1, math.ceil(len(values) / _WIDTH))
    shown = [pick(values[at : at + step]) for at in range(0, len(values), step)]
    span = high - low if high > low else 1.0
    return "".join(bars[round(min(max((value - low) / span, 0.0), 1.0) * (len(bars) - 1))] for value in shown)


def bars_for(encoding: str) -> str:
    """Bars that an encoding has."""
    try:
        _BARS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return _PLAIN_BARS
    return _BARS


def stages(found: Sequence[StageEvidence], bars: str) -> Iterator[Text]:
    """Where each stage diverges, fed either way, and how near its layers are."""
    if found:
        yield Text(f"{'stage':<18}{'layers':<9}{'fed from the last':<18}from the reference", "bold")
    for stage in found:
        layers = "-".join(map(str, dict.fromkeys((stage.layers[0], stage.layers[-1])))) if stage.layers else "-"
        alone = "not known" if stage.alone is None and stage.alone_unknown else _place(stage.alone)
        yield Text(f"{stage.name[-17:]:<18}{layers:<9}{_place(stage.chained):<18}{alone}")
    cosines = [one for stage in found for one in stage.cosines]
    off = dict.fromkeys(one.run for one in cosines if one.cosine < _ALIKE)
    for run in off:
        yield _cosines(run, [one for one in cosines if one.run == run], bars)
    if cosines and len(off) < len({one.run for one in cosines}):
        yield Text(f"cosine by layer, {'other runs' if off else 'all runs'}: {_ALIKE} or more")


def _place(off: Divergence | None) -> str:
    if off is None:
        return "agrees"
    layer = f"layer {off.layer}" if off.layer is not None else "logits" if off.name == LOGITS else "embeds"
    return f"{layer}, row {off.row}" if off.row is not None else f"{layer}, norm"


def _cosines(run: str, ones: Sequence[LayerCosine], bars: str) -> Text:
    values = [one.cosine for one in ones]
    lowest = min(ones, key=lambda one: one.cosine)
    line = sparkline(values, min(0.0, *values), 1.0, min, bars)
    return Text(f"cosine by layer, {run}:\n  {line} lowest {lowest.cosine:.4f}, layer {lowest.layer}")


def logits(found: LogitEvidence | None, bars: str) -> Iterator[Text]:
    """Divergences by segment, a line of them by row, and what was predicted of the continuation."""
    if found is None:
        return
    if found.segments:
        yield Text(f"{'part':<9}{'rows':<5}{'max KL':<19}{'mean KL':<19}argmax, %", "bold")
    before = dict(found.unpatched_rows)
    for run, divergences in found.rows:
        yield Text(f"{run}")
        yield from (_segment(one) for one in found.segments if one.run == run)
        high = max((*divergences, *before.get(run, ())), default=0.0)
        if len(divergences) > 1 and _ROUNDING < high < math.inf:
            for label, series in (("KL by row before", before.get(run, ())), ("KL by row", divergences)):
                if series:
                    yield Text(f" {label:<17} {sparkline(series, 0.0, high, max, bars)}")
    yield from (_forced(one) for one in found.teacher_forced)


def _segment(segment: Segment) -> Text:
    now, was = segment.found, segment.unpatched or segment.found
    cells = (
        change("{:.2g}", was.max_kl, now.max_kl, segment.unpatched is not None),
        change("{:.2g}", was.mean_kl, now.mean_kl, segment.unpatched is not None),
        change("{:.0f}", 100 * was.argmax, 100 * now.argmax, segment.unpatched is not None),
    )
    return Text(f" {segment.part:<7} {now.rows:<5}{''.join(cells)}".rstrip())


def _forced(forced: TeacherForced) -> Text:
    line = f"{forced.run}: {forced.right} of {forced.steps} tokens predicted"
    if forced.without is not None:
        line += f", {forced.without} without the media"
        line += f"; they part at step {forced.parted}" if forced.parted is not None else "; they never part"
    if forced.unpatched is not None:
        line += f"; unpatched {forced.unpatched}"
    return Text(line)
