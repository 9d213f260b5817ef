"""The one place that imports coreai-core. Loaded in the worker only.

The public authoring API reads programs and cannot edit them, so this uses the compiler's own bindings. They
promise no stability: hence the exact version, and the check that everything used is there.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from g4patch.runtimes.coreai import Mismatch

# Module -> what is used of it. The authoring package first: the dialects import parts of it, and it of them.
_USED = {
    "coreai.authoring.asset": ("AIProgram", "AIModelAsset"),
    "coreai.authoring.graph_builder": ("GraphOp",),
    "coreai._compiler.ir": (
        "Block",
        "BlockArgument",
        "DenseElementsAttr",
        "InsertionPoint",
        "Location",
        "MLIRError",
        "Module",
        "OpResult",
        "Operation",
        "RankedTensorType",
    ),
    "coreai._compiler.dialects.coreai": (
        "HandleType",
        "broadcasting_and",
        "broadcasting_equal",
        "broadcasting_or",
        "broadcasting_where",
        "cast",
        "constant",
        "create_token",
        "expand_dims",
        "not_",
        "output",
    ),
    "coreai._compiler.dialects._coreai_ops_gen": ("ConstantOp",),
    "coreai._compiler._mlir_libs._coreaiIR._bindings.mlir.dialects.coreai": ("create_elements_attr",),
    "coreai.runtime": ("NDArray",),
}


def _load() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module, names in _USED.items():
        try:
            loaded = importlib.import_module(module)
            found |= {f"{module}.{name}": getattr(loaded, name) for name in names}
        except (ImportError, AttributeError) as error:
            raise Mismatch(f"coreai-core has changed: {error}") from error
        found[module] = loaded
    return found


_found = _load()
ir: Any = _found["coreai._compiler.ir"]
ops: Any = _found["coreai._compiler.dialects.coreai"]
ConstantOp: Any = _found["coreai._compiler.dialects._coreai_ops_gen.ConstantOp"]
create_elements: Any = _found[
    "coreai._compiler._mlir_libs._coreaiIR._bindings.mlir.dialects.coreai.create_elements_attr"
]
AIProgram: Any = _found["coreai.authoring.asset.AIProgram"]
GraphOp: Any = _found["coreai.authoring.graph_builder.GraphOp"]
HandleType: Any = _found["coreai._compiler.dialects.coreai.HandleType"]
RuntimeArray: Any = _found["coreai.runtime.NDArray"]


# The file name in the location of inserted operations: the only kind of mark that coreai-core saves.
MARK = "g4patch"


def load_program(path: Path) -> tuple[Any, Any]:
    """A program's AIProgram and MLIR module.

    The weights stay in the file, which must not change meanwhile.
    """
    program = AIProgram._load_bytecode(path)
    return program, program._module._mlir_module
