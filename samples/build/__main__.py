"""Builds the samples, all of them or those named."""

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from . import coreai, coreml, onnx_mobius, onnx_torch, towers

HERE = Path(__file__).resolve().parents[1]
BUILDERS: dict[str, Callable[[Path], None]] = {
    "mobius-embedding": onnx_mobius.embedding,
    "mobius-text": onnx_mobius.text,
    "mobius-package": onnx_mobius.package,
    "mobius-vision": onnx_mobius.vision,
    "onnx-vision": towers.onnx,
    "onnx-stage": onnx_torch.stage,
    "onnx-right": onnx_torch.right_stage,
    "onnx-host-side": onnx_mobius.decoder,
    "onnx-fp16": onnx_torch.fp16,
    "onnx-identity-262144": onnx_torch.identity_262144,
    "coreml-fp16": coreml.fp16,
    "coreml-fp32": coreml.fp32,
    "coreml-cast16": coreml.cast16,
    "coreml-ios16": coreml.ios16,
    "coreml-palette-262144": coreml.palette_262144,
    "coreml-int4-262144": coreml.int4_262144,
    "coreml-state": coreml.state,
    "coreml-multifunction": coreml.multifunction,
    "coreml-two-stage": coreml.two_stage,
    "coreai-stage": coreai.stage,
    "coreai-fp16": coreai.fp16,
    "coreai-int8": coreai.int8,
    "coreai-palette4": coreai.palette4,
    "coreai-multifunction": coreai.multifunction,
    "coreai-state": coreai.state,
    "coreai-two-stage": coreai.two_stage,
    "host-ple": coreai.host_ple,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m samples.build", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a sample; default: all")
    parser.add_argument("-o", dest="out", metavar="DIR", type=Path, default=HERE, help="default: samples/")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BUILDERS):
        parser.error(f"no sample {', '.join(sorted(unknown))}; there are {', '.join(BUILDERS)}")
    for name in arguments.names or BUILDERS:
        start = time.perf_counter()
        folder = arguments.out / name
        shutil.rmtree(folder, ignore_errors=True)  # exporters add to what they find, or refuse
        BUILDERS[name](folder)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
