"""Turns a typed graph with FP16 tensors into an FP32 graph that computes what FP16 storage makes of it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from enginesmith.tasks.graph.fp16 import FLOAT, HALF, MOVES, bodies, cast_node, prepared, rounding


def emulate(model: ir.Model) -> ir.Model:
    """The FP32 graph that computes what a typed graph with FP16 tensors computes on FP16 storage.

    1. FP16 tensors become float32 tensors that hold only FP16 values; FP16 constants become float32, exactly.
    2. Each result that an FP16 node computes gets a rounding behind it. Results that are among the operands' values
       (Reshape, Relu, MaxPool, …) need none.
    3. Cast to FLOAT16 rounds; Cast from FLOAT16 does nothing. CastLike becomes Cast.
    4. Control flow carries float32; the nodes of its bodies are treated as above.
    5. Inputs and outputs of the model keep their names and types: FP16 ones are cast at the border.

    Run node by node (`level` DISABLE_ALL) the result is bit for bit that of `SwitchedModel` at that level; otherwise
    ONNX Runtime may fuse neighbours that are both FP32, which changes their last bits. It fuses nothing across a
    rounding. Calls of model-local functions are inlined. The given model is not changed.
    """
    copy = prepared(model)
    common.InlinePass()(copy)
    common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(copy)
    nodes = list(copy.graph.all_nodes())
    outputs = enumerate(copy.graph.outputs)
    declared = [index for index, value in outputs if value.dtype == HALF and not value.is_graph_input()]
    halves = {value for node in nodes for value in node.outputs if value.dtype == HALF}
    for graph in copy.graphs():
        for value in graph.initializers.values():
            _widen_constant(value)
        if graph is not copy.graph:
            for value in graph.inputs:
                _widen(value)
    _widen_inputs(copy.graph)
    for node in nodes:
        _widen_attributes(node)
        for value in node.outputs:
            if value in halves:
                _widen_result(node, value)
            else:
                _widen(value)
    for index in declared:
        _narrow_output(copy.graph, index)
    return copy


def _widen_result(node: ir.Node, value: ir.Value) -> None:
    """Make a node's FP16 result float32, with the roundings that its operator needs."""
    if node.op_type == "CastLike":
        _replace_castlike(node, value)
    elif node.op_type == "Cast":
        _append(node, value, [cast_node(value, FLOAT, f"half:{value.name}:32")], raw=HALF)
    elif bodies(node) or node.op_type in MOVES:
        value.dtype = FLOAT
    else:
        _append(node, value, rounding(value, f"half:{value.name}"), raw=FLOAT)


def _append(node: ir.Node, value: ir.Value, chain: list[ir.Node], *, raw: ir.DataType) -> None:
    """Put a chain of casts behind a value; its end takes the value's name and uses."""
    end = chain[-1].outputs[0]
    users = [use for use in value.uses() if use.node is not chain[0]]
    graph = node.graph
    if graph is None:
        raise TypeError(f"node {node.name!r} belongs to no graph")
    graph.insert_after(node, chain)
    for use in users:
        use.node.replace_input_with(use.idx, end)
    if value.is_graph_output():
        outputs = graph.outputs
        for index, output in enumerate(outputs):
            if output is value:
                outputs[index] = end
    end.name, value.name = value.name, f"exact:{value.name}"
    end.shape = value.shape
    value.dtype = raw
    end.dtype = FLOAT


def _replace_castlike(node: ir.Node, value: ir.Value) -> None:
    cast = cast_node(_operand(node, 0), HALF, f"half:{value.name}:16")
    back = cast_node(cast.outputs[0], FLOAT, f"half:{value.name}:32")
    graph = node.graph
    if graph is None:
        raise TypeError(f"node {node.name!r} belongs to no graph")
    graph.insert_before(node, [cast, back])
    value.replace_all_uses_with(back.outputs[0], replace_graph_outputs=True)
    back.outputs[0].name, value.name = value.name, None
    graph.remove(node, safe=True)


def _operand(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise TypeError(f"operand {index} of node {node.name!r} is missing")
    return value


def _widen_constant(value: ir.Value) -> None:
    if value.const_value is not None and value.const_value.dtype == HALF:
        value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
        value.dtype = FLOAT


def _widen_inputs(graph: ir.Graph) -> None:
    for value in [value for value in graph.inputs if value.dtype == HALF]:
        cast = cast_node(value, FLOAT, f"half:{value.name}:32")
        for use in [use for use in value.uses() if use.node is not cast]:
            use.node.replace_input_with(use.idx, cast.outputs[0])
        if len(graph):
            graph.insert_before(graph[0], cast)
        else:
            graph.append(cast)


def _narrow_output(graph: ir.Graph, index: int) -> None:
    """Cast an output back to the FLOAT16 that the model declares."""
    value = graph.outputs[index]
    cast = cast_node(value, HALF, f"half:{value.name}:out")
    cast.outputs[0].shape = value.shape
    graph.append(cast)
    cast.outputs[0].name, value.name = value.name, f"half:{value.name}"
    graph.outputs[index] = cast.outputs[0]


def _widen(value: ir.Value) -> None:
    """Replace FLOAT16 by FLOAT in a value's declared type, inside sequences and optionals too."""
    if value.type is not None:
        value.type = _wide(value.type)


def _wide(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(FLOAT) if kind.dtype == HALF else kind
    if isinstance(kind, ir.SequenceType):
        return ir.SequenceType(_wide(kind.elem_type))
    if isinstance(kind, ir.OptionalType):
        return ir.OptionalType(_wide(kind.elem_type))
    return kind


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == HALF:
            wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
            node.attributes[name] = ir.AttrTensor(name, wide)
        elif name in _DTYPE_ATTRIBUTES and attribute.as_int() == HALF:
            node.attributes[name] = ir.AttrInt64(name, int(FLOAT))


_DTYPE_ATTRIBUTES = {"dtype", "output_dtype", "output_datatype", "precision", "softmax_precision"}
