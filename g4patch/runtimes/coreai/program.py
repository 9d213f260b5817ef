"""A loaded program as plain data, and the numbers by which the main process names its parts.

Operations and values are numbered in the order of a walk over the whole module: an operation, its results,
then its regions, each block with its arguments first. The same file gives the same numbers in every process.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

from g4patch.runtimes.coreai.bindings import MARK, ir
from g4patch.view import SMALL_CONSTANT

# A program nests a few levels deep; a file made to exhaust the stack ends in RecursionError, which is
# reported.
sys.setrecursionlimit(5000)


class Numbered:
    """All operations and values of a module by number, and the way back."""

    def __init__(self, module: Any) -> None:
        self.ops: list[Any] = []
        self.values: list[Any] = []
        self.number: dict[Any, int] = {}
        self._op_number: dict[Any, int] = {}
        self._visit(module.operation)

    def op_number(self, op: Any) -> int:
        return self._op_number[op]

    def _visit(self, op: Any) -> None:
        self._op_number[op] = len(self.ops)
        self.ops.append(op)
        for value in op.results:
            self._add(value)
        for region in op.regions:
            for block in region.blocks:
                for value in block.arguments:
                    self._add(value)
                for inner in block.operations:
                    self._visit(inner.operation)

    def _add(self, value: Any) -> None:
        self.number[value] = len(self.values)
        self.values.append(value)


def dump(module: Any) -> dict[str, Any]:
    """The module as nested dicts, without weights.

    Keys of an operation: name, operands (value numbers), results (types), attributes (text), location (a
    digest), regions (lists of blocks: arguments, their locations, ops). A graph also has symbol, inputs and
    outputs: its own name and those of its arguments and results, None where they have none.
    """
    return _op(module.operation, Numbered(module).number)


def _op(op: Any, number: dict[Any, int]) -> dict[str, Any]:
    location = str(op.location)
    dumped = {
        "name": op.name,
        "operands": [number[value] for value in op.operands],
        "results": [str(value.type) for value in op.results],
        "attributes": dict(_attributes(op)),
        "location": _digest(location),
        "ours": f'loc("{MARK}":' in location[:64],
        "regions": [[_block(block, number) for block in region.blocks] for region in op.regions],
    }
    if op.name == "coreai.graph":
        dumped["symbol"] = op.attributes["sym_name"].value
        dumped["inputs"] = _names(op, "arg_attrs")
        dumped["outputs"] = _names(op, "res_attrs")
    return dumped


def _names(op: Any, attribute: str) -> list[str | None]:
    if attribute not in op.attributes:
        return []
    return [entry["coreai.name"].value if "coreai.name" in entry else None for entry in op.attributes[attribute]]


def _block(block: Any, number: dict[Any, int]) -> dict[str, Any]:
    return {
        "arguments": [str(value.type) for value in block.arguments],
        "locations": [_digest(str(value.location)) for value in block.arguments],
        "ops": [_op(inner.operation, number) for inner in block.operations],
    }


def _attributes(op: Any) -> Iterator[tuple[str, str]]:
    for index in range(len(op.attributes)):
        named = op.attributes[index]
        yield named.name, _text(named.attr)


def _text(attribute: Any) -> str:
    """An attribute as text; large inline constants as their type and digest.

    Weights print as the name of their blob.
    """
    if isinstance(attribute, ir.DenseElementsAttr) and not attribute.is_splat and len(attribute) > SMALL_CONSTANT:
        return f"{attribute.type} {_digest(str(attribute))}"
    return str(attribute)


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
