"""From what a user names to prompts: by the checkpoint's own processor, or from ids."""

from __future__ import annotations

import hashlib
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import Gemma4Config, Gemma4ImageProcessorPil, Gemma4Processor

from g4patch.errors import BundleError, MissingExtra, UsageError
from g4patch.record import picture
from g4patch.record.model import NO_MEDIA, SEED, Media, media_ids, rows, stand_ins
from g4patch.record.request import INSTALL, Request

PROMPT = "Name every shape that you see, and its colour."


@dataclass(frozen=True)
class Prompt:
    """Ids `[1,P]` and the media that belong to their placeholders."""

    ids: Tensor
    media: Media = NO_MEDIA


@dataclass(frozen=True)
class Prompts:
    """What is recorded: with media, None where there are none, and as text alone, None where nothing is left.

    `about` says what the media were, for the reference's metadata.
    """

    media: Prompt | None
    text: Prompt | None
    about: Mapping[str, str] = field(default_factory=dict)


def prompts(request: Request, config: Gemma4Config) -> Prompts:
    """The prompts that a user asked for. Raises UsageError where they do not fit the model, MissingExtra."""
    return _from_ids(request, config, request.ids) if request.ids else _from_text(request, config)


def _from_text(request: Request, config: Gemma4Config) -> Prompts:
    """As the checkpoint's processor makes them. The picture is ours where none is named and the model has eyes."""
    processor = _processor(request.model)
    text = request.prompt or PROMPT
    if request.image and config.vision_config is None:
        raise UsageError(f"{request.model} has no vision tower", "leave --image out")
    if request.audio and config.audio_config is None:
        raise UsageError(f"{request.model} has no audio tower", "leave --audio out")
    about, images, sounds = {}, [], []
    if config.vision_config is not None:
        image, about["image"] = _image(request.image)
        images = [image]
    if request.audio:
        sound, about["audio"] = _sound(request.audio, processor.feature_extractor.sampling_rate)
        sounds = [sound]
    alone = _processed(processor, text, [], [])
    shown = _processed(processor, text, images, sounds) if images or sounds else None
    return Prompts(shown, alone, about)


def _processor(model: str) -> Any:
    try:
        return Gemma4Processor.from_pretrained(model)
    except ImportError as error:
        raise MissingExtra(f"the processor of {model} cannot be used: {_first_sentence(error)}", INSTALL) from error
    except Exception as error:  # of as many classes as a processor has parts
        raise UsageError(
            f"{model} has no processor that makes ids of text: {_first_sentence(error)}", "pass token ids with --ids"
        ) from error


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(". ")[0] if lines else type(error).__name__


def _processed(processor: Any, text: str, images: list[Image.Image], sounds: list[NDArray[np.float32]]) -> Prompt:
    """One user turn, media first; plain text behind the placeholders where the checkpoint knows no turns.

    Raises BundleError where the processor, or its template, makes nothing of it.
    """
    try:
        made = _called(processor, text, images, sounds)
    except Exception as error:  # templates are programs
        raise BundleError(
            f"the checkpoint's processor makes no prompt: {_first_sentence(error)}", "pass token ids with --ids"
        ) from error
    ours = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
    return Prompt(made["input_ids"], Media({name: value for name, value in made.items() if name not in ours}))


def _called(
    processor: Any, text: str, images: list[Image.Image], sounds: list[NDArray[np.float32]]
) -> Mapping[str, Tensor]:
    if not processor.chat_template:
        placeholders = processor.image_token * len(images) + (processor.audio_token or "") * len(sounds)
        made = processor(text=placeholders + text, images=images or None, audio=sounds or None, return_tensors="pt")
    else:
        content = [{"type": "image", "image": image} for image in images]
        content += [{"type": "audio", "audio": sound} for sound in sounds]
        turn = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        made = processor.apply_chat_template(
            [turn], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    return dict(made)


def _from_ids(request: Request, config: Gemma4Config, given: tuple[int, ...]) -> Prompts:
    """As given, but that the only image id stands for all rows of the picture, as it does for processors."""
    vocabulary = config.text_config.vocab_size
    if outside := [token for token in given if not 0 <= token < vocabulary]:
        raise UsageError(f"--ids: {outside[0]} is no token id", f"the model's are 0 to {vocabulary - 1}")
    if request.audio:
        raise UsageError("--audio cannot be used with --ids", "leave it out: audio rows get features all the same")
    ids, about = torch.tensor([given]), {}
    inputs: dict[str, Tensor] = {}
    if request.image:
        image, about["image"] = _image(request.image)
        ids, inputs = _with_picture(request, config, ids, image)
    counts = rows(config, ids)
    missing = [name for name, count in counts.items() if count and not (inputs and name == "image")]
    about |= dict.fromkeys(missing, f"none: random normal features, torch's generator, seed {SEED}")
    is_media = torch.isin(ids, torch.tensor(list(media_ids(config).values())))
    text = ids[~is_media].unsqueeze(0)
    media = Prompt(ids, Media(inputs, stand_ins(config, ids, missing))) if is_media.any() else None
    return Prompts(media, Prompt(text) if text.numel() else None, about)


def _with_picture(
    request: Request, config: Gemma4Config, ids: Tensor, image: Image.Image
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ids with as many image rows as the picture has, and what the vision tower is handed."""
    tower = config.vision_config
    if tower is None:
        raise UsageError(f"{request.model} has no vision tower", "leave --image out: rows get features all the same")
    try:
        processor = Gemma4ImageProcessorPil.from_pretrained(request.model)
    except OSError:
        sizes = {"patch_size": tower.patch_size, "pooling_kernel_size": tower.pooling_kernel_size}
        processor = Gemma4ImageProcessorPil(**sizes)
    made = processor(images=[image], return_tensors="pt")
    wanted = int(made.pop("num_soft_tokens_per_image")[0])
    token, found = config.image_token_id, rows(config, ids)["image"]
    if found == 1 and wanted != 1:
        (at,) = (ids[0] == token).nonzero()[0].tolist()
        ids = torch.cat([ids[:, :at], ids.new_full((1, wanted), token), ids[:, at + 1 :]], dim=1)
    elif found != wanted:
        raise UsageError(
            f"the picture has {wanted} rows, and --ids {found} image ids ({token})",
            "give one, which then stands for all of them, or that many",
        )
    return ids, dict(made)


def _image(path: Path | None) -> tuple[Image.Image, str]:
    """A picture and what it is: a file, or our own drawing."""
    if path is None:
        return Image.fromarray(picture.draw()), picture.WHAT
    try:
        with Image.open(path) as image:
            return image.convert("RGB"), _what(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{path} is not a picture: {error}", "PNG and JPEG are read") from error


def _sound(path: Path, rate: int) -> tuple[NDArray[np.float32], str]:
    """A recording as samples from -1 to 1, and what it is. Raises UsageError for anything but a WAV that fits."""
    try:
        with wave.open(str(path)) as file:
            shape = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2" if shape[1] == 2 else "u1")
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise UsageError(f"{path} is not a WAV file: {error}", _convert(path, rate)) from error
    if shape != (1, 2, rate) or not samples.size:
        raise UsageError(
            f"{path} has {shape[0]} channels of {8 * shape[1]} bits at {shape[2]} Hz; {rate} Hz mono, 16 bits is read",
            _convert(path, rate),
        )
    return samples.astype(np.float32) / np.float32(2**15), _what(path)


def _convert(path: Path, rate: int) -> str:
    return f"ffmpeg -i {path.name} -ar {rate} -ac 1 -c:a pcm_s16le {path.stem}.16k.wav"


def _what(path: Path) -> str:
    return f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"
