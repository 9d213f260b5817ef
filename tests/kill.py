"""Run a piece of work in a child that is killed at its n-th step on the disk.

A step is a call that changes the disk: before it happens, the child ends as if by SIGKILL.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from typing import Any

_STEPS = ("replace", "rename", "link", "fsync", "mkdir", "rmdir", "unlink", "write", "pwrite", "copy_file_range")


def steps_of(work: Callable[[], object], kill_at: int | None = None) -> int | None:
    """How many steps `work` takes in a child process; None where it was killed before step `kill_at`."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _child(work, kill_at, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(answer.decode())
    return int(answer)


def _child(work: Callable[[], object], kill_at: int | None, writer: int) -> None:
    taken = 0

    def step() -> None:
        nonlocal taken
        if taken == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        taken += 1

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            step()
            return function(*arguments, **options)

        return run

    tell = os.write
    code = 0
    try:
        for name in _STEPS:
            if hasattr(os, name):
                setattr(os, name, counted(getattr(os, name)))
        _count_file_writes(step)
        work()
        tell(writer, str(taken).encode())
    except BaseException as error:
        tell(writer, repr(error).encode())
        code = 1
    finally:
        os._exit(code)


def _count_file_writes(step: Callable[[], None]) -> None:
    """Opening a file for writing is two steps: killed after it, the file is there and empty."""
    real: Any = io.open

    def open_counted(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        writes = not mode.startswith("r") or "+" in mode
        if writes:
            step()
        opened = real(file, mode, *arguments, **options)
        if writes:
            step()
        return opened

    vars(io)["open"] = open_counted
