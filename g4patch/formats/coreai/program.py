"""The worker's dump of a program, numbered as the worker numbers it: all that is known of it here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from g4patch.errors import BundleError

# One operation with all in it, as `g4patch.runtimes.coreai.program` dumps it.
Dump = Mapping[str, Any]

_CALLEE = re.compile(r'@"?([^">]+?)"?>')
_FILE = "#coreai.file_resource"


@dataclass(frozen=True)
class Program:
    """Every operation of a dump by its number in `runtimes.coreai.program`, and what each defines."""

    ops: tuple[Dump, ...]
    results: tuple[int, ...]  # number of an operation's first result
    arguments: Mapping[tuple[int, int, int], int]  # (operation, region, block) -> number of its first argument
    numbers: Mapping[int, int]  # id() of an operation -> its number
    callees: Mapping[int, int]  # number of an invoke -> number of the graph it calls
    entries: Mapping[str, int]  # full names of graphs that are not private: hosts can run these, called or not


def number(dump: Dump) -> Program:
    """Number a dump. Raises BundleError where it calls what it does not have."""
    ops: list[Dump] = []
    results: list[int] = []
    arguments: dict[tuple[int, int, int], int] = {}
    symbols: dict[str, int] = {}
    count = 0

    def visit(op: Dump, path: tuple[str, ...]) -> None:
        nonlocal count
        own = len(ops)
        _refuse_files(op)
        ops.append(op)
        results.append(count)
        count += len(op["results"])
        if "symbol" in op:
            symbols["::".join((*path, op["symbol"]))] = own
        inner = (*path, op["attributes"]["sym_name"].strip('"')) if op["name"] == "udml.namespace" else path
        for region, blocks in enumerate(op["regions"]):
            for position, block in enumerate(blocks):
                arguments[own, region, position] = count
                count += len(block["arguments"])
                for child in block["ops"]:
                    visit(child, inner)

    visit(dump, ())
    callees = {at: _callee(op, symbols) for at, op in enumerate(ops) if op["name"] == "coreai.invoke"}
    entries = {name.replace("::", "."): at for name, at in symbols.items() if "priv" not in ops[at]["attributes"]}
    numbers = {id(op): at for at, op in enumerate(ops)}
    return Program(tuple(ops), tuple(results), arguments, numbers, callees, entries)


def _callee(op: Dump, symbols: Mapping[str, int]) -> int:
    """The graph an invoke calls: by its full name, else by the only one of that last name."""
    match = _CALLEE.search(op["attributes"].get("callee", ""))
    name = match.group(1).replace('"', "").replace("::@", "::") if match else ""
    last = [at for symbol, at in symbols.items() if symbol.rsplit("::", 1)[-1] == name.rsplit("::", 1)[-1]]
    found = symbols.get(name, last[0] if len(last) == 1 else None)
    if found is None:
        raise BundleError(f"the program calls {name or 'a graph'}, which it does not have", "export the model again")
    return found


def _refuse_files(op: Dump) -> None:
    """Weights may be kept in files anywhere on the disk; an asset that is complete has none of these."""
    if any(value.startswith(_FILE) for value in op["attributes"].values()):
        raise BundleError("the program refers to files outside the asset", "save it with its weights inside")
