"""Turns an FP32 graph and activation ranges into a graph whose convolutions are INT8 by explicit Q/DQ pairs.

Symmetric INT8 throughout: zero point 0, integers -127..127 for weights, -128..127 for activations, so that
``x ≈ scale * q`` (the TensorRT family takes nothing else). Three steps, each usable alone:

1. `find_convs` (and `find_shortcuts`) say which convolutions a placement quantizes and why it refuses the others;
2. `plan_quantization` fixes every scale and every weight integer from the FP32 graph: the numbers of all INT8 variants;
3. `QuantizePass` writes a plan, or a part of it (`Quantization.only`), into the FP32 graph or into its FP16 mix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Placement = Literal["conv-relu", "conv", "conv+residual"]
FloatArray = npt.NDArray[np.float32]

LEVELS = 127
"""Largest integer: the range of a tensor with threshold T is -T..T in steps of T / 127."""

MIN_OPSET = 13
"""First opset whose QuantizeLinear and DequantizeLinear know per-channel scales."""

MIN_OPSET_HALF = 19
"""First opset whose QuantizeLinear and DequantizeLinear know FP16 data and scales."""

_CONVS = ("Conv", "ConvTranspose")
_BIAS_STEPS = 2.0**30


@dataclass(frozen=True)
class ConvSubgraph:
    """A convolution that a placement quantizes, with what is fused to it.

    Attributes:
        conv: name of the Conv or ConvTranspose node.
        op_type: its operator.
        input: tensor it reads: gets a Q/DQ pair, per tensor.
        weight: tensor that holds its weight.
        axis: output-channel axis of the weight, the axis of its scales; None: one scale for the whole weight.
        groups: the convolution's groups.
        output: tensor that the subgraph produces, after normalization and activation: what its range is taken of.
        members: names of its nodes in order: convolution, BatchNormalization if it is still there, activation.
        depthwise: every output channel reads one input channel.
    """

    conv: str
    op_type: str
    input: str
    weight: str
    axis: int | None
    groups: int
    output: str
    members: tuple[str, ...]
    depthwise: bool = False


@dataclass(frozen=True)
class Refusal:
    """A convolution that stays as it is, and why."""

    conv: str
    reason: str


@dataclass(frozen=True)
class Shortcut:
    """The input of a residual Add that gets a Q/DQ pair: not the one that comes straight from a convolution.

    Attributes:
        add: name of the Add node.
        index: which of its inputs.
        tensor: the tensor that this input reads.
        conv: the convolution on the other input, which fuses with the Add.
    """

    add: str
    index: int
    tensor: str
    conv: str


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in INT8.

    Attributes:
        values: int8, the weight's shape, -127..127.
        scale: float32, one per channel along `axis`, or a scalar.
        axis: the channel axis, None for one scale.
    """

    values: npt.NDArray[np.int8]
    scale: FloatArray
    axis: int | None

    def dequantized(self) -> FloatArray:
        """``scale * values`` in float32."""
        return self.values.astype(np.float32) * _along(self.scale, self.axis, self.values.ndim)


@dataclass(frozen=True)
class Quantization:
    """Every number of an INT8 graph.

    Attributes:
        convs: the convolutions to quantize.
        shortcuts: residual inputs to quantize.
        scales: activation scale by tensor name.
        weights: integers and scales by convolution.
        biases: float32 bias by convolution, for those that get another one than they have.
    """

    convs: tuple[ConvSubgraph, ...]
    shortcuts: tuple[Shortcut, ...]
    scales: Mapping[str, float]
    weights: Mapping[str, QuantizedWeight]
    biases: Mapping[str, FloatArray] = field(default_factory=dict)

    def only(self, convs: Collection[str]) -> Quantization:
        """The same numbers for fewer convolutions; a shortcut stays with the convolution that its Add fuses with."""
        return replace(
            self,
            convs=tuple(c for c in self.convs if c.conv in convs),
            shortcuts=tuple(s for s in self.shortcuts if s.conv in convs),
        )


class QuantizePass(ir.passes.InPlacePass):
    """Put Q/DQ pairs around the convolutions of a `Quantization`.

    1. The tensor that a quantized convolution reads gets one QuantizeLinear → DequantizeLinear pair, per tensor,
       behind it; all quantized convolutions (and shortcuts) that read this tensor share the pair. Everything else
       keeps reading the tensor itself, so that a range is applied only where INT8 is used. The pair stands after the
       activation that produced the tensor: convolution and activation stay adjacent and fuse.
    2. The weight becomes an int8 initializer behind a DequantizeLinear, per channel. Convolutions that share one
       weight get integers of their own: with shared ones, ONNX Runtime 1.32 does not load the model under
       session.x64quantprecision. The float weight is removed when nobody reads it any more; a weight in a Constant
       node is treated as an initializer.
    3. Biases stay float: the TensorRT family does not parse an INT32 bias behind DequantizeLinear. A bias that the plan
       corrects is written in its place.
    4. Scales have the data type of the convolution: FLOAT, or FLOAT16 in an FP16 region. Zero points are explicit
       zeros of type int8.

    A convolution is found by its node's name, so that the same plan serves the graph it was made from and the FP16
    mix of that graph. Nothing else is changed: no other operator is quantized, and outputs, inputs and node order stay.

    Precondition: opset 13, or 19 where a quantized convolution is FP16; every convolution of the plan is in the main
    graph and is FP32 or FP16. Postcondition: as many Q/DQ pairs as distinct quantized tensors, one DequantizeLinear
    per convolution's weight.

    Args:
        quantization: which convolutions, with which scales and integers.
    """

    def __init__(self, quantization: Quantization) -> None:
        super().__init__()
        self.quantization = quantization

    def requires(self, model: ir.Model) -> None:
        """Refuse an opset that cannot say it."""
        opset = model.graph.opset_imports.get("", 0)
        half = any(_float_type(node) == ir.DataType.FLOAT16 for node in self._nodes(model).values())
        needed = MIN_OPSET_HALF if half else MIN_OPSET
        if self.quantization.convs and opset < needed:
            raise ir.passes.PreconditionError(
                f"per-channel Q/DQ{' on FP16' if half else ''} needs opset {needed}, the model has {opset}"
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Insert the pairs."""
        writer = _Writer(model.graph)
        nodes = self._nodes(model)
        shortcuts = {s.add: s for s in self.quantization.shortcuts}
        convs = {c.conv: c for c in self.quantization.convs}
        for name, node in nodes.items():
            if name in convs:
                subgraph = convs[name]
                data_type = _float_type(node)
                scale = self.quantization.scales[subgraph.input]
                node.replace_input_with(0, writer.activation(_present(node, 0), scale, data_type, before=node))
                weight = self.quantization.weights[name]
                old = _present(node, 1)
                node.replace_input_with(1, writer.weight(subgraph.weight, weight, data_type, before=node))
                _drop_unused(old)
                if name in self.quantization.biases:
                    writer.bias(node, self.quantization.biases[name], data_type)
            else:
                shortcut = shortcuts[name]
                value = _present(node, shortcut.index)
                data_type = value.dtype or ir.DataType.FLOAT
                pair = writer.activation(value, self.quantization.scales[shortcut.tensor], data_type, before=node)
                node.replace_input_with(shortcut.index, pair)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def _nodes(self, model: ir.Model) -> dict[str, ir.Node]:
        """The nodes of the plan, in graph order."""
        wanted = {c.conv for c in self.quantization.convs} | {s.add for s in self.quantization.shortcuts}
        found = {node.name: node for node in model.graph if node.name in wanted}
        missing = wanted - set(found)
        if missing:
            raise ir.passes.PreconditionError(f"no node is called {', '.join(sorted(missing))}")
        return {name: node for name, node in found.items() if name is not None}


def find_convs(model: ir.Model, placement: Placement) -> tuple[tuple[ConvSubgraph, ...], tuple[Refusal, ...]]:
    """The convolutions that a placement quantizes, in graph order, and those it refuses.

    `conv-relu` takes a Conv or ConvTranspose whose only reader is an activation, with at most a BatchNormalization
    between; an activation is a Relu, or a Clip from exactly 0 to a positive constant (ReLU6) or to nothing.
    `conv` and `conv+residual` take every convolution; the activation still belongs to it where it has one.

    Refused under every placement: a weight that is computed, a graph input, not float32 or not finite; a convolution
    inside the body of If, Loop or Scan or inside a model-local function, whose tensors calibration cannot see.
    """
    found: list[ConvSubgraph] = []
    refused: list[Refusal] = []
    for node in model.graph:
        if not _is(node, *_CONVS):
            continue
        result = _match(node, placement)
        if isinstance(result, Refusal):
            refused.append(result)
        else:
            found.append(result)
    main = set(model.graph)
    inner = [n for n in model.graph.all_nodes() if n not in main]
    inner += [n for function in model.functions.values() for n in function.all_nodes()]
    refused += [Refusal(n.name or n.op_type, "it is inside a subgraph") for n in inner if _is(n, *_CONVS)]
    return tuple(found), tuple(refused)


def find_shortcuts(model: ir.Model, convs: Collection[ConvSubgraph]) -> tuple[Shortcut, ...]:
    """The shortcuts of residual Adds, for the placement `conv+residual`.

    An Add is residual when one of its inputs comes straight from a quantized convolution (or its BatchNormalization)
    that nothing else reads. That branch fuses with the Add and stays unquantized; the other input is the shortcut.
    When both come straight from quantized convolutions (a ResNet downsample), the later one in the graph fuses. An
    Add of a constant is none.
    """
    straight: dict[str, tuple[int, str]] = {}
    by_conv = {c.conv: c for c in convs}
    for position, node in enumerate(model.graph):
        if node.name in by_conv:
            value = _after_norm(node)[0]
            if _only_reader(value) is not None and value.name:
                straight[value.name] = (position, by_conv[node.name].conv)
    found: list[Shortcut] = []
    for node in model.graph:
        if not _is(node, "Add") or len(node.inputs) != 2 or not node.name:
            continue
        left, right = (_present(node, 0), _present(node, 1))
        if left is right or any(constant(v) is not None for v in (left, right)):
            continue
        sources = [straight.get(v.name or "", (-1, "")) for v in (left, right)]
        if max(sources)[0] < 0:
            continue
        fused = sources.index(max(sources))
        shortcut = (right, left)[fused]
        if shortcut.name:
            found.append(Shortcut(node.name, 1 - fused, shortcut.name, sources[fused][1]))
    return tuple(found)


def plan_quantization(
    model: ir.Model,
    convs: Collection[ConvSubgraph],
    scales: Mapping[str, float],
    *,
    shortcuts: Collection[Shortcut] = (),
) -> Quantization:
    """Fix the integers of every weight, from the FP32 graph.

    Args:
        model: the FP32 graph that `convs` were found in.
        convs: the convolutions to quantize.
        scales: activation scale (threshold / 127) by tensor name, at least for every tensor that `convs` and
            `shortcuts` read.
        shortcuts: residual inputs to quantize.
    """
    nodes = {node.name: node for node in model.graph}
    weights: dict[str, QuantizedWeight] = {}
    for subgraph in convs:
        weight, bias = parameters(nodes[subgraph.conv])
        weights[subgraph.conv] = quantize_parameters(weight, bias, subgraph, scales[subgraph.input])
    return Quantization(tuple(convs), tuple(shortcuts), dict(scales), weights)


def read_quantization(
    model: ir.Model,
    quantized: ir.Model,
    convs: Collection[ConvSubgraph],
    scales: Mapping[str, float],
    *,
    shortcuts: Collection[Shortcut] = (),
) -> Quantization:
    """The plan that an INT8 graph was made by, read back from it.

    Args:
        model: the FP32 graph.
        quantized: what `QuantizePass` made of it.
        convs: the convolutions that are quantized in it.
        scales: activation scale by tensor name.
        shortcuts: the residual inputs that are quantized in it.

    Raises:
        ValueError: a convolution is not quantized in it.
    """
    originals = {node.name: node for node in model.graph}
    nodes = {node.name: node for node in quantized.graph}
    weights: dict[str, QuantizedWeight] = {}
    biases: dict[str, FloatArray] = {}
    for subgraph in convs:
        node = nodes[subgraph.conv]
        writer = _present(node, 1).producer()
        values, scale = (constant(writer.inputs[0]), constant(writer.inputs[1])) if writer is not None else (None, None)
        if values is None or scale is None:
            raise ValueError(f"{subgraph.conv} has no INT8 weight")
        weights[subgraph.conv] = QuantizedWeight(values.astype(np.int8), scale.astype(np.float32), subgraph.axis)
        bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
        _, original = parameters(originals[subgraph.conv])
        if bias is not None and (original is None or not np.array_equal(bias, original)):
            biases[subgraph.conv] = bias.astype(np.float32)
    return Quantization(tuple(convs), tuple(shortcuts), dict(scales), weights, biases)


def parameters(conv: ir.Node) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]:
    """Weight and bias of a convolution; None where it has no bias or a computed one.

    Raises:
        ValueError: its weight is no constant.
    """
    weight = constant(conv.inputs[1])
    if weight is None:
        raise ValueError(f"{conv.name} has no constant weight")
    return weight, constant(conv.inputs[2]) if len(conv.inputs) > 2 else None


def quantize_parameters(
    weight: npt.NDArray[np.floating],
    bias: npt.NDArray[np.floating] | None,
    subgraph: ConvSubgraph,
    input_scale: float,
) -> QuantizedWeight:
    """The integers of one convolution's weight, with scales at which its bias fits an INT32 accumulator."""
    floor = _bias_floor(bias, subgraph, weight.shape, input_scale)
    return quantize_weight(weight, subgraph.axis, floor=floor)


def quantize_weight(
    weight: npt.NDArray[np.floating], axis: int | None, *, floor: FloatArray | float = 0.0
) -> QuantizedWeight:
    """Symmetric INT8 weight: scale ``absmax / 127`` per channel, integers rounded to nearest even.

    Args:
        weight: float weight, any shape.
        axis: channel axis, one scale each; None: one scale.
        floor: smallest scale allowed, one per channel or one for all. Weights far below it become zero.

    A scale is never below the smallest FP16 number (5.96e-8), is itself an FP16 number, so that the FP16 graph has the
    same scales, and is at least ``absmax / 127``: nothing is clipped. A channel of zeros takes the smallest scale.
    """
    axes = None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)
    absmax = np.max(np.abs(weight.astype(np.float64)), axis=axes)
    scale = representable_scale(np.maximum(absmax / LEVELS, floor))
    steps = weight.astype(np.float64) / _along(scale, axis, weight.ndim).astype(np.float64)
    values = np.clip(np.rint(steps), -LEVELS, LEVELS).astype(np.int8)
    return QuantizedWeight(values, scale, axis)


def representable_scale(scale: npt.ArrayLike) -> FloatArray:
    """The smallest FP16 number that is not below a scale, as float32.

    The FP32 and the FP16 form of a graph then quantize to the same integers. It costs at most 2**-10 of the range (more
    where FP16 is subnormal, below 6.1e-5, down to the smallest number 5.96e-8). A scale beyond 65504 stays as it is:
    its tensor does not fit FP16 either.
    """
    wanted = np.asarray(scale, dtype=np.float64)
    with np.errstate(over="ignore"):
        half = wanted.astype(np.float16)
    half = np.where(half.astype(np.float64) < wanted, np.nextafter(half, np.float16(np.inf)), half)
    half = np.maximum(half, np.nextafter(np.float16(0), np.float16(1)))
    return np.where(np.isfinite(half), half, wanted).astype(np.float32)


def _bias_floor(
    bias: npt.NDArray[np.floating] | None, subgraph: ConvSubgraph, shape: tuple[int, ...], input_scale: float
) -> FloatArray | float:
    """Weight scales below which a bias would not fit the INT32 accumulator, ``bias / (input scale * weight scale)``.

    A dead channel (weights around 1e-20, its output all bias) has such a scale. Raised to 2**-30 of the bias, its
    weights become zeros, which changes its output by 2**-31 of the bias and weight element: float32 rounding.
    """
    if bias is None:
        return 0.0
    needed = np.abs(bias.astype(np.float64)) / (input_scale * _BIAS_STEPS)
    if subgraph.axis is None:
        return float(needed.max(initial=0.0))
    floor: FloatArray = needed.reshape(-1, shape[subgraph.axis]).max(axis=0).astype(np.float32)
    return floor


def _match(node: ir.Node, placement: Placement) -> ConvSubgraph | Refusal:
    name = node.name or ""
    weight = constant(node.inputs[1]) if node.inputs[1] is not None else None
    if weight is None:
        return Refusal(name, "its weight is computed or fed at run time")
    if weight.dtype != np.float32:
        return Refusal(name, f"its weight is {weight.dtype}")
    if not np.isfinite(weight).all():
        return Refusal(name, "its weight holds NaN or infinity")
    value, members = _after_norm(node)
    reader = _only_reader(value)
    activated = reader is not None and _is_relu(reader)
    if reader is not None and activated:
        members.append(reader)
        value = reader.outputs[0]
    elif placement == "conv-relu":
        return Refusal(name, _why_no_activation(value))
    group = node.attributes.get("group")
    groups = group.as_int() if group is not None else 1
    return ConvSubgraph(
        conv=name,
        op_type=node.op_type,
        input=_present(node, 0).name or "",
        weight=_present(node, 1).name or "",
        axis=_channel_axis(node.op_type, groups),
        groups=groups,
        output=value.name or "",
        members=tuple(n.name or "" for n in members),
        depthwise=node.op_type == "Conv" and groups > 1 and weight.shape[1] == 1,
    )


def _channel_axis(op_type: str, groups: int) -> int | None:
    """Axis of the output channels: Conv weights are (out, in/groups, …), ConvTranspose weights (in, out/groups, …).

    Output channel ``g * (out/groups) + j`` of a grouped ConvTranspose depends on the axis-0 rows of group g and on
    column j: no axis holds one entry per output channel, so its weight takes one scale.
    """
    if op_type == "Conv":
        return 0
    return 1 if groups == 1 else None


def _after_norm(conv: ir.Node) -> tuple[ir.Value, list[ir.Node]]:
    """What a convolution gives, behind its BatchNormalization where that is the only reader, and the nodes passed."""
    value = conv.outputs[0]
    reader = _only_reader(value)
    if reader is None or not _is(reader, "BatchNormalization") or reader.inputs[0] is not value:
        return value, [conv]
    training = reader.attributes.get("training_mode")
    if (training is not None and training.as_int()) or any(o.uses() for o in reader.outputs[1:]):
        return value, [conv]
    return reader.outputs[0], [conv, reader]


def _why_no_activation(value: ir.Value) -> str:
    readers = sorted({node.op_type for node, _ in value.uses()})
    if value.is_graph_output():
        return "its result is a graph output before any activation"
    if len(list(value.uses())) > 1:
        return f"its result has several readers before any activation: {', '.join(readers)}"
    return f"{readers[0]} follows it, not Relu or Clip from 0" if readers else "nothing reads its result"


def _only_reader(value: ir.Value) -> ir.Node | None:
    """The node that reads a value, when it is just one, once, and in the same graph."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0][0]
    producer = value.producer()
    return node if producer is not None and node.graph is producer.graph else None


def _is_relu(node: ir.Node) -> bool:
    if _is(node, "Relu"):
        return True
    if not _is(node, "Clip"):
        return False
    low, high = (_clip_bound(node, index, name) for index, name in ((1, "min"), (2, "max")))
    return low == 0.0 and (high is None or high > 0.0)


def _clip_bound(node: ir.Node, index: int, attribute: str) -> float | None:
    """A bound of Clip: an input since opset 11, an attribute before; None when absent, NaN when it is computed."""
    if attribute in node.attributes:
        return node.attributes[attribute].as_float()
    if len(node.inputs) <= index or node.inputs[index] is None:
        return None
    bound = constant(node.inputs[index])
    return float("nan") if bound is None or bound.size != 1 else float(bound.reshape(()))


def _is(node: ir.Node, *op_types: str) -> bool:
    return node.op_type in op_types and node.domain in ("", "ai.onnx")


def constant(value: ir.Value | None) -> npt.NDArray[np.floating] | None:
    """Content of an initializer or Constant node, looked at through Identity; None for anything that can change."""
    while value is not None and (producer := value.producer()) is not None and _is(producer, "Identity"):
        value = producer.inputs[0]
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _present(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node.op_type} {node.name} has no input {index}")
    return value


def _float_type(node: ir.Node) -> ir.DataType:
    """FLOAT or FLOAT16, whichever a node computes in."""
    types = (value.dtype for value in (*node.inputs, *node.outputs) if value is not None)
    known = [t for t in types if t in (ir.DataType.FLOAT, ir.DataType.FLOAT16)]
    return known[0] if known else ir.DataType.FLOAT


def _drop_unused(value: ir.Value) -> None:
    """Remove a weight that nobody reads: its initializer, or the Constant and Identity nodes that held it."""
    while not value.uses() and not value.is_graph_output() and not value.is_graph_input():
        producer = value.producer()
        if producer is None:
            if value.is_initializer() and value.graph is not None:
                del value.graph.initializers[value.name or ""]
            return
        if producer.graph is None or len(producer.outputs) != 1:
            return
        source = producer.inputs[0] if producer.inputs else None
        producer.graph.remove(producer, safe=True)
        if source is None:
            return
        value = source


def _along(scale: FloatArray, axis: int | None, rank: int) -> FloatArray:
    return scale if axis is None else scale.reshape([-1 if i == axis else 1 for i in range(rank)])


class _Writer:
    """Makes Q/DQ nodes with names of their own, each activation's pair once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._value_names = set(_value_names(graph))
        self._node_names = {node.name for node in graph.all_nodes()}
        self._pairs: dict[tuple[int, ir.DataType], ir.Value] = {}

    def activation(self, value: ir.Value, scale: float, data_type: ir.DataType, *, before: ir.Node) -> ir.Value:
        """`value` behind its Q/DQ pair."""
        key = (id(value), data_type)
        if key not in self._pairs:
            base = value.name or "value"
            factor, zero = self._parameters(base, np.float32(scale), data_type)
            quantized = self._node("QuantizeLinear", base, [value, factor, zero], ir.DataType.INT8, value, before)
            self._pairs[key] = self._node("DequantizeLinear", base, [quantized, factor, zero], data_type, value, before)
        return self._pairs[key]

    def weight(self, base: str, weight: QuantizedWeight, data_type: ir.DataType, *, before: ir.Node) -> ir.Value:
        """A weight's integers behind their DequantizeLinear."""
        integers = self._initializer(f"{base}_quantized", weight.values)
        factor, zero = self._parameters(base, weight.scale, data_type)
        axis = {} if weight.axis is None else {"axis": weight.axis}
        return self._node("DequantizeLinear", base, [integers, factor, zero], data_type, integers, before, **axis)

    def bias(self, node: ir.Node, bias: FloatArray, data_type: ir.DataType) -> None:
        """Give a convolution another bias."""
        old = node.inputs[2] if len(node.inputs) > 2 else None
        base = old.name if old is not None and old.name else f"{node.name}_bias"
        array = bias.astype(np.float16 if data_type == ir.DataType.FLOAT16 else np.float32)
        new = self._initializer(f"{base}_corrected", array)
        if len(node.inputs) > 2:
            node.replace_input_with(2, new)
        else:
            node.resize_inputs(3)
            node.replace_input_with(2, new)
        if old is not None:
            _drop_unused(old)

    def _parameters(
        self, base: str, scale: FloatArray | np.float32, data_type: ir.DataType
    ) -> tuple[ir.Value, ir.Value]:
        factor = np.asarray(scale, dtype=np.float16 if data_type == ir.DataType.FLOAT16 else np.float32)
        zero = np.zeros(factor.shape, dtype=np.int8)
        return self._initializer(f"{base}_scale", factor), self._initializer(f"{base}_zero_point", zero)

    def _initializer(self, wanted: str, array: npt.NDArray[np.generic]) -> ir.Value:
        name = _fresh(wanted, self._value_names)
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _node(
        self,
        op_type: str,
        base: str,
        inputs: list[ir.Value],
        data_type: ir.DataType,
        like: ir.Value,
        before: ir.Node,
        **attributes: int,
    ) -> ir.Value:
        suffix = "quantized" if op_type == "QuantizeLinear" else "dequantized"
        node = ir.node(op_type, inputs, attributes=attributes, name=_fresh(f"{base}_{op_type}", self._node_names))
        output = node.outputs[0]
        output.name = _fresh(f"{base}_{suffix}", self._value_names)
        output.type = ir.TensorType(data_type)
        output.shape = None if like.shape is None else ir.Shape(like.shape)
        self._graph.insert_before(before, node)
        return output


def _value_names(graph: ir.Graph) -> Iterator[str]:
    for inner in (graph, *graph.subgraphs()):
        yield from (value.name for value in inner.inputs if value.name)
        yield from inner.initializers
        yield from (value.name for node in inner for value in node.outputs if value.name)


def _fresh(wanted: str, taken: set[str | None] | set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    taken.add(name)
    return name
