"""What is stored for a constant tensor, and how it is quantised: from headers and types alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, prod

from g4patch.formats.coreml.proto import Message
from g4patch.formats.coreml.values import bits, dtype_name, elements, shape_of, tensor_type
from g4patch.formats.coreml.weights import Weights
from g4patch.view import Shape, Table


@dataclass(frozen=True)
class Stored:
    """A tensor that no graph input has a part in. `shape` and `dtype` are those of its values."""

    shape: Shape | None
    dtype: str
    nbytes: int
    storage: str
    quantisation: str = ""


def constant(value: Message, weights: Weights) -> Stored:
    """What is stored for a constant value. Raises BundleError where its weight file does not hold it."""
    tensor = tensor_type(value.type)
    dtype = dtype_name(tensor.dataType) if tensor is not None else ""
    shape = shape_of(tensor) if tensor is not None else None
    if value.WhichOneof("value") == "blobFileValue":
        name, offset = value.blobFileValue.fileName, value.blobFileValue.offset
        blob = weights.blob(name, offset)
        return Stored(shape, dtype, blob.size, f"{name.removeprefix('@model_path/')} @ {offset:,}")
    nbytes = -(-(elements(value) or 0) * bits(dtype) // 8)
    return Stored(shape, dtype, nbytes, "inside model.mlmodel")


def computed(native: str, parts: Mapping[str, Stored], dtype: str, shape: Shape | None) -> Stored:
    """What is stored for the result of an op, by parameter: a constexpr op's say how it is compressed."""
    largest = max(
        parts.values(), key=lambda part: part.nbytes, default=Stored(shape, dtype, 0, f"computed by {native}")
    )
    own = _compression(native, parts)
    inner = [part.quantisation for part in parts.values() if part.quantisation]
    return Stored(
        shape,
        dtype,
        sum(part.nbytes for part in parts.values()),
        largest.storage,
        ", ".join(dict.fromkeys([own, *inner] if own else inner)),
    )


def table(name: str, stored: Stored) -> Table | None:
    """The facts of a table; None where its shape is open."""
    if stored.shape is None:
        return None
    shape = tuple(size for size in stored.shape if size is not None)
    if len(shape) != len(stored.shape) or not shape:
        return None
    return Table(name, shape, stored.dtype, stored.storage, stored.nbytes, stored.quantisation)


def _compression(native: str, parts: Mapping[str, Stored]) -> str:
    """How a constexpr op compresses: of iOS 16 (`constexpr_affine_dequantize` and its like) and of iOS 18."""
    if not native.startswith("constexpr_"):
        return ""
    if "lut" in parts:
        return _palette(parts["lut"], parts.get("indices") or parts.get("indices_nonzero_data"))
    data = parts.get("data") or parts.get("quantized_data") or parts.get("nonzero_data")
    if data is not None and "scale" in parts:
        return f"{data.dtype} {_granularity(data.shape, parts['scale'].shape)}"
    if data is not None:
        return "sparse"
    source = parts.get("source_val")
    return f"stored as {source.dtype}" if source is not None else native


def _palette(lut: Stored, indices: Stored | None) -> str:
    """iOS 16 packs indices of any width as uint8, its table is `[2^bits]`; iOS 18's is `[.., 2^bits, vector]`."""
    shape = [size or 1 for size in lut.shape or ()]
    flat = len(shape) < 2
    entries = shape[-1] if flat else shape[-2]
    width = bits(indices.dtype) if indices is not None and not flat else round(log2(max(entries or 1, 1)))
    words = [f"{width}-bit palette"]
    if not flat and prod(shape[:-2]) > 1:
        words.append(f"{prod(shape[:-2])} groups")
    if not flat and shape[-1] > 1:
        words.append(f"vectors of {shape[-1]}")
    return ", ".join(words)


def _granularity(data: Shape | None, scale: Shape | None) -> str:
    """What shares one scale: all, a channel, or a block; sizes of blocks along the axes that are cut."""
    if not data or not scale:
        return "per tensor" if scale == () else "per channel"
    if len(data) != len(scale):
        return "per channel"
    sizes = [(whole or 1) // max(count or 1, 1) for whole, count in zip(data, scale, strict=True)]
    cut = [size for size, whole in zip(sizes, data, strict=True) if size not in (1, whole)]
    if cut:
        return "block " + "x".join(map(str, cut))
    return "per channel" if any(count != 1 for count in scale) else "per tensor"
