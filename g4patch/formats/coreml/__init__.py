"""Core ML packages (`.mlpackage`) that hold ML Programs: a module that satisfies `g4patch.formats.Format`."""

from __future__ import annotations

from g4patch.formats import Model
from g4patch.formats.coreml.check import validate
from g4patch.formats.coreml.differences import differences
from g4patch.formats.coreml.edit import write
from g4patch.formats.coreml.model import NAME, default_shapes, functions, leading_to, native, open_model, shown_by
from g4patch.formats.coreml.note import complete
from g4patch.formats.coreml.package import root_file
from g4patch.runtimes import Device, Probe, Unavailable

__all__ = ["MASK_DTYPES", "NAME", "complete", "device", "differences", "open_model", "probe", "validate", "write"]

# `equal` takes no narrower integers on any opset, and its float16 cannot hold token ids.
MASK_DTYPES = frozenset({"int32"})


def probe(model: Model, graph: str) -> Probe:
    """The MIL interpreter on one function: nothing else runs an ML Program off a Mac."""
    from g4patch.runtimes.mil.probe import MilProbe
    from g4patch.runtimes.mil.program import read_function

    own = native(model)
    known = functions(own.message)
    if graph not in known:
        raise Unavailable(f"there is no function {graph}")
    weights = root_file(model.path).parent / "weights"
    probes: list[MilProbe] = []
    for name in leading_to(own.message, graph):
        if name not in own.programs:
            function, opset = known[name]
            own.programs[name] = read_function(function, name, opset)
        shapes = default_shapes(own.message, name)
        probes.append(MilProbe(own.programs[name], weights, shapes, tuple(probes)))
    return probes[-1]


def device(model: Model, graph: str, unit: str) -> Device:
    """Core ML on a Mac, on one set of compute units; see `g4patch.formats.device`."""
    from g4patch.runtimes.coreml import CoreMLDevice

    if model.graph_file not in model.replaced:
        raise Unavailable("Core ML opens packages as they stand, and no other model.mlmodel in them")
    function, shown = shown_by(native(model).message, graph)
    dtypes = {value.name: value.dtype or "" for own in model.graphs for value in own.inputs}
    (outputs,) = (own.outputs for own in model.graphs if own.name == graph)
    return CoreMLDevice(
        package=model.path,
        function=function,
        inputs={item.name: dtypes[item.name] for item in shown.input if item.name in dtypes},
        states={item.name: dtypes[item.name] for item in shown.state if item.name in dtypes},
        outputs=tuple(item.name for item in shown.output if item.name in outputs),
        unit=unit,
    )
