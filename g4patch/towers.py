"""The linears of a vision or audio tower, and the bounds that each clips what it reads and what it makes to.

Gemma 4's towers are made of `Gemma4ClippableLinear`: `clamp(linear(clamp(x, input_min, input_max)), output_min,
output_max)`, four numbers for each linear, stored in the checkpoint. Which linear is which follows from the order in
which a layer uses them and from which of them read the same value; names decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from g4patch.downstream import is_integer
from g4patch.view import VIEW_OPS, Graph, Node, Op, Value

BOUNDS = ("input_min", "input_max", "output_min", "output_max")

# The linears of one layer, in the order of use; those that read the same value stand together.
LAYOUTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "vision": (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)),
    "audio": (
        ("feed_forward1.ffw_layer_1",),
        ("feed_forward1.ffw_layer_2",),
        ("q_proj", "k_proj", "v_proj"),
        ("post",),
        ("linear_start",),
        ("linear_end",),
        ("feed_forward2.ffw_layer_1",),
        ("feed_forward2.ffw_layer_2",),
    ),
}


@dataclass(frozen=True)
class Bound:
    """One end of a clip: the values that state it, and the number that counts; None where one of them is no number."""

    values: tuple[str, ...]
    number: float | None


@dataclass(frozen=True)
class Linear:
    """A product with stored weights. `source` is what it reads before that is clipped; `bounds` lacks missing ones."""

    node: Node
    source: str
    bounds: Mapping[str, Bound]

    @property
    def is_clipped(self) -> bool:
        return self.bounds.keys() == set(BOUNDS)


@dataclass(frozen=True)
class Site:
    """A linear of a tower with its layer and projection, or with no layer and its address."""

    linear: Linear
    layer: int | None
    projection: str


@dataclass(frozen=True)
class Tower:
    """What a graph holds of a tower. `kind` is a key of LAYOUTS.

    `sites` are the linears of its layers, where all that are clipped stand in layers of a known layout; else those
    that are clipped.
    """

    kind: str
    sites: tuple[Site, ...]


def find(graph: Graph, patch_size: int | None) -> Tower | None:
    """The tower in a graph: one that takes an image, or has linears that are clipped on both sides.

    `patch_size` is the side of a patch in pixels, where it is known.
    """
    takes_image = any(_is_image(value, patch_size) for value in graph.inputs)
    if not takes_image and not any(node.op is Op.CLIP for node in graph.nodes):
        return None
    linears = tuple(_linears(graph))
    if not takes_image and not any(linear.is_clipped for linear in linears):
        return None
    kinds = ("vision",) if takes_image else ("audio", "vision")
    kind = max(kinds, key=lambda name: len(_layers(linears, LAYOUTS[name])))
    layers = _layers(linears, LAYOUTS[kind])
    inside = {linear.node.address for layer in layers for linear in layer}
    known = [linear for linear in linears if linear.is_clipped or linear.node.address in inside]
    if len(known) == len(inside):
        return Tower(kind, tuple(_sites(layers, LAYOUTS[kind])))
    # Layers that are only found in part cannot be numbered.
    return Tower(kind, tuple(Site(linear, None, linear.node.address) for linear in known))


def stands_alone(graph: Graph, patch_size: int | None) -> bool:
    """Whether a graph is a tower and nothing more: it takes no integers that could be prompts of token ids."""
    prompts = [value for value in graph.inputs if is_integer(value) and (value.shape is None or len(value.shape) < 3)]
    return not prompts and find(graph, patch_size) is not None


def _is_image(value: Value, patch_size: int | None) -> bool:
    """Whether an input holds pixels: `[B, 3, H, W]`, `[B, H, W, 3]`, or flat patches `[.., 3 * patch_size^2]`."""
    shape = value.shape
    if shape is None or not (value.dtype or "").startswith(("float", "bfloat")):
        return False
    if len(shape) == 4 and 3 in (shape[1], shape[3]):
        return True
    return patch_size is not None and len(shape) in (2, 3) and shape[-1] == 3 * patch_size**2


def _linears(graph: Graph) -> Iterator[Linear]:
    varying = {value.name for value in graph.inputs}
    for node in graph.nodes:
        if varying.intersection(node.operands.values()):
            varying.update(node.outputs)
    for node in graph.nodes:
        read = [name for name in node.operands.values() if name in varying]
        stored = [name for name in node.operands.values() if name not in varying]
        if node.op is Op.MATMUL and len(read) == 1 and not any(_is_kernel(graph.value(name)) for name in stored):
            clips = _Clips(graph)
            source = clips.before(read[0])
            clips.behind(node.output, varying)
            yield Linear(node, source, clips.bounds())


def _is_kernel(value: Value) -> bool:
    """Whether weights are those of a convolution over more than one point, or of several heads."""
    sizes = list(value.shape or ())
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return len(sizes) > 2 and (value.dtype or "").startswith(("float", "bfloat"))


@dataclass
class _Clips:
    """The clips around one linear: for each bound, the values that state it."""

    graph: Graph
    stated: dict[str, list[str]] = field(default_factory=dict)

    def before(self, value: str) -> str:
        """Go back from what a linear reads to what is clipped; returns that."""
        node = self.graph.producer(value)
        while node is not None and (node.op in VIEW_OPS or node.op is Op.CLIP):
            self._note(node, "input")
            value = node.operands["x"]
            node = self.graph.producer(value)
        return value

    def behind(self, value: str, varying: set[str]) -> None:
        """Go on from what a linear makes, past a stored bias, to where something else is done with it."""
        while True:
            readers = [node for _, node in self.graph.consumers(value) if node.op is not Op.SHAPE]
            if len(readers) != 1:
                return
            (node,) = readers
            others = [name for name in node.operands.values() if name != value]
            biased = node.op is Op.ADD and not varying.intersection(others)
            if node.op not in VIEW_OPS and node.op is not Op.CLIP and not biased:
                return
            self._note(node, "output")
            value = node.output

    def bounds(self) -> dict[str, Bound]:
        return {name: Bound(tuple(values), self._tightest(name, values)) for name, values in self.stated.items()}

    def _note(self, node: Node, side: str) -> None:
        for operand, end in (("low", "min"), ("high", "max")):
            if node.op is Op.CLIP and operand in node.operands:
                self.stated.setdefault(f"{side}_{end}", []).append(node.operands[operand])

    def _tightest(self, name: str, values: Sequence[str]) -> float | None:
        """Of clips in a row the tightest bound counts; a NaN makes all of them NaN."""
        numbers = [self.graph.scalar(value) for value in values]
        known = [float(number) for number in numbers if number is not None]
        if len(known) != len(numbers):
            return None
        if any(number != number for number in known):
            return float("nan")
        return max(known) if name.endswith("min") else min(known)


def _layers(linears: Sequence[Linear], layout: Sequence[tuple[str, ...]]) -> list[list[Linear]]:
    """The longest run of layers of a layout, each as its linears in order."""
    groups = [list(group) for _, group in groupby(linears, key=lambda linear: linear.source)]
    wanted, longest = [len(names) for names in layout], list[list[Linear]]()
    for start in range(len(groups)):
        run: list[list[Linear]] = []
        at = start
        while [len(group) for group in groups[at : at + len(wanted)]] == wanted:
            run.append([linear for group in groups[at : at + len(wanted)] for linear in group])
            at += len(wanted)
        longest = max(longest, run, key=len)
    return longest


def _sites(layers: Sequence[Sequence[Linear]], layout: Sequence[tuple[str, ...]]) -> Iterator[Site]:
    names = [name for group in layout for name in group]
    for number, linears in enumerate(layers):
        for name, linear in zip(names, linears, strict=True):
            yield Site(linear, number, name)
