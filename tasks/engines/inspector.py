"""Turns the JSON that TensorRT's engine inspector writes into the precision of each ONNX node.

One record is one layer after fusion. The nodes of a layer stand in its Metadata (``[ONNX Layer: a][ONNX Layer: b]``)
or in its name: ``a + b``, ``a || b``, ``PWN(a, b)``, ``{ForeignNode[a...b]}``. TensorRT 8.6 writes raw control
characters into the strings, so the text is not strict JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginesmith.tasks.engines.precision import Request
from enginesmith.tasks.engines.spec import EngineError, NodePrecision, Precision

_TYPE = re.compile(r"\b(FP32|FP16|BF16|INT8|FLOAT|HALF|BFLOAT16|INT32|INT64|BOOL)\b", re.IGNORECASE)
_TYPES: Mapping[str, Precision] = {
    "FP32": "fp32",
    "FLOAT": "fp32",
    "FP16": "fp16",
    "HALF": "fp16",
    "BF16": "bf16",
    "BFLOAT16": "bf16",
    "INT8": "int8",
}
_METADATA = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\s]*(?:\[ONNX Layer: |$))")
_FOREIGN = re.compile(r"\{ForeignNode\[(.*?)\]\}")
_SEPARATORS = re.compile(r" \+ | \|\| |, |PWN\(|\)|\(")


@dataclass(frozen=True)
class InspectedLayer:
    """One layer of an engine.

    Attributes:
        name: the engine's name for it.
        kind: the engine's kind, such as "CaskConvolution".
        inputs: precision of each floating or INT8 input.
        outputs: names and precisions of its outputs.
        weights: precision in which it holds weights; None when it shows none.
        opaque: whether a compiler took a part of the graph whole and shows only its borders.
        nodes: ONNX nodes in it, in the graph's order.
        tactic: the kernel, "" when not shown.
    """

    name: str
    kind: str
    inputs: tuple[Precision, ...]
    outputs: tuple[tuple[str, Precision], ...]
    weights: Precision | None
    opaque: bool
    nodes: tuple[str, ...]
    tactic: str = ""


def parse_inspector(text: str, order: Sequence[str]) -> tuple[InspectedLayer, ...]:
    """The layers in the inspector's JSON.

    Args:
        text: what ``get_engine_information(JSON)`` gave for an engine built with DETAILED verbosity.
        order: names of the graph's nodes, in order, carriers included.

    Raises:
        EngineError: it is no such JSON, or the engine was built without details.
    """
    try:
        records = list(json.loads(text, strict=False)["Layers"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the engine inspector's report cannot be read: {type(error).__name__}: {error}") from error
    if records and all(isinstance(record, str) for record in records):
        raise EngineError(
            "the engine inspector's report has layer names only", hint="build with DETAILED profiling verbosity"
        )
    places = {name: place for place, name in enumerate(order)}
    return tuple(_layer(record, places, order) for record in records)


def read_back(wanted: Sequence[Request], layers: Sequence[InspectedLayer]) -> tuple[NodePrecision, ...]:
    """Precision of each node as the engine shows it.

    A Conv, ConvTranspose, Gemm or MatMul has the type in which its layer holds weights; INT8 weights count as INT8 only
    when the layer reads INT8. Any other node is seen only where its result leaves the layer: as the layer's last node.
    What is fused before that, and what stands inside an opaque layer, is unseen, with one exception: in a layer made
    only of nodes that ask for FP32, none of whose tensors is FP32, every node has the type of the layer's result.
    """
    holders: dict[str, list[InspectedLayer]] = {}
    for layer in layers:
        for node in layer.nodes:
            holders.setdefault(node, []).append(layer)
    asked = {request.node: request.precision for request in wanted}
    return tuple(_node(request, holders.get(request.node, []), asked) for request in wanted)


def _node(request: Request, layers: Sequence[InspectedLayer], asked: Mapping[str, Precision]) -> NodePrecision:
    actual: Precision | None = None
    name = layers[0].name if layers else ""
    for layer in layers:
        found = _seen(request, layer) or _contradiction(layer, asked)
        if found is not None:
            actual, name = found, layer.name
            break
    return NodePrecision(request.node, request.op, request.precision, actual or "", name)


def _seen(request: Request, layer: InspectedLayer) -> Precision | None:
    if layer.opaque:
        return None
    if request.anchor and layer.weights is not None:
        if layer.weights == "int8" and "int8" not in layer.inputs:
            return layer.inputs[0] if layer.inputs else None
        return layer.weights
    named = dict(layer.outputs).get(request.output)
    if named is not None:
        return named
    if request.anchor and len(layer.nodes) == 1 and layer.inputs:
        return layer.inputs[0]
    if layer.nodes and layer.nodes[-1] == request.node and layer.outputs:
        return layer.outputs[0][1]
    return None


def _contradiction(layer: InspectedLayer, asked: Mapping[str, Precision]) -> Precision | None:
    """The precision of a layer without any FP32 tensor although all of its nodes ask for FP32; None for any other."""
    found = [*layer.inputs, *(precision for _, precision in layer.outputs)]
    if found and "fp32" not in found and all(asked.get(node) == "fp32" for node in layer.nodes):
        return found[-1]
    return None


def _layer(record: Mapping[str, Any], places: Mapping[str, int], order: Sequence[str]) -> InspectedLayer:
    name = str(record.get("Name", ""))
    kind = str(record.get("LayerType", ""))
    foreign = _FOREIGN.search(name)
    weights = record.get("Weights")
    outputs = ((str(t.get("Name", "")), _precision(t)) for t in record.get("Outputs", []))
    return InspectedLayer(
        name=name,
        kind=kind,
        inputs=tuple(p for t in record.get("Inputs", []) if (p := _precision(t)) is not None),
        outputs=tuple((n, p) for n, p in outputs if p is not None),
        weights=_TYPES.get(str(weights.get("Type", "")).upper())
        if isinstance(weights, Mapping) and weights.get("Count", 1)
        else None,
        opaque=foreign is not None or "myelin" in kind.lower(),
        nodes=_nodes(name, str(record.get("Metadata") or ""), foreign, places, order),
        tactic=str(record.get("TacticName", "")),
    )


def _nodes(
    name: str, metadata: str, foreign: re.Match[str] | None, places: Mapping[str, int], order: Sequence[str]
) -> tuple[str, ...]:
    found = {n for n in _METADATA.findall(metadata) if n in places}
    if not found and foreign is not None:
        first, _, last = foreign[1].partition("...")
        if first in places and last in places:
            low, high = sorted((places[first], places[last]))
            found = set(order[low : high + 1])
    if not found and not name.startswith("Reformatting CopyNode"):
        found = {name} if name in places else {n.strip() for n in _SEPARATORS.split(name) if n.strip() in places}
    return tuple(sorted(found, key=places.__getitem__))


def _precision(tensor: Mapping[str, Any]) -> Precision | None:
    match = _TYPE.search(str(tensor.get("Format/Datatype") or tensor.get("Datatype") or ""))
    return _TYPES.get(match[1].upper()) if match else None
