"""Faults put into a program with coreai-core's own bindings: `python -m tests.mutants.coreai_edits KIND ASSET`.

Run in a process of its own, like all native code. The asset is a mended `coreai-stage`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TEXT_ID, MARK = 7, "g4patch"


class Stage:
    """The operations that faults are put into, found by what they are."""

    def __init__(self, module: Any) -> None:
        (self.graph,) = (op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"')
        self.ops = [op.operation for op in self.graph.regions[0].blocks[0].operations]
        _, self.gather = self.named("gather_nd")  # the token embedding's is the first
        self.scale = next(use.owner for use in self.gather.results[0].uses)
        hidden = self.graph.regions[0].blocks[0].arguments[0]
        self.splice = next(op for op in self.named("broadcasting_where") if op.operands[1] == hidden)
        self.output = self.ops[-1]

    def named(self, name: str) -> list[Any]:
        return [op for op in self.ops if op.name.endswith(f".{name}")]

    def before(self, op: Any) -> Any:
        from coreai._compiler import ir

        return ir.InsertionPoint(op)


def pad_rows_zeroed(stage: Stage) -> None:
    """rows * (index != pad): what a float mask behind the lookup would do."""
    from coreai._compiler.dialects import coreai as ops

    at = stage.before(stage.scale)
    pad = ops.constant(np.array(0, np.int32), ip=at)
    kept = ops.not_(ops.broadcasting_equal(stage.gather.operands[1], pad, ip=at), ip=at)
    factor = ops.cast(kept, np.float32, ip=at)
    stage.scale.operands[0] = ops.broadcasting_mul(stage.gather.results[0], factor, ip=at)


def mask_overflows(stage: Stage) -> None:
    """The PLE mask compares ids after a cast to eight bits, in which text ids equal media ids."""
    from coreai._compiler.dialects import coreai as ops

    where = stage.gather.operands[1].owner
    stack = [where.operands[0].owner]
    while stack:
        op = stack.pop()
        if op.name.endswith("broadcasting_or"):
            stack += [operand.owner for operand in op.operands]
            continue
        at = stage.before(op)
        op.operands[0] = ops.cast(ops.cast(op.operands[0], np.int8, ip=at), np.int32, ip=at)
        op.operands[1] = ops.cast(ops.cast(op.operands[1], np.int8, ip=at), np.int32, ip=at)


def put(op: Any, operand: int, value: str) -> None:
    """Another value in place of the scalar constant that an operation reads."""
    from coreai._compiler import ir

    constant = op.operands[operand].owner
    type = str(constant.results[0].type)
    constant.attributes["value"] = ir.Attribute.parse(f"dense<{value}> : {type}")


def splice_narrowed(stage: Stage) -> None:
    """The splice's own condition asks for a text id in place of the image's."""
    put(stage.named("broadcasting_equal")[0], 1, str(TEXT_ID))


def scale_dropped(stage: Stage) -> None:
    put(stage.scale, 1, "1.0")


def epsilon_changed(stage: Stage) -> None:
    """Hardly a fault: outputs move by 1e-4."""
    norm = stage.named("reduce_mean")[0].results[0]
    put(next(use.owner for use in norm.uses), 1, "2.0e-6")


def output_renamed(stage: Stage) -> None:
    from coreai._compiler import ir

    stage.graph.attributes["res_attrs"] = ir.Attribute.parse('[{coreai.name = "renamed"}]')


def output_retyped(stage: Stage) -> None:
    from coreai._compiler import ir
    from coreai._compiler.dialects import coreai as ops

    narrow = ops.cast(stage.output.operands[0], np.float16, ip=stage.before(stage.output))
    inputs, old = str(stage.graph.attributes["function_type"]).rsplit(" -> ", 1)
    stage.graph.attributes["function_type"] = ir.Attribute.parse(f"{inputs} -> {old.replace('f32', 'f16')}")
    stage.output.operands[0] = narrow


def extra_op(stage: Stage) -> None:
    """One more op that changes no number, where nothing was planned."""
    from coreai._compiler.dialects import coreai as ops

    at = stage.before(stage.output)
    one = ops.constant(np.array(1, np.float32), ip=at)
    stage.output.operands[0] = ops.broadcasting_mul(stage.output.operands[0], one, ip=at)


KINDS: dict[str, Callable[[Stage], None]] = {
    function.__name__: function
    for function in (
        *(pad_rows_zeroed, mask_overflows, splice_narrowed, scale_dropped, epsilon_changed),
        *(output_renamed, output_retyped, extra_op),
    )
}


def main(kind: str, asset: Path) -> None:
    """Put one fault into an asset, in place."""
    from coreai._compiler import ir
    from coreai.authoring.asset import AIProgram

    path, edited = asset / "main.mlirb", asset / "edited.mlirb"
    program = AIProgram._load_bytecode(path)
    module = program._module._mlir_module
    # Marked as the writer marks what it inserts: this is what a faulty writer would leave.
    with module.context, ir.Location.file(MARK, 0, 0):
        KINDS[kind](Stage(module))
        module.operation.verify()
    program._save_bytecode(edited)
    edited.replace(path)
    (asset / "main.hash").write_bytes(hashlib.sha256(path.read_bytes()).digest())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
