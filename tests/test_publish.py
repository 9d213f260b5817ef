"""In place, elsewhere, and back: killed at every step on the disk, a bundle is the old one or the new one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from g4patch import delta, engine, fix, judging, publish, revert, verify
from g4patch.bundle import Bundle
from g4patch.cli import main
from g4patch.errors import BundleError, UsageError
from g4patch.report import Check, Outcome, Report, Status
from tests.conftest import Copy, tree
from tests.kill import steps_of

SAMPLES = ["onnx-stage", "coreml-fp16", "coreai-stage"]


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that pass at once: what is tested here is what stands around them."""
    passed = (Check("structure", Status.PASSED, "not looked at in this test"),)
    monkeypatch.setattr(verify, "verify_patch", lambda *given: passed)


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are left out of a backup however few they are."""
    monkeypatch.setattr(delta, "_WORTH_IT", 1)


def without_backup(folder: Path) -> dict[str, str]:
    return {path: digest for path, digest in tree(folder).items() if ".g4patch" not in path}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_checks")
@pytest.mark.parametrize("command", ["fix", "revert", "fix elsewhere"])
@pytest.mark.parametrize("name", SAMPLES)
def test_kill_at_every_step(name: str, command: str, copy: Copy, tmp_path: Path) -> None:
    kill_at_every_step(copy(name), command, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_checks", "thin")
@pytest.mark.parametrize("command", ["fix", "revert"])
def test_kill_at_every_step_with_a_delta(command: str, copy: Copy, tmp_path: Path) -> None:
    kill_at_every_step(copy("coreai-stage"), command, tmp_path)


def kill_at_every_step(pristine: Path, command: str, tmp_path: Path) -> None:
    if command == "revert":
        fix(pristine)
    old = without_backup(pristine.parent)
    start, work = tmp_path / "start", tmp_path / "work"
    shutil.copytree(pristine.parent, start)
    bundle, out = work / pristine.name, tmp_path / "out" / pristine.name

    def run() -> object:
        if command == "revert":
            return revert(bundle)
        return fix(bundle, out=out if command == "fix elsewhere" else None)

    def again() -> None:
        for place in (work, out.parent):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(start, work)

    again()
    total = steps_of(run)
    assert total is not None
    assert total > 10
    new = without_backup(work)
    published = tree(out.parent) if command == "fix elsewhere" else {}
    for step in range(total):
        again()
        assert steps_of(run, kill_at=step) is None
        engine.check(bundle)  # any next command tidies up
        assert without_backup(work) in (old, new), f"step {step}"
        assert not [path for path in tree(work) if path.endswith(("-stage", "-unfinished", "lock"))]
        assert not [path for path in work.rglob("*") if path.suffix in (".pending", ".partial")]
        if command == "fix elsewhere":
            assert not out.exists() or tree(out.parent) == published, f"step {step}"
        done = out.exists() if command == "fix elsewhere" else without_backup(work) == new
        if not done:
            assert steps_of(run) is not None
            assert without_backup(work) == new


def test_weights_are_not_kept_twice(copy: Copy, thin: None) -> None:
    """What stays of a Core AI program is what is not weights, and brings the file back, mode and times too."""
    bundle = copy("coreai-stage")
    Path(f"{bundle}.reference.safetensors").unlink()  # it asks for both steps at once
    before, state = tree(bundle.parent), (bundle / "main.mlirb").stat()
    weights = sum(size for _, size in engine.open_model(bundle).model.weights.values())
    assert weights > 80_000
    backup = publish.backup_folder(bundle)
    for step in ("0001", "0002"):
        options = engine.Options(select=frozenset({"ple-raw-ids" if step == "0001" else "splice-misses-rows"}))
        fix(bundle, options)
        kept = {path.name: path.stat().st_size for path in (backup / step / "files" / bundle.name).iterdir()}
        assert kept.keys() == {"main.mlirb.delta", "main.hash"}
        # The table of pieces is small, too.
        assert kept["main.mlirb.delta"] < state.st_size - weights + 4096
    assert engine.check(bundle).exit_code == 0
    revert(bundle)
    assert engine.check(bundle).exit_code == 1
    revert(bundle)
    assert tree(bundle.parent) == before
    now = (bundle / "main.mlirb").stat()
    assert (now.st_mode, now.st_mtime_ns) == (state.st_mode, state.st_mtime_ns)


def test_an_original_that_is_not_kept_whole_is_no_control(copy: Copy, thin: None) -> None:
    bundle = copy("coreai-stage")
    fix(bundle)
    (result,) = (found for found in engine.verify_bundle(bundle).checks if found.name == "reference")
    assert result.status is Status.PASSED
    assert "no unpatched bundle" in result.summary


def test_a_delta_fits_only_the_file_that_was_published(copy: Copy, thin: None) -> None:
    bundle = copy("coreai-stage")
    fix(bundle)
    program = bundle / "main.mlirb"
    content = program.read_bytes()
    program.write_bytes(content + b"\0")
    with pytest.raises(BundleError, match="changed since"):
        revert(bundle)
    program.write_bytes(content)
    delta_file = publish.backup_folder(bundle) / "0001" / "files" / bundle.name / "main.mlirb.delta"
    whole = delta_file.read_bytes()
    for bad in (b"", b"junk" * 10, whole[:30], whole[:-1], whole[:8] + b"\xff" * 8 + whole[16:]):
        delta_file.write_bytes(bad)
        with pytest.raises(BundleError, match="cannot be used"):
            revert(bundle)
        assert program.read_bytes() == content
    delta_file.write_bytes(whole)
    revert(bundle)
    assert engine.check(bundle).exit_code == 1


@pytest.mark.parametrize("name", SAMPLES)
def test_revert_is_byte_for_byte(name: str, copy: Copy) -> None:
    bundle = copy(name)
    before = tree(bundle.parent)
    assert fix(bundle).outcome is Outcome.FIXED
    assert revert(bundle)
    assert tree(bundle.parent) == before
    with pytest.raises(UsageError, match="not changed by g4patch"):
        revert(bundle)


def test_receipt_says_what_was_done(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    report = fix(bundle)
    assert report.publication is not None
    assert report.publication.backup is not None
    receipt = json.loads((report.publication.backup / "receipt.json").read_text())
    (model,) = receipt["models"]
    assert model["token_ids"]["image"] == {"id": 310, "source": "config.json"}
    assert model["plan"] == {"sha256": report.plan.digest, "nodes_added": 12, "uses_redirected": 2}
    assert [check["status"] for check in model["checks"]] == ["passed"] * 5
    assert [finding["rule"] for finding in model["findings"]] == ["ple-raw-ids", "splice-misses-rows"]
    assert receipt["files"][0]["sha256"] == tree(bundle.parent)["model.onnx"]


def test_revert_refuses_a_file_that_was_changed_since(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    fix(bundle)
    content = bundle.read_bytes()
    bundle.write_bytes(content + b"\0")
    with pytest.raises(BundleError, match="changed since"):
        revert(bundle)
    bundle.write_bytes(content)
    revert(bundle)


@pytest.mark.parametrize("name", ["../../elsewhere", "/elsewhere", "config.json", "link/elsewhere", "", ".", "a\0b"])
def test_receipts_cannot_point_outside(name: str, copy: Copy, tmp_path: Path) -> None:
    """Not even a pending one, which every command acts on."""
    bundle = copy("onnx-stage")
    fix(bundle)
    (bundle.parent / "link").symlink_to(tmp_path)
    step = publish.backup_folder(bundle) / "0001"
    (step / "files" / "link").mkdir()
    for kept in ("config.json", "link/elsewhere"):
        (step / "files" / kept).write_text("a stranger's")
    change_receipt(step, path=name)
    with pytest.raises(BundleError, match=r"cannot be read: .*(outside|empty name|null byte)"):
        revert(bundle)
    before = without_backup(bundle.parent)
    (publish.backup_folder(bundle) / "lock").touch()
    step.rename(step.with_name("0001.pending"))
    engine.check(bundle)
    assert without_backup(bundle.parent) == before
    assert not (tmp_path / "elsewhere").exists()


def change_receipt(step: Path, **changes: object) -> None:
    receipt = step / "receipt.json"
    content = json.loads(receipt.read_text())
    content["files"][0].update(changes)
    receipt.write_text(json.dumps(content))


@pytest.mark.parametrize("written", [[[0, -4]], [[-1, 4]], [["0", 4]], [[1.5, 1]], [[float("inf"), 1]], 3, "ab"])
def test_receipts_of_parts_that_no_file_has(written: object, copy: Copy) -> None:
    bundle = copy("onnx-stage")
    fix(bundle)
    change_receipt(publish.backup_folder(bundle) / "0001", written=written)
    with pytest.raises(BundleError, match="cannot be read"):
        revert(bundle)


def test_receipts_of_parts_beyond_the_file(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    fix(bundle)
    for offset, size in ((0, 1 << 60), (1 << 80, 1)):
        change_receipt(publish.backup_folder(bundle) / "0001", written=[[offset, size]])
        with pytest.raises(BundleError, match="changed since"):
            revert(bundle)


def test_a_receipt_that_is_no_receipt(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    fix(bundle)
    for content in ("[" * 100_000, "[]", "{}", '{"files": [3]}', "\xff"):
        (publish.backup_folder(bundle) / "0001" / "receipt.json").write_text(content, encoding="latin-1")
        with pytest.raises(BundleError, match="cannot be read"):
            revert(bundle)


@pytest.mark.parametrize("linked", ["model.onnx.g4patch", "model.onnx.g4patch/lock"])
def test_a_backup_is_not_written_through_a_link(linked: str, copy: Copy, tmp_path: Path) -> None:
    bundle = copy("onnx-stage")
    elsewhere = tmp_path / "elsewhere"
    if linked.endswith("lock"):
        publish.backup_folder(bundle).mkdir()
        elsewhere.write_text("precious")
    else:
        elsewhere.mkdir()
    (bundle.parent / linked).symlink_to(elsewhere)
    with pytest.raises(BundleError, match=r"is a link|cannot be written"):
        fix(bundle)
    assert elsewhere.read_text() == "precious" if linked.endswith("lock") else not list(elsewhere.iterdir())


def test_an_original_that_is_a_link_is_not_put_back(copy: Copy, tmp_path: Path) -> None:
    bundle = copy("onnx-stage")
    fix(bundle)
    kept = publish.backup_folder(bundle) / "0001" / "files" / bundle.name
    secret = tmp_path / "secret"
    kept.rename(secret)
    kept.symlink_to(secret)
    with pytest.raises(BundleError, match="outside the bundle"):
        revert(bundle)


def test_an_original_that_is_missing(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    fix(bundle)
    before = bundle.read_bytes()
    (publish.backup_folder(bundle) / "0001" / "files" / bundle.name).unlink()
    with pytest.raises(BundleError, match="is not kept"):
        revert(bundle)
    assert bundle.read_bytes() == before


def test_what_a_stranger_puts_into_a_lock_and_for_a_step(copy: Copy, tmp_path: Path) -> None:
    bundle = copy("onnx-stage")
    fix(bundle)
    folder = publish.backup_folder(bundle)
    (folder / "lock").write_text("\n..\na\0b\n" + "n" * 5000)
    (folder / "0002.partial").symlink_to(tmp_path)
    (folder / ("\N{SUPERSCRIPT TWO}" * 4)).mkdir()
    assert engine.check(bundle).exit_code == 0
    assert revert(bundle)


def test_a_link_is_not_replaced(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = copy("onnx-fp16")
    cache = bundle.with_name("blob")
    bundle.rename(cache)
    bundle.symlink_to(cache)
    assert main(["fix", str(bundle)]) == 2
    err = capsys.readouterr().err
    assert "is a link to" in err
    assert "-o OUT" in err
    assert bundle.is_symlink()
    assert main(["fix", str(bundle), "-o", str(bundle.parent / "out")]) == 0


def test_too_little_disk_is_said_before_anything_is_written(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = copy("onnx-stage")
    before = tree(bundle.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(BundleError, match="bytes free"):
        fix(bundle)
    with pytest.raises(UsageError, match="bytes free"):
        fix(bundle, out=bundle.parent / "out")
    assert tree(bundle.parent) == before


def test_what_changes_before_the_lock_is_seen(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run mends the bundle while this one has judged it and does not hold the lock yet."""
    bundle, judge = copy("onnx-stage"), judging.judge
    fix(bundle, out=bundle.parent / "mended")
    mended = (bundle.parent / "mended" / bundle.name).read_bytes()

    def overtaken(command: str, found: Bundle, options: engine.Options) -> Report:
        report = judge(command, found, options)
        bundle.write_bytes(mended)
        monkeypatch.undo()
        return report

    monkeypatch.setattr(engine, "judge", overtaken)
    report = fix(bundle)
    assert (report.outcome, report.publication) == (Outcome.CLEAN, None)
    assert bundle.read_bytes() == mended


def test_two_runs_at_once(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    folder = publish.backup_folder(bundle)
    folder.mkdir()
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    before = tree(bundle.parent)
    with pytest.raises(BundleError, match="another g4patch"):
        fix(bundle)
    assert engine.check(bundle).exit_code == 1
    assert tree(bundle.parent) == before
    os.close(descriptor)
    assert fix(bundle).outcome is Outcome.FIXED


def test_interrupt_leaves_nothing(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = copy("onnx-stage")
    before = tree(bundle.parent)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify_patch", interrupted)
    assert main(["fix", str(bundle)]) == 130
    assert main(["fix", str(bundle), "-o", str(bundle.parent / "out")]) == 130
    assert tree(bundle.parent) == before


def test_modes_are_kept(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    bundle.chmod(0o600)
    fix(bundle)
    assert bundle.stat().st_mode & 0o777 == 0o600


def test_output_that_exists_is_not_overwritten(copy: Copy) -> None:
    bundle = copy("onnx-stage")
    with pytest.raises(UsageError, match="exists already"):
        fix(bundle, out=bundle)
    other = bundle.parent / "other"
    other.mkdir()
    (other / "model.onnx.data").write_bytes(b"somebody's")
    with pytest.raises(UsageError, match="exists already"):
        fix(bundle, out=other)
    assert (other / "model.onnx.data").read_bytes() == b"somebody's"
