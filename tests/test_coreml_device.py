"""`verify --compute-unit`: which package, function and unit Core ML is asked for, and what is made of its answers.

Core ML runs on a Mac only. Here a stand-in answers in its place; that coremltools can be asked in this way is checked
against the signatures of its own class.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import coremltools as ct
import numpy as np
import pytest
from coremltools.models.model import MLState

from g4patch import Options, engine, fix, verify_bundle
from g4patch.cli import main
from g4patch.formats import coreml
from g4patch.report import Check, Status
from g4patch.runtimes import Unavailable
from g4patch.runtimes.coreml import CoreMLDevice
from tests.conftest import SAMPLES, Copy, numbers, sample
from tests.test_coreml_format import in_a_row

REAL = ct.models.MLModel


class StandIn:
    """Answers as the interpreter of MIL does, and takes nothing that coremltools' own class would not take."""

    asked: ClassVar[list[tuple[str, str | None]]] = []
    error = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = inspect.signature(REAL.__init__).bind(self, *arguments, **named).arguments
        self.asked.append((given["compute_units"].name, given["function_name"]))
        model = coreml.open_model(Path(given["model"]))
        graph = given["function_name"] or model.graphs[-1].name
        self.graph = next(found for found in model.graphs if found.name == graph)
        self.probe = coreml.probe(model, graph)
        self.has_states = any(node.native == "read_state" for node in self.graph.nodes)
        self.state: dict[str, Any] = {}

    def make_state(self) -> StandIn:
        inspect.signature(REAL.make_state).bind(self)
        assert self.has_states
        return self

    def write_state(self, *arguments: Any, **named: Any) -> None:
        given = inspect.signature(MLState.write_state).bind(self, *arguments, **named).arguments
        self.state[given["name"]] = given["value"]

    def predict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        given = inspect.signature(REAL.predict).bind(self, *arguments, **named).arguments
        if self.error:
            raise RuntimeError(self.error)
        assert given["state"] is (self if self.has_states else None)
        return self.probe.run({**given["data"], **self.state}, self.graph.outputs)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """A Mac as far as the check sees; returns what Core ML is asked for."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ct.models, "MLModel", StandIn)
    monkeypatch.setattr(StandIn, "asked", [])
    return StandIn.asked


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(SAMPLES / "coreml-fp32", tmp_path_factory.mktemp("device") / "coreml-fp32")
    fix(folder / "stage.mlpackage")
    return folder / "stage.mlpackage"


def device(bundle: Path, unit: str = "cpu") -> Check:
    report = verify_bundle(bundle, Options(compute_unit=unit))
    (found,) = [check for check in report.checks if check.name == "device"]
    return found


@pytest.mark.parametrize(
    ("unit", "asked", "said"),
    [
        ("cpu", "CPU_ONLY", "the CPU"),
        ("gpu", "CPU_AND_GPU", "CPU and GPU"),
        ("ane", "CPU_AND_NE", "CPU and Neural Engine"),
        ("all", "ALL", "all units"),
    ],
)
def test_the_unit_that_was_asked_for(
    unit: str, asked: str, said: str, mended: Path, mac: list[tuple[str, str | None]]
) -> None:
    found = device(mended, unit)
    assert found.status is Status.PASSED
    assert found.summary.startswith("3 outputs on Core ML")
    assert said in found.summary
    assert mac == [(asked, None)] * 3


def test_a_broken_bundle_fails(mac: list[tuple[str, str | None]]) -> None:
    found = device(sample("coreml-fp32"))
    assert found.status is Status.FAILED
    assert "hidden_states_out" in found.summary


@pytest.mark.parametrize(
    ("name", "functions"), [("coreml-multifunction", {"prefill", "decode"}), ("coreml-state", {None})]
)
def test_functions_and_states(name: str, functions: set[str | None], mac: list[tuple[str, str | None]]) -> None:
    device(sample(name))
    assert {function for _, function in mac} == functions


def test_states_start_with_what_is_fed_to_them(mac: list[tuple[str, str | None]]) -> None:
    model = coreml.open_model(sample("coreml-state"))
    inputs, _ = numbers(sample("coreml-state"))
    inputs["position_ids"] += 8  # behind 8 rows that the states hold
    asked = coreml.device(model, "main", "cpu")
    assert isinstance(asked, CoreMLDevice)
    draw = np.random.default_rng(1).standard_normal
    shapes = {value.name: tuple(size or 0 for size in value.shape or ()) for value in model.graphs[0].inputs}
    states = {name: draw(shapes[name]) for name in asked.states}
    assert len(states) == 4  # keys and values of two layers
    found = asked.run({**inputs, **states})["hidden_states_out"]
    expected = coreml.probe(model, "main").run({**inputs, **states}, ["hidden_states_out"])["hidden_states_out"]
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, asked.run(inputs)["hidden_states_out"])


def test_a_pipeline_shows_what_comes_out_at_its_end(copy: Copy, mac: list[tuple[str, str | None]]) -> None:
    package = copy("coreml-fp32")
    in_a_row(package)
    model = coreml.open_model(package)
    shown = {graph.name: coreml.device(model, graph.name, "cpu").outputs for graph in model.graphs}
    assert shown == {"part0/main": (), "part1/main": ("last",)}
    inputs, _ = numbers(sample("coreml-fp32"))
    found = coreml.device(model, "part1/main", "cpu").run(inputs)
    assert np.array_equal(found["last"], coreml.probe(model, "part1/main").run(inputs, ["last"])["last"])


def test_what_core_ml_refuses_has_not_passed(
    mended: Path, mac: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "error", "Error compiling model\nat length")
    found = device(mended)
    assert found.status is Status.FAILED
    assert found.summary.endswith("the CPU: Error compiling model")


def test_without_a_reference_there_is_nothing_to_compare(
    mended: Path, mac: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    alone = shutil.copytree(mended, tmp_path / mended.name)
    shutil.copy(mended.parent / "config.json", tmp_path)
    assert device(alone).status is Status.SKIPPED
    assert not mac


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML runs here")
@pytest.mark.parametrize(("name", "reason"), [("coreml-fp32", "on a Mac only"), ("onnx-right", "ONNX has no runtime")])
def test_elsewhere_it_is_skipped_and_can_be_required(name: str, reason: str) -> None:
    found = device(sample(name))
    assert found.status is Status.SKIPPED
    assert reason in found.summary
    assert main(["verify", str(sample("onnx-right")), "--compute-unit", "ane", "--require", "device"]) == 4
    assert main(["verify", str(sample("onnx-right")), "--require", "device"]) == 4  # nobody asked for it


def test_only_packages_as_they_stand(mended: Path) -> None:
    model = engine.open_model(mended).model
    with pytest.raises(Unavailable, match="as they stand"):
        coreml.device(replace(model, graph_file=Path("staged")), "main", "cpu")


def test_inputs_are_not_made_up(mac: list[tuple[str, str | None]]) -> None:
    asked = CoreMLDevice(sample("coreml-fp32"), None, {"input_ids": "int32"}, {}, (), "cpu")
    with pytest.raises(Unavailable, match="a run needs input_ids"):
        asked.run({})
    assert not mac
