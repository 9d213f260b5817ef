"""A vocabulary that is split over several tables: `where(ids < V/2, gather(t0, ids), gather(t1, ids - V/2))`."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from g4patch.cone import NotAMap, depends_on, map_ids, per_id
from g4patch.lanes import Array
from g4patch.verdicts import LARGEST_VOCABULARY, Ids
from g4patch.view import Graph, Node, Op, Table, Use

# What nodes are called that are in no file.
JOINED = "joined"
# A row of no table.
_NOWHERE = -(2**40)
# Nobody splits a vocabulary over more tables than this allows.
_DEEPEST = 8


@dataclass(frozen=True)
class Shard:
    """One of the tables and a gather that reads it. `first` is the number of its first row among the rows of all."""

    gather: Node
    table: Table
    first: int

    @property
    def index(self) -> str:
        return self.gather.operands["index"]


@dataclass(frozen=True)
class _Choice:
    """A `where` between rows that are read for it alone."""

    node: Node
    x: _Rows
    y: _Rows


_Rows = Node | _Choice


def shards(gather: Node) -> tuple[Shard, ...]:
    """What a gather of a `joined` graph stands for; nothing for one that is in the file."""
    found: tuple[Shard, ...] = gather.attributes.get("shards", ())
    return found


def index_uses(gather: Node, value: str) -> Iterator[tuple[Use, Node]]:
    """Where the gathers that one of a `joined` graph stands for read a value as their index."""
    for one in gather.attributes.get("gathers", ()):
        if one.operands["index"] == value:
            yield Use(one.address, "index"), one


def joined(graph: Graph) -> Graph:
    """The graph with one gather from one table in the place of each `where` between rows of several.

    Its rows are those of the tables one after the other, in the order of the ids that read them, and its index is
    chosen by the same conditions. It has the address of the `where`; neither it nor what its index is made of can be
    edited.
    """
    choices: dict[str, _Choice] = {}
    gone: set[str] = set()
    for node in reversed(graph.nodes):
        choice = _choice(graph, node, _DEEPEST) if node.address not in gone else None
        if choice is not None:
            choices[node.address] = choice
            gone.update(_addresses(choice))
    made = {address: _Join(graph, choice) for address, choice in choices.items()}
    if not made or any(_is_taken(graph, name) for join in made.values() for name in join.names):
        return graph
    nodes = (
        made[node.address].nodes if node.address in made else () if node.address in gone else (node,)
        for node in graph.nodes
    )
    return replace(
        graph,
        nodes=tuple(chain.from_iterable(nodes)),
        constants=dict(ChainMap(*(join.constants for join in made.values()), dict(graph.constants))),
        tables={**graph.tables, **{join.table.name: join.table for join in made.values()}},
    )


def _is_taken(graph: Graph, name: str) -> bool:
    known = name in graph.values or name in graph.constants or name in graph.tables
    return known or graph.producer(name) is not None or graph.input(name) is not None


def _choice(graph: Graph, node: Node, depth: int) -> _Choice | None:
    if node.op is not Op.WHERE or not depth:
        return None
    x, y = (_rows(graph, node.operands[branch], depth - 1) for branch in ("x", "y"))
    if x is None or y is None:
        return None
    kinds = {(table.shape[1:], table.dtype) for table in (graph.tables[g.operands["data"]] for g in _gathers(x, y))}
    return _Choice(node, x, y) if len(kinds) == 1 else None


def _rows(graph: Graph, value: str, depth: int) -> _Rows | None:
    """Whole rows of tables, which nothing but one node reads."""
    node = graph.producer(value)
    if node is None or len(graph.uses(value)) != 1 or value in graph.outputs:
        return None
    if _changes_nothing(graph, node):
        return _rows(graph, node.operands["x"], depth)
    if node.op is not Op.GATHER:
        return _choice(graph, node, depth)
    table = graph.tables.get(node.operands["data"])
    if table is None or len(table.shape) < 2 or node.attributes.get("along"):
        return None
    stored = not depends_on(graph, node.operands["data"])
    return node if stored and node.attributes["axis"] % len(table.shape) == 0 else None


def _changes_nothing(graph: Graph, node: Node) -> bool:
    """Such as the reshape that an edit puts behind an fp16 gather."""
    shape = graph.integers(node.operands["shape"]) if node.op is Op.RESHAPE else None
    kept = shape is not None and shape[-1:] == (-1,) and not any(shape[:-1]) and not node.attributes.get("allowzero")
    return kept or node.op is Op.IDENTITY


def _gathers(*rows: _Rows) -> Iterator[Node]:
    for item in rows:
        if isinstance(item, Node):
            yield item
        else:
            yield from _gathers(item.x, item.y)


def _addresses(rows: _Rows) -> Iterator[str]:
    if isinstance(rows, Node):
        yield rows.address
    else:
        yield rows.node.address
        yield from _addresses(rows.x)
        yield from _addresses(rows.y)


class _Join:
    """What stands in the place of one choice: the gather, last of `nodes`, and what its index is computed with."""

    def __init__(self, graph: Graph, choice: _Choice) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}
        self.shards = tuple(_shards(graph, choice))
        self.table = _whole(self.shards)
        operands = {"data": self.table.name, "index": self._index(choice)}
        attributes = {"axis": 0, "shards": self.shards, "gathers": tuple(_gathers(choice))}
        where = choice.node
        gather = Node(Op.GATHER, where.native, where.address, operands, where.outputs, attributes, editable=False)
        self.nodes.append(gather)

    @property
    def names(self) -> Iterator[str]:
        """Those of all values that are in no file."""
        yield from self.constants
        yield from (node.output for node in self.nodes[:-1])
        if len(self.shards) > 1:
            yield self.table.name

    def _index(self, rows: _Rows) -> str:
        """A value that holds the row, among those of all tables, that is read for each id."""
        if isinstance(rows, Node):
            return self._row(rows)
        condition = per_id(self.graph, rows.node.operands["condition"])
        operands = {"condition": condition, "x": self._index(rows.x), "y": self._index(rows.y)}
        return self._add(Op.WHERE, f"{rows.node.output} row", operands)

    def _row(self, gather: Node) -> str:
        """The index of one table as a row among all. What counts from its end, or is beyond it, is no other's row."""
        name, index = gather.output, gather.operands["index"]
        shard = next(shard for shard in self.shards if shard.table.name == gather.operands["data"])
        if gather.attributes.get("nd"):
            # One coordinate, or it cannot be evaluated.
            index = self._add(Op.SQUEEZE, f"{name} index", {"x": index}, axes=(-1,))
        low = self._add(Op.GE, f"{name} low", {"x": index, "y": self._constant(f"{name} 0", 0)})
        high = self._add(Op.LT, f"{name} high", {"x": index, "y": self._constant(f"{name} n", shard.table.rows)})
        inside = self._add(Op.AND, f"{name} inside", {"x": low, "y": high})
        row = self._add(Op.ADD, f"{name} sum", {"x": index, "y": self._constant(f"{name} first", shard.first)})
        nowhere = self._constant(f"{name} nowhere", _NOWHERE)
        return self._add(Op.WHERE, f"{name} row", {"condition": inside, "x": row, "y": nowhere})

    def _constant(self, name: str, number: int) -> str:
        self.constants[name] = np.array(number, np.int64)
        return name

    def _add(self, op: Op, output: str, operands: dict[str, str], **attributes: Any) -> str:
        self.nodes.append(Node(op, JOINED, output, operands, (output,), attributes, editable=False))
        return output


def _shards(graph: Graph, choice: _Choice) -> Iterator[Shard]:
    """Each table once, with the first gather that reads it by ids: others may read one row of it."""
    gathers = _in_order(graph, choice)
    first = 0
    for name in dict.fromkeys(gather.operands["data"] for gather in gathers):
        readers = [gather for gather in gathers if gather.operands["data"] == name]
        by_ids = [gather for gather in readers if depends_on(graph, gather.operands["index"])]
        yield Shard((by_ids or readers)[0], graph.tables[name], first)
        first += graph.tables[name].rows


def _whole(parts: Sequence[Shard]) -> Table:
    """The tables as one."""
    first, rows = parts[0].table, sum(part.table.rows for part in parts)
    return replace(
        first,
        name=" and ".join(part.table.name for part in parts),
        shape=(rows, *first.shape[1:]),
        storage=" and ".join(dict.fromkeys(part.table.storage for part in parts)),
        nbytes=sum(part.table.nbytes for part in parts),
    )


def _in_order(graph: Graph, choice: _Choice) -> list[Node]:
    """The gathers in the order of the first ids that read them; as they stand where that is not clear."""
    gathers = list(_gathers(choice))
    rows = sum(graph.tables[gather.operands["data"]].rows for gather in gathers)
    roots = depends_on(graph, choice.node.operands["condition"])
    if len(roots) != 1 or rows > LARGEST_VOCABULARY:
        return gathers
    (ids_input,) = roots
    try:
        firsts = dict(_first_ids(graph, choice, ids_input, np.arange(rows)))
    except NotAMap:
        return gathers
    return sorted(gathers, key=lambda gather: firsts[gather.address])


def _first_ids(graph: Graph, rows: _Rows, ids_input: str, ids: Ids) -> Iterator[tuple[str, int]]:
    """For each gather of a choice that is made for some ids, the first of them by which it is read."""
    if isinstance(rows, Node):
        yield rows.address, int(ids[0]) if len(ids) else LARGEST_VOCABULARY
    elif not len(ids):
        yield from ((gather.address, LARGEST_VOCABULARY) for gather in _gathers(rows))
    else:
        chosen = map_ids(graph, per_id(graph, rows.node.operands["condition"]), ids_input, ids).astype(bool)
        yield from _first_ids(graph, rows.x, ids_input, ids[chosen])
        yield from _first_ids(graph, rows.y, ids_input, ids[~chosen])
