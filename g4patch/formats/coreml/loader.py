"""Run coremltools' loader of ML Programs on a model. A program of its own: a crash in native code ends only this.

    python loader.py FOLDER MODEL [CONTROL]

FOLDER holds the weights, MODEL is the file to judge, CONTROL the model before the edit. The last line of the output is
a JSON object: `problems`, a list of lines, or `unavailable`, why the loader cannot judge. What the loader also says of
CONTROL is no fault of the edit: it refuses what it does not know, such as docstrings and custom layers.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Constants of more elements than this are weights: the loader gets zeros in their place, which take no memory.
_LARGE = 4096


def main(folder: str, target: str, control: str = "") -> dict[str, Any]:
    """The verdict on a model file."""
    # What coremltools would import for its converters costs seconds and is not needed.
    for name in ("torch", "tensorflow", "transformers", "sklearn", "xgboost", "scipy"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    logging.disable(logging.CRITICAL)
    try:
        from coremltools.converters.mil.frontend.milproto import load
        from coremltools.proto import Model_pb2
    except ImportError as error:
        return {"unavailable": f"coremltools cannot be imported: {error}"}
    _without_weights(load)
    weights = str(Path(folder) / "weights")
    problems = list(_problems(load, _read(Model_pb2, target), weights))
    if not problems:
        return {"problems": []}
    known = set(_problems(load, _read(Model_pb2, control or target), weights)) if control else set()
    if known.issuperset(problems):
        return {"unavailable": f"coremltools cannot load the model without the edit either: {problems[0]}"}
    return {"problems": problems}


def _read(messages: Any, path: str) -> Any:
    model = messages.Model()
    model.ParseFromString(Path(path).read_bytes())
    return model


def _problems(load: Any, model: Any, weights: str) -> Iterator[str]:
    """What the loader says against each ML Program in a model."""
    kind = model.WhichOneof("Type")
    if kind == "mlProgram":
        try:
            load.load(model, model.specificationVersion, weights)
        except Exception as error:
            yield f"{type(error).__name__}: {error}".splitlines()[0]
        return
    if kind and kind.startswith("pipeline"):
        pipeline = model.pipeline if kind == "pipeline" else getattr(model, kind).pipeline
        for part in pipeline.models:
            yield from _problems(load, part, weights)


def _without_weights(load: Any) -> None:
    """Let the loader see zeros for large constants: their types and shapes are all it needs.

    Sparse ones it gets as they are: it counts the ones of their masks.
    """
    import numpy as np

    from_file, load_const = load._load_value, load._load_const_op
    as_they_are = False

    def load_value(context: Any, spec: Any) -> Any:
        if not as_they_are and spec.WhichOneof("value") == "blobFileValue":
            kind = load.proto_to_types(spec.type)
            shape = tuple(kind.get_shape()) if load.types.is_tensor(kind) else ()
            if math.prod(shape) > _LARGE:
                dtype = load.types.nptype_from_builtin(kind.get_primitive())
                return np.broadcast_to(np.zeros((), dtype), shape)
        return from_file(context, spec)

    def load_const_op(context: Any, operation: Any) -> None:
        nonlocal as_they_are
        as_they_are = "sparse" in operation.type
        load_const(context, operation)
        as_they_are = False

    load._load_value, load._load_const_op = load_value, load_const_op


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
