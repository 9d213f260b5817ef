"""Cut values out of a loaded program, with what computes them, as a program of its own, and run that."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.runtimes.coreai.bindings import AIProgram, GraphOp, RuntimeArray, ir, ops
from g4patch.runtimes.coreai.program import Numbered
from g4patch.runtimes.coreai.tables import CannotRun, Rows, is_state

Array = NDArray[Any]

# A value, and the `coreai.invoke` operations around it by number, outermost first.
Place = tuple[tuple[int, ...], Any]
Known = Mapping[Place, Any]

_WRITE = "coreai.write_handle"


@dataclass(frozen=True)
class Source:
    """A loaded program: its parts by number, the graph that each invoke calls, and its rows."""

    numbered: Numbered
    callees: Mapping[int, int]
    rows: Rows

    @classmethod
    def of(cls, module: Any, request: Mapping[str, Any]) -> Source:
        """From a request with path, callees (invoke -> graph) and blobs (key -> [offset, size])."""
        callees = {int(call): graph for call, graph in request["callees"].items()}
        return cls(Numbered(module), callees, Rows(Path(request["path"]), request["blobs"]))

    def place(self, spec: list[Any]) -> Place:
        scope, number = spec
        return self.resolve((tuple(scope), self.numbered.values[number]))

    def resolve(self, place: Place) -> Place:
        """The same value outside calls: an argument is the call's operand, a result what is returned."""
        scope, value = place
        owner = value.owner
        if isinstance(owner, ir.Block):
            if not scope or owner.owner.operation != self._callee(scope[-1]):
                return place
            call = self.numbered.ops[scope[-1]]
            return self.resolve((scope[:-1], call.operands[ir.BlockArgument(value).arg_number]))
        if owner.name != "coreai.invoke":
            return place
        number = self.numbered.op_number(owner)
        returned = list(self._callee(number).regions[0].blocks[0].operations)[-1].operation
        return self.resolve(((*scope, number), returned.operands[ir.OpResult(value).result_number]))

    def _callee(self, call: int) -> Any:
        return self.numbered.ops[self.callees[call]]

    def operands(self, place: Place) -> list[Place]:
        """What the operation behind a value reads.

        Raises CannotRun where that is not an operation to copy.
        """
        scope, value = place
        owner = value.owner
        if isinstance(owner, ir.Block):
            raise CannotRun("it depends on another input")
        if len(owner.regions):
            raise CannotRun(f"it is computed inside {owner.name}")
        if owner.name == _WRITE and owner.parent.operation.name != "coreai.graph":
            raise CannotRun(f"a state is written inside {owner.parent.operation.name}")
        return [self.resolve((scope, operand)) for operand in owner.operands]

    def position(self, place: Place) -> tuple[int, ...]:
        """Where a value is computed: comes before another's if the program, calls read through, computes it before."""
        scope, value = place
        return (*scope, self.numbered.op_number(value.owner))

    def behind(self, places: Iterable[Place], known: Iterable[Place]) -> Iterator[Place]:
        """All that is computed on the way to some values, from what is known on, each once."""
        stack, seen = list(places), set(known)
        while stack:
            place = stack.pop()
            if place not in seen:
                seen.add(place)
                yield place
                stack.extend(self.operands(place))


def _copies(source: Source, places: Iterable[Place], known: Known) -> dict[Place, Any]:
    """Copies, at the insertion point, of some values and of what computes them from those that are known.

    They stand in the order of the program, in which a state may be read before something else writes it.
    """
    copies = dict(known)
    for scope, value in sorted(source.behind(places, known), key=source.position):
        if (scope, value) in copies:  # another result of the same operation
            continue
        copy = value.owner.clone(ip=ir.InsertionPoint.current).operation
        for number, operand in enumerate(source.operands((scope, value))):
            copy.operands[number] = copies[operand]
        for original, result in zip(value.owner.results, copy.results, strict=True):
            copies.setdefault((scope, original), result)
    return copies


def copy_of(source: Source, place: Place) -> Any:
    """A copy, at the insertion point, of a value that depends on no input."""
    return _copies(source, [place], {})[place]


def build(
    source: Source,
    feeds: Mapping[str, Any],
    known: Callable[[Mapping[str, Any]], Known],
    outputs: Mapping[str, Place],
    writes: Sequence[Place] = (),
) -> Any:
    """A module whose only function `main` computes values of a program.

    `feeds` are the names and types of its inputs, `known` makes of them the values to start from, `outputs`
    are the names and places of its results, `writes` those of writes to states that it carries out too.
    """
    module = ir.Module.create()
    states = [name for name, type in feeds.items() if is_state(type)]
    types = [value.type for _, value in outputs.values()] + [ir.Type.parse("!coreai.token")] * len(states)
    with ir.InsertionPoint(module.body):
        # The dialect asks for a token a state, under its name, for when its writes are done.
        names = {"input_names": list(feeds), "result_names": [*outputs, *states]}
        graph = GraphOp("main", list(feeds.values()), types, **names)
        with graph.block:
            start = known(dict(zip(feeds, graph.arguments, strict=True)))
            copies = _copies(source, [*outputs.values(), *writes], start)
            tokens = [_token(graph.entry_block, state) for state in graph.arguments if is_state(state.type)]
            ops.output([*(copies[place] for place in outputs.values()), *tokens])
    module.operation.verify()
    return module


def _token(block: Any, state: Any) -> Any:
    """The token, at the insertion point, of the last write to a state in a block."""
    written = [op.operation.results[0] for op in block.operations if _writes_to(op.operation, state)]
    return written[-1] if written else ops.create_token()


def _writes_to(op: Any, state: Any) -> bool:
    return bool(op.name == _WRITE and op.operands[0] == state)


def execute(module: Any, feeds: Iterable[Mapping[str, Array]], folder: Path) -> list[dict[str, Array]]:
    """The results of a module's `main` on Apple's runtime, for each of some feeds.

    What is fed to a state is its content before the run; what it holds after it is among the results, by its name.
    """

    async def run() -> list[dict[str, Array]]:
        with tempfile.TemporaryDirectory(dir=folder) as here:
            asset = AIProgram._from_mlir_module(module).save_asset(Path(here) / "slice.aimodel")
            async with asset.executable() as model:
                function = model.load_function("main")
                results = []
                for feed in feeds:
                    given = {name: RuntimeArray(array) for name, array in feed.items()}
                    states = {name: given.pop(name) for name in function.desc.state_names}
                    found = await function(given, state=states)
                    results.append({name: _copy(result) for name, result in {**found, **states}.items()})
                return results

    return asyncio.run(run())


def _copy(result: Any) -> Array:
    """A result as an array of its own.

    What numpy has no dtype for becomes float32, which holds it exactly.
    """
    array = np.array(result.numpy())
    return array if array.dtype.kind in "biuf" and array.dtype.isbuiltin == 1 else array.astype(np.float32)
