"""Show a ModelProto as a `g4patch.view.Graph`, and keep the way back from each use to its place in the proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto, TensorProto

from g4patch.formats.onnx.layout import Layout, Place, Scope, Source, value_of
from g4patch.view import Graph


@dataclass(frozen=True)
class OnnxGraph:
    """The view and the ways back: each editable use `(address, operand)`, each node, each stored tensor.

    `own_names` gives the name in the proto for a name in the view. `names` are all names of values and nodes in the
    model, in whatever scope.
    """

    view: Graph
    places: Mapping[tuple[str, str], Place]
    sources: Mapping[str, Source]
    tensors: Mapping[str, TensorProto]
    own_names: Mapping[str, str]
    names: frozenset[str]


def build(proto: ModelProto, folder: Path) -> OnnxGraph:
    """Build the view of a model whose external data lies in `folder`. Raises BundleError for what cannot be one."""
    layout = Layout(folder, {(f.domain, f.name, f.overload): f for f in proto.functions})
    graph = proto.graph
    scope = Scope("", layout.own_names, graph.node)
    layout.initializers(graph, scope)
    inputs = tuple(value_of(info, info.name) for info in graph.input if info.name not in layout.tensors)
    layout.inputs(inputs, scope)
    layout.typed(graph, scope)
    layout.nodes_of(graph.node, scope)
    view = Graph(
        graph.name or "main",
        inputs,
        tuple(output.name for output in graph.output),
        tuple(layout.nodes),
        layout.values,
        layout.constants,
        layout.tables,
    )
    training = [graph for info in proto.training_info for graph in (info.initialization, info.algorithm)]
    names = layout.names.union(*({*node.input, *node.output} for graph in training for node in graph.node))
    return OnnxGraph(view, layout.places, layout.sources, layout.tensors, layout.own_names, frozenset(names))
