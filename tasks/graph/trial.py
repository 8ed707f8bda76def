"""Turns a graph with Q/DQ pairs into outputs exactly as written, also with a choice of convolutions per run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from enginesmith.tasks.data import Array, Dataset
from enginesmith.tasks.graph import io, qdq
from enginesmith.tasks.progress import Bar
from enginesmith.tasks.runner import predict, session_options


class QdqRunner:
    """One ONNX Runtime session that does what a graph's Q/DQ pairs say, in float32, and nothing else.

    By default ONNX Runtime turns a convolution between Q/DQ pairs into an integer kernel with an INT32 bias, and (1.32)
    quantizes a constant float weight behind a dequantized input on its own account, one scale for the whole weight.
    Here both are off: biases and unquantized weights stay float, and integer weights are dequantized once, when the
    session is made, which is also two to three times faster.

    Args:
        model: float32 graph with Q/DQ pairs.
        threads: intra-op threads; None means as many as this process may use.
    """

    def __init__(self, model: ir.Model, *, threads: int | None = None) -> None:
        options = session_options(threads=threads)
        with tempfile.TemporaryDirectory(prefix="enginesmith-") as folder:
            file = io.save(model, Path(folder))
            self._session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name for one feed."""
        return dict(zip(self._outputs, self._session.run(self._outputs, dict(feeds)), strict=True))

    def predict(self, dataset: Dataset, *, bar: Bar | None = None) -> dict[str, Array]:
        """Outputs for all samples, by name; see `OnnxRunner.predict`."""
        return predict(self.run, dataset, bar=bar)


class SwitchedQuantization:
    """A model in which each run says which convolutions are quantized.

    Every convolution of the quantization stands in both forms behind an If on a boolean input of its own: the
    quantized one with a Q/DQ pair on its input and its weight as INT8 leaves it. A shortcut follows the switch of the
    convolution that its Add fuses with. No session per convolution, and everything else is FP32: what the runs tell
    is the damage of quantization alone.

    Args:
        model: the FP32 graph. It is not changed.
        quantization: scales and integers, made from that graph.
        threads: intra-op threads; None means as many as this process may use.
    """

    def __init__(self, model: ir.Model, quantization: qdq.Quantization, *, threads: int | None = None) -> None:
        copy = model.clone()
        self._switches = _insert_switches(copy.graph, quantization)
        self._runner = QdqRunner(copy, threads=threads)

    def predict(self, dataset: Dataset, quantized: Collection[str], *, bar: Bar | None = None) -> dict[str, Array]:
        """Outputs for all samples with these convolutions in INT8; see `OnnxRunner.predict`.

        Raises:
            KeyError: a name that is no convolution of the quantization.
        """
        chosen = {self._switches[name] for name in quantized}
        switches = {switch: np.asarray(switch in chosen) for switch in self._switches.values()}
        return predict(lambda feed: self._runner.run({**feed, **switches}), dataset, bar=bar)


def noise(outputs: Mapping[str, Array], exact: Mapping[str, Array]) -> float:
    """Noise to signal of the worst float output, ``sum((y - y32)²) / sum(y32²)``; infinite when it holds NaN."""
    worst = 0.0
    for name, value in exact.items():
        if value.dtype.kind != "f":
            continue
        signal = float(np.sum(np.square(value, dtype=np.float64)))
        with np.errstate(invalid="ignore"):
            error = float(np.sum(np.square(outputs[name].astype(np.float64) - value)))
        ratio = error / signal if signal > 0 else (0.0 if error == 0 else math.inf)
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def _insert_switches(graph: ir.Graph, quantization: qdq.Quantization) -> dict[str, str]:
    """Put convolutions and shortcuts behind an If; the name of the switch of each convolution."""
    nodes = {node.name: node for node in graph}
    switches = {c.conv: ir.val(f"int8:{c.conv}", ir.DataType.BOOL, []) for c in quantization.convs}
    graph.inputs.extend(switches.values())
    for subgraph in quantization.convs:
        node = nodes[subgraph.conv]
        scale = quantization.scales[subgraph.input]
        weight = quantization.weights[subgraph.conv].dequantized()
        choice = _choice(
            f"{subgraph.conv}:choice",
            switches[subgraph.conv],
            _quantized_branch(node, scale, weight, quantization.biases.get(subgraph.conv)),
            _branch([_copy(node, _own_constants(node, "fp32"), "fp32")], "fp32"),
        )
        old, new = node.outputs[0], choice.outputs[0]
        graph.insert_before(node, choice)
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name, new.type, old.name = old.name, old.type, None
        graph.remove(node, safe=True)
    for shortcut in quantization.shortcuts:
        add = nodes[shortcut.add]
        value = add.inputs[shortcut.index]
        if value is None:
            raise ValueError(f"{shortcut.add} has no input {shortcut.index}")
        prefix = f"int8:{shortcut.add}"
        pair, _ = _pair(value, quantization.scales[shortcut.tensor], prefix)
        same = ir.node("Identity", [value], name=f"fp32:{shortcut.add}")
        same.outputs[0].name = f"fp32:{shortcut.add}:shortcut"
        choice = _choice(
            f"{shortcut.add}:choice",
            switches[shortcut.conv],
            _branch(pair, "int8", _constants_of(pair)),
            _branch([same], "fp32"),
        )
        choice.outputs[0].name = f"{shortcut.add}:shortcut"
        graph.insert_before(add, choice)
        add.replace_input_with(shortcut.index, choice.outputs[0])
    return {name: switch.name or "" for name, switch in switches.items()}


def _choice(name: str, switch: ir.Value, then: ir.Graph, otherwise: ir.Graph) -> ir.Node:
    choice = ir.node("If", [switch], {"then_branch": then, "else_branch": otherwise}, name=name)
    choice.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return choice


def _quantized_branch(node: ir.Node, scale: float, weight: qdq.FloatArray, bias: qdq.FloatArray | None) -> ir.Graph:
    prefix = f"int8:{node.name}"
    value = node.inputs[0]
    if value is None:
        raise ValueError(f"{node.name} has no input")
    pair, dequantized = _pair(value, scale, prefix)
    inputs = _own_constants(node, "int8")
    inputs[0], inputs[1] = dequantized, _initializer(f"{prefix}:weight", weight)
    if bias is not None:
        inputs[2:] = [_initializer(f"{prefix}:bias", bias)]
    return _branch([*pair, _copy(node, inputs, "int8")], "int8")


def _pair(value: ir.Value, scale: float, prefix: str) -> tuple[list[ir.Node], ir.Value]:
    factor = _initializer(f"{prefix}:scale", np.float32(scale))
    zero = _initializer(f"{prefix}:zero_point", np.int8(0))
    quantize = ir.node("QuantizeLinear", [value, factor, zero], name=f"{prefix}:quantize")
    quantize.outputs[0].name = f"{prefix}:quantized"
    dequantize = ir.node("DequantizeLinear", [quantize.outputs[0], factor, zero], name=f"{prefix}:dequantize")
    dequantize.outputs[0].name = f"{prefix}:dequantized"
    dequantize.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return [quantize, dequantize], dequantize.outputs[0]


def _own_constants(node: ir.Node, prefix: str) -> list[ir.Value | None]:
    """A node's operands with its constants as initializers of one branch: only for those has it fast kernels."""
    inputs = list(node.inputs)
    for position, value in enumerate(inputs):
        array = qdq.constant(value)
        if array is not None:
            inputs[position] = _initializer(f"{prefix}:{node.name}:constant{position}", array)
    return inputs


def _initializer(name: str, array: np.ndarray | np.generic) -> ir.Value:
    return ir.val(name, const_value=ir.tensor(np.asarray(array), name=name))


def _copy(node: ir.Node, inputs: list[ir.Value | None], prefix: str) -> ir.Node:
    copy = ir.Node(
        node.domain, node.op_type, inputs, node.attributes.values(), num_outputs=1, name=f"{prefix}:{node.name}"
    )
    copy.outputs[0].name = f"{prefix}:{node.outputs[0].name}"
    copy.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return copy


def _constants_of(nodes: list[ir.Node]) -> list[ir.Value]:
    """Initializers that the nodes of one branch brought with them, each once."""
    values = [v for node in nodes for v in node.inputs if v is not None and v.graph is None and v.producer() is None]
    return list({value.name: value for value in values if value.const_value is not None}.values())


def _branch(nodes: list[ir.Node], name: str, constants: list[ir.Value] | None = None) -> ir.Graph:
    owned = _constants_of(nodes) if constants is None else constants
    return ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, initializers=owned, name=name)
