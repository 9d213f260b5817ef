"""Where token ids come from, and what happens when sources disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g4patch.errors import BundleError, UsageError
from g4patch.tokens import FLAG, GEMMA4, TokenFlags, resolve

CONFIG = {
    "image_token_id": 10,
    "audio_token_id": 11,
    "video_token_id": 14,
    "text_config": {
        "pad_token_id": 0,
        "vocab_size": 16,
        "hidden_size": 5,
        "num_hidden_layers": 2,
        "hidden_size_per_layer_input": 3,
    },
}


def bundle(folder: Path, **files: Any) -> Path:
    """A bundle in `folder/model/`, with files named like `config` there and `above_config` in `folder`."""
    (folder / "model").mkdir()
    for name, content in files.items():
        place = folder if name.startswith("above_") else folder / "model"
        text = content if isinstance(content, str) else json.dumps(content)
        (place / f"{name.removeprefix('above_')}.json").write_text(text)
    return folder / "model" / "model.onnx"


def test_hugging_face_configuration(tmp_path: Path) -> None:
    facts = resolve(bundle(tmp_path, config=CONFIG), TokenFlags())
    assert facts.media == {"image": 10, "audio": 11, "video": 14}
    assert (facts.pad_id, facts.vocabulary, facts.hidden_size) == (0, 16, 5)
    assert (facts.layers, facts.layer_width) == (2, 3)
    assert facts.sources == ("config.json",)
    assert not facts.only_by_default


def test_without_any_source_gemma_4_stands_for_all() -> None:
    facts = resolve(Path("/nowhere/at/all/model.onnx"), TokenFlags())
    assert facts.media == {"image": 258880, "audio": 258881, "video": 258884}
    assert (facts.pad_id, facts.sources, facts.only_by_default) == (0, (GEMMA4,), frozenset())


def test_a_folder_above_counts_and_the_nearer_one_wins(tmp_path: Path) -> None:
    facts = resolve(bundle(tmp_path, above_config=CONFIG), TokenFlags())
    assert facts.media["image"] == 10
    near = {**CONFIG, "image_token_id": 9}
    (tmp_path / "model" / "config.json").write_text(json.dumps(near))
    assert resolve(tmp_path / "model" / "model.onnx", TokenFlags()).media["image"] == 9


def test_flags_win_and_say_so(tmp_path: Path) -> None:
    facts = resolve(bundle(tmp_path, config=CONFIG), TokenFlags(image=7, pad=1))
    assert (facts.image.id, facts.image.source, facts.pad_id) == (7, FLAG, 1)
    assert facts.media["audio"] == 11


def test_metadata_names_only_the_image(tmp_path: Path) -> None:
    metadata = {"vision": {"image_token_id": 258880}, "language": {"vocab_size": 262144}}
    facts = resolve(bundle(tmp_path, metadata=metadata), TokenFlags())
    assert facts.only_by_default == {"audio", "video"}
    assert facts.within(262144) == facts
    assert facts.within(258881).media == {"image": 258880}


def test_null_means_that_the_modality_is_absent(tmp_path: Path) -> None:
    facts = resolve(bundle(tmp_path, config={**CONFIG, "video_token_id": None}), TokenFlags())
    assert facts.media == {"image": 10, "audio": 11}


def test_contradiction_is_an_error_and_a_flag_settles_it(tmp_path: Path) -> None:
    path = bundle(tmp_path, config=CONFIG, genai_config={"model": {"image_token_id": 12}})
    with pytest.raises(BundleError, match=r"config.json says 10, genai_config.json says 12") as caught:
        resolve(path, TokenFlags())
    assert "--image-token-id" in caught.value.hint
    assert resolve(path, TokenFlags(image=12)).media["image"] == 12


def test_other_pads_warn_and_do_not_decide(tmp_path: Path) -> None:
    facts = resolve(bundle(tmp_path, config=CONFIG, genai_config={"model": {"pad_token_id": 1}}), TokenFlags())
    assert facts.pad_id == 0
    assert len(facts.warnings) == 1
    assert "genai_config.json" in facts.warnings[0]


@pytest.mark.parametrize(
    "content",
    ["{", '{"image_token_id": "ten"}', '{"image_token_id": true}', "[" * 100_000],
    ids=["cut short", "a word", "a truth value", "a nest"],
)
def test_malformed_files_are_errors(tmp_path: Path, content: str) -> None:
    with pytest.raises(BundleError, match=r"config\.json"):
        resolve(bundle(tmp_path, config=content), TokenFlags())


def test_missing_pad_and_negative_flags(tmp_path: Path) -> None:
    config = {**CONFIG, "text_config": {"pad_token_id": None}}
    with pytest.raises(BundleError, match="no pad id"):
        _ = resolve(bundle(tmp_path, config=config), TokenFlags()).pad_id
    with pytest.raises(UsageError, match="-3"):
        resolve(tmp_path / "model.onnx", TokenFlags(audio=-3))


def test_two_modalities_with_one_id(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="same token id"):
        resolve(bundle(tmp_path, config=CONFIG), TokenFlags(image=11))
