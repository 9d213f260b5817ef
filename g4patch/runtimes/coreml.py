"""Core ML itself, on a Mac, through coremltools: what comes out of a package on one set of compute units.

Core ML shows the outputs that a package has and nothing inside it, so lookups stay with the interpreter of MIL.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from g4patch.runtimes import Refused, Unavailable

# What a user asks for -> coremltools' ComputeUnit, and what the report says.
_UNITS = {
    "cpu": ("CPU_ONLY", "the CPU"),
    "gpu": ("CPU_AND_GPU", "CPU and GPU"),
    "ane": ("CPU_AND_NE", "CPU and Neural Engine"),
    "all": ("ALL", "all units"),
}


@dataclass(frozen=True)
class CoreMLDevice:
    """`g4patch.runtimes.Device` for a package, or for one function of a package that has several.

    `inputs` and `states` give the dtype of each, `outputs` are those that Core ML shows. States start with what is fed
    to them, else empty.
    """

    package: Path
    function: str | None
    inputs: Mapping[str, str]
    states: Mapping[str, str]
    outputs: tuple[str, ...]
    unit: str

    @property
    def runtime(self) -> str:
        return f"Core ML of macOS {platform.mac_ver()[0]}, {_UNITS[self.unit][1]}"

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if sys.platform != "darwin":
            raise Unavailable("Core ML runs on a Mac only")
        missing = sorted(self.inputs.keys() - feeds.keys())
        if missing:
            raise Unavailable(f"a run needs {', '.join(missing)}, which was not given")
        import coremltools

        unit = coremltools.ComputeUnit[_UNITS[self.unit][0]]
        typed = {name: feeds[name].astype(dtype) for name, dtype in self.inputs.items()}
        # coremltools raises whatever Core ML says as plain exceptions.
        try:
            model = coremltools.models.MLModel(str(self.package), compute_units=unit, function_name=self.function)
            state = model.make_state() if self.states else None
            for name in self.states.keys() & feeds.keys():
                state.write_state(name, feeds[name].astype(self.states[name]))
            found = model.predict(typed, state=state)
        except Exception as error:
            raise Refused(f"{self.runtime}: {str(error).strip().splitlines()[0]}") from error
        return {name: found[name] for name in self.outputs if name in found}
