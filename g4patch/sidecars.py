"""PLE tables outside every graph: the host reads the row of a token id and hands it in.

No mask can be put in front of such a lookup. But where the rows of media ids hold what the pad row holds, a host that
looks raw ids up is right, and one that replaces media ids by the pad id reads the same as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from g4patch.errors import BundleError
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Verdict
from g4patch.view import Table

Rows = NDArray[np.uint8]


@dataclass(frozen=True)
class RowPart:
    """What one tensor holds for each row of a table: `size` bytes, those of row 0 at `offset` of the file."""

    name: str
    path: Path
    offset: int
    size: int

    def at(self, row: int) -> int:
        """Where in the file the bytes of a row begin."""
        return self.offset + row * self.size


@dataclass(frozen=True)
class HostTable:
    """A PLE table that a host looks up. `parts` are all tensors that hold something for each row, such as scales.

    `scale`, `zero_point` and `embed_scale` are what the file states, None what it does not: a code stands for
    (code - zero_point) * scale, which is what the model's table holds times `embed_scale`. `scaled_by_host`: hosts of
    this layout multiply rows by sqrt(D) themselves.

    `zero` is the byte of which a row that stands for zeros consists, in the first part. `staged` holds bytes that are
    to be read in place of those in a file, by where a row begins in it.
    """

    table: Table
    parts: tuple[RowPart, ...]
    zero: int = 0
    scale: float | None = None
    zero_point: int | None = None
    embed_scale: float | None = None
    scaled_by_host: bool = False
    staged: Mapping[Path, Mapping[int, bytes]] = field(default_factory=dict)

    def read(self, part: RowPart, row: int) -> bytes:
        """What one part holds for a row."""
        staged = self.staged.get(part.path, {}).get(part.at(row))
        if staged is not None:
            return staged
        with part.path.open("rb") as file:
            file.seek(part.at(row))
            return file.read(part.size)

    def rows(self, rows: Sequence[int]) -> Rows:
        """The bytes of rows, `[N, W]`, those of all parts side by side."""
        found = [b"".join(self.read(part, row) for part in self.parts) for row in rows]
        return np.frombuffer(b"".join(found), np.uint8).reshape(len(rows), -1)


@dataclass(frozen=True)
class HostRows:
    """What the media rows of a host's table are: those that differ from the pad row, and which of them are zeros."""

    table: Table
    media: int
    different: tuple[int, ...]
    zeroed: tuple[int, ...]

    @property
    def verdict(self) -> Verdict:
        if self.zeroed:
            return Verdict.ZERO_ROW
        if len(self.different) == self.media:
            return Verdict.RAW
        return Verdict.PARTIAL if self.different else Verdict.PATCHED


def analyse(host: HostTable, tokens: TokenFacts) -> HostRows:
    """Compare the media rows of a table with its pad row, byte by byte, scales included.

    Raises BundleError where the pad id is no row.
    """
    table, pad = host.table, tokens.pad_id
    if not 0 <= pad < table.rows:
        raise BundleError(f"pad id {pad} is no row of {table.name}, which has {table.rows:,}", "pass --pad-token-id")
    media = [token for token in tokens.media.values() if token < table.rows]
    if not media:
        return HostRows(table, 0, (), ())
    rows = host.rows([pad, *media])
    different = [token for token, row in zip(media, rows[1:], strict=True) if not np.array_equal(row, rows[0])]
    codes = rows[1:, : host.parts[0].size]
    zeroed = [token for token, row in zip(media, codes, strict=True) if token in different and (row == host.zero).all()]
    return HostRows(table, len(media), tuple(different), tuple(zeroed))
