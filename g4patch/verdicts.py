"""Which row each token id reads, and what is to be said of it.

"What is right" is Hugging Face's `Gemma4Model.forward`: media ids read the pad row, every other id its own. Gemma 3n's
model says the same of a table with fewer rows than there are ids: those beyond it read row 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from g4patch.errors import BundleError
from g4patch.tokens import TokenFacts

Ids = NDArray[np.int64]

# Ids just outside the vocabulary that are evaluated too: they show range masks and other ways to mark media rows.
_BEYOND = 8
# No vocabulary is larger; a declared one that is would only exhaust memory.
LARGEST_VOCABULARY = 2**24


class Verdict(StrEnum):
    """What a lookup does with the token ids. In order of weight: the worst decides for a model."""

    CLOBBERED = "clobbered"  # an id reads a row that is neither its own nor what it should read
    ZERO_ROW = "zero-row"  # media rows are zeroed instead of reading the pad row
    AMBIGUOUS = "ambiguous"  # there may be a lookup that is not understood: nothing is claimed
    CONDITIONAL = "conditional"  # another input, or the position, decides which row is read
    RAW = "raw"  # every media id reads its own row
    PARTIAL = "partial"  # some media ids read the pad row, some their own
    OTHER_SCHEME = "other-scheme"  # the runtime marks media rows by negative or extended ids
    PATCHED = "patched"  # every media id reads the pad row, every other id its own
    HOST_SIDE = "host-side"  # the rows come in as a graph input
    NO_PLE = "no-ple"  # nothing in the graph looks PLE up


INCONCLUSIVE = frozenset({Verdict.AMBIGUOUS, Verdict.CONDITIONAL})
# What no edit of a graph makes right: the model has to be exported again.
BEYOND_REPAIR = frozenset({Verdict.CLOBBERED, Verdict.ZERO_ROW})


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that decides; no-ple where there are none."""
    order = list(Verdict)
    return min(verdicts, key=order.index, default=Verdict.NO_PLE)


@dataclass(frozen=True)
class RowMap:
    """Token id -> table row, for every id that was evaluated. Both arrays are int64 `[N]`, ids ascending."""

    ids: Ids
    rows: Ids

    def row(self, token: int) -> int | None:
        """The row that a token reads; None where the token was not evaluated."""
        at = int(np.searchsorted(self.ids, token))
        return int(self.rows[at]) if at < len(self.ids) and self.ids[at] == token else None

    def take(self, tokens: Ids) -> Ids:
        """Rows for tokens that were all evaluated."""
        rows: Ids = self.rows[np.searchsorted(self.ids, tokens)]
        return rows

    def between(self, low: int, high: int) -> RowMap:
        """The part for ids from `low` up to, but without, `high`."""
        inside = (self.ids >= low) & (self.ids < high)
        return RowMap(self.ids[inside], self.rows[inside])


@dataclass(frozen=True)
class Judgement:
    """What a lookup does, by value.

    `masked` are media ids that read the pad row, `missing` those that read their own; `clobbered` are ids that read a
    wrong row, `zeroed` media ids whose rows are overwritten with a constant after the lookup. `reason` is set where
    `row_map` could not be made or trusted, and where it says why ids are wrong. `narrowed` gives those of the clobbered
    ids that a cast on the way cannot hold, by the address of the cast.
    """

    verdict: Verdict
    row_map: RowMap | None = None
    masked: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    clobbered: tuple[int, ...] = ()
    zeroed: tuple[int, ...] = ()
    reason: str = ""
    narrowed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def domain(tokens: TokenFacts, rows: int, dtype: str | None) -> Ids:
    """Every id to evaluate: vocabulary, table rows, media ids, a few beyond, some negatives. Ascending, unique.

    `dtype` is that of the ids input: what it cannot hold cannot be fed. Raises BundleError for absurd sizes.
    """
    media = list(tokens.media.values())
    size = max(tokens.vocabulary or 0, rows)
    if max(size, *media, 0) > LARGEST_VOCABULARY:
        raise BundleError(f"a vocabulary of {max(size, *media):,} ids is not plausible", "is the file damaged?")
    beyond = sorted({*range(size, size + _BEYOND), *(token for token in media if token >= size)})
    negatives = sorted({-1, -2, -size, *(-token for token in media if token)})
    ids = np.concatenate([np.array(negatives), np.arange(size), np.array(beyond)]).astype(np.int64)
    if dtype is not None:
        # By name: formats have integers of a few bits, which numpy has not.
        bits, unsigned = int(dtype.removeprefix("u").removeprefix("int")), dtype.startswith("u")
        lowest, highest = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        ids = ids[(ids >= lowest) & (ids <= min(highest, np.iinfo(np.int64).max))]
    return ids


def judge(row_map: RowMap, zeroed: Ids, tokens: TokenFacts, rows: int) -> Judgement:
    """Compare a row map, and the ids whose rows are zeroed afterwards, with what is right.

    `rows` is the number of the table's rows: the vocabulary, where no source states it.
    """
    media, pad = list(tokens.media.values()), tokens.pad_id
    text = row_map.between(0, tokens.vocabulary or rows)
    text_ids = text.ids[~np.isin(text.ids, media)]
    offset = _offset(text_ids[text_ids < rows], row_map)
    # Gemma 3n has more ids than rows; those beyond read the pad row.
    right = np.where(text_ids < rows, text_ids, pad) + offset
    wrong = text_ids[(row_map.take(text_ids) != right) | np.isin(text_ids, zeroed)]
    rows_read = {token: row_map.row(token) for token in media}
    masked = tuple(token for token, row in rows_read.items() if row == pad + offset)
    missing = tuple(token for token, row in rows_read.items() if row == token + offset and token not in masked)
    clobbered = (*(token for token in media if token not in masked + missing), *wrong.tolist())
    zeroed_media = sorted(set(media) & set(zeroed.tolist()))
    verdict = _verdict(missing, clobbered, zeroed_media, tokens)
    reason = _reason(clobbered, rows, pad)
    return Judgement(verdict, row_map, masked, missing, clobbered, tuple(zeroed_media), reason)


def some(ids: Sequence[int]) -> str:
    """A few ids and how many there are in all, for a person to read."""
    shown = ", ".join(str(token) for token in ids[:5])
    return f"id {shown}" if len(ids) == 1 else f"{len(ids):,} ids ({shown}{', ...' if len(ids) > 5 else ''})"


def _offset(ids: Ids, row_map: RowMap) -> int:
    """A table may hold its rows shifted by a constant; 0 where the differences are not all the same."""
    differences = row_map.take(ids) - ids
    first = int(differences[0]) if len(differences) else 0
    return first if np.all(differences == first) else 0


def _reason(clobbered: Sequence[int], rows: int, pad: int) -> str:
    """Why ids are wrong, where it is that they are more than the table has rows."""
    if clobbered and min(clobbered) >= rows:
        return f"ids from {rows} on have no row of their own and should read row {pad}"
    return ""


def _verdict(
    missing: Sequence[int], clobbered: Sequence[int], zeroed_media: Sequence[int], tokens: TokenFacts
) -> Verdict:
    stated = {token for modality, token in tokens.media.items() if modality not in tokens.only_by_default}
    if clobbered:
        return Verdict.CLOBBERED
    if zeroed_media:
        return Verdict.ZERO_ROW
    if not stated & set(missing):
        return Verdict.PATCHED
    return Verdict.RAW if stated <= set(missing) else Verdict.PARTIAL
