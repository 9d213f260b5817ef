"""ple-scale: PLE rows must be multiplied by sqrt(D) exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from g4patch.ple import GraphAnalysis, Lookup
from g4patch.recognise import is_close
from g4patch.report import Finding, Severity, Subject
from g4patch.view import VIEW_OPS, Graph, Op

if TYPE_CHECKING:
    from g4patch.rules import Rule

# Numbers as they are. Integers, and floats of 8 bits or fewer, need a scale of their own, which may hold the factor.
_PLAIN = frozenset({"float16", "bfloat16", "float32", "float64"})


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """One finding for the lookups of a graph with the same wrong factor; one where reads of one table disagree.

    Silent where the factor is not one number that the graph states.
    """
    for analysis in subject.analyses:
        groups: dict[tuple[float, int], list[Lookup]] = {}
        for lookup, factor in _factors(analysis):
            groups.setdefault((round(factor, 6), lookup.layer_width), []).append(lookup)
        disagreeing = _disagreeing(groups)
        if disagreeing is not None:
            yield _disagreement(rule, analysis, *disagreeing)
            continue
        for (factor, width), lookups in groups.items():
            severity, message = _judge(factor, width)
            if severity is not None:
                nodes = tuple(lookup.gather.address for lookup in lookups)
                yield Finding(rule.id, severity, message, analysis.graph.name, nodes)


def _factors(analysis: GraphAnalysis) -> Iterator[tuple[Lookup, float]]:
    """What each lookup's rows are multiplied with, before the gather and behind it."""
    for lookup in analysis.lookups:
        if not lookup.scales and lookup.scale is not None and lookup.table.dtype in _PLAIN:
            yield lookup, _in_table(analysis.graph, lookup) * lookup.scale * _share_of_sum(analysis.graph, lookup)


def _in_table(graph: Graph, lookup: Lookup) -> float:
    """The scalars that the table itself is multiplied with in the graph."""
    factor, node = 1.0, graph.producer(lookup.gather.operands["data"])
    while node is not None:
        if node.op is Op.MUL:
            scalars = {key: graph.scalar(name) for key, name in node.operands.items()}
            onward = [key for key, number in scalars.items() if number is None]
            factor *= math.prod(number for number in scalars.values() if number is not None)
        else:
            onward = ["x"] if node.op in VIEW_OPS else []
        node = graph.producer(node.operands[onward[0]]) if len(onward) == 1 else None
    return factor


def _share_of_sum(graph: Graph, lookup: Lookup) -> float:
    """Hugging Face multiplies the sum of PLE and projection with 2^-0.5; a graph may multiply both parts instead.

    sqrt(2) where it does, to take that out again, else 1.
    """
    assert lookup.scale is not None
    node = graph.producer(lookup.combined) if lookup.combined is not None else None
    if node is None or node.op is not Op.ADD:
        return 1.0
    half = lookup.scale * math.sqrt(2)
    return math.sqrt(2) if any(is_close(half, usual) for usual in _usual(lookup.layer_width)) else 1.0


def _usual(width: int) -> tuple[float, float, float]:
    """No factor, the right one, and the right one twice."""
    return 1.0, math.sqrt(width), float(width)


def _judge(factor: float, width: int) -> tuple[Severity | None, str]:
    missing, right, twice = _usual(width)
    wanted = f"sqrt({width}) = {right:.6g}"
    if is_close(factor, right):
        return None, ""
    if is_close(factor, twice):
        message = (
            f"the looked-up rows are multiplied by {twice:.6g}: by {wanted} twice, behind the gather or in the table "
            "that it reads. Export again with the factor in one place"
        )
        return Severity.ERROR, message
    settle = "`g4patch verify --reference FILE` against Hugging Face's own rows settles it"
    if is_close(factor, missing):
        message = (
            f"nothing multiplies the looked-up rows by {wanted}. That is right only if the stored table has the factor "
            f"already, which the graph cannot show; else export again with it. {settle}"
        )
        return Severity.WARNING, message
    return Severity.NOTE, f"the looked-up rows are multiplied by {factor:.6g}, not by {wanted}. {settle}"


def _disagreeing(groups: dict[tuple[float, int], list[Lookup]]) -> tuple[float, float, Iterable[Lookup]] | None:
    """Two factors for reads of one table, of which one is wrong whatever the table holds."""
    of_table: dict[str, dict[float, Lookup]] = {}
    for (factor, _), lookups in groups.items():
        for lookup in lookups:
            others = of_table.setdefault(lookup.table.name, {})
            for other in others:
                if not is_close(factor, other):
                    return other, factor, (others[other], lookup)
            others.setdefault(factor, lookup)
    return None


def _disagreement(rule: Rule, analysis: GraphAnalysis, one: float, two: float, lookups: Iterable[Lookup]) -> Finding:
    message = (
        f"rows of one table are multiplied by {one:.6g} here and by {two:.6g} there: whatever factor the table holds, "
        "one of the two is wrong. Export again"
    )
    nodes = tuple(lookup.gather.address for lookup in lookups)
    return Finding(rule.id, Severity.ERROR, message, analysis.graph.name, nodes)
