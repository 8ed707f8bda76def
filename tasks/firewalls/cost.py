"""Turns a graph of known shapes into what each node computes and moves: FLOPs, bytes, arithmetic intensity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from enginesmith.tasks.firewalls.sized import Sized

MATRIX = ("Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "RNN")
"""Operators of multiply-adds: what Tensor Cores run."""

FREE = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Shape", "Size", "Constant", "Dropout", "Cast"}
"""Operators that an engine turns into a view, a shape or part of a neighbour."""

_PER_ELEMENT = {
    "Softmax": 5,
    "LogSoftmax": 5,
    "Gelu": 8,
    "Erf": 8,
    "Tanh": 4,
    "Sigmoid": 4,
    "Exp": 4,
    "LayerNormalization": 8,
}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Cost:
    """What one node costs at one size.

    Attributes:
        node: the node.
        flops: floating-point operations; a multiply-add is two.
        elements: elements read and written, weights included: times the item size it is bytes.
        weights: elements of its constants among them.
    """

    node: ir.Node
    flops: float
    elements: float
    weights: float = 0.0

    def bytes(self, itemsize: int = 2) -> float:
        """Bytes moved when every element has this size."""
        return self.elements * itemsize

    def intensity(self, itemsize: int = 2) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes(itemsize) if self.elements else 0.0


def costs(model: ir.Model, sized: Sized) -> Iterator[Cost]:
    """The cost of every node of the main graph whose shapes are known, views left out.

    Matrix operators are counted in closed form: Conv 2·N·C_out·(C_in/g)·∏k·∏out, ConvTranspose the same with its
    input's positions, MatMul and Gemm 2·B·M·K·N, LSTM 4, GRU 3 and RNN 1 gates of 2·(I+H)·H per step. All else
    counts a fixed number per element. Nodes in subgraphs and nodes of unknown shape are not counted.
    """
    for node in model.graph:
        if node.op_type in FREE or not node.outputs:
            continue
        shapes = [sized.full(str(value.name)) for value in node.inputs if value is not None]
        results = [sized.full(str(value.name)) for value in node.outputs if value.uses() or value.is_graph_output()]
        if not results or None in results or (shapes and shapes[0] is None):
            continue
        known = [math.prod(s) for s in (*shapes, *results) if s is not None]
        weights = sum(
            math.prod(shape)
            for value, shape in zip([v for v in node.inputs if v is not None], shapes, strict=True)
            if shape is not None and value.is_initializer()
        )
        yield Cost(node, _flops(node, sized), float(sum(known)), float(weights))


def _flops(node: ir.Node, sized: Sized) -> float:
    shapes = [sized.full(str(value.name)) if value is not None else () for value in node.inputs]
    result = sized.full(str(node.outputs[0].name)) or ()
    if node.op_type in MATRIX and None not in shapes[:2]:
        given = [s or () for s in shapes]
        if node.op_type == "Conv":
            return 2.0 * math.prod(result) * math.prod(given[1][1:])
        if node.op_type == "ConvTranspose":
            return 2.0 * math.prod(given[0]) * math.prod(given[1][1:])
        if node.op_type == "MatMul":
            return 2.0 * math.prod(result) * given[0][-1]
        if node.op_type == "Gemm":
            transposed = node.attributes.get("transA")
            inner = given[0][0] if transposed is not None and transposed.as_int() else given[0][1]
            return 2.0 * math.prod(result) * inner
        directions, gates_hidden, inputs = given[1]
        hidden = gates_hidden // _GATES[node.op_type]
        steps = math.prod(given[0][:2])
        return 2.0 * directions * steps * gates_hidden * (inputs + hidden)
    return float(math.prod(result) * _PER_ELEMENT.get(node.op_type, 1) * _window(node))


def _window(node: ir.Node) -> int:
    kernel = node.attributes.get("kernel_shape")
    return math.prod(kernel.as_ints()) if kernel is not None else 1
