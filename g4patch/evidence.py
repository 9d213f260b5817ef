"""The numbers behind the checks of a whole model: where a chain of stages diverges, and how far its logits are off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """The first place where a value of a stage is further from the reference than its tolerance allows.

    `layer` is the decoder layer that the value belongs to, None for embeddings and logits. `row` is the first row that
    is off and `kind` what its token is: a modality, pad or text. `row` is None where only the norm is off, by no
    single row. `error` is the largest difference there, infinite where it is no number.
    """

    run: str
    name: str
    layer: int | None
    row: int | None
    kind: str
    error: float
    limit: float


@dataclass(frozen=True)
class LayerCosine:
    """A layer's value of one run against the reference's: the cosine of all rows, and the largest difference.

    `name` is the most that was found of the layer: the hidden state behind it, else what it gets of PLE.
    """

    run: str
    layer: int
    name: str
    cosine: float
    error: float


@dataclass(frozen=True)
class StageEvidence:
    """What one stage of a chain computes, fed from the last stage (`chained`) and from the reference (`alone`).

    `cosines` are those of the chain, `unpatched` the same for the bundle as it was, empty where there is none.
    `compared` counts values. `alone_unknown` says why it was not fed from the reference, "" if it was. `filled` are
    inputs that neither gives and that were derived, `unseen` values of the reference that could not be computed.
    """

    name: str
    layers: tuple[int, ...]
    compared: int
    chained: Divergence | None
    alone: Divergence | None
    alone_unknown: str = ""
    filled: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    cosines: tuple[LayerCosine, ...] = ()
    unpatched: tuple[LayerCosine, ...] = ()


@dataclass(frozen=True)
class Agreement:
    """How well logits agree over some rows: KL(reference || bundle) in nats, and how often the argmax is the same."""

    rows: int
    max_kl: float
    mean_kl: float
    argmax: float


@dataclass(frozen=True)
class Segment:
    """The rows of a run before, in, or after its media. `unpatched` is the same for the bundle as it was, if there."""

    run: str
    part: str
    found: Agreement
    unpatched: Agreement | None


@dataclass(frozen=True)
class TeacherForced:
    """How many steps of a continuation the bundle predicts: with the media, and in the run without them.

    `parted` is the first step at which the two predict different tokens, None where they never do. `without` is None
    where the reference has no such run, `unpatched` (with media) where there is no unpatched bundle.
    """

    run: str
    steps: int
    right: int
    without: int | None
    parted: int | None
    unpatched: int | None


@dataclass(frozen=True)
class LogitEvidence:
    """The numbers of the gates. `rows` is, by run, KL(reference || bundle) of each row, in nats."""

    source: str
    segments: tuple[Segment, ...]
    teacher_forced: tuple[TeacherForced, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    unpatched_rows: tuple[tuple[str, tuple[float, ...]], ...] = ()
