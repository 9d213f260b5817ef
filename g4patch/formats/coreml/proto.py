"""Core ML's protobuf messages, from the installed coremltools but without running coremltools.

`import coremltools.proto` runs `coremltools/__init__`, which takes seconds and imports torch where that is
installed. The generated modules need nothing of it: they are loaded here as a package of our own that lies in
coremltools' folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from g4patch.errors import MissingExtra

# Messages of generated modules have no static types.
Message = Any

_PACKAGE = "g4patch.formats.coreml._coremltools_proto"


@cache
def model_pb2() -> ModuleType:
    """`Model.proto`: `Model` and its parts. Raises MissingExtra where coremltools is not installed."""
    return _load("Model_pb2")


@cache
def mil_pb2() -> ModuleType:
    """`MIL.proto`: `Program`, `Operation`, `Value`, and the rest of an ML Program."""
    return _load("MIL_pb2")


def _load(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        spec = ModuleSpec(_PACKAGE, loader=None, is_package=True)
        spec.submodule_search_locations = [str(_folder())]
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _folder() -> Path:
    spec = importlib.util.find_spec("coremltools")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "proto" / "Model_pb2.py").is_file():
            return Path(place) / "proto"
    raise MissingExtra("Core ML packages are read with coremltools, which is not installed", "pip install coremltools")
