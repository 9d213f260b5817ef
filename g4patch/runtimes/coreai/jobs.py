"""What the worker can be asked to do.

A request is the JSON object that `g4patch.runtimes.coreai.run` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from g4patch.runtimes.coreai.bindings import MARK, ir, load_program
from g4patch.runtimes.coreai.edit import apply
from g4patch.runtimes.coreai.lookups import lookup, run
from g4patch.runtimes.coreai.program import dump

Request = Mapping[str, Any]


def _read(request: Request, folder: Path) -> dict[str, Any]:
    """The program as data, and what the dialect's own verifier says against it, a line each."""
    _, module = load_program(Path(request["path"]))
    with module.context:
        return {"module": dump(module), "faults": _faults(module)}


def _faults(module: Any) -> list[str]:
    try:
        return [] if module.operation.verify() else ["the program does not verify"]
    except ir.MLIRError as error:
        return str(error).strip().splitlines()


def _save(request: Request, folder: Path) -> None:
    """Load a program once; for each of `saves`, insert its edits and save the program as coreai-core does."""
    program, module = load_program(Path(request["path"]))
    for save in request["saves"]:
        with module.context, ir.Location.file(MARK, 0, 0):
            apply(module, save["edits"])
        program._save_bytecode(Path(save["target"]))


COMMANDS: dict[str, Callable[[Request, Path], Any]] = {
    "read": _read,
    "save": _save,
    "lookup": lookup,
    "run": run,
}
