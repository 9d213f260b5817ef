"""Core AI assets (`.aimodel`): a module that satisfies `g4patch.formats.Format`.

All that needs coreai-core's native code runs in a worker process: `g4patch.runtimes.coreai`.
"""

from __future__ import annotations

from g4patch.edits import Plan
from g4patch.formats import Model
from g4patch.formats.coreai.differences import differences
from g4patch.formats.coreai.edit import write
from g4patch.formats.coreai.model import NAME, open_model
from g4patch.formats.coreai.probe import probe, validate

__all__ = ["MASK_DTYPES", "NAME", "complete", "differences", "open_model", "probe", "validate", "write"]

# Apple's runtime computes equal and where in these; token ids are int32 in practice.
MASK_DTYPES = frozenset({"int16", "int32", "int64", "uint16", "uint32"})


def complete(model: Model, plan: Plan) -> Plan:
    """The plan itself: Core AI needs no companion nodes."""
    return plan
