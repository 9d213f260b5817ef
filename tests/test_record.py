"""`g4patch record`: what it stores is what Hugging Face's own code computes when it is called in other ways."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from g4patch.cli import main
from g4patch.errors import BundleError, UsageError
from g4patch.metrics import distance
from g4patch.record import parse_ids, parse_stages, tolerances
from g4patch.record.picture import SIZE, draw
from g4patch.record.stream import Spec, float32, spec_of, streaming
from g4patch.reference import load
from tests.conftest import SAMPLES, needs_build_python

Arrays = dict[str, NDArray[Any]]

ROOT = SAMPLES.parent
LAYERS = 4  # of the models in tests/hugging_face_models.py


@pytest.fixture(scope="module")
def recorded(build_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tests/hugging_face_models.py leaves."""
    folder = tmp_path_factory.mktemp("record")
    subprocess.run(
        [build_python, "-m", "tests.hugging_face_models", folder], cwd=ROOT, check=True, stderr=subprocess.DEVNULL
    )
    return folder


def outcome(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())[name]
    return found


def metadata(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="np") as file:
        found: dict[str, Any] = json.loads(file.metadata()["g4patch"])
    return found


def same(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """The same torch on the same machine, by another way: at most the order of a sum differs."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_build_python
class TestRecorded:
    @pytest.mark.parametrize("run", ["media", "without media", "text"])
    def test_is_what_the_model_computes(self, run: str, recorded: Path) -> None:
        """Spliced by hand and handed in as embeddings, with `output_hidden_states`."""
        tensors, expected = load_file(recorded / "plain.safetensors"), np.load(recorded / "plain.npz")
        for name in ("per_layer_identity", "per_layer_inputs", "logits", *(f"hidden_states.{k}" for k in (0, 1, 3))):
            same(tensors[f"{run}/expected/{name}"], expected[f"{run}/{name}"])
        same(tensors[f"{run}/input/hidden_states"], expected[f"{run}/spliced"])
        same(expected[f"{run}/recorded, normed"], expected[f"{run}/normed"])
        boundaries = {name for name in tensors if name.startswith(f"{run}/expected/hidden_states.")}
        assert len(boundaries) == 4  # 0, 1, 3 and after the last
        assert tensors[f"{run}/expected/hidden_states.{LAYERS}"].std() > 0.1

    def test_twins_differ_in_the_media_rows_of_the_embeddings_alone(self, recorded: Path) -> None:
        tensors = load_file(recorded / "plain.safetensors")
        ids, twins = (tensors[f"{run}/input/input_ids"] for run in ("media", "without media"))
        assert (ids == twins).all()
        token_ids = metadata(recorded / "plain.safetensors")["token_ids"]
        is_media = np.isin(ids[0], [token_ids[name] for name in ("image", "audio", "video")])
        assert is_media.sum() == 5
        with_media, without = (tensors[f"{run}/input/hidden_states"][0] for run in ("media", "without media"))
        assert (with_media != without).any(axis=1).tolist() == is_media.tolist()
        pad = without[ids[0] == token_ids["pad"]][0]
        assert (without[is_media] == pad).all()
        identities = [tensors[f"{run}/expected/per_layer_identity"] for run in ("media", "without media")]
        assert (identities[0] == identities[1]).all()
        assert not any("features" in name for name in tensors if name.startswith(("without", "text")))

    def test_continuation_is_the_models_own(self, recorded: Path) -> None:
        """By argmax and without a cache; the twin keeps it."""
        tensors, expected = load_file(recorded / "plain.safetensors"), np.load(recorded / "plain.npz")
        for run in ("media", "text"):
            about = metadata(recorded / "plain.safetensors")["runs"][run]
            assert about["steps"] == 6
            ids, logits = tensors[f"{run}/input/input_ids"][0], tensors[f"{run}/expected/logits"][0]
            assert ids[about["prompt"] :].tolist() == expected[f"{run}/greedy"].tolist()
            assert logits[about["prompt"] - 1 : -1].argmax(axis=1).tolist() == expected[f"{run}/greedy"].tolist()

    @pytest.mark.parametrize("name", ["ends at eos", "ends at media"])
    def test_continuation_ends_before_what_ends_it(self, name: str, recorded: Path) -> None:
        about = metadata(recorded / f"{name}.safetensors")["runs"]
        assert about == {"text": {"prompt": 7, "steps": 2, "media": []}}

    def test_says_what_it_is_of(self, recorded: Path) -> None:
        said = metadata(recorded / "plain.safetensors")
        assert said["layers"] == LAYERS
        assert said["stages"] == [[0, 1], [1, 3], [3, 4]]
        assert said["runs"]["media"]["without_media"] == "without media"
        assert said["runs"]["media"]["media"] == ["image", "audio", "video"]
        assert said["source"]["model"] == "plain"
        assert said["source"]["transformers"]
        assert "random" in said["image"]
        assert load(recorded / "plain.safetensors").token_ids == said["token_ids"]

    def test_sizes_are_told_first(self, recorded: Path) -> None:
        """The file holds what was foretold, and a header."""
        stderr, path = outcome(recorded, "picture")["stderr"], recorded / "picture.safetensors"
        foretold = sum(tensor.nbytes for tensor in load_file(path).values())
        assert f"will take up to {foretold / 1000:.0f} KB" in stderr
        assert foretold < path.stat().st_size < foretold + 20_000

    def test_picture_goes_through_the_models_own_tower(self, recorded: Path) -> None:
        """One image id stands for all rows of the picture, as in Hugging Face's processors."""
        tensors, expected = load_file(recorded / "picture.safetensors"), np.load(recorded / "picture.npz")
        same(tensors["media/input/image_features"], expected["features"])
        same(tensors["media/expected/logits"], expected["logits"])
        assert metadata(recorded / "picture.safetensors")["image"].startswith("two.png, SHA-256 ")

    def test_prompt_goes_through_the_processor(self, recorded: Path) -> None:
        """Our drawing, a recording and text, in the order and with the markers that the processor gives them."""
        tensors, expected = load_file(recorded / "processor.safetensors"), np.load(recorded / "processor.npz")
        said = metadata(recorded / "processor.safetensors")
        ids, prompt = tensors["media/input/input_ids"], expected["prompt"]
        assert (ids[:, : prompt.shape[1]] == prompt).all()
        same(tensors["media/expected/logits"], expected["logits"])
        assert said["runs"]["media"]["media"] == ["image", "audio"]
        assert "red square" in said["image"]
        assert said["audio"].startswith("tone.wav, SHA-256 ")
        assert tensors["text/input/input_ids"][0, : said["runs"]["text"]["prompt"]].tolist() == [2, 10, 11, 12]

    def test_checkpoint_without_turns_or_towers(self, recorded: Path) -> None:
        assert metadata(recorded / "no turns.safetensors")["runs"]["media"]["media"] == ["image"]
        assert list(metadata(recorded / "no media.safetensors")["runs"]) == ["text"]

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("no such folder", "is no folder"),
            ("not Gemma 4", "is a llama model"),
            ("no processor", "pass token ids with --ids"),
            ("id beyond", "320 is no token id"),
            ("audio with ids", "--audio cannot be used with --ids"),
            ("picture without a tower", "has no vision tower"),
            ("wrong number of image ids", "--ids 2 image ids"),
            ("no tower", "has no vision tower"),
            ("stereo", "has 2 channels"),
            ("not a picture", "is not a picture"),
            ("split too short", "ends at layer 3"),
            ("no per-layer embeddings", "has no per-layer embeddings"),
            ("weight missing", "lacks weights: model.language_model.per_layer_model_projection.weight"),
            ("NaN", "holds NaN"),
        ],
    )
    def test_refusals(self, name: str, reason: str, recorded: Path) -> None:
        found = outcome(recorded, name)
        assert (found["code"], found["stdout"]) == (2, "")
        assert reason in found["stderr"]
        assert "Traceback" not in found["stderr"]
        assert not list(recorded.glob(f"*{name}.safetensors*"))

    def test_tolerances_grow_with_what_computes(self, recorded: Path) -> None:
        """bfloat16 rounds 8 times as much as float16, which rounds 8192 times as much as float32."""
        bounds = {name: load(recorded / f"{name}.safetensors").tolerances for name in ("plain", "float16", "bfloat16")}
        for name in ("per_layer_identity", "per_layer_inputs", f"hidden_states.{LAYERS}", "logits"):
            fine, coarse, coarser = (bounds[kind][name].max_abs for kind in ("plain", "float16", "bfloat16"))
            assert 0 < fine < coarse / 500 < coarser / 1000
        assert all(bound.reason for bound in bounds["plain"].values())

    @pytest.mark.parametrize("precision", ["float32", "float16"])
    def test_tolerances_let_pass_what_only_rounds(self, precision: str, recorded: Path) -> None:
        """35 layers: the model itself in float64, and in float16, where errors have grown to a share of the values."""
        name = f"deep {precision}"
        reference, computed = load(recorded / f"{name}.safetensors"), np.load(recorded / f"{name}.npz")
        (run,) = (run for run in reference.runs if run.name == "media")
        for name in computed.files:
            found, bound = distance(computed[name], run.expected[name]), reference.tolerances[name]
            assert found.max_abs <= bound.max_abs
            assert abs(found.norm_ratio - 1) <= bound.norm_ratio
            assert name == "hidden_states.0" or found.max_abs > bound.max_abs / 100

    def test_tolerances_tell_right_from_wrong(self, recorded: Path) -> None:
        """The samples' right and broken stage, run whole, against a reference of the model that they were made of."""
        reference = load(recorded / "sample.safetensors")
        (run,) = (run for run in reference.runs if run.name == "media")
        name = "hidden_states.3"
        off = {}
        for sample in ("onnx-right", "onnx-stage"):
            session = onnxruntime.InferenceSession(SAMPLES / sample / "model.onnx", providers=["CPUExecutionProvider"])
            feeds = {item.name: run.inputs[item.name] for item in session.get_inputs()}
            feeds = {
                key: value if value.dtype == np.float32 else value.astype(np.int64) for key, value in feeds.items()
            }
            (found,) = session.run(["hidden_states_out"], feeds)
            off[sample] = float(np.abs(found - run.expected[name]).max())
        assert off["onnx-right"] <= reference.tolerances[name].max_abs < off["onnx-stage"] / 1000


REFERENCE = "model.onnx.reference.safetensors"


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["record", "--hf", "google/gemma-4-E2B-it", "-o", str(tmp_path / "ref")]) == 2
    assert "pip install 'g4patch[reference]'" in capsys.readouterr().err


def test_drawing() -> None:
    """A colour at a place that each shape alone covers."""
    picture = draw()
    assert picture.shape == (SIZE, SIZE, 3)
    places = {(40, 120): (255, 0, 0), (84, 252): (0, 0, 255), (300, 168): (255, 255, 0), (160, 160): (255, 255, 255)}
    assert {place: tuple(picture[place]) for place in places} == places
    assert tuple(picture[0, SIZE - 1]) == (64, 64, 64)


def test_ids(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("[2, 7,\n258880]\n")
    assert parse_ids("2,7,258880") == parse_ids("2 7 258880") == parse_ids(str(tmp_path / "ids")) == (2, 7, 258880)
    assert len(parse_ids(",".join(["7"] * 5000))) == 5000
    for text in ("", "x,y", "2,x", str(tmp_path)):
        with pytest.raises(UsageError, match="--ids"):
            parse_ids(text)


def test_stages() -> None:
    assert parse_stages("0:21,21:42") == ((0, 21), (21, 42))
    for text in ("", "0:21,22:42", "1:21", "0:0", "0-21", "0:21;21:42", "0:21,21:20"):
        with pytest.raises(UsageError, match="--split"):
            parse_stages(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hf", "x", "--ids", "7", "--prompt", "y"], "--prompt and --ids"),
        (["--hf", "x", "--steps", "-1"], "--steps is -1"),
        (["--hf", "x", "--image-token-id", "7"], "--image-token-id changes nothing"),
        (["--from-npz", "x", "--prompt", "y"], "--prompt changes nothing"),
        (["--from-npz", "x"], "x makes no reference"),
    ],
)
def test_usage(arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", *arguments, "-o", str(tmp_path / "ref")]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def bundles_reference() -> tuple[Arrays, dict[str, Any]]:
    path = SAMPLES / "onnx-stage" / REFERENCE
    return load_file(path), metadata(path)


def npz(folder: Path, tensors: Arrays, said: object = None) -> Path:
    extra = {} if said is None else {"g4patch": np.array(json.dumps(said))}
    np.savez(folder / "given.npz", **{**tensors, **extra})  # type: ignore[arg-type]
    return folder / "given.npz"


def test_tensors_of_someone_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The samples' own numbers, out and in again; the flags win over what the file says."""
    tensors, said = bundles_reference()
    out = tmp_path / "ref"
    given = npz(tmp_path, tensors, said)
    assert main(["record", "--from-npz", str(given), "-o", str(out), "--video-token-id", "5"]) == 0
    assert "media" in capsys.readouterr().out
    found = load_file(out)
    assert found.keys() == tensors.keys()
    assert all((found[name] == tensor).all() and found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    assert load(out).token_ids == {**said["token_ids"], "video": 5}
    assert metadata(out)["tolerances"] == said["tolerances"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_rows_need_no_tolerances(tmp_path: Path) -> None:
    """4 roundings of the largest value: by hand."""
    tensors = {
        "a/input/input_ids": np.array([[7, 258880]]),
        "a/expected/per_layer_identity": np.full((1, 2, 1, 1), 2.5),
    }
    for precision, rounding in (("float32", 2.0**-24), ("float16", 2.0**-11)):
        out = tmp_path / precision
        given = npz(tmp_path, tensors)
        assert main(["record", "--from-npz", str(given), "-o", str(out), "--precision", precision]) == 0
        reference = load(out)
        assert reference.tolerances["per_layer_identity"].max_abs == pytest.approx(4 * 2.5 * rounding)
        assert reference.token_ids == {"image": 258880, "audio": 258881, "video": 258884, "pad": 0}


Change = Callable[[Arrays, dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors, said: tensors.clear(), "there are no tensors"),
        (lambda tensors, said: tensors.update({"stray": np.zeros(1)}), "makes no reference"),
        (lambda tensors, said: tensors.update({"a/b/c": np.zeros(1)}), "neither an input nor expected"),
        (lambda tensors, said: tensors.update({"a/input/c": np.array(["x"])}), "a/input/c: it is <U1"),
        (lambda tensors, said: tensors.update({"a/input/c": np.array([None])}), "makes no reference"),
        (lambda tensors, said: tensors["media/expected/per_layer_inputs"].fill(np.nan), "holds NaN"),
        (lambda tensors, said: said.update(schema=2), "schema"),
        (lambda tensors, said: said.update(model="perfect"), "neither right nor broken"),
        (lambda tensors, said: said["tolerances"].pop("hidden_states_out"), "no tolerance for hidden_states_out"),
        (lambda tensors, said: said.update(tolerances=3), "no JSON object"),
        (lambda tensors, said: said.update(token_ids=[1]), "makes no reference"),
    ],
)
def test_tensors_that_make_no_reference(
    change: Change, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, said = bundles_reference()
    change(tensors, said)
    assert main(["record", "--from-npz", str(npz(tmp_path, tensors, said)), "-o", str(tmp_path / "ref")]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["given.npz"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"junk", b"\x93NUMPY"])
def test_files_that_are_no_npz(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.npz").write_bytes(content)
    assert main(["record", "--from-npz", str(tmp_path / "given.npz"), "-o", str(tmp_path / "ref")]) == 2
    assert "makes no reference" in " ".join(capsys.readouterr().err.split())


def test_what_is_there_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ref"
    out.write_text("mine")
    given = npz(tmp_path, *bundles_reference())
    for arguments in (["--from-npz", str(given)], ["--from-npz", str(given), "-o", str(tmp_path / "no" / "ref")]):
        assert main(["record", "-o", str(out), *arguments]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "exists already" in said
    assert "cannot be written" in said
    assert out.read_text() == "mine"


METADATA = {"schema": 1, "model": "right", "token_ids": {"pad": 0}, "tolerances": {}}


def silent(what: str, done: int, total: int) -> None:
    pass


def test_streamed_in_any_order_and_read_by_the_library(tmp_path: Path) -> None:
    """Elements of several widths, a scalar, and a tensor of no elements."""
    tensors: Arrays = {
        "a/input/half": np.arange(3, dtype=np.float16),
        "a/input/ids": np.array([[1, -2]], np.int64),
        "a/input/none": np.zeros((0, 3), np.float32),
        "a/input/rows": np.arange(24, dtype=">f4").reshape(2, 3, 4)[:, ::2],
        "a/input/scalar": np.array(7, np.int32),
    }
    done: list[tuple[int, int]] = []
    specs = {name: spec_of(array) for name, array in tensors.items()}
    with streaming(tmp_path / "ref", specs, METADATA, lambda _, part, whole: done.append((part, whole))) as stream:
        for name in reversed(tensors):
            stream.write(name, tensors[name])
        stream.finish(METADATA)
    found = load_file(tmp_path / "ref")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert (found[name] == tensor).all()
    assert done[-1] == (6 + 16 + 64 + 4, 6 + 16 + 64 + 4)
    assert [run.name for run in load(tmp_path / "ref").runs] == ["a"]


def test_a_stream_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    specs: dict[str, Spec] = {"a/input/x": float32(2), "a/input/y": float32(2)}
    half: Arrays = {"a/input/x": np.zeros(2)}

    def write(tensors: Arrays) -> None:
        with streaming(tmp_path / "ref", specs, METADATA, silent) as stream:
            for name, array in tensors.items():
                stream.write(name, array)
            stream.finish(METADATA)

    with pytest.raises(BundleError, match="NaN"):
        write({"a/input/x": np.array([1, np.inf])})
    with pytest.raises(AssertionError, match="not written"):
        write(half)
    with pytest.raises(AssertionError, match="is \\(3,\\)"):
        write({"a/input/x": np.zeros(3)})
    with pytest.raises(KeyboardInterrupt), streaming(tmp_path / "ref", specs, METADATA, silent):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_room_for_tolerances_is_enough() -> None:
    """The longest that a tolerance is written with fits into the room left for it."""
    for precision in tolerances.PRECISIONS.values():
        for bound in (tolerances.of_nudge(1.7e300, 1.2345e300, precision),
                      tolerances.of_rounding("per_layer_identity", 1.2345e-300, precision)):  # fmt: skip
            assert len(json.dumps({"hidden_states.1000": vars(bound)}).replace('"', '\\"')) < 512
