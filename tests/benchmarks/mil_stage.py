"""A decoder stage of E2B's width in the MIL interpreter, against torch's float32 with as many threads.

    python -m tests.benchmarks.mil_stage

Needs torch and transformers as pinned in samples/build/requirements.txt, with g4patch installed beside them. Wanted:
at most 5 times torch's time.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np

from g4patch.runtimes.mil import Interpreter, Weights, read_function

# Only where this is run: the package's own environments have no torch.
torch: Any = importlib.import_module("torch")

HIDDEN, INTERMEDIATE, LAYERS, LENGTH = 1536, 6144, 4, 280


def stage() -> tuple[Any, tuple[Any, ...]]:
    """Hugging Face's decoder layers with PLE, random weights, and one prompt for them."""
    from samples.build.model import Stage, Tiny

    class Wide(Tiny):
        def config(self) -> Any:
            config = super().config()
            config.text_config.intermediate_size = INTERMEDIATE
            config.text_config.num_attention_heads = 8
            return config

    wide = Wide(vocab=1000, layers=LAYERS, ple_dim=256, hidden=HIDDEN, head_dim=256)
    example = (
        torch.randn(1, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0)),
        torch.arange(LENGTH, dtype=torch.int32)[None],
        torch.arange(LENGTH, dtype=torch.int32)[None],
    )
    return Stage(wide.build()).eval(), example


def convert(module: Any, example: tuple[Any, ...], folder: Path) -> Any:
    """The stage as coremltools converts it: float16, iOS18, static."""
    names = ("hidden_states", "input_ids", "position_ids")
    with torch.no_grad():
        traced = torch.jit.trace(module, example)
    return ct.convert(
        traced,
        inputs=[
            ct.TensorType(name, tuple(item.shape), np.float16 if item.is_floating_point() else np.int32)
            for name, item in zip(names, example, strict=True)
        ],
        outputs=[ct.TensorType("out", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        skip_model_load=True,
        package_dir=str(folder / "stage.mlpackage"),
    )


def palettes(model: Any, folder: Path) -> Any:
    """The same with 4-bit palettes for all weights."""
    uniform = cto.OpPalettizerConfig(mode="uniform", nbits=4)
    model = cto.palettize_weights(model, cto.OptimizationConfig(global_config=uniform))
    model.save(str(folder / "palettes.mlpackage"))
    return model


def race(*runs: Callable[[], Any], times: int = 6) -> list[float]:
    """The shortest of some runs of each, in seconds, in turns: what else the machine does then slows all of them."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(times):
        for run, seconds in zip(runs, taken, strict=True):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in taken]


def first_row_error(found: Any, wanted: Any) -> float:
    """Relative error of the first row, which attends to nothing but itself.

    Later ones magnify the rounding of fp16: with random weights the scores are in the hundreds.
    """
    return float(np.linalg.norm(found[0, 0] - wanted[0, 0]) / np.linalg.norm(wanted[0, 0]))


def main() -> None:
    logging.disable(logging.CRITICAL)
    module, example = stage()
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        wanted = module(*example).numpy()
        plain = convert(module, example, Path(name))
        print(f"{LAYERS} layers, H {HIDDEN}, S {LENGTH}; torch {torch.__version__}, {torch.get_num_threads()} threads")
        for kind, model in (("fp16", plain), ("4-bit", palettes(plain, Path(name)))):
            function = read_function(model.get_spec().mlProgram.functions["main"], "main")
            interpreter = Interpreter(function, Weights(Path(model.weights_dir)))
            inputs = dict(zip(function.inputs, (item.numpy() for item in example), strict=True))
            in_torch, here = race(lambda: module(*example), lambda: interpreter.run(inputs, function.outputs))  # noqa: B023
            (found,) = interpreter.run(inputs, function.outputs).values()
            print(f"{kind:<6} torch {in_torch:.3f} s, here {here:.3f} s: {here / in_torch:.2f} times")
            if kind == "fp16":  # 4 bits are too coarse to compare with float32
                print(f"relative error of the first row: {first_row_error(found, wanted):.0e}")


if __name__ == "__main__":
    main()
