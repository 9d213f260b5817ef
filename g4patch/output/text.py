"""A report as text for a person: the verdict first, one idea a line, readable in 80 columns without colour."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from g4patch.edits import Const, GraphEdit, NewNode, Operand, Plan
from g4patch.ple import GraphAnalysis, Lookup, Splice, Verdict
from g4patch.report import Check, Finding, ModelReport, Outcome, Report, Severity, Status, Subject
from g4patch.tokens import TokenFacts
from g4patch.view import Graph, Value

_GOOD, _BAD, _UNSURE = "bold green", "bold red", "bold yellow"
_VERDICT_STYLE = {
    Verdict.PATCHED: _GOOD,
    Verdict.HOST_SIDE: _GOOD,
    Verdict.NO_PLE: _GOOD,
    Verdict.OTHER_SCHEME: _GOOD,
    Verdict.AMBIGUOUS: _UNSURE,
    Verdict.CONDITIONAL: _UNSURE,
}
_STATUS_STYLE = {Status.PASSED: _GOOD, Status.FAILED: _BAD, Status.SKIPPED: _UNSURE}
_SEVERITY_STYLE = {Severity.ERROR: _BAD, Severity.WARNING: _UNSURE, Severity.NOTE: "bold"}

# What a verdict means, for people who have not read the documentation.
_MEANING = {
    Verdict.PATCHED: "media ids read the pad row, as they should",
    Verdict.PARTIAL: "some media ids read their own row instead of the pad row",
    Verdict.RAW: "media ids read their own rows: the model does not see the picture",
    Verdict.CLOBBERED: "ids that should read their own row read another",
    Verdict.ZERO_ROW: "media rows are zeros instead of the pad row",
    Verdict.CONDITIONAL: "another input decides which row is read: not decided here",
    Verdict.HOST_SIDE: "the rows come in as an input: the host looks them up, not this graph",
    Verdict.OTHER_SCHEME: "media rows are marked by ids outside the vocabulary: nothing to mask",
    Verdict.NO_PLE: "nothing here looks per-layer embeddings up",
    Verdict.AMBIGUOUS: "there may be a lookup that is not understood: nothing is claimed",
}

_SHORT_TYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def render(report: Report, console: Console, *, show_ple: bool = False, digests: bool = False) -> None:
    """Print a report. `show_ple` prints each lookup, `digests` the SHA-256 of each file."""
    if len(report.models) > 1:
        console.print(_folder_header(report))
        console.print()
    for model in report.models:
        console.print(_header(model))
        if report.command == "inspect":
            _inspect(model, console, show_ple, digests)
        else:
            _model(report, model, console)
        for warning in model.subject.tokens.warnings:
            console.print(_indented(Text.assemble(("warning ", _UNSURE), warning)))
        if len(report.models) > 1:
            console.print()
    if report.command != "inspect":
        console.print(_indented(_conclusion(report)))


def _folder_header(report: Report) -> RenderableType:
    """The folder, how many models it holds, and the verdict that decides."""
    verdict = Text(report.verdict.upper(), _VERDICT_STYLE.get(report.verdict, _BAD))
    return _spread(Text.assemble((f"{report.path.name}/", "bold"), f"  {len(report.models)} models"), verdict)


def _spread(left: Text, right: Text) -> RenderableType:
    grid = Grid.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _rows(rows: Iterable[tuple[str | Text, str | Text]], width: int = 12) -> Padding:
    """Labels with their contents, which wrap below themselves."""
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, content in rows:
        grid.add_row(label, content)
    return _indented(grid)


def _header(report: ModelReport) -> RenderableType:
    subject, model = report.subject, report.subject.model
    verdict = Text(subject.verdict.upper(), _VERDICT_STYLE.get(subject.verdict, _BAD))
    if report.plan.edits:
        verdict.append("  (fixable)", "default")
    size = sum(path.stat().st_size for path in model.files)
    functions = f"{len(model.graphs)} functions" if len(model.graphs) > 1 else ""
    facts = ", ".join(part for part in (model.format, *model.details, functions, _size(size)) if part)
    return _spread(Text.assemble((model.path.name, "bold"), "  ", facts), verdict)


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _inspect(report: ModelReport, console: Console, show_ple: bool, digests: bool) -> None:
    subject = report.subject
    console.print()
    for analysis in subject.analyses:
        console.print(_indented(_signature(analysis.graph)))
    console.print()
    if show_ple:
        for analysis in subject.analyses:
            _ple(analysis, subject, console)
    else:
        console.print(_indented(_MEANING[subject.verdict]))
    for finding in report.findings:
        if finding.withheld:
            console.print(_indented(Text.assemble(("not fixable ", _BAD), f"{finding.message}: {finding.withheld}")))
    if digests:
        console.print(_rows(_digests(subject), 65))
    if report.plan.edits:
        what = f"would insert {report.plan.nodes_added} ops and rewire {_uses(report.plan)}"
        console.print(_indented(Text.assemble((f"g4patch fix {subject.model.path}", "bold"), f"   {what}")))
    elif not show_ple and any(analysis.lookups for analysis in subject.analyses):
        console.print(_indented("more: g4patch inspect --show-ple " + str(subject.model.path)))


def _uses(plan: Plan) -> str:
    return f"{plan.uses_redirected} use" + ("s" if plan.uses_redirected > 1 else "")


def _digests(subject: Subject) -> Iterator[tuple[str, str]]:
    root = subject.model.path.parent
    for path in subject.model.files:
        with path.open("rb") as file:
            yield hashlib.file_digest(file, "sha256").hexdigest(), str(path.relative_to(root))


def _signature(graph: Graph) -> Text:
    inputs = ", ".join(_typed(value) for value in graph.inputs)
    outputs = ", ".join(_typed(graph.value(name)) for name in graph.outputs)
    return Text.assemble((graph.name, "bold"), f"({inputs})\n  -> {outputs}")


def _typed(value: Value) -> str:
    name = value.dtype or "?"
    kind = name.rstrip("0123456789")
    dtype = _SHORT_TYPES.get(kind, kind) + name[len(kind) :]
    if value.shape is None:
        return f"{value.name} {dtype}"
    return f"{value.name} {dtype}[{','.join('?' if size is None else str(size) for size in value.shape)}]"


def _ple(analysis: GraphAnalysis, subject: Subject, console: Console) -> None:
    if len(subject.analyses) > 1:
        console.print(_indented(Text.assemble("function ", (analysis.graph.name, "bold"))))
    rows: list[tuple[str | Text, str | Text]] = []
    for lookup in analysis.lookups:
        rows += _lookup(lookup, subject.tokens)
    for name in analysis.host_inputs:
        rows.append(("PLE input", f"{name}: {_MEANING[Verdict.HOST_SIDE]}"))
    for node in analysis.suspects:
        rows.append(("suspect", f"{node.native} {node.address}: rows by token id, not understood"))
    if not rows:
        rows.append(("PLE", _MEANING[Verdict.AMBIGUOUS if subject.verdict is Verdict.AMBIGUOUS else Verdict.NO_PLE]))
    rows += [("splice", _splice(splice, subject.tokens)) for splice in analysis.splices]
    rows.append(("token ids", _token_sources(subject.tokens)))
    console.print(_rows(rows))
    console.print()


def _lookup(lookup: Lookup, tokens: TokenFacts) -> Iterator[tuple[str | Text, str | Text]]:
    table, judgement = lookup.table, lookup.judgement
    shape = " x ".join(str(size) for size in table.shape)
    kind = f"{table.dtype}, {table.quantisation}" if table.quantisation else table.dtype
    yield "PLE lookup", f"{lookup.gather.native} {lookup.gather.address}"
    yield "table", f"{shape}, {kind}, {table.storage}"
    yield "", f"{lookup.layers} layers x {lookup.layer_width}, recognised by: {', '.join(lookup.evidence)}"
    yield "ids path", " -> ".join(lookup.path)
    verdict = Text(str(lookup.verdict), _VERDICT_STYLE.get(lookup.verdict, _BAD))
    yield "verdict", Text.assemble(verdict, f": {judgement.reason or _MEANING[lookup.verdict]}")
    if judgement.row_map is None:
        return
    inside = judgement.row_map.between(0, tokens.vocabulary or table.rows)
    own = int((inside.ids == inside.rows).sum()) - len(judgement.missing)
    yield "row map", f"{own:,} other ids read their own row; media ids:"
    for modality, token in tokens.media.items():
        yield "", _media_row(modality, token, lookup, tokens)
    text = [token for token in judgement.clobbered if token not in tokens.media.values()]
    if text:
        yield "", Text.assemble(("wrong", _BAD), f"  {len(text):,} other ids, the first is {text[0]}")


def _media_row(modality: str, token: int, lookup: Lookup, tokens: TokenFacts) -> Text:
    row_map = lookup.judgement.row_map
    assert row_map is not None
    reads, right = row_map.row(token), row_map.row(tokens.pad_id)
    line = Text(f"  {modality:<6} {token:<7} reads row {reads:<7} ")
    if token in lookup.judgement.zeroed:
        return line.append("then zeroed   ").append("wrong", _BAD)
    if reads == right:
        return line.append("ok", _GOOD)
    return line.append(f"should read {right}   ").append("wrong", _BAD)


def _splice(splice: Splice, tokens: TokenFacts) -> str:
    if splice.reason:
        return f"{splice.node.address}: {splice.reason}"
    names = {**tokens.media, "pad": tokens.pad_id}
    taken = [name for name, token in names.items() if token in splice.ids]
    missed = [name for name in names if name not in taken]
    others = len(splice.ids) - len(taken)
    line = f"rows come from elsewhere for: {', '.join(taken) or 'no media id'}"
    if missed:
        line += f"; not for: {', '.join(missed)}"
    if others:
        line += f"; also for {others:,} other ids"
    if splice.outside:
        line += f"; and for ids outside the vocabulary, such as {splice.outside[0]}"
    return line


def _token_sources(tokens: TokenFacts) -> str:
    media = ", ".join(f"{modality} {token}" for modality, token in tokens.media.items())
    return f"{media}, pad {tokens.pad.id}, from {', '.join(tokens.sources)}"


def _model(report: Report, model: ModelReport, console: Console) -> None:
    """Findings, then what was checked, or would be changed, in one model."""
    if model.findings:
        console.print()
    for finding in model.findings:
        console.print(_rows([_finding(report, model, finding)], width=20))
    if model.checks or (report.command == "fix" and model.plan.edits):
        console.print()
    if model.checks:
        console.print(_rows(_checks(model.checks), width=14))
    elif report.command == "fix":
        for edit in model.plan.edits:
            console.print(_indented(_diff(edit, model.subject)))
    console.print()


def _finding(report: Report, model: ModelReport, finding: Finding) -> tuple[Text, Text]:
    state = "fixed" if report.publication is not None and report.mends(finding) else finding.severity
    style = _GOOD if state == "fixed" else _SEVERITY_STYLE[finding.severity]
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
    if report.publication is not None:
        done = f"{outcome} in {report.seconds:.1f} s, {_size(report.publication.written)} written"
        style = _GOOD if outcome is Outcome.FIXED else _UNSURE
        end = Text(f"{done}; {_reference_said(report)}\n", style)
        if report.publication.backup is not None:
            return end.append("undo: ", "default").append(f"g4patch revert {path}", "bold default")
        return end.append(f"the mended bundle is {report.publication.target}", "default")
    if report.command == "verify":
        return Text(f"{outcome}: {_reference_said(report)}")
    if report.checks:
        return Text(f"{outcome}: nothing was published")
    if outcome is Outcome.PLANNED:
        return Text(f"nothing was written; g4patch fix {path} applies this")
    if report.command == "check" and report.plan.edits:
        return Text.assemble(f"{outcome}   ", (f"g4patch fix {path}", "bold"))
    if outcome is Outcome.CLEAN:
        fixed = report.command == "fix" and report.verdict is Verdict.PATCHED
        return Text("already fixed, nothing was written" if fixed else f"{outcome}: {_MEANING[report.verdict]}")
    return Text(f"{outcome}" + (": nothing was written" if report.command == "fix" else ""))


def _reference_said(report: Report) -> str:
    """Without a reference a bundle is never called verified."""
    checked = any(check.name == "reference" and check.status is Status.PASSED for check in report.checks)
    return "verified against the reference" if checked else "reference not checked"


def _checks(checks: Iterable[Check]) -> Iterator[tuple[str | Text, str | Text]]:
    for check in checks:
        yield check.name, Text.assemble((f"{check.status:<8} ", _STATUS_STYLE[check.status]), check.summary)
        yield from (("", line) for line in check.details[1:5])


def _diff(edit: GraphEdit, subject: Subject) -> Text:
    """The few nodes that an edit concerns: what reads the value now, what is inserted, what is rewired."""
    graph = next(a.graph for a in subject.analyses if a.graph.name == edit.graph)
    lines = Text.assemble((edit.rule, "bold"), f" in graph {edit.graph}\n")
    rewired = {redirect.use: redirect.value for redirect in edit.redirects}
    for value in dict.fromkeys(graph.node(use.node).operands[use.operand] for use in rewired):
        lines.append(f"    {value}\n")
        for use, node in graph.consumers(value):
            state = f"{use.operand} <- {rewired[use]}" if use in rewired else "(unchanged)"
            lines.append(f"      {node.native} {node.address}  {state}\n")
    for new in edit.nodes:
        lines.append(f"  + {new.output:<12} = {_new_node(new)}\n", "green")
        if new.reason:
            lines.append(f"      {new.reason}\n")
    return lines


def _new_node(node: NewNode) -> str:
    def shown(operand: Operand) -> str:
        return str(operand.value) if isinstance(operand, Const) else operand

    return f"{node.op}({', '.join(shown(operand) for operand in node.operands.values())})"
