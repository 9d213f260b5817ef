"""Which operations a run has to carry out: those that the wanted values depend on, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil.program import READ_STATE, WRITE_STATE, Function, Operation


def needed(
    function: Function, wanted: Collection[str], given: Collection[str], keep_states: bool
) -> tuple[Operation, ...]:
    """The operations that lead to `wanted`, in order. Values in `given` are known and not traced further.

    A write to a state is needed by the reads after it, up to the write before; with `keep_states` also by the caller.
    Raises Unavailable for a value that the function does not have.
    """
    known = {*function.inputs, *function.producers}
    for name in (*wanted, *given):
        if name not in known:
            raise Unavailable(f"function {function.name} has no value {name}")
    live = set(wanted) - set(given)
    live_states = set(function.states) if keep_states else set()
    kept: list[Operation] = []
    for op in reversed(function.operations):
        if op.type == WRITE_STATE:
            is_needed = op.state in live_states
            live_states.discard(op.state)
        else:
            is_needed = any(output.name in live for output in op.outputs)
        if not is_needed:
            continue
        kept.append(op)
        live.difference_update(output.name for output in op.outputs)
        if op.type == READ_STATE:
            live_states.add(op.state)
        live.update(name for name in op.operands if name not in given)
    return tuple(reversed(kept))


def inputs_of(function: Function, wanted: Collection[str], given: Collection[str]) -> frozenset[str]:
    """The inputs whose elements `wanted` depends on; one of which only the shape is asked for is not among them."""
    live = set(wanted) - set(given)
    for op in reversed(needed(function, wanted, given, keep_states=False)):
        if op.type != "shape" and any(output.name in live for output in op.outputs):
            live.update(name for name in op.operands if name not in given)
    return frozenset(live & set(function.inputs))


def is_constant(op: Operation) -> bool:
    """Whether an op gives the same value in every run: a constant, or a compressed one."""
    return op.type == "const" or op.type.startswith("constexpr_")


def last_uses(operations: Sequence[Operation], keep: Collection[str]) -> list[tuple[str, ...]]:
    """For each operation, what nothing after it reads: its own operands and outputs, but for those in `keep`."""
    seen = set(keep)
    frees: list[tuple[str, ...]] = []
    for op in reversed(operations):
        mine = dict.fromkeys((*op.operands, *(output.name for output in op.outputs)))
        frees.append(tuple(name for name in mine if name not in seen))
        seen.update(mine)
    return frees[::-1]
