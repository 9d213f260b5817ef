"""onnxruntime on the CPU, on a slice of a model: weights stay in their files and are mapped, not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto

from g4patch.cone import prompts, shape_of
from g4patch.recognise import ids_input
from g4patch.runtimes import Unavailable
from g4patch.view import Graph

Feeds = Mapping[str, NDArray[Any]]
NOTHING: Feeds = MappingProxyType({})


@dataclass(frozen=True)
class OrtProbe:
    """A `g4patch.runtimes.Probe`. `cut(feeds, outputs)` isolates a part of the model whose data lies in `folder`."""

    cut: Callable[[Sequence[str], Sequence[str]], ModelProto]
    folder: Path
    view: Graph

    @property
    def runtime(self) -> str:
        return f"onnxruntime {onnxruntime.__version__}"

    def lookup(self, ids_input: str, output: str, ids: NDArray[np.int64]) -> NDArray[Any]:
        fed = prompts(ids, self.view.value(ids_input).shape, len(ids))
        return self._run(ids_input, fed, output)[: len(ids)]

    def table(self, index: str, output: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        root = ids_input(self.view, index)
        if root is None:
            raise Unavailable(f"{index} is not made of token ids")
        fed = prompts(rows, self.view.value(root).shape, len(rows))
        shape = shape_of(self.view, index, root, len(rows))
        # The ids' own numbers do not matter then: only their shape may still be asked for.
        return self._run(index, fed.reshape(len(fed), *shape), output, {root: np.zeros_like(fed[0])})[: len(rows)]

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        model = self.cut(tuple(feeds), outputs)
        return self._start(model)(self._typed(model, feeds), outputs)

    def _run(self, feed: str, fed: NDArray[np.int64], output: str, others: Feeds = NOTHING) -> NDArray[Any]:
        """`output` [N, W] where `feed` is each of some prompts in turn: `fed` [P, ...] of N elements."""
        model = self.cut((feed, *others), (output,))
        run = self._start(model)
        chunks = [run(self._typed(model, {**others, feed: prompt}), (output,))[output] for prompt in fed]
        return np.concatenate([chunk.reshape(fed[0].size, -1) for chunk in chunks])

    def _typed(self, model: ModelProto, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """What a slice takes of some feeds, each in its own dtype."""
        needed = (item.name for item in model.graph.input)
        return {name: feeds[name].astype(self.view.value(name).dtype or "int64") for name in needed}

    def _start(self, model: ModelProto) -> Callable[[Feeds, Sequence[str]], dict[str, NDArray[Any]]]:
        """A session for one look: as long as it lives, the pages of the table that it read count as ours."""
        options = onnxruntime.SessionOptions()
        # As stored: optimisation could convert a whole table before the first row is read.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self.folder))

        def run(feeds: Feeds, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
            with _unavailable("run"):
                return dict(zip(outputs, session.run(list(outputs), dict(feeds)), strict=True))

        with _unavailable("load"):
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        return run


@contextmanager
def _unavailable(what: str) -> Iterator[None]:
    """onnxruntime raises a class of its own for each status, none with a useful base."""
    try:
        yield
    except Exception as error:
        first_line = str(error).strip().splitlines()[0]
        raise Unavailable(f"onnxruntime cannot {what} the slice: {first_line}") from error
