"""Every form that coremltools gives a stage, mended end to end and compared with a conversion of the mended module.

The packages are made by `samples/build/coreml_variants.py` with torch and Hugging Face, in an environment of its own.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto import load as milproto
from coremltools.proto import Model_pb2
from numpy.typing import NDArray
from safetensors.numpy import load_file

from g4patch import check, engine, fix, reference
from g4patch.report import Outcome, Severity, Status
from g4patch.runtimes.mil import Interpreter, Weights, read_function
from g4patch.verdicts import Verdict
from tests.conftest import SAMPLES, needs_build_python, tree

pytestmark = [pytest.mark.slow, needs_build_python]

Array = NDArray[Any]
DATA = Path("Data/com.apple.CoreML")

# What a person sees in each variant: the op that looks up, how its table is stored.
MENDED = {
    "ios15 fp32": ("gather", "const"),
    "ios15 fp16": ("gather", "const"),
    "ios16 fp16": ("gather", "const"),
    "ios17 fp32": ("gather", "const"),
    "ios17 fp16": ("gather", "const"),
    "ios18 fp32": ("gather", "const"),
    "ios18 fp16": ("gather", "const"),
    "export fp32": ("gather", "const"),
    "export fp16 stage": ("gather", "const"),
    "range": ("gather", "const"),
    "range fp32 stage": ("gather", "const"),
    "enumerated": ("gather", "const"),
    "state": ("gather", "const"),
    "enumerated, state": ("gather", "const"),
    "functions": ("gather", "const"),
    "palettes ios17": ("gather", "constexpr_lut_to_dense"),
    "palettes ios18": ("gather", "constexpr_lut_to_dense"),
    "int8 ios17": ("gather", "constexpr_affine_dequantize"),
    "int8 ios18": ("gather", "constexpr_blockwise_shift_scale"),
    "int4 blocks": ("gather", "constexpr_blockwise_shift_scale"),
    "small vocabulary ios17": ("gather", "const"),
    "small vocabulary ios18 range": ("gather", "const"),
    "indexed": ("gather", "const"),
    "index_select": ("gather", "const"),
    "rank 3": ("gather", "const"),
    "gather_nd": ("gather_nd", "const"),
    "gather_along_axis": ("gather_along_axis", "const"),
    "split tables": ("gather", "const"),
    "pipeline": ("gather", "const"),
    "stacked tables": ("gather", "const"),
    "table of rank 3": ("gather", "const"),
    "flat": ("gather", "const"),
    "split vocabulary": ("gather", "const"),
}
# Our mask comes behind a reshape of the ids there, coremltools' before it.
RESHAPED = frozenset({"index_select", "gather_along_axis", "gather_nd"})
# coremltools' casts, and the first id that each cannot hold.
NARROW = {"gather_nd in 16 bits": {"uint16": 65_536}, "clamp in 16 bits": {"float16": 2_049}}


@pytest.fixture(scope="module")
def variants(build_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All variants in folders of their names."""
    out = tmp_path_factory.mktemp("variants")
    command = [build_python, "-m", "samples.build.coreml_variants", str(out)]
    subprocess.run(command, cwd=SAMPLES.parent, check=True, stderr=subprocess.DEVNULL)
    return out


def message(package: Path) -> Any:
    model = Model_pb2.Model()
    model.ParseFromString((package / DATA / "model.mlmodel").read_bytes())
    return model


def functions(package: Path) -> dict[str, Any]:
    """The functions of a package by graph name; coremltools names the models of a pipeline by number."""
    model = message(package)
    parts = {f"model{number}/": part for number, part in enumerate(model.pipeline.models)} or {"": model}
    return {
        prefix + name: part.mlProgram.functions[name]
        for prefix, part in parts.items()
        for name in sorted(part.mlProgram.functions)
    }


class Ops:
    """The ops of one function by the values they define. `flat`: shapes count by their number of elements alone."""

    def __init__(self, function: Any, flat: bool = False) -> None:
        self.flat = flat
        self.all = list(function.block_specializations[function.opset].operations)
        self.by_output = {item.name: op for op in self.all for item in op.outputs}

    def operand(self, op: Any, parameter: str) -> Any:
        """The op that computes an operand; None for an input of the function."""
        return self.by_output.get(op.inputs[parameter].arguments[0].name)

    def masks(self) -> Iterator[Any]:
        """Selects by conditions that are joined of several: the choice of the pad, and no splice."""
        for op in self.all:
            condition = self.operand(op, "cond") if op.type == "select" else None
            if condition is not None and condition.type == "logical_or":
                yield op

    def type(self, tensor: Any) -> Any:
        if self.flat:
            return tensor.dataType, math.prod(dim.constant.size for dim in tensor.dimensions)
        return tensor.SerializeToString(deterministic=True)

    def fields(self, op: Any) -> Any:
        """All that is written of an op of a mask but the names of values: they are replaced by what they stand for."""
        if op.type not in ("select", "logical_or", "equal", "const"):
            return "the token ids"
        attributes = {
            key: value.SerializeToString(deterministic=True) for key, value in op.attributes.items() if key != "name"
        }
        outputs = [self.type(item.type.tensorType) for item in op.outputs]
        operands = {}
        for parameter, argument in op.inputs.items():
            (name,) = [binding.name for binding in argument.arguments]
            producer = self.by_output.get(name)
            ids = producer is None or (op.type, parameter) in (("select", "b"), ("equal", "x"))
            operands[parameter] = "the token ids" if ids else self.fields(producer)
        return op.type, "name" in op.attributes, attributes, outputs, operands


def interpreters(package: Path) -> dict[str, Interpreter]:
    weights = Weights(package / DATA / "weights")
    return {name: Interpreter(read_function(found, name), weights) for name, found in functions(package).items()}


def outcome(interpreter: Interpreter, inputs: dict[str, Array]) -> dict[str, Array]:
    """Outputs and states of a function after one prompt on empty states."""
    states: dict[str, Array] = {}
    known = {name: array for name, array in inputs.items() if name in interpreter.function.inputs}
    return {**interpreter.run(known, interpreter.function.outputs, state=states), **states}


@cache
def prompts(bundle: Path) -> list[dict[str, Array]]:
    found = reference.beside(bundle)
    assert found is not None
    return [dict(run.inputs) for run in reference.load(found).runs]


@pytest.fixture(params=MENDED)
def mended(request: pytest.FixtureRequest, variants: Path) -> Path:
    """A variant that was raw and is fixed in place, with no check skipped."""
    bundle: Path = variants / request.param / "stage.mlpackage"
    if not bundle.with_name("stage.mlpackage.g4patch").exists():
        assert check(bundle).subject.verdict is Verdict.RAW
        report = fix(bundle)
        assert (report.outcome, report.exit_code) == (Outcome.FIXED, 0), report.checks
        assert [(result.name, result.status) for result in report.checks] == [
            (name, Status.PASSED) for name in ("structure", "row map", "differential", "reference", "rules")
        ]
    return bundle


def test_the_variant_is_what_it_is_called(mended: Path) -> None:
    lookup, stored = MENDED[mended.parent.name]
    for analysis in engine.open_model(mended).analyses:
        ops = Ops(functions(mended)[analysis.graph.name])
        for found in analysis.lookups:
            for gather in [ops.by_output[shard.gather.output] for shard in found.shards or (found,)]:
                assert gather.type == lookup
                assert ops.operand(gather, "x").type == stored


def test_coremltools_loads_it(mended: Path) -> None:
    model = message(mended)
    for part in model.pipeline.models or [model]:
        program = milproto.load(part, part.specificationVersion, str(mended / DATA / "weights"))
        assert program.functions.keys() == part.mlProgram.functions.keys()


def test_the_mask_is_what_coremltools_writes(mended: Path) -> None:
    """Field by field: types, parameters, attributes, values and output types of the ops and of their constants."""
    converted = functions(mended.parent / "mended" / "stage.mlpackage")
    flat = mended.parent.name in RESHAPED
    for name, function in functions(mended).items():
        ours, theirs = Ops(function, flat), Ops(converted[name], flat)
        expected = [theirs.fields(op) for op in theirs.masks()]
        assert len(expected) == (name != "model1/main")  # the pipeline's second model is handed its rows
        assert [ours.fields(op) for op in ours.masks()] == expected


def test_it_describes_itself_as_the_conversion_does(mended: Path) -> None:
    """Inputs, outputs, states and metadata, but for our own entry."""
    ours, theirs = (message(package) for package in (mended, mended.parent / "mended" / "stage.mlpackage"))
    note = ours.description.metadata.userDefined.pop("g4patch")
    assert note.startswith("g4patch ")
    if not ours.description.metadata.ByteSize():  # pipelines and packages of several functions had none
        ours.description.ClearField("metadata")
    assert ours.description == theirs.description
    assert ours.specificationVersion == theirs.specificationVersion


def test_it_computes_what_the_conversion_of_the_mended_module_does(mended: Path) -> None:
    """Bit for bit, outputs and states. What comes out of a pipeline's model goes into those after it."""
    converted = interpreters(mended.parent / "mended" / "stage.mlpackage")
    compared = 0
    for inputs in prompts(mended):
        our_values, their_values = dict(inputs), dict(inputs)
        for name, interpreter in interpreters(mended).items():
            declared = interpreter.function.inputs
            if not all(kind.admits(our_values[key].shape) for key, kind in declared.items()):
                continue
            ours, theirs = outcome(interpreter, our_values), outcome(converted[name], their_values)
            assert len(ours) == len(theirs) > 0
            for key, value in ours.items():
                assert value.tobytes() == theirs[key].tobytes(), key
            our_values |= ours
            their_values |= theirs
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", NARROW)
def test_ids_that_a_cast_cannot_hold(name: str, variants: Path) -> None:
    """As coremltools makes it: no edit mends it, and one rule says so."""
    bundle = variants / name / "stage.mlpackage"
    before = tree(bundle.parent)
    report = fix(bundle)
    assert report.subject.verdict is Verdict.CLOBBERED
    assert (report.outcome, report.exit_code) == (Outcome.FOUND, 1)
    assert tree(bundle.parent) == before
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert {finding.rule for finding in errors} - {"splice-misses-rows"} == {"narrow-ids"}
    ((dtype, first),) = NARROW[name].items()
    assert f"to {dtype} cannot hold" in errors[0].message
    assert f"({first}, " in errors[0].message
    # The interpreter agrees: the id reads the row of the one that the cast makes of it.
    (interpreter,) = interpreters(bundle).values()
    (lookup,) = engine.open_model(bundle).analyses[0].lookups
    other = int(np.array(first).astype(dtype).astype(np.int64))
    ids = np.array([[first, other, 7, 7, 7, 7, 7, 7]], np.int32)
    rows = interpreter.run({"input_ids": ids}, [lookup.output])[lookup.output][0].reshape(8, -1)
    assert rows[0].tobytes() == rows[1].tobytes() != rows[2].tobytes()


def test_a_prompt_goes_on_in_the_states(variants: Path) -> None:
    """Eight rows through `prefill`, the ninth through `decode` on its states: Hugging Face's ninth row of nine."""
    folder = variants / "functions"
    numbers = load_file(folder / "continued.safetensors")
    interpreted = interpreters(folder / "mended" / "stage.mlpackage")
    states: dict[str, Array] = {}
    found = []
    for name, rows in (("prefill", slice(0, 8)), ("decode", slice(8, 9))):
        inputs = {key: array[:, rows] for key, array in numbers.items() if key != "hidden_states_out"}
        found.append(interpreted[name].run(inputs, ["hidden_states_out"], state=states)["hidden_states_out"])
    error = np.abs(np.concatenate(found, axis=1) - numbers["hidden_states_out"]).max(axis=(0, 2))
    assert error.max() < 0.2  # float16, see samples/build/model.py
    fresh = {key: array[:, 8:9] for key, array in numbers.items() if key != "hidden_states_out"}
    alone = interpreted["decode"].run(fresh, ["hidden_states_out"])["hidden_states_out"]
    assert np.abs(alone - numbers["hidden_states_out"][:, 8:]).max() > 1  # on empty states it is another number


def test_chunks_that_are_handed_their_rows(variants: Path) -> None:
    """Nothing is to be mended in them, and the interpreter runs what such chunks are made of like Hugging Face does."""
    folder = variants / "chunks"
    before = tree(folder)
    for report in (check(folder), fix(folder)):
        assert (report.verdict, report.exit_code, report.findings) == (Verdict.HOST_SIDE, 0, ())
        handed_in = [analysis.host_inputs for model in report.models for analysis in model.subject.analyses]
        assert handed_in == [("per_layer_raw",), ("per_layer_combined",)]
    assert tree(folder) == before
    numbers = load_file(folder / "numbers.safetensors")
    first, second = (interpreters(folder / f"chunk{number}.mlpackage")["main"] for number in (1, 2))
    assert {operation.type for operation in first.function.operations} >= {"conv", "layer_norm", "split"}
    for run in ("media", "left padding", "text"):
        inputs = {name: numbers[f"{run}/{name}"] for name in ("hidden_states", "per_layer_raw", "position_ids")}
        found = first.run(inputs, ["hidden_states_out", "per_layer_combined_out"])
        values = {
            "position_ids": inputs["position_ids"],
            "hidden_states": found["hidden_states_out"],
            "per_layer_combined": found["per_layer_combined_out"],
        }
        found["hidden_states_out"] = second.run(values, ["hidden_states_out"])["hidden_states_out"]
        # float16, see samples/build/model.py: 4e-3 for rows, 2e-1 behind the layers
        for name, expected, bound in (
            ("per_layer_combined_out", "per_layer_combined", 4e-3),
            ("hidden_states_out", "second", 0.2),
        ):
            assert np.abs(found[name] - numbers[f"{run}/{expected}"]).max() < bound
