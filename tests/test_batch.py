"""Many bundles in one call: order, isolation, the memory limit, and that an interruption leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from g4patch import batch, check, memory
from g4patch.batch import Job
from g4patch.bundle import find, outputs
from g4patch.cli import main
from g4patch.errors import Interrupted, UsageError
from g4patch.report import Failure, Report, worst_exit_code
from tests.conftest import SAMPLES, sample, tree
from tests.jobs import RIGHT, crash, fail, log_times, refuse, slowly
from tests.test_sidecar import LAYOUTS, write

pytestmark = pytest.mark.slow


def is_gone(group: int) -> bool:
    """Whether no process of a group is left, soon after its first has ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def results(*work: object, at_once: int = 4) -> list[Report | Failure]:
    return list(batch.run([Job(Path(f"job {n}"), one) for n, one in enumerate(work)], at_once))  # type: ignore[arg-type]


def test_order_is_kept_and_one_bad_one_does_not_stop_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    first, *bad, last = results(slowly, refuse, crash, fail, partial(check, RIGHT))
    assert isinstance(first, Report)
    assert isinstance(last, Report)
    assert (first.exit_code, last.exit_code) == (0, 0)
    assert all(isinstance(one, Failure) and one.exit_code == 2 for one in bad)
    refused, crashed, failed = [one.error for one in bad if isinstance(one, Failure)]
    assert (refused.message, refused.hint) == ("it is no bundle", "export it")
    assert "ended the process that read it (SIGSEGV)" in crashed.message
    assert "a mistake in g4patch" in failed.message
    assert "Traceback" in capfd.readouterr().err


def test_reports_come_back_whole() -> None:
    here = check(sample("onnx-stage"))
    there, _ = results(partial(check, sample("onnx-stage")), refuse)
    assert isinstance(there, Report)
    assert (there.findings, there.plan.digest, there.outcome) == (here.findings, here.plan.digest, here.outcome)
    assert there.subject.model.native is None


@pytest.mark.parametrize("name", ["onnx-fp16", "coreml-fp32", "coreai-palette4", "mobius-package"])
def test_reports_of_every_format_can_be_sent(name: str) -> None:
    report = batch._portable(check(sample(name)))
    assert isinstance(report, Report)
    there = pickle.loads(pickle.dumps(report))
    assert (there.findings, there.plan.digest, there.outcome) == (report.findings, report.plan.digest, report.outcome)


def test_reports_of_sidecars_can_be_sent(tmp_path: Path) -> None:
    report = batch._portable(check(write(tmp_path, LAYOUTS[0])))
    assert pickle.loads(pickle.dumps(report)).exit_code == 1


@pytest.mark.parametrize(("at_once", "limit"), [(1, 10**12), (3, 1)])
def test_not_more_at_once_than_asked_for_or_than_fit(
    at_once: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "limit", lambda: limit)
    monkeypatch.setattr(batch, "_need", lambda job: 2)  # more than the limit: each still gets its turn, alone
    results(*(partial(log_times, tmp_path / str(n)) for n in range(3)), at_once=at_once)
    spans = [tuple(map(float, (tmp_path / str(n)).read_text().split())) for n in range(3)]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_several_at_once_where_they_fit(tmp_path: Path) -> None:
    seen: list[Sequence[str]] = []
    jobs = [Job(Path(str(n)), partial(log_times, tmp_path / str(n))) for n in range(2)]
    list(batch.run(jobs, 2, lambda done, names: seen.append(names)))
    assert seen[0] == ["0", "1"]


def test_need_is_of_the_graph_and_not_of_the_weights(tmp_path: Path) -> None:
    bundle = tmp_path / "model.onnx"
    bundle.write_bytes(b"x" * 1_000_000)
    with (tmp_path / "model.onnx.data").open("wb") as weights:
        weights.truncate(5_000_000_000)
    assert memory.need(find(bundle), runs=True) == 200_000_000 + 50 * 1_000_000
    with bundle.open("ab") as file:
        file.truncate(116_000_000)  # weights inside: 100 MB more than any graph has nodes
    assert memory.need(find(bundle), runs=False) == 200_000_000 + 50 * 16_000_000 + 7 * 100_000_000
    bundle.write_bytes(b"")
    (tmp_path / "model.onnx.reference.safetensors").write_bytes(b"")
    assert memory.need(find(bundle), runs=True) == 200_000_000 + 2 * 5_000_000_000
    package = SAMPLES / "coreml-fp32" / "stage.mlpackage"
    graph = (package / "Data" / "com.apple.CoreML" / "model.mlmodel").stat().st_size
    assert memory.need(find(package), runs=False) == 200_000_000 + 50 * graph


def test_the_limit_is_half_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("2000000\n")
    (tmp_path / "unlimited").write_text("max\n")
    places = (tmp_path / "max", tmp_path / "unlimited", tmp_path / "none")
    monkeypatch.setattr(memory, "_CONTAINER_LIMITS", places)
    assert memory.limit() == 1_000_000
    monkeypatch.setattr(memory, "_CONTAINER_LIMITS", places[1:])
    assert memory.limit() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_the_worst_exit_code_counts() -> None:
    assert worst_exit_code([]) == 0
    assert worst_exit_code([0, 1]) == 1
    assert worst_exit_code([1, 4]) == 4
    assert worst_exit_code([4, 3, 1]) == 3
    assert worst_exit_code([3, 2, 4]) == 2
    assert worst_exit_code([2, 130]) == 130


def test_where_copies_go(tmp_path: Path) -> None:
    out = tmp_path / "out"
    a, b = tmp_path / "a" / "model.onnx", tmp_path / "b" / "model.onnx"
    with outputs([a.parent, b.parent], out, make=True) as places:
        assert places == [out / "a", out / "b"]
        assert out.is_dir()
    assert not out.exists()  # nothing was put into it
    with outputs([a, None], out, make=False) as places:
        assert not out.exists()
    refused: list[tuple[list[Path | None], Path | None, str]] = [
        ([a, b], out, "2 bundles would become"),
        ([a, a], None, "same bundle"),
        ([a, a.parent], None, "one holds the other"),
        ([a.parent, b.parent], tmp_path / "out.onnx", "the name of one bundle"),
    ]
    for bundles, place, message in refused:
        with pytest.raises(UsageError, match=message), outputs(bundles, place, make=True):
            pass
    assert list(tmp_path.iterdir()) == []


def test_fix_in_place_and_verify_take_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        shutil.copytree(SAMPLES / "onnx-fp16", tmp_path / name)
    bundles = [str(tmp_path / name / "model.onnx") for name in ("one", "two")]
    assert main(["fix", *bundles]) == 0
    assert main(["verify", *bundles, "--require", "reference"]) == 0
    assert "2 bundles, exit code 0" in capsys.readouterr().out
    assert main(["fix", *bundles, "--reference", "some.safetensors"]) == 2
    assert "--reference belongs to one bundle" in capsys.readouterr().err


_INTERRUPTED = """
import signal
import sys
from functools import partial
from pathlib import Path
from g4patch import batch, check
from tests.jobs import RIGHT, wait_with_stage

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    folder = Path(sys.argv[1])
    work = [partial(check, RIGHT), *(partial(wait_with_stage, folder / name) for name in "abc")]
    jobs = [batch.Job(Path(str(number)), one) for number, one in enumerate(work)]
    print(*[result.exit_code for result in batch.run(jobs, 2)])
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "SIGINT"])
def test_an_interruption_leaves_nothing_behind(whole_group: bool, tmp_path: Path) -> None:
    """At a terminal every process gets the signal, from a service only the first."""
    script, folder = tmp_path / "run.py", tmp_path / "folder"
    script.write_text(_INTERRUPTED)
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SAMPLES.parent), os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (folder / "b").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("0 130 130 130\n", "")
    assert list(folder.iterdir()) == []
    assert is_gone(process.pid)


def test_an_interrupted_bundle_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure("a.onnx", Interrupted("a.onnx: interrupted"))
    assert failure.exit_code == 130
    from g4patch.output import RENDERERS
    from g4patch.output.shown import Shown

    RENDERERS["text"]([failure, check(RIGHT)], sys.stdout, Shown(several=True))
    out = capsys.readouterr().out
    assert "2 bundles, exit code 130" in out
    assert "interrupted                     a.onnx" in out


def test_a_cancelled_job_over_real_bundles(tmp_path: Path) -> None:
    """Services end a job with SIGTERM: each bundle is as it was or mended, and nothing else is there."""
    whole: dict[str, str] = {}
    for name in ("one", "two", "three"):
        shutil.copytree(SAMPLES / "onnx-stage", tmp_path / name)
        whole |= {f"{name}/{path}": digest for path, digest in tree(tmp_path / name).items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "g4patch", "fix", "one", "two", "three", "-o", "out", "--jobs", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 130
    there = tree(tmp_path)
    assert {path: digest for path, digest in there.items() if not path.startswith("out/")} == whole
    assert not list(tmp_path.rglob(".*"))
    for copy in (tmp_path / "out").glob("*"):
        assert check(copy).exit_code == 0
    assert is_gone(process.pid)
