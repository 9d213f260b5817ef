"""What a model is and what it does about PLE, as text for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from g4patch.digests import sha256
from g4patch.output.layout import BAD, GOOD, MEANING, VERDICT_STYLE, indented, printable, rows
from g4patch.output.shown import Shown
from g4patch.ple import GraphAnalysis, Lookup, Splice
from g4patch.report import ModelReport, Subject
from g4patch.tokens import TokenFacts
from g4patch.verdicts import Verdict
from g4patch.view import Graph, Value

_SHORT_TYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def render(report: ModelReport, console: Console, shown: Shown, root: Path) -> None:
    """Print what a model is, and on request each lookup, its row map and the splices. Files are named from `root`."""
    subject = report.subject
    if subject.analyses:
        console.print()
    for analysis in subject.analyses:
        console.print(indented(_signature(analysis.graph)))
    if shown.ple:
        for analysis in subject.analyses:
            console.print()
            _ple(analysis, subject, console)
    if shown.digests:
        console.print()
        for line in _digests(subject, root):
            console.print(Text(line), soft_wrap=True)


def _digests(subject: Subject, root: Path) -> Iterator[str]:
    """A line a file, never broken, so that `sha256sum --check` takes it."""
    for path in subject.model.files:
        yield f"  {sha256(path)}  {printable(str(path.relative_to(root)))}"


def _signature(graph: Graph) -> Text:
    inputs = ", ".join(_typed(value) for value in graph.inputs)
    outputs = ", ".join(_typed(graph.value(name)) for name in graph.outputs)
    return Text.assemble((graph.name, "bold"), f"({inputs})\n  -> {outputs}")


def _typed(value: Value) -> str:
    name = value.dtype or "?"
    kind = name.rstrip("0123456789")
    dtype = _SHORT_TYPES.get(kind, kind) + name[len(kind) :]
    if value.shape is None:
        return f"{printable(value.name)} {dtype}"
    return f"{printable(value.name)} {dtype}[{','.join('?' if size is None else str(size) for size in value.shape)}]"


def _ple(analysis: GraphAnalysis, subject: Subject, console: Console) -> None:
    if len(subject.analyses) > 1:
        console.print(indented(Text.assemble("function ", (analysis.graph.name, "bold"))))
    lines: list[tuple[str | Text, str | Text]] = []
    for alike in _alike(analysis.lookups):
        lines += _lookup(alike[0], subject.tokens)
        if len(alike) > 1:
            lines.append(("", f"and {len(alike) - 1} more lookups like it"))
    for name in analysis.host_inputs:
        lines.append(("PLE input", f"{name}: {MEANING[Verdict.HOST_SIDE]}"))
    for node in analysis.suspects:
        lines.append(("suspect", f"{node.native} {node.address}: rows by token id, not understood"))
    if not lines:
        lines.append(("PLE", MEANING[Verdict.AMBIGUOUS if subject.verdict is Verdict.AMBIGUOUS else Verdict.NO_PLE]))
    lines += [("splice", _splice(splice, subject.tokens)) for splice in analysis.splices]
    lines.append(("token ids", _token_sources(subject.tokens)))
    console.print(rows(lines))


def _alike(lookups: Sequence[Lookup]) -> list[list[Lookup]]:
    """Lookups that differ in nothing but their table, as where a table is split by layer."""
    groups: dict[tuple[object, ...], list[Lookup]] = {}
    for lookup in lookups:
        judgement = lookup.judgement
        key = (
            lookup.path,
            lookup.table.shape,
            lookup.verdict,
            judgement.missing,
            judgement.clobbered,
            judgement.zeroed,
        )
        groups.setdefault(key, []).append(lookup)
    return list(groups.values())


def _lookup(lookup: Lookup, tokens: TokenFacts) -> Iterator[tuple[str | Text, str | Text]]:
    table, judgement = lookup.table, lookup.judgement
    shape = " x ".join(str(size) for size in table.shape)
    kind = f"{table.dtype}, {table.quantisation}" if table.quantisation else table.dtype
    yield "PLE lookup", f"{lookup.gather.native} {lookup.gather.address}"
    yield "table", f"{shape}, {kind}, {table.storage}"
    yield "", f"{lookup.layers} layers x {lookup.layer_width}, recognised by: {', '.join(lookup.evidence)}"
    yield "ids path", " -> ".join(lookup.path)
    verdict = Text(str(lookup.verdict), VERDICT_STYLE.get(lookup.verdict, BAD))
    yield "verdict", Text.assemble(verdict, f": {judgement.reason or MEANING[lookup.verdict]}")
    if judgement.row_map is None:
        return
    inside = judgement.row_map.between(0, tokens.vocabulary or table.rows)
    own = int((inside.ids == inside.rows).sum()) - len(judgement.missing)
    yield "row map", f"{own:,} other ids read their own row; media ids:"
    for modality, token in tokens.media.items():
        yield "", _media_row(modality, token, lookup, tokens)
    text = [token for token in judgement.clobbered if token not in tokens.media.values()]
    if text:
        yield "", Text.assemble(("wrong", BAD), f"  {len(text):,} other ids, the first is {text[0]}")


def _media_row(modality: str, token: int, lookup: Lookup, tokens: TokenFacts) -> Text:
    row_map = lookup.judgement.row_map
    assert row_map is not None
    reads, right = row_map.row(token), row_map.row(tokens.pad_id)
    line = Text(f"  {modality:<6} {token:<7} reads row {reads:<7} ")
    if token in lookup.judgement.zeroed:
        return line.append("then zeroed   ").append("wrong", BAD)
    if reads == right:
        return line.append("ok", GOOD)
    return line.append(f"should read {right}   ").append("wrong", BAD)


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
