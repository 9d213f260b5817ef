"""Deltas: whatever two files have in common, the original comes back byte for byte."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g4patch import delta
from g4patch.errors import BundleError

PIECES = st.lists(st.tuples(st.binary(max_size=40), st.booleans(), st.integers(0, 9)), max_size=8)


def files(folder: Path, pieces: list[tuple[bytes, bool, int]]) -> tuple[Path, Path, list[delta.Span]]:
    """An original of pieces, a replacement with those that are shared, moved and between other bytes, and the spans."""
    original, replacement, shared = b"", b"", []
    for number, (piece, is_shared, gap) in enumerate(pieces):
        if is_shared:
            replacement += bytes([number]) * gap
            shared.append((len(original), len(replacement), len(piece)))
            replacement += piece
        original += piece
    (folder / "original").write_bytes(original)
    (folder / "replacement").write_bytes(replacement)
    return folder / "original", folder / "replacement", shared[::-1]


@given(PIECES)
def test_round_trip(pieces: list[tuple[bytes, bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original, replacement, shared = files(folder, pieces)
        delta.write(original, shared, folder / "delta")
        delta.rebuild(folder / "delta", replacement, folder / "again")
        assert (folder / "again").read_bytes() == original.read_bytes()
        own = sum(len(piece) for piece, is_shared, _ in pieces if not is_shared)
        assert own <= (folder / "delta").stat().st_size < own + 16 + 40 * (2 * len(shared) + 2)


def test_a_shorter_replacement_is_noticed(tmp_path: Path) -> None:
    original, replacement, shared = files(tmp_path, [(b"head", False, 0), (b"weights", True, 3), (b"tail", False, 0)])
    delta.write(original, shared, tmp_path / "delta")
    replacement.write_bytes(replacement.read_bytes()[:-1])
    with pytest.raises(BundleError, match="beyond"):
        delta.rebuild(tmp_path / "delta", replacement, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_parts_that_overlap(tmp_path: Path) -> None:
    (tmp_path / "original").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="overlap"):
        delta.write(tmp_path / "original", [(0, 0, 6), (5, 6, 2)], tmp_path / "delta")
    with pytest.raises(ValueError, match="overlap"):
        delta.write(tmp_path / "original", [(8, 0, 6)], tmp_path / "delta-2")
