"""Parts of a report as JSON-ready data, as the report for machines, the receipt and the statement all show them."""

from __future__ import annotations

import math
from typing import Any

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
    }


def _layer(layer: LayerDistance) -> dict[str, Any]:
    return {
        "graph": layer.graph,
        "layer": layer.layer,
        "found": distance(layer.found),
        "unpatched": distance(layer.unpatched) if layer.unpatched is not None else None,
    }


def distance(far: Distance) -> dict[str, Any]:
    """A distance without what JSON cannot say: an infinite ratio is null."""
    ratio = far.norm_ratio if math.isfinite(far.norm_ratio) else None
    return {"cosine": far.cosine, "norm_ratio": ratio, "delta_norm": far.delta_norm}
