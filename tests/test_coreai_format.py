"""The Core AI format against Hugging Face's numbers, coreai-core's own writer, and hostile files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from g4patch import Options, fix, formats
from g4patch.cli import main
from g4patch.edits import Plan, mask_ids
from g4patch.errors import BundleError, EditError, MissingExtra
from g4patch.formats import Model, Staged, coreai
from g4patch.formats.coreai import bytecode, splice
from g4patch.places import Place, place_for_mask
from g4patch.ple import GraphAnalysis, analyse
from g4patch.report import Outcome, Status
from g4patch.runtimes import Unavailable
from g4patch.runtimes import coreai as runtime
from g4patch.tokens import TokenFlags, resolve
from g4patch.verdicts import Verdict
from tests.apple_runtime import whole
from tests.conftest import Copy, numbers, sample, tree
from tests.coreai_programs import HIDDEN, INNER, KINDS, LAYERS, ROWS, TABLE, WIDTH

# Wheels of coreai-core exist for these only. There it must be installed: nothing is skipped.
_WHEELS = {("Linux", "x86_64"), ("Darwin", "arm64")}
needs_coreai = pytest.mark.skipif(
    (platform.system(), platform.machine()) not in _WHEELS, reason="no wheel of coreai-core for this platform"
)
pytestmark = [pytest.mark.slow, needs_coreai]

ROOT = Path(__file__).parent.parent
Arrays = dict[str, NDArray[Any]]

MEDIA = (310, 311, 314)  # samples/coreai-stage/config.json
PAD = 0
FLAGS = TokenFlags(*MEDIA, PAD)


@pytest.fixture
def stage(copy: Copy) -> Path:
    return copy("coreai-stage")


@pytest.fixture(autouse=True)
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whatever happens, no temporary files and no core dumps stay behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(os.listdir())
    yield
    assert list(folder.iterdir()) == []
    assert set(os.listdir()) == before


def analysed(model: Model) -> list[GraphAnalysis]:
    tokens = resolve(model.path, FLAGS)
    return [analyse(graph, tokens) for graph in model.graphs]


def mask(model: Model, ids: tuple[int, ...] = MEDIA, pad: int = PAD) -> Plan:
    edits = []
    for analysis in analysed(model):
        for lookup in analysis.lookups:
            place = place_for_mask(analysis.graph, lookup, coreai.MASK_DTYPES, pad)
            assert isinstance(place, Place)
            edits.append(mask_ids(analysis.graph, place.value, place.uses, ids, pad, "test"))
    return Plan(tuple(edits))


def stages(model: Model, folder: Path) -> dict[Path, Path]:
    folder.mkdir()
    return {path: folder / path.name for path in model.replaced}


def write(model: Model, plan: Plan, folder: Path) -> tuple[Model, Staged]:
    staged = stages(model, folder)
    coreai.write(model, plan, staged)
    return coreai.open_model(model.path, staged), staged


def rows(model: Model, ids: NDArray[np.int64], graph: int = 0) -> NDArray[Any]:
    analysis = analysed(model)[graph]
    lookup = analysis.lookups[0]
    return coreai.probe(model, analysis.graph.name).lookup(lookup.ids_input, lookup.output, ids)


def program(kind: str, folder: Path) -> Path:
    target = folder / f"{kind}.aimodel"
    subprocess.run([sys.executable, "-m", "tests.coreai_programs", kind, target], check=True, cwd=ROOT)
    return target


# Reading


def test_functions_and_names(stage: Path) -> None:
    model = formats.load(stage).open_model(stage)
    (graph,) = model.graphs
    assert (graph.name, graph.outputs) == ("main", ("hidden_states_out",))
    assert [(value.name, value.dtype, value.shape) for value in graph.inputs] == [
        ("hidden_states", "float32", (1, None, 16)),
        ("input_ids", "int32", (1, None)),
        ("position_ids", "int32", (1, None)),
    ]
    assert {path.name for path in model.files} == {"main.mlirb", "main.hash", "metadata.json"}
    assert model.details == ("asset version 2.0", "from coreai-core 1.0.0b3")


def test_raw_for_every_id(stage: Path) -> None:
    (analysis,) = analysed(coreai.open_model(stage))
    (lookup,) = analysis.lookups
    assert analysis.verdict is Verdict.RAW
    assert (lookup.table.shape, lookup.table.dtype, lookup.table.nbytes) == (
        (320, 24),
        "float32",
        320 * 24 * 4,
    )
    assert (lookup.layers, lookup.layer_width) == (3, 8)
    row_map = lookup.judgement.row_map
    assert row_map is not None
    assert np.array_equal(row_map.take(np.arange(320)), np.arange(320))
    (splice,) = analysis.splices
    assert splice.ids == (310,)


def test_names_stay_when_operations_are_inserted(stage: Path, tmp_path: Path) -> None:
    before = coreai.open_model(stage)
    after, _ = write(before, mask(before), tmp_path / "stage")
    old = [(node.address, node.native) for node in before.graphs[0].nodes]
    new = [(node.address, node.native) for node in after.graphs[0].nodes if "+" not in node.address]
    assert new == old


# Writing


def test_patched_and_nothing_else_differs(stage: Path, tmp_path: Path) -> None:
    before = coreai.open_model(stage)
    plan = mask(before)
    untouched = tree(stage)
    after, staged = write(before, plan, tmp_path / "stage")
    assert tree(stage) == untouched
    (analysis,) = analysed(after)
    row_map = analysis.lookups[0].judgement.row_map
    assert row_map is not None
    ids = np.arange(320)
    assert np.array_equal(row_map.take(ids), np.where(np.isin(ids, MEDIA), PAD, ids))
    assert analysis.verdict is Verdict.PATCHED
    assert coreai.differences(before, after, plan) == ()
    assert coreai.validate(after) == ()
    content = staged[stage / "main.mlirb"].read_bytes()
    assert staged[stage / "main.hash"].read_bytes() == hashlib.sha256(content).digest()


def test_spliced_equals_what_coreai_core_saves(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = coreai.open_model(stage)
    _, spliced = write(model, mask(model), tmp_path / "spliced")
    monkeypatch.setattr(splice, "is_identity", lambda _: False)
    _, saved = write(model, mask(model), tmp_path / "saved")
    for path in model.replaced:
        assert spliced[path].read_bytes() == saved[path].read_bytes()


def test_stub_holds_no_weights_and_splices_back(stage: Path, tmp_path: Path) -> None:
    original = bytecode.parse(stage / "main.mlirb")
    assert splice.is_identity(original)
    splice.write_stub(original, tmp_path / "stub.mlirb")
    stub = bytecode.parse(tmp_path / "stub.mlirb")
    assert {resource.size for resource in stub.resources.values()} == {16}
    with (tmp_path / "again.mlirb").open("xb") as file:
        digest = splice.splice(original, stub, file)
    content = (stage / "main.mlirb").read_bytes()
    assert (tmp_path / "again.mlirb").read_bytes() == content
    assert digest == hashlib.sha256(content).digest()


def test_a_plan_that_does_not_fit(stage: Path, tmp_path: Path) -> None:
    model = coreai.open_model(stage)
    other = coreai.open_model(program("plain", tmp_path))
    staged = stages(model, tmp_path / "stage")
    with pytest.raises(EditError):
        coreai.write(model, mask(other), staged)
    assert not any(path.exists() for path in staged.values())


@pytest.mark.parametrize(
    ("ids", "pad"),
    [((310, 311), PAD), ((310, 311, 313), PAD), ((*MEDIA, 7), PAD), (MEDIA, 1), (MEDIA[::-1], PAD)],
)
def test_differences_know_the_plan(stage: Path, tmp_path: Path, ids: tuple[int, ...], pad: int) -> None:
    before = coreai.open_model(stage)
    after, _ = write(before, mask(before, ids, pad), tmp_path / "stage")
    assert coreai.differences(before, after, mask(before, ids, pad)) == ()
    assert coreai.differences(before, after, mask(before)) != ()
    assert coreai.differences(before, after, Plan()) != ()


def test_differences_see_weights_and_metadata(stage: Path, tmp_path: Path) -> None:
    before = coreai.open_model(stage)
    blob = next(iter(bytecode.parse(stage / "main.mlirb").resources.values()))
    tampered = shutil.copytree(stage, tmp_path / "tampered.aimodel")
    content = bytearray((tampered / "main.mlirb").read_bytes())
    content[blob.offset] ^= 1
    (tampered / "main.mlirb").write_bytes(content)
    (tampered / "metadata.json").write_text('{"assetVersion": "2.0", "author": "another"}')
    found = coreai.differences(before, coreai.open_model(tampered), Plan())
    assert len(found) == 2
    assert blob.key in found[0]
    assert "metadata" in found[1]


# Apple's runtime


def test_rows_are_those_of_hugging_face(stage: Path, tmp_path: Path) -> None:
    """The rows times sqrt(D), media masked. float32, one multiplication: 1e-6."""
    fed, expected = numbers(sample("coreai-stage"), "media")
    ids = fed["input_ids"].reshape(-1)
    identity = expected["per_layer_identity"].reshape(len(ids), -1)
    before = coreai.open_model(stage)
    after, _ = write(before, mask(before), tmp_path / "stage")
    assert np.abs(rows(after, ids) * 8**0.5 - identity).max() < 1e-6
    wrong = np.abs(rows(before, ids) * 8**0.5 - identity).max(axis=1) > 1e-3
    assert np.array_equal(wrong, np.isin(ids, MEDIA))


def test_media_rows_become_the_pad_row_bit_for_bit(stage: Path, tmp_path: Path) -> None:
    before = coreai.open_model(stage)
    after, _ = write(before, mask(before), tmp_path / "stage")
    ids = np.arange(320)
    old, new = rows(before, ids), rows(after, ids)
    media = np.isin(ids, MEDIA)
    assert np.array_equal(new[~media], old[~media])
    assert (new[media] == old[PAD]).all()
    assert len(np.unique(old, axis=0)) == 320


def test_the_mended_program_is_hugging_face(stage: Path, tmp_path: Path) -> None:
    """After all rules, the whole stage. float32, sums of tens of terms in another order: 1e-5 of all."""
    broken = shutil.copytree(stage, tmp_path / "broken.aimodel")
    assert fix(stage).outcome is Outcome.FIXED
    for run, wrong in (("text", False), ("media", True), ("left padding", True)):
        feeds, expected = numbers(sample("coreai-stage"), run)
        right = expected["hidden_states_out"]
        assert np.abs(whole(stage, feeds) - right).max() < 1e-5 * np.abs(right).max()
        assert (np.abs(whole(broken, feeds) - right).max() > 1e-2 * np.abs(right).max()) == wrong


def test_a_part_is_what_the_whole_computes(stage: Path) -> None:
    feeds, _ = numbers(sample("coreai-stage"), "media")
    model = coreai.open_model(stage)
    found = coreai.probe(model, "main").run(feeds, ["hidden_states_out"])
    assert np.array_equal(found["hidden_states_out"], whole(stage, feeds))


def test_a_part_with_only_the_rows_it_reads(tmp_path: Path) -> None:
    """A table over a megabyte is narrowed to the rows that are read."""
    model = coreai.open_model(program("large", tmp_path))
    ids = np.array([[0, 7, 33_000, 39_999]])
    (analysis,) = analysed(model)
    feeds = {"input_ids": ids, "hidden_states": np.zeros((1, 4, HIDDEN), np.float32)}
    output = analysis.lookups[0].output
    found = coreai.probe(model, "main").run(feeds, [output, "out"])
    expected = (ids[0][:, None] * WIDTH + np.arange(WIDTH)) % 251
    assert np.array_equal(found[output][0], expected)
    assert np.allclose(found["out"].reshape(4, WIDTH), expected * np.sqrt(np.float32(INNER)))


def test_a_part_that_cannot_be_run_says_why(stage: Path) -> None:
    feeds, _ = numbers(sample("coreai-stage"), "media")
    probe = coreai.probe(coreai.open_model(stage), "main")
    with pytest.raises(Unavailable, match="position_ids"):
        probe.run({name: feeds[name] for name in ("input_ids", "hidden_states")}, ["hidden_states_out"])
    with pytest.raises(Unavailable, match="not a value"):
        probe.run(feeds, ["nothing"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("large", "open-table", "dequantize")])
def test_forms_of_the_lookup(kind: str, tmp_path: Path) -> None:
    before = coreai.open_model(program(kind, tmp_path))
    assert [len(analysis.lookups) for analysis in analysed(before)] == {
        "ladder": [1, 1],
        "externalised": [1, 1],
        "branches": [2],
        "split": [3],
    }.get(kind, [1])
    assert {analysis.verdict for analysis in analysed(before)} == {Verdict.RAW}
    plan = mask(before)
    after, _ = write(before, plan, tmp_path / "stage")
    assert {analysis.verdict for analysis in analysed(after)} == {Verdict.PATCHED}
    assert coreai.differences(before, after, plan) == ()
    ids = np.array([PAD, 1, 5, 309, *MEDIA, 312, 313, 319])
    media = np.isin(ids, MEDIA)
    for graph in range(len(before.graphs)):
        old, new = rows(before, ids, graph), rows(after, ids, graph)
        assert np.array_equal(new[~media], old[~media])
        assert (new[media] == old[PAD]).all()
        assert len(np.unique(old, axis=0)) == len(ids)
        if kind != "table-input":
            scale = {"int8": 1 + ids[:, None] % 2, "one-scale": 2}.get(kind, 1)
            first = slice(8) if kind == "split" else slice(None)  # the first lookup reads the columns of one layer
            assert np.array_equal(old, TABLE[ids][:, first] * scale)


def test_a_table_that_cannot_be_run_is_mended_all_the_same(tmp_path: Path) -> None:
    """The row map needs no runtime; what was not run is not passed."""
    path = program("dequantize", tmp_path)
    report = fix(path, Options(FLAGS))
    assert report.outcome is Outcome.FIXED
    (run,) = (check for check in report.checks if check.name == "differential")
    assert run.status is Status.SKIPPED
    assert "coreai.dequantize" in run.summary
    assert [analysis.verdict for analysis in analysed(coreai.open_model(path))] == [Verdict.PATCHED]


def test_a_function_that_another_calls_is_mended_too(tmp_path: Path) -> None:
    """Hosts can run it: `function_names` of coreai-core lists it."""
    model = coreai.open_model(program("externalised", tmp_path))
    assert [graph.name for graph in model.graphs] == ["per_layer_rows", "main"]
    assert fix(model.path, Options(FLAGS)).outcome is Outcome.FIXED
    mended = analysed(coreai.open_model(model.path))
    assert [analysis.verdict for analysis in mended] == [Verdict.PATCHED, Verdict.PATCHED]


def test_a_reference_for_one_of_two_functions(tmp_path: Path) -> None:
    """The function that is called takes `ids`, of which the reference has none: the other is compared all the same."""
    model = coreai.open_model(program("externalised", tmp_path))
    ids = np.array([[PAD, 7, *MEDIA, 312]])
    right = TABLE[np.where(np.isin(ids, MEDIA), PAD, ids)].reshape(1, 6, LAYERS, INNER) * np.sqrt(np.float32(INNER))
    bound = {"max_abs": 1e-3, "norm_ratio": 1e-6, "reason": "float32, values up to 710"}
    metadata = {
        "schema": 1,
        "model": "right",
        "token_ids": dict(zip(("image", "audio", "video", "pad"), (*MEDIA, PAD), strict=True)),
        "tolerances": {"per_layer_identity": bound},
    }
    tensors = {"media/input/input_ids": ids, "media/expected/per_layer_identity": right.astype(np.float32)}
    save_file(tensors, f"{model.path}.reference.safetensors", {"g4patch": json.dumps(metadata)})
    (found,) = (check for check in fix(model.path, Options(FLAGS)).checks if check.name == "reference")
    assert found.status is Status.PASSED
    assert found.summary.endswith("no prompt in it fits per_layer_rows")


def test_a_table_input_of_any_number_of_rows(tmp_path: Path) -> None:
    """Which rows there are is not known, so nothing is claimed."""
    (analysis,) = analysed(coreai.open_model(program("open-table", tmp_path)))
    assert analysis.verdict is Verdict.AMBIGUOUS


def test_what_is_known_of_tables(tmp_path: Path) -> None:
    expected = {
        "plain": ("float32", "main.mlirb", ROWS * WIDTH * 4, ""),
        "table-input": ("float32", "function input table", ROWS * WIDTH * 4, ""),
        "int8": ("float32", "main.mlirb", ROWS * WIDTH + ROWS * (4 + 1 + 4), "int8, a scale a row"),
        "palette": ("float32", "main.mlirb", ROWS * WIDTH + 256 * 4 + 2, "8-bit palette"),
    }
    for kind, facts in expected.items():
        (analysis,) = analysed(coreai.open_model(program(kind, tmp_path)))
        (lookup,) = analysis.lookups
        assert (lookup.layers, lookup.layer_width) == (LAYERS, INNER)
        table = lookup.table
        assert (table.dtype, table.storage, table.nbytes, table.quantisation) == facts


# Hostile files


def refused(path: Path) -> BundleError:
    with pytest.raises(BundleError) as caught:
        coreai.open_model(path)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


def test_truncated_at_fifty_places(stage: Path) -> None:
    content = (stage / "main.mlirb").read_bytes()
    boundaries = [section.end for section in bytecode.parse(stage / "main.mlirb").sections][:-1]
    for size in [*boundaries, *np.linspace(0, len(content) - 1, 50 - len(boundaries)).astype(int)]:
        (stage / "main.mlirb").write_bytes(content[:size])
        refused(stage)


def test_truncated_says_how_much_is_missing(stage: Path) -> None:
    content = (stage / "main.mlirb").read_bytes()
    (stage / "main.mlirb").write_bytes(content[:100_000])
    assert "Resource section (100,000 of 141,2" in refused(stage).message


def _junk(content: bytes) -> bytes:
    return np.random.default_rng(0).bytes(len(content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"", "not MLIR bytecode"),
        (_junk, "not MLIR bytecode"),
        (lambda content: content[:4] + _junk(content), "version"),
        (lambda content: content[:4] + b"\x0b" + content[5:], "version 5"),
        (lambda content: content[:5] + b"x" * len(content), "producer"),
        (lambda content: content + content, "repeated"),
        (lambda content: content + b"\x7f\x01", "unknown"),
        (lambda content: content[:20] + b"\x00" + b"\xff" * 8 + content[29:], "middle"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\n", "git-LFS"),
    ],
)
def test_other_bytes(stage: Path, change: Callable[[bytes], bytes], said: str) -> None:
    content = (stage / "main.mlirb").read_bytes()
    (stage / "main.mlirb").write_bytes(change(content))
    assert said in refused(stage).message


def test_bytes_flipped_where_only_native_code_looks(stage: Path) -> None:
    """Each is read as something, or refused with a hint; this process lives on."""
    content = (stage / "main.mlirb").read_bytes()
    sections = {section.id: section for section in bytecode.parse(stage / "main.mlirb").sections}
    rng = np.random.default_rng(5)
    refusals = []
    for id in (bytecode.IR, bytecode.ATTR_TYPE, bytecode.DIALECT, bytecode.PROPERTIES) * 3:
        section = sections[id]
        changed = bytearray(content)
        for at in rng.integers(section.offset, section.end, 4):
            changed[at] = rng.integers(256)
        (stage / "main.mlirb").write_bytes(changed)
        try:
            coreai.open_model(stage)
        except BundleError as error:
            refusals.append(error.hint)
    assert refusals
    assert all(refusals)


@pytest.mark.parametrize("name", ["main.mlirb", "main.hash", "metadata.json"])
def test_missing_files(stage: Path, name: str) -> None:
    (stage / name).unlink()
    error = refused(stage)
    assert name in error.message
    assert "missing" in error.message


@pytest.mark.parametrize("name", ["main.mlirb", "main.hash", "metadata.json"])
def test_links_out_of_the_asset(stage: Path, tmp_path: Path, name: str) -> None:
    shutil.move(stage / name, tmp_path / name)
    (stage / name).symlink_to(tmp_path / name)
    assert "link" in refused(stage).message


def test_compiled_assets(stage: Path) -> None:
    (stage / "main.mlirb").rename(stage / "main-h17g.mlirb")
    assert "compiled" in refused(stage).message
    compiled = stage.rename(stage.with_suffix(".aimodelc"))
    error = refused(compiled)
    assert "compiled" in error.message
    assert "compile again" in error.hint


@pytest.mark.parametrize("metadata", ["", "[]", "{", '{"assetVersion": "3.0"}', "[" * 100_000])
def test_other_metadata(stage: Path, metadata: str) -> None:
    (stage / "metadata.json").write_text(metadata)
    assert "metadata.json" in refused(stage).message


def test_compiled_by_its_metadata(stage: Path) -> None:
    (stage / "metadata.json").write_text(json.dumps({"assetVersion": "2.0", "sourceHash": "00"}))
    assert "compiled" in refused(stage).message


def test_not_a_folder(stage: Path) -> None:
    assert "folder" in refused(stage / "main.mlirb").message
    assert "does not exist" in refused(stage / "nothing").message


# The worker


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker is killed from outside as soon as it runs."""

    class Killed(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.send_signal(signal.SIGKILL)

    runtime.dismiss()
    monkeypatch.setattr(subprocess, "Popen", Killed)


def test_killed_while_reading(stage: Path, killed: None) -> None:
    assert "killed (SIGKILL)" in refused(stage).message


def test_killed_while_checking(stage: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A check that was killed has not been skipped for a reason that lies in the model."""
    model = coreai.open_model(stage)
    plan = mask(model)
    staged = stages(model, tmp_path / "stage")
    request.getfixturevalue("killed")
    with pytest.raises(BundleError, match="killed"):
        rows(model, np.arange(4))
    with pytest.raises(BundleError, match="killed"):
        coreai.write(model, plan, staged)
    assert not any(path.exists() for path in staged.values())


@pytest.mark.parametrize(("command", "out"), [("read", False), ("save", False), ("lookup", True), ("run", True)])
def test_killed_in_the_middle_of_a_fix(
    stage: Path, command: str, out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last job of each kind is given to a worker that is killed from outside over it: nothing is published."""
    real = runtime._Worker.do
    jobs: list[str] = []
    last = -1  # none, in the rehearsal

    def do(worker: runtime._Worker, folder: Path, limit: float) -> int | None:
        jobs.append(json.loads((folder / runtime.REQUEST).read_text())["command"])
        if jobs.count(command) == last:
            os.kill(worker._process.pid, signal.SIGSTOP)  # it cannot be done before it is killed
            threading.Timer(0.2, os.kill, (worker._process.pid, signal.SIGKILL)).start()
        return real(worker, folder, limit)

    monkeypatch.setattr(runtime._Worker, "do", do)
    rehearsal = shutil.copytree(stage.parent, tmp_path / "rehearsal") / stage.name
    assert fix(rehearsal, out=tmp_path / "rehearsed" if out else None).outcome is Outcome.FIXED
    last = jobs.count(command)
    jobs.clear()
    assert last
    before = tree(stage.parent)
    code = main(["fix", str(stage), *(["-o", str(tmp_path / "out")] if out else [])])
    assert jobs.count(command) == last
    assert code in (2, 3)
    assert tree(stage.parent) == before
    assert not (tmp_path / "out").exists()


def test_time_limit(stage: Path) -> None:
    with runtime.workspace() as folder, pytest.raises(BundleError, match="longer than"):
        runtime.run("read", {"path": str(stage / "main.mlirb")}, folder, stage, limit=0.01)


_WAIT = """
import sys
from pathlib import Path
from g4patch.runtimes import coreai

with coreai.workspace() as folder:
    coreai.run("read", {"path": sys.argv[1]}, folder, Path("never"))
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="children are read from /proc, which only Linux has")
def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Even where its native code hangs: here it opens a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "never")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", _WAIT, tmp_path / "never"], cwd=ROOT, env=environment)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    waited = 0.0
    while not (found := children.read_text().split()) and waited < 30:
        time.sleep(0.1)
        waited += 0.1
    (worker,) = found
    time.sleep(2)
    parent.kill()
    parent.wait()
    time.sleep(1)
    status = Path(f"/proc/{worker}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()


def test_a_worker_that_died_idle_is_replaced(stage: Path) -> None:
    coreai.open_model(stage)
    (worker,) = runtime._idle
    worker._process.kill()
    worker._process.wait()
    assert coreai.open_model(stage).graphs


def test_crashes_are_told_from_kills(stage: Path, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"ML\xefR\x0d" + b"junk" * 10)
    with runtime.workspace() as folder, pytest.raises(runtime.Crashed, match="crashed"):
        runtime.run("read", {"path": str(tmp_path / "junk")}, folder, stage)


def test_without_coreai_core(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingExtra) as caught:
        coreai.open_model(stage)
    assert "pip install 'g4patch[coreai]'" in caught.value.hint
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.0.0")
    with pytest.raises(MissingExtra, match=r"2\.0\.0"):
        coreai.open_model(stage)


def test_the_main_process_loads_nothing_native(stage: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from g4patch.formats import coreai;"
        f"coreai.open_model(Path({str(stage)!r}));"
        "sys.exit(any(name.split('.')[0] == 'coreai' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
