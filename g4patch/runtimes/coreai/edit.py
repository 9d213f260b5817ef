"""Insert operations into a loaded program and let uses read them.

Everything is addressed by `Numbered` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from g4patch.runtimes.coreai.bindings import ir, ops
from g4patch.runtimes.coreai.program import Numbered

# The names of `g4patch.view.Op` -> builder, with the order of its operands.
_BUILDERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "equal": (ops.broadcasting_equal, ("x", "y")),
    "or": (ops.broadcasting_or, ("x", "y")),
    "and": (ops.broadcasting_and, ("x", "y")),
    "not": (ops.not_, ("x",)),
    "where": (ops.broadcasting_where, ("condition", "x", "y")),
    "expand_dims": (ops.expand_dims, ("x", "axes")),
    "cast": (ops.cast, ("x",)),
}


def apply(module: Any, edits: Sequence[Mapping[str, Any]]) -> None:
    """Apply edits, all numbered as the module was before the first of them.

    An edit has `nodes`: op, output (a local name), operands by meaning, each `{"value": number}`, `{"local":
    name}` or `{"const": value, "dtype": numpy name}`; and `redirects`: op and operand numbers, local name.
    """
    numbered = Numbered(module)
    for edit in edits:
        users = [numbered.ops[redirect["op"]] for redirect in edit["redirects"]]
        place = ir.InsertionPoint(_first(users, numbered))
        local: dict[str, Any] = {}
        for node in edit["nodes"]:
            build, names = _BUILDERS[node["op"]]
            operands = [_operand(node["operands"][name], numbered, local, place) for name in names]
            if node["op"] == "cast":
                operands.append(np.dtype(node["dtype"]).type)
            local[node["output"]] = build(*operands, ip=place)
        for redirect, user in zip(edit["redirects"], users, strict=True):
            user.operands[redirect["operand"]] = local[redirect["local"]]


def _operand(spec: Mapping[str, Any], numbered: Numbered, local: Mapping[str, Any], place: Any) -> Any:
    if "value" in spec:
        return numbered.values[spec["value"]]
    if "local" in spec:
        return local[spec["local"]]
    return ops.constant(np.array(spec["const"], spec["dtype"]), ip=place)


def _first(users: Sequence[Any], numbered: Numbered) -> Any:
    """The operation to insert before: in the innermost block around all users, the first of them."""
    chains = [_ancestry(user) for user in users]
    depth = 0
    while len({chain[depth] for chain in chains}) == 1 and all(len(chain) > depth + 1 for chain in chains):
        depth += 1
    level = {chain[depth] for chain in chains}
    if len({op.block for op in level}) > 1:
        return chains[0][depth - 1]
    return min(level, key=numbered.op_number)


def _ancestry(op: Any) -> list[Any]:
    """The operations around one, from the outermost down to itself."""
    chain = [op]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent.operation)
    return chain[::-1]
