"""Many bundles in one call: each in a process of its own, several at once within a memory limit, results in order.

Processes, because a bundle's bytes reach native code: one that crashes it, or fills the memory, ends its own process
and no other. They are started anew (`spawn`), because libraries with threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from g4patch import memory
from g4patch.bundle import find
from g4patch.errors import BundleError, G4PatchError, Interrupted
from g4patch.report import Failure, Report, Result

# How many bundles are done, and which are being worked on: none is named while a result is handed over.
Watch = Callable[[int, Sequence[str]], None]

# An interrupted process removes what it staged, which takes moments; native code may keep it from hearing at all.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """One bundle and what to do with it. `work` can be pickled. `runs`: a reference beside the bundle will be run."""

    bundle: Path | None
    work: Callable[[], Report]
    runs: bool = False

    @property
    def name(self) -> str:
        return str(self.bundle or ".")


@dataclass(frozen=True)
class _Child:
    job: Job
    process: BaseProcess
    connection: Connection
    need: int


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(jobs: Sequence[Job], at_once: int, watch: Watch = lambda done, names: None) -> Generator[Result, None, None]:
    """Do the jobs, up to `at_once` of them at a time, and yield their results in the order given.

    A single job is done here; a KeyboardInterrupt ends it. With more of them, it ends those that are running, and
    the results say which jobs were not done. Close the iterator to do the same.
    """
    if len(jobs) == 1:
        yield _attempt(jobs[0])
        return
    results: dict[int, Result] = {}
    children: dict[int, _Child] = {}
    waiting = list(enumerate(jobs))
    try:
        for number in range(len(jobs)):
            try:
                while number not in results and (waiting or children):
                    _start(waiting, children, at_once)
                    watch(number + len(results), [child.job.name for child in children.values()])
                    _collect(children, results, None)
            except KeyboardInterrupt:
                waiting.clear()
                _end(children, results)
            watch(number + len(results), [])
            yield results.pop(number) if number in results else _interrupted(jobs[number])
    finally:
        _end(children, results)


def _attempt(job: Job) -> Result:
    try:
        return job.work()
    except G4PatchError as error:
        return Failure(job.name, error)


def _interrupted(job: Job) -> Failure:
    return Failure(job.name, Interrupted(f"{job.name}: interrupted", "it is as it was, or mended whole"))


def _start(waiting: list[tuple[int, Job]], children: dict[int, _Child], at_once: int) -> None:
    """Start as many jobs, in order, as there are places and memory for. One alone gets what it needs."""
    taken, limit = sum(child.need for child in children.values()), memory.limit()
    while waiting and len(children) < at_once:
        number, job = waiting[0]
        need = _need(job)
        if children and taken + need > limit:
            return
        children[number] = _spawn(waiting.pop(0)[1], need)
        taken += need


def _need(job: Job) -> int:
    """What a job needs; nothing for a bundle that cannot be worked on, which the job itself will say."""
    try:
        return memory.need(find(job.bundle), runs=job.runs)
    except (G4PatchError, OSError):
        return 0


def _spawn(job: Job, need: int) -> _Child:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, theirs), daemon=True)
    with _interrupts_held():
        process.start()
    theirs.close()
    return _Child(job, process, ours, need)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; those started here never see it, and are ended by their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(job: Job, connection: Connection) -> None:
    """In the process of one job: do it and send the result."""
    try:
        signal.signal(signal.SIGTERM, interrupt)
        result = _attempt(job)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        connection.send(_portable(result))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        traceback.print_exc()
        said = f"g4patch itself failed over {job.name}: {type(error).__name__}: {error}"
        connection.send(Failure(job.name, BundleError(said, "please report it with the lines above")))


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler that lets a signal do what Ctrl-C does, once: what tidies up must not be interrupted again."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _portable(result: Result) -> Result:
    """A report without what only its own process can use: the formats' own objects."""
    if isinstance(result, Failure):
        return result
    models = tuple(
        replace(one, subject=one.subject.portable, mended=one.mended and one.mended.portable) for one in result.models
    )
    return replace(result, models=models)


def _collect(children: dict[int, _Child], results: dict[int, Result], seconds: float | None) -> None:
    """Wait until at least one job is done, or for so long, and move what is done to the results."""
    ready = wait([child.connection for child in children.values()], seconds)
    for number, child in list(children.items()):
        if child.connection in ready:
            del children[number]
            try:
                results[number] = child.connection.recv()
            except (EOFError, OSError):  # it ended before it sent a result, or while it did
                child.process.join()
                results[number] = _died(child)
            child.connection.close()
            child.process.join()


def _died(child: _Child) -> Failure:
    """A process that ended without a result: because it was asked to, or because native code ended it."""
    code = child.process.exitcode or 0
    if code in (0, -signal.SIGTERM):
        return _interrupted(child.job)
    how = signal.Signals(-code).name if -code in signal.valid_signals() else f"exit code {code}"
    hint = "is the bundle whole? Export it again"
    if code == -signal.SIGKILL:
        hint = "too little memory, perhaps: try --jobs 1"
    return Failure(child.job.name, BundleError(f"{child.job.name} ended the process that read it ({how})", hint))


def _end(children: dict[int, _Child], results: dict[int, Result]) -> None:
    """End what is running and leave nothing behind; what was done in the meantime is a result."""
    for child in children.values():
        child.process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    try:
        while children and (left := deadline - time.monotonic()) > 0:
            _collect(children, results, left)
    finally:
        for child in children.values():
            child.process.kill()
            child.process.join()
            with suppress(OSError):
                child.connection.close()
        children.clear()
