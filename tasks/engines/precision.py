"""Turns an ONNX graph into the precision that each node asks for, and compares it with what an engine has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto

from enginesmith.tasks.engines.spec import EngineError, NodePrecision, Precision

COMPUTE = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"

_FLOATS: Mapping[int, Precision] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.DOUBLE: "other",
}
_EIGHT_BITS = frozenset({TensorProto.INT8, TensorProto.UINT8})
_ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh"})
_CARRIERS = frozenset({"Cast", "Constant", "Identity", "Shape", "Size", QUANTIZE, DEQUANTIZE})


@dataclass(frozen=True)
class Request:
    """What one node asks for.

    Attributes:
        node: its name.
        op: its operator.
        precision: "int8" for a Conv, ConvTranspose, Gemm or MatMul whose two operands come out of an 8-bit
            DequantizeLinear; for the activation between such a node and QuantizeLinear; and for any node between
            DequantizeLinear on all sides and QuantizeLinear. Otherwise the type of its first floating output.
        output: name of that output.
        anchor: whether it multiplies with weights or another activation: the nodes whose precision costs or saves time.
    """

    node: str
    op: str
    precision: Precision
    output: str
    anchor: bool


@dataclass
class Types:
    """Element types of a graph's values and who makes and reads them; a subgraph sees its outer graph's values."""

    types: dict[str, int] = field(default_factory=dict)
    producers: dict[str, onnx.NodeProto] = field(default_factory=dict)
    consumers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)


def requests(model: onnx.ModelProto) -> list[Request]:
    """The precision that every node with a floating result asks for, in graph order, subgraphs included.

    Left out are nodes that carry data without computing: Cast, Constant, Identity, Shape, Size, QuantizeLinear and
    DequantizeLinear. Types come from ONNX's own shape inference; a node whose type it cannot tell is left out too.
    """
    inferred = infer(model)
    return list(_walk(inferred.graph, Types()))


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the types of its inner values filled in, weights left out (they would be copied)."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for tensor in bare.graph.initializer:
        if tensor.ByteSize() > 4096:
            kept = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            kept.data_location = TensorProto.EXTERNAL
            kept.external_data.add(key="location", value="none")
            tensor.CopyFrom(kept)
    try:
        return onnx.shape_inference.infer_shapes(bare)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return bare


def _walk(graph: onnx.GraphProto, outer: Types) -> Iterator[Request]:
    seen = Types(dict(outer.types), dict(outer.producers), dict(outer.consumers))
    for value in [*graph.input, *graph.value_info, *graph.output]:
        seen.types[value.name] = value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        seen.types[tensor.name] = tensor.data_type
    for node in graph.node:
        for name in node.output:
            seen.producers[name] = node
        for name in node.input:
            seen.consumers.setdefault(name, []).append(node)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _walk(attribute.g, seen)
        found = _request(node, seen)
        if found is not None:
            yield found


def _request(node: onnx.NodeProto, seen: Types) -> Request | None:
    if node.op_type in _CARRIERS:
        return None
    output = next((o for o in node.output if seen.types.get(o) in _FLOATS), None)
    if output is None:
        return None
    precision = _FLOATS[seen.types[output]]
    if is_int8(node, seen) or _absorbed(node, seen):
        precision = "int8"
    return Request(node.name, node.op_type, precision, output, node.op_type in COMPUTE)


def is_int8(node: onnx.NodeProto, seen: Types) -> bool:
    """Whether a node multiplies two operands that both come out of an 8-bit DequantizeLinear."""
    return node.op_type in COMPUTE and all(_dequantized(name, seen) for name in node.input[:2])


def _dequantized(name: str, seen: Types) -> bool:
    node = seen.producers.get(name)
    if node is None or node.op_type != DEQUANTIZE:
        return False
    zero_point = node.input[2] if len(node.input) > 2 else ""
    types = {seen.types.get(node.input[0]), seen.types.get(zero_point)}
    return bool(types & _EIGHT_BITS)


def _absorbed(node: onnx.NodeProto, seen: Types) -> bool:
    """Whether a node's result is quantized at once, and its data comes quantized or straight from an INT8 node."""
    readers = seen.consumers.get(node.output[0], [])
    if not readers or any(reader.op_type != QUANTIZE for reader in readers):
        return False
    producer = seen.producers.get(node.input[0]) if node.input else None
    if node.op_type in _ACTIVATIONS and producer is not None and is_int8(producer, seen):
        return True
    floating = [name for name in node.input if seen.types.get(name) in _FLOATS]
    return bool(floating) and all(_dequantized(name, seen) for name in floating)


def counts(precisions: Iterable[str]) -> dict[str, int]:
    """Number of nodes per precision, unseen ones ("") left out."""
    return dict(sorted(Counter(p for p in precisions if p).items()))


def check_obeyed(layers: Iterable[NodePrecision], *, backend: str, variant: str) -> None:
    """Fail when a node has another precision than the graph asks for.

    No mismatch is: a node about which the engine shows nothing (it was folded into a constant or into a neighbour; it
    is counted as unseen); and a node without weights between DequantizeLinear and QuantizeLinear that the engine
    computes in float, since that is what the graph says literally.

    Raises:
        EngineError: naming the nodes.
    """
    wrong = [
        layer
        for layer in layers
        if layer.actual
        and layer.actual != layer.requested
        and not (layer.requested == "int8" and layer.op not in COMPUTE)
    ]
    if not wrong:
        return
    raise EngineError(
        f"{backend} did not keep the precision of {len(wrong)} node(s) of the {variant} variant",
        details=[
            f"{layer.node} ({layer.op}): asked {layer.requested}, has {layer.actual}"
            + (f" in {layer.layer}" if layer.layer and layer.layer != layer.node else "")
            for layer in wrong
        ],
        hint="the engine is not what the graph says, so it is refused; take these nodes out of this precision",
    )


def external_files(model: onnx.ModelProto) -> list[str]:
    """Names of the files that hold a model's external data, sorted."""
    names: set[str] = set()
    for tensor in _tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            names.update(e.value for e in tensor.external_data if e.key == "location")
    return sorted(names)


def load_model(path: Path, *, weights: bool = True) -> onnx.ModelProto:
    """Read an ONNX file.

    Raises:
        EngineError: it is missing, damaged, or its external data is.
    """
    try:
        return onnx.load(path, load_external_data=weights)
    except Exception as error:
        raise EngineError(f"not a readable ONNX file: {type(error).__name__}: {error}", where=str(path)) from error


def _tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == onnx.AttributeProto.GRAPH:
                yield from _tensors(attribute.g)
