"""In-place `fix` of a generated 3 GB Core AI bundle with its checks, and `revert`, against copying and coreai-core.

    python -m tests.benchmarks.coreai_in_place [FOLDER]

Wanted: at most 1.3 times as long as `cp -r` and `sha256sum` of the copy, and at most 300 MB of anonymous memory. To
load, edit and save it with coreai-core alone takes all of the bundle in memory. Linux only: memory is read from /proc.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.measure import Watched, watched

_IDS, _LAYERS, _WIDTH, _HIDDEN = 262144, 24, 256, 64

_BUILD = f"""
import os, sys
from pathlib import Path
import numpy as np
from coreai.authoring.asset import AIProgram
from coreai.authoring.context import Context
from coreai.authoring.graph_builder import GraphOp
from coreai._compiler import ir
from coreai._compiler.dialects import coreai as ops

some = np.random.default_rng(1).standard_normal((4096, {_LAYERS * _WIDTH}), np.float32).astype(np.float16)
context = Context()._mlir_context
with context, ir.Location.unknown():
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        type = ir.Type.parse
        result = type("tensor<1x?x{_LAYERS}x{_WIDTH}xf16>")
        inputs = [type("tensor<1x?x{_HIDDEN}xf16>"), type("tensor<1x?xsi32>")]
        graph = GraphOp("main", inputs, [result], input_names=["hidden_states", "input_ids"], result_names=["out"])
        with graph.block:
            hidden, ids = graph.arguments
            shape = ops.constant(np.array([1, -1, {_LAYERS}, {_WIDTH}], np.int32))
            table = ops.constant(np.tile(some, ({_IDS} // 4096, 1)))
            found = ops.gather_nd(table, ops.expand_dims(ids, ops.constant(np.array([2], np.int32))))
            rows = ops.reshape(ops.broadcasting_mul(found, ops.constant(np.float16({_WIDTH**0.5}))), shape)
            weights = ops.constant(np.ones((1, {_HIDDEN}, {_LAYERS * _WIDTH}), np.float16))
            projected = ops.reshape(ops.broadcasting_batch_matmul(hidden, weights), shape)
            ops.output([ops.cast(ops.broadcasting_add(rows, projected), result)])
    AIProgram._from_mlir_module(module).save_asset(Path(sys.argv[1]))
os._exit(0)
"""

_FIX = """
import sys
from pathlib import Path
import g4patch
report = g4patch.fix(Path(sys.argv[1]))
run = {check.name: str(check.status) for check in report.checks}
assert report.exit_code == 0, report.checks
assert run == {"structure": "passed", "row map": "passed", "differential": "passed", "reference": "skipped"}, run
"""

_REVERT = """
import sys
from pathlib import Path
import g4patch
g4patch.revert(Path(sys.argv[1]))
"""

# The same plan, applied by the same builders, without the splice: coreai-core loads and saves all of it.
_OFFICIAL = """
import os, sys
from pathlib import Path
import g4patch
from g4patch.formats.coreai.edit import spec
from g4patch.formats.coreai.model import native
from g4patch.runtimes.coreai.bindings import ir, load_program
from g4patch.runtimes.coreai.edit import apply

(model,) = g4patch.inspect(Path(sys.argv[1])).models
edits = [spec(native(model.subject.model), edit) for edit in model.plan.edits]
program, module = load_program(Path(sys.argv[1]) / "main.mlirb")
with module.context, ir.Location.unknown():
    apply(module, edits)
program.save_asset(Path(sys.argv[2]))
os._exit(0)
"""


def python(code: str, *arguments: Path) -> Watched:
    return watched([sys.executable, "-c", code, *map(str, arguments)])


def main() -> None:
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        bundle, other = Path(name) / "stage.aimodel", Path(name) / "other.aimodel"
        python(_BUILD, bundle)
        size = (bundle / "main.mlirb").stat().st_size
        print(f"main.mlirb: {size / 1e9:.2f} GB")
        costs = {"cp -r, sha256sum": watched(["sh", "-c", f"cp -r '{bundle}' '{other}' && sha256sum '{other}'/*"])}
        shutil.rmtree(other)
        costs["coreai-core alone"] = python(_OFFICIAL, bundle, other)
        shutil.rmtree(other)
        costs["fix in place"] = python(_FIX, bundle)
        backup = sum(path.stat().st_size for path in Path(f"{bundle}.g4patch").rglob("*") if path.is_file())
        costs["revert"] = python(_REVERT, bundle)
        for what, cost in costs.items():
            print(f"{what:<20}{cost}")
        print(f"kept for the revert: {backup / 1e3:.0f} KB")
        ratio = costs["fix in place"].seconds / costs["cp -r, sha256sum"].seconds
        print(f"fix, to cp and sha256sum: {ratio:.2f}")


if __name__ == "__main__":
    main()
