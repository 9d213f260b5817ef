"""What a graph holds of the whole model: which layers it computes, and where the values are that references name.

Found by structure, as PLE is. The slice of the per-layer inputs that a layer takes is multiplied with a gate, projected
to the hidden width and added to the residual stream, as the last thing the layer does but for a scalar: the sum is the
hidden state at the entry of the next layer (Hugging Face's `Gemma4TextDecoderLayer.forward`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from g4patch.cone import depends_on
from g4patch.downstream import is_integer, reshape_tail
from g4patch.ple import GraphAnalysis
from g4patch.recognise import slices
from g4patch.tokens import TokenFacts
from g4patch.view import VIEW_OPS, Graph, Node, Op, Value

IDENTITY, COMBINED, LOGITS = "per_layer_identity", "per_layer_inputs", "logits"
# `hidden_states.<k>` is the hidden state at the entry of layer k.
HIDDEN = "hidden_states."


@dataclass(frozen=True)
class Stage:
    """A graph as a part of the model.

    `layers` are the decoder layers that it computes, empty for one that only embeds. `inputs` and `outputs` are the
    graph's own, by name, with the names that references use; those that have none are missing. `taps` are all values
    that references name, graph outputs among them. `depth` is L of its per-layer inputs, None where it has none.
    """

    analysis: GraphAnalysis
    layers: tuple[int, ...]
    depth: int | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    taps: Mapping[str, str]

    @property
    def graph(self) -> Graph:
        return self.analysis.graph

    @property
    def takes_part(self) -> bool:
        """Whether it computes anything that a reference of the whole model names."""
        return bool(self.taps)


def stage_of(analysis: GraphAnalysis, tokens: TokenFacts) -> Stage:
    """A graph as a part of the model; whatever is not shown by structure is left out."""
    graph = analysis.graph
    rows = _per_layer_rows(analysis)
    flat = max((lookup.flat for lookup in analysis.lookups), default=0)
    after = dict(_after_layers(graph, *rows, flat)) if rows is not None else {}
    layers = tuple(sorted(after))
    hidden = _hidden_size(graph, after, tokens)
    inputs = dict(_inputs(analysis, rows, layers, hidden, tokens))
    outputs = dict(_outputs(analysis, rows, after, hidden, tokens))
    taps = {f"{HIDDEN}{layer + 1}": value for layer, value in after.items()}
    combined = {lookup.combined for lookup in analysis.lookups if lookup.combined is not None}
    if len(combined) == 1:
        taps[COMBINED] = combined.pop()
    if analysis.lookup is not None:
        taps[IDENTITY] = analysis.lookup.output
    taps = {name: value for value, name in outputs.items()} | taps
    return Stage(analysis, layers, rows[1] if rows is not None else None, inputs, outputs, taps)


def _per_layer_rows(analysis: GraphAnalysis) -> tuple[str, int] | None:
    """The value `[.., L, D]` that layers take their slices of, and L: the sum, or what a host or a stage hands in."""
    combined = {(lookup.combined, lookup.layers) for lookup in analysis.lookups if lookup.combined is not None}
    if len(combined) == 1:
        value, layers = combined.pop()
        return (value, layers) if value is not None else None
    if analysis.lookups or len(analysis.host_inputs) != 1:
        return None
    graph, (given,) = analysis.graph, analysis.host_inputs
    shape = graph.value(given).shape or ()
    for _, node in graph.consumers(given):
        tail = reshape_tail(graph, node, shape[-1] or 0) if shape else None
        if tail is not None:
            return node.output, tail[0]
    return (given, shape[-2]) if len(shape) == 4 and shape[-2] else None


def _after_layers(graph: Graph, rows: str, layers: int, flat: int) -> Iterator[tuple[int, str]]:
    """For each layer that takes a slice of its own, the hidden state behind it."""
    for taken, value in slices(graph, rows, layers, flat) or ():
        if len(taken) == 1 and (total := _residual_sum(graph, value)) is not None:
            yield next(iter(taken)), _scaled(graph, total)


def _residual_sum(graph: Graph, rows: str) -> str | None:
    """The first sum of what a layer makes of its slice with what it computes without it; behind a projection."""
    reached, projected = {rows}, set[str]()
    for node in graph.nodes:
        through = [value for value in node.operands.values() if value in reached]
        if not through:
            continue
        if node.op is Op.ADD and projected.intersection(through):
            (other,) = [value for value in node.operands.values() if value not in reached] or [""]
            if other and graph.scalar(other) is None and depends_on(graph, other):
                return node.output
        reached.update(node.outputs)
        if node.op is Op.MATMUL or projected.intersection(through):
            projected.update(node.outputs)
    return None


def _scaled(graph: Graph, value: str) -> str:
    """The product of a value with a scalar, perhaps cast, where nothing else reads it: the layer's own scale."""
    readers = [node for _, node in graph.consumers(value)]
    if value in graph.outputs or len(readers) != 1:
        return value
    (node,) = readers
    if node.op is Op.CAST and (onward := _scaled(graph, node.output)) != node.output:
        return onward
    is_scale = node.op is Op.MUL and any(graph.scalar(name) is not None for name in node.operands.values())
    return node.output if is_scale else value


def _hidden_size(graph: Graph, after: Mapping[int, str], tokens: TokenFacts) -> int | None:
    shapes = [graph.value(value).shape for value in after.values()]
    widths = {shape[-1] for shape in shapes if shape}
    return widths.pop() if len(widths) == 1 else tokens.hidden_size


def _inputs(
    analysis: GraphAnalysis,
    rows: tuple[str, int] | None,
    layers: tuple[int, ...],
    hidden: int | None,
    tokens: TokenFacts,
) -> Iterator[tuple[str, str]]:
    graph = analysis.graph
    ids = {lookup.ids_input for lookup in analysis.lookups}
    ids |= {
        name
        for node in analysis.embeddings
        for name in depends_on(graph, node.operands["index"])
        if is_integer(graph.value(name))
    }
    if len(ids) == 1:
        yield ids.pop(), "input_ids"
    if len(analysis.host_inputs) == 1 and rows is not None:
        yield analysis.host_inputs[0], COMBINED
    for splice in analysis.splices:
        names = [f"{kind}_features" for kind, token in tokens.media.items() if splice.ids == (token,)]
        handed = [value for value in depends_on(graph, splice.other) if not is_integer(graph.value(value))]
        if len(names) == len(handed) == 1 and len(graph.value(handed[0]).shape or ()) == 2:
            yield handed[0], names[0]
    entries = [value.name for value in graph.inputs if _is_hidden(value, hidden, analysis)]
    if len(entries) == 1 and layers:
        yield entries[0], f"{HIDDEN}{layers[0]}"


def _is_hidden(value: Value, hidden: int | None, analysis: GraphAnalysis) -> bool:
    shape = value.shape or ()
    rows = len(shape) == 3 and hidden is not None and shape[-1] == hidden
    return rows and not is_integer(value) and value.name not in analysis.host_inputs


def _outputs(
    analysis: GraphAnalysis,
    rows: tuple[str, int] | None,
    after: Mapping[int, str],
    hidden: int | None,
    tokens: TokenFacts,
) -> Iterator[tuple[str, str]]:
    graph = analysis.graph
    last = max(after, default=None)
    vocabulary = tokens.vocabulary
    for name in graph.outputs:
        shape = graph.value(name).shape or ()
        behind = _behind_views(graph, name)
        if rows is not None and analysis.lookups and rows[0] in behind:
            yield name, COMBINED
        elif last is not None and after[last] in behind:
            yield name, f"{HIDDEN}{last + 1}"
        elif vocabulary is not None and shape[-1:] == (vocabulary,) and (last is not None or name == LOGITS):
            yield name, LOGITS
        elif last is None and analysis.embeddings and len(shape) == 3 and shape[-1] == hidden:
            yield name, f"{HIDDEN}0"


def _behind_views(graph: Graph, value: str) -> frozenset[str]:
    """A value and what it is a mere view of."""
    names = {value}
    node: Node | None = graph.producer(value)
    while node is not None and node.op in VIEW_OPS:
        names.add(node.operands["x"])
        node = graph.producer(node.operands["x"])
    return frozenset(names)
