"""How far a bundle may be off from recorded activations, and why.

Up to the layers a value is a few roundings away from exact, whatever the model. After them it depends on the model:
each layer passes on, and often enlarges, what it is handed. So that is measured on the model itself: it is run once
more with the input of each layer off by one rounding (`nudged`), and the tolerance is a multiple of what comes out.

The multiples are three times what models of random weights showed (3 to 42 layers, hidden width 16 to 64), each in
float32, float16 and bfloat16 against the same in float64. Largest difference, in roundings of the largest value:
looked-up rows 1.4, sums 5.2 (both largest in float32 or float16). After any layer and in the logits, as a multiple of
what the nudge does: 6.3 in float32, 3.0 in float16, 2.9 in bfloat16. Differences have both signs, so the norm moves
less: by at most a tenth of the largest difference, relative to the largest value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4patch.reference import Tolerance


@dataclass(frozen=True)
class Precision:
    """A float type: what one rounding is, as a share of a value, and how many nudges a whole layer amounts to."""

    name: str
    rounding: float
    nudges: int


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", 2.0**-24, 20),
        Precision("float16", 2.0**-11, 9),
        Precision("bfloat16", 2.0**-8, 9),
    )
}

# Up to the layers, in roundings of the largest value.
_ROUNDINGS = {"per_layer_identity": 4, "per_layer_inputs": 16, "hidden_states.0": 4}

# The norm may be off by the same share as the largest value, over this.
_NORM = 4


def coarser(one: str, other: str) -> Precision:
    """Of two precisions the one that rounds more."""
    return max(PRECISIONS[one], PRECISIONS[other], key=lambda precision: precision.rounding)


def is_rounded_only(name: str) -> bool:
    """Whether an expected tensor is made before the layers, so that its tolerance does not depend on the model."""
    return name in _ROUNDINGS


def of_rounding(name: str, largest: float, precision: Precision) -> Tolerance:
    """The tolerance of a tensor made before the layers whose largest absolute value is `largest`."""
    share = _ROUNDINGS[name] * precision.rounding
    reason = (
        f"{_ROUNDINGS[name]} roundings of {precision.name}, each {precision.rounding:.0e} of the largest value, "
        f"{largest:.3g}; the norm, where they cancel, a quarter of that"
    )
    return Tolerance(share * largest, share / _NORM, reason)


def of_nudge(largest: float, moved: float, precision: Precision) -> Tolerance:
    """The tolerance of a tensor made by the layers that `nudged` inputs of the layers move by at most `moved`."""
    bound = precision.nudges * moved
    reason = (
        f"with each layer's input off by one rounding of {precision.name}, this model is off by {moved:.1e}; "
        f"{precision.nudges} times that, for the roundings inside a layer; the norm, where they cancel, a quarter of it"
    )
    return Tolerance(bound, bound / largest / _NORM if largest else 0.0, reason)


def largest(array: NDArray[Any]) -> float:
    """The largest absolute value; 0 for an empty tensor."""
    return float(np.abs(array).max(initial=0))
