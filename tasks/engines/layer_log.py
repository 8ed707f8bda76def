"""Turns the layer table that TensorRT prints when an engine is built into the layers' data types and ONNX nodes.

The table is the engine inspector's, and stands in the verbose build log when the profiling verbosity is DETAILED. One
line is one layer of the engine, after fusion::

    Name: conv0_myl0_2, LayerType: correlation, Inputs: [ { Name: …, Dimensions: [-1,4,16,16], …, Datatype: Int8, … }],
    Constants: [ … ], Outputs: [ … ], TacticName: …, StreamId: 0, Metadata: [ONNX Layer: conv0][ONNX Layer: relu0]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from enginesmith.tasks.engines.precision import Request
from enginesmith.tasks.engines.spec import NodePrecision, Precision

_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]*), Inputs: \[(?P<inputs>.*?)\], "
    r"(?:Constants: \[(?P<constants>.*?)\], )?Outputs: \[(?P<outputs>.*?)\], "
    r"(?=TacticName|TacticValue|StreamId|Metadata|ParameterType).*?Metadata: ?(?P<metadata>.*)$"
)
_TENSOR = re.compile(r"Name: (?P<name>.*?), Dimensions: \[(?P<dims>[-\d,\s]*)\],.*?Datatype: (?P<type>\w+)")
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\s]*(?:\[ONNX Layer: |$))")

PRECISIONS: Mapping[str, Precision] = {
    "Float": "fp32",
    "FP32": "fp32",
    "Half": "fp16",
    "FP16": "fp16",
    "BFloat16": "bf16",
    "BF16": "bf16",
    "Int8": "int8",
    "INT8": "int8",
}


@dataclass(frozen=True)
class LoggedTensor:
    """A tensor of an engine's layer; dynamic sizes are -1."""

    name: str
    dims: tuple[int, ...]
    type: str

    @property
    def elements(self) -> int:
        """Number of elements, dynamic sizes counted as 1."""
        return prod(max(d, 1) for d in self.dims)

    @property
    def precision(self) -> Precision | None:
        """Its precision; None for sizes and truth values."""
        return PRECISIONS.get(self.type)


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine.

    Attributes:
        name: the engine's name for it.
        kind: the engine's kind, such as "correlation" (a convolution) or "kgen" (generated pointwise code).
        inputs: what it reads.
        constants: weights it holds.
        outputs: what it writes.
        nodes: names of the ONNX nodes that were fused into it: from the layer's metadata, or from its name ("a + b").
    """

    name: str
    kind: str
    inputs: tuple[LoggedTensor, ...]
    constants: tuple[LoggedTensor, ...]
    outputs: tuple[LoggedTensor, ...]
    nodes: tuple[str, ...]


def parse_layers(log: str) -> tuple[EngineLayer, ...]:
    """The layers of the table in a verbose build log; empty when there is none."""
    _, _, table = log.partition("Layers:\n")
    found: list[EngineLayer] = []
    for line in table.split("\n"):
        match = _LAYER.match(line.strip())
        if match is None:
            if found:
                break
            continue
        found.append(
            EngineLayer(
                match["name"],
                match["kind"],
                _tensors(match["inputs"]),
                _tensors(match["constants"] or ""),
                _tensors(match["outputs"]),
                tuple(_NODE.findall(match["metadata"])) or tuple(match["name"].split(" + ")),
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class NetworkTypes:
    """What the parsed, strongly typed network says.

    Attributes:
        outputs: precision of every floating tensor that a layer of the network writes, by name.
        int8: names of ONNX nodes whose network layer reads both operands from INT8 DequantizeLinear layers.
    """

    outputs: Mapping[str, Precision]
    int8: frozenset[str]


def read_back(
    wanted: Sequence[Request], network: NetworkTypes, layers: Sequence[EngineLayer], weights: Mapping[str, int]
) -> tuple[NodePrecision, ...]:
    """Precision of each node: from the engine's layers where they show it, else from the network.

    A node with weights is known by the type in which the engine holds them: the constants, in the layers that the node
    was fused into, of at least as many elements as its weight. For INT8 such a layer must read INT8 as well. Where no
    such constant shows, or several nodes with weights share the layer and none of its constants has the type asked for,
    the network's types stand, which a strongly typed build keeps by contract. So do they for nodes without weights,
    unless the engine contradicts them: a layer made only of nodes that ask for FP32, none of whose tensors is FP32 (a
    Cast or Q/DQ inside a layer may change the type between its borders, so such a layer proves nothing; and FP32 inside
    what should be FP16 loses nothing).

    Args:
        wanted: what each node asks for.
        network: types of the parsed network.
        layers: the engine's layers, empty when the log has no table.
        weights: elements of the constant weight of each node that has one.
    """
    asked = {request.node: request for request in wanted}
    by_node: dict[str, list[EngineLayer]] = {}
    for layer in layers:
        for node in layer.nodes:
            by_node.setdefault(node, []).append(layer)
    return tuple(_node(r, network, by_node.get(r.node, []), weights.get(r.node), asked) for r in wanted)


def _node(
    request: Request,
    network: NetworkTypes,
    layers: Sequence[EngineLayer],
    weight: int | None,
    asked: Mapping[str, Request],
) -> NodePrecision:
    stated: Precision | None = "int8" if request.node in network.int8 else network.outputs.get(request.output)
    name = layers[0].name if layers else ""
    if request.anchor and weight is not None:
        holders = [(layer, c) for layer in layers for c in layer.constants if c.elements >= weight and c.precision]
        right = [layer for layer, c in holders if c.precision == request.precision and _reads(layer, request.precision)]
        others = {name for name, r in asked.items() if r.anchor and name != request.node}
        alone = [(layer, c) for layer, c in holders if not others.intersection(layer.nodes)]
        if right:
            stated, name = request.precision, right[0].name
        elif alone:
            layer, constant = alone[0]
            kept = constant.precision if _reads(layer, constant.precision) else _widest(layer)
            stated, name = kept, layer.name
    elif request.precision == "int8" and any(t.precision == "int8" for layer in layers for t in layer.outputs):
        stated = "int8"
    elif request.precision == "fp32":
        stated = _contradiction(layers, asked) or stated
    return NodePrecision(request.node, request.op, request.precision, stated or "", name)


def _contradiction(layers: Sequence[EngineLayer], asked: Mapping[str, Request]) -> Precision | None:
    """The precision of a layer without any FP32 tensor although all of its nodes ask for FP32; None when none is so."""
    for layer in layers:
        if all(name in asked and asked[name].precision == "fp32" for name in layer.nodes):
            found = [t.precision for t in (*layer.inputs, *layer.constants, *layer.outputs) if t.precision]
            if found and "fp32" not in found:
                return found[-1]
    return None


def _reads(layer: EngineLayer, precision: Precision | None) -> bool:
    """INT8 weights are computed with as integers only when the layer reads integers too."""
    return precision != "int8" or any(t.precision == "int8" for t in layer.inputs)


def _widest(layer: EngineLayer) -> Precision | None:
    found = {t.precision for t in layer.inputs}
    order: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    return next((p for p in order if p in found), None)


def _tensors(text: str) -> tuple[LoggedTensor, ...]:
    return tuple(
        LoggedTensor(m["name"], tuple(int(d) for d in m["dims"].split(",") if d.strip()), m["type"])
        for m in _TENSOR.finditer(text)
    )
