"""PLE sidecars: tables that hosts look up, in the layouts that public exporters write.

======================================  =======================================================================
file                                    layout
======================================  =======================================================================
`<name>_ple.safetensors`                every tensor whose first dimension is the vocabulary: the codes `[V, L*D]`,
                                        and scales by row where there are some; apple/coreai-models pull 137
`embed_tokens_per_layer_q8.bin`         int8 `[V, L*D]`; float16 `[V]` in `embed_tokens_per_layer_scales.bin`;
                                        john-rocky/CoreML-LLM
`embed_per_layer.i8`                    int8 `[V, L*D]`; float32 `[V]` in `embed_per_layer.scale.f32`;
                                        john-rocky/coreai-model-zoo
======================================  =======================================================================

Rows are changed where they are: these are files of gigabytes, and an edit concerns a few kilobytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from g4patch import delta
from g4patch.delta import Patch
from g4patch.edits import Plan
from g4patch.errors import BundleError, EditError
from g4patch.formats import BESIDE, NOT_STAGED, Model, Staged
from g4patch.runtimes import Probe, Unavailable
from g4patch.sidecars import HostTable, RowPart
from g4patch.view import Table

NAME = "PLE sidecar"
MASK_DTYPES: frozenset[str] = frozenset()

_CHUNK = 4 * 1024 * 1024
# Codes -> the dtype of their scales by row, which are in the file that BESIDE names.
_PAIRS: dict[str, np.dtype[Any]] = {
    "embed_tokens_per_layer_q8.bin": np.dtype(np.float16),
    "embed_per_layer.i8": np.dtype(np.float32),
}


def open_model(path: Path, staged: Staged = NOT_STAGED) -> Model:
    """Read where the rows of a sidecar are. Raises BundleError for files that are not what their names say."""
    try:
        host = _pair(path) if path.name.lower() in _PAIRS else _safetensors(path)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}", "check the path") from error
    files = tuple(dict.fromkeys(part.path for part in host.parts))
    patches = {file: dict(delta.patches(staged[file])) for file in files if file in staged}
    host = replace(host, staged=patches)
    details = (f"{host.table.rows:,} rows of {host.table.width:,}", host.table.quantisation or host.table.dtype)
    return Model(path, NAME, details, files, files, path, (), None, host_table=host, in_place=True)


def _safetensors(path: Path) -> HostTable:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:  # it checks names, sizes, and that nothing overlaps
            metadata = file.metadata() or {}
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
        stated = {name: _number(metadata, f"ple_{name}") for name in ("scale", "zero_point")}
        stated["embed_scale"] = _number(metadata, "embed_scale")
    except (SafetensorError, ValueError) as error:
        raise BundleError(f"{path} is not a sidecar: {error}", "was the copy interrupted?") from error
    header.pop("__metadata__", None)
    if not header:
        raise BundleError(f"{path} holds no tensor", "was it exported whole?")
    largest = max(header, key=lambda name: math.prod(header[name]["shape"]))
    rows = header[largest]["shape"][0] if len(header[largest]["shape"]) > 1 else 0
    if not rows:
        raise BundleError(f"{path}: {largest} has no rows", "was it exported whole?")
    names = sorted(header, key=lambda name: (name != largest, name))
    parts = [
        RowPart(name, path, 8 + length + header[name]["data_offsets"][0], _size(header[name]) // rows)
        for name in names
        if header[name]["shape"][:1] == [rows]
    ]
    scale = "one scale" if stated["scale"] is not None else "no scale"
    table = _host_table(path, parts, rows, _DTYPES.get(header[largest]["dtype"], header[largest]["dtype"]), scale)
    zero_point = stated["zero_point"]
    return replace(
        table,
        scale=stated["scale"],
        zero_point=None if zero_point is None else int(zero_point),
        embed_scale=stated["embed_scale"],
        zero=int(zero_point or 0) % 256,
    )


def _number(metadata: Mapping[str, str], name: str) -> float | None:
    """A number that the metadata states in text. Raises ValueError where it is none that can be meant."""
    text = metadata.get(name)
    if text is None:
        return None
    number = float(text)
    if not (number.is_integer() if name.endswith("zero_point") else 0 < number < math.inf):
        raise ValueError(f"{name} is {text}")
    return number


# safetensors' names for dtypes, and the bytes of an element.
_DTYPES = {"I8": "int8", "U8": "uint8", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_WIDTHS = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


def _size(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


def _pair(path: Path) -> HostTable:
    name, dtype = BESIDE[path.name.lower()], _PAIRS[path.name.lower()]
    scales = path.with_name(name)
    if not scales.is_file():
        raise BundleError(f"{scales} is missing: the scales of {path.name}", "copy both files")
    size, rows = path.stat().st_size, scales.stat().st_size // dtype.itemsize
    if not rows or scales.stat().st_size % dtype.itemsize or not size or size % rows:
        raise BundleError(
            f"{path.name} of {size:,} bytes is no whole number of rows for the {rows:,} scales in {name}",
            "was a copy interrupted?",
        )
    parts = [RowPart(path.name, path, 0, size // rows), RowPart(name, scales, 0, dtype.itemsize)]
    # CoreML-LLM's host multiplies by sqrt(D); what the hosts of the other layout do is not stated anywhere.
    return replace(_host_table(path, parts, rows, "int8", ""), scaled_by_host=path.suffix.lower() == ".bin")


def _host_table(path: Path, parts: Sequence[RowPart], rows: int, dtype: str, scale: str) -> HostTable:
    if dtype not in _WIDTHS:
        raise BundleError(f"{path}: {parts[0].name} is {dtype}", "sidecars hold 8-bit integers or floats")
    scales = "a scale a row" if len(parts) > 1 else scale
    quantisation = f"{dtype} with {scales}" if _WIDTHS[dtype] == 1 else ""
    stored = sum(part.size for part in parts) * rows
    shape = (rows, parts[0].size // _WIDTHS[dtype])
    return HostTable(Table(parts[0].name, shape, dtype, path.name, stored, quantisation), tuple(parts))


def _host(model: Model) -> HostTable:
    assert model.host_table is not None
    return model.host_table


def complete(model: Model, plan: Plan) -> Plan:
    """The plan itself."""
    return plan


def write(model: Model, plan: Plan, staged: Staged) -> None:
    """Write for each file the delta of its patches. Raises EditError where the plan names rows that there are not."""
    named = [row for copy in plan.row_copies for row in (copy.source, *copy.rows)]
    if len(plan.row_copies) < len(plan.edits) or any(not 0 <= row < _host(model).table.rows for row in named):
        raise EditError(f"the plan does not fit {model.path.name}", "make it again")
    patches = _patches(model, plan)
    for path in model.replaced:
        delta.write_patches(path.stat().st_size, patches[path], staged[path])


def _patches(model: Model, plan: Plan) -> dict[Path, list[Patch]]:
    """What a plan changes in each file: a patch a row and part."""
    patches: dict[Path, list[Patch]] = {path: [] for path in model.replaced}
    for part in _host(model).parts:
        for copy in plan.row_copies:
            content = _host(model).read(part, copy.source)
            patches[part.path] += [(part.at(row), content) for row in copy.rows]
    return patches


def differences(before: Model, after: Model, plan: Plan) -> tuple[str, ...]:
    """What differs beyond the plan. A stage is compared patch by patch, a copy byte by byte."""
    wanted = _patches(before, plan)
    lines = []
    for path, new in zip(before.replaced, after.replaced, strict=True):
        staged = _host(after).staged.get(new)
        alike = staged == dict(wanted[path]) if staged is not None else _is_patched(path, new, sorted(wanted[path]))
        if not alike:
            lines.append(f"{new.name} is not the old file with the planned rows")
    return tuple(lines)


def _is_patched(old: Path, new: Path, patches: Sequence[Patch]) -> bool:
    """Whether a file is another with patches, which do not overlap."""
    size = old.stat().st_size
    if new.stat().st_size != size:
        return False
    edges = sorted({0, size, *(edge for offset, data in patches for edge in (offset, offset + len(data)))})
    content = dict(patches)
    with old.open("rb") as before, new.open("rb") as after:
        return all(
            _range(after, begin, end) == content[begin] if begin in content else _alike(before, after, begin, end)
            for begin, end in pairwise(edges)
        )


def _range(file: Any, begin: int, end: int) -> bytes:
    file.seek(begin)
    data: bytes = file.read(end - begin)
    return data


def _alike(before: Any, after: Any, begin: int, end: int) -> bool:
    chunks = ((at, min(at + _CHUNK, end)) for at in range(begin, end, _CHUNK))
    return all(_range(before, *chunk) == _range(after, *chunk) for chunk in chunks)


def validate(model: Model) -> tuple[str, ...]:
    """Nothing to say: what is wrong with a layout is an error on opening."""
    return ()


def probe(model: Model, graph: str) -> Probe:
    """Raises Unavailable: nothing in a table runs."""
    raise Unavailable("a sidecar computes nothing: what the host makes of its rows is not known")
