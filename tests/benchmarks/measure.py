"""Run a command in a process of its own and take its wall time and peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

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
