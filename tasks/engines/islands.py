"""Keeps single FP32 nodes between FP16 neighbours in FP32 when TensorRT-RTX builds them.

TensorRT-RTX (seen in 1.7) turns ``Cast(FLOAT) → Conv → Cast(FLOAT16)`` into an FP16 convolution whose FP32 weights are
rounded to FP16, although the network is strongly typed and the Conv is FP32; the same with ConvTranspose and MatMul. An
operator between the node and the Cast prevents it, so one is put there that changes no bit: ``LeakyRelu(alpha=1)``,
which gives x or 1 * x, and both are x for every x, zeros of both signs, infinities and NaN included. (An added zero
becomes the bias of a Conv that has none, and prevents nothing then; Identity and ``1 * x`` are removed.)

Rewritten: a Conv, ConvTranspose, Gemm or MatMul of the main graph whose result is FLOAT, of which at least one operand
comes out of a Cast from FLOAT16, and whose every reader is a Cast to FLOAT16. Left alone: anything else; above all a
result that is a graph output or is read in FP32, where TensorRT-RTX keeps what the graph says.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from enginesmith.tasks.engines.precision import COMPUTE, infer


def guard_islands(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """A copy in which such nodes are guarded, and their names; the given model itself when there are none."""
    graph = model.graph
    inferred = infer(model).graph
    types = {v.name: v.type.tensor_type.elem_type for v in [*inferred.input, *inferred.value_info, *inferred.output]}
    producers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {o.name for o in graph.output}

    def widened(name: str) -> bool:
        maker = producers.get(name)
        return maker is not None and maker.op_type == "Cast" and types.get(maker.input[0]) == TensorProto.FLOAT16

    def is_island(node: onnx.NodeProto) -> bool:
        if node.op_type not in COMPUTE or types.get(node.output[0]) != TensorProto.FLOAT:
            return False
        found = readers.get(node.output[0], [])
        narrowed = bool(found) and node.output[0] not in outputs and all(_narrows(reader) for reader in found)
        return narrowed and any(widened(name) for name in node.input)

    islands = tuple(node.name for node in graph.node if is_island(node))
    return (_guarded(model, frozenset(islands)), islands) if islands else (model, ())


def _guarded(model: onnx.ModelProto, islands: frozenset[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    for node in copy.graph.node:
        kept = onnx.NodeProto()
        kept.CopyFrom(node)
        nodes.append(kept)
        if node.name in islands:
            result = node.output[0]
            kept.output[0] = f"{result}_unguarded"
            nodes.append(helper.make_node("LeakyRelu", kept.output[:1], [result], name=f"{node.name}_guard", alpha=1.0))
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def _narrows(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and any(a.name == "to" and a.i == TensorProto.FLOAT16 for a in node.attribute)
