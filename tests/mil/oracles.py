"""Programs made with coremltools' builder, and what other implementations make of the same ops.

Oracles: coremltools' value inference (the builder folds an op whose operands are constants), coremltools'
decompression of `constexpr_*` ops, and onnxruntime.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import onnx
import onnxruntime
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from numpy.typing import NDArray

from g4patch.runtimes.mil import Function, Interpreter, Weights, read_function

Array = NDArray[Any]
Build = Callable[..., Any]

_TYPES = {np.dtype("float32"): types.fp32, np.dtype("float16"): types.fp16, np.dtype("int32"): types.int32}
# Each conversion collects garbage; what is imported by now need not be looked through every time.
gc.freeze()

# Removed when the tests end.
_FOLDER = tempfile.TemporaryDirectory(prefix="g4patch-mil-")
IOS15, IOS16, IOS17, IOS18 = ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18


def convert(build: Build, inputs: Mapping[str, Any], target: ct.target = IOS18) -> tuple[Function, Weights]:
    """The program that coremltools writes for `build`, no pass applied, as the interpreter reads it.

    `inputs` are named and ordered as the parameters of `build`: arrays, whose shape and dtype count, or specs.
    """
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    made = mb.program(input_specs=[_spec(item) for item in inputs.values()], opset_version=target)(build)
    folder = tempfile.mkdtemp(dir=_FOLDER.name)
    model = ct.convert(
        made,
        convert_to="mlprogram",
        pass_pipeline=ct.PassPipeline.EMPTY,
        minimum_deployment_target=target,
        skip_model_load=True,
        package_dir=f"{folder}/model.mlpackage",
    )
    message = model.get_spec().mlProgram.functions["main"]
    return read_function(message, "main"), Weights(Path(model.weights_dir))


def _spec(item: Any) -> Any:
    return mb.TensorSpec(item.shape, dtype=_TYPES[item.dtype]) if isinstance(item, np.ndarray) else item


def interpret(build: Build, inputs: Mapping[str, Array], target: ct.target = IOS18) -> list[Array]:
    """All outputs of the converted program, run by the interpreter."""
    function, weights = convert(build, inputs, target)
    found = Interpreter(function, weights).run(inputs, function.outputs)
    return [found[name] for name in function.outputs]


def fold(build: Build, inputs: Mapping[str, Array], target: ct.target = IOS18) -> list[Array]:
    """The same by coremltools' value inference: the operands are constants."""
    found: list[Any] = []

    def program(unused: Any) -> Any:
        result = build(**{name: mb.const(val=array) for name, array in inputs.items()})
        found.extend(result if isinstance(result, (list, tuple)) else [result])
        return mb.identity(x=unused)

    mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=target)(program)
    missing = [var.op.op_type for var in found if var.val is None]
    assert not missing, f"coremltools does not fold {missing}"
    return [np.asarray(var.val) for var in found]


def onnx_run(
    operator: str, inputs: Sequence[Array], outputs: int = 1, opset: int = 18, **attributes: Any
) -> list[Array]:
    """One ONNX operator, run by onnxruntime."""
    names = [f"i{number}" for number in range(len(inputs))]
    results = [f"o{number}" for number in range(outputs)]
    node = onnx.helper.make_node(operator, names, results, **attributes)
    declared = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
    ]
    untyped = [onnx.ValueInfoProto(name=name) for name in results]
    graph = onnx.helper.make_graph([node], "one", declared, untyped)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(zip(names, inputs, strict=True))))


def same(found: Sequence[Array], wanted: Sequence[Array], ulps: int = 4) -> None:
    """Equal shapes and values; floats within some units in the last place of the largest element."""
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == theirs.shape
        if mine.dtype.kind != "f":
            np.testing.assert_array_equal(mine, theirs)
            continue
        wide = theirs.astype(np.float64)
        largest = np.max(np.abs(wide[np.isfinite(wide)]), initial=0.0)
        tolerance = ulps * float(np.finfo(mine.dtype).eps) * max(largest, 1e-6)
        np.testing.assert_allclose(mine.astype(np.float64), wide, rtol=0, atol=tolerance)


def check(build: Build, inputs: Mapping[str, Array], target: ct.target = IOS18, ulps: int = 4) -> None:
    """The interpreter agrees with coremltools' value inference."""
    same(interpret(build, inputs, target), fold(build, inputs, target), ulps)


def floats(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(low: int, high: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)
