"""Turns a graph into one that puts out how large the sums inside its operators get, before they are results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from enginesmith.tasks.graph.fp16 import is_constant, prepared

_FLOAT = ir.DataType.FLOAT

# The same operator on magnitudes adds up the magnitudes of its terms.
_LINEAR = {"Conv", "ConvTranspose", "CumSum", "Einsum", "Gemm", "MatMul", "ReduceL1", "ReduceSum"}
_MEANS = {"GlobalAveragePool", "ReduceMean"}
_SQUARES = {"ReduceL2", "ReduceSumSquare"}


def largest_sums(model: ir.Model) -> tuple[ir.Model, dict[str, str]]:
    """A graph with one scalar output for each node that adds up: the largest sum of the magnitudes of its terms.

    An accumulator meets partial sums of the terms; none of them exceeds this figure, in whatever order they are added.
    Above 65504 an FP16 accumulator may overflow although the result fits. FP32 accumulators, which the emulation
    assumes, do not.

    Returns:
        The graph, and the output's name for each node: Conv, ConvTranspose, Gemm, MatMul, Einsum, CumSum, ReduceSum,
        ReduceL1, ReduceMean and GlobalAveragePool (the sum before it is divided), ReduceSumSquare and ReduceL2 (the sum
        of squares), where they work on float32. Nodes in bodies of If, Loop and Scan are left out.
    """
    copy = prepared(model)
    graph = copy.graph
    graph.outputs.clear()
    found: dict[str, str] = {}
    for node in list(graph):
        sums = _sums(node)
        if sums is None:
            continue
        graph.insert_after(node, sums.nodes)
        output = sums.result
        output.name = f"sum:{node.name}"
        output.shape = ir.Shape([])
        graph.outputs.append(output)
        for constant in sums.constants:
            graph.register_initializer(constant)
        found[str(node.name)] = f"sum:{node.name}"
    return copy, found


class _Steps:
    """Nodes added behind one node, with constants; the last node's output is the result."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []

    @property
    def result(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    def add(self, op: str, inputs: Sequence[ir.Value | None], **attributes: int) -> ir.Value:
        return self.put(ir.node(op, inputs, attributes))

    def put(self, node: ir.Node) -> ir.Value:
        node.name = f"{self._prefix}:{len(self.nodes)}"
        node.outputs[0].name = node.name
        node.outputs[0].dtype = ir.DataType.INT64 if node.op_type == "Size" else _FLOAT
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, values: np.ndarray) -> ir.Value:
        name = f"{self._prefix}:constant{len(self.constants)}"
        value = ir.val(name, const_value=ir.tensor(values, name=name))
        self.constants.append(value)
        return value


def _sums(node: ir.Node) -> _Steps | None:
    kind: Callable[[ir.Node, _Steps], ir.Value] | None = None
    if node.op_type in _LINEAR:
        kind = _of_magnitudes
    elif node.op_type in _MEANS:
        kind = _before_division
    elif node.op_type in _SQUARES:
        kind = _of_squares
    if kind is None or node.domain or not node.inputs or node.inputs[0] is None or node.inputs[0].dtype != _FLOAT:
        return None
    steps = _Steps(f"sums:{node.name}")
    value = kind(node, steps)
    # With a zero beside them, the maximum of no elements is defined too.
    flat = steps.add("Reshape", [value, steps.constant(np.array([-1]))])
    steps.add("ReduceMax", [steps.add("Concat", [flat, steps.constant(np.zeros(1, np.float32))], axis=0)], keepdims=0)
    return steps


def _of_magnitudes(node: ir.Node, steps: _Steps) -> ir.Value:
    inputs: list[ir.Value | None] = []
    for value in node.inputs:
        if value is None or value.dtype != _FLOAT:
            inputs.append(value)
        elif is_constant(value) and value.const_value is not None:
            inputs.append(steps.constant(np.abs(value.const_value.numpy())))
        else:
            inputs.append(steps.add("Abs", [value]))
    attributes = [
        ir.AttrFloat32(a.name, abs(a.as_float())) if a.type == ir.AttributeType.FLOAT else a
        for a in node.attributes.values()
    ]
    return steps.put(ir.Node(node.domain, node.op_type, inputs, attributes))


def _before_division(node: ir.Node, steps: _Steps) -> ir.Value:
    """Mean of the magnitudes, times how many values go into one."""
    mean = _of_magnitudes(node, steps)
    before, after = (_as_float(steps, steps.add("Size", [value])) for value in (node.inputs[0], node.outputs[0]))
    return steps.add("Mul", [mean, steps.add("Div", [before, after])])


def _of_squares(node: ir.Node, steps: _Steps) -> ir.Value:
    result = node.outputs[0]
    return steps.add("Mul", [result, result]) if node.op_type == "ReduceL2" else steps.add("Identity", [result])


def _as_float(steps: _Steps, value: ir.Value) -> ir.Value:
    return steps.add("Cast", [value], to=int(_FLOAT))
