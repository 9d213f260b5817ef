"""A graph in the making: nodes and what is known of their values, with the way back into the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from g4patch.errors import BundleError
from g4patch.formats.coreai import types
from g4patch.view import Graph, Node, Op, Value

# A real model has some ten thousand operations. Calls within calls can be made to multiply without end.
_MOST_NODES = 1_000_000


@dataclass(frozen=True)
class Place:
    """A value in the program: the calls around it, outermost first, and its number."""

    calls: tuple[int, ...]
    value: int


@dataclass(frozen=True)
class Reading:
    """A graph with the way back: (address, operand) -> (operation, operand number), value name -> place."""

    graph: Graph
    uses: Mapping[tuple[str, str], tuple[int, int]]
    places: Mapping[str, Place]


@dataclass
class Draft:
    """What a `Reading` is made of. `weights` are the names of constants of any size."""

    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    producers: dict[str, Node] = field(default_factory=dict)
    uses: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def define(self, name: str, type: str, place: Place) -> Value:
        """Note a value of the program."""
        self.values[name] = types.value(name, type)
        self.places[name] = place
        return self.values[name]

    def emit(
        self,
        op: Op,
        native: str,
        address: str,
        operands: Mapping[str, str],
        outputs: tuple[str, ...],
        attributes: Mapping[str, Any] | None = None,
        uses: Mapping[str, tuple[int, int]] | None = None,
        editable: bool = True,
    ) -> None:
        """Add a node. `uses` says where the program reads its operands; without, it cannot be edited."""
        if len(self.nodes) > _MOST_NODES:
            raise BundleError("the program has more operations than any model", "is it what it seems to be?")
        node = Node(op, native, address, dict(operands), outputs, attributes or {}, editable and bool(uses))
        self.nodes.append(node)
        self.producers.update(dict.fromkeys(outputs, node))
        if node.editable:
            self.uses.update({(address, operand): use for operand, use in (uses or {}).items()})

    def behind_calls(self, name: str) -> str:
        """A table is the same value in a called graph as outside it."""
        node = self.producers.get(name)
        while node is not None and node.native == "coreai.invoke":
            name = node.operands["x"]
            node = self.producers.get(name)
        return name
