"""Cut the part of a model that computes one value into a model of its own, to be run and thrown away.

The slice is cut from the laid-out view, so that a value in a branch or in a called function can be tapped as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from g4patch.formats.onnx.layout import Source
from g4patch.formats.onnx.view import OnnxGraph
from g4patch.runtimes import Unavailable


def cut(proto: ModelProto, graph: OnnxGraph, feeds: Collection[str], outputs: Sequence[str]) -> ModelProto:
    """A model from some of the values `feeds` to the values `outputs`, with weights as the proto stores them.

    Its inputs are the feeds that it needs. Raises Unavailable where another graph input, or a block of its own, stands
    in between.
    """
    sources = list(_between(graph, feeds, outputs))
    made = {name for source in sources for name in source.outputs} | set(feeds)
    needed = dict.fromkeys([name for source in sources for name in source.inputs if name] + list(outputs))
    model = ModelProto(ir_version=proto.ir_version)
    model.opset_import.extend(proto.opset_import)
    model.graph.name = "slice"
    model.graph.node.extend(_node(source) for source in sources)
    model.graph.initializer.extend(_initializer(graph, name) for name in needed if name not in made)
    model.graph.input.extend(_info(graph, name) for name in needed if name in feeds)
    # Without types: onnxruntime infers those of outputs.
    model.graph.output.extend(ValueInfoProto(name=name) for name in outputs)
    return model


def _between(graph: OnnxGraph, feeds: Collection[str], outputs: Sequence[str]) -> Iterator[Source]:
    wanted: set[str] = set()
    stack = list(outputs)
    while stack:
        name = stack.pop()
        node = graph.view.producer(name)
        if name in feeds:
            continue
        if node is None:
            if graph.view.input(name) is not None:
                raise Unavailable(f"the input {name} is needed too")
            continue
        if node.address in wanted:
            continue
        if node.address not in graph.sources or any(_has_body(a) for a in graph.sources[node.address].attributes):
            raise Unavailable(f"{node.native} at {node.address} stands in between")
        wanted.add(node.address)
        stack.extend(name for name in graph.sources[node.address].inputs if name)
    return (graph.sources[node.address] for node in graph.view.nodes if node.address in wanted)


def _has_body(attribute: AttributeProto) -> bool:
    return attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def _node(source: Source) -> NodeProto:
    node = NodeProto(op_type=source.node.op_type, domain=source.node.domain)
    node.input.extend(source.inputs)
    node.output.extend(source.outputs)
    node.attribute.extend(source.attributes)
    return node


def _initializer(graph: OnnxGraph, name: str) -> TensorProto:
    if name in graph.tensors:
        tensor = TensorProto()
        tensor.CopyFrom(graph.tensors[name])
        tensor.name = name
        # onnxruntime refuses entries that it does not know.
        place = [entry for entry in tensor.external_data if entry.key in ("location", "offset", "length")]
        del tensor.external_data[:]
        tensor.external_data.extend(place)
        return tensor
    if name in graph.view.constants:
        return numpy_helper.from_array(graph.view.constants[name], name)
    raise Unavailable(f"{name} is neither stored nor computed in the graph")


def _info(graph: OnnxGraph, name: str) -> ValueInfoProto:
    dtype = graph.view.value(name).dtype
    if dtype is None:
        raise Unavailable(f"the dtype of {name} is not known")
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, element, None)
