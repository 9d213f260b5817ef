"""How much memory there is, and how much the work on a bundle may take: what decides how many are worked on at once.

The need is estimated from the file that holds the graph, which is read whole. Weights are not: they stay on disk,
whatever their size, but where a reference asks for a run of the whole graph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from g4patch import reference
from g4patch.bundle import Bundle

# Measured on the samples: 50 to 110 MB to check one, 90 to 170 MB to mend it, libraries and workers included.
_BASE = 200_000_000

# Measured on ONNX, which costs most. A graph of 60,000 small nodes (10 MB) takes 46 times its file's size: nodes become
# objects, in two copies, and both are compared. No real graph is larger than that by far; more bytes are weights
# inside, of which parsing, editing and checking hold 6.5 copies.
_NODES, _PER_BYTE_OF_NODES = 16_000_000, 50
_PER_BYTE_OF_WEIGHTS = 7

# A run of the whole graph takes its weights and what a runtime makes of them: measured for Core AI, twice their size.
_PER_BYTE_RUN = 2

# Other work goes on on the machine, and the estimates are rough.
_PART = 0.5

# The files that are read whole, by a model's suffix. Of all others the weights, which are most of them, are not read.
_READ_WHOLE = {".onnx": "*.onnx", ".mlpackage": "*.mlmodel"}

# A container's own limit: the first is there with cgroup v2, the second with v1.
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def limit() -> int:
    """Bytes that all bundles together may take: half of what the machine, or the container, has."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min((physical, *_container_limits())) * _PART)


def _container_limits() -> Iterator[int]:
    for path in _CONTAINER_LIMITS:
        try:
            yield int(path.read_text())
        except (OSError, ValueError):  # it is not there, or says "max"
            continue


def need(bundle: Bundle, *, runs: bool) -> int:
    """Bytes that the work on a bundle takes at its peak, roughly. `runs`: references beside its models are run."""
    return _BASE + sum(_model(path, runs) for path in bundle.models)


def _model(path: Path, runs: bool) -> int:
    files = _files(path)
    graph = sum(_size(file) for file in files if fnmatch(file.name.lower(), _READ_WHOLE.get(path.suffix.lower(), "")))
    nodes = min(graph, _NODES)
    needed = nodes * _PER_BYTE_OF_NODES + (graph - nodes) * _PER_BYTE_OF_WEIGHTS
    if runs and reference.beside(path) is not None:
        needed += _PER_BYTE_RUN * sum(map(_size, files))
    return needed


def _files(path: Path) -> list[Path]:
    """A model's own files: those in its folder, or beside it under names that begin like its own."""
    if path.is_dir():
        return list(path.rglob("*"))
    return [path, *(file for file in path.parent.iterdir() if file.name.startswith((f"{path.name}.", f"{path.name}_")))]


def _size(path: Path) -> int:
    """Bytes of a file; none of what is no file, or is gone: whoever opens the bundle will say so."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
