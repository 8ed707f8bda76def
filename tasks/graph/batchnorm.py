"""Turns BatchNormalization nodes of an ONNX graph into part of the Conv, ConvTranspose or Gemm beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from enginesmith.tasks import progress
from enginesmith.tasks.batchnorm import (
    Clamp,
    ClampedChannel,
    Floats,
    Layout,
    Norm,
    Observed,
    check_norm,
    clamp_variance,
    constant_channels,
    flushed,
    fold_after,
    fold_before,
    needs_scale_shift,
    weight_peaks,
)
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import FoldSettings

Feeds = Sequence[Mapping[str, np.ndarray]]

ROUNDING = 4.0  # how much more than one rounding of the inputs folding may move the outputs
_LAYOUTS: dict[str, Layout] = {"Conv": "conv", "ConvTranspose": "transposed", "Gemm": "linear"}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_OLDEST = 9  # before, BatchNormalization has attributes of other meaning (spatial, consumed_inputs)


@dataclass(frozen=True)
class NodeFold:
    """A BatchNormalization that was folded, the side it stood on, and the nodes that took it up."""

    norm: str
    side: str
    into: tuple[str, ...]


@dataclass(frozen=True)
class NodeKept:
    """A BatchNormalization that stays, why, and as what: ``BatchNormalization`` or ``scale and shift``."""

    norm: str
    reason: str
    form: str


@dataclass
class GraphFolds:
    """What folding did to a graph.

    Attributes:
        folds: what was folded, in graph order.
        kept: all other BatchNormalization nodes.
        clamped: raised variances, by node.
        constants: output channels that became constant, by node.
        flushed: weights and biases that FP32 could hold only as subnormal numbers, now zero.
        differences: largest difference of each output, in units of its range; filled by `fold_graph`.
    """

    folds: list[NodeFold] = field(default_factory=list)
    kept: list[NodeKept] = field(default_factory=list)
    clamped: dict[str, tuple[ClampedChannel, ...]] = field(default_factory=dict)
    constants: dict[str, tuple[int, ...]] = field(default_factory=dict)
    flushed: int = 0
    differences: dict[str, float] = field(default_factory=dict)


class _Refused(Exception):  # noqa: N818 - a reason, caught where it is listed
    pass


class FoldBatchNorms(ir.passes.InPlacePass):
    """Fold BatchNormalization nodes in FP64, each with its own epsilon; nothing but rounding changes.

    Rewritten, in the main graph and in the bodies of If, Loop and Scan:

    1. BatchNormalization that gets the whole output of a Conv, ConvTranspose (any groups) or Gemm, through nothing but
       Identity, Dropout in inference, folded BatchNormalization, and Concat along axis 1 of such outputs.
    2. BatchNormalization whose only reader (through Identity and Dropout) is a Conv without padding, a Conv with
       padding or a ConvTranspose when it only scales, or a Gemm.
    3. BatchNormalization that stays, whose statistics FP16 cannot hold while its scale and shift can: becomes Mul and
       Add with FP32 constants.

    Refused, with a reason in `result`:

    - training mode, statistics or weights that are computed or are inputs of the graph, element types other than
      float32 and float64, opset below 9;
    - an output on the way that has another reader or is an output of the graph;
    - a Gemm with alpha or beta other than 1, transposed A, or a bias that is no vector;
    - weights that would not be finite in FP32; names that match `skip`.

    Weights that several nodes read are copied, not changed for the others. New initializers are called after the node
    that reads them. Outputs keep their names. Running it twice changes nothing.

    Args:
        clamp: ``auto``, ``off``, or a floor for every variance.
        observed: what each BatchNormalization saw, by node name; those not in it are not clamped.
        tolerance: what ``auto`` may change of a BatchNormalization's output, relative to its range.
        skip: patterns of node names that are left alone.
        limit: fold at most so many.

    Attributes:
        result: what the last call did.
    """

    def __init__(
        self,
        clamp: Clamp = "auto",
        observed: Mapping[str, Observed] | None = None,
        tolerance: float = 1e-5,
        skip: Sequence[str] = (),
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.clamp = clamp
        self.observed = observed or {}
        self.tolerance = tolerance
        self.skip = tuple(skip)
        self.limit = limit
        self.result = GraphFolds()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold in place; `modified` says whether anything was."""
        self.result = GraphFolds()
        opset = model.opset_imports.get("", 0)
        for node in list(norm_nodes(model)):
            progress.checkpoint()
            try:
                self._fold(node, opset)
            except _Refused as refusal:
                self._keep(node, str(refusal))
        shifted = any(kept.form != "BatchNormalization" for kept in self.result.kept)
        return ir.passes.PassResult(model, modified=bool(self.result.folds) or shifted)

    def _fold(self, node: ir.Node, opset: int) -> None:
        if any(fnmatchcase(_name(node), pattern) for pattern in self.skip):
            raise _Refused("left out by fold.skip")
        if self.limit is not None and len(self.result.folds) >= self.limit:
            raise _Refused("beyond the limit")
        norm = _norm_of(node, opset)
        check_norm(norm, _name(node))
        source = node.inputs[0]
        if source is None:
            raise _Refused("it has no input")
        try:
            parts = list(_producers(source, 0, len(norm.mean)))
        except _Refused as refusal:
            try:
                self._fold_before(node, norm, _reader(node))
            except _Refused as second:
                raise _Refused(f"{refusal}; and into its reader: {second}") from None
            return
        self._fold_after(node, norm, parts)

    def _fold_after(self, node: ir.Node, norm: Norm, parts: list[tuple[ir.Node, slice]]) -> None:
        peaks, biases = np.ones_like(norm.var), norm.mean.copy()
        operands = {}
        for producer, channels in parts:
            weight, bias = operands[producer] = _operands(producer)
            peaks[channels] = weight_peaks(weight, _LAYOUTS[producer.op_type], _groups(producer))
            biases[channels] = 0.0 if bias is None else bias
        seen = self.observed.get(_name(node))
        changed: tuple[ClampedChannel, ...] = ()
        if seen is not None:
            norm, changed = clamp_variance(
                norm,
                self.clamp,
                weight_peak=peaks,
                bias=biases,
                distance=seen.distance,
                tolerance=self.tolerance * seen.span,
            )
        folded = {}
        for producer, channels in parts:
            layout, groups = _LAYOUTS[producer.op_type], _groups(producer)
            with np.errstate(invalid="ignore", over="ignore"):
                folded[producer] = fold_after(*operands[producer], norm.part(channels), layout, groups)
        self._replace(node, folded, "after")
        if changed:
            self.result.clamped[_name(node)] = changed

    def _fold_before(self, node: ir.Node, norm: Norm, reader: ir.Node) -> None:
        layout, groups = _LAYOUTS[reader.op_type], _groups(reader)
        weight, bias = _operands(reader)
        inputs = weight.shape[0] if layout == "transposed" else weight.shape[1] * groups
        if inputs != len(norm.mean):
            raise _Refused(f"{_name(reader)} has {inputs} input channels, not {len(norm.mean)}")
        if norm.shift.any() and (layout == "transposed" or _pads(reader)):
            raise _Refused(f"the shift does not reach the borders of {_name(reader)} alike")
        with np.errstate(invalid="ignore", over="ignore"):
            folded = fold_before(weight, bias, norm, layout, groups)
        self._replace(node, {reader: folded}, "before")

    def _replace(self, node: ir.Node, folded: Mapping[ir.Node, tuple[Floats, Floats | None]], side: str) -> None:
        largest = float(np.finfo(np.float32).max)
        for values in (v for pair in folded.values() for v in pair if v is not None):
            if not np.all(np.abs(values) <= largest):
                raise _Refused("folded weights would not be finite")
        for owner, (weight, bias) in folded.items():
            weight, tiny = flushed(weight)
            self.result.flushed += tiny
            dead = constant_channels(weight, _LAYOUTS[owner.op_type], _groups(owner))
            if dead:
                self.result.constants[_name(owner)] = dead
            _set_operand(owner, 1, "weight", weight)
            if bias is not None:
                bias, tiny = flushed(bias)
                self.result.flushed += tiny
                _set_operand(owner, 2, "bias", bias)
        self.result.folds.append(NodeFold(_name(node), side, tuple(_name(owner) for owner in folded)))
        _bypass(node)

    def _keep(self, node: ir.Node, reason: str) -> None:
        form = "BatchNormalization"
        try:
            norm = _norm_of(node, _OLDEST)
        except _Refused:
            norm = None
        rank = _rank(node)
        if norm is not None and rank is not None and needs_scale_shift(norm):
            _write_scale_shift(node, norm, rank)
            form = "scale and shift"
        self.result.kept.append(NodeKept(_name(node), reason, form))


def norm_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every BatchNormalization of a model's graphs, in order."""
    for node in model.graph.all_nodes():
        if node.op_type == "BatchNormalization" and node.domain == "":
            yield node


def fold_graph(model: ir.Model, feeds: Feeds, settings: FoldSettings) -> GraphFolds:
    """Fold a model's BatchNormalization nodes in place, and prove on real inputs that it still computes the same.

    An output passes when its largest difference is at most ``settings.tolerance`` times its range, or at most
    `ROUNDING` times what one FP32 rounding of every input value changes it. The model as it was is run without any of
    ONNX Runtime's optimizations, which fold BatchNormalization themselves.

    Args:
        model: read by ONNX Runtime; its nodes have unique names.
        feeds: real inputs by name, a few samples at several sizes.
        settings: clamp policy, tolerance, and nodes to leave alone.

    Raises:
        EnginesmithError: outputs that are not finite; a pattern in ``settings.skip`` that matches no node; a fold
            or floor that changes the model, named, with the model left as it was before.
    """
    names = [_name(node) for node in norm_nodes(model)]
    for pattern in settings.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise EnginesmithError(
                f"{pattern!r} matches no BatchNormalization node",
                key="fold.skip",
                hint=f"there are {', '.join(names[:8])}" if names else "the model has none",
            )
    if not names:
        return GraphFolds()
    observed, expected = _observe(model, feeds)
    allowed = _allowed(model, feeds, expected, settings.tolerance)
    clamp: Clamp = settings.clamp["floor"] if isinstance(settings.clamp, dict) else settings.clamp

    def attempt(policy: Clamp, limit: int | None = None) -> tuple[ir.Model, GraphFolds]:
        copy = model.clone()
        folding = FoldBatchNorms(policy, observed, settings.tolerance, settings.skip, limit)
        folding(copy)
        found = _run(copy, feeds)
        folding.result.differences = _differences(found, expected)
        return copy, folding.result

    def passes(result: GraphFolds) -> bool:
        return all(difference <= allowed[name] for name, difference in result.differences.items())

    folded, result = attempt(clamp)
    if not passes(result) and result.clamped:
        plain, without = attempt("off")
        if passes(without):
            if clamp != "auto":
                worst = max(result.differences.values())
                raise EnginesmithError(
                    f"raising variances to {clamp:g} changes the outputs by {worst:.2g} of their range",
                    key="fold.clamp",
                    details=[f"{n}: {len(c)} channels" for n, c in result.clamped.items()],
                    hint=f"at most {settings.tolerance:g} is allowed (fold.tolerance); use clamp: auto",
                )
            folded, result = plain, without
    if not passes(result):
        passing, failing = 0, len(result.folds)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if passes(attempt(clamp, middle)[1]):
                passing = middle
            else:
                failing = middle
        guilty = result.folds[failing - 1]
        output = max(result.differences, key=lambda name: result.differences[name])
        raise EnginesmithError(
            f"folding {guilty.norm} into {', '.join(guilty.into)} changes output {output} by "
            f"{result.differences[output]:.2g} of its range",
            where=guilty.norm,
            key="fold.skip",
            hint=f"at most {settings.tolerance:g} is allowed (fold.tolerance); leave this one out with "
            f"fold: {{skip: [{guilty.norm}]}}",
        )
    model.graph = folded.graph
    return result


# --- reading a node ------------------------------------------------------------------------------------------------


def _norm_of(node: ir.Node, opset: int) -> Norm:
    if opset < _OLDEST:
        raise _Refused(f"BatchNormalization of opset {opset} is another operator")
    training = node.attributes.get("training_mode")
    if training is not None and training.as_int() != 0:
        raise _Refused("it is in training mode and uses the statistics of the batch")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        raise _Refused("its statistics are outputs: it is in training mode")
    gamma, beta, mean, var = (_constant(value, "a statistic") for value in node.inputs[1:5])
    epsilon = node.attributes.get("epsilon")
    return Norm(gamma, beta, mean, var, 1e-5 if epsilon is None else epsilon.as_float())


def _constant(value: ir.Value | None, what: str) -> Floats:
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    if value is None or tensor is None:
        raise _Refused(f"{what} is computed or an input of the graph")
    if tensor.dtype not in _FLOATS:
        raise _Refused(f"{what} is {tensor.dtype}")
    return tensor.numpy().astype(np.float64)


def _producers(value: ir.Value, start: int, channels: int) -> Iterator[tuple[ir.Node, slice]]:
    """The nodes that make up a value's channels, which all go to one place."""
    producer = value.producer()
    if producer is None:
        raise _Refused(f"{value.name} is an input of the graph")
    if value.is_graph_output():
        raise _Refused(f"{value.name} is an output of the graph")
    if len(value.uses()) != 1:
        raise _Refused(f"{value.name} has {len(value.uses())} readers")
    if _hands_on(producer) and producer.inputs[0] is not None:
        yield from _producers(producer.inputs[0], start, channels)
    elif producer.op_type == "Concat" and producer.domain == "":
        yield from _joined(producer, start, channels)
    elif producer.op_type in _LAYOUTS and producer.domain == "":
        weight, _ = _operands(producer)
        outputs = weight.shape[1] * _groups(producer) if producer.op_type == "ConvTranspose" else weight.shape[0]
        if outputs != channels:
            raise _Refused(f"{_name(producer)} has {outputs} output channels, not {channels}")
        yield producer, slice(start, start + channels)
    else:
        raise _Refused(f"{_name(producer)} ({producer.op_type}) stands before it")


def _joined(concat: ir.Node, start: int, channels: int) -> Iterator[tuple[ir.Node, slice]]:
    axis = concat.attributes["axis"].as_int()
    rank = concat.outputs[0].shape.rank() if concat.outputs[0].shape is not None else None
    if axis < 0 and rank is not None:
        axis += rank
    if axis != 1:
        raise _Refused(f"{_name(concat)} joins along axis {axis}")
    end = start + channels
    for value in concat.inputs:
        size = _channels(value)
        if value is None or size is None:
            raise _Refused(f"an input of {_name(concat)} has no known number of channels")
        yield from _producers(value, start, size)
        start += size
    if start != end:
        raise _Refused(f"{_name(concat)} has {start - end + channels} channels, not {channels}")


def _channels(value: ir.Value | None) -> int | None:
    """Channels of a value: from its shape, else from the weight of the node that makes it."""
    if value is None:
        return None
    if value.shape is not None and value.shape.rank() > 1 and isinstance(value.shape[1], int):
        return int(value.shape[1])
    producer = value.producer()
    if producer is not None and producer.op_type in _LAYOUTS:
        weight, _ = _operands(producer)
        return int(weight.shape[1] * _groups(producer) if producer.op_type == "ConvTranspose" else weight.shape[0])
    return None


def _hands_on(node: ir.Node) -> bool:
    """Whether a node gives its input unchanged."""
    if node.domain != "":
        return False
    if node.op_type == "Identity":
        return True
    if node.op_type != "Dropout" or any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
        return False
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is None:
        return True
    tensor = ir.convenience.get_const_tensor(mode)
    return tensor is not None and not tensor.numpy().any()


def _reader(node: ir.Node) -> ir.Node:
    """The Conv, ConvTranspose or Gemm that alone reads a node's output, as its first input."""
    value = node.outputs[0]
    while True:
        uses = list(value.uses())
        if value.is_graph_output() or len(uses) != 1:
            raise _Refused(f"{value.name} has {len(uses)} readers" + (" or is an output" if not uses else ""))
        reader, index = uses[0]
        if index == 0 and _hands_on(reader):
            value = reader.outputs[0]
        elif index == 0 and reader.domain == "" and reader.op_type in _LAYOUTS:
            return reader
        else:
            raise _Refused(f"{_name(reader)} ({reader.op_type}) reads it")


def _operands(node: ir.Node) -> tuple[Floats, Floats | None]:
    """Weight (a Gemm's as (out, in)) and bias of a node."""
    weight = _constant(node.inputs[1], f"the weight of {_name(node)}")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    vector = None if bias is None else _constant(bias, f"the bias of {_name(node)}")
    if node.op_type != "Gemm":
        return weight, vector
    numbers = [node.attributes[n].as_float() for n in ("alpha", "beta") if n in node.attributes]
    if any(number != 1 for number in numbers) or _integer(node, "transA", 0):
        raise _Refused(f"{_name(node)} has alpha, beta or a transposed A")
    if not _integer(node, "transB", 0):
        weight = weight.T
    if vector is not None:
        if vector.size == 1:
            vector = np.broadcast_to(vector.reshape(1), (weight.shape[0],)).copy()
        vector = vector.reshape(-1)
        if vector.shape != (weight.shape[0],):
            raise _Refused(f"the bias of {_name(node)} is no vector")
    return weight, vector


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _groups(node: ir.Node) -> int:
    return _integer(node, "group", 1)


def _pads(node: ir.Node) -> bool:
    if node.op_type == "Gemm":
        return False
    auto = node.attributes.get("auto_pad")
    if auto is not None and auto.as_string() not in ("NOTSET", "VALID"):
        return True
    pads = node.attributes.get("pads")
    return pads is not None and any(pads.as_ints())


def _rank(node: ir.Node) -> int | None:
    for value in (node.inputs[0], node.outputs[0]):
        if value is not None and value.shape is not None:
            return value.shape.rank()
    return None


def _name(node: ir.Node) -> str:
    return node.name or f"{node.op_type}_{node.outputs[0].name}"


# --- changing the graph --------------------------------------------------------------------------------------------


def _set_operand(node: ir.Node, index: int, role: str, values: Floats) -> None:
    """Give a node an initializer of its own, of the type of its weight."""
    graph = node.graph
    old = node.inputs[1]
    tensor = None if old is None else ir.convenience.get_const_tensor(old)
    if not isinstance(graph, ir.Graph) or tensor is None:
        raise _Refused(f"{_name(node)} is in a function")
    if role == "weight" and node.op_type == "Gemm" and not _integer(node, "transB", 0):
        values = values.T
    array = np.ascontiguousarray(values.astype(tensor.dtype.numpy()))
    before = node.inputs[index] if index < len(node.inputs) else None
    name = _free(graph, f"{_name(node)}.{role}", before)
    value = ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(tensor.dtype),
        const_value=ir.tensor(array, name=name),
    )
    if before is not None and before.name == name and before.is_initializer():
        graph.initializers.pop(name)
    graph.register_initializer(value)
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)
    _drop_unused(graph, [before])


def _free(graph: ir.Graph, wanted: str, own: ir.Value | None) -> str:
    """A name that no value of the graph has, except the one that is replaced when nobody else reads it."""
    taken = {v.name for n in graph.all_nodes() for v in n.outputs} | set(graph.initializers)
    taken |= {v.name for v in graph.inputs}
    if own is not None and own.name == wanted and len(own.uses()) == 1:
        return wanted
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}.{number}"
    return name


def _bypass(node: ir.Node) -> None:
    """Take a node out; its readers get its input, and an output of the graph keeps its name."""
    source, result, graph = node.inputs[0], node.outputs[0], node.graph
    if source is None or graph is None:
        raise _Refused("it has no input")
    if result.is_graph_output():
        if source.is_graph_output() or source.is_graph_input() or source.producer() is None:
            raise _Refused("its input and its output are both outputs of the graph")
        kept_name, result.name = result.name, None
        source.name = kept_name
        source.shape, source.type = source.shape or result.shape, source.type or result.type
    result.replace_all_uses_with(source, replace_graph_outputs=True)
    statistics = node.inputs[1:]  # forgotten by the node when it is removed
    graph.remove(node, safe=True)
    _drop_unused(graph, statistics)


def _drop_unused(graph: ir.Graph | ir.Function, values: Sequence[ir.Value | None]) -> None:
    """Remove initializers and Constant nodes of the graph that nobody reads any more."""
    for value in values:
        if value is None or value.name is None or value.uses() or value.is_graph_output():
            continue
        producer = value.producer()
        if producer is not None and producer.op_type == "Constant" and producer.graph is graph:
            graph.remove(producer, safe=True)
        if isinstance(graph, ir.Graph) and graph.initializers.get(value.name) is value:
            graph.initializers.pop(value.name)


def _write_scale_shift(node: ir.Node, norm: Norm, rank: int) -> None:
    """Mul and Add in the place of a BatchNormalization."""
    graph, source, result = node.graph, node.inputs[0], node.outputs[0]
    old = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    if not isinstance(graph, ir.Graph) or source is None or old is None:
        return
    constants = []
    for role, values in (("scale", norm.scale), ("shift", norm.shift)):
        array = values.astype(old.dtype.numpy()).reshape(-1, *([1] * (rank - 2)))
        name = _free(graph, f"{_name(node)}.{role}", None)
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(old.dtype), const_value=tensor)
        graph.register_initializer(value)
        constants.append(value)
    scaled = ir.node("Mul", [source, constants[0]], name=f"{_name(node)}.scale")
    scaled.outputs[0].name = f"{_name(node)}.scaled"
    scaled.outputs[0].type, scaled.outputs[0].shape = result.type, result.shape
    moved = ir.node("Add", [scaled.outputs[0], constants[1]], name=f"{_name(node)}.shift")
    graph.insert_after(node, [scaled, moved])
    kept_name, result.name = result.name, None
    new = moved.outputs[0]
    new.name, new.type, new.shape = kept_name, result.type, result.shape
    result.replace_all_uses_with(new, replace_graph_outputs=True)
    statistics = node.inputs[1:]  # forgotten by the node when it is removed
    graph.remove(node, safe=True)
    _drop_unused(graph, statistics)


# --- running -------------------------------------------------------------------------------------------------------


def _run(model: ir.Model, feeds: Feeds, fetch: Sequence[str] | None = None) -> list[dict[str, np.ndarray]]:
    with OnnxRunner(model, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL) as runner:
        return [runner.run(feed, fetch) for feed in feeds]


def _observe(model: ir.Model, feeds: Feeds) -> tuple[dict[str, Observed], list[dict[str, np.ndarray]]]:
    """What every BatchNormalization of the main graph sees, and the model's outputs."""
    copy = model.clone()
    outputs = [value.name or "" for value in model.graph.outputs]
    watched: dict[str, tuple[str, str, Floats]] = {}
    for node in norm_nodes(copy):
        statistics = None if node.inputs[3] is None else ir.convenience.get_const_tensor(node.inputs[3])
        if node.graph is not copy.graph or statistics is None or node.inputs[0] is None:
            continue
        ends = (node.inputs[0], node.outputs[0])
        watched[_name(node)] = (ends[0].name or "", ends[1].name or "", statistics.numpy().astype(np.float64))
        for value in ends:
            if not value.is_graph_output() and not value.is_graph_input():
                value.type = value.type or ir.TensorType(statistics.dtype)
                copy.graph.outputs.append(value)
    distance: dict[str, Floats] = {}
    low, high = dict.fromkeys(watched, np.inf), dict.fromkeys(watched, -np.inf)
    expected = []
    with OnnxRunner(copy, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL) as runner:
        for feed in feeds:
            progress.checkpoint()
            found = {**feed, **runner.run(feed)}
            expected.append({name: found[name] for name in outputs})
            for name, (source, result, mean) in watched.items():
                x = np.moveaxis(found[source], 1, 0).reshape(len(mean), -1)
                seen = np.abs(x - mean[:, None]).max(axis=1).astype(np.float64)
                distance[name] = np.fmax(distance.get(name, 0.0), seen)
                low[name] = min(low[name], float(found[result].min()))
                high[name] = max(high[name], float(found[result].max()))
    for output in outputs:
        if not all(np.isfinite(e[output].astype(np.float64)).all() for e in expected):
            raise EnginesmithError(
                f"the model's output {output} is not finite on the calibration data, before anything is folded",
                key="model.checkpoint",
                hint="take another model, or look at the data",
            )
    return {name: Observed(distance[name], high[name] - low[name]) for name in distance}, expected


def _allowed(
    model: ir.Model, feeds: Feeds, expected: list[dict[str, np.ndarray]], tolerance: float
) -> dict[str, float]:
    """How far each output may move: the tolerance, or a few times what one rounding of the inputs does."""
    generator = np.random.default_rng(0)
    ulp = float(np.finfo(np.float32).eps)
    shaken = [
        {
            n: (a * (1 + ulp * generator.choice([-1.0, 1.0], a.shape))).astype(a.dtype) if a.dtype == np.float32 else a
            for n, a in feed.items()
        }
        for feed in feeds
    ]
    moved = _differences(_run(model, shaken), expected)
    return {name: max(tolerance, ROUNDING * moved[name]) for name in moved}


def _differences(found: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Largest difference of each output over all feeds, in units of its range; infinite for NaN or another shape."""
    result = {}
    for name in expected[0]:
        theirs = [e[name].astype(np.float64) for e in expected]
        ours = [f[name].astype(np.float64) for f in found]
        if any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
            result[name] = float("inf")
            continue
        flat = np.concatenate([t.reshape(-1) for t in theirs])
        span = (float(np.ptp(flat)) or float(np.abs(flat).max()) or 1.0) if flat.size else 1.0
        apart = max((float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True) if b.size), default=0.0)
        result[name] = apart / span if apart == apart else float("inf")  # NaN is not itself
    return result
