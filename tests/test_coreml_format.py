"""Core ML: what is read against what coremltools says, what is written against what coremltools would write.

The references here are coremltools' own: its protobuf modules, its loader of ML Programs, and its exporter, which
converts small programs that are written with its builder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.frontend.milproto import load as milproto
from coremltools.converters.mil.mil import types
from coremltools.proto import Model_pb2

from g4patch import Options, check, fix, places, ple, revert
from g4patch.edits import Plan, mask_ids
from g4patch.errors import BundleError, EditError
from g4patch.formats import Model, coreml
from g4patch.formats.coreml import check as coreml_check
from g4patch.formats.coreml.model import default_shapes
from g4patch.report import Status
from g4patch.runtimes import Unavailable
from g4patch.tokens import Token, TokenFacts
from g4patch.verdicts import Verdict
from g4patch.view import Graph, Op, Table, Use
from tests.conftest import SAMPLES, Copy, numbers, sample, tree

CORE_ML = sorted(path.parent.name for path in SAMPLES.glob("coreml-*/stage.mlpackage"))
MODEL = Path("Data/com.apple.CoreML/model.mlmodel")
WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")

RULES = ("ple-raw-ids", "splice-misses-rows")

# The media ids of a vocabulary of 320, as in the samples (samples/README.md).
MEDIA = (310, 311, 314)
TOKENS = TokenFacts(Token(310, "the test"), Token(311, "the test"), Token(314, "the test"), Token(0, "the test"))


def message(package: Path) -> Any:
    """The package's `Model`, parsed by coremltools."""
    model = Model_pb2.Model()
    model.ParseFromString((package / MODEL).read_bytes())
    return model


def rewrite(package: Path, change: Callable[[Any], None]) -> None:
    """Change a package's `Model` in place."""
    model = message(package)
    change(model)
    (package / MODEL).write_bytes(model.SerializeToString())


def main_block(model: Any) -> Any:
    function = model.mlProgram.functions["main"]
    return function.block_specializations[function.opset]


def operation(model: Any, output: str) -> Any:
    """The op that computes a value."""
    (found,) = [op for op in main_block(model).operations if output in [item.name for item in op.outputs]]
    return found


def mask(model: Model, tokens: TokenFacts = TOKENS) -> Plan:
    """The plan for every lookup of a model."""
    edits = []
    for graph in model.graphs:
        for lookup in ple.analyse(graph, tokens).lookups:
            place = places.place_for_mask(graph, lookup, coreml.MASK_DTYPES, 0)
            assert not isinstance(place, str), place
            missing = lookup.judgement.missing
            edits.append(mask_ids(graph, place.value, place.uses, missing, 0, "ple-raw-ids", place.casts))
    return Plan(tuple(edits))


def mend(package: Path, staged: Path, plan: Plan | None = None) -> tuple[Model, Model, Plan]:
    """(before, after, plan) with the plan written to `staged`."""
    before = coreml.open_model(package)
    plan = plan or coreml.complete(before, mask(before))
    stages = {before.replaced[0]: staged}
    coreml.write(before, plan, stages)
    return before, coreml.open_model(package, stages), plan


def verdicts(model: Model, tokens: TokenFacts = TOKENS) -> list[Verdict]:
    return [ple.analyse(graph, tokens).verdict for graph in model.graphs]


# --- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORE_ML)
def test_inputs_and_outputs_are_those_of_the_description(name: str) -> None:
    dtypes = {65568: "float32", 65552: "float16", 131104: "int32"}  # ArrayFeatureType.ArrayDataType
    for graph in coreml.open_model(sample(name)).graphs:
        described = description(message(sample(name)), graph.name)
        for feature, value in zip([*described.input, *described.state], graph.inputs, strict=True):
            array = feature.type.multiArrayType
            if feature.type.WhichOneof("Type") == "stateType":
                array = feature.type.stateType.arrayType
            assert (value.name, value.dtype) == (feature.name, dtypes[array.dataType])
            assert value.shape is not None
            assert len(value.shape) == len(array.shape)
            if array.WhichOneof("ShapeFlexibility") is None:
                assert value.shape == tuple(array.shape)
            else:
                ranges = [(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]
                assert value.shape == tuple(low if low == high else None for low, high in ranges)
        assert graph.outputs == tuple(feature.name for feature in described.output)


def description(model: Any, function: str) -> Any:
    """Where a package describes the inputs and outputs of a function: its own description, if it has several."""
    return next((item for item in model.description.functions if item.name == function), model.description)


# By hand from the exporter's settings: the prompt's length is static, or 1 to 64 with 14 as the default.
LENGTHS = {
    ("coreml-fp16", "main"): 8,
    ("coreml-ios16", "main"): 14,
    ("coreml-state", "main"): 8,
    ("coreml-multifunction", "prefill"): 8,
    ("coreml-multifunction", "decode"): 1,
}


@pytest.mark.parametrize(("name", "function"), LENGTHS)
def test_default_shapes(name: str, function: str) -> None:
    found = default_shapes(message(sample(name)), function)
    assert found.keys() == {"hidden_states", "input_ids", "position_ids"}
    assert found["input_ids"] == (1, LENGTHS[name, function])
    assert found["hidden_states"][:2] == found["position_ids"] == found["input_ids"]


def test_default_shapes_of_a_part_of_a_pipeline(copy: Copy) -> None:
    package = copy("coreml-ios16")
    stage = message(package)
    function = stage.mlProgram.functions["main"]
    function.block_specializations["CoreML8"].CopyFrom(function.block_specializations[function.opset])
    pipeline = Model_pb2.Model(specificationVersion=stage.specificationVersion)
    pipeline.pipeline.models.append(stage)
    pipeline.pipeline.names.append("stage")
    assert default_shapes(pipeline, "stage/main")["input_ids"] == (1, 14)
    assert default_shapes(pipeline, "stage/main@CoreML8")["input_ids"] == (1, 14)
    assert default_shapes(pipeline, "main") == {}


@pytest.mark.parametrize("name", CORE_ML)
def test_nodes_and_constants_are_those_of_the_loaded_program(name: str) -> None:
    spec = message(sample(name))
    program = milproto.load(spec, spec.specificationVersion, str((sample(name) / WEIGHTS).parent))
    for graph in coreml.open_model(sample(name)).graphs:
        operations = program.functions[graph.name].operations
        computed = [op for op in operations if op.op_type != "const" and not op.op_type.startswith("constexpr_")]
        assert list(as_loaded(graph)) == [
            (op.op_type, "" if op.op_type == UPDATE else op.outputs[0].name) for op in computed
        ]
        small = 0
        for op in operations:
            if op.op_type == "const" and op.outputs[0].name in graph.constants:
                expected = np.asarray(op.outputs[0].val)
                found = graph.constants[op.outputs[0].name]
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert np.array_equal(found, expected)
                small += expected.size > 9  # those are in weight.bin
        assert small > 0


UPDATE = "coreml_update_state"


def as_loaded(graph: Graph) -> Iterator[tuple[str, str]]:
    """Native name and address of each node. Where a state is read after a write, the loader makes one op of the two,
    and names it anew."""
    written = False
    for node in graph.nodes:
        if node.native == "write_state":
            written = True
        elif written:
            assert node.native == "read_state"
            yield UPDATE, ""
            written = False
        else:
            yield node.native, node.address


# By hand from the exporter's settings: V rows of L*D values, and how many bytes those take.
TABLES = {
    "coreml-fp16": Table("", (33000, 6), "float16", "", 33000 * 6 * 2),
    "coreml-fp32": Table("", (320, 16), "float32", "", 320 * 16 * 4),
    "coreml-cast16": Table("", (320, 24), "float16", "", 320 * 24 * 2),
    "coreml-ios16": Table("", (320, 24), "float16", "", 320 * 24 * 2),
    "coreml-palette-262144": Table("", (262144, 6), "float16", "", 262144 * 6 // 2 + 16 * 2, "4-bit palette"),
    "coreml-int4-262144": Table(
        "", (262144, 6), "float16", "", 262144 * 6 // 2 + 262144 // 8 * 6 // 2 * 2, "int4 block 8x2"
    ),
    "coreml-state": Table("", (33000, 6), "float16", "", 33000 * 6 * 2),
    "coreml-multifunction": Table("", (320, 24), "float16", "", 320 * 24 * 2),
}


@pytest.mark.parametrize("name", CORE_ML)
def test_table_facts(name: str) -> None:
    places = set()
    for graph in coreml.open_model(sample(name)).graphs:
        tables = [table for key, table in graph.tables.items() if "per_layer_weight" in key]
        assert [replace(table, name="", storage="") for table in tables] == [TABLES[name]]
        assert tables[0].storage.startswith("weights/weight.bin @ ")
        places.add(tables[0].storage)
    assert len(places) == 1  # several functions share it


def test_nothing_of_coremltools_runs_to_read_a_package() -> None:
    code = (
        "import sys; from pathlib import Path; from g4patch.formats import coreml; "
        f"coreml.open_model(Path({str(sample('coreml-fp16'))!r})); "
        "print([name for name in ('coremltools', 'torch', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- programs of coremltools' builder ---------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((320, 16)).astype(np.float32)
PROJECTION = RNG.standard_normal((16, 16)).astype(np.float32)

Lookup = Callable[[Any], Any]


def build(folder: Path, lookup: Lookup, target: Any = ct.target.iOS17, dynamic: bool = False) -> Path:
    """A package whose only function adds looked-up rows to a projection, as per-layer inputs are made (L=2, D=8).

    `lookup` takes the ids [1,8] and returns rows [1,8,16], or a list of such.
    """
    length = mb_symbol() if dynamic else 8
    specs = [mb.TensorSpec((1, length, 16), types.fp32), mb.TensorSpec((1, length), types.int32)]

    @mb.program(input_specs=specs, opset_version=target)  # type: ignore[untyped-decorator]
    def program(hidden: Any, ids: Any) -> Any:
        total = mb.reshape(x=mb.linear(x=hidden, weight=PROJECTION), shape=[1, -1, 2, 8])
        found = lookup(ids)
        for looked_up in found if isinstance(found, list) else [found]:
            scaled = mb.mul(x=looked_up, y=np.float32(8**0.5))
            total = mb.add(x=total, y=mb.reshape(x=scaled, shape=[1, -1, 2, 8]))
        return mb.identity(x=total, name="out")

    model = ct.convert(
        program,
        minimum_deployment_target=target,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
        inputs=None if not dynamic else open_inputs(),
    )
    path = folder / "stage.mlpackage"
    model.save(str(path))
    return path


def mb_symbol() -> Any:
    from coremltools.converters.mil.mil import get_new_symbol

    return get_new_symbol()


def open_inputs() -> list[Any]:
    length = ct.RangeDim(1, 64, default=8)
    return [ct.TensorType("hidden", (1, length, 16)), ct.TensorType("ids", (1, length), np.int32)]


def rows(ids: Any) -> Any:
    return mb.gather(x=TABLE, indices=ids, axis=0)


def is_media(ids: Any) -> Any:
    image, audio, video = (mb.equal(x=ids, y=token) for token in MEDIA)
    return mb.logical_or(x=mb.logical_or(x=image, y=audio), y=video)


def by_coordinates(ids: Any) -> Any:
    return mb.gather_nd(x=TABLE, indices=mb.expand_dims(x=ids, axes=[2]))


def masked(ids: Any) -> Any:
    return rows(mb.select(cond=is_media(ids), a=0, b=ids))


def masked_with_filled_pad(ids: Any) -> Any:
    return rows(mb.select(cond=is_media(ids), a=mb.fill_like(ref_tensor=ids, value=0), b=ids))


def image_masked_by_not_equal(ids: Any) -> Any:
    return rows(mb.select(cond=mb.not_equal(x=ids, y=310), a=ids, b=0))


def clamped(ids: Any) -> Any:
    return rows(mb.minimum(x=ids, y=309))


def by_element(ids: Any) -> Any:
    index = mb.tile(x=mb.reshape(x=ids, shape=[8, 1]), reps=[1, 16])
    return mb.reshape(x=mb.gather_along_axis(x=TABLE, indices=index, axis=0), shape=[1, 8, 16])


def by_column(ids: Any) -> Any:
    return mb.transpose(x=mb.gather(x=TABLE.T.copy(), indices=ids, axis=1), perm=[1, 2, 0])


def in_batches(ids: Any) -> Any:
    return mb.gather(x=TABLE[None], indices=ids, axis=1, batch_dims=1)


def in_a_branch(ids: Any) -> Any:
    long = mb.greater(x=mb.reduce_max(x=ids), y=5)
    return mb.cond(pred=long, _true_fn=lambda: rows(ids), _false_fn=lambda: rows(mb.add(x=ids, y=0)))


def in_a_loop(ids: Any) -> Any:
    def body(count: Any, found: Any) -> Any:
        return mb.add(x=count, y=1), mb.add(x=rows(ids), y=found)

    start = np.zeros((1, 8, 16), np.float32)
    return mb.while_loop(_cond=lambda count, _: mb.less(x=count, y=1), _body=body, loop_vars=(0, start))[1]


def behind_a_loop(ids: Any) -> Any:
    def body(count: Any, inner: Any) -> Any:
        return mb.add(x=count, y=1), mb.add(x=inner, y=0)

    return rows(mb.while_loop(_cond=lambda count, _: mb.less(x=count, y=3), _body=body, loop_vars=(0, ids))[1])


@pytest.mark.parametrize(
    ("lookup", "verdict"),
    [
        (rows, Verdict.RAW),
        (by_coordinates, Verdict.RAW),
        (masked, Verdict.PATCHED),
        (masked_with_filled_pad, Verdict.PATCHED),
        (image_masked_by_not_equal, Verdict.PARTIAL),
        (clamped, Verdict.CLOBBERED),
        (by_element, Verdict.RAW),
        (by_column, Verdict.AMBIGUOUS),
        (in_batches, Verdict.AMBIGUOUS),
        (in_a_branch, Verdict.AMBIGUOUS),
        (in_a_loop, Verdict.AMBIGUOUS),
        (behind_a_loop, Verdict.AMBIGUOUS),
    ],
)
def test_verdict_on_what_the_builder_makes(lookup: Lookup, verdict: Verdict, tmp_path: Path) -> None:
    assert verdicts(coreml.open_model(build(tmp_path, lookup))) == [verdict]


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"begin": [0, 2, 0], "end": [1, 5, 16]}, (range(1), range(2, 5), range(16))),
        ({"begin": [0, -3, 0], "end": [1, -1, 16]}, (range(1), range(5, 7), range(16))),
        ({"begin": [0, 2, 3], "end": [0, 0, 5], "end_mask": [True, True, False]}, (range(1), range(2, 8), range(3, 5))),
        ({"begin": [0, 6, 3], "end": [1, 7, 5], "begin_mask": [False, True, False]}, (range(1), range(7), range(3, 5))),
        (
            {"begin": [0, -1, 0], "end": [1, 0, 16], "squeeze_mask": [False, True, False]},
            (range(1), range(7, 8), range(16)),
        ),
        ({"begin": [0, 0, 0], "end": [1, 8, 16], "stride": [1, 2, 1]}, None),
    ],
)
def test_ranges_of_slices(arguments: dict[str, Any], taken: tuple[range, ...] | None, tmp_path: Path) -> None:
    """By hand from the definition of `slice_by_index`, on rows [1,8,16]."""

    def sliced(ids: Any) -> Any:
        looked_up = rows(ids)
        part = mb.slice_by_index(x=looked_up, **arguments)
        return mb.add(x=looked_up, y=mb.reduce_sum(x=part, keep_dims=False))

    (graph,) = coreml.open_model(build(tmp_path, sliced)).graphs
    (node,) = [node for node in graph.nodes if node.op is Op.SLICE]
    ranges = node.attributes["ranges"]
    found = [range(size)[slice(*ranges[axis])] for axis, size in enumerate((1, 8, 16)) if axis in ranges]
    assert found == list(taken or ())


# --- writing -------------------------------------------------------------------------------------------------------


def nameless(operations: list[Any]) -> list[bytes]:
    """Ops without the names they define; those they read are replaced by the kind of op that defines them."""
    kinds = {item.name: op.type for op in operations for item in op.outputs}
    result = []
    for op in operations:
        bare = type(op).FromString(op.SerializeToString())
        for argument in bare.inputs.values():
            for binding in argument.arguments:
                binding.name = kinds.get(binding.name, "a value of the graph")
        for item in bare.outputs:
            item.name = ""
        del bare.attributes["name"].immediateValue.tensor.strings.values[:]
        result.append(bare.SerializeToString(deterministic=True))
    return sorted(result)


def added(package: Path, other: Path) -> list[Any]:
    """Ops of the first package that compute values which the second does not have."""
    known = {item.name for op in main_block(message(other)).operations for item in op.outputs}
    operations = main_block(message(package)).operations
    return [op for op in operations if not known.intersection(item.name for item in op.outputs)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS17, ct.target.iOS18], ids=str)
def test_inserted_ops_are_those_that_coremltools_writes(target: Any, dynamic: bool, tmp_path: Path) -> None:
    for name in ("broken", "mended"):
        (tmp_path / name).mkdir()
    broken = build(tmp_path / "broken", rows, target, dynamic)
    converted = build(tmp_path / "mended", masked, target, dynamic)
    expected = [op for op in main_block(message(converted)).operations if wanted(op, converted)]
    original = tmp_path / "original.mlpackage"
    staged = tmp_path / "staged"
    mend(broken, staged)
    broken.rename(original)
    converted.rename(broken)  # any package will do to hold the mended file
    (broken / MODEL).write_bytes(staged.read_bytes())
    assert nameless(added(broken, original)) == nameless(expected)


def wanted(op: Any, package: Path) -> bool:
    """Whether an op belongs to the mask: its comparisons with media ids, what joins them, the choice of the pad."""
    model = message(package)
    masking = [o for o in main_block(model).operations if o.type in ("equal", "logical_or")]
    masking += [o for o in main_block(model).operations if o.type == "select" and reads(model, o) == "logical_or"]
    names = {b.name for o in masking for a in o.inputs.values() for b in a.arguments}
    return op in masking or (op.type == "const" and op.outputs[0].name in names)


def reads(model: Any, select: Any) -> str:
    kind: str = operation(model, select.inputs["cond"].arguments[0].name).type
    return kind


@pytest.mark.parametrize("name", ["coreml-fp16", "coreml-ios16", "coreml-palette-262144"])
def test_coremltools_takes_the_mended_package(name: str, copy: Copy, tmp_path: Path) -> None:
    package = copy(name)
    from g4patch.engine import open_model

    tokens = open_model(package).tokens
    before = coreml.open_model(package)
    _, after, plan = mend(package, tmp_path / "staged", mask(before, tokens))
    assert verdicts(after, tokens) == [Verdict.PATCHED]
    assert coreml.differences(before, after, plan) == ()
    assert coreml.validate(after) == ()
    (package / MODEL).write_bytes((tmp_path / "staged").read_bytes())
    loaded = ct.models.MLModel(str(package), skip_model_load=True)
    assert loaded.get_spec().specificationVersion == message(sample(name)).specificationVersion


def test_everything_else_survives(copy: Copy, tmp_path: Path) -> None:
    package = copy("coreml-fp32")
    unknown = b"\xba\xbb\x18\x05hello"  # field 50103, which no version of Model.proto has

    def furnish(model: Any) -> None:
        model.description.metadata.userDefined["licence"] = "none"
        model.mlProgram.docString = "ours"
        operation(model, "var_268").outputs[0].type.tensorType.attributes["nan"].immediateValue.tensor.floats.values[
            :
        ] = [float("nan")]

    rewrite(package, furnish)
    (package / MODEL).write_bytes((package / MODEL).read_bytes() + unknown)
    (package / MODEL).chmod(0o600)
    before, after, plan = mend(package, tmp_path / "staged")
    assert coreml.differences(before, after, plan) == ()
    assert (tmp_path / "staged").stat().st_mode & 0o777 == 0o600
    written = (tmp_path / "staged").read_bytes()
    assert unknown in written
    coreml.write(before, plan, {before.replaced[0]: tmp_path / "again"})
    assert (tmp_path / "again").read_bytes() == written
    mended = Model_pb2.Model.FromString(written)
    assert mended.description.metadata.userDefined.pop("g4patch") == plan.note
    assert mended.description == message(package).description
    assert mended.mlProgram.docString == "ours"


def without_metadata(model: Any) -> None:
    model.description.ClearField("metadata")


def with_an_entry_of_ours(model: Any) -> None:
    model.description.metadata.userDefined["g4patch"] = "said before"


@pytest.mark.parametrize("furnish", [without_metadata, with_an_entry_of_ours])
def test_a_note_is_added_and_taken_back(furnish: Callable[[Any], None], copy: Copy, tmp_path: Path) -> None:
    package = copy("coreml-fp32")
    rewrite(package, furnish)
    before, after, plan = mend(package, tmp_path / "staged")
    assert plan.note == f"g4patch {version('g4patch')}: ple-raw-ids; plan {plan.digest}"
    assert coreml.differences(before, after, plan) == ()
    mended = Model_pb2.Model.FromString((tmp_path / "staged").read_bytes())
    said = "said before\n" if furnish is with_an_entry_of_ours else ""
    assert mended.description.metadata.userDefined["g4patch"] == said + plan.note
    without = Plan(plan.edits)
    assert coreml.differences(before, after, without) == (
        "model: the entry g4patch of its metadata is not the one of the plan",
        "model: description differs",
    )


def test_each_fix_adds_a_note(copy: Copy) -> None:
    """One a rule, and none where nothing is left to do; both are undone by `revert`."""
    package = copy("coreml-fp32")
    Path(f"{package}.reference.safetensors").unlink()  # it asks for both at once
    before = tree(package)
    digests = [fix(package, Options(select=frozenset({rule}))).models[0].plan.digest for rule in RULES]
    assert fix(package).publication is None
    lines = message(package).description.metadata.userDefined["g4patch"].splitlines()
    tool = f"g4patch {version('g4patch')}"
    assert lines == [f"{tool}: {rule}; plan {digest}" for rule, digest in zip(RULES, digests, strict=True)]
    for _ in RULES:
        revert(package)
    assert tree(package) == before


def test_new_names_are_unique_among_values_and_ops(copy: Copy, tmp_path: Path) -> None:
    package = copy("coreml-fp32")

    def occupy(model: Any) -> None:
        name = operation(model, "var_268").attributes["name"].immediateValue.tensor.strings
        name.values[0] = "ple_raw_ids_masked"

    rewrite(package, occupy)
    _, after, _ = mend(package, tmp_path / "staged")
    names = [node.address for node in after.graphs[0].nodes if node.address.startswith("ple_raw_ids_masked")]
    assert names == ["ple_raw_ids_masked_2"]
    assert coreml.validate(after) == ()


def test_all_functions_are_mended(copy: Copy, tmp_path: Path) -> None:
    package = copy("coreml-fp32")
    rewrite(package, lambda model: model.mlProgram.functions["decode"].CopyFrom(model.mlProgram.functions["main"]))
    before, after, plan = mend(package, tmp_path / "staged")
    assert [graph.name for graph in before.graphs] == ["decode", "main"]
    assert verdicts(before) == [Verdict.RAW, Verdict.RAW]
    assert verdicts(after) == [Verdict.PATCHED, Verdict.PATCHED]
    assert coreml.differences(before, after, plan) == ()
    (main_only,) = [edit for edit in plan.graph_edits if edit.graph == "main"]
    _, half, _ = mend(package, tmp_path / "half", Plan((main_only,)))
    assert verdicts(half) == [Verdict.RAW, Verdict.PATCHED]
    assert any("decode: index of var_268 does not read" in line for line in coreml.differences(before, half, plan))


def in_a_row(package: Path) -> None:
    """Make a package a pipeline of two: of its stage, and of the same stage for what comes out of the first."""
    first, second = message(package), message(package)
    pipeline = Model_pb2.Model(specificationVersion=first.specificationVersion)
    for number, (stage, names) in enumerate(
        ((first, {}), (second, {"hidden_states": "hidden_states_out", "hidden_states_out": "last"}))
    ):
        function = stage.mlProgram.functions["main"]
        for item in (*function.inputs, *stage.description.input, *stage.description.output):
            item.name = names.get(item.name, item.name)
        block = main_block(stage)
        block.outputs[:] = [names.get(name, name) for name in block.outputs]
        for op in block.operations:
            for item in (*op.outputs, *(b for argument in op.inputs.values() for b in argument.arguments)):
                item.name = names.get(item.name, item.name)
            for value in op.attributes.values():
                if value.WhichOneof("value") == "blobFileValue":
                    value.blobFileValue.fileName = f"@model_path/weights/{number}-weight.bin"
        pipeline.pipeline.models.append(stage)
        pipeline.pipeline.names.append(f"part{number}")
        shutil.copy(package / WEIGHTS, package / WEIGHTS.parent / f"{number}-weight.bin")
    (package / WEIGHTS).unlink()
    pipeline.description.input.extend(first.description.input)
    pipeline.description.output.extend(second.description.output)
    (package / MODEL).write_bytes(pipeline.SerializeToString())


def test_models_of_a_pipeline(copy: Copy) -> None:
    """Both are mended in one go, all checks run, and `revert` brings the pipeline back."""
    package = copy("coreml-fp32")
    in_a_row(package)
    Path(f"{package}.reference.safetensors").unlink()  # it is of one stage
    before = tree(package)
    report = fix(package)
    assert [graph.name for graph in report.subject.model.graphs] == ["part0/main", "part1/main"]
    assert report.subject.model.details[0] == "pipeline of 2 ML Programs"
    assert [edit.graph for edit in report.plan.graph_edits if edit.rule == "ple-raw-ids"] == [
        "part0/main",
        "part1/main",
    ]
    checks = {found.name: found.status for found in report.checks}
    assert checks.pop("reference") is Status.SKIPPED
    assert set(checks.values()) == {Status.PASSED}
    assert "deep check" not in report.checks[0].summary
    assert check(package).verdict is Verdict.PATCHED
    revert(package)
    assert tree(package) == before


def test_a_prompt_runs_through_the_models_of_a_pipeline(copy: Copy) -> None:
    alone = coreml.open_model(sample("coreml-fp32"))
    package = copy("coreml-fp32")
    in_a_row(package)
    pipeline = coreml.open_model(package)
    inputs, _ = numbers(sample("coreml-fp32"))
    first = coreml.probe(alone, "main").run(inputs, ["hidden_states_out"])["hidden_states_out"]
    second = coreml.probe(alone, "main").run({**inputs, "hidden_states": first}, ["hidden_states_out"])
    found = coreml.probe(pipeline, "part1/main").run(inputs, ["last"])["last"]
    assert found.tobytes() == second["hidden_states_out"].tobytes()
    assert found.tobytes() != first.tobytes()


def test_a_nested_pipeline(copy: Copy, tmp_path: Path) -> None:
    package = copy("coreml-fp32")
    stage = message(package)
    inner = Model_pb2.Model(specificationVersion=stage.specificationVersion)
    inner.pipeline.models.append(stage)
    inner.pipeline.names.append("decoder")
    outer = Model_pb2.Model(specificationVersion=stage.specificationVersion)
    outer.pipelineClassifier.pipeline.models.append(inner)
    (package / MODEL).write_bytes(outer.SerializeToString())
    before, after, plan = mend(package, tmp_path / "staged")
    assert [graph.name for graph in before.graphs] == ["model0/decoder/main"]
    assert verdicts(after) == [Verdict.PATCHED]
    assert coreml.differences(before, after, plan) == ()
    assert coreml.validate(after) == ()


def test_a_cast_that_other_nodes_read_is_made_again(tmp_path: Path) -> None:
    """coreml-cast16 has a cast of its own for the one lookup; two lookups share it (coremltools makes it once)."""

    def two_lookups(ids: Any) -> Any:
        narrow = mb.cast(x=mb.cast(x=ids, dtype="int16"), dtype="uint16")
        return [mb.gather(x=table, indices=narrow, axis=0) for table in (TABLE, -TABLE)]

    package = build(tmp_path, two_lookups)
    both = mask(coreml.open_model(package))
    first, second = both.graph_edits
    assert [(node.op, bool(node.reason)) for node in first.nodes][-3:] == [
        (Op.WHERE, False),
        (Op.CAST, True),
        (Op.CAST, True),
    ]
    before, after, _ = mend(package, tmp_path / "both", both)
    assert coreml.differences(before, after, both) == ()
    assert coreml.validate(after) == ()
    assert verdicts(after) == [Verdict.PATCHED]
    _, after, _ = mend(package, tmp_path / "first", Plan((first,)))
    lookups = ple.analyse(after.graphs[0], TOKENS).lookups
    assert [lookup.verdict for lookup in lookups] == [Verdict.PATCHED, Verdict.RAW]
    assert any(second.redirects[0].use.node in line for line in coreml.differences(before, after, both))


def test_two_edits_of_one_graph(copy: Copy, tmp_path: Path) -> None:
    """The second stands before the first in the file, and neither moves the other's target."""
    package = copy("coreml-fp32")
    before = coreml.open_model(package)
    (edit,) = mask(before).graph_edits
    embedding = mask_ids(before.graphs[0], "select_0", [Use("var_263", "index")], [5], 0, "other")
    before, after, plan = mend(package, tmp_path / "staged", Plan((edit, embedding)))
    assert coreml.differences(before, after, plan) == ()
    assert coreml.validate(after) == ()
    assert after.graphs[0].node("var_268").operands["index"] == "ple_raw_ids_masked"
    assert after.graphs[0].node("var_263").operands["index"] == "other_masked"


def test_a_plan_that_does_not_fit_is_refused(copy: Copy, tmp_path: Path) -> None:
    before = coreml.open_model(copy("coreml-fp32"))
    (edit,) = mask(before).graph_edits
    (redirect,) = edit.redirects
    stages = {before.replaced[0]: tmp_path / "staged"}
    for wrong in (
        replace(edit, graph="decode"),
        replace(edit, redirects=()),
        replace(edit, redirects=(replace(redirect, use=Use("var_268", "rows")),)),
        replace(edit, redirects=(replace(redirect, value="nowhere"),)),
        replace(edit, nodes=(replace(edit.nodes[0], op=Op.CONCAT), *edit.nodes[1:])),
    ):
        with pytest.raises(EditError):
            coreml.write(before, Plan((wrong,)), stages)
        assert not stages[before.replaced[0]].exists()


# --- differences -----------------------------------------------------------------------------------------------------


def pad_of(model: Any) -> Any:
    return operation(model, "ple_raw_ids_masked_a").attributes["val"].immediateValue.tensor.ints


def wrong_pad(model: Any) -> None:
    pad_of(model).values[0] = 1


def pad_of_another_type(model: Any) -> None:
    operation(model, "ple_raw_ids_masked_a").outputs[0].type.tensorType.dataType = 22


def swapped_branches(model: Any) -> None:
    inputs = operation(model, "ple_raw_ids_masked").inputs
    a, b = inputs["a"].arguments[0].name, inputs["b"].arguments[0].name
    inputs["a"].arguments[0].name, inputs["b"].arguments[0].name = b, a


def and_for_or(model: Any) -> None:
    operation(model, "ple_raw_ids_any_1").type = "logical_and"


def mask_of_another_value(model: Any) -> None:
    operation(model, "ple_raw_ids_is_311").inputs["x"].arguments[0].name = "input_ids"


def extra_op(model: Any) -> None:
    block = main_block(model)
    block.operations.add().CopyFrom(operation(model, "ple_raw_ids_masked"))
    block.operations[-1].outputs[0].name = "more"


def op_removed(model: Any) -> None:
    block = main_block(model)
    block.operations.remove(operation(model, "is_image"))


def ops_swapped(model: Any) -> None:
    block = main_block(model)
    first, second = (type(op).FromString(op.SerializeToString()) for op in block.operations[:2])
    block.operations[0].CopyFrom(second)
    block.operations[1].CopyFrom(first)


def output_renamed(model: Any) -> None:
    main_block(model).outputs[0] = "input_1"


def constant_elsewhere(model: Any) -> None:
    operation(model, "const_1").attributes["val"].immediateValue.tensor.floats.values[0] *= 2


TABLE_NAMES = ("weight", "per_layer_weight")


def weight_offset(model: Any) -> None:
    """The PLE table at the place of the token embedding, which has the same shape."""
    values = [operation(model, f"per_layer_inputs_language_embed_tokens_{n}").attributes["val"] for n in TABLE_NAMES]
    values[1].blobFileValue.offset = values[0].blobFileValue.offset


def token_embedding_too(model: Any) -> None:
    operation(model, "var_263").inputs["indices"].arguments[0].name = "ple_raw_ids_masked"


def redirect_undone(model: Any) -> None:
    operation(model, "var_268").inputs["indices"].arguments[0].name = "select_0"


def lookup_with_other_axis(model: Any) -> None:
    operation(model, "var_268").inputs["axis"].arguments[0].name = "var_263_axis_1"


def attribute_added(model: Any) -> None:
    select = operation(model, "ple_raw_ids_masked")
    select.attributes["more"].CopyFrom(select.attributes["name"])


def description_changed(model: Any) -> None:
    model.description.input[0].name = "states"


def metadata_changed(model: Any) -> None:
    model.description.metadata.author = "someone"


def note_changed(model: Any) -> None:
    model.description.metadata.userDefined["g4patch"] += "?"


def note_removed(model: Any) -> None:
    del model.description.metadata.userDefined["g4patch"]


def entry_added(model: Any) -> None:
    model.description.metadata.userDefined["more"] = ""


def version_raised(model: Any) -> None:
    model.specificationVersion += 1


def opset_attribute_added(model: Any) -> None:
    name = operation(model, "is_image").attributes["name"]
    model.mlProgram.functions["main"].attributes["more"].CopyFrom(name)


def build_info_changed(model: Any) -> None:
    model.mlProgram.attributes["buildInfo"].docString = "changed"


def function_added(model: Any) -> None:
    model.mlProgram.functions["more"].CopyFrom(model.mlProgram.functions["main"])


def input_retyped(model: Any) -> None:
    model.mlProgram.functions["main"].inputs[1].type.tensorType.dataType = 24


TAMPERING: dict[Callable[[Any], None], str] = {
    wrong_pad: "main: index of var_268",
    pad_of_another_type: "main: index of var_268",
    swapped_branches: "main: index of var_268",
    and_for_or: "main: index of var_268",
    mask_of_another_value: "main: index of var_268",
    redirect_undone: "main: index of var_268",
    attribute_added: "main: index of var_268",
    extra_op: "main: select more was added",
    op_removed: "main: equal is_image is gone",
    ops_swapped: "has moved",
    output_renamed: "main: outputs differs",
    constant_elsewhere: "main: const const_1 differs in attribute val",
    weight_offset: "per_layer_weight differs in attribute val",
    token_embedding_too: "main: gather var_263 differs in input indices",
    lookup_with_other_axis: "main: gather var_268 differs in input axis",
    description_changed: "model: description differs",
    metadata_changed: "model: description differs",
    note_changed: "model: the entry g4patch of its metadata is not the one of the plan",
    note_removed: "model: the entry g4patch of its metadata is not the one of the plan",
    entry_added: "model: description differs",
    version_raised: "model: specificationVersion differs",
    opset_attribute_added: "main: attributes differs",
    build_info_changed: "model: mlProgram differs",
    function_added: "more: function added",
    input_retyped: "main: inputs differs",
}


@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_tampering_is_reported(tamper: Callable[[Any], None], tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    before, after, plan = mend(sample("coreml-fp32"), staged)
    assert coreml.differences(before, after, plan) == ()
    model = Model_pb2.Model.FromString(staged.read_bytes())
    tamper(model)
    staged.write_bytes(model.SerializeToString())
    after = coreml.open_model(before.path, {before.replaced[0]: staged})
    lines = coreml.differences(before, after, plan)
    assert any(TAMPERING[tamper] in line for line in lines), lines


def test_an_unknown_field_in_any_op_is_reported(tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    before, _, plan = mend(sample("coreml-fp32"), staged)
    model = Model_pb2.Model.FromString(staged.read_bytes())
    operation(model, "is_image").MergeFromString(b"\xba\xbb\x18\x05hello")
    staged.write_bytes(model.SerializeToString())
    after = coreml.open_model(before.path, {before.replaced[0]: staged})
    assert coreml.differences(before, after, plan) == (
        "main: equal is_image differs in fields that are not known here",
    )


# --- validation ------------------------------------------------------------------------------------------------------


def undefined(model: Any) -> None:
    operation(model, "is_image").inputs["x"].arguments[0].name = "nowhere"


def used_before_defined(model: Any) -> None:
    operation(model, "is_image").inputs["x"].arguments[0].name = "select_0"


def unnamed(model: Any) -> None:
    del operation(model, "is_image").attributes["name"]


def another_dtype(model: Any) -> None:
    operation(model, "var_243").attributes["val"].type.tensorType.dataType = 22


def int64(model: Any) -> None:
    constant = operation(model, "var_243")
    value = constant.attributes["val"]
    constant.outputs[0].type.tensorType.dataType = value.type.tensorType.dataType = 24
    value.immediateValue.tensor.longInts.values.append(310)


def stored_as_floats(model: Any) -> None:
    operation(model, "var_243").attributes["val"].immediateValue.tensor.floats.values.append(310)


def weight_of_another_type(model: Any) -> None:
    table = operation(model, "per_layer_inputs_language_embed_tokens_per_layer_weight")
    table.outputs[0].type.tensorType.dataType = table.attributes["val"].type.tensorType.dataType = 10


def no_output(model: Any) -> None:
    main_block(model).outputs[0] = "nowhere"


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (undefined, "main: equal is_image reads nowhere as x, which is not defined before it"),
        (used_before_defined, "main: equal is_image reads select_0 as x, which is not defined before it"),
        (unnamed, "main: equal is_image has no name attribute"),
        (another_dtype, "main: const var_243 is declared as int32[], its value as int16[]"),
        (int64, "main: const var_243 is int64, which Core ML does not run"),
        (stored_as_floats, "main: const var_243 is declared as int32, and its value is stored as floats"),
        (weight_of_another_type, "is declared as float16, and weight.bin holds float32"),
        (no_output, "main: the output nowhere is not defined"),
    ],
)
def test_own_checks(damage: Callable[[Any], None], line: str, copy: Copy) -> None:
    package = copy("coreml-fp32")
    rewrite(package, damage)
    assert any(line in found for found in coreml.validate(coreml.open_model(package)))


def test_a_value_that_is_defined_twice_is_refused(copy: Copy) -> None:
    package = copy("coreml-fp32")
    rewrite(package, lambda model: main_block(model).operations.add().CopyFrom(operation(model, "is_image")))
    with pytest.raises(BundleError, match="function main holds two values called is_image"):
        coreml.open_model(package)


def test_what_the_loader_refuses_is_reported(copy: Copy, tmp_path: Path) -> None:
    """A mask of another shape: our own checks do not infer shapes, coremltools does."""
    package = copy("coreml-fp32")
    staged = tmp_path / "staged"
    before, _, _ = mend(package, staged)
    model = Model_pb2.Model.FromString(staged.read_bytes())
    operation(model, "ple_raw_ids_masked").outputs[0].type.tensorType.dimensions[1].constant.size = 9
    staged.write_bytes(model.SerializeToString())
    (line,) = coreml.validate(coreml.open_model(package, {before.replaced[0]: staged}))
    assert line.startswith("coremltools: AssertionError")


def test_what_the_loader_does_not_know_is_not_a_fault(copy: Copy, tmp_path: Path) -> None:
    package = copy("coreml-fp32")
    rewrite(package, lambda model: setattr(model.mlProgram, "docString", "ours"))
    _, after, _ = mend(package, tmp_path / "staged")
    with pytest.raises(Unavailable, match=r"deep check not available: .* without the edit either"):
        coreml.validate(after)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import sys; sys.exit(3)", "ended with code 3"),
        ("import time; time.sleep(60)", "took more than"),
    ],
)
def test_a_loader_that_dies_is_not_a_fault(
    program: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loader.py").write_text(program)
    monkeypatch.setattr(coreml_check, "_LOADER", tmp_path / "loader.py")
    monkeypatch.setattr(coreml_check, "_TIME_LIMIT", 1)
    with pytest.raises(Unavailable, match=reason):
        coreml.validate(coreml.open_model(sample("coreml-fp32")))


# --- hostile files ---------------------------------------------------------------------------------------------------


def manifest(package: Path, change: Callable[[Any], None]) -> None:
    content = json.loads((package / "Manifest.json").read_text())
    change(content)
    (package / "Manifest.json").write_text(json.dumps(content))


def root(content: Any) -> Any:
    return content["itemInfoEntries"][content["rootModelIdentifier"]]


def of_kind(kind: str) -> Callable[[Path], None]:
    def change(package: Path) -> None:
        model = Model_pb2.Model(specificationVersion=5)
        getattr(model, kind).SetInParent()
        (package / MODEL).write_bytes(model.SerializeToString())

    return change


def leaves_the_package(package: Path) -> None:
    (package.parent / "outside.mlmodel").write_bytes((package / MODEL).read_bytes())
    manifest(package, lambda content: root(content).update(path="../../outside.mlmodel"))


def absolute(package: Path) -> None:
    (package.parent / "outside.mlmodel").write_bytes((package / MODEL).read_bytes())
    manifest(package, lambda content: root(content).update(path=str(package.parent / "outside.mlmodel")))


def linked_away(package: Path) -> None:
    (package / MODEL).rename(package.parent / "outside.mlmodel")
    (package / MODEL).symlink_to(package.parent / "outside.mlmodel")


def manifest_linked_away(package: Path) -> None:
    (package / "Manifest.json").rename(package.parent / "outside.json")
    (package / "Manifest.json").symlink_to(package.parent / "outside.json")


def weights_linked_away(package: Path) -> None:
    (package / WEIGHTS).rename(package.parent / "outside.bin")
    (package / WEIGHTS).symlink_to(package.parent / "outside.bin")


def weights_elsewhere(name: str) -> Callable[[Path], None]:
    def change(package: Path) -> None:
        def rename(model: Any) -> None:
            table = operation(model, "per_layer_inputs_language_embed_tokens_per_layer_weight")
            table.attributes["val"].blobFileValue.fileName = name

        rewrite(package, rename)

    return change


def weights_at(offset: int) -> Callable[[Path], None]:
    def change(package: Path) -> None:
        def move(model: Any) -> None:
            table = operation(model, "per_layer_inputs_language_embed_tokens_per_layer_weight")
            table.attributes["val"].blobFileValue.offset = offset

        rewrite(package, move)

    return change


def weights_cut(package: Path) -> None:
    (package / WEIGHTS).write_bytes((package / WEIGHTS).read_bytes()[:40_000])


def weights_are_a_pointer(package: Path) -> None:
    (package / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 70720\n")


def weights_are_junk(package: Path) -> None:
    (package / WEIGHTS).write_bytes(RNG.bytes(70_720))


def nested_too_deep(package: Path) -> None:
    """1,000 blocks in ops in blocks, more than a parser should follow, written by hand."""
    block = b""
    for _ in range(1000):
        block = field(3, field(4, block))  # Block.operations, Operation.blocks
    function = field(2, b"CoreML7") + field(3, field(1, b"CoreML7") + field(2, block))
    program = field(2, field(1, b"main") + field(2, function))
    (package / MODEL).write_bytes(field(502, program))  # Model.mlProgram


def field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def constant_with_too_few_elements(package: Path) -> None:
    rewrite(package, lambda m: operation(m, "var_273").attributes["val"].immediateValue.tensor.ints.values.pop())


def without_the_block_of_its_opset(package: Path) -> None:
    rewrite(package, lambda model: setattr(model.mlProgram.functions["main"], "opset", "CoreML9"))


NOISE = np.random.default_rng(1).bytes(4096)

HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda p: (p / "Manifest.json").unlink(), "Manifest.json cannot be read"),
    "manifest is no JSON": (lambda p: (p / "Manifest.json").write_text("{"), "is not JSON"),
    "manifest is a list": (lambda p: (p / "Manifest.json").write_text("[]"), "is not a JSON object"),
    "manifest nests deep": (lambda p: (p / "Manifest.json").write_text("[" * 100_000), "is not JSON"),
    "no root": (lambda p: manifest(p, lambda c: c.pop("rootModelIdentifier")), "names no root model"),
    "root is a number": (lambda p: manifest(p, lambda c: root(c).update(path=7)), "names no root model"),
    "root is a folder": (lambda p: manifest(p, lambda c: root(c).update(path=".")), "is not a file"),
    "root is missing": (lambda p: (p / MODEL).unlink(), "is not in the package"),
    "root has a null byte": (lambda p: manifest(p, lambda c: root(c).update(path="a\0b")), "is not in the package"),
    "root leaves the package": (leaves_the_package, "leads out of the package"),
    "root is absolute": (absolute, "is not in the package"),
    "root is linked away": (linked_away, "leads out of the package"),
    "manifest is linked away": (manifest_linked_away, "Manifest.json leads out of the package"),
    "weights are linked away": (weights_linked_away, "leads out of the package"),
    "weights are outside": (weights_elsewhere("@model_path/../../../config.json"), "leads out of the package"),
    "weights are absolute": (weights_elsewhere("@model_path//etc/passwd"), "leads out of the package"),
    "weights are elsewhere": (weights_elsewhere("/etc/passwd"), "a weight is stored in '/etc/passwd'"),
    "weights are missing": (lambda p: (p / WEIGHTS).unlink(), "is not in the package"),
    "weights are cut": (weights_cut, "has 40,000 bytes, and the model needs at least"),
    "weights are empty": (lambda p: (p / WEIGHTS).write_bytes(b""), "is not a Core ML weight file"),
    "weights are junk": (weights_are_junk, "is not a Core ML weight file"),
    "weights are a pointer": (weights_are_a_pointer, "is a git-lfs pointer"),
    "offset is beyond the end": (weights_at(2**63 + 5), "and the model needs at least"),
    "offset is no weight": (weights_at(25_857), "has no weight at offset 25,857"),
    "model is empty": (lambda p: (p / MODEL).write_bytes(b""), "the model is empty"),
    "model is encrypted": (lambda p: (p / MODEL).write_bytes(NOISE), "truncated or encrypted"),
    "model nests too deep": (nested_too_deep, "is not a Core ML model"),
    "model has no functions": (lambda p: rewrite(p, lambda m: m.mlProgram.functions.clear()), "holds no function"),
    "constant is too short": (constant_with_too_few_elements, "a constant of shape [4] holds 3 elements"),
    "opset has no block": (without_the_block_of_its_opset, "lacks a block for its opset CoreML9"),
    "neural network": (of_kind("neuralNetwork"), "holds a neural network (neuralNetwork, specification 5)"),
    "classifier": (of_kind("neuralNetworkClassifier"), "holds a neural network"),
    "custom": (of_kind("customModel"), "holds a custom model"),
    "linked": (of_kind("linkedModel"), "holds a link to a compiled model"),
    "serialised": (of_kind("serializedModel"), "holds a serialised model"),
    "linear": (of_kind("glmRegressor"), "holds a glmRegressor, not an ML Program"),
    "empty pipeline": (of_kind("pipeline"), "holds no ML Program"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_packages_are_refused_with_a_hint(name: str, copy: Copy) -> None:
    damage, message = HOSTILE[name]
    package = copy("coreml-fp32")
    damage(package)
    with pytest.raises(BundleError) as raised:
        coreml.open_model(package)
    assert message in raised.value.message
    assert raised.value.hint


def test_compiled_models_are_refused(tmp_path: Path) -> None:
    compiled = tmp_path / "stage.mlmodelc"
    compiled.mkdir()
    (compiled / "coremldata.bin").write_bytes(b"")
    with pytest.raises(BundleError) as raised:
        coreml.open_model(compiled)
    assert "compile again" in raised.value.hint
