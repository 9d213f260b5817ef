"""The receipt that stays beside a mended bundle: what was changed, by what, on whose word, with which proof."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from g4patch.report import Report
from g4patch.tokens import MODALITIES

SCHEMA = 1


def receipt(report: Report) -> dict[str, Any]:
    """The receipt for a report whose checks have passed, as JSON-ready data."""
    subject, plan = report.subject, report.plan
    names = (*MODALITIES, "pad")
    tokens = {name: subject.tokens.token(name) for name in names}
    return {
        "schema": SCHEMA,
        "tool": f"g4patch {version('g4patch')}",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "bundle": subject.model.path.name,
        "format": subject.model.format,
        "verdict": subject.verdict,
        "token_ids": {name: {"id": token.id, "source": token.source} for name, token in tokens.items()},
        "findings": [
            {"rule": item.rule, "graph": item.graph, "nodes": item.nodes, "message": item.message}
            for item in report.findings
            if item.edits
        ],
        "plan": {"sha256": plan.digest, "nodes_added": plan.nodes_added, "uses_redirected": plan.uses_redirected},
        "checks": [{"name": item.name, "status": item.status, "summary": item.summary} for item in report.checks],
    }
