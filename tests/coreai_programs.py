"""Small Core AI programs made with coreai-core itself: `python -m tests.coreai_programs KIND TARGET`.

Each is a stage as exporters write it, with one thing that differs. Run in a process of its own, like all
native code. The PLE table is `(row * WIDTH + column) % 251` before quantisation, so that its rows can be told
by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LAYERS, INNER, HIDDEN = 320, 3, 8, 16
WIDTH = LAYERS * INNER
TABLE = (np.arange(ROWS * WIDTH) % 251).reshape(ROWS, WIDTH)


def main(kind: str, target: Path) -> None:
    """Write the program of one kind as an asset."""
    from coreai._compiler import ir
    from coreai.authoring.asset import AIProgram
    from coreai.authoring.context import Context

    context = Context()._mlir_context
    with context, ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            {**KINDS, **STATEFUL}[kind](ir.Type.parse)
        module.operation.verify()
        AIProgram._from_mlir_module(module).save_asset(target)


Lookup = Callable[[Any, Any], Any]


def _stage(type: Any, lookup: Lookup, rows: str = "?", name: str = "main", table: str = "") -> None:
    """hidden_states, input_ids (and a table) -> rows times sqrt(D) plus a projection."""
    from coreai._compiler.dialects import coreai as ops
    from coreai.authoring.graph_builder import GraphOp

    inputs = [type(f"tensor<1x{rows}x{HIDDEN}xf32>"), type(f"tensor<1x{rows}xsi32>")]
    names = ["hidden_states", "input_ids"]
    if table:
        inputs.append(type(table))
        names.append("table")
    result = type(f"tensor<1x{rows}x{LAYERS}x{INNER}xf32>")
    graph = GraphOp(name, inputs, [result], input_names=names, result_names=["out"])
    with graph.block:
        hidden, ids, *tables = graph.arguments
        shape = ops.constant(np.array([1, -1 if rows == "?" else int(rows), LAYERS, INNER], np.int32))
        found = ops.broadcasting_mul(lookup(ids, tables[0] if tables else None), ops.constant(np.float32(INNER**0.5)))
        weights = ops.constant(np.ones((1, HIDDEN, WIDTH), np.float32))
        projected = ops.reshape(ops.broadcasting_batch_matmul(hidden, weights), shape)
        summed = ops.broadcasting_add(ops.reshape(found, shape), projected)
        ops.output([ops.cast(summed, result) if summed.type != result else summed])


def _gather(table: Any, ids: Any) -> Any:
    from coreai._compiler.dialects import coreai as ops

    return ops.gather_nd(table, ops.expand_dims(ids, ops.constant(np.array([2], np.int32))))


def _floats() -> Any:
    from coreai._compiler.dialects import coreai as ops

    return ops.constant(TABLE.astype(np.float32))


def _plain(type: Any) -> None:
    _stage(type, lambda ids, _: _gather(_floats(), ids))


def _split(type: Any) -> None:
    """A table for each layer, side by side again behind the lookups."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        tables = [ops.constant(part.astype(np.float32)) for part in np.split(TABLE, LAYERS, axis=1)]
        return ops.concat(ops.constant(np.int32(2)), [_gather(table, ids) for table in tables])

    _stage(type, lookup)


def _ladder(type: Any) -> None:
    """Two functions of fixed sizes, as `set_static_shape_config` leaves them."""
    for rows in ("8", "1"):
        _stage(type, lambda ids, _: _gather(_floats(), ids), rows, f"extend_256_{rows}")


def _table_input(type: Any) -> None:
    _stage(type, lambda ids, table: _gather(table, ids), table=f"tensor<{ROWS}x{WIDTH}xf32>")


def _open_table(type: Any) -> None:
    """A table that is an input, of any number of rows."""
    _stage(type, lambda ids, table: _gather(table, ids), table=f"tensor<?x{WIDTH}xf32>")


def _called(type: Any) -> None:
    """The lookup inside a private graph, as composites are, with the table handed in."""
    from coreai._compiler.dialects import coreai as ops
    from coreai.authoring.graph_builder import GraphOp, invoke

    inputs = [type(f"tensor<{ROWS}x{WIDTH}xf32>"), type("tensor<1x?xsi32>")]
    result = type(f"tensor<1x?x{WIDTH}xf32>")
    body = GraphOp("gather_1234", inputs, [result], private=True, no_inline=True)
    with body.block:
        ops.output([_gather(*body.arguments)])
    _stage(type, lambda ids, _: invoke([result], "gather_1234", [_floats(), ids])[0])


def _namespace(type: Any) -> None:
    """The same, with the private graph in a namespace."""
    from coreai._compiler.dialects import coreai as ops
    from coreai.authoring.graph_builder import GraphOp, invoke
    from coreai.authoring.namespace import NamespaceOp

    inputs = [type(f"tensor<{ROWS}x{WIDTH}xf32>"), type("tensor<1x?xsi32>")]
    result = type(f"tensor<1x?x{WIDTH}xf32>")
    space: Any = NamespaceOp("composites")
    with space:
        body = GraphOp("gather_1234", inputs, [result], private=True, no_inline=True)
        with body.block:
            ops.output([_gather(*body.arguments)])
    _stage(type, lambda ids, _: invoke([result], "composites::@gather_1234", [_floats(), ids])[0])


def _externalised(type: Any) -> None:
    """The lookup in a public graph that the function calls, as coreai-torch keeps a module apart."""
    from coreai._compiler.dialects import coreai as ops
    from coreai.authoring.graph_builder import GraphOp, invoke

    ids_type, result = type("tensor<1x?xsi32>"), type(f"tensor<1x?x{LAYERS}x{INNER}xf32>")
    body = GraphOp("per_layer_rows", [ids_type], [result], input_names=["ids"], result_names=["rows"], no_inline=True)
    with body.block:
        (ids,) = body.arguments
        scaled = ops.broadcasting_mul(_gather(_floats(), ids), ops.constant(np.float32(INNER**0.5)))
        shape = ops.constant(np.array([1, -1, LAYERS, INNER], np.int32))
        ops.output([ops.cast(ops.reshape(scaled, shape), result)])
    hidden = type(f"tensor<1x?x{HIDDEN}xf32>")
    names = ["hidden_states", "input_ids"]
    graph = GraphOp("main", [hidden, ids_type], [result], input_names=names, result_names=["out"])
    with graph.block:
        rows = invoke([result], "per_layer_rows", [graph.arguments[1]])[0]
        weights = ops.constant(np.ones((1, HIDDEN, WIDTH), np.float32))
        shape = ops.constant(np.array([1, -1, LAYERS, INNER], np.int32))
        projected = ops.reshape(ops.broadcasting_batch_matmul(graph.arguments[0], weights), shape)
        summed = ops.broadcasting_add(rows, projected)
        ops.output([ops.cast(summed, result) if summed.type != result else summed])


def _along_axis(type: Any) -> None:
    """torch's index_select: the index is stretched along the rows first."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        column = ops.reshape(ids, ops.constant(np.array([8, 1], np.int32)))
        width, axis = ops.constant(np.array([WIDTH], np.uint32)), ops.constant(np.array([1], np.int32))
        index = ops.broadcast_in_dims(column, width, axis)
        return ops.gather_along_axis(_floats(), index, ops.constant(np.array(0, np.int32)))

    _stage(type, lookup, "8")


def _coordinates(type: Any) -> None:
    """A table [V,L,D] by row and layer, as torch's `table[ids.unsqueeze(-1), arange(L)]`."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        last, count = ops.constant(np.array([2], np.int32)), ops.constant(np.array([LAYERS], np.uint32))
        wide = ops.broadcast_in_dims(ops.expand_dims(ids, last), count, last)
        layers = ops.constant(np.broadcast_to(np.arange(LAYERS, dtype=np.int32)[:, None], (1, 8, LAYERS, 1)).copy())
        rows = ops.expand_dims(wide, ops.constant(np.array([3], np.int32)))
        index = ops.concat(ops.constant(np.array(3, np.int32)), [rows, layers])
        return ops.gather_nd(ops.constant(TABLE.reshape(ROWS, LAYERS, INNER).astype(np.float32)), index)

    _stage(type, lookup, "8")


def _halves(type: Any) -> None:
    """A vocabulary that is split over two tables."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        half, zero = (ops.constant(np.array(number, np.int32)) for number in (ROWS // 2, 0))
        is_lower, above = ops.broadcasting_greater(half, ids), ops.broadcasting_sub(ids, half)
        tables = [ops.constant(part.astype(np.float32)) for part in np.split(TABLE, 2)]
        lower = _gather(tables[0], ops.broadcasting_where(is_lower, ids, zero))
        upper = _gather(tables[1], ops.broadcasting_where(is_lower, zero, above))
        column = ops.expand_dims(is_lower, ops.constant(np.array([2], np.int32)))
        return ops.broadcasting_where(column, lower, upper)

    _stage(type, lookup)


def _int8(type: Any) -> None:
    """A scale and two offsets a row."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        data = ops.constant((TABLE - 125).astype(np.int8))
        scale = ops.constant((1 + np.arange(ROWS) % 2)[:, None].astype(np.float32))
        zero = ops.constant(np.full((ROWS, 1), -125, np.int8))
        offset = ops.constant(np.zeros((ROWS, 1), np.float32))
        return _gather(ops.blockwise_shift_scale(data, scale, zero, offset), ids)

    _stage(type, lookup)


def _one_scale(type: Any) -> None:
    """A scale without axes, which Apple's runtime for Linux cannot take."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        data = ops.constant((TABLE - 125).astype(np.int8))
        scale, zero, offset = (ops.constant(np.array(v)) for v in (np.float32(2), np.int8(-125), np.float32(0)))
        return _gather(ops.blockwise_shift_scale(data, scale, zero, offset), ids)

    _stage(type, lookup)


def _dequantize(type: Any) -> None:
    """A scale and two offsets a row, by the op that names the axis."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        data = ops.constant((TABLE - 125).astype(np.int8))
        scale = ops.constant((1 + np.arange(ROWS) % 2).astype(np.float32))
        zero, offset = ops.constant(np.full(ROWS, -125, np.int8)), ops.constant(np.zeros(ROWS, np.float32))
        return _gather(ops.dequantize(data, scale, zero, offset, ops.constant(np.array(0, np.int32))), ids)

    _stage(type, lookup)


def _palette(type: Any) -> None:
    """Eight bits an index into one palette."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        palette = ops.constant(np.arange(256, dtype=np.float32).reshape(1, 1, 256, 1))
        axis = ops.constant(np.array(0, np.int16))
        return _gather(ops.lut_to_dense(ops.constant(TABLE.astype(np.uint8)), palette, axis), ids)

    _stage(type, lookup)


def _branches(type: Any) -> None:
    """The lookup in both branches of an `if`."""
    from coreai._compiler.dialects import coreai as ops

    def lookup(ids: Any, _: Any) -> Any:
        table = _floats()
        made: Any = ops.if_([type(f"tensor<1x?x{WIDTH}xf32>")], ops.constant(True))
        result, branches = made
        for branch in branches:
            with branch:
                ops.yield_([_gather(table, ids)])
        return result

    _stage(type, lookup)


def _large(type: Any) -> None:
    """A table of 40,000 rows."""
    from coreai._compiler.dialects import coreai as ops

    table = (np.arange(40_000 * WIDTH) % 251).reshape(40_000, WIDTH).astype(np.float32)
    _stage(type, lambda ids, _: _gather(ops.constant(table), ids))


def _counter(held: str = "2x3xf32", write: Callable[[Any, Any, Any], Any] | None = None) -> Callable[[Any], None]:
    """A state `held` and an input `step`: writes held + step, then twice that; `seen` is 100 before + what it holds."""

    def build(type: Any) -> None:
        from coreai._compiler.dialects import coreai as ops
        from coreai.authoring.graph_builder import GraphOp

        tensor, handle, token = type(f"tensor<{held}>"), type(f"!coreai.handle<tensor<{held}>>"), type("!coreai.token")
        names = (["held", "step"], ["held", "seen"])
        graph = GraphOp("main", [handle, tensor], [token, tensor], *names)
        read_handle: Any = ops.read_handle
        with graph.block:
            state, step = graph.arguments
            before, read = read_handle(state, ops.create_token())
            written = ops.write_handle(state, ops.broadcasting_add(before, step), read)
            once, read = read_handle(state, written)
            written = (write or ops.write_handle)(state, ops.broadcasting_add(once, once), read)
            after, last = read_handle(state, written)
            hundred = ops.cast(ops.constant(np.float32(100)), tensor.element_type)
            ops.output([last, ops.broadcasting_add(ops.broadcasting_mul(before, hundred), after)])

    return build


def _written_by_a_call(state: Any, value: Any, token: Any) -> Any:
    from coreai._compiler import ir
    from coreai._compiler.dialects import coreai as ops
    from coreai.authoring.graph_builder import GraphOp, invoke

    module: Any = ir.InsertionPoint.current.block.owner.parent
    with ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0]):
        body = GraphOp("write_1234", [state.type, value.type, token.type], [token.type], private=True, no_inline=True)
    with body.block:
        ops.output([ops.write_handle(*body.arguments)])
    return invoke([token.type], "write_1234", [state, value, token])[0]


def _written_in_a_branch(state: Any, value: Any, token: Any) -> Any:
    from coreai._compiler.dialects import coreai as ops

    made: Any = ops.if_([token.type], ops.constant(True))
    result, branches = made
    for branch in branches:
        with branch:
            ops.yield_([ops.write_handle(state, value, token)])
    return result


# Programs without a lookup.
STATEFUL: dict[str, Callable[[Any], None]] = {
    "state": _counter(),
    "state-f16": _counter("2x3xf16"),
    "state-bf16": _counter("2x3xbf16"),
    "state-si32": _counter("2x3xsi32"),
    "state-open": _counter("?x3xf32"),
    "state-large": _counter("1000000x1000000xf32"),
    "state-called": _counter(write=_written_by_a_call),
    "state-branch": _counter(write=_written_in_a_branch),
}

KINDS: dict[str, Callable[[Any], None]] = {
    "plain": _plain,
    "split": _split,
    "ladder": _ladder,
    "table-input": _table_input,
    "called": _called,
    "namespace": _namespace,
    "externalised": _externalised,
    "open-table": _open_table,
    "along-axis": _along_axis,
    "coordinates": _coordinates,
    "halves": _halves,
    "int8": _int8,
    "one-scale": _one_scale,
    "dequantize": _dequantize,
    "palette": _palette,
    "branches": _branches,
    "large": _large,
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
