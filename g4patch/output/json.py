"""Reports as JSON for machines: one document a run, of the schema in `report.schema.json` beside this file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from g4patch.edits import ConfigSet, Const, Edit, GraphEdit, Operand, RowCopy
from g4patch.errors import G4PatchError
from g4patch.metrics import Distance
from g4patch.ple import GraphAnalysis, Lookup, Splice
from g4patch.report import Finding, LayerDistance, ModelReport, Report, Subject
from g4patch.tokens import MODALITIES
from g4patch.view import Value

SCHEMA = 1


@dataclass(frozen=True)
class Failure:
    """A bundle that could not be worked on."""

    bundle: str
    error: G4PatchError


def render(reports: Sequence[Report], failures: Sequence[Failure], exit_code: int) -> str:
    """The document of one run, ending in a newline."""
    document = {
        "schema": SCHEMA,
        "tool": f"g4patch {version('g4patch')}",
        "exit_code": exit_code,
        "reports": [_report(report) for report in reports],
        "errors": [
            {"bundle": item.bundle, "message": item.error.message, "hint": item.error.hint} for item in failures
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _report(report: Report) -> dict[str, Any]:
    publication = report.publication
    return {
        "command": report.command,
        "bundle": str(report.path),
        "verdict": report.verdict,
        "outcome": report.outcome,
        "exit_code": report.exit_code,
        "seconds": round(report.seconds, 3),
        "models": [_model(model, report) for model in report.models],
        "publication": publication
        and {
            "target": str(publication.target),
            "bytes_written": publication.written,
            "backup": publication.backup and str(publication.backup),
        },
    }


def _model(report: ModelReport, whole: Report) -> dict[str, Any]:
    subject, plan = report.subject, report.plan
    return {
        "path": str(subject.model.path),
        "format": subject.model.format,
        "details": list(subject.model.details),
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in subject.model.files],
        "verdict": subject.verdict,
        "token_ids": _tokens(subject),
        "warnings": list(subject.tokens.warnings),
        "graphs": [_graph(analysis, subject) for analysis in subject.analyses],
        "findings": [_finding(finding, whole) for finding in report.findings],
        "plan": {"sha256": plan.digest, "edits": [_edit(edit) for edit in plan.edits], "note": plan.note}
        if plan.edits
        else None,
        "checks": [
            {
                "name": item.name,
                "status": item.status,
                "summary": item.summary,
                "details": list(item.details),
                "layers": [_layer(layer) for layer in item.layers],
            }
            for item in report.checks
        ],
    }


def _layer(layer: LayerDistance) -> dict[str, Any]:
    return {
        "graph": layer.graph,
        "layer": layer.layer,
        "found": _distance(layer.found),
        "unpatched": _distance(layer.unpatched) if layer.unpatched is not None else None,
    }


def _distance(distance: Distance) -> dict[str, Any]:
    ratio = distance.norm_ratio if math.isfinite(distance.norm_ratio) else None
    return {"cosine": distance.cosine, "norm_ratio": ratio, "delta_norm": distance.delta_norm}


def _tokens(subject: Subject) -> dict[str, Any]:
    tokens = {name: subject.tokens.token(name) for name in (*MODALITIES, "pad")}
    return {name: {"id": token.id, "source": token.source} for name, token in tokens.items()}


def _graph(analysis: GraphAnalysis, subject: Subject) -> dict[str, Any]:
    graph = analysis.graph
    return {
        "name": graph.name,
        "inputs": [_value(value) for value in graph.inputs],
        "outputs": [_value(graph.value(name)) for name in graph.outputs],
        "verdict": analysis.verdict,
        "lookups": [_lookup(lookup, subject) for lookup in analysis.lookups],
        "splices": [_splice(splice) for splice in analysis.splices],
        "suspects": [node.address for node in analysis.suspects],
        "host_inputs": list(analysis.host_inputs),
    }


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": value.shape and list(value.shape)}


def _lookup(lookup: Lookup, subject: Subject) -> dict[str, Any]:
    table, judgement = lookup.table, lookup.judgement
    row_map = judgement.row_map
    media = subject.tokens.media
    return {
        "node": lookup.gather.address,
        "op": lookup.gather.native,
        "ids_input": lookup.ids_input,
        "path": list(lookup.path),
        "table": {
            "name": table.name,
            "shape": list(table.shape),
            "dtype": table.dtype,
            "quantisation": table.quantisation,
            "storage": table.storage,
            "bytes": table.nbytes,
        },
        "layers": lookup.layers,
        "layer_width": lookup.layer_width,
        "scale": lookup.scale,
        "evidence": list(lookup.evidence),
        "verdict": lookup.verdict,
        "reason": judgement.reason,
        "media_rows": {name: row_map.row(token) for name, token in media.items()} if row_map else None,
        "missing": list(judgement.missing),
        "clobbered": list(judgement.clobbered),
        "zeroed": list(judgement.zeroed),
    }


def _splice(splice: Splice) -> dict[str, Any]:
    return {"node": splice.node.address, "rows": splice.rows, "ids": list(splice.ids), "reason": splice.reason}


def _finding(finding: Finding, report: Report) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "message": finding.message,
        "graph": finding.graph,
        "nodes": list(finding.nodes),
        "fixable": report.mends(finding),
        "unsafe": finding.unsafe,
        "withheld": finding.withheld,
    }


def _edit(edit: Edit) -> dict[str, Any]:
    if isinstance(edit, ConfigSet):
        return {"rule": edit.rule, "set": list(edit.path), "value": edit.value}
    if isinstance(edit, RowCopy):
        return {"rule": edit.rule, "copy_row": edit.source, "over_rows": list(edit.rows)}
    return _graph_edit(edit)


def _graph_edit(edit: GraphEdit) -> dict[str, Any]:
    def operand(value: Operand) -> Any:
        return {"dtype": value.dtype, "value": value.value} if isinstance(value, Const) else value

    return {
        "graph": edit.graph,
        "rule": edit.rule,
        "nodes": [
            {
                "op": node.op,
                "operands": {name: operand(value) for name, value in node.operands.items()},
                "output": node.output,
                "reason": node.reason,
            }
            for node in edit.nodes
        ],
        "redirects": [
            {"node": item.use.node, "operand": item.use.operand, "value": item.value} for item in edit.redirects
        ],
    }
