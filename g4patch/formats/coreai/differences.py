"""What differs between two programs beyond a plan: their dumps side by side, without what was inserted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4patch.edits import Plan
from g4patch.formats import Model
from g4patch.formats.coreai import splice, types
from g4patch.formats.coreai.edit import spec
from g4patch.formats.coreai.model import Native, native

Dump = Mapping[str, Any]

# The dialect's operations that the worker's builders make.
_MADE = {
    "equal": "coreai.decomposable.broadcasting_equal",
    "or": "coreai.decomposable.broadcasting_or",
    "and": "coreai.decomposable.broadcasting_and",
    "not": "coreai.not",
    "where": "coreai.decomposable.broadcasting_where",
    "expand_dims": "coreai.expand_dims",
    "cast": "coreai.cast",
}
_PLAIN = ("name", "results", "attributes", "location", "symbol", "inputs", "outputs")


def differences(before: Model, after: Model, plan: Plan) -> tuple[str, ...]:
    """What differs beyond the plan, a line each: operations, types, attributes, names, weights, metadata."""
    old, new = native(before), native(after)
    found = [*_Comparison(old, new, plan).lines()]
    found += [f"the weights {key} differ" for key in splice.same_weights(old.asset.program, new.asset.program)]
    if old.asset.metadata != new.asset.metadata:
        found.append("metadata.json differs")
    return tuple(found)


@dataclass
class _Comparison:
    """Both programs walked side by side.

    Values of the new one are named by those of the old one, or as inserted.
    """

    old: Native
    new: Native
    plan: Plan
    values: dict[int, Any] = field(default_factory=dict)  # new value number -> old number, or an inserted result
    inserted: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield from self._walk(0, 0)
        redirected: dict[tuple[int, int], str] = {}
        wanted = [spec(self.old, edit) for edit in self.plan.graph_edits]
        # Each edit stands before the first of its uses.
        for number in sorted(range(len(wanted)), key=lambda number: min(_users(wanted[number]), default=0)):
            yield from self._insertions(f"edit {number} ", wanted[number]["nodes"])
            for one in wanted[number]["redirects"]:
                redirected[one["op"], one["operand"]] = f"edit {number} {one['local']}"
        if self.inserted:
            yield f"{len(self.inserted)} operations more than planned"
        yield from self._operands(redirected)

    def _walk(self, old: int, new: int) -> Iterator[str]:
        """Pair two operations and all in them."""
        left, right = self.old.program.ops[old], self.new.program.ops[new]
        self.pairs.append((old, new))
        for position in range(len(left["results"])):
            self.values[self.new.program.results[new] + position] = self.old.program.results[old] + position
        for key in _PLAIN:
            if left.get(key) != right.get(key):
                yield f"{left['name']} {old}: {key} differs"
        if [len(blocks) for blocks in left["regions"]] != [len(blocks) for blocks in right["regions"]]:
            yield f"{left['name']} {old}: its regions differ"
            return
        for region, blocks in enumerate(left["regions"]):
            for position, block in enumerate(blocks):
                where = (region, position)
                yield from self._block(old, new, where, block, right["regions"][region][position])

    def _block(self, old: int, new: int, where: tuple[int, int], left: Dump, right: Dump) -> Iterator[str]:
        if (left["arguments"], left["locations"]) != (right["arguments"], right["locations"]):
            yield f"{self.old.program.ops[old]['name']} {old}: its arguments differ"
        for position in range(min(len(left["arguments"]), len(right["arguments"]))):
            number = self.new.program.arguments[(new, *where)] + position
            self.values[number] = self.old.program.arguments[(old, *where)] + position
        expected = iter(left["ops"])
        wanted, mark = next(expected, None), len(self.inserted)
        for op in right["ops"]:
            at = self.new.program.numbers[id(op)]
            if wanted is not None and _alike(wanted, op):
                yield from self._walk(self.old.program.numbers[id(wanted)], at)
                wanted, mark = next(expected, None), len(self.inserted)
            else:
                self.inserted.append(at)
        if wanted is not None:
            # Nothing after it could be paired: what stands there is no insertion.
            del self.inserted[mark:]
            yield f"{wanted['name']} {self.old.program.numbers[id(wanted)]} is missing or was changed"

    def _insertions(self, edit: str, nodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Match the operations of one edit, in order, with what was inserted. `edit` starts its names."""
        for node in nodes:
            wanted = [self._wanted(edit, operand) for operand in node["operands"].values()]
            if not self.inserted:
                yield f"{node['op']} {node['output']} was not inserted"
                return
            at = self.inserted.pop(0)
            op = self.new.program.ops[at]
            operands = [self.values.get(value, f"new {value}") for value in op["operands"]]
            if operands != wanted or not _is_made(op, node):
                yield f"{op['name']} {at} is not the planned {node['op']} {node['output']}"
            for position in range(len(op["results"])):
                self.values[self.new.program.results[at] + position] = edit + node["output"]

    def _wanted(self, edit: str, operand: Mapping[str, Any]) -> Any:
        """What an inserted operation must read: a value of the old program, an inserted one, a constant."""
        if "const" in operand:
            return self._constant(operand)
        return operand["value"] if "value" in operand else edit + operand["local"]

    def _constant(self, wanted: Mapping[str, Any]) -> Any:
        """Take the next inserted operation as a constant; its name among values, or None if it is another."""
        if not self.inserted:
            return None
        at = self.inserted[0]
        op = self.new.program.ops[at]
        if op["name"] != "coreai.constant":
            return None
        self.inserted.pop(0)
        declared = types.value("", op["results"][0])
        array = types.inline(op["attributes"]["value"], declared)
        value = wanted["const"]
        expected = value if isinstance(value, int) else list(value)
        if array is None or declared.dtype != wanted["dtype"] or array.tolist() != expected:
            return None
        name = f"constant {at}"
        self.values[self.new.program.results[at]] = name
        return name

    def _operands(self, redirected: Mapping[tuple[int, int], str]) -> Iterator[str]:
        """Compare what paired operations read."""
        for old, new in self.pairs:
            left, right = self.old.program.ops[old], self.new.program.ops[new]
            wanted = [redirected.get((old, i), value) for i, value in enumerate(left["operands"])]
            found = [self.values.get(value) for value in right["operands"]]
            if wanted != found:
                yield f"{left['name']} {old} reads other values"


def _users(edit: Mapping[str, Any]) -> Iterator[int]:
    """The operations that read what an edit inserts."""
    return (redirect["op"] for redirect in edit["redirects"])


def _is_made(op: Dump, node: Mapping[str, Any]) -> bool:
    """Whether an operation is what the worker makes of a planned node."""
    if op["name"] != _MADE[node["op"]] or op["attributes"] or op["regions"] or len(op["results"]) != 1:
        return False
    return "dtype" not in node or types.value("", op["results"][0]).dtype == node["dtype"]


def _alike(left: Dump, right: Dump) -> bool:
    return all(left.get(key) == right.get(key) for key in _PLAIN)
