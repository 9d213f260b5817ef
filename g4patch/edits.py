"""Edits are data: a plan can be printed, compared and hashed before anything is written.

Values that an edit creates have local names that start with `$`; the format gives them unique names of its own when
it applies the edit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from g4patch.view import Graph, Node, Op, Use


@dataclass(frozen=True)
class Const:
    """A constant that an edit brings along: a scalar, or a small vector of int64."""

    dtype: str
    value: int | tuple[int, ...]


Operand = str | Const


@dataclass(frozen=True)
class NewNode:
    """A node to insert. Operands by meaning, as in `g4patch.view.Op`; `reason` is set where a format needs the node."""

    op: Op
    operands: Mapping[str, Operand]
    output: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Redirect:
    """One use that reads `value` from now on."""

    use: Use
    value: str


@dataclass(frozen=True)
class GraphEdit:
    """Nodes to insert into one graph, and the uses to redirect to them. Nothing is removed."""

    graph: str
    rule: str
    nodes: tuple[NewNode, ...]
    redirects: tuple[Redirect, ...]


@dataclass(frozen=True)
class RowCopy:
    """One row of a table that hosts look up, to be copied over others, with all that the table keeps for a row."""

    rule: str
    source: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class ConfigSet:
    """An entry of a configuration file, by the keys that lead to it, and the value that it is to have."""

    rule: str
    path: tuple[str, ...]
    value: str


Edit = GraphEdit | RowCopy | ConfigSet


@dataclass(frozen=True)
class Plan:
    """All edits to one model, in order. `note` is what the model's metadata will say of them, if its format has any."""

    edits: tuple[Edit, ...] = ()
    note: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of the edits, hexadecimal: equal plans have equal digests on every machine."""
        edits = [asdict(edit) for edit in self.edits]
        text = json.dumps({"edits": edits}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def graph_edits(self) -> tuple[GraphEdit, ...]:
        return tuple(edit for edit in self.edits if isinstance(edit, GraphEdit))

    @property
    def row_copies(self) -> tuple[RowCopy, ...]:
        return tuple(edit for edit in self.edits if isinstance(edit, RowCopy))

    @property
    def config_sets(self) -> tuple[ConfigSet, ...]:
        return tuple(edit for edit in self.edits if isinstance(edit, ConfigSet))

    @property
    def counts(self) -> dict[str, int]:
        """How much of what the plan changes; what it does not touch is left out."""
        counts = {
            "nodes_added": sum(len(edit.nodes) for edit in self.graph_edits),
            "uses_redirected": sum(len(edit.redirects) for edit in self.graph_edits),
            "rows_copied": sum(len(edit.rows) for edit in self.row_copies),
            "entries_set": len(self.config_sets),
        }
        return {what: number for what, number in counts.items() if number}

    @property
    def done(self) -> str:
        """What was done where the plan was applied, in words."""
        return ", ".join(f"{_counted(what, number)} {_CHANGES[what][2]}" for what, number in self.counts.items())

    @property
    def wanted(self) -> str:
        """What applying the plan would do, in words."""
        return ", ".join(f"{_CHANGES[what][0]} {_counted(what, number)}" for what, number in self.counts.items())


# What is counted -> what is done to how many of what, and what has then been done to them.
_CHANGES = {
    "nodes_added": ("insert", "op", "added"),
    "uses_redirected": ("rewire", "use", "rewired"),
    "rows_copied": ("overwrite", "row", "overwritten"),
    "entries_set": ("set", "entry", "set"),
}


def _counted(what: str, number: int) -> str:
    noun = _CHANGES[what][1]
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def mask_ids(
    graph: Graph,
    value: str,
    uses: Sequence[Use],
    ids: Sequence[int],
    pad: int,
    rule: str,
    casts: Sequence[Node] = (),
) -> GraphEdit:
    """`where(isin(value, ids), pad, value)` for some uses of `value`, made of equal, or, and where.

    The mask is computed from the very value it replaces, so shape and dtype agree by construction. `value` must have
    a known integer dtype and `ids` must not be empty. `casts` are made again behind it, in order, where the uses are
    not of `value` itself but of what those casts make of it.
    """
    nodes, mask = _is_any(graph, value, ids)
    nodes.append(NewNode(Op.WHERE, {"condition": mask, "x": Const(_dtype(graph, value), pad), "y": value}, "$masked"))
    for number, cast in enumerate(casts, start=1):
        reason = f"{cast.address}, which does the same, feeds other nodes too"
        nodes.append(NewNode(Op.CAST, {"x": nodes[-1].output}, f"$cast_{number}", cast.attributes, reason))
    return GraphEdit(graph.name, rule, tuple(nodes), tuple(Redirect(use, nodes[-1].output) for use in uses))


def widen(
    graph: Graph, condition: str, inverted: bool, value: str, use: Use, ids: Sequence[int], rule: str
) -> GraphEdit:
    """`or(condition, isin(value, ids))` for one use of a condition; where that is `inverted`, its negation is widened.

    `value` holds the ids in the shape of `condition`; `ids` must not be empty.
    """
    nodes, mask = _is_any(graph, value, ids)
    if inverted:
        nodes.append(NewNode(Op.NOT, {"x": condition}, "$spliced"))
        nodes.append(NewNode(Op.OR, {"x": "$spliced", "y": mask}, "$more_spliced"))
        nodes.append(NewNode(Op.NOT, {"x": "$more_spliced"}, "$widened"))
    else:
        nodes.append(NewNode(Op.OR, {"x": condition, "y": mask}, "$widened"))
    return GraphEdit(graph.name, rule, tuple(nodes), (Redirect(use, "$widened"),))


def _is_any(graph: Graph, value: str, ids: Sequence[int]) -> tuple[list[NewNode], str]:
    """Nodes for `isin(value, ids)`, made of equal and or, and the name of their result."""
    nodes: list[NewNode] = []
    mask = ""
    for number, token in enumerate(ids):
        equal = NewNode(Op.EQUAL, {"x": value, "y": Const(_dtype(graph, value), token)}, f"$is_{token}")
        nodes.append(equal)
        if number:
            nodes.append(NewNode(Op.OR, {"x": mask, "y": equal.output}, f"$any_{number}"))
        mask = nodes[-1].output
    if not nodes:
        raise ValueError("a mask needs at least one id")
    return nodes, mask


def _dtype(graph: Graph, value: str) -> str:
    dtype = graph.value(value).dtype
    if dtype is None:
        raise ValueError(f"a mask needs the dtype of {value}")
    return dtype
