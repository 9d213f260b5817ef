"""The Core ML samples as the interpreter reads them, and Hugging Face's numbers beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from g4patch.formats.coreml.proto import model_pb2
from g4patch.runtimes.mil import Function, Interpreter, MilProbe, Weights, read_function
from g4patch.runtimes.mil.program import Operation

SAMPLES = Path(__file__).parents[2] / "samples"
PAD = 0

Array = NDArray[Any]


@dataclass(frozen=True)
class Run:
    """One prompt through Hugging Face's own model: what went in, what came out, and which ids are media."""

    inputs: dict[str, Array]
    expected: dict[str, Array]
    is_media: Array

    @property
    def ids(self) -> Array:
        return self.inputs["input_ids"]

    @property
    def masked_ids(self) -> Array:
        """What the lookup must read: the pad row for media ids."""
        return np.where(self.is_media, PAD, self.ids)


@dataclass(frozen=True)
class Sample:
    """One broken stage: the ids read the PLE table raw, and only image rows take `hidden_states`."""

    name: str

    @property
    def _folder(self) -> Path:
        return SAMPLES / self.name

    @property
    def weights_dir(self) -> Path:
        return self._folder / "stage.mlpackage" / "Data" / "com.apple.CoreML" / "weights"

    @cached_property
    def function(self) -> Function:
        model = model_pb2().Model()
        model.ParseFromString((self.weights_dir.parent / "model.mlmodel").read_bytes())
        return read_function(model.mlProgram.functions["main"], "main")

    @cached_property
    def interpreter(self) -> Interpreter:
        return Interpreter(self.function, Weights(self.weights_dir))

    @property
    def probe(self) -> MilProbe:
        return MilProbe(self.function, self.weights_dir)

    def run(self, name: str) -> Run:
        """The numbers of one prompt: `media`, `text` or `left padding`."""
        with safe_open(self._folder / "stage.mlpackage.reference.safetensors", "np") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}/")}  # noqa: SIM118
            token_ids = json.loads(file.metadata()["g4patch"])["token_ids"]
        inputs, expected = (
            {key.rpartition("/")[2]: array for key, array in tensors.items() if f"/{part}/" in key}
            for part in ("input", "expected")
        )
        media = [token_ids[kind] for kind in ("image", "audio", "video")]
        return Run(inputs, expected, np.isin(inputs["input_ids"], media))

    @property
    def output(self) -> str:
        (name,) = self.function.outputs
        return name

    @cached_property
    def _per_layer_gather(self) -> Operation:
        """The second of the two gathers of rank 3: the first is the token embedding's."""
        gathers = [op for op in self.function.operations if op.type == "gather"]
        of_ids = [op for op in gathers if len(self.function.types[op.outputs[0].name].shape or ()) == 3]
        return of_ids[1]

    @property
    def index(self) -> str:
        return self._per_layer_gather.inputs["indices"][0]

    @property
    def rows(self) -> str:
        return self._per_layer_gather.outputs[0].name

    @cached_property
    def _splice(self) -> str:
        """The condition of the select that takes `hidden_states`."""
        (select,) = [op for op in self.function.operations if op.type == "select" and "hidden_states" in op.operands]
        return select.inputs["cond"][0]

    def mended(self, run: Run) -> dict[str, Array]:
        """The values that a mended stage would have: lookup ids, and which rows take `hidden_states`."""
        taken = (run.is_media | (run.ids == PAD))[..., None]
        width = (self.function.types[self._splice].shape or ())[-1] or 1
        return {self.index: run.masked_ids, self._splice: np.broadcast_to(taken, (*run.ids.shape, width))}
