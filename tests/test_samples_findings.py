"""What `check` says of every sample, and what becomes of its fixes when they are made one at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from g4patch import Options, check, engine, fix, formats, revert, verify
from g4patch.edits import Plan
from g4patch.report import Report, Severity, Status
from g4patch.view import Graph
from tests.conftest import SAMPLES, Copy, models, sample, tree

RAW = ("ple-raw-ids", Severity.ERROR)
SPLICE = ("splice-misses-rows", Severity.ERROR)

# Sample -> model -> findings, by hand from what each exporter does (samples/README.md). A model that is not named has
# the findings of a broken stage.
STAGE = [RAW, SPLICE]
EXPECTED: dict[str, dict[str, list[tuple[str, Severity]]]] = {
    "host-ple": {"stage.aimodel": [], "stage_ple.safetensors": [("sidecar-media-rows", Severity.ERROR)]},
    "mobius-embedding": {"model.onnx": [RAW]},  # its splice takes computed features
    "mobius-package": {"embedding/model.onnx": [RAW], "decoder/model.onnx": [], "genai_config.json": []},
    "mobius-text": {"model.onnx": [RAW]},  # nothing is spliced
    "mobius-vision": {"model.onnx": [("clip-bounds", Severity.ERROR)]},
    "onnx-host-side": {"model.onnx": []},
    "onnx-identity-262144": {"model.onnx": [RAW]},  # the lookup alone
    "onnx-right": {"model.onnx": []},
    "onnx-vision": {"model.onnx": []},
    "coreml-two-stage": {"stage_1.mlpackage": []},  # its per-layer inputs come from the first stage
    "coreai-two-stage": {
        # What the later stage is handed are no embeddings.
        "stage_1.aimodel": [
            ("later-stage-projection", Severity.WARNING),
            RAW,
            ("splice-misses-rows", Severity.WARNING),
        ],
    },
}
NAMES = sorted(path.parent.name for path in SAMPLES.glob("*/config.json"))


def said(report: Report) -> dict[str, list[tuple[str, Severity]]]:
    return {
        (path.name if path == report.path else path.relative_to(report.path).as_posix()): sorted(
            (found.rule, found.severity) for found in model.findings
        )
        for model in report.models
        for path in [model.subject.model.path]
    }


@pytest.mark.parametrize("name", NAMES)
def test_findings(name: str) -> None:
    functions = 2 if name.endswith("multifunction") else 1
    stage = sorted(finding for finding in STAGE for _ in range(functions))
    paths = [path.relative_to(SAMPLES / name).as_posix() for path in models(SAMPLES / name)]
    assert said(check(sample(name))) == {**dict.fromkeys(paths, stage), **EXPECTED.get(name, {})}


def test_the_table_names_samples() -> None:
    assert EXPECTED.keys() <= set(NAMES)


# One of each format with both faults; the others of a format are edited by the same code.
SLOW = pytest.mark.slow
BOTH = ["onnx-fp16", pytest.param("coreml-cast16", marks=SLOW), pytest.param("coreai-stage", marks=SLOW)]
RULES = ("ple-raw-ids", "splice-misses-rows")


def one(rule: str) -> Options:
    return Options(select=frozenset({rule}))


def shape_of(graph: Graph) -> Counter[Any]:
    """Every node by what it computes, whatever values are called that are no inputs or weights."""
    computed: dict[str, Any] = {}

    def what(name: str) -> Any:
        if name in computed:
            return computed[name]
        constant = graph.constants.get(name)
        # A constant that an edit brings along has a name of its own; it is told by its value.
        return name if constant is None else (str(constant.dtype), constant.shape, constant.tobytes())

    nodes: Counter[Any] = Counter()
    for node in graph.nodes:
        operands = tuple((key, what(name)) for key, name in sorted(node.operands.items()))
        nature = hash((node.op, node.native, repr(sorted(node.attributes.items())), operands))
        nodes[nature] += 1
        computed.update((output, (nature, number)) for number, output in enumerate(node.outputs))
    nodes.update(("output", what(name)) for name in graph.outputs)
    return nodes


def shapes(bundle: Path) -> list[Counter[Any]]:
    return [shape_of(analysis.graph) for analysis in engine.open_model(bundle).analyses]


@pytest.fixture
def bundle(request: pytest.FixtureRequest, copy: Copy) -> Path:
    """A sample without its reference, which fails, as it should, while one fault of two is left."""
    path = copy(request.param)
    path.with_name(f"{path.name}.reference.safetensors").unlink()
    return path


def mend(bundle: Path, options: Options) -> None:
    assert fix(bundle, options).publication is not None
    assert fix(bundle, options).publication is None  # idempotent


@pytest.mark.parametrize("bundle", BOTH, indirect=True)
def test_fixes_in_any_order_give_the_same_graph_and_are_undone_one_by_one(bundle: Path) -> None:
    original = tree(bundle.parent)
    mend(bundle, Options())
    together = shapes(bundle)
    assert said(check(bundle)) == {bundle.name: []}
    revert(bundle)
    assert tree(bundle.parent) == original
    for first, second in (RULES, RULES[::-1]):
        mend(bundle, one(first))
        between = tree(bundle.parent)
        mend(bundle, one(second))
        assert shapes(bundle) == together
        revert(bundle)
        assert tree(bundle.parent) == between
        revert(bundle)
        assert tree(bundle.parent) == original


@pytest.mark.parametrize("bundle", BOTH, indirect=True)
def test_a_plan_for_the_splice_alone_leaves_the_lookup_alone(bundle: Path) -> None:
    """With `--select splice-misses-rows` the lookup must read what it read: a file in which it does not is refused."""
    report = check(bundle)
    model, both = report.subject.model, report.plan
    alone = Plan(tuple(edit for edit in both.graph_edits if edit.rule == RULES[1]))
    for written, wrong in ((alone, set()), (both, {"structure", "row map", "differential"})):
        staged = {target: target.with_name(f"{len(written.edits)} {target.name}") for target in model.replaced}
        formats.of(model).write(model, written, staged)
        checks = verify.verify_patch(report.subject, engine.open_model(bundle, staged=staged), alone)
        assert {found.name for found in checks if found.status is Status.FAILED} == wrong
