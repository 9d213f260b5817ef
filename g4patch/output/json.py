"""Reports as JSON for machines: one document a run, of the schema in `report.schema.json` beside this file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from typing import IO, Any

from g4patch import plain
from g4patch.edits import ConfigSet, Const, Edit, GraphEdit, Operand, RowCopy
from g4patch.output.shown import Shown
from g4patch.ple import GraphAnalysis, Lookup, Splice
from g4patch.report import Failure, Finding, ModelReport, Report, Result, Subject, worst_exit_code
from g4patch.view import Value

SCHEMA = 1


def render(results: Iterable[Result], file: IO[str], shown: Shown) -> None:
    """Write the document of one run, ending in a newline."""
    results = list(results)
    failures = [result for result in results if isinstance(result, Failure)]
    document = {
        "schema": SCHEMA,
        "tool": f"g4patch {version('g4patch')}",
        "exit_code": worst_exit_code(result.exit_code for result in results),
        "reports": [_report(result) for result in results if isinstance(result, Report)],
        "errors": [
            {"bundle": item.bundle, "message": item.error.message, "hint": item.error.hint} for item in failures
        ],
    }
    file.write(json.dumps(document, indent=2) + "\n")


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
        "whole": [plain.check(check) for check in report.whole],
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
        "token_ids": plain.tokens(subject),
        "warnings": list(subject.tokens.warnings),
        "graphs": [_graph(analysis, subject) for analysis in subject.analyses],
        "findings": [_finding(finding, whole) for finding in report.findings],
        "plan": {"sha256": plan.digest, "edits": [_edit(edit) for edit in plan.edits], "note": plan.note}
        if plan.edits
        else None,
        "checks": [plain.check(item) for item in report.checks],
    }


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
