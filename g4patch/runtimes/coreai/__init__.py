"""coreai-core in a process of its own.

Its native code ends the process where it meets bytes it does not like, instead of raising. So it is never
loaded here: a worker does the job, and its death is a result like any other.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import g4patch
from g4patch.errors import BundleError, MissingExtra

VERSION = "1.0.0b3"
REQUEST, RESPONSE = "request.json", "response.json"
_INSTALL = (
    "pip install 'g4patch[coreai]'; it exists for Linux on x86-64 (glibc 2.34 or later) and for macOS 26 or later "
    "on Apple silicon"
)
_TIME_LIMIT = 300.0
_KILLED = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})


class WorkerError(Exception):
    """The worker ran and could not do its job; the text is what it said."""


class Crashed(BundleError):
    """Native code ended the worker by itself: the bytes, or the operations, are more than it can take."""


class Mismatch(Exception):
    """coreai-core lacks something that the worker was written for."""


def require() -> None:
    """Raise MissingExtra unless the version of coreai-core that the worker was written for is there."""
    try:
        found = importlib.metadata.version("coreai-core")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("coreai-core, which reads Core AI programs, is not installed", _INSTALL) from None
    if found != VERSION:
        raise MissingExtra(f"g4patch works with coreai-core {VERSION}, and {found} is installed", _INSTALL)


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder for one job, gone afterwards: request, results, and whatever coreai-core leaves behind."""
    with tempfile.TemporaryDirectory(prefix="g4patch-") as folder:
        yield Path(folder)


def run(command: str, request: Mapping[str, Any], folder: Path, subject: Path, limit: float = _TIME_LIMIT) -> Any:
    """Let a worker run one command on `subject`, in `folder`, and return its answer.

    Raises MissingExtra without coreai-core, Crashed where its native code ends the worker, BundleError where
    something else does or it takes longer than `limit` seconds, and WorkerError where it answers with an
    error.
    """
    require()
    (folder / REQUEST).write_text(json.dumps({"command": command, **request}), encoding="utf-8")
    (folder / RESPONSE).unlink(missing_ok=True)
    worker = _idle_worker()
    try:
        code = worker.do(folder, limit)
        if code is not None:
            raise _failure(code, subject)
        answer = json.loads((folder / RESPONSE).read_text(encoding="utf-8"))
    except TimeoutError:
        worker.stop()
        hint = "is the machine short of memory?"
        raise BundleError(f"coreai-core took longer than {limit:.0f} s over {subject}", hint) from None
    except RecursionError as error:
        worker.stop()
        raise BundleError(f"{subject} nests deeper than any model", "is it what it seems to be?") from error
    except BaseException:
        worker.stop()
        raise
    _idle.append(worker)
    if "mismatch" in answer:
        raise MissingExtra(
            f"coreai-core cannot be used: {answer['mismatch']}",
            _INSTALL,
        )
    if "error" in answer:
        raise WorkerError(answer["error"])
    return answer["result"]


class _Worker:
    """A process that does one job after another, until it dies or is stopped."""

    def __init__(self) -> None:
        package = str(Path(g4patch.__file__).parent.parent)
        search = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._done, done = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "g4patch.runtimes.coreai.worker", str(done)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": search},
            pass_fds=(done,),
            start_new_session=True,
        )
        os.close(done)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def do(self, folder: Path, limit: float) -> int | None:
        """Do the job in a folder. Returns the exit code if the process died over it. Raises TimeoutError."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which the other pipe tells
            self._process.stdin.write(json.dumps(str(folder)).encode() + b"\n")
            self._process.stdin.flush()
        ready, _, _ = select.select([self._done], [], [], limit)
        if not ready:
            raise TimeoutError
        return None if os.read(self._done, 1) else self._process.wait()

    def stop(self) -> None:
        """End the process, if it still runs, with all that it started."""
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._done)


# Starting one takes half a second, most of it the import of coreai-core: those that are done wait for more.
_idle: list[_Worker] = []


def _idle_worker() -> _Worker:
    while _idle:
        worker = _idle.pop()
        if worker.alive:
            return worker
        worker.stop()
    return _Worker()


@atexit.register
def dismiss() -> None:
    """End the workers that wait for a job."""
    while _idle:
        _idle.pop().stop()


if hasattr(os, "register_at_fork"):
    # A forked process must not talk to its parent's workers.
    os.register_at_fork(after_in_child=_idle.clear)


def _failure(code: int, subject: Path) -> BundleError:
    name = _name(code)
    if name in _KILLED:
        hint = "something outside ended it: too little memory, perhaps"
        return BundleError(f"coreai-core was killed ({name}) over {subject}", hint)
    hint = "is the asset whole? Export it again, or save it again with coreai-core"
    return Crashed(f"coreai-core crashed ({name}) over {subject}", hint)


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"
