"""What a TensorProto says of itself, and the few small ones whose numbers the view needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from g4patch.errors import BundleError
from g4patch.view import SMALL_CONSTANT, Table

# Elements that share a byte, for the types that are smaller than one.
_PER_BYTE: dict[int, int] = {
    TensorProto.INT4: 2,
    TensorProto.UINT4: 2,
    TensorProto.FLOAT4E2M1: 2,
    TensorProto.INT2: 4,
    TensorProto.UINT2: 4,
}


def type_name(element_type: int) -> str | None:
    """The numpy name of an ONNX element type; None for unknown ones and strings."""
    if element_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return None
    try:
        return str(helper.tensor_dtype_to_np_dtype(element_type).name)
    except KeyError:
        return None


def small_constant(tensor: TensorProto, folder: Path) -> NDArray[Any] | None:
    """The numbers of a tensor of at most SMALL_CONSTANT elements; None for larger ones and for strings.

    Raises BundleError where the tensor contradicts itself.
    """
    if any(size < 0 for size in tensor.dims):
        raise BundleError(f"tensor {tensor.name} has a negative dimension", "is the file damaged?")
    name = type_name(tensor.data_type)
    if math.prod(tensor.dims) > SMALL_CONSTANT or name is None:
        return None
    try:
        if tensor.data_location != TensorProto.EXTERNAL:
            return np.asarray(numpy_helper.to_array(tensor))
        inline = TensorProto(dims=tensor.dims, data_type=tensor.data_type)
        inline.raw_data = _read_external(tensor, folder)
        return np.asarray(numpy_helper.to_array(inline))
    except (ValueError, TypeError, OSError) as error:
        raise BundleError(f"tensor {tensor.name} cannot be read: {error}", "is the file damaged?") from error


def _read_external(tensor: TensorProto, folder: Path) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / entries["location"]).open("rb") as file:
        file.seek(int(entries.get("offset", 0)))
        return file.read(_stored_size(tensor))


def _stored_size(tensor: TensorProto) -> int:
    """Bytes that the elements of a tensor take. Raises BundleError where their type has no size."""
    count = math.prod(tensor.dims)
    if type_name(tensor.data_type) is None:
        raise BundleError(f"tensor {tensor.name} has no element type that is known", "is the file damaged?")
    if tensor.data_type in _PER_BYTE:
        return -(-count // _PER_BYTE[tensor.data_type])
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def stored_table(
    name: str,
    tensor: TensorProto,
    folder: Path,
    quantisation: str,
    dtype: str | None,
    attributes: Mapping[str, Any],
) -> Table:
    """The facts of a table. Raises BundleError where it declares more than is stored."""
    needed = _stored_size(tensor)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if tensor.data_location == TensorProto.EXTERNAL:
        offset = int(entries.get("offset", 0))
        stored = int(entries.get("length", 0)) or (folder / entries["location"]).stat().st_size - offset
        storage = f"{entries['location']} @ {offset:,}"
    else:
        stored = len(tensor.raw_data) if tensor.HasField("raw_data") else needed
        storage = "inside the model file"
    if stored < needed:
        raise BundleError(f"tensor {tensor.name} declares {needed:,} bytes and has {stored:,}", "is the file damaged?")
    shape = tuple(tensor.dims)
    packed = 8 // attributes["bits"] if "bits" in attributes and tensor.data_type == TensorProto.UINT8 else 1
    shape = (*shape[:-1], shape[-1] * packed) if shape else shape
    return Table(name, shape, dtype or "", storage, needed, quantisation)
