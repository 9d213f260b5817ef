"""SARIF 2.1.0, for services that collect findings: <https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html>.

Results are what is still wrong after the command. A bundle that could not be worked on is a notification, and the
run then counts as not successful.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from g4patch.output.problems import OTHER_RULES, Problem, problems, shown_path
from g4patch.output.shown import Shown
from g4patch.report import Failure, Report, Result, worst_exit_code
from g4patch.rules import Rule, find_rules

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

# Raise it where what goes into a fingerprint changes: services then take all findings for new.
_FINGERPRINT = "g4patch/v1"


def render(results: Iterable[Result], file: IO[str], shown: Shown) -> None:
    """Write the log of one run, ending in a newline."""
    results = list(results)
    reports = [result for result in results if isinstance(result, Report)]
    failures = [result for result in results if isinstance(result, Failure)]
    rules = [*map(_rule, find_rules()), *map(_other_rule, OTHER_RULES)]
    numbers = {rule["id"]: number for number, rule in enumerate(rules)}
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "g4patch", "semanticVersion": version("g4patch"), "rules": rules}},
                "invocations": [
                    {
                        "executionSuccessful": not failures,
                        "exitCode": worst_exit_code(result.exit_code for result in results),
                        "toolExecutionNotifications": [_notification(failure) for failure in failures],
                    }
                ],
                "results": list(_results(reports, numbers)),
                "columnKind": "unicodeCodePoints",
            }
        ],
    }
    file.write(json.dumps(log, indent=2) + "\n")


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.summary},
        "help": {"text": rule.page, "markdown": rule.page},
        "defaultConfiguration": {"level": rule.severity},
        "properties": {"fix": rule.fix},
    }


def _other_rule(name: str) -> dict[str, Any]:
    description = {"text": OTHER_RULES[name]}
    return {
        "id": name,
        "shortDescription": description,
        "help": description,
        "defaultConfiguration": {"level": "error"},
    }


def _results(reports: Sequence[Report], numbers: dict[str, int]) -> Iterator[dict[str, Any]]:
    for report in reports:
        for problem in problems(report):
            yield {
                "ruleId": problem.rule,
                "ruleIndex": numbers[problem.rule],
                "level": problem.severity,
                "message": {"text": problem.message},
                "locations": [_location(problem)],
                "partialFingerprints": {_FINGERPRINT: _fingerprint(problem)},
            }


def _location(problem: Problem) -> dict[str, Any]:
    """The file, and in it the graph and its nodes."""
    # A graph's file has no lines; GitHub's code scanning wants one.
    physical = {"artifactLocation": {"uri": _uri(problem.file)}, "region": {"startLine": 1}}
    logical = [
        {"name": node, "fullyQualifiedName": f"{problem.graph}/{node}", "kind": "element"} for node in problem.nodes
    ]
    if problem.graph:
        logical.insert(0, {"name": problem.graph, "fullyQualifiedName": problem.graph, "kind": "function"})
    return {"physicalLocation": physical, **({"logicalLocations": logical} if logical else {})}


def _uri(path: Path) -> str:
    shown = shown_path(path)
    return path.absolute().as_uri() if shown.startswith("/") else quote(shown)


def _fingerprint(problem: Problem) -> str:
    """The same for the same fault of the same nodes, whatever the words and the numbers in the message."""
    identity = [problem.rule, _uri(problem.file), problem.graph, *problem.nodes]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _notification(failure: Failure) -> dict[str, Any]:
    hint = f". {failure.error.hint}" if failure.error.hint else ""
    return {
        "level": "error",
        "message": {"text": f"{failure.error.message}{hint}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(Path(failure.bundle))}}}],
    }
