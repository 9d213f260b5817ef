"""A report as text for a person: the verdict first, one idea a line, readable in 80 columns without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO

from rich.console import Console, RenderableType
from rich.text import Text

from g4patch.edits import ConfigSet, Const, Edit, GraphEdit, NewNode, Operand, RowCopy
from g4patch.errors import Interrupted
from g4patch.layers import telling
from g4patch.output import evidence, inspection
from g4patch.output.layout import (
    BAD,
    GOOD,
    MEANING,
    SEVERITY_STYLE,
    STATUS_STYLE,
    UNSURE,
    VERDICT_STYLE,
    change,
    in_units,
    indented,
    printable,
    quoted,
    rows,
    spread,
)
from g4patch.output.shown import Shown
from g4patch.report import (
    Check,
    Failure,
    Finding,
    LayerDistance,
    ModelReport,
    Outcome,
    Report,
    Result,
    Status,
    Subject,
    worst_exit_code,
)
from g4patch.verdicts import Verdict


def render(results: Iterable[Result], file: IO[str], shown: Shown) -> None:
    """Print each report as it comes. What failed was said on stderr; of several bundles, a list of all ends it."""
    console = Console(file=file, highlight=False)
    seen = []
    for result in results:
        seen.append(result)
        if isinstance(result, Report):
            _report(result, console, shown)
        if shown.several:
            console.print()
    if shown.several:
        _summary(seen, console)


def _summary(results: Sequence[Result], console: Console) -> None:
    """Every bundle in a line, so that the end of a long log says it all."""
    code = worst_exit_code(result.exit_code for result in results)
    console.print(Text(f"{len(results)} bundles, exit code {code}", "bold"))
    console.print(rows([_summed_up(result) for result in results], width=31))


def _summed_up(result: Result) -> tuple[Text, Text]:
    style = BAD if result.exit_code else GOOD
    if isinstance(result, Failure):
        word = "interrupted" if isinstance(result.error, Interrupted) else "error"
        return Text(word, style), Text(f"{printable(result.bundle)}\n{printable(result.error.message)}")
    return Text(result.outcome, style), Text(printable(str(result.path)))


def _report(report: Report, console: Console, shown: Shown) -> None:
    if len(report.models) > 1:
        console.print(_folder_header(report, shown))
        console.print()
    for model in report.models:
        console.print(_header(report, model, shown))
        if report.command == "inspect":
            path = model.subject.model.path
            inspection.render(model, console, shown, path.parent if path == report.path else report.path)
        _findings(report, model, console)
        _proof(report, model, console)
        for warning in model.subject.tokens.warnings:
            console.print(indented(Text.assemble(("warning ", UNSURE), warning)))
        console.print()
    if report.whole:
        console.print(Text("whole model" if len(report.models) > 1 else "model", "bold"))
        console.print()
        console.print(rows(_checks(report.whole, console.encoding), width=14))
        console.print()
    console.print(indented(_conclusion(report)))


def _folder_header(report: Report, shown: Shown) -> RenderableType:
    """The folder, how many models it holds, and the verdict that decides."""
    verdict = Text(report.verdict.upper(), VERDICT_STYLE.get(report.verdict, BAD))
    name = str(report.path) if shown.several else report.path.name
    models = sum(model.subject.looks_up for model in report.models)
    return spread(Text.assemble((f"{name}/", "bold"), f"  {models} model{'s' * (models > 1)}"), verdict)


def _header(report: Report, model: ModelReport, shown: Shown) -> RenderableType:
    subject, path = model.subject, model.subject.model.path
    verdict = Text(subject.verdict.upper(), VERDICT_STYLE.get(subject.verdict, BAD)) if subject.looks_up else Text()
    if model.plan.edits:
        verdict.append("  (fixed)" if report.publication is not None else "  (fixable)", "default")
    size = sum(file.stat().st_size for file in subject.model.files)
    functions = f"{len(subject.analyses)} functions" if len(subject.analyses) > 1 else ""
    facts = (subject.model.format, *subject.model.details, functions, in_units(size))
    name = path.name if path == report.path else str(path.relative_to(report.path))
    if shown.several and path == report.path:
        name = str(path)
    return spread(Text.assemble((name, "bold"), "  ", ", ".join(fact for fact in facts if fact)), verdict)


def _findings(report: Report, model: ModelReport, console: Console) -> None:
    if model.findings:
        console.print()
        console.print(rows([_finding(report, model, finding) for finding in model.findings], width=22))


def _proof(report: Report, model: ModelReport, console: Console) -> None:
    """What was checked, or what would be changed, in one model."""
    if model.checks:
        console.print()
        console.print(rows(_checks(model.checks, console.encoding), width=14))
    elif report.command == "fix" and model.plan.edits:
        console.print()
        for edit in model.plan.edits:
            console.print(indented(_planned(edit, model.subject)))
        if model.plan.note:
            console.print(indented(Text.assemble(("in the metadata\n", "bold"), (f"  + {model.plan.note}", "green"))))


def _finding(report: Report, model: ModelReport, finding: Finding) -> tuple[Text, Text]:
    state = "fixed" if report.mended(finding) else finding.severity
    style = GOOD if state == "fixed" else SEVERITY_STYLE[finding.severity]
    where = f"{finding.graph}: " if len(model.subject.analyses) > 1 and finding.graph else ""
    body = Text.assemble((f"{state:<8}", style), where, finding.message)
    if finding.withheld:
        body.append(f"\nnot fixed: {finding.withheld}")
    elif finding.unsafe and not report.unsafe:
        body.append(f"\nfixed only with --unsafe: {finding.unsafe}")
    return Text(finding.rule, "bold"), body


def _conclusion(report: Report) -> Text:
    """The last lines: how it ended, and what to do next."""
    outcome, path = report.outcome, report.path
    if report.publication is not None and outcome is Outcome.COPIED:
        return Text(f"{outcome}: {report.publication.target}", GOOD)
    if report.publication is not None:
        done = f"{outcome} in {report.seconds:.1f} s, {in_units(report.publication.written)} written"
        style = GOOD if outcome is Outcome.FIXED else UNSURE
        end = Text(f"{done}; {_reference_said(report)}\n", style)
        if report.publication.backup is not None:
            return end.append("undo: ", "default").append(f"g4patch revert {quoted(path)}", "bold default")
        return end.append(f"the mended bundle is {report.publication.target}", "default")
    if outcome in (Outcome.CHECK_FAILED, Outcome.CHECK_MISSING) and report.command == "verify":
        return Text(f"{outcome}: {', '.join(_not_passed(report))}")
    if report.command == "verify":
        return Text(f"{outcome}: {_reference_said(report)}")
    if report.checks:
        return Text(f"{outcome}: nothing was published")
    if outcome is Outcome.PLANNED:
        return Text(f"nothing was written; g4patch fix {quoted(path)} applies this")
    if report.plan.edits:
        return Text.assemble(f"{outcome}: ", (f"g4patch fix {quoted(path)}", "bold"), f" would {report.plan.wanted}")
    if outcome is Outcome.CLEAN:
        fixed = report.command == "fix" and report.verdict is Verdict.PATCHED
        return Text("already fixed, nothing was written" if fixed else f"{outcome}: {MEANING[report.verdict]}")
    return Text(f"{outcome}" + (": nothing was written" if report.command == "fix" else ""))


def _not_passed(report: Report) -> Iterable[str]:
    """The checks that failed, or those that were required and could not run."""
    if report.outcome is Outcome.CHECK_FAILED:
        return dict.fromkeys(check.name for check in report.checks if check.status is Status.FAILED)
    skipped = (check.name for check in report.checks if check.status is Status.SKIPPED)
    return dict.fromkeys(name for name in skipped if name in report.required)


def _reference_said(report: Report) -> str:
    """Without a reference a bundle is never called verified; one for some of its models does not count for all."""
    computing = [model.checks for model in report.models if model.subject.model.graphs]
    passed = [check.status is Status.PASSED for checks in computing for check in checks if check.name == "reference"]
    if not any(passed):
        return "reference not checked"
    if all(passed):
        return "verified against the reference"
    return f"{sum(passed)} of {len(passed)} models verified against a reference"


def _checks(checks: Iterable[Check], encoding: str) -> Iterator[tuple[str | Text, str | Text]]:
    bars = evidence.bars_for(encoding)
    for check in checks:
        yield check.name, Text.assemble((f"{check.status:<8} ", STATUS_STYLE[check.status]), check.summary)
        yield from (("", line) for line in check.details[1:5])
        yield from (("", line) for line in _layers(check.layers))
        yield from (("", line) for line in evidence.stages(check.stages, bars))
        yield from (("", line) for line in evidence.logits(check.logits, bars))


# More layers than these are told by the first, the one furthest off, and the last.
_MOST_LAYERS = 8


def _layers(layers: Sequence[LayerDistance]) -> Iterator[Text]:
    """Media rows of the looked-up embeddings against the reference, a line a layer; before the fix, then now."""
    graphs = dict.fromkeys(one.graph for one in layers)
    for graph in graphs:
        yield Text(f"media rows of PLE against the reference{f', {graph}' if len(graphs) > 1 else ''}:")
        yield Text("layer cosine             norm ratio         |difference|", "bold")
        for one in telling([one for one in layers if one.graph == graph], _MOST_LAYERS):
            now, was = one.found, one.unpatched or one.found
            cells = (
                ("{:.4f}", was.cosine, now.cosine),
                ("{:#.4g}", was.norm_ratio, now.norm_ratio),
                ("{:.2g}", was.delta_norm, now.delta_norm),
            )
            line = "".join(change(*cell, one.unpatched is not None) for cell in cells)
            yield Text(f"{one.layer:<6}{line}".rstrip())


def _planned(edit: Edit, subject: Subject) -> Text:
    if isinstance(edit, ConfigSet):
        return Text.assemble((edit.rule, "bold"), f'\n  {".".join(edit.path)} = "{edit.value}"')
    if isinstance(edit, RowCopy):
        copied = f"\n  row {edit.source} over rows {', '.join(str(row) for row in edit.rows)}"
        return Text.assemble((edit.rule, "bold"), copied)
    return _diff(edit, subject)


def _diff(edit: GraphEdit, subject: Subject) -> Text:
    """The few nodes that an edit concerns: what reads the value now, what is inserted, what is rewired."""
    graph = next(a.graph for a in subject.analyses if a.graph.name == edit.graph)
    lines = Text.assemble((edit.rule, "bold"), f" in graph {edit.graph}\n")
    rewired = {redirect.use: redirect.value for redirect in edit.redirects}
    for value in dict.fromkeys(graph.node(use.node).operands[use.operand] for use in rewired):
        lines.append(f"    {printable(value)}\n")
        for use, node in graph.consumers(value):
            state = f"{use.operand} <- {rewired[use]}" if use in rewired else "(unchanged)"
            lines.append(f"      {node.native} {printable(f'{node.address}  {state}')}\n")
    for new in edit.nodes:
        lines.append(f"  + {new.output:<12} = {_new_node(new)}\n", "green")
        if new.reason:
            lines.append(f"      {new.reason}\n")
    return lines


def _new_node(node: NewNode) -> str:
    def shown(operand: Operand) -> str:
        return str(operand.value) if isinstance(operand, Const) else printable(operand)

    return f"{node.op}({', '.join(shown(operand) for operand in node.operands.values())})"
