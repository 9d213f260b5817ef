"""Rule cases: a small graph in ONNX's textual form, with what is expected of it in the comments on top.

# What the case shows.
# verdict: raw
# plan: mask 10 11 14 at rows.index     (or: withheld, or a severity; absent where no rule says anything)
# says: words that a finding has        (absent where the plan says enough)
# config: {"hidden_size": 5}            (on top of CONFIG; a null takes an entry away)

Or a table of 16 rows that a host looks up: `ID: CODES | SCALE` for each row that is not `[ID, ID + 1]` with scale 1.

# layout: model_ple.safetensors         (what the file is called)
# zero point: 5
# width: 8                              (rows are `[ID, ID + 1, ..]`; default: 2)
# dtype: float16                        (of a model_ple.safetensors; default: int8)
# metadata: {"embed_scale": "2"}        (of a model_ple.safetensors, on top of METADATA; a null takes an entry away)

Or a folder of several such files, and of JSON files, which are copied: a bundle folder. A graph is called after its
file. What is expected stands in one of them, with the verdicts of all models in the order of their names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
from safetensors.numpy import save_file

# Gemma 4's layout in 16 ids: image 10, audio 11, EOI 12, EOA 13, video 14.
CONFIG: dict[str, Any] = {"image_token_id": 10, "audio_token_id": 11, "video_token_id": 14, "pad_token_id": 0}
METADATA = {"ple_scale": "0.1"}


_KEYS = ("verdict", "plan", "says", "config", "layout", "zero point", "width", "dtype", "metadata")


@dataclass(frozen=True)
class Case:
    path: Path
    verdict: str
    plan: str
    says: str
    config: dict[str, Any]
    content: str
    layout: str
    zero_point: str
    width: int
    dtype: str
    metadata: dict[str, str | None]
    parts: tuple[Case, ...] = ()

    def write(self, folder: Path) -> Path:
        """The case as a model, or as a bundle folder, with its config.json."""
        config = {key: value for key, value in {**CONFIG, **self.config}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        for part in self.parts:
            part._write_model(folder, part.path.stem)
        return folder if self.parts else self._write_model(folder, "model")

    def _write_model(self, folder: Path, name: str) -> Path:
        path = folder / (self.layout or f"{name}.onnx")
        if self.path.suffix == ".json":
            (folder / self.path.name).write_text(self.content)
        elif self.layout:
            self._write_table(path)
        else:
            path.write_bytes(onnx.parser.parse_model(self.content).SerializeToString())
        return path

    def _write_table(self, path: Path) -> None:
        codes = (np.arange(16)[:, None] + np.arange(self.width)).astype(self.dtype)
        scales = np.ones(16, np.float32)
        for line in self.content.splitlines():
            row, stated = line.split(": ")
            numbers, _, scale = stated.partition(" | ")
            codes[int(row)] = [int(number) for number in numbers.split()]
            scales[int(row)] = float(scale or 1)
        if self.layout.endswith(".safetensors"):
            metadata = METADATA | {"ple_zero_point": self.zero_point} | self.metadata
            save_file({"embed_tokens_per_layer": codes}, path, {key: value for key, value in metadata.items() if value})
            return
        path.write_bytes(codes.tobytes())
        name, dtype = {
            "embed_tokens_per_layer_q8.bin": ("embed_tokens_per_layer_scales.bin", np.float16),
            "embed_per_layer.i8": ("embed_per_layer.scale.f32", np.float32),
        }[self.layout]
        path.with_name(name).write_bytes(scales.astype(dtype).tobytes())


def load(path: Path) -> Case:
    if path.is_dir():
        parts = tuple(load(part) for part in sorted(path.iterdir()))
        (expected,) = [part for part in parts if part.verdict]
        return replace(expected, path=path, parts=parts)
    lines = path.read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    stated = dict(comment.split(": ", 1) for comment in comments if comment.split(": ")[0] in _KEYS)
    return Case(
        path,
        stated.get("verdict", ""),
        stated.get("plan", ""),
        stated.get("says", ""),
        json.loads(stated.get("config", "{}")),
        "\n".join(line for line in lines if not line.startswith("#")),
        stated.get("layout", ""),
        stated.get("zero point", "0"),
        int(stated.get("width", 2)),
        stated.get("dtype", "int8"),
        json.loads(stated.get("metadata", "{}")),
    )


def all_cases() -> list[Path]:
    return sorted((Path(__file__).parent.parent / "rules").glob("*/cases/*"))
