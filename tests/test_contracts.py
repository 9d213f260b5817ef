"""What models of a bundle hand each other: faults put into bundles that are right are named, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from coremltools.proto import MIL_pb2, Model_pb2
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from g4patch import check, engine, fix
from g4patch.downstream import Numbers, follow
from g4patch.errors import BundleError
from g4patch.report import Finding, Outcome, Subject
from g4patch.verdicts import Verdict
from g4patch.view import Value
from g4patch.wiring import Handover, between_stages
from tests import apple_runtime
from tests.conftest import SAMPLES, tree

SIDECAR = "stage_ple.safetensors"


def said(folder: Path, rule: str) -> list[Finding]:
    return [finding for finding in check(folder).findings if finding.rule == rule]


@pytest.fixture
def host_ple(tmp_path: Path) -> Path:
    """A stage with its sidecar, which agree."""
    folder = tmp_path / "bundle"
    shutil.copytree(SAMPLES / "host-ple", folder)
    return folder


def restate(folder: Path, **stated: str | None) -> None:
    """State other numbers in the sidecar, or none: the graph then has the wrong ones."""
    with safe_open(folder / SIDECAR, framework="np") as file:
        metadata = {**file.metadata(), **stated}
    tensors = load_file(folder / SIDECAR)
    save_file(tensors, folder / SIDECAR, {key: text for key, text in metadata.items() if text is not None})


def stated_scale(folder: Path) -> float:
    with safe_open(folder / SIDECAR, framework="np") as file:
        return float(file.metadata()["ple_scale"])


def test_the_sample_agrees_and_its_media_rows_are_mended(host_ple: Path) -> None:
    before = tree(host_ple)
    assert said(host_ple, "sidecar-contract") == []
    report = fix(host_ple)
    assert report.outcome is Outcome.FIXED
    verdicts = {model.subject.model.path.name: model.subject.verdict for model in check(host_ple).models}
    assert verdicts == {"stage.aimodel": Verdict.HOST_SIDE, SIDECAR: Verdict.PATCHED}
    assert {path for path, digest in tree(host_ple).items() if before.get(path) != digest and path in before} == {
        SIDECAR
    }


def test_the_graph_dequantises_with_the_scale_of_the_file(host_ple: Path) -> None:
    """As float16 rounds it, and with the zero point that the module subtracts."""
    (analysis,) = engine.open_model(host_ple / "stage.aimodel").analyses
    assert analysis.host_inputs == ("ple_embeddings",)
    found = follow(analysis.graph, "ple_embeddings", 24).summed
    assert found == Numbers(float(np.float16(stated_scale(host_ple))), 0.0)


def off_by(factor: float) -> Callable[[Path], None]:
    return lambda folder: restate(folder, ple_scale=str(stated_scale(folder) / factor))


def other_table(rows: NDArray[Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with safe_open(folder / SIDECAR, framework="np") as file:
            save_file({"embed_tokens_per_layer": rows}, folder / SIDECAR, file.metadata())

    return write


def metadata(name: object, place: str = "auxiliary_assets") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content = json.loads((folder / "metadata.json").read_text())
        del content["auxiliary_assets"]
        content[place] = {"per_layer_embeddings": name}
        (folder / "metadata.json").write_text(json.dumps(content))

    return write


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "twice": (off_by(8**0.5), "sqrt(8) is applied twice"),
    "not applied": (off_by(8**-0.5), "sqrt(8) is not applied"),
    "another scale": (off_by(1.003), "frozen for another table"),
    "embed scale": (lambda folder: restate(folder, embed_scale="1"), "sqrt(8) is not applied"),
    "zero point": (lambda folder: restate(folder, ple_zero_point="-3"), "states ple_zero_point -3"),
    "width": (other_table(np.ones((320, 32), np.int8)), "the sidecar is off, the configuration says 3 layers of 8"),
    "dtype": (other_table(np.ones((320, 24), np.float16)), "are float16"),
    "signed": (other_table(np.ones((320, 24), np.uint8)), "are uint8"),
    "lost": (lambda folder: (folder / SIDECAR).unlink(), f"names {SIDECAR}"),
    "renamed": (metadata("other_ple.safetensors"), "names other_ple.safetensors"),
    "older place": (metadata("other_ple.safetensors", "assets"), "names other_ple.safetensors"),
    "a name that is too long": (metadata("x" * 5000), "no such file"),
    "outside": (metadata(f"../{SIDECAR}"), f"names ../{SIDECAR}"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, host_ple: Path) -> None:
    harm, words = FAULTS[name]
    shutil.copy(host_ple / SIDECAR, host_ple.parent)  # outside of the bundle it is of no use
    harm(host_ple)
    (finding,) = said(host_ple, "sidecar-contract")
    assert words in finding.message
    assert finding.edits == ()
    assert check(host_ple).exit_code == 1


def without_embed_scale(folder: Path) -> None:
    restate(folder, embed_scale=None)


def not_folded(folder: Path) -> None:
    """What the graph multiplies by is ple_scale * sqrt(8), and nothing says that ple_scale has sqrt(8) in it."""
    restate(folder, embed_scale=None, ple_scale=str(stated_scale(folder) / 8**0.5))


def without_scale(folder: Path) -> None:
    restate(folder, ple_scale=None, ple_zero_point=None)


def called_otherwise(folder: Path) -> None:
    metadata(None)(folder)
    (folder / SIDECAR).rename(folder / "x_ple.safetensors")


RIGHT: dict[str, Callable[[Path], None]] = {
    # With what float16 makes of the graph's number, still within two roundings.
    "rounded": off_by(1.0003),
    "embed_scale not stated": without_embed_scale,
    "sqrt(D) not folded": not_folded,
    "nothing stated": without_scale,
    "metadata that names no file": metadata({"file": "other_ple.safetensors"}),
    "no metadata": lambda folder: (folder / "metadata.json").unlink(),
    "called otherwise": called_otherwise,
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_or_not_known_is_not_named(name: str, host_ple: Path) -> None:
    RIGHT[name](host_ple)
    assert said(host_ple, "sidecar-contract") == []


def test_one_of_several_tables(host_ple: Path) -> None:
    """The one that is called after the model counts; of others nobody knows which is meant."""
    metadata(None)(host_ple)
    other_table(np.ones((320, 32), np.int8))(host_ple)
    shutil.copy(host_ple / SIDECAR, host_ple / "x_ple.safetensors")
    assert len(said(host_ple, "sidecar-contract")) == 1
    (host_ple / SIDECAR).rename(host_ple / "y_ple.safetensors")
    assert said(host_ple, "sidecar-contract") == []


def test_each_graph_is_compared(host_ple: Path) -> None:
    off_by(2)(host_ple)
    shutil.copytree(host_ple / "stage.aimodel", host_ple / "other.aimodel")
    assert len(said(host_ple, "sidecar-contract")) == 2
    (host_ple / SIDECAR).unlink()
    assert len(said(host_ple, "sidecar-contract")) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[("ple_scale", text) for text in ("", "x", "nan", "inf", "0", "-1", "1e999")],
        *[("embed_scale", text) for text in ("16,0", "nan", "0")],
        *[("ple_zero_point", text) for text in ("0.5", "nan", "inf", "zero")],
    ],
)
def test_numbers_that_are_none_are_refused(name: str, text: str, host_ple: Path) -> None:
    restate(host_ple, **{name: text})
    with pytest.raises(BundleError, match="is not a sidecar"):
        check(host_ple)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """mobius' package, whose models fit together."""
    folder = tmp_path / "package"
    shutil.copytree(SAMPLES / "mobius-package", folder)
    return folder


def test_what_mobius_exports_fits_together(package: Path) -> None:
    assert said(package, "stage-boundary-mismatch") == []


def graph(role: str, change: Callable[[onnx.GraphProto], None]) -> Callable[[Path], None]:
    """Change what a model declares, with onnx. Its weights stay where they are."""

    def harm(folder: Path) -> None:
        model = onnx.load(folder / role / "model.onnx", load_external_data=False)
        change(model.graph)
        onnx.save(model, folder / role / "model.onnx")

    return harm


def named(values: Sequence[onnx.ValueInfoProto], name: str) -> onnx.ValueInfoProto:
    (found,) = [value for value in values if value.name == name]
    return found


def to_half(graph: onnx.GraphProto) -> None:
    named(graph.input, "inputs_embeds").type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def to_truth_values(graph: onnx.GraphProto) -> None:
    named(graph.input, "image_features").type.tensor_type.elem_type = onnx.TensorProto.BOOL


def without_batch(graph: onnx.GraphProto) -> None:
    del named(graph.output, "per_layer_inputs").type.tensor_type.shape.dim[0]


def wider(graph: onnx.GraphProto) -> None:
    named(graph.output, "per_layer_inputs").type.tensor_type.shape.dim[2].dim_value = 32


def of_eight_rows(graph: onnx.GraphProto) -> None:
    for name in ("inputs_embeds", "per_layer_inputs"):
        named(graph.input, name).type.tensor_type.shape.dim[1].dim_value = 8


def renamed(graph: onnx.GraphProto) -> None:
    old = named(graph.output, "inputs_embeds")
    for node in graph.node:
        node.output[:] = ["embeds" if name == old.name else name for name in node.output]
        node.input[:] = ["embeds" if name == old.name else name for name in node.input]
    old.name = "embeds"


def entry(*path: str, name: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        content = json.loads((folder / "genai_config.json").read_text())
        *above, last = path
        place = content["model"]
        for key in above:
            place = place[key]
        place[last] = name
        (folder / "genai_config.json").write_text(json.dumps(content, indent=4))

    return harm


WIRED: dict[str, tuple[Callable[[Path], None], str]] = {
    "dtype": (graph("decoder", to_half), "takes inputs_embeds (float16 [?, ?, 16]): they differ in dtype"),
    "rank": (graph("embedding", without_batch), "they differ in rank"),
    "width": (graph("embedding", wider), "puts out per_layer_inputs (float32 [?, ?, 32]), and the decoder"),
    "renamed": (graph("embedding", renamed), "the embedding model has no output of that name"),
    "another name": (entry("decoder", "inputs", "inputs_embeds", name="embeds"), "the decoder model has no input"),
    "no such layer": (entry("decoder", "outputs", "present_key_names", name="present.%d.k"), "no output of that name"),
}


@pytest.mark.parametrize("name", WIRED)
def test_what_does_not_fit_is_named(name: str, package: Path) -> None:
    harm, words = WIRED[name]
    harm(package)
    (finding,) = said(package, "stage-boundary-mismatch")
    assert words in finding.message
    assert finding.edits == ()


def test_what_a_tower_puts_out_is_compared(package: Path) -> None:
    """A vision model that puts out features of its own, against an embedding model that was declared to take a mask."""
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        tower (float[N,16] pixel_values, int64[N,2] pixel_position_ids) => (float[N,16] image_features)
        { image_features = Relu(pixel_values) }
    """
    (package / "vision_encoder").mkdir()
    onnx.save(onnx.parser.parse_model(text), package / "vision_encoder" / "model.onnx")
    assert said(package, "stage-boundary-mismatch") == []
    graph("embedding", to_truth_values)(package)
    (finding,) = said(package, "stage-boundary-mismatch")
    assert "the vision model puts out image_features (float32 [?, 16])" in finding.message


@pytest.mark.parametrize(
    "harm",
    [
        graph("decoder", of_eight_rows),
        entry("decoder", "inputs", "position_ids", name="positions"),
        entry("decoder", "filename", name="elsewhere/model.onnx"),
        # The other rule says so, and mends it.
        entry("embedding", "outputs", "per_layer_inputs", name="ple"),
    ],
    ids=["a static decoder", "positions", "a model that is not here", "another rule's"],
)
def test_what_fits_or_is_not_known_is_not_named(harm: Callable[[Path], None], package: Path) -> None:
    harm(package)
    assert said(package, "stage-boundary-mismatch") == []


def unwired(folder: Path) -> None:
    """Without a configuration the models are stages, in the order of their layers."""
    (folder / "genai_config.json").unlink()


@pytest.mark.parametrize("name", ["dtype", "rank", "width"])
def test_stages_that_do_not_fit_are_named(name: str, package: Path) -> None:
    unwired(package)
    assert said(package, "stage-boundary-mismatch") == []
    WIRED[name][0](package)
    (finding,) = said(package, "stage-boundary-mismatch")
    assert f"they differ in {name}" in finding.message
    assert finding.message.startswith("embedding/model puts out")


def test_core_ml_stages_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """The second is declared to take its hidden states as float16."""
    folder = tmp_path / "bundle"
    shutil.copytree(SAMPLES / "coreml-two-stage", folder)
    assert said(folder, "stage-boundary-mismatch") == []
    file = folder / "stage_1.mlpackage" / "Data" / "com.apple.CoreML" / "model.mlmodel"
    model = Model_pb2.Model.FromString(file.read_bytes())
    (taken,) = [value for value in model.mlProgram.functions["main"].inputs if value.name == "hidden_states"]
    taken.type.tensorType.dataType = MIL_pb2.FLOAT16
    file.write_bytes(model.SerializeToString())
    (finding,) = said(folder, "stage-boundary-mismatch")
    assert "takes hidden_states (float16 [1, 8, 16]): they differ in dtype" in finding.message


def test_stages_whose_order_is_not_clear_are_not_compared(package: Path) -> None:
    unwired(package)
    graph("decoder", to_half)(package)
    shutil.copytree(package / "decoder", package / "another decoder")
    assert said(package, "stage-boundary-mismatch") == []


def test_of_several_functions_the_one_that_fits_counts(package: Path) -> None:
    """An embedding model for 8 rows and for 1, before a decoder for 1."""
    embedding, decoder = (engine.open_model(package / role / "model.onnx") for role in ("embedding", "decoder"))

    def for_rows(subject: Subject, *rows: int) -> Subject:
        (analysis,) = subject.analyses
        graph = analysis.graph
        known = {**graph.values, **{value.name: value for value in graph.inputs}}
        analyses = []
        for number in rows:
            values = {
                name: replace(value, shape=(1, number, value.shape[2]))
                if value.shape and len(value.shape) == 3
                else value
                for name, value in known.items()
            }
            inputs = tuple(values[value.name] for value in graph.inputs)
            analyses.append(replace(analysis, graph=replace(graph, values=values, inputs=inputs)))
        return replace(subject, analyses=tuple(analyses))

    def differences(*rows: int) -> list[tuple[str, ...]]:
        handed = between_stages([for_rows(embedding, *rows), for_rows(decoder, 1)])
        return [handover.differences for _, _, handover in handed]

    assert differences(8, 1) == differences(1) == [(), ()]
    assert differences(8) == [("dimension 1",), ("dimension 1",)]


@pytest.mark.parametrize(
    ("given", "taken", "differences"),
    [
        (Value("a"), Value("a", "float16", (1, 8, 16)), ()),
        (Value("a", "bool", (1, 8)), Value("a", "float16", None), ("dtype",)),
        (Value("a", "int8", (None, 8, 16)), Value("a", "int8", (1, None, 16)), ()),
        (Value("a", None, (1, 8, 16)), Value("a", "int8", (2, 8, 24)), ("dimension 0", "width")),
        (Value("a", "int8", (8, 16)), Value("a", "uint8", (1, 8, 16)), ("dtype", "rank")),
    ],
)
def test_two_ends(given: Value, taken: Value, differences: tuple[str, ...]) -> None:
    assert Handover("one", given, "the other", taken).differences == differences


def test_the_mended_sample_computes_what_hugging_face_does(host_ple: Path) -> None:
    """On Apple's runtime, by a host that looks raw ids up; the numbers lie beside another sample of this model."""
    tensors = load_file(SAMPLES / "coreai-multifunction" / "stage.aimodel.reference.safetensors")
    given, right = ("media, 8 rows/input/", "media, 8 rows/expected/")
    ids = tensors[f"{given}input_ids"]
    identity, wanted = tensors[f"{right}per_layer_identity"], tensors[f"{right}hidden_states_out"]
    media = np.isin(ids[0], [310, 311, 314])
    assert 0 < media.sum() < len(media)

    def rows() -> NDArray[np.int8]:
        codes: NDArray[np.int8] = load_file(host_ple / SIDECAR)["embed_tokens_per_layer"][ids]
        return codes

    def off() -> NDArray[np.float32]:
        """By row: how far the identity is off, in steps of the codes, and the stage's output."""
        steps = np.abs(rows() - identity.reshape(rows().shape) / stated_scale(host_ple)).max(2)[0]
        feeds: dict[str, NDArray[Any]] = {
            "hidden_states": tensors[f"{given}hidden_states"].astype(np.float16),
            "ple_embeddings": rows(),
            "position_ids": tensors[f"{given}position_ids"].astype(np.int32),
        }
        output = apple_runtime.whole(host_ple / "stage.aimodel", feeds)
        return np.stack([steps, np.abs(output - wanted).max(2)[0]])

    # Codes are rounded to half a step. For the output the bound of the float16 samples: half a step is 6e-3 more.
    half_step, bound = 0.5 + 1e-4, 2e-1
    raw = off()
    assert (raw[0] <= half_step).tolist() == (~media).tolist()
    assert raw[1, media].min() > bound
    fix(host_ple)
    mended = off()
    assert mended[0].max() <= half_step
    assert mended[1].max() <= bound
