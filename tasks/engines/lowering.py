"""Turns symmetric INT8 Q/DQ, as TensorRT reads it, into the form that ONNX Runtime's CPU kernels run as integers.

ONNX Runtime fuses ``DequantizeLinear → Conv → QuantizeLinear`` into one QLinearConv. Forms that the TensorRT family
takes fall through that net, and the Conv then runs, silently, in FP32. Three rules, applied in this order:

1. ``Conv → Relu → QuantizeLinear(int8, zero point 0)`` (also Clip from 0), where the Conv is quantized: the ReLU stands
   in between and is not redundant for a signed type. It becomes ``Conv → QuantizeLinear(uint8, zero point 0) →
   Clip(max = cap)``, cap = 127, or round(upper / scale) where Clip's upper bound cuts below that. Saturation at 0 is
   the ReLU and the cap is the int8 range: ``min(saturate_uint8(round(x/s)), 127) = saturate_int8(round(max(x, 0)/s))``
   for every x. The same function bit by bit, in 7 bits; and sums of 7 by 8 bit products cannot overflow the 16-bit
   pairs of kernels without VNNI.
2. Any other ``QuantizeLinear(int8, zero point 0) → DequantizeLinear`` becomes uint8 with zero point 128, the same
   numbers shifted: QLinearConv takes one type for what it reads and writes.
3. A quantized Conv whose result, behind its ReLU or not, is read in float becomes ``ConvInteger → Cast →
   Mul(scale of x * scale of w) → Add(bias)``: the same sum with its scale taken out, equal up to FP32 rounding. Its
   weights are shifted to uint8 with zero point 128, which every version's kernel takes. It is an integer kernel, and a
   slow one: several times slower than FP32 for a depthwise convolution.

Left alone: a model below opset 12 (no Clip of uint8); QuantizeLinear read by anything but DequantizeLinear; non-zero
zero points; scales and weights that are not constants; everything inside If, Loop and Scan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.engines.precision import DEQUANTIZE, QUANTIZE, Types, infer, is_int8

_INT8_TOP = 127
_UINT8_MIDDLE = 128
_OPSET_OF_UINT8_CLIP = 12
_PREFIX = "enginesmith_uint8"


@dataclass
class Lowering:
    """A model in ONNX Runtime's form.

    Attributes:
        model: the rewritten copy; the given model itself when there was nothing to rewrite.
        fused: names of the Conv nodes that rule 1 applied to.
        shifted: names of the QuantizeLinear nodes that rule 2 applied to.
        integer: names of the Conv nodes that rule 3 applied to.
    """

    model: onnx.ModelProto
    fused: list[str] = field(default_factory=list)
    shifted: list[str] = field(default_factory=list)
    integer: list[str] = field(default_factory=list)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done, for the manifest."""
        notes = []
        if self.fused:
            notes.append(f"the ReLU of {len(self.fused)} quantized Conv moved into a 7-bit unsigned QuantizeLinear")
        if self.shifted:
            notes.append(f"{len(self.shifted)} QuantizeLinear from int8 to uint8 with zero point 128")
        if self.integer:
            notes.append(
                f"{len(self.integer)} quantized Conv that are read in float written as ConvInteger, a slow kernel"
            )
        return tuple(notes)


def lower_for_onnxruntime(model: onnx.ModelProto) -> Lowering:
    """Apply the three rules above to the main graph."""
    seen = _types(model)
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset < _OPSET_OF_UINT8_CLIP or not any(n.op_type == QUANTIZE for n in model.graph.node):
        return Lowering(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = _Rewriter(copy.graph, seen)
    done = Lowering(copy)
    for node in copy.graph.node:
        if node.op_type == QUANTIZE:
            conv = rewriter.fuse_relu(node)
            if conv:
                done.fused.append(conv)
            elif rewriter.shift(node):
                done.shifted.append(node.name)
    for node in copy.graph.node:
        if node.op_type == "Conv" and is_int8(node, seen) and rewriter.to_integer(node):
            done.integer.append(node.name)
    if not rewriter.replaced:
        return Lowering(model)
    rewriter.finish()
    return done


class _Rewriter:
    """Collects replacements of nodes, by their first output, and applies them at the end."""

    def __init__(self, graph: onnx.GraphProto, seen: Types) -> None:
        self.graph = graph
        self.seen = seen
        self.outputs = {o.name for o in graph.output}
        self.constants = {t.name: t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        self.producers = {o: n for n in graph.node for o in n.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in _reads(node):
                self.readers.setdefault(name, []).append(node)
        self.replaced: dict[str, list[onnx.NodeProto]] = {}

    def fuse_relu(self, quantize: onnx.NodeProto) -> str:
        """Rule 1; the name of the Conv, empty when it does not apply."""
        activation = self.producers.get(quantize.input[0])
        scale = self._symmetric_scale(quantize)
        if activation is None or scale is None or self._only_reader(activation.output[0]) is not quantize:
            return ""
        upper = self._upper(activation)
        conv = self.producers.get(activation.input[0]) if activation.input else None
        if upper is None or conv is None or conv.op_type != "Conv" or not is_int8(conv, self.seen):
            return ""
        if self._only_reader(conv.output[0]) is None:
            return ""
        cap = int(min(_INT8_TOP, np.rint(np.float32(upper) / scale)))
        wide = f"{quantize.output[0]}_uncapped"
        self.replaced[activation.output[0]] = []
        self._requantize(quantize, conv.output[0], zero=0, output=wide)
        clip = helper.make_node("Clip", [wide, "", self._uint8(cap)], quantize.output[:1], name=f"{quantize.name}_cap")
        self.replaced[quantize.output[0]].append(clip)
        return str(conv.name)

    def shift(self, quantize: onnx.NodeProto) -> bool:
        """Rule 2; says whether it applied."""
        if self._symmetric_scale(quantize) is None:
            return False
        self._requantize(quantize, quantize.input[0], zero=_UINT8_MIDDLE, output=quantize.output[0])
        return True

    def to_integer(self, conv: onnx.NodeProto) -> bool:
        """Rule 3; says whether it applied."""
        data, weight = self._current(self.producers[conv.input[0]]), self.producers[conv.input[1]]
        zero_x, zero_w = self._zero_point(data), self._zero_point(weight)
        scale_x, scale_w = self._value(data.input[1]), self._value(weight.input[1])
        bias = self._value(conv.input[2]) if len(conv.input) > 2 and conv.input[2] else np.zeros(1, np.float32)
        integers = self._value(weight.input[0])
        if zero_x is None or zero_w is None or scale_x is None or scale_w is None or bias is None or integers is None:
            return False
        if self._fuses(conv, zero_x) or zero_x.dtype != np.uint8 or scale_x.size != 1:
            return False
        if integers.dtype != np.int8 or np.any(zero_w != 0):
            return False
        along_channels = (1, -1, *([1] * (integers.ndim - 2)))
        multiplier = np.float32(scale_x.reshape(())) * scale_w.astype(np.float32).reshape(along_channels)
        name = conv.name
        steps = [f"{name}_{step}" for step in ("int32", "float", "scaled")]
        unsigned = self._constant(f"{name}_weight_uint8", (integers.astype(np.int16) + _UINT8_MIDDLE).astype(np.uint8))
        operands = [data.input[0], unsigned, data.input[2], self._uint8(_UINT8_MIDDLE)]
        integer = helper.make_node("ConvInteger", operands, steps[:1], name=name)
        integer.attribute.extend(conv.attribute)
        factor = self._constant(f"{name}_multiplier", multiplier)
        offset = self._constant(f"{name}_offset", bias.astype(np.float32).reshape(along_channels))
        self.replaced[conv.output[0]] = [
            integer,
            helper.make_node("Cast", steps[:1], steps[1:2], name=f"{name}_cast", to=TensorProto.FLOAT),
            helper.make_node("Mul", [steps[1], factor], steps[2:], name=f"{name}_mul"),
            helper.make_node("Add", [steps[2], offset], [conv.output[0]], name=f"{name}_add"),
        ]
        return True

    def finish(self) -> None:
        """Put the new nodes where the old ones stood, and drop what nothing reads any more."""
        nodes: list[onnx.NodeProto] = []
        for node in self.graph.node:
            new = self.replaced.get(node.output[0]) if node.output else None
            nodes += [_copied(n) for n in ([node] if new is None else new)]
        nodes = _live(nodes, self.outputs)
        kept = {name for node in nodes for name in _reads(node)} | self.outputs
        made_by_nodes = {name for node in nodes for name in node.output}
        tensors = [_copied_tensor(t) for name, t in self.constants.items() if name in kept - made_by_nodes]
        del self.graph.node[:], self.graph.initializer[:], self.graph.value_info[:]
        self.graph.node.extend(nodes)
        self.graph.initializer.extend(tensors)

    def _requantize(self, quantize: onnx.NodeProto, source: str, *, zero: int, output: str) -> None:
        """Another zero point of type uint8 for a QuantizeLinear and all who read it."""
        point = self._uint8(zero)
        self.replaced[quantize.output[0]] = [
            helper.make_node(QUANTIZE, [source, quantize.input[1], point], [output], name=quantize.name)
        ]
        for reader in self.readers[quantize.output[0]]:
            self.replaced[reader.output[0]] = [
                helper.make_node(DEQUANTIZE, [*reader.input[:2], point], reader.output[:1], name=reader.name)
            ]

    def _symmetric_scale(self, quantize: onnx.NodeProto) -> np.float32 | None:
        """Scale of a symmetric per-tensor int8 QuantizeLinear that only DequantizeLinear read; None for others."""
        scale, zero = self._value(quantize.input[1]), self._zero_point(quantize)
        readers = self.readers.get(quantize.output[0], [])
        if scale is None or scale.size != 1 or scale.dtype != np.float32 or quantize.output[0] in self.outputs:
            return None
        if zero is None or zero.dtype != np.int8 or zero.any() or any(r.op_type != DEQUANTIZE for r in readers):
            return None
        return np.float32(scale.reshape(())) if readers else None

    def _upper(self, activation: onnx.NodeProto) -> float | None:
        """Upper bound of an activation whose lower bound is 0; None for any other."""
        if activation.op_type == "Relu":
            return float("inf")
        names = [*activation.input[1:], "", ""][:2]
        low, high = (self._value(name) for name in names)
        if activation.op_type != "Clip" or low is None or low.size != 1 or low.any():
            return None
        if not names[1]:
            return float("inf")
        return float(high.reshape(())) if high is not None and high.size == 1 else None

    def _fuses(self, conv: onnx.NodeProto, zero_x: np.ndarray) -> bool:
        """Whether ONNX Runtime makes a QLinearConv of it, as the graph stands after rules 1 and 2."""
        reader = self._only_reader(conv.output[0])
        activated = reader is not None and self._upper(reader) is not None
        if reader is not None and activated:
            if self.replaced.get(reader.output[0]) == []:
                return True
            reader = self._only_reader(reader.output[0])
        if reader is None or reader.op_type != QUANTIZE:
            return False
        zero, scale = self._zero_point(self._current(reader)), self._value(reader.input[1])
        if zero is None or scale is None or scale.size != 1 or zero.dtype != zero_x.dtype:
            return False
        return not activated or bool(np.all(zero == np.iinfo(zero.dtype).min))

    def _only_reader(self, name: str) -> onnx.NodeProto | None:
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    def _current(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The node as it is after the rewrites so far."""
        return self.replaced.get(node.output[0], [node])[0]

    def _zero_point(self, node: onnx.NodeProto) -> np.ndarray | None:
        if len(node.input) > 2 and node.input[2]:
            return self._value(node.input[2])
        signed = node.op_type == DEQUANTIZE and self.seen.types.get(node.input[0]) == TensorProto.INT8
        return np.zeros((), np.int8 if signed else np.uint8)

    def _value(self, name: str) -> np.ndarray | None:
        tensor = self.constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def _uint8(self, value: int) -> str:
        return self._constant(f"{_PREFIX}_{value}", np.uint8(value))

    def _constant(self, name: str, value: np.ndarray | np.generic) -> str:
        self.constants.setdefault(name, numpy_helper.from_array(np.asarray(value), name))
        return name


def _types(model: onnx.ModelProto) -> Types:
    graph = infer(model).graph
    seen = Types()
    for value in [*graph.input, *graph.value_info, *graph.output]:
        seen.types[value.name] = value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        seen.types[tensor.name] = tensor.data_type
    seen.producers = {name: node for node in graph.node for name in node.output}
    return seen


def _live(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    """The nodes that an output depends on, in order."""
    needed = set(outputs)
    kept: list[onnx.NodeProto] = []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(_reads(node))
    return kept[::-1]


def _reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node and its subgraphs read, repeated as often as they are read."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            names += [name for inner in attribute.g.node for name in _reads(inner)]
            names += [o.name for o in attribute.g.output]
    return names


def _copied(node: onnx.NodeProto) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _copied_tensor(tensor: TensorProto) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    return copy
