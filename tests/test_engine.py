"""Refusals and contradictions that the engine must not decide by itself, and that the house is open."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from g4patch import Options, check, engine, fix, formats, inspect, rules
from g4patch.edits import Plan
from g4patch.errors import BundleError, RuleError
from g4patch.formats import NOT_STAGED, Model, Staged
from g4patch.report import Finding, Outcome, Severity, Subject
from g4patch.tokens import TokenFlags
from g4patch.verdicts import Verdict
from g4patch.view import Graph, Node, Op, Table, Value
from tests.cases import load
from tests.conftest import Copy, sample

CASES = Path(__file__).parent.parent / "rules"


@pytest.mark.parametrize("pad", [320, 10**9])
def test_pad_must_be_a_row_of_the_table(pad: int) -> None:
    with pytest.raises(BundleError, match=f"pad id {pad}") as caught:
        inspect(sample("onnx-stage"), Options(TokenFlags(pad=pad)))
    assert "--pad-token-id" in caught.value.hint


def test_ids_that_the_graphs_own_splice_contradicts() -> None:
    flags = TokenFlags(image=20, audio=21, video=24)
    with pytest.raises(BundleError, match="splices rows of id 310"):
        inspect(sample("onnx-stage"), Options(flags))


def test_ids_that_are_no_rows_are_not_taken_for_a_clean_bundle(copy: Copy) -> None:
    bundle = copy("onnx-identity-262144")
    (bundle.parent / "config.json").unlink()
    assert check(bundle).subject.verdict is Verdict.RAW
    bundle = copy("mobius-text")
    (bundle.parent / "config.json").unlink()
    report = check(bundle)
    assert (report.subject.verdict, report.exit_code) == (Verdict.AMBIGUOUS, 1)


def test_an_id_that_only_the_defaults_name_is_a_note(copy: Copy) -> None:
    bundle = copy("onnx-identity-262144")
    (bundle.parent / "config.json").unlink()
    (bundle.parent / "metadata.json").write_text('{"vision": {"image_token_id": 258880}}')
    assert fix(bundle).outcome is Outcome.FIXED
    (bundle.parent / "metadata.json").write_text('{"vision": {"image_token_id": 5}}')
    report = check(bundle, Options(TokenFlags(image=258880)))
    assert report.findings == ()


def test_a_note_alone_edits_nothing(tmp_path: Path) -> None:
    text = load(CASES / "ple-raw-ids/cases/partial-video.onnxtxt")
    path = text.write(tmp_path)
    (tmp_path / "config.json").write_text('{"image_token_id": 10, "audio_token_id": 11, "pad_token_id": 0}')
    # Video's default id, 258884, is no row of this table; as a row of a larger one it would be a note.
    report = check(path)
    assert (report.subject.verdict, report.findings) == (Verdict.PATCHED, ())


def test_all_lookups_are_mended_or_none(tmp_path: Path) -> None:
    content = (CASES / "ple-raw-ids/cases/raw-two-lookups.onnxtxt").read_text()
    mixed = content.replace(
        "rows_b = Gather(table_b, input_ids)", "odd = Mod(input_ids, one) rows_b = Gather(table_b, odd)"
    )
    mixed = mixed.replace("float[16,6] table_b", "float[16,6] table_b, int64 one = {99}")
    (tmp_path / "mixed.onnxtxt").write_text(mixed)
    report = fix(load(tmp_path / "mixed.onnxtxt").write(tmp_path))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert not report.plan.edits
    assert {bool(finding.withheld) for finding in report.findings} == {True}
    assert len(report.findings) == 2


def test_nothing_is_edited_where_the_lookup_is_not_understood(tmp_path: Path) -> None:
    content = (CASES / "splice-misses-rows/cases/image-only.onnxtxt").read_text()
    odd = content.replace("rows = Gather(table, ids)", "odd = Mod(ids, sixteen) rows = Gather(table, odd)")
    (tmp_path / "odd.onnxtxt").write_text(odd.replace("int64 pad = {0}", "int64 pad = {0}, int64 sixteen = {16}"))
    report = fix(load(tmp_path / "odd.onnxtxt").write(tmp_path))
    assert (report.outcome, report.exit_code) == (Outcome.INCONCLUSIVE, 1)
    (splice,) = [finding for finding in report.findings if finding.rule == "splice-misses-rows"]
    assert "not understood" in splice.withheld


def test_a_required_check_that_cannot_run_publishes_nothing(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    from g4patch.runtimes import Unavailable

    def unavailable(model: Model, graph: str) -> None:
        raise Unavailable("no runtime in this test")

    bundle = copy("onnx-stage")
    before = bundle.read_bytes()
    monkeypatch.setattr(formats.of(engine.open_model(bundle).model), "probe", unavailable)
    report = fix(bundle, Options(required=frozenset({"differential"})))
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_MISSING, 4)
    assert bundle.read_bytes() == before
    report = fix(bundle)
    assert (report.outcome, report.exit_code) == (Outcome.FIXED, 0)
    assert "no runtime in this test" in str(report.checks)


def test_a_failed_check_publishes_nothing(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    from g4patch.formats.onnx import edit

    bundle = copy("onnx-stage")
    before = bundle.read_bytes()
    real = edit.write

    def careless(model: Model, plan: Plan, staged: Staged) -> None:
        real(model, plan, staged)
        path = staged[model.path]
        path.write_bytes(path.read_bytes().replace(b"hidden_states_out", b"hidden_states_0ut"))

    monkeypatch.setattr(formats.of(engine.open_model(bundle).model), "write", careless)
    report = fix(bundle)
    assert (report.outcome, report.exit_code) == (Outcome.CHECK_FAILED, 3)
    assert bundle.read_bytes() == before
    assert {path.name for path in bundle.parent.iterdir()} == {
        "model.onnx",
        "model.onnx.data",
        "model.onnx.reference.safetensors",
        "config.json",
    }


def add_rule(folder: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[..., object], more: str = "") -> None:
    """A rule called `toy` in a folder of its own, and no other."""
    module = types.ModuleType("toy_rule")
    module.look = look  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_rule", module)
    (folder / "toy").mkdir()
    (folder / "toy" / "rule.toml").write_text(
        'id = "toy"\nsummary = "A table is wide."\nseverity = "warning"\n'
        f'formats = ["ONNX"]\nfix = "none"\ncheck = "toy_rule:look"\n{more}\n'
    )
    monkeypatch.setattr(rules, "folders", lambda: (folder,))


def test_a_rule_is_added_by_adding_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(rule: rules.Rule, subject: Subject) -> Iterator[Finding]:
        for analysis in subject.analyses:
            for lookup in analysis.lookups:
                yield Finding(rule.id, rule.severity, f"{lookup.table.width} wide", lookup.graph)

    add_rule(tmp_path, monkeypatch, look)
    report = check(sample("onnx-right"))
    assert [(finding.rule, finding.severity, finding.message) for finding in report.findings] == [
        ("toy", Severity.WARNING, "24 wide")
    ]
    assert report.exit_code == 0


def test_a_rule_may_look_at_all_models_of_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(rule: rules.Rule, subjects: Sequence[Subject]) -> Iterator[tuple[Subject, Finding]]:
        names = [subject.model.path.name for subject in subjects]
        yield subjects[-1], Finding(rule.id, rule.severity, f"beside {', '.join(names[:-1])}", "")

    add_rule(tmp_path, monkeypatch, look, 'looks_at = "bundle"')
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name in ("a.onnx", "b.onnx"):
        shutil.copy(sample("onnx-fp16"), folder / name)
    shutil.copy(sample("onnx-fp16").parent / "config.json", folder)
    first, last = check(folder).models
    assert (first.findings, [finding.message for finding in last.findings]) == ((), ["beside a.onnx"])


def test_a_rule_that_looks_at_something_else_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_rule(tmp_path, monkeypatch, lambda: (), 'looks_at = "stars"')
    with pytest.raises(RuleError, match="looks at stars"):
        check(sample("onnx-right"))


def toy_format() -> types.ModuleType:
    """A format whose graph file holds the ids that it masks, one a line."""
    module = types.ModuleType("toy_format")

    def open_model(path: Path, staged: Staged = NOT_STAGED) -> Model:
        source = staged.get(path, path)
        masked = [int(line) for line in source.read_text().split()]
        constants = {"scale": np.array(3**0.5), "tail": np.array([0, 0, 2, 3]), "pad": np.array(0)}
        nodes, index = [], "ids"
        for number, token in enumerate(masked):
            constants[f"id{number}"] = np.array(token)
            nodes.append(Node(Op.EQUAL, "eq", f"e{number}", {"x": "ids", "y": f"id{number}"}, (f"e{number}",)))
            operands = {"condition": f"e{number}", "x": "pad", "y": index}
            index = f"w{number}"
            nodes.append(Node(Op.WHERE, "sel", index, operands, (index,)))
        nodes += [
            Node(Op.GATHER, "take", "rows", {"data": "table", "index": index}, ("rows",), {"axis": 0}),
            Node(Op.MUL, "times", "scaled", {"x": "rows", "y": "scale"}, ("scaled",)),
            Node(Op.RESHAPE, "shape", "out", {"x": "scaled", "shape": "tail"}, ("out",)),
        ]
        values = {name: Value(name, "int64") for name in ("ids", *(f"w{n}" for n in range(len(masked))))}
        table = Table("table", (16, 6), "float32", "nowhere", 384)
        inputs = (Value("ids", "int64", (1, None)),)
        graph = Graph("toy", inputs, ("out",), tuple(nodes), values, constants, {"table": table})
        return Model(path, "Toy", (), (path,), (path,), source, (graph,), None)

    def write(model: Model, plan: Plan, staged: Staged) -> None:
        ids = [node.operands["y"].value for edit in plan.edits for node in edit.nodes if node.op is Op.EQUAL]  # type: ignore[union-attr]
        staged[model.path].write_text(model.path.read_text() + "".join(f"{token}\n" for token in ids))

    def probe(model: Model, graph: str) -> None:
        from g4patch.runtimes import Unavailable

        raise Unavailable("toys do not run")

    module.__dict__.update(
        NAME="Toy",
        MASK_DTYPES=frozenset({"int64"}),
        open_model=open_model,
        complete=lambda model, plan: plan,
        write=write,
        differences=lambda before, after, plan: (),
        validate=lambda model: (),
        probe=probe,
    )
    return module


def test_a_format_is_added_by_adding_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toy_format", toy_format())
    monkeypatch.setitem(formats.FORMATS, "*.toy", "toy_format")
    (tmp_path / "config.json").write_text('{"image_token_id": 10, "audio_token_id": 11, "video_token_id": 14}')
    bundle = tmp_path / "model.toy"
    bundle.write_text("10\n")
    assert inspect(bundle).subject.verdict is Verdict.PARTIAL
    report = fix(bundle)
    assert report.outcome is Outcome.FIXED
    assert bundle.read_text() == "10\n11\n14\n"
    assert fix(bundle).outcome is Outcome.CLEAN
