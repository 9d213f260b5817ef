"""What the processes of `test_batch` do. They import this, so it is small."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from g4patch import check
from g4patch.errors import BundleError
from g4patch.report import Report

RIGHT = Path(__file__).parent.parent / "samples" / "onnx-right" / "model.onnx"


def slowly() -> Report:
    time.sleep(1)
    return check(RIGHT)


def refuse() -> Report:
    raise BundleError("it is no bundle", "export it")


def crash() -> Report:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def fail() -> Report:
    raise ValueError("a mistake in g4patch")


def log_times(place: Path) -> Report:
    """Leave a file that says from when to when this ran."""
    started = time.time()
    time.sleep(0.2)
    place.write_text(f"{started} {time.time()}")
    return check(RIGHT)


def wait_with_stage(place: Path) -> Report:
    """What an interrupted fix does: a stage is there while it works, and gone when it ends."""
    place.touch()
    try:
        time.sleep(60)
    finally:
        place.unlink()
    return check(RIGHT)
