"""Compressed constants: what coremltools stores, decompressed here and by coremltools, must be the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.optimize import _utils as optimize

from g4patch.runtimes.mil import Interpreter
from tests.mil.oracles import IOS16, IOS17, IOS18, Array, convert, floats

Make = Callable[[], Any]
ROWS = 24
_SUB_BYTE = {
    "int4": types.np_int4_dtype,
    "uint4": types.np_uint4_dtype,
    "uint1": types.np_uint1_dtype,
    "uint2": types.np_uint2_dtype,
    "uint3": types.np_uint3_dtype,
    "uint6": types.np_uint6_dtype,
}


def codes(dtype: str, *shape: int, seed: int = 0) -> Array:
    """Random integers over all values of a type, in the dtype by which coremltools knows it."""
    bits, signed = int(dtype.lstrip("uint")), dtype.startswith("int")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    numbers = np.random.default_rng(seed).integers(low, high, shape)
    return numbers.astype(_SUB_BYTE[dtype] if dtype in _SUB_BYTE else np.dtype(dtype))


def materialise(make: Make, target: Any) -> Array:
    """coremltools' own decompression of the op that `make` builds."""
    found: list[Array] = []

    def program(unused: Any) -> Any:
        found.append(np.asarray(make().op.materialized_val_inference()))
        return mb.identity(x=unused)

    mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=target)(program)
    return found[0]


def whole_and_rows(make: Make, target: Any, rows: list[int]) -> tuple[Array, Array]:
    """The same out of the package: decoded as a whole, and only some rows of it by a gather."""

    def build(i: Any) -> Any:
        table = make()
        return mb.identity(x=table), mb.gather(x=table, indices=i, axis=0)

    index = np.array(rows, np.int32)
    function, weights = convert(build, {"i": index}, target)
    whole, some = function.outputs
    found = Interpreter(function, weights).run({"i": index}, function.outputs)
    return found[whole], found[some]


def assert_same_bits(make: Make, target: Any) -> None:
    wanted = materialise(make, target)
    rows = [wanted.shape[0] - 1, 0, 5, 5]
    whole, some = whole_and_rows(make, target, rows)
    assert whole.dtype == wanted.dtype
    np.testing.assert_array_equal(whole, wanted)
    np.testing.assert_array_equal(some, wanted[rows])


PALETTES = [("uint1", 2), ("uint2", 4), ("uint3", 8), ("uint4", 16), ("uint6", 64), ("uint8", 256)]


@pytest.mark.parametrize("width", [16, 7], ids=["whole bytes", "rows that share bytes"])
@pytest.mark.parametrize(("dtype", "entries"), PALETTES)
def test_palette(dtype: str, entries: int, width: int) -> None:
    indices, lut = codes(dtype, ROWS, width), floats(1, 1, entries, 1, dtype="float16", seed=1)
    assert_same_bits(lambda: mb.constexpr_lut_to_dense(indices=indices, lut=lut), IOS18)


@pytest.mark.parametrize("groups", [(4, 1), (1, 2), (3, 4), (ROWS, 1)])
def test_palettes_of_groups(groups: tuple[int, int]) -> None:
    indices, lut = codes("uint4", ROWS, 8), floats(*groups, 16, 1, seed=1)
    assert_same_bits(lambda: mb.constexpr_lut_to_dense(indices=indices, lut=lut), IOS18)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("groups", [(1, 1), (2, 4)])
def test_palettes_of_vectors(axis: int, groups: tuple[int, int]) -> None:
    indices, lut = codes("uint2", ROWS, 8), floats(*groups, 4, 3, seed=1)
    assert_same_bits(lambda: mb.constexpr_lut_to_dense(indices=indices, lut=lut, vector_axis=np.int32(axis)), IOS18)


def test_palette_of_rank_3() -> None:
    indices, lut = codes("uint4", ROWS, 4, 6), floats(2, 1, 3, 16, 1, seed=1)
    assert_same_bits(lambda: mb.constexpr_lut_to_dense(indices=indices, lut=lut), IOS18)


@pytest.mark.parametrize("width", [16, 7])
@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_palette_in_attributes(bits: int, width: int) -> None:
    """Up to iOS 17 the indices are packed into bytes by hand, and the operands are attributes."""
    packed = optimize.pack_elements_into_bits(codes(f"uint{bits}", ROWS * width).astype(np.uint8), bits)
    lut, shape = floats(2**bits, dtype="float16"), np.array([ROWS, width], np.uint32)
    assert_same_bits(lambda: mb.constexpr_lut_to_dense(indices=packed, lut=lut, shape=shape), IOS17)


SCALES = {
    "per tensor": (1, 1),
    "per row": (ROWS, 1),
    "per column": (1, 16),
    "blocks": (ROWS, 4),
    "blocks of both": (6, 2),
}


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("offset", [False, True])
def test_shift_scale(dtype: str, scales: tuple[int, int], offset: bool) -> None:
    data, scale = codes(dtype, ROWS, 16), np.abs(floats(*scales, dtype="float16", seed=1))
    arguments = {"offset": codes(dtype, *scales, seed=2)} if offset else {}
    assert_same_bits(lambda: mb.constexpr_blockwise_shift_scale(data=data, scale=scale, **arguments), IOS18)


def test_shift_scale_of_rows_that_share_bytes() -> None:
    data, scale = codes("int4", ROWS, 5), floats(ROWS, 1, seed=1)
    assert_same_bits(lambda: mb.constexpr_blockwise_shift_scale(data=data, scale=scale), IOS18)


def test_shift_scale_with_a_float_offset() -> None:
    data, scale = codes("int8", ROWS, 16), np.abs(floats(ROWS, 4, dtype="float16", seed=1))
    offset = floats(ROWS, 4, dtype="float16", seed=2)
    assert_same_bits(lambda: mb.constexpr_blockwise_shift_scale(data=data, scale=scale, offset=offset), IOS18)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(("size", "axis"), [(ROWS, 0), (16, 1), (16, -1), (1, 0)])
def test_affine_dequantize(dtype: str, size: int, axis: int) -> None:
    data = codes(dtype, ROWS, 16)
    scale, zero = np.abs(floats(size, dtype="float16", seed=1)), codes(dtype, size, seed=2)
    if size == 1:
        scale, zero = scale[0], zero[0]
    assert_same_bits(
        lambda: mb.constexpr_affine_dequantize(quantized_data=data, scale=scale, zero_point=zero, axis=np.int32(axis)),
        IOS16,
    )


@pytest.mark.parametrize("width", [16, 7])
def test_sparse(width: int) -> None:
    mask = codes("uint1", ROWS, width)
    values = floats(int(np.count_nonzero(mask)), dtype="float16")
    assert_same_bits(lambda: mb.constexpr_sparse_to_dense(nonzero_data=values, mask=mask), IOS18)


@pytest.mark.parametrize("width", [16, 7])
def test_sparse_in_attributes(width: int) -> None:
    mask = np.random.default_rng(0).integers(0, 2, ROWS * width).astype(np.uint8)
    values, shape = floats(int(mask.sum())), np.array([ROWS, width], np.uint32)
    bits = np.packbits(mask, bitorder="little")
    assert_same_bits(lambda: mb.constexpr_sparse_to_dense(nonzero_data=values, mask=bits, shape=shape), IOS16)


def test_cast() -> None:
    values = floats(ROWS, 16, dtype="float16")
    assert_same_bits(lambda: mb.constexpr_cast(source_val=values, output_dtype="fp32"), IOS16)


def test_a_palette_of_quantised_entries() -> None:
    """Ops stacked on each other: the entries of the palette are themselves scaled int8."""
    indices, entries = codes("uint4", ROWS, 8), codes("int8", 1, 1, 16, 1)
    scale = np.full((1, 1, 1, 1), 0.125, np.float16)

    def make() -> Any:
        lut = mb.constexpr_blockwise_shift_scale(data=entries, scale=scale)
        return mb.constexpr_lut_to_dense(indices=indices, lut=lut)

    whole, some = whole_and_rows(make, IOS18, [3, 0])
    wanted = (entries.reshape(-1) * np.float16(0.125))[indices.astype(np.int64)]
    np.testing.assert_array_equal(whole, wanted)
    np.testing.assert_array_equal(some, wanted[[3, 0]])


TINY: dict[str, Make] = {
    "palette": lambda: mb.constexpr_lut_to_dense(indices=codes("uint2", 3, 2), lut=floats(1, 1, 4, 1, dtype="float16")),
    "shift and scale": lambda: mb.constexpr_blockwise_shift_scale(data=codes("int4", 3, 2), scale=floats(3, 1)),
    "sparse": lambda: mb.constexpr_sparse_to_dense(
        nonzero_data=np.array([3, 1], np.float16), mask=np.array([[0, 1], [0, 0], [1, 0]]).astype(_SUB_BYTE["uint1"])
    ),
}


@pytest.mark.parametrize("name", TINY)
def test_constants_that_stand_in_the_program(name: str) -> None:
    """Under ten elements coremltools writes them into the program itself."""
    whole, some = whole_and_rows(TINY[name], IOS18, [2, 0, 2])
    np.testing.assert_array_equal(whole, materialise(TINY[name], IOS18))
    np.testing.assert_array_equal(some, whole[[2, 0, 2]])
