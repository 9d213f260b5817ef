"""sidecar-contract: a graph that is handed PLE rows, and the table that its host reads them from, must agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from g4patch import configs
from g4patch.downstream import Downstream, follow, is_integer
from g4patch.report import Finding, Subject
from g4patch.sidecars import HostTable
from g4patch.tokens import TokenFacts
from g4patch.view import Graph, Value

if TYPE_CHECKING:
    from g4patch.rules import Rule

# fp16 has 11 bits: a scale that is frozen in it is off by up to 2^-11, and so may be the one that a file states.
_ROUNDED = 2**-10
# Below 2^-14 its steps are 2^-24, however small the number is.
_SMALLEST_STEP = 2**-24
# Where a Core AI bundle's metadata names the file with the table: the newer place first.
_PLACES = ("auxiliary_assets", "assets")


def check(rule: Rule, subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Finding]]:
    """One finding for a table that is named and not there, one for each thing that a graph and its table differ in."""
    missing: set[tuple[Path, str]] = set()
    for subject in subjects:
        inputs = tuple(_inputs(subject))
        folder = subject.model.path.parent
        name = _named(folder) if inputs else None
        if name is not None and not _is_there(folder, name):
            if (folder, name) not in missing:
                message = f"metadata.json names {name} for the per-layer embeddings, and no such file is with it"
                yield subject, Finding(rule.id, rule.severity, f"{message}: the bundle is not whole", "")
            missing.add((folder, name))
            continue
        host = _table(subject, subjects, name)
        if host is not None:
            for graph, value, rows in inputs:
                for message in _differences(value, rows, host, subject.tokens):
                    yield subject, Finding(rule.id, rule.severity, message, graph.name)


def _inputs(subject: Subject) -> Iterator[tuple[Graph, Value, Downstream]]:
    """The inputs by which a host hands in rows of the table, and what becomes of these.

    What an earlier model hands on is summed already; rows of a table are codes, or are summed here.
    """
    for analysis in subject.analyses:
        for name in analysis.host_inputs:
            value = analysis.graph.value(name)
            rows = _followed(analysis.graph, value)
            if is_integer(value) or rows.sum is not None:
                yield analysis.graph, value, rows


def _followed(graph: Graph, value: Value) -> Downstream:
    *_, layers, width = value.shape or (None, None)
    if len(value.shape or ()) == 4 and layers and width and layers > 1:
        return follow(graph, value.name, layers * width, (layers, width))
    return follow(graph, value.name, width or 0)


def _named(folder: Path) -> str | None:
    """What `metadata.json` calls the file of the table, None where it names none."""
    content = configs.load(folder / "metadata.json")
    sections = [configs.Config(content, None).section(place) for place in _PLACES] if isinstance(content, dict) else []
    names = (section.get("per_layer_embeddings") for section in sections)
    return next((name for name in names if isinstance(name, str) and name), None)


def _is_there(folder: Path, name: str) -> bool:
    """Whether a bundle holds a file. What lies outside of it does not belong to it, and is not looked at."""
    path = PurePosixPath(name)
    try:
        return not path.is_absolute() and ".." not in path.parts and (folder / path).is_file()
    except OSError:  # longer than names of files can be
        return False


def _table(subject: Subject, subjects: Sequence[Subject], name: str | None) -> HostTable | None:
    """The table that a model's host reads: the one that is named, its sibling, or the only one in the bundle."""
    tables = {other.model.path: other.model.host_table for other in subjects if other.model.host_table is not None}
    path = subject.model.path
    if name is not None:
        return tables.get(path.parent / name)
    sibling = tables.get(path.with_name(f"{path.stem}_ple.safetensors"))
    return sibling or (next(iter(tables.values())) if len(tables) == 1 else None)


def _differences(value: Value, rows: Downstream, host: HostTable, tokens: TokenFacts) -> Iterator[str]:
    table = host.table
    width = _width(value)
    if width is not None and width != table.width:
        which = _which_is_off(width, table.width, tokens)
        yield f"{value.name} takes rows of {width:,}, and those of {table.storage} are {table.width:,} wide: {which}"
        return
    if is_integer(value) and value.dtype != table.dtype:
        yield (
            f"{value.name} is {value.dtype}, and the rows of {table.storage} are {table.dtype}: the graph is off, or "
            "the sidecar is another export's"
        )
        return
    if rows.summed is None:
        return
    if is_integer(value) and host.zero_point is not None and abs(rows.summed.zero_point - host.zero_point) >= 0.5:
        yield (
            f"the graph dequantises {value.name} with zero point {rows.summed.zero_point:g}, and {table.storage} "
            f"states ple_zero_point {host.zero_point}: the graph was frozen for another table"
        )
    if rows.tail is not None:
        yield from _scale(value, rows.summed.scale, math.sqrt(rows.tail[1]), rows.tail[1], host)


def _width(value: Value) -> int | None:
    """Elements in a row of an input `[1, q, L*D]`, `[1, q, 1, L*D]` or `[1, q, L, D]`, where they are fixed."""
    sizes = (value.shape or ())[2:]
    return math.prod(size for size in sizes if size) if sizes and all(sizes) else None


def _which_is_off(taken: int, held: int, tokens: TokenFacts) -> str:
    if not tokens.layers or not tokens.layer_width:
        return "which is right is not known"
    right = tokens.layers * tokens.layer_width
    said = f"the configuration says {tokens.layers} layers of {tokens.layer_width}"
    if right not in (taken, held):
        return f"both are off, {said}"
    return f"the {'sidecar' if taken == right else 'graph'} is off, {said}"


def _scale(value: Value, found: float, root: float, width: int, host: HostTable) -> Iterator[str]:
    """What is wrong with the number that a graph multiplies rows with; `root` is sqrt(D)."""
    right, because = _right_scales(value, root, width, host)
    if not right or any(_is_close(found, scale) for scale in right):
        return
    what = "codes" if is_integer(value) else "rows"
    message = f"the graph multiplies the {what} of {value.name} by {found:.4g}, and {right[0]:.4g} is right ({because})"
    if len(right) == 1 and _is_close(found, right[0] * root):
        yield f"{message}: sqrt({width}) is applied twice; the graph is off"
    elif len(right) == 1 and _is_close(found, right[0] / root):
        yield f"{message}: sqrt({width}) is not applied; the graph is off"
    elif is_integer(value):
        yield f"{message}: the graph was frozen for another table"


def _right_scales(value: Value, root: float, width: int, host: HostTable) -> tuple[tuple[float, ...], str]:
    """The numbers that are right and why, none where that is not known.

    Codes stand for code * ple_scale = table * embed_scale, and what is right is table * sqrt(D).
    """
    if not is_integer(value):
        if host.scaled_by_host:
            return (1.0,), f"hosts of {host.table.storage} apply sqrt({width})"
        if host.embed_scale is not None:
            return (root / host.embed_scale,), f"{host.table.storage} states embed_scale {host.embed_scale:.4g}"
        return (), ""
    if host.scale is None:
        return (), ""
    because = f"{host.table.storage} states ple_scale {host.scale:.4g}"
    if host.embed_scale is None:
        return (host.scale, host.scale * root), because
    return (host.scale * root / host.embed_scale,), f"{because} and embed_scale {host.embed_scale:.4g}"


def _is_close(found: float, right: float) -> bool:
    return abs(found - right) <= max(right * _ROUNDED, _SMALLEST_STEP)
