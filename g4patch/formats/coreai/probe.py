"""What Core AI's own code checks: its verifier, and Apple's runtime on a lookup that is cut out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.cone import NotAMap, depends_on, prompts
from g4patch.formats import Model
from g4patch.formats.coreai.draft import Reading
from g4patch.formats.coreai.model import Native, native
from g4patch.rows import repeated
from g4patch.runtimes import Probe, Unavailable
from g4patch.runtimes import coreai as runtime
from g4patch.view import Graph, Op


def validate(model: Model) -> tuple[str, ...]:
    """What the dialect's verifier says against the program, a line each."""
    return native(model).faults


def probe(model: Model, graph: str) -> Probe:
    """Apple's runtime for the lookups of one function. Raises Unavailable where there is no such function."""
    own = native(model)
    if graph not in own.readings:
        raise Unavailable(f"there is no function {graph}")
    return _Probe(model, own, own.readings[graph])


@dataclass(frozen=True)
class _Probe:
    """A `g4patch.runtimes.Probe`: each call is a job of the worker on the model's own file."""

    model: Model
    own: Native
    reading: Reading

    @property
    def runtime(self) -> str:
        return f"Core AI runtime of coreai-core {runtime.VERSION}"

    def lookup(self, ids_input: str, output: str, ids: NDArray[np.int64]) -> NDArray[Any]:
        """The rows for token ids `[N]`: `[N, W]`, bf16 and fp8 as float32. Raises Unavailable."""
        node = self.reading.graph.producer(output)
        if node is None or node.op is not Op.GATHER:
            fed = prompts(ids, self.reading.graph.value(ids_input).shape, len(ids))
            rows = [self.run({ids_input: prompt}, [output])[output].reshape(prompt.size, -1) for prompt in fed]
            return np.concatenate(rows)[: len(ids)]
        try:
            index = repeated(self.reading.graph, node.operands["index"], ids_input).value
        except NotAMap as error:
            raise Unavailable(f"the row that is read {error.reason}") from error
        return self._rows(ids_input, index, output, ids)

    def table(self, index: str, output: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The rows `[N]` of the table that `output` is gathered from: `[N, W]`. Raises Unavailable."""
        return self._rows(None, index, output, rows)

    def run(self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Values for one prompt, bf16 and fp8 as float32. Feeds that are not needed are left."""
        graph = self.reading.graph
        places = {f"output{number}": self._place(name) for number, name in enumerate(outputs)}
        for name in outputs:
            if graph.value(name).dtype is None:
                raise Unavailable(f"{name} is no tensor")
        writes = [write for name in outputs if name in graph.states for write in _writes(graph, name)]
        needed = {name for value in (*outputs, *writes) for name in depends_on(graph, value)}
        missing = sorted(needed - feeds.keys() - graph.states)
        if missing:
            raise Unavailable(f"nothing is given for {', '.join(missing)}")
        request = {
            "feeds": {f"feed{number}": self._place(name) for number, name in enumerate(sorted(needed))},
            "outputs": places,
            "writes": [self._place(write) for write in writes],
        }
        with runtime.workspace() as folder:
            for number, name in enumerate(sorted(needed)):
                if name in feeds:
                    np.save(folder / f"feed{number}.npy", feeds[name], allow_pickle=False)
            self._ask("run", request, folder)
            return {
                name: np.load(folder / f"output{number}.npy", allow_pickle=False) for number, name in enumerate(outputs)
            }

    def _rows(self, feed: str | None, index: str, output: str, ids: NDArray[np.int64]) -> NDArray[Any]:
        request = {
            "feed": None if feed is None else self._place(feed),
            "index": self._place(index),
            "output": self._place(output),
        }
        with runtime.workspace() as folder:
            np.save(folder / "ids.npy", np.asarray(ids, np.int64))
            self._ask("lookup", request, folder)
            rows: NDArray[Any] = np.load(folder / "rows.npy", allow_pickle=False)
            return rows

    def _ask(self, command: str, request: Mapping[str, Any], folder: Path) -> None:
        """Let the worker run a part of the program. A kill from outside is an error, not a reason to skip."""
        own: dict[str, Any] = {
            "path": str(self.own.path.absolute()),
            "callees": self.own.program.callees,
            "blobs": self.own.blobs,
        }
        try:
            answer = runtime.run(command, {**own, **request}, folder, self.model.path)
        except (runtime.WorkerError, runtime.Crashed) as error:
            raise Unavailable(f"Apple's runtime cannot run this part: {error}") from error
        if "skipped" in answer:
            raise Unavailable(f"this part cannot be cut out: {answer['skipped']}")

    def _place(self, name: str) -> list[Any]:
        place = self.reading.places.get(name)
        if place is None:
            raise Unavailable(f"{name} is not a value of the program")
        return [list(place.calls), place.value]


def _writes(graph: Graph, state: str) -> Iterator[str]:
    """What the writes to a state return, in the order of the program; also of those inside calls."""
    names = {state}
    for node in graph.nodes:
        if node.native == "coreai.invoke" and node.operands["x"] in names:
            names.add(node.output)
        elif node.native == "coreai.write_handle" and node.operands["0"] in names:
            yield node.output
