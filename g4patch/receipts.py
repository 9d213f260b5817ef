"""What was changed, by what, on whose word, with which proof: the receipt beside a bundle, and a statement to sign.

The statement is an in-toto Statement v1 (<https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md>),
unsigned; its predicate is described in `attestation.md` beside this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from g4patch import plain
from g4patch.digests import sha256
from g4patch.report import ModelReport, Report
from g4patch.rules import find_rules

SCHEMA = 1
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://g4patch.github.io/attestation/v1"

# What reads, edits and runs the formats: the versions of those that are installed.
_LIBRARIES = ("coreai-core", "coremltools", "numpy", "onnx", "onnxruntime", "protobuf", "safetensors")


def receipt(report: Report) -> dict[str, Any]:
    """The receipt for a report whose checks have passed, as JSON-ready data."""
    return {
        "schema": SCHEMA,
        "tool": f"g4patch {version('g4patch')}",
        "time": _now(),
        "bundle": report.path.name,
        "models": [_model(model, report) for model in report.models if model.plan.edits],
        "checks": [plain.check(item) for item in report.whole],
    }


def statement(command: str, reports: Sequence[Report]) -> dict[str, Any] | None:
    """The statement of one run: of the bundles whose exit code is 0, None if there are none.

    Its subjects are the files that were hashed, under paths relative to the folder that holds all bundles.
    """
    passed = [report for report in reports if report.exit_code == 0 and report.files]
    if not passed:
        return None
    root = Path(os.path.commonpath([report.place.absolute().parent for report in passed]))
    return {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": _name(file.path, root), "digest": {"sha256": file.sha256}}
            for report in passed
            for file in report.files
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "tool": {"name": "g4patch", "version": version("g4patch"), "libraries": dict(_libraries())},
            "rules": [
                {"id": rule.id, "digest": {"sha256": sha256(rule.folder / "rule.toml")}} for rule in find_rules()
            ],
            "command": command,
            "time": _now(),
            "bundles": [_bundle(report, root) for report in passed],
        },
    }


def _bundle(report: Report, root: Path) -> dict[str, Any]:
    return {
        "bundle": report.path.name,
        "outcome": report.outcome,
        "files": [
            {"name": _name(file.path, root), "input": {"sha256": file.before}, "output": {"sha256": file.sha256}}
            for file in report.files
        ],
        "models": [_model(model, report) for model in report.models],
        "checks": [plain.check(item) for item in report.whole],
    }


def _name(path: Path, root: Path) -> str:
    return path.absolute().relative_to(root).as_posix()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _libraries() -> Iterator[tuple[str, str]]:
    for name in _LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _model(model: ModelReport, report: Report) -> dict[str, Any]:
    subject, plan = model.subject, model.plan
    return {
        "path": str(subject.model.path.relative_to(report.path.parent)),
        "format": subject.model.format,
        "verdict": subject.verdict,
        "verdict_after": model.mended.verdict if model.mended is not None else None,
        "token_ids": plain.tokens(subject),
        "findings": [
            {
                "rule": item.rule,
                "severity": item.severity,
                "graph": item.graph,
                "nodes": item.nodes,
                "message": item.message,
                "mended": report.mends(item),
            }
            for item in model.findings
        ],
        "plan": {"sha256": plan.digest, **plan.counts},
        "checks": [plain.check(item) for item in model.checks],
    }
