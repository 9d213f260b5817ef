"""PLE tables that hosts look up: rows are mended where they are, in every layout, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from g4patch import Options, check, engine, fix, formats, inspect, mending, revert, verify, verify_bundle
from g4patch.cli import main
from g4patch.edits import Plan, RowCopy
from g4patch.errors import BundleError, EditError
from g4patch.report import Outcome, Status
from g4patch.verdicts import Verdict
from tests.conftest import SAMPLES, tree
from tests.test_publish import kill_at_every_step

ROWS, WIDTH, MEDIA = 320, 24, {"image": 310, "audio": 311, "video": 314}
LAYOUTS = ["model_ple.safetensors", "embed_tokens_per_layer_q8.bin", "embed_per_layer.i8"]
Codes = NDArray[np.int8]


def codes() -> Codes:
    return np.random.default_rng(7).integers(-127, 127, (ROWS, WIDTH), np.int8)


def scales() -> NDArray[np.float32]:
    return np.random.default_rng(8).random(ROWS, np.float32)


def write(folder: Path, layout: str) -> Path:
    """A sidecar with the configuration beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {f"{name}_token_id": token for name, token in MEDIA.items()} | {"pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / layout
    if layout.endswith(".safetensors"):
        tensors: dict[str, NDArray[Any]] = {"embed_tokens_per_layer": codes(), "scales": scales()[:, None]}
        tensors["other"] = np.ones(3, np.float32)
        save_file(tensors, path, {"ple_zero_point": "0", "dtype": "SI8"})
        return path
    path.write_bytes(codes().tobytes())
    if layout.endswith(".i8"):
        (folder / "embed_per_layer.scale.f32").write_bytes(scales().tobytes())
    else:
        (folder / "embed_tokens_per_layer_scales.bin").write_bytes(scales().astype(np.float16).tobytes())
    return path


def read(path: Path) -> tuple[Codes, bytes]:
    """Codes and the bytes of the scales, read without g4patch."""
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        return tensors["embed_tokens_per_layer"], tensors["scales"].tobytes()
    (other,) = [file for file in path.parent.iterdir() if "scale" in file.name and file.is_file()]
    return np.fromfile(path, np.int8).reshape(ROWS, WIDTH), other.read_bytes()


def mended(before: tuple[Codes, bytes]) -> tuple[Codes, bytes]:
    """What is right: row 0 and its scale in place of the media rows and theirs."""
    right, size = before[0].copy(), len(before[1]) // ROWS
    right[list(MEDIA.values())] = right[0]
    scale = [before[1][row * size :][:size] for row in range(ROWS)]
    for token in MEDIA.values():
        scale[token] = scale[0]
    return right, b"".join(scale)


def equal(left: tuple[Codes, bytes], right: tuple[Codes, bytes]) -> bool:
    return np.array_equal(left[0], right[0]) and left[1] == right[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_scales_are_copied_and_put_back(layout: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bundle", layout)
    before, whole = read(path), tree(path.parent)
    state = path.stat()
    assert check(path).subject.verdict is Verdict.RAW
    report = fix(path)
    assert (report.outcome, report.exit_code) == (Outcome.FIXED, 0)
    assert {item.name: item.status for item in report.checks} == {
        "structure": Status.PASSED,
        "row map": Status.SKIPPED,
        "differential": Status.PASSED,
        "reference": Status.SKIPPED,
        "rules": Status.PASSED,
    }
    assert path.stat().st_ino == state.st_ino
    assert equal(read(path), mended(before))
    assert check(path).subject.verdict is Verdict.PATCHED
    assert verify_bundle(path).exit_code == 0
    assert fix(path).outcome is Outcome.CLEAN
    revert(path)
    assert tree(path.parent) == whole
    assert path.stat().st_mtime_ns == state.st_mtime_ns


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_mended(layout: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bundle", layout)
    before, whole = read(path), tree(path.parent)
    report = fix(path, out=tmp_path / "mended")
    assert report.outcome is Outcome.FIXED
    assert equal(read(tmp_path / "mended" / layout), mended(before))
    assert tree(path.parent) == whole


def test_little_is_kept_and_steps_are_undone_one_by_one(tmp_path: Path) -> None:
    path = write(tmp_path, LAYOUTS[0])
    states = [path.read_bytes()]
    for known in ({"image": 310}, MEDIA):
        config = {f"{name}_token_id": known.get(name) for name in MEDIA} | {"pad_token_id": 0}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert fix(path).outcome is Outcome.FIXED
        states.append(path.read_bytes())
    assert sum(kept.stat().st_size for kept in tmp_path.rglob("*.delta")) < 1000
    for state in states[-2::-1]:
        revert(path)
        assert path.read_bytes() == state


def test_what_was_changed_since_is_not_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path, LAYOUTS[2])
    fix(path)
    changed = bytearray(path.read_bytes())
    changed[MEDIA["audio"] * WIDTH + 3] ^= 1
    path.write_bytes(changed)
    with pytest.raises(BundleError, match="changed since"):
        revert(path)
    assert path.read_bytes() == changed


def test_no_other_file_beside_it_is_put_back(tmp_path: Path) -> None:
    """The scales belong to the codes; whatever else a receipt of strangers names does not."""
    path = write(tmp_path, LAYOUTS[1])
    fix(path)
    receipt = tmp_path / f"{path.name}.g4patch" / "0001" / "receipt.json"
    receipt.write_text(receipt.read_text().replace("embed_tokens_per_layer_scales.bin", "config.json"))
    before = tree(tmp_path)
    with pytest.raises(BundleError, match=r"config\.json is outside the bundle"):
        revert(path)
    assert tree(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fix", "revert", "fix elsewhere"])
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_kill_at_every_step(layout: str, command: str, tmp_path: Path) -> None:
    kill_at_every_step(write(tmp_path / "bundle", layout), command, tmp_path)


def test_files_with_several_names_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, LAYOUTS[0])
    before = path.read_bytes()
    os.link(path, tmp_path / "another name")
    with pytest.raises(BundleError, match="2 names"):
        fix(path)
    (tmp_path / "another name").unlink()
    real = path.rename(tmp_path / "real")
    path.symlink_to(real)
    with pytest.raises(BundleError, match="is a link"):
        fix(path)
    assert real.read_bytes() == before


def test_folder_of_a_graph_and_its_sidecar(tmp_path: Path) -> None:
    path = write(tmp_path, LAYOUTS[0])
    shutil.copytree(SAMPLES / "onnx-host-side", tmp_path / "decoder")
    report = fix(tmp_path)
    verdicts = {model.subject.model.path.name: model.subject.verdict for model in report.models}
    assert verdicts == {"model.onnx": Verdict.HOST_SIDE, path.name: Verdict.RAW}
    assert report.outcome is Outcome.FIXED
    assert check(path).subject.verdict is Verdict.PATCHED


WRONG: dict[str, Callable[[RowCopy], RowCopy]] = {
    "another row": lambda edit: RowCopy(edit.rule, 1, edit.rows),
    "one row missing": lambda edit: RowCopy(edit.rule, edit.source, edit.rows[:-1]),
    "a text row too": lambda edit: RowCopy(edit.rule, edit.source, (*edit.rows, 312)),
    "the pad row itself": lambda edit: RowCopy(edit.rule, edit.rows[0], (edit.source, *edit.rows)),
}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["patches", "copy"])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_fixes_are_caught(kind: str, elsewhere: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "bundle", LAYOUTS[1])
    report = inspect(path)
    before, plan = report.subject, report.plan
    (edit,) = plan.row_copies
    wrong = Plan((WRONG[kind](edit),))
    (tmp_path / "stage").mkdir()
    staged = {target: tmp_path / "stage" / target.name for target in before.model.replaced}
    formats.of(before.model).write(before.model, wrong, staged)
    if elsewhere:
        mending.apply_deltas(before.model, staged)
        after = engine.open_model(staged[path], Options())
    else:
        after = engine.open_model(path, staged=staged)
    after = type(after)(after.model, before.tokens, (), host_rows=after.host_rows)
    assert verify.structure(before, after, plan).status is Status.FAILED
    # Without the plan to compare with, the rows alone tell.
    assert verify.differential(before, after).status is Status.FAILED


def test_a_byte_elsewhere_is_seen_in_a_copy(tmp_path: Path) -> None:
    path = write(tmp_path / "bundle", LAYOUTS[0])
    report = inspect(path)
    fix(path, out=tmp_path / "mended")
    copy = tmp_path / "mended" / path.name
    (tmp_path / "mended" / "config.json").write_bytes((tmp_path / "bundle" / "config.json").read_bytes())
    assert verify.structure(report.subject, engine.open_model(copy), report.plan).status is Status.PASSED
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1  # the tensor that has nothing to do with rows
    copy.write_bytes(content)
    assert verify.structure(report.subject, engine.open_model(copy), report.plan).status is Status.FAILED


def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = engine.open_model(write(tmp_path, LAYOUTS[0])).model
    stages = dict.fromkeys(model.replaced, tmp_path / "stage")
    for copy in (RowCopy("", 0, (ROWS,)), RowCopy("", -1, (3,))):
        with pytest.raises(EditError):
            formats.of(model).write(model, Plan((copy,)), stages)
    assert not (tmp_path / "stage").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def junk(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def no_scales(path: Path) -> None:
    for scales in path.parent.glob("*scale*"):
        scales.unlink()


@pytest.mark.parametrize(
    ("layout", "harm"),
    [(layout, harm) for layout in LAYOUTS for harm in (cut, empty, junk)] + [(name, no_scales) for name in LAYOUTS[1:]],
)
def test_what_is_no_sidecar_is_refused(
    layout: str, harm: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, layout)
    harm(path)
    before = tree(tmp_path)
    assert main(["fix", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"embed_tokens_per_layer": np.ones(5, np.int8)},
        {"embed_tokens_per_layer": np.ones((0, 5), np.int8)},
        {"embed_tokens_per_layer": np.ones((5, 2), np.complex64)},
    ],
    ids=["nothing", "no rows", "no row", "another dtype"],
)
def test_tensors_that_are_no_table_are_refused(tensors: dict[str, NDArray[Any]], tmp_path: Path) -> None:
    path = write(tmp_path, LAYOUTS[0])
    save_file(tensors, path)
    with pytest.raises(BundleError):
        check(path)


def test_a_pad_id_that_is_no_row(tmp_path: Path) -> None:
    path = write(tmp_path, LAYOUTS[0])
    (tmp_path / "config.json").write_text('{"image_token_id": 310, "pad_token_id": 320}')
    with pytest.raises(BundleError, match="pad id 320"):
        check(path)


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, LAYOUTS[0])
    assert main(["fix", str(path), "--dry-run"]) == 1
    assert "row 0 over rows 310, 311, 314" in capsys.readouterr().out
    assert main(["check", str(path), "--format", "json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    (model,) = report["models"]
    assert model["plan"]["edits"] == [{"rule": "sidecar-media-rows", "copy_row": 0, "over_rows": [310, 311, 314]}]
