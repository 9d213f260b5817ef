"""The receipt that stays beside a mended bundle: what was changed, by what, on whose word, with which proof."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from g4patch.report import ModelReport, Report
from g4patch.tokens import MODALITIES

SCHEMA = 1


def receipt(report: Report) -> dict[str, Any]:
    """The receipt for a report whose checks have passed, as JSON-ready data."""
    return {
        "schema": SCHEMA,
        "tool": f"g4patch {version('g4patch')}",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "bundle": report.path.name,
        "models": [_model(model, report) for model in report.models if model.plan.edits],
    }


def _model(model: ModelReport, report: Report) -> dict[str, Any]:
    subject, plan = model.subject, model.plan
    tokens = {name: subject.tokens.token(name) for name in (*MODALITIES, "pad")}
    return {
        "path": str(subject.model.path.relative_to(report.path.parent)),
        "format": subject.model.format,
        "verdict": subject.verdict,
        "token_ids": {name: {"id": token.id, "source": token.source} for name, token in tokens.items()},
        "findings": [
            {"rule": item.rule, "graph": item.graph, "nodes": item.nodes, "message": item.message}
            for item in model.findings
            if report.mends(item)
        ],
        "plan": {"sha256": plan.digest, **plan.counts},
        "checks": [{"name": item.name, "status": item.status, "summary": item.summary} for item in model.checks],
    }
