"""weight.bin: every storage type, and files that are not right."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from g4patch.errors import BundleError
from g4patch.runtimes import Unavailable
from g4patch.runtimes.mil.types import BY_NAME, TensorType
from g4patch.runtimes.mil.weights import Blob, Lazy, Weights
from tests.mil.oracles import Array

NAME = "@model_path/weights/weight.bin"


def write(folder: Path, code: int, data: bytes, **changes: Any) -> Weights:
    """A weight file of one blob, laid out by hand as Apple's storage format has it."""
    header = struct.pack("<II", 1, changes.get("version", 2)).ljust(64, b"\0")
    size = changes.get("size", len(data))
    record = struct.pack("<IIQQQ", changes.get("sentinel", 0xDEADBEEF), code, size, 128, 0).ljust(64, b"\0")
    (folder / "weight.bin").write_bytes(header + record + data)
    return Weights(folder)


def blob(element: str, *shape: int, file: str = NAME, offset: int = 64) -> Blob:
    return Blob(file, offset, TensorType(BY_NAME[element], shape))


def read(weights: Weights, stored: Blob) -> Array:
    tensor = weights.tensor(stored)
    return tensor.dense() if isinstance(tensor, Lazy) else tensor


PLAIN = {
    "fp32": (2, "<f4"),
    "uint8": (3, "u1"),
    "int8": (4, "i1"),
    "int16": (6, "<i2"),
    "uint16": (7, "<u2"),
    "int32": (14, "<i4"),
    "uint32": (15, "<u4"),
}


@pytest.mark.parametrize("element", PLAIN)
def test_plain_types(element: str, tmp_path: Path) -> None:
    code, dtype = PLAIN[element]
    data = np.random.default_rng(0).bytes(24 * np.dtype(dtype).itemsize)
    wanted = np.frombuffer(data, dtype).reshape(6, 4)
    found = read(write(tmp_path, code, data), blob(element, 6, 4))
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


SHORT_FLOATS: dict[str, tuple[int, Any]] = {
    "fp16": (1, np.float16),
    "bf16": (5, ml_dtypes.bfloat16),
    "fp8e4m3fn": (16, ml_dtypes.float8_e4m3fn),
    "fp8e5m2": (17, ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize("element", SHORT_FLOATS)
def test_every_value_of_the_short_floats(element: str, tmp_path: Path) -> None:
    """Subnormals, infinities, NaN and both zeros among them."""
    code, dtype = SHORT_FLOATS[element]
    width = np.dtype(dtype).itemsize
    stored = np.arange(256**width, dtype=f"<u{width}")
    found = read(write(tmp_path, code, stored.tobytes()), blob(element, 256, len(stored) // 256))
    wanted = stored.view(dtype).astype(np.float32).reshape(found.shape)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_sub_byte_values_start_in_the_low_bits(tmp_path: Path) -> None:
    assert read(write(tmp_path, 11, b"\x21\x43"), blob("uint4", 4)).tolist() == [1, 2, 3, 4]
    assert read(write(tmp_path, 8, b"\xf1\x78"), blob("int4", 4)).tolist() == [1, -1, -8, 7]
    assert read(write(tmp_path, 9, b"\x05"), blob("uint1", 3)).tolist() == [1, 0, 1]
    assert read(write(tmp_path, 10, b"\xe4"), blob("uint2", 4)).tolist() == [0, 1, 2, 3]
    # 3 bits: 1, 2, 3 and 4 are 001 010 011 100, from the lowest bit on: 1000 1101 0001 and a last bit of 1.
    packed = sum(value << 3 * place for place, value in enumerate([1, 2, 3, 4]))
    assert read(write(tmp_path, 12, packed.to_bytes(2, "little")), blob("uint3", 4)).tolist() == [1, 2, 3, 4]
    packed = sum(value << 6 * place for place, value in enumerate([63, 0, 33]))
    assert read(write(tmp_path, 13, packed.to_bytes(3, "little")), blob("uint6", 3)).tolist() == [63, 0, 33]


def test_a_scalar(tmp_path: Path) -> None:
    found = read(write(tmp_path, 2, struct.pack("<f", 1.5)), blob("fp32"))
    assert found.shape == ()
    assert found == 1.5


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """E2B's table alone has 2.35e9 elements. The file is sparse: it takes no room."""
    start = 5 * 2**30
    with (tmp_path / "weight.bin").open("wb") as file:
        file.write(struct.pack("<II", 1, 2).ljust(64, b"\0"))
        file.write(struct.pack("<IIQQQ", 0xDEADBEEF, 3, 2**32 + 8, start, 0).ljust(64, b"\0"))
        file.seek(start + 2**32)
        file.write(bytes(range(8)))
    table = Weights(tmp_path).tensor(blob("uint8", 2**29 + 1, 8))
    assert isinstance(table, Lazy)
    assert table.read(np.array([2**29, 0])).tolist() == [list(range(8)), [0] * 8]
    with pytest.raises(Unavailable, match="memory"):
        table.dense()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "not a weight file of version 2"),
        ({"sentinel": 7}, "holds no constant"),
        ({"size": 2**63}, "cut off"),
        ({"size": 8}, "expects 16 bytes"),
    ],
)
def test_damaged_files(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=message):
        read(write(tmp_path, 2, bytes(16), **changes), blob("fp32", 4))


def test_a_file_cut_short(tmp_path: Path) -> None:
    write(tmp_path, 2, bytes(16))
    whole = (tmp_path / "weight.bin").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "weight.bin").write_bytes(whole[:length])
        with pytest.raises(BundleError):
            read(Weights(tmp_path), blob("fp32", 4))


def test_a_pointer_file(tmp_path: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    (tmp_path / "weight.bin").write_bytes(text)
    with pytest.raises(BundleError) as caught:
        Weights(tmp_path).tensor(blob("fp32", 4))
    assert "git lfs pull" in caught.value.hint


def test_another_type_than_declared(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="of type 1"):
        read(write(tmp_path, 1, bytes(16)), blob("uint16", 8))


@pytest.mark.parametrize("offset", [128, 2**40, 2**64 - 1])
def test_an_offset_outside(offset: int, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"past the end|holds no constant"):
        read(write(tmp_path, 2, bytes(16)), blob("fp32", 4, offset=offset))


@pytest.mark.parametrize(
    "file", ["@model_path/weights/../secret", "/etc/passwd", "@model_path/weights/", "@model_path/weights/a/b", ".."]
)
def test_nothing_outside_the_folder_is_read(file: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="outside"):
        Weights(tmp_path).tensor(blob("fp32", 4, file=file))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="missing"):
        Weights(tmp_path).tensor(blob("fp32", 4))
