"""Run by the interpreter that has torch: tiny models, `g4patch record` on them, and what Hugging Face's own code says.

Usage: python -m tests.hugging_face_models FOLDER. It leaves references, `.npz` files of what was expected, computed by
calls that take other ways through the model, and `outcomes.json`: exit code and stderr of each `record`.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import wave
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessorPil,
    Gemma4Processor,
    PreTrainedTokenizerFast,
)

from g4patch.cli import main
from samples.build.model import Tiny

Tensors = dict[str, torch.Tensor]

TINY = Tiny(layers=4)
IDS = TINY.ids
# Text, pad rows, and all three media, image rows apart from each other.
PROMPT = [0, 2, 7, IDS.boi, IDS.image, IDS.image, IDS.eoi, IDS.audio, 200, IDS.video, IDS.image, 9]
RATE = 16_000

outcomes: dict[str, dict[str, Any]] = {}


def record(name: str, *arguments: object) -> Path:
    """One `g4patch record`; its outcome is kept under a name."""
    out = FOLDER / f"{name}.safetensors"
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        code = main(["record", *map(str, arguments), "-o", str(out)])
    outcomes[name] = {"code": code, "stdout": stdout.getvalue(), "stderr": " ".join(stderr.getvalue().split())}
    return out


def saved(name: str, tiny: Tiny) -> Path:
    tiny.build().save_pretrained(FOLDER / name)
    return FOLDER / name


def changed(name: str, model: Path, file: str, **entries: object) -> Path:
    """A copy of a saved model with other entries in one of its JSON files."""
    copy = shutil.copytree(model, FOLDER / name)
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**content, **entries}))
    return copy


def loaded(folder: Path) -> Gemma4ForConditionalGeneration:
    return Gemma4ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def by_embeddings(model: Gemma4ForConditionalGeneration, run: str, recorded: Tensors) -> Tensors:
    """A run the other way in: spliced by hand, and handed to the model as embeddings and per-layer rows."""
    ids = recorded[f"{run}/input/input_ids"].long()
    language, config = model.model.language_model, model.config
    masked = ids.clone()
    for token in (config.image_token_id, config.audio_token_id, config.video_token_id):
        masked[ids == token] = config.text_config.pad_token_id
    embeds = language.embed_tokens(masked)
    for modality in ("image", "audio", "video"):
        if (features := recorded.get(f"{run}/input/{modality}_features")) is not None:
            embeds[ids == getattr(config, f"{modality}_token_id")] = features.to(model.dtype)
    identity = language.get_per_layer_inputs(masked)
    out = model(inputs_embeds=embeds, per_layer_inputs=identity, output_hidden_states=True, use_cache=False)
    layers = config.text_config.num_hidden_layers
    final = recorded[f"{run}/expected/hidden_states.{layers}"].to(model.dtype)
    found = {f"hidden_states.{k}": out.hidden_states[k] for k in range(layers)}
    # Hugging Face gives the last one normed.
    return {
        **found,
        "spliced": embeds,
        "normed": out.hidden_states[-1],
        "recorded, normed": language.norm(final),
        "per_layer_identity": identity,
        "per_layer_inputs": language.project_per_layer_inputs(embeds, identity),
        "logits": out.logits,
    }


def greedy(
    model: Gemma4ForConditionalGeneration, embeds: torch.Tensor, identity: torch.Tensor, steps: int
) -> list[int]:
    """Tokens by argmax, one at a time, without a cache."""
    language, tokens = model.model.language_model, []
    for _ in range(steps):
        logits = model(inputs_embeds=embeds, per_layer_inputs=identity, use_cache=False).logits
        token = logits[0, -1].argmax().reshape(1, 1)
        tokens.append(int(token))
        embeds = torch.cat([embeds, language.embed_tokens(token)], dim=1)
        identity = torch.cat([identity, language.get_per_layer_inputs(token)], dim=1)
    return tokens


def plain() -> Path:
    """From ids, without processor or towers; then where the continuation ends early."""
    folder = saved("plain", TINY)
    listed = ",".join(map(str, PROMPT))
    recorded = load_file(record("plain", "--hf", folder, "--ids", listed, "--split", "0:1,1:3,3:4", "--steps", 6))
    model = loaded(folder)
    expected: dict[str, Any] = {}
    for run in ("media", "without media", "text"):
        expected |= {f"{run}/{name}": tensor.numpy() for name, tensor in by_embeddings(model, run, recorded).items()}
    for run in ("media", "text"):
        prompt = recorded[f"{run}/input/input_ids"].shape[1] - 6
        embeds = torch.from_numpy(expected[f"{run}/spliced"])[:, :prompt]
        identity = torch.from_numpy(expected[f"{run}/per_layer_identity"])[:, :prompt]
        expected[f"{run}/greedy"] = np.array(greedy(model, embeds, identity, 6))
    np.savez(FOLDER / "plain.npz", **expected)

    third = int(expected["text/greedy"][2])
    text = [token for token in PROMPT if token not in (IDS.image, IDS.audio, IDS.video)]
    (FOLDER / "text.ids").write_text("\n".join(map(str, text)))
    for name, file in (("eos", "generation_config.json"), ("media", "config.json")):
        stops = {"eos_token_id": [third]} if name == "eos" else {"video_token_id": third}
        folder_of = changed(f"ends at {name}", folder, file, **stops)
        record(f"ends at {name}", "--hf", folder_of, "--ids", FOLDER / "text.ids", "--steps", 6)
    record("bfloat16", "--hf", folder, "--ids", listed, "--steps", 0, "--dtype", "bfloat16")
    record("float16", "--hf", folder, "--ids", listed, "--steps", 0, "--precision", "float16")
    media = ",".join(map(str, Tiny().prompts(14)["media"][0].tolist()))
    record("sample", "--hf", saved("model of the samples", Tiny()), "--ids", media, "--steps", 8)
    return folder


def deep() -> None:
    """As deep as Gemma 4 E2B, and the same model in float64 and float16: what is right and rounds otherwise."""
    folder = saved("deep", Tiny(layers=35, hidden=64, seed=7))
    listed = ",".join(map(str, [*PROMPT, *range(20, 50)]))
    for precision, dtype in (("float32", torch.float64), ("float16", torch.float16)):
        asked = ("--precision", precision, "--split", "0:15,15:35", "--steps", 0)
        recorded = load_file(record(f"deep {precision}", "--hf", folder, "--ids", listed, *asked))
        found = by_embeddings(loaded(folder).to(dtype), "media", recorded)
        kept = ("per_layer_identity", "per_layer_inputs", "hidden_states.0", "hidden_states.15", "logits")
        np.savez(FOLDER / f"deep {precision}.npz", **{name: found[name].numpy() for name in kept})


class Towered(Tiny):
    """With towers that can be run: positions for a whole picture, and as many channels as an audio frame has bands."""

    def config(self) -> transformers.Gemma4Config:
        config = super().config()
        config.vision_config.position_embedding_size = 256
        config.audio_config.subsampling_conv_channels = [128, 4]
        return config


def picture() -> None:
    """A picture through the model's own vision tower: from ids, and through a processor, with a recording."""
    folder = saved("towers", Towered(towers=True))
    (FOLDER / "two.png").write_bytes(png())
    listed, shown = f"2,7,{IDS.boi},{IDS.image},{IDS.eoi},9", ("--image", FOLDER / "two.png")
    recorded = load_file(record("picture", "--hf", folder, "--ids", listed, *shown, "--steps", 2))
    model = loaded(folder)
    tower = model.config.vision_config
    images = Gemma4ImageProcessorPil(patch_size=tower.patch_size, pooling_kernel_size=tower.pooling_kernel_size)
    from PIL import Image

    made = images(images=[Image.open(FOLDER / "two.png")], return_tensors="pt")
    features = model.get_image_features(made["pixel_values"], made["image_position_ids"]).pooler_output[0]
    ids = recorded["media/input/input_ids"].long()
    logits = model(ids, pixel_values=made["pixel_values"], image_position_ids=made["image_position_ids"]).logits
    np.savez(FOLDER / "picture.npz", features=features.numpy(), logits=logits.numpy())
    too_few = f"2,{IDS.image},{IDS.image}"
    record("wrong number of image ids", "--hf", folder, "--ids", too_few, *shown)
    with_processor(folder, model)


def png() -> bytes:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (48, 96, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "png")
    return buffer.getvalue()


def with_processor(folder: Path, model: Gemma4ForConditionalGeneration) -> None:
    """The processor's own code, but for the video part, which torchvision would be needed for."""
    with wave.open(str(FOLDER / "tone.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        tone = np.sin(np.arange(RATE // 2) * 0.2) * 20_000
        file.writeframes(tone.astype("<i2").tobytes())
    with wave.open(str(FOLDER / "stereo.wav"), "wb") as file:
        file.setparams((2, 2, RATE, 0, "NONE", ""))
        file.writeframes(b"\0" * 64)
    with patch.object(Gemma4Processor, "check_argument_for_proper_class", lambda *_: None):
        processor = Gemma4Processor(
            Gemma4AudioFeatureExtractor(),
            Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70),
            tokenizer(),
            None,
            chat_template="{{ bos_token }}{% for part in messages[0]['content'] %}"
            "{{ {'image': '<image>', 'audio': '<audio>'}.get(part['type'], part.get('text', '')) }} {% endfor %}",
        )
    with patch.object(Gemma4Processor, "from_pretrained", lambda *_: processor):
        say = ("--prompt", "what is this", "--steps", 3)
        out = record("processor", "--hf", folder, *say, "--audio", FOLDER / "tone.wav")
        record("stereo", "--hf", folder, "--audio", FOLDER / "stereo.wav")
        record("not a picture", "--hf", folder, "--image", FOLDER / "tone.wav")
        record("no tower", "--hf", FOLDER / "plain", "--image", FOLDER / "two.png")
        record("no media", "--hf", FOLDER / "plain", *say)
        processor.chat_template = None
        record("no turns", "--hf", folder, *say)
    recorded = load_file(out)
    from PIL import Image

    from g4patch.record.picture import draw

    made = processor(
        text="<bos><image> <audio> what is this ",
        images=[Image.fromarray(draw())],
        audio=[(tone.astype("<i2") / 32768).astype(np.float32)],
        return_tensors="pt",
    )
    ids = recorded["media/input/input_ids"].long()
    rest = {name: value for name, value in made.items() if name.startswith(("pixel", "image", "input_features"))}
    logits = model(ids, **rest, use_cache=False).logits
    np.savez(FOLDER / "processor.npz", prompt=made["input_ids"].numpy(), logits=logits.numpy())


def tokenizer() -> PreTrainedTokenizerFast:
    """Words to ids, with Gemma 4's special tokens at the tiny model's ids."""
    special = {
        "<pad>": 0, "<bos>": 2, "<boi>": IDS.boi, "<boa>": IDS.boa, "<image>": IDS.image, "<audio>": IDS.audio,
        "<eoi>": IDS.eoi, "<eoa>": IDS.eoa, "<|video|>": IDS.video,
    }  # fmt: skip
    words = {"<unk>": 3, "what": 10, "is": 11, "this": 12}
    base = Tokenizer(models.WordLevel({**special, **words}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=base, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>",
            "audio_token": "<audio>", "boa_token": "<boa>", "eoa_token": "<eoa>",
        },
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def refusals(plain: Path) -> None:
    """What cannot be recorded."""
    record("no such folder", "--hf", FOLDER / "nowhere", "--ids", 7)
    (FOLDER / "llama").mkdir()
    (FOLDER / "llama" / "config.json").write_text('{"model_type": "llama"}')
    record("not Gemma 4", "--hf", FOLDER / "llama", "--ids", 7)
    record("no processor", "--hf", plain)
    record("id beyond", "--hf", plain, "--ids", TINY.vocab)
    record("audio with ids", "--hf", plain, "--ids", 7, "--audio", "x.wav")
    record("picture without a tower", "--hf", plain, "--ids", IDS.image, "--image", FOLDER / "two.png")
    record("split too short", "--hf", plain, "--ids", 7, "--split", "0:3")
    text = json.loads((plain / "config.json").read_text())["text_config"]
    without = changed("no ple", plain, "config.json", text_config={**text, "hidden_size_per_layer_input": 0})
    record("no per-layer embeddings", "--hf", without, "--ids", 7)
    for name in ("weight missing", "NaN"):
        folder = shutil.copytree(plain, FOLDER / name)
        weights = load_file(folder / "model.safetensors")
        key = "model.language_model.per_layer_model_projection.weight"
        if name == "NaN":
            weights[key][0, 0] = torch.nan
        else:
            del weights[key]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        record(name, "--hf", folder, "--ids", "2,7,9", "--steps", 0)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    with torch.no_grad():
        folder = plain()
        deep()
        picture()
        refusals(folder)
    (FOLDER / "outcomes.json").write_text(json.dumps(outcomes))
