"""Wrong fixes, written by the format's own writer from an altered plan: every one is caught, by the checks named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from g4patch import engine, formats, inspect, verify
from g4patch.edits import Const, GraphEdit, Plan, Redirect, mask_ids
from g4patch.report import Check, Status, Subject
from g4patch.runtimes import Unavailable
from g4patch.view import Op, Use
from tests.conftest import Copy

Mutation = Callable[[Subject, GraphEdit], GraphEdit]


def remade(subject: Subject, edit: GraphEdit, ids: list[int], pad: int) -> GraphEdit:
    """The edit again, with other ids and another pad."""
    graph = next(a.graph for a in subject.analyses if a.graph.name == edit.graph)
    where = next(node for node in edit.nodes if node.op is Op.WHERE)
    value = where.operands["y"]
    assert isinstance(value, str)
    return mask_ids(graph, value, [redirect.use for redirect in edit.redirects], ids, pad, edit.rule)


def missing(subject: Subject) -> list[int]:
    return list(subject.analyses[0].lookups[0].judgement.missing)


def wrong_pad(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, missing(subject), 1)


def one_id_missing(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, missing(subject)[:-1] or [5], 0)


def off_by_one(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, [token + 1 for token in missing(subject)], 0)


def range_swallows_eoi_and_eoa(subject: Subject, edit: GraphEdit) -> GraphEdit:
    image = subject.tokens.image.id
    assert image is not None
    return remade(subject, edit, [image + step for step in range(5)], 0)


def text_rows_altered(subject: Subject, edit: GraphEdit) -> GraphEdit:
    return remade(subject, edit, [*missing(subject), 7], 0)


def branches_swapped(subject: Subject, edit: GraphEdit) -> GraphEdit:
    def swapped(operands: dict[str, str | Const]) -> dict[str, str | Const]:
        return {"condition": operands["condition"], "x": operands["y"], "y": operands["x"]}

    nodes = (
        replace(node, operands=swapped(dict(node.operands))) if node.op is Op.WHERE else node for node in edit.nodes
    )
    return replace(edit, nodes=tuple(nodes))


def token_embedding_instead(subject: Subject, edit: GraphEdit) -> GraphEdit:
    (embedding, *_) = subject.analyses[0].embeddings
    value = edit.redirects[0].value
    return replace(edit, redirects=(Redirect(Use(embedding.address, "index"), value),))


def token_embedding_as_well(subject: Subject, edit: GraphEdit) -> GraphEdit:
    (embedding, *_) = subject.analyses[0].embeddings
    also = Redirect(Use(embedding.address, "index"), edit.redirects[0].value)
    return replace(edit, redirects=(*edit.redirects, also))


ALL_CHECKS = {"structure", "row map", "differential"}
MUTATIONS: dict[Mutation, set[str]] = {
    wrong_pad: ALL_CHECKS,
    one_id_missing: ALL_CHECKS,
    off_by_one: ALL_CHECKS,
    range_swallows_eoi_and_eoa: ALL_CHECKS,
    text_rows_altered: ALL_CHECKS,
    branches_swapped: ALL_CHECKS,
    token_embedding_instead: ALL_CHECKS,
    # The lookup itself is right then: only the comparison of the files sees it.
    token_embedding_as_well: {"structure"},
}
SAMPLES = [
    *("mobius-text", "onnx-stage", "onnx-fp16", "coreai-stage"),
    *("coreml-fp16", "coreml-fp32", "coreml-ios16", "coreml-state", "coreml-int4-262144"),
]
# The lookup's index is behind a cast of its own there, so the ids cannot be swapped for the token embedding's.
PLE_ONLY = ["coreml-cast16", "coreml-multifunction", "onnx-identity-262144"]


def checks(before: Subject, after: Subject, plan: Plan) -> dict[str, Check]:
    return {result.name: result for result in verify.verify_patch(before, after, plan)}


def runs_here(subject: Subject) -> bool:
    try:
        formats.of(subject.model).probe(subject.model, subject.analyses[0].graph.name)
    except Unavailable:
        return False
    return True


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize("name", SAMPLES)
def test_wrong_fix_is_caught(name: str, mutation: Mutation, copy: Copy) -> None:
    bundle = copy(name)
    report = inspect(bundle)
    before, right = report.subject, report.plan
    fmt = formats.of(before.model)
    edit = next(edit for edit in right.graph_edits if edit.rule == "ple-raw-ids")
    wrong = Plan(tuple(mutation(before, item) if item is edit else item for item in right.graph_edits))
    staged = {target: target.with_name(f"staged {target.name}") for target in before.model.replaced}
    fmt.write(before.model, wrong, staged)
    results = checks(before, engine.open_model(bundle, staged=staged), right)
    caught = {result.name for result in results.values() if result.status is Status.FAILED}
    expected = MUTATIONS[mutation] - (set() if runs_here(before) else {"differential"})
    assert caught == expected, {name: result.summary for name, result in results.items()}


@pytest.mark.parametrize("name", SAMPLES + PLE_ONLY)
def test_right_fix_is_not_caught(name: str, copy: Copy) -> None:
    bundle = copy(name)
    report = inspect(bundle)
    replaced = report.subject.model.replaced
    staged = {target: target.with_name(f"staged {target.name}") for target in replaced}
    formats.of(report.subject.model).write(report.subject.model, report.plan, staged)
    results = checks(report.subject, engine.open_model(bundle, staged=staged), report.plan)
    assert not [result for result in results.values() if result.status is Status.FAILED]
