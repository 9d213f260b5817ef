"""Record references: from Hugging Face's own model, or from tensors that someone else made.

torch and transformers are imported only when a model is run: they come with the extra `reference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from g4patch.copying import Progress
from g4patch.errors import MissingExtra
from g4patch.record.request import INSTALL, Announce, Request, parse_ids, parse_stages

__all__ = ["Request", "from_hugging_face", "from_npz", "parse_ids", "parse_stages"]


def from_hugging_face(request: Request, out: Path, progress: Progress, say: Announce) -> tuple[str, ...]:
    """Run a model and write a reference to `out`. Returns a line for each run.

    Raises MissingExtra without torch, transformers and pillow, and what `hugging_face.record` raises.
    """
    try:
        from g4patch.record import hugging_face
    except ImportError as error:
        raise MissingExtra(f"recording needs torch, transformers and pillow: {error}", INSTALL) from error
    runs = hugging_face.record(request, out, progress, say)
    return tuple(f"{run.name}: {run.prompt} tokens, and {run.steps} that the model went on with" for run in runs)


def from_npz(source: Path, out: Path, tokens: Mapping[str, int], precision: str, progress: Progress) -> tuple[str, ...]:
    """Write tensors of a `.npz` as a reference to `out`. Returns a line for each run; raises as `npz.convert` does."""
    from g4patch.record import npz

    return npz.convert(source, out, tokens, precision, progress)
