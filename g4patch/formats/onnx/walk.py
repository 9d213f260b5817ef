"""Walk a ModelProto: every block of nodes, every tensor, in subgraphs and functions too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto


@dataclass(frozen=True)
class Block:
    """A graph, a branch or loop body, or a function. `address` does not depend on what is in it ("" is the main graph).

    `nodes` is the repeated field itself; `graph` is None for a function; `names` are those of its inputs and outputs.
    """

    address: str
    nodes: Any
    graph: GraphProto | None
    names: tuple[str, ...]


def blocks(proto: ModelProto) -> Iterator[Block]:
    """Every block of a model, the main graph first."""
    yield from _of_graph("", proto.graph)
    for function in proto.functions:
        address = f"{function.domain}.{function.name}.{function.overload}/"
        names = (function.name, function.domain, function.overload, *function.input, *function.output)
        yield Block(address, function.node, None, names)
        yield from _inner(address, function.node)


def _of_graph(address: str, graph: GraphProto) -> Iterator[Block]:
    infos = (*graph.input, *graph.output, *graph.value_info)
    yield Block(address, graph.node, graph, tuple(info.name for info in infos))
    yield from _inner(address, graph.node)


def _inner(address: str, nodes: Any) -> Iterator[Block]:
    for node in nodes:
        for attribute in node.attribute:
            for number, graph in enumerate(graphs(attribute)):
                yield from _of_graph(block_address(address, node, attribute, number), graph)


def graphs(attribute: AttributeProto) -> list[GraphProto]:
    """The graphs that an attribute holds."""
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def block_address(outer: str, node: NodeProto, attribute: AttributeProto, number: int) -> str:
    """The address of a graph in an attribute of a node."""
    first = next((name for name in node.output if name), node.name)
    return f"{outer}{first}@{attribute.name}{number or ''}/"


def tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every tensor that a model stores: initializers, also sparse ones, and those in attributes."""
    for block in blocks(proto):
        if block.graph is not None:
            yield from block.graph.initializer
            for sparse in block.graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
        for node in block.nodes:
            for attribute in node.attribute:
                yield from ([attribute.t] if attribute.HasField("t") else [])
                yield from attribute.tensors
                for sparse in [attribute.sparse_tensor, *attribute.sparse_tensors]:
                    yield from (sparse.values, sparse.indices)
