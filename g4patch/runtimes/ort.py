"""onnxruntime on the CPU, on a slice of a model: weights stay in their files and are mapped, not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto

from g4patch.cone import prompts, shape_of
from g4patch.recognise import ids_input
from g4patch.runtimes import Unavailable
from g4patch.view import Graph, Shape


@dataclass(frozen=True)
class OrtProbe:
    """A `g4patch.runtimes.Probe`. `cut(feed, output)` isolates a part of the model whose data lies in `folder`."""

    cut: Callable[[str, str], ModelProto]
    folder: Path
    view: Graph

    @property
    def runtime(self) -> str:
        return f"onnxruntime {onnxruntime.__version__}"

    def lookup(self, ids_input: str, output: str, ids: NDArray[np.int64]) -> NDArray[Any]:
        return self._run(ids_input, output, ids, self.view.value(ids_input).shape)

    def table(self, index: str, output: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        root = ids_input(self.view, index)
        rank = len(shape_of(self.view, index, root)) if root else 2
        return self._run(index, output, rows, (None,) * rank)

    def _run(self, feed: str, output: str, ids: NDArray[np.int64], shape: Shape | None) -> NDArray[Any]:
        dtype = self.view.value(feed).dtype or "int64"
        session = self._session(feed, output)
        try:
            chunks = [
                session.run([output], {feed: prompt})[0] for prompt in prompts(ids, shape, len(ids)).astype(dtype)
            ]
        except onnxruntime.capi.onnxruntime_pybind11_state.Fail as error:
            raise Unavailable(f"onnxruntime cannot run the lookup: {_first_line(error)}") from error
        rows = np.concatenate([chunk.reshape(-1, *chunk.shape[chunk.ndim - 1 :]) for chunk in chunks])
        result: NDArray[Any] = rows[: len(ids)]
        return result

    def _session(self, feed: str, output: str) -> onnxruntime.InferenceSession:
        """A session for one run: as long as it lives, the pages of the table that it read count as ours."""
        options = onnxruntime.SessionOptions()
        # As stored: optimisation could convert a whole table before the first row is read.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))
        content = self.cut(feed, output).SerializeToString()
        try:
            return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises a class of its own for each status
            raise Unavailable(f"onnxruntime cannot load the lookup: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
