"""What can be known of the tensor that a gather reads, from the operations that make it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from g4patch.formats.coreai import types
from g4patch.view import VIEW_OPS, Node, Table, Value

_HANDLES = frozenset({"coreai.read_handle", "coreai.create_token"})


def table(
    name: str,
    producers: Mapping[str, Node],
    values: Mapping[str, Value],
    weights: AbstractSet[str],
    inputs: AbstractSet[str],
) -> Table | None:
    """The table behind a value; None where it is computed from what a function is given.

    `weights` are the names of constants, `inputs` the names of the function's inputs.
    """
    shape, dtype = values[name].shape, values[name].dtype
    if shape is None or None in shape or not shape or dtype is None:
        return None
    nodes = list(_behind(name, producers))
    leaves = {operand for node in nodes for operand in node.operands.values()} | {name}
    fed = sorted(leaves & inputs)
    if fed and any(node.op not in VIEW_OPS and node.native not in _HANDLES for node in nodes):
        return None
    stored = [values[leaf] for leaf in leaves & weights]
    static = tuple(dim or 0 for dim in shape)
    return Table(
        name=name,
        shape=static,
        dtype=dtype,
        storage=_storage(fed, nodes),
        nbytes=sum(map(types.nbytes, stored)) or types.nbytes(values[name]),
        quantisation="; ".join(_quantisation(node, values) for node in nodes if _quantisation(node, values)),
    )


def _behind(name: str, producers: Mapping[str, Node]) -> Iterator[Node]:
    """The nodes that make a value, from the last to the first."""
    stack, seen = [name], set[str]()
    while stack:
        node = producers.get(stack.pop())
        if node is not None and node.address not in seen:
            seen.add(node.address)
            yield node
            stack.extend(node.operands.values())


def _storage(fed: list[str], nodes: list[Node]) -> str:
    if not fed:
        return "main.mlirb"
    kind = "state" if any(node.native in _HANDLES for node in nodes) else "function input"
    return f"{kind} {', '.join(fed)}"


def _quantisation(node: Node, values: Mapping[str, Value]) -> str:
    """How a node turns what is stored into values; empty where it does not."""
    native = node.native.removeprefix("coreai.")
    data = values.get(node.operands.get("x", ""))
    if data is None or data.dtype is None or data.shape is None:
        return ""
    if native == "lut_to_dense":
        return f"{data.dtype.removeprefix('u').removeprefix('int')}-bit palette"
    if native not in ("blockwise_shift_scale", "dequantize"):
        return ""
    scale = values[node.operands["1"]].shape or ()
    return f"{data.dtype}, {_granularity(data.shape, scale)}"


def _granularity(data: tuple[int | None, ...], scale: tuple[int | None, ...]) -> str:
    if math.prod(dim or 0 for dim in scale) == 1:
        return "one scale"
    blocks = [(size or 0) // (count or 1) for size, count in zip(data, scale, strict=False)]
    if len(scale) == len(data) and blocks[0] == 1:
        width = blocks[-1]
        return "a scale a row" if scale[-1] == 1 else f"a scale for {width} values"
    return f"scales {'x'.join(str(dim) for dim in scale)}"
