"""Wrong files of Core AI: faults that no plan asks for."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from g4patch.engine import open_model
from g4patch.report import Subject
from tests.conftest import SAMPLES
from tests.mutants import STAGE, TWO_FUNCTIONS, TWO_LOOKUPS, Bench, FileChange, Mutant, coreai_edits, sample
from tests.mutants.plans import TEXT_ID, WRONG_PLANS


def editing(change: object) -> FileChange:
    """A change by coreai-core's bindings, in a process of its own."""
    (kind,) = (name for name, function in coreai_edits.KINDS.items() if function is change)

    def edit(bundle: Path, before: Subject) -> None:
        subprocess.run([sys.executable, "-m", "tests.mutants.coreai_edits", kind, bundle], check=True)

    return edit


def metadata_changed(bundle: Path, before: Subject) -> None:
    path = bundle / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"author": "someone"}))


def _flip(bundle: Path, size: int, at: int) -> None:
    """Alter the top byte of one float32 of the first stored tensor of a size, and say that this is the file."""
    program = bundle / "main.mlirb"
    offset = next(offset for offset, found in open_model(bundle).model.weights.values() if found == size)
    content = bytearray(program.read_bytes())
    content[offset + 4 * at + 3] ^= 0x01
    program.write_bytes(content)
    (bundle / "main.hash").write_bytes(hashlib.sha256(content).digest())


def table_byte(bundle: Path, before: Subject) -> None:
    """One byte of a text row of the PLE table."""
    table = before.analyses[0].lookups[0].table
    _flip(bundle, 4 * table.rows * table.width, TEXT_ID * table.width)


def matrix_byte(bundle: Path, before: Subject) -> None:
    """One byte of a matrix that no lookup reads: the projection, which is as wide as the PLE table."""
    (hidden, *_) = before.analyses[0].graph.inputs
    assert hidden.shape is not None
    width = hidden.shape[-1]
    assert width is not None
    _flip(bundle, 4 * before.analyses[0].lookups[0].table.width * width, 0)


def split_tables(folder: Path) -> Path:
    """A table a layer, made with coreai-core."""
    shutil.copy(SAMPLES / "coreai-stage" / "config.json", folder)
    path = folder / "stage.aimodel"
    subprocess.run([sys.executable, "-m", "tests.coreai_programs", "split", path], check=True)
    return path


BENCH = Bench(
    "Core AI",
    {STAGE: sample("coreai-stage"), TWO_LOOKUPS: split_tables, TWO_FUNCTIONS: sample("coreai-multifunction")},
    (
        *WRONG_PLANS,
        Mutant("PAD rows zeroed", file=editing(coreai_edits.pad_rows_zeroed)),
        Mutant("mask overflows eight bits", file=editing(coreai_edits.mask_overflows)),
        Mutant("splice narrowed", file=editing(coreai_edits.splice_narrowed)),
        Mutant("scale dropped", file=editing(coreai_edits.scale_dropped)),
        Mutant("a norm's epsilon doubled", file=editing(coreai_edits.epsilon_changed)),
        Mutant("a byte of the PLE table altered", file=table_byte),
        Mutant("a byte of another weight altered", file=matrix_byte),
        Mutant("output renamed", file=editing(coreai_edits.output_renamed)),
        Mutant("output retyped", file=editing(coreai_edits.output_retyped)),
        Mutant("an op more elsewhere", file=editing(coreai_edits.extra_op)),
        Mutant("metadata changed", file=metadata_changed),
    ),
)
