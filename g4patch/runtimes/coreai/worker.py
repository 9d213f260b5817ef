"""`python -m g4patch.runtimes.coreai.worker DONE`: do the jobs whose folders are named on standard input.

A job is FOLDER/request.json; its answer goes to FOLDER/response.json, and a byte to the pipe DONE. Everything
native happens here, and nothing of it outlives the parent: with its end of standard input, this ends too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from g4patch.runtimes.coreai import REQUEST, RESPONSE, Mismatch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_parent() -> None:
    """On Linux the kernel sees to it: native code that never returns lets no thread of ours run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _listen(folders: SimpleQueue[Path]) -> None:
    """Take jobs until the parent closes the pipe, or is no more; also in the middle of one."""
    for line in sys.stdin:
        folders.put(Path(json.loads(line)))
    os._exit(1)


def _without_core_dumps() -> None:
    try:
        import resource
    except ImportError:  # not on this system, and neither are core dumps
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(folder: Path) -> dict[str, Any]:
    """Do one job. A refusal is an answer; only native code, or a kill, ends without one."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    try:
        from g4patch.runtimes.coreai import jobs

        return {"result": jobs.COMMANDS[request["command"]](request, folder)}
    except Mismatch as error:
        return {"mismatch": str(error)}
    except Exception as error:  # whatever the bindings raise is for the main process to report
        # Diagnostics go on to print the whole program.
        said = " ".join(str(error).split()[:40]) or type(error).__name__
        return {"error": said[:400]}


def main(done: int) -> None:
    """Do jobs, one after another, until there is nobody left to do them for."""
    _without_core_dumps()
    _die_with_parent()
    folders: SimpleQueue[Path] = SimpleQueue()
    threading.Thread(target=_listen, args=(folders,), daemon=True).start()
    while True:
        folder = folders.get()
        # coreai-core makes temporary folders of its own: inside the job's, they go with it.
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        (folder / RESPONSE).write_text(json.dumps(_answer(folder)), encoding="utf-8")
        os.write(done, b".")


if __name__ == "__main__":
    main(int(sys.argv[1]))
