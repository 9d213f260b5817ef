"""The index of a gather as `g4patch.view` has it: one element an id."""

from __future__ import annotations

import numpy as np

from g4patch.formats.coreai.draft import Draft
from g4patch.formats.coreai.ops import Native
from g4patch.formats.coreai.program import Program
from g4patch.view import Node, Op

# What may stand between an index and a gather along an axis.
_TRANSPARENT = ("coreai.broadcast_in_dims", "coreai.broadcast_to", "coreai.cast")


def row_index(
    draft: Draft,
    program: Program,
    native: Native,
    operands: dict[str, str],
    uses: dict[str, tuple[int, int]],
) -> bool:
    """The index of a gather as one element an id; opaque where it is not, so that nothing is claimed.

    Returns whether its use is the gather's alone.
    """
    name, alone = operands["index"], True
    column = draft.is_column(name)
    node = draft.producers.get(name)
    by_row = native.name == "coreai.gather_along_axis" and native.rank(0) == 2
    while by_row and not column and node is not None and node.native in _TRANSPARENT:
        alone = alone and program.use_counts[draft.places[name].value] == 1
        name = node.operands["x"]
        uses["index"] = draft.uses.get((node.address, "x"), uses["index"])
        column = draft.is_column(name) or _stretches_rows(draft, node)
        node = draft.producers.get(name)
    if not column:
        unclear = f"{native.result} coordinates"
        draft.emit(Op.OPAQUE, native.name, unclear, {"0": operands["index"]}, (unclear,))
        name = unclear
    operands["index"] = name
    return alone


def _stretches_rows(draft: Draft, node: Node) -> bool:
    """Whether a broadcast stretches the second axis: its size is 1 then, even where its type is open."""
    axes = draft.constants.get(node.operands.get("2", ""))
    return node.native == "coreai.broadcast_in_dims" and axes is not None and bool(np.isin(axes, (1, -1)).any())
