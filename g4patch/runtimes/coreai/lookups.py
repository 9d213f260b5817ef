"""Run a lookup, or more of a program, on Apple's runtime without its whole tables.

The runtime compiles weights into memory, and a PLE table is gigabytes. So a gather gets only the rows that
are read: its index is computed first, by a program of its own. Rows are copied as they are stored, and all
that is done to them (dequantisation, the gather itself) is the model's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.runtimes.coreai.bindings import ir, load_program
from g4patch.runtimes.coreai.slices import Known, Place, Source, build, copy_of, execute
from g4patch.runtimes.coreai.tables import CannotRun, held, is_state, nbytes, numpy_dtype, with_rows

Array = NDArray[Any]

# Rows go into a program up to this many bytes (at four an element), a few copies of which the runtime holds.
_ROW_BYTES = 16 * 1024 * 1024
# Tables up to this size go into a program as they are.
_SMALL_TABLE = 1024 * 1024
# What a run takes, measured: twice the size of weights, four times that of states (given, held, written, handed
# back). It may take this part of the memory.
_COPIES, _STATE_COPIES, _PART = 2, 4, 0.25

_ON_THE_PATH = frozenset({"coreai.blockwise_shift_scale", "coreai.lut_to_dense", "coreai.cast"})
_GATHERS = frozenset({"coreai.gather_nd", "coreai.gather_along_axis"})


def lookup(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Read rows through a lookup: `ids.npy` int64 `[N]` -> `rows.npy` `[N, W]`, bf16 and fp8 as float32.

    Requests: what `Source.of` takes; `feed`, `index`, `output`: places; `feed` null feeds the ids as the
    index itself. Answers `{"skipped": reason}` where the lookup cannot be cut out.
    """
    _, module = load_program(Path(request["path"]))
    ids = np.load(folder / "ids.npy")
    with module.context, ir.Location.unknown():
        source = Source.of(module, request)
        index, output = source.place(request["index"]), source.place(request["output"])
        try:
            if request["feed"] is not None:
                ids = _indices(source, source.place(request["feed"]), index, ids, folder)
            np.save(folder / "rows.npy", _read(source, index, output, ids, folder))
        except CannotRun as error:
            return {"skipped": str(error)}
    return {}


def run(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Compute values for one prompt: `<name>.npy` for each feed and each output, bf16 and fp8 as float32.

    Requests: what `Source.of` takes; `feeds` and `outputs`: name -> place; `writes`: places of what writes to a state
    return, which are carried out too. A state as an output is what it holds after the run; one that is fed, with a
    `<name>.npy` or without, starts with that or with zeros. Answers as `lookup`.
    """
    _, module = load_program(Path(request["path"]))
    with module.context, ir.Location.unknown():
        source = Source.of(module, request)
        feeds = {name: source.place(spec) for name, spec in request["feeds"].items()}
        outputs = {name: source.place(spec) for name, spec in request["outputs"].items()}
        states = {place: name for name, place in feeds.items() if is_state(place[1].type)}
        computed = {name: place for name, place in outputs.items() if place not in states}
        writes = [source.place(spec) for spec in request["writes"]]
        try:
            results = _values(source, feeds, computed, writes, folder)
        except CannotRun as error:
            return {"skipped": str(error)}
    for name, place in outputs.items():
        np.save(folder / f"{name}.npy", results[states.get(place, name)])
    return {}


def _fed(path: Path, type: Any) -> Array:
    """What is fed to an input, in its dtype. A state for which there is nothing starts empty."""
    tensor = held(type)
    dtype = numpy_dtype(tensor)
    if path.exists():
        given: Array = np.load(path, allow_pickle=False).astype(dtype)
        return given
    if not tensor.has_static_shape:
        raise CannotRun("a state is of no fixed size, and nothing is given for it")
    return np.zeros(tensor.shape, dtype)


def _values(
    source: Source,
    feeds: Mapping[str, Place],
    outputs: Mapping[str, Place],
    writes: Sequence[Place],
    folder: Path,
) -> dict[str, Array]:
    """Values of a program for one prompt, with large tables narrowed to the rows that it reads."""
    inputs = {place: name for name, place in feeds.items()}
    wanted = [*outputs.values(), *writes]
    gathers = [place for place in source.behind(wanted, inputs) if _reads_much(source, place)]
    tables = {place: source.operands(place)[0] for place in gathers}
    indices = {place: f"index {number}" for number, place in enumerate(gathers)}
    size = _COPIES * _weights(source, wanted, [*inputs, *gathers])
    size += _STATE_COPIES * sum(nbytes(held(value.type)) for _, value in inputs if is_state(value.type))
    if size > _PART * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise CannotRun(f"it needs about {size / 1e9:.1f} GB of memory")
    fed = {name: _fed(folder / f"{name}.npy", value.type) for name, (_, value) in feeds.items()}
    rows_read: dict[Place, Array] = {}
    for place, name in indices.items():
        index = _index_for(source, feeds, source.operands(place)[1], fed, folder).copy()
        # A gather by coordinates has the row first, one along an axis has nothing else.
        named = index[..., 0] if place[1].owner.name == "coreai.gather_nd" else index[...]
        rows = _rows(named, tables[place])
        rows_read[place], at = np.unique(rows, return_inverse=True)
        named[...] = at.reshape(rows.shape)
        fed = {**fed, name: index}
    types = {name: place[1].type for name, place in feeds.items()}
    types |= {name: source.operands(place)[1][1].type for place, name in indices.items()}

    def known(arguments: Mapping[str, Any]) -> Known:
        found = {place: arguments[name] for name, place in feeds.items()}
        for place, name in indices.items():
            found[place] = _gather(source, place, rows_read[place], arguments[name])
        return found

    return execute(build(source, types, known, outputs, writes), [fed], folder)[0]


def _weights(source: Source, wanted: Sequence[Place], known: Sequence[Place]) -> int:
    """The bytes of all constants that some values need."""
    places = source.behind(wanted, known)
    return sum(nbytes(value.type) for _, value in places if value.owner.name == "coreai.constant")


def _reads_much(source: Source, place: Place) -> bool:
    """Whether a value is gathered from a large table of weights."""
    owner = place[1].owner
    if isinstance(owner, ir.Block) or owner.name not in _GATHERS:
        return False
    table = source.operands(place)[0]
    large = nbytes(table[1].type) > _SMALL_TABLE
    while not isinstance(table[1].owner, ir.Block) and table[1].owner.name in _ON_THE_PATH:
        table = source.operands(table)[0]
    return large and not isinstance(table[1].owner, ir.Block) and table[1].owner.name == "coreai.constant"


def _index_for(
    source: Source, feeds: Mapping[str, Place], index: Place, fed: Mapping[str, Array], folder: Path
) -> Array:
    for name, place in feeds.items():
        if place == index:
            return fed[name]
    types = {name: place[1].type for name, place in feeds.items()}

    def known(arguments: Mapping[str, Any]) -> Known:
        return {place: arguments[name] for name, place in feeds.items()}

    (result,) = execute(build(source, types, known, {"index": index}), [fed], folder)
    return result["index"]


def _indices(source: Source, feed: Place, index: Place, ids: Array, folder: Path) -> Array:
    """The index that Apple's runtime computes for each token id: int64 `[N]`."""
    if index == feed:
        return ids
    prompts = _prompts(ids, feed[1].type)
    module = build(source, {"ids": feed[1].type}, lambda fed: {feed: fed["ids"]}, {"index": index})
    results = execute(module, ({"ids": prompt} for prompt in prompts), folder)
    found = np.concatenate([result["index"].reshape(-1) for result in results])
    if len(found) != prompts.size:
        raise CannotRun(f"the index has {len(found)} elements for {prompts.size} ids")
    indices: Array = found[: len(ids)].astype(np.int64)
    return indices


def _read(source: Source, index: Place, output: Place, indices: Array, folder: Path) -> Array:
    """The rows that the gather returns for `indices` [N]: `[N, W]`."""
    if isinstance(output[1].owner, ir.Block) or output[1].owner.name not in _GATHERS:
        raise CannotRun("it is not a gather")
    table = source.operands(output)[0]
    rows = _rows(indices, table)
    step = max(1, _ROW_BYTES // (4 * int(np.prod(table[1].type.shape[1:]))))
    parts = []
    for start in range(0, len(rows), step):
        wanted, at = np.unique(rows[start : start + step], return_inverse=True)
        fed = _prompts(at, index[1].type, column=True)

        def known(arguments: Mapping[str, Any], wanted: Array = wanted) -> Known:
            return {index: arguments["index"], table: _narrowed(source, table, wanted)}

        module = build(source, {"index": index[1].type}, known, {"rows": output})
        results = execute(module, ({"index": prompt} for prompt in fed), folder)
        found = [result["rows"].reshape(fed[0].size, -1) for result in results]
        parts.append(np.concatenate(found)[: len(at)])
    return np.concatenate(parts)


def _rows(indices: Array, table: Place) -> Array:
    """The rows of a table that indices mean: negative ones count from the end, once."""
    count = table[1].type.shape[0]
    rows: Array = np.where(indices < 0, indices.astype(np.int64) + count, indices).astype(np.int64)
    if ((rows < 0) | (rows >= count)).any():
        raise CannotRun(f"it would read a row outside the table's {count}")
    return rows


def _gather(source: Source, place: Place, wanted: Array, index: Any) -> Any:
    """A gather from the wanted rows of its table, by another index."""
    table, _, *others = source.operands(place)
    operands = [_narrowed(source, table, wanted), index, *(copy_of(source, other) for other in others)]
    copy = place[1].owner.clone(ip=ir.InsertionPoint.current).operation
    for number, operand in enumerate(operands):
        copy.operands[number] = operand
    return copy.results[0]


def _narrowed(source: Source, place: Place, wanted: Array) -> Any:
    """A table, or what it is dequantised from, with the wanted rows only."""
    _, value = place
    owner = value.owner
    count = value.type.shape[0]
    if isinstance(owner, ir.Block):
        return source.rows.invented(value.type, wanted)
    if owner.name == "coreai.constant":
        return source.rows.constant(owner, wanted)
    if owner.name not in _ON_THE_PATH:
        raise CannotRun(f"its table is made by {owner.name}")
    if owner.name == "coreai.lut_to_dense" and owner.operands[1].type.shape[-1] != 1:
        raise CannotRun("its palette holds vectors")
    operands = [_companion(source, operand, wanted, count) for operand in source.operands(place)]
    if owner.name == "coreai.blockwise_shift_scale":
        # Apple's runtime for Linux ends with an illegal instruction where these have no axes.
        operands[1:] = [source.rows.with_axes(operand, len(value.type.shape)) for operand in operands[1:]]
    attributes = {entry.name: entry.attr for entry in (owner.attributes[i] for i in range(len(owner.attributes)))}
    result = with_rows(value.type, len(wanted))
    return ir.Operation.create(owner.name, results=[result], operands=operands, attributes=attributes).result


def _companion(source: Source, place: Place, wanted: Array, count: int) -> Any:
    """An operand on the table's path for the wanted rows: an entry a row, a block of rows, or for all."""
    _, value = place
    shape = value.type.shape
    if len(shape) == 0 or shape[0] == 1:
        return copy_of(source, place)
    if shape[0] == count:
        return _narrowed(source, place, wanted)
    if count % shape[0] or isinstance(value.owner, ir.Block) or value.owner.name != "coreai.constant":
        raise CannotRun("its scales do not divide its rows")
    return source.rows.constant(value.owner, wanted // (count // shape[0]))


def _prompts(ids: Array, tensor: Any, column: bool = False) -> Array:
    """Ids `[N]` as prompts `[P, *shape]`: the last open dimension takes them all, other open ones are 1.

    `column`: the last dimension is that of the coordinate, which is one.
    """
    dims = list(tensor.shape)
    still_open = [axis for axis in range(len(dims)) if tensor.is_dynamic_dim(axis)]
    for axis in still_open:
        dims[axis] = 1
    if column and still_open and still_open[-1] == len(dims) - 1:
        still_open.pop()
    if still_open:
        dims[still_open[-1]] = -(-len(ids) // int(np.prod(dims)))
    size = int(np.prod(dims))
    count = -(-len(ids) // size)
    prompts: Array = np.resize(ids, count * size).reshape(count, *dims).astype(numpy_dtype(tensor))
    return prompts
