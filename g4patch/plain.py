"""Parts of a report as JSON-ready data, as the report for machines, the receipt and the statement all show them."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from g4patch.evidence import LogitEvidence
from g4patch.metrics import Distance
from g4patch.report import Check, LayerDistance, Subject
from g4patch.tokens import MODALITIES


def tokens(subject: Subject) -> dict[str, Any]:
    """The token ids that count for a model, each with its source."""
    found = {name: subject.tokens.token(name) for name in (*MODALITIES, "pad")}
    return {name: {"id": token.id, "source": token.source} for name, token in found.items()}


def check(done: Check) -> dict[str, Any]:
    """What a check compared, with the numbers behind it."""
    return {
        "name": done.name,
        "status": done.status,
        "summary": done.summary,
        "details": list(done.details),
        "layers": [_layer(layer) for layer in done.layers],
        "stages": [_finite(asdict(stage)) for stage in done.stages],
        "logits": _logits(done.logits) if done.logits is not None else None,
    }


def _logits(found: LogitEvidence) -> dict[str, Any]:
    return {
        "source": found.source,
        "segments": [_finite(asdict(segment)) for segment in found.segments],
        "teacher_forced": [asdict(forced) for forced in found.teacher_forced],
        "kl_by_row": {run: _finite(rows) for run, rows in found.rows},
        "unpatched_kl_by_row": {run: _finite(rows) for run, rows in found.unpatched_rows},
    }


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _layer(layer: LayerDistance) -> dict[str, Any]:
    return {
        "graph": layer.graph,
        "layer": layer.layer,
        "found": distance(layer.found),
        "unpatched": distance(layer.unpatched) if layer.unpatched is not None else None,
    }


def distance(far: Distance) -> dict[str, Any]:
    """A distance without what JSON cannot say: an infinite ratio is null."""
    return {"cosine": far.cosine, "norm_ratio": _finite(far.norm_ratio), "delta_norm": far.delta_norm}
