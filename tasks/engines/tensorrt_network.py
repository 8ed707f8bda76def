"""Turns an ONNX file into a TensorRT network whose layers have the precision that the graph asks for.

Where the version has strongly typed networks, the types are the graph's and nothing is to be done. TensorRT 8.6 has
none: there every tensor reads as FLOAT after parsing, so each layer's precision is set by the name of its ONNX node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from enginesmith.tasks.engines.precision import Request
from enginesmith.tasks.engines.spec import EngineError, Precision, Refusal

_NODE = re.compile(r"\[ONNX Layer: (.*?)\]")
_LEFT_ALONE = frozenset({"SHAPE", "CONSTANT", "CAST", "SHUFFLE", "IDENTITY", "QUANTIZE", "DEQUANTIZE"})
_FLOATING = frozenset({"FLOAT", "HALF", "BF16"})
_TYPES: Mapping[Precision, str] = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}


def name_of(value: Any) -> str:
    """DataType.HALF → "HALF"."""
    return str(value).rpartition(".")[2]


def has_strong_typing(trt: Any) -> bool:
    """Whether this version has strongly typed networks: 10 and later."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def has_weak_typing(trt: Any) -> bool:
    """Whether this version takes a precision per layer: 8.6 and 10."""
    return hasattr(trt.BuilderFlag, "OBEY_PRECISION_CONSTRAINTS")


def parse(trt: Any, builder: Any, logger: Any, model: onnx.ModelProto, path: Path, *, strong: bool) -> tuple[Any, Any]:
    """A network and the parser that filled it, or gave up: see its errors. External weights lie beside `path`."""
    flags = trt.NetworkDefinitionCreationFlag
    bits = 0
    if strong:
        bits |= 1 << int(flags.STRONGLY_TYPED)
    if not has_strong_typing(trt):
        bits |= 1 << int(flags.EXPLICIT_BATCH)  # a no-op in 10, gone in 11
    network = builder.create_network(bits)
    parser = trt.OnnxParser(network, logger)
    parser.parse(model.SerializeToString(), str(path))
    return network, parser


def parser_errors(parser: Any, model: onnx.ModelProto) -> tuple[Refusal, ...]:
    """What the parser refused; 8.6 gives the place of the node and not its name."""
    nodes = model.graph.node
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        place = error.node()
        node = nodes[place] if 0 <= place < len(nodes) else None
        found.append(Refusal(node.name if node else "", node.op_type if node else "", error.desc()))
    return tuple(found)


def impose(trt: Any, network: Any, wanted: Sequence[Request], implicit: frozenset[str] = frozenset()) -> int:
    """Set the precision of every layer that a floating node became; the number of layers that were set.

    Args:
        trt: the library.
        network: a weakly typed network that was parsed.
        wanted: what each node asks for. INT8 nodes stand between Q/DQ, which says all there is to say.
        implicit: nodes that run in INT8 with ranges from a calibrator.

    Raises:
        EngineError: an FP16 or FP32 node that multiplies has no layer of its name, so that nothing can be imposed.
    """
    asked = {request.node: request for request in wanted}
    reached: set[str] = set()
    count = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        node = _node_of(layer, asked)
        request = asked.get(node)
        if request is None:
            continue
        reached.add(node)
        if name_of(layer.type) in _LEFT_ALONE:
            continue
        if node in implicit:
            layer.precision = trt.DataType.INT8
            count += 1
            continue
        if request.precision not in _TYPES:
            continue
        outputs = [i for i in range(layer.num_outputs) if name_of(layer.get_output(i).dtype) in _FLOATING]
        if not outputs:
            continue
        precision = getattr(trt.DataType, _TYPES[request.precision])
        layer.precision = precision
        for i in outputs:
            layer.set_output_type(i, precision)
        count += 1
    missing = [r.node for r in wanted if r.anchor and r.node not in reached]
    if missing:
        raise EngineError(
            f"{len(missing)} node(s) have no layer of their name, so their precision cannot be imposed",
            details=missing[:20],
            hint="give every node a name of its own",
        )
    return count


def _node_of(layer: Any, asked: Mapping[str, Request]) -> str:
    """Name of the ONNX node that a layer was made for; "" when it belongs to none."""
    if layer.name in asked:
        return str(layer.name)
    found = _NODE.search(str(getattr(layer, "metadata", "") or ""))
    return found[1] if found else ""


def implicit_nodes(model: onnx.ModelProto) -> frozenset[str]:
    """Conv nodes, and the BatchNormalization and ReLU that alone read one: what implicit INT8 is restricted to."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    chosen: set[str] = set()
    for node in model.graph.node:
        if node.op_type != "Conv":
            continue
        chosen.add(node.name)
        current = node
        while len(found := readers.get(current.output[0], [])) == 1:
            current = found[0]
            if current.op_type not in ("BatchNormalization", "Relu", "Clip"):
                break
            chosen.add(current.name)
    return frozenset(chosen)
