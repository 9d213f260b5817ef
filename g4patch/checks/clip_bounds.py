"""clip-bounds: the bounds of a tower's clipped linears must be there, finite, and in order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from g4patch import towers
from g4patch.report import Finding, Severity, Subject
from g4patch.towers import BOUNDS, Bound, Site, Tower
from g4patch.view import Graph

if TYPE_CHECKING:
    from g4patch.rules import Rule

# No activation comes near this. Exporters that do not load the bounds fill them with infinity or with numbers like it.
_INFINITE = 1e30
_LARGEST_HALF = 65504.0

_MISSING = "that are missing, so that nothing clips there"
_UNDEFINED = "that are read from values which the model does not have, so that no runtime can load it"
_ENDLESS = "that are infinite, as before a checkpoint is loaded, so that nothing is clipped"
_NAN = "that are NaN"
_UNORDERED = "that are not in order, the minimum above the maximum"
_UNREAD = "that are not single stored numbers, and were not checked"

_RE_EXPORT = "Export again with the bounds of the checkpoint"
# Places of faults that a message names before it counts the rest.
_MOST_PLACES = 4


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for each kind of fault in a graph, and one where layers are fewer than the configuration says."""
    tokens = subject.tokens
    wanted = {"vision": tokens.clipped_vision_layers, "audio": tokens.clipped_audio_layers}
    for analysis in subject.analyses:
        tower = towers.find(analysis.graph, tokens.patch_size)
        if tower is not None:
            yield from _tower(rule, analysis.graph, tower, wanted[tower.kind])


def _tower(rule: Rule, graph: Graph, tower: Tower, layers: int | None) -> Iterator[Finding]:
    if layers is None and not any(site.linear.is_clipped for site in tower.sites):
        # A tower without clipped linears, and nobody says that it should have them.
        return
    yield from _number(rule, graph, tower, layers)
    faults: dict[str, list[tuple[Site, str]]] = {}
    for site in tower.sites:
        for name, fault in _faults(graph, site):
            faults.setdefault(fault, []).append((site, name))
    for fault, places in faults.items():
        severity = Severity.NOTE if fault == _UNREAD else rule.severity
        advice = "" if fault == _UNREAD else f". {_RE_EXPORT}"
        message = f"bounds {fault}: {len(places)} of {4 * len(tower.sites)} ({_where(tower, places)}){advice}"
        nodes = dict.fromkeys(site.linear.node.address for site, _ in places)
        yield Finding(rule.id, severity, message, graph.name, tuple(nodes))


def _number(rule: Rule, graph: Graph, tower: Tower, layers: int | None) -> Iterator[Finding]:
    """What is said where the graph has fewer clipped linears than the configuration promises."""
    each = _each(tower)
    if layers is None or len(tower.sites) >= each * layers:
        return
    promised = f"the configuration says {layers} layers of {each} clipped linears, {4 * each * layers} bounds"
    if tower.sites:
        found = f"the graph has {len(tower.sites)} of {each * layers}. {_RE_EXPORT}"
        yield Finding(rule.id, rule.severity, f"{promised}; {found}", graph.name)
    else:
        found = f"none of the graph's products were recognised as those of a {tower.kind} tower: nothing was checked"
        yield Finding(rule.id, Severity.NOTE, f"{promised}; {found}", graph.name)


def _each(tower: Tower) -> int:
    """Linears in one layer."""
    return sum(len(group) for group in towers.LAYOUTS[tower.kind])


def _faults(graph: Graph, site: Site) -> Iterator[tuple[str, str]]:
    """What is wrong with the bounds of one linear: (bound, fault)."""
    bounds = site.linear.bounds
    for name in BOUNDS:
        fault = _fault(graph, bounds.get(name))
        if fault:
            yield name, fault
    for side in ("input", "output"):
        low, high = (bounds[name].number if name in bounds else None for name in (f"{side}_min", f"{side}_max"))
        if low is not None and high is not None and low > high:
            yield from ((f"{side}_{end}", _UNORDERED) for end in ("min", "max"))


def _fault(graph: Graph, bound: Bound | None) -> str:
    if bound is None:
        return _MISSING
    if any(_is_undefined(graph, value) for value in bound.values):
        return _UNDEFINED
    if bound.number is None:
        return _UNREAD
    if math.isnan(bound.number):
        return _NAN
    halves = all(graph.value(value).dtype == "float16" for value in bound.values)
    return _ENDLESS if abs(bound.number) >= (_LARGEST_HALF if halves else _INFINITE) else ""


def _is_undefined(graph: Graph, value: str) -> bool:
    """Whether nothing in the graph makes or holds a value: some exporters lose bounds that way."""
    known = value in graph.constants or graph.producer(value) is not None or graph.input(value) is not None
    return not known and graph.value(value).shape is None


def _where(tower: Tower, places: Sequence[tuple[Site, str]]) -> str:
    """Layers and projections, whole layers as ranges."""
    of_layer: dict[int | None, dict[str, list[str]]] = {}
    for site, name in places:
        of_layer.setdefault(site.layer, {}).setdefault(site.projection, []).append(name)
    whole = [layer for layer, found in of_layer.items() if layer is not None and _count(found) == 4 * _each(tower)]
    said = list(_ranges(whole))
    for layer, found in of_layer.items():
        if layer not in whole:
            place = "" if layer is None else f"layer {layer} "
            said += [f"{place}{projection} {_names(names)}" for projection, names in found.items()]
    more = f", and {len(said) - _MOST_PLACES} more places" if len(said) > _MOST_PLACES else ""
    return "; ".join(said[:_MOST_PLACES]) + more


def _count(found: dict[str, list[str]]) -> int:
    return sum(len(names) for names in found.values())


def _names(names: Sequence[str]) -> str:
    return "all four" if len(names) == len(BOUNDS) else ", ".join(names)


def _ranges(layers: Sequence[int]) -> Iterator[str]:
    """Ascending layers, those in a row together."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    for run in runs:
        yield f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]} to {run[-1]}"
