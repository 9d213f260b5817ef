"""Run a command in a process of its own and take its wall time and peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The child reports its own peak: for a child that forks, that of the largest of its children counts too.
_WRAPPER = """
import json, resource, runpy, sys, time
started = time.perf_counter()
{code}
seconds = time.perf_counter() - started
peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print("MEASURED", json.dumps([seconds, peak * (1 if sys.platform == "darwin" else 1024)]))
"""


@dataclass(frozen=True)
class Cost:
    """Wall seconds of the code without interpreter start-up, and peak resident bytes of the process."""

    seconds: float
    peak: int

    def __str__(self) -> str:
        return f"{self.seconds:7.2f} s  {self.peak / 1e6:7.0f} MB peak"


def cost(code: str) -> Cost:
    """What a piece of Python costs in a fresh interpreter, imports included."""
    result = subprocess.run([sys.executable, "-c", _WRAPPER.format(code=code)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr)
    line = next(line for line in result.stdout.splitlines() if line.startswith("MEASURED"))
    return Cost(*json.loads(line.removeprefix("MEASURED")))


@dataclass(frozen=True)
class Watched:
    """Wall seconds of a command from start to end, and peak anonymous bytes of it with all its children."""

    seconds: float
    anonymous: int

    def __str__(self) -> str:
        return f"{self.seconds:7.2f} s  {self.anonymous / 1e6:7.0f} MB anonymous"


def watched(command: Sequence[str]) -> Watched:
    """What a command costs; memory is looked at every few milliseconds, in /proc. Linux only."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        peak = max(peak, _anonymous(process.pid))
        time.sleep(0.01)
    seconds = time.perf_counter() - started
    assert process.stderr is not None
    if process.returncode:
        raise RuntimeError(process.stderr.read().decode())
    process.stderr.close()
    return Watched(seconds, peak)


def _anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process and its descendants: files that are mapped do not count."""
    total, pids = 0, [pid]
    while pids:
        here = Path(f"/proc/{pids.pop()}")
        try:
            status = (here / "status").read_text()
            pids += [
                int(child) for task in (here / "task").iterdir() for child in (task / "children").read_text().split()
            ]
        except OSError:  # it has ended
            continue
        total += next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return total
