"""Rule cases: a small graph in ONNX's textual form, with what is expected of it in the comments on top.

# What the case shows.
# verdict: raw
# plan: mask 10 11 14 at rows.index     (or: withheld; absent where there is nothing to fix)
# config: {"hidden_size": 5}            (on top of CONFIG; a null takes an entry away)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx.parser

# Gemma 4's layout in 16 ids: image 10, audio 11, EOI 12, EOA 13, video 14.
CONFIG: dict[str, Any] = {"image_token_id": 10, "audio_token_id": 11, "video_token_id": 14, "pad_token_id": 0}


_KEYS = ("verdict", "plan", "config")


@dataclass(frozen=True)
class Case:
    path: Path
    verdict: str
    plan: str
    config: dict[str, Any]
    graph: str

    def write(self, folder: Path) -> Path:
        """The case as a model with its config.json beside it."""
        config = {key: value for key, value in {**CONFIG, **self.config}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        path = folder / "model.onnx"
        path.write_bytes(onnx.parser.parse_model(self.graph).SerializeToString())
        return path


def load(path: Path) -> Case:
    lines = path.read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    stated = dict(comment.split(": ", 1) for comment in comments if comment.split(": ")[0] in _KEYS)
    graph = "\n".join(line for line in lines if not line.startswith("#"))
    return Case(path, stated["verdict"], stated.get("plan", ""), json.loads(stated.get("config", "{}")), graph)


def all_cases() -> list[Path]:
    return sorted((Path(__file__).parent.parent / "rules").glob("*/cases/*.onnxtxt"))
