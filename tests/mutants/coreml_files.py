"""Wrong files, made with coremltools' protobuf messages: faults that no plan asks for."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.backend.mil.helper import create_scalar_value
from coremltools.proto import FeatureTypes_pb2, MIL_pb2

from g4patch.ple import Lookup
from g4patch.report import Subject
from tests.conftest import SAMPLES
from tests.mutants import STAGE, TWO_FUNCTIONS, TWO_LOOKUPS, Bench, FileChange, Mutant, sample
from tests.mutants.plans import TEXT_ID, WRONG_PLANS
from tests.test_coreml_format import MODEL, TABLE, build, main_block, operation, rewrite

Change = Callable[[Any, Lookup], None]
Message = Any

_INT32, _FLOAT32 = MIL_pb2.DataType.INT32, MIL_pb2.DataType.FLOAT32
_INT8, _FLOAT16, _BOOL = MIL_pb2.DataType.INT8, MIL_pb2.DataType.FLOAT16, MIL_pb2.DataType.BOOL


def rewriting(change: Change) -> FileChange:
    """A change of the package's model; its weights are left alone."""

    def changed(bundle: Path, before: Subject) -> None:
        rewrite(bundle, lambda model: change(model, before.analyses[0].lookups[0]))

    return changed


def made(kind: str, name: str, type: int, shape: tuple[int, ...], **inputs: str) -> Message:
    """An op as coremltools writes it."""
    op = MIL_pb2.Operation(type=kind)
    op.attributes["name"].CopyFrom(create_scalar_value(name))
    for parameter, value in inputs.items():
        op.inputs[parameter].arguments.add(name=value)
    tensor = op.outputs.add(name=name).type.tensorType
    tensor.dataType, tensor.rank = type, len(shape)
    for size in shape:
        tensor.dimensions.add().constant.size = size
    return op


def constant(name: str, value: Any) -> Message:
    op = MIL_pb2.Operation(type="const")
    op.attributes["name"].CopyFrom(create_scalar_value(name))
    op.attributes["val"].CopyFrom(create_scalar_value(value))
    op.outputs.add(name=name).type.CopyFrom(op.attributes["val"].type)
    return op


def insert_before(model: Message, user: Message, ops: list[Message]) -> None:
    block = main_block(model)
    at = next(i for i, op in enumerate(block.operations) if op.outputs[0].name == user.outputs[0].name)
    for op in reversed(ops):
        block.operations.insert(at, op)


def reader(model: Message, value: str) -> tuple[Message, Message]:
    """The only op that reads a value, and the binding that does."""
    (found,) = (
        (op, bound)
        for op in main_block(model).operations
        for argument in op.inputs.values()
        for bound in argument.arguments
        if bound.name == value
    )
    return found


def floats(model: Message, value: str) -> Message:
    return operation(model, value).attributes["val"].immediateValue.tensor.floats.values


def pad_rows_zeroed(model: Message, lookup: Lookup) -> None:
    """rows * (index != pad): what a float mask behind the lookup would do."""
    user, bound = reader(model, lookup.output)
    ops = [
        constant("m_pad", np.int32(0)),
        made("equal", "m_is", _BOOL, (1, 8), x="ple_raw_ids_masked", y="m_pad"),
        made("logical_not", "m_kept", _BOOL, (1, 8), x="m_is"),
        constant("m_dtype", "fp32"),
        made("cast", "m_factor", _FLOAT32, (1, 8), x="m_kept", dtype="m_dtype"),
        made("expand_dims", "m_column", _FLOAT32, (1, 8, 1), x="m_factor", axes="var_266_axes_0"),
        made("mul", "m_rows", _FLOAT32, (1, 8, lookup.table.width), x=lookup.output, y="m_column"),
    ]
    insert_before(model, user, ops)
    bound.name = "m_rows"


def mask_overflows(model: Message, lookup: Lookup) -> None:
    """The PLE mask compares ids after a cast to eight bits, in which text ids equal media ids."""
    first = operation(model, f"ple_raw_ids_is_{lookup.judgement.missing[0]}")
    ids = first.inputs["x"].arguments[0].name
    ops = [
        constant("m_int8", "int8"),
        made("cast", "m_narrow", _INT8, (1, 8), x=ids, dtype="m_int8"),
        constant("m_int32", "int32"),
        made("cast", "m_wide", _INT32, (1, 8), x="m_narrow", dtype="m_int32"),
    ]
    for token in lookup.judgement.missing:
        operation(model, f"ple_raw_ids_is_{token}").inputs["x"].arguments[0].name = "m_wide"
        narrow = int(np.int64(token).astype(np.int8))
        operation(model, f"ple_raw_ids_is_{token}_y").attributes["val"].CopyFrom(create_scalar_value(np.int32(narrow)))
    insert_before(model, first, ops)


def splice_narrowed(model: Message, lookup: Lookup) -> None:
    """The splice's own condition asks for a text id in place of the image's."""
    asked = operation(model, "is_image").inputs["y"].arguments[0].name
    operation(model, asked).attributes["val"].CopyFrom(create_scalar_value(np.int32(TEXT_ID)))


def scale_dropped(model: Message, lookup: Lookup) -> None:
    user, _ = reader(model, lookup.output)
    floats(model, user.inputs["y"].arguments[0].name)[0] = 1


def tables_swapped(model: Message, lookup: Lookup) -> None:
    """The lookup reads the token embedding, which has the same shape here."""
    gather = operation(model, lookup.output)
    gather.inputs["x"].arguments[0].name = "per_layer_inputs_language_embed_tokens_weight"


def epsilon_changed(model: Message, lookup: Lookup) -> None:
    """Hardly a fault: outputs move by 1e-4."""
    block = main_block(model)
    for op in block.operations:
        if op.type == "add" and len(floats(model, op.inputs["y"].arguments[0].name)) == 1:
            floats(model, op.inputs["y"].arguments[0].name)[0] *= 2
            return


def output_renamed(model: Message, lookup: Lookup) -> None:
    old = main_block(model).outputs[0]
    operation(model, old).outputs[0].name = "renamed"
    main_block(model).outputs[0] = model.description.output[0].name = "renamed"


def output_retyped(model: Message, lookup: Lookup) -> None:
    block, name = main_block(model), main_block(model).outputs[0]
    last = operation(model, name)
    shape = tuple(dimension.constant.size for dimension in last.outputs[0].type.tensorType.dimensions)
    last.outputs[0].name = "m_out"
    last.attributes["name"].CopyFrom(create_scalar_value("m_out"))
    block.operations.append(constant("m_dtype", "fp16"))
    block.operations.append(made("cast", name, _FLOAT16, shape, x="m_out", dtype="m_dtype"))
    model.description.output[0].type.multiArrayType.dataType = FeatureTypes_pb2.ArrayFeatureType.FLOAT16


def extra_op(model: Message, lookup: Lookup) -> None:
    """One more op that changes no number, where nothing was planned."""
    splice = operation(model, "input_1")
    insert_before(model, splice, [made("identity", "m_same", _FLOAT32, (1, 8, 16), x="hidden_states")])
    splice.inputs["a"].arguments[0].name = "m_same"


def metadata_changed(model: Message, lookup: Lookup) -> None:
    model.description.metadata.author = "someone"


def _flip(bundle: Path, constant: str, at: int) -> None:
    """Alter the top byte of one float32 of a stored constant. Its blob's header says where the data is."""
    found: list[int] = []
    rewrite(bundle, lambda model: found.append(operation(model, constant).attributes["val"].blobFileValue.offset))
    path = (bundle / MODEL).parent / "weights" / "weight.bin"
    content = bytearray(path.read_bytes())
    _, _, _, data = struct.unpack_from("<IIQQ", content, found[0])
    content[data + 4 * at + 3] ^= 0x01
    path.write_bytes(content)


def table_byte(bundle: Path, before: Subject) -> None:
    """One byte of a text row of the PLE table."""
    table = before.analyses[0].lookups[0].table
    _flip(bundle, table.name, TEXT_ID * table.width)


def matrix_byte(bundle: Path, before: Subject) -> None:
    """One byte of a matrix that no lookup reads."""
    _flip(bundle, "per_layer_inputs_language_per_layer_model_projection_weight", 0)


def two_lookups(folder: Path) -> Path:
    """A package of coremltools' builder that reads two tables by one index."""
    shutil.copy(SAMPLES / "coreml-fp32" / "config.json", folder)
    return build(folder, lambda ids: [mb.gather(x=table, indices=ids, axis=0) for table in (TABLE, -TABLE)])


BENCH = Bench(
    "Core ML",
    {STAGE: sample("coreml-fp32"), TWO_LOOKUPS: two_lookups, TWO_FUNCTIONS: sample("coreml-multifunction")},
    (
        *WRONG_PLANS,
        Mutant("PAD rows zeroed", file=rewriting(pad_rows_zeroed)),
        Mutant("mask overflows eight bits", file=rewriting(mask_overflows)),
        Mutant("splice narrowed", file=rewriting(splice_narrowed)),
        Mutant("scale dropped", file=rewriting(scale_dropped)),
        Mutant("tables swapped", file=rewriting(tables_swapped)),
        Mutant("a norm's epsilon doubled", file=rewriting(epsilon_changed)),
        Mutant("a byte of the PLE table altered", file=table_byte),
        Mutant("a byte of another weight altered", file=matrix_byte),
        Mutant("output renamed", file=rewriting(output_renamed)),
        Mutant("output retyped", file=rewriting(output_retyped)),
        Mutant("an op more elsewhere", file=rewriting(extra_op)),
        Mutant("metadata changed", file=rewriting(metadata_changed)),
    ),
)
