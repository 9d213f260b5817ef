"""Write an asset with a plan applied: the worker edits the program, the weights are carried over here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g4patch.edits import Const, GraphEdit, NewNode, Operand, Plan
from g4patch.errors import EditError
from g4patch.formats import Model, Staged
from g4patch.formats.coreai import bytecode, splice
from g4patch.formats.coreai.asset import HASH, PROGRAM
from g4patch.formats.coreai.draft import Reading
from g4patch.formats.coreai.model import Native, native
from g4patch.runtimes import coreai as runtime
from g4patch.view import Op

# Seconds for a save, and bytes a second that even a slow disk writes.
_TIME_LIMIT, _SLOWEST = 300.0, 10e6

Edits = Sequence[Mapping[str, Any]]

# Op -> its operands by meaning, as the worker builds them.
INSERTED = {
    Op.EQUAL: ("x", "y"),
    Op.OR: ("x", "y"),
    Op.AND: ("x", "y"),
    Op.NOT: ("x",),
    Op.WHERE: ("condition", "x", "y"),
    Op.EXPAND_DIMS: ("x", "axes"),
    Op.CAST: ("x",),
}


def write(model: Model, plan: Plan, staged: Staged) -> None:
    """Write main.mlirb with the plan applied, and its hash, to their stages.

    Raises EditError where the plan does not fit the model.
    """
    target = staged[model.path / PROGRAM]
    own = native(model)
    edits = [spec(own, edit) for edit in plan.graph_edits]
    with runtime.workspace() as folder:
        digest = _spliced(own, edits, target, folder, model.path)
        if digest is None:
            _save(own.path, {target: edits}, folder, model.path)
            digest = splice.digest(target)
    staged[model.path / HASH].write_bytes(digest)


def _spliced(own: Native, edits: Edits, target: Path, folder: Path, subject: Path) -> bytes | None:
    """Edit a stub without weights and put them back. None where saving the whole file might differ.

    The guard: the unedited stub must come out of coreai-core as it went in, and the unedited file out of our
    layout.
    """
    original = own.asset.program
    if not splice.is_identity(original):
        return None
    stub, again, edited = (folder / name for name in ("stub.mlirb", "again.mlirb", "edited.mlirb"))
    splice.write_stub(original, stub)
    _save(stub, {again: (), edited: edits}, folder, subject)
    if stub.read_bytes() != again.read_bytes():
        return None
    try:
        with target.open("xb") as file:
            return splice.splice(original, bytecode.parse(edited), file)
    except ValueError:
        target.unlink()
        return None


def _save(source: Path, saves: Mapping[Path, Edits], folder: Path, subject: Path) -> None:
    """Save a program with edits to each target in turn, each on top of those before it."""
    request = {
        "path": str(source.absolute()),
        "saves": [{"target": str(target.absolute()), "edits": edits} for target, edits in saves.items()],
    }
    try:
        runtime.run("save", request, folder, subject, _TIME_LIMIT + source.stat().st_size / _SLOWEST)
    except runtime.WorkerError as error:
        raise EditError(f"the plan does not fit {subject}: {error}") from error


def spec(own: Native, edit: GraphEdit) -> dict[str, Any]:
    """An edit as the worker takes it. Raises EditError where it names what the program does not have."""
    reading = own.readings.get(edit.graph)
    if reading is None:
        raise EditError(f"there is no function {edit.graph}")
    return {
        "nodes": [_node(reading, node) for node in edit.nodes],
        "redirects": [
            {**_use(reading, redirect.use.node, redirect.use.operand), "local": redirect.value}
            for redirect in edit.redirects
        ],
    }


def _use(reading: Reading, address: str, operand: str) -> dict[str, int]:
    use = reading.uses.get((address, operand))
    if use is None:
        raise EditError(f"{address} in {reading.graph.name} has no operand {operand} that can be edited")
    op, number = use
    return {"op": op, "operand": number}


def _node(reading: Reading, node: NewNode) -> dict[str, Any]:
    names = INSERTED.get(node.op)
    if names is None:
        raise EditError(f"{node.op} cannot be inserted into a Core AI program")
    operands = dict(node.operands)
    if "axes" in names:
        operands["axes"] = Const("int32", tuple(node.attributes["axes"]))
    if set(operands) != set(names):
        raise EditError(f"{node.op} takes {', '.join(names)}")
    dtype = {"dtype": node.attributes["dtype"]} if node.op is Op.CAST else {}
    return {
        "op": str(node.op),
        "output": node.output,
        **dtype,
        "operands": {name: _operand(reading, operands[name]) for name in names},
    }


def _operand(reading: Reading, operand: Operand) -> dict[str, Any]:
    if isinstance(operand, Const):
        return {"const": operand.value, "dtype": operand.dtype}
    if operand.startswith("$"):
        return {"local": operand}
    place = reading.places.get(operand)
    if place is None or place.calls:
        raise EditError(f"there is no value {operand} in {reading.graph.name} that can be used")
    return {"value": place.value}
