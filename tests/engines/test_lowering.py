"""INT8 in ONNX Runtime's form computes the same, and runs as integers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from enginesmith.tasks.engines.lowering import lower_for_onnxruntime

X = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32) * 3


def run(model: onnx.ModelProto, *, level: str = "DISABLE_ALL", saved: str = "") -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.add_session_config_entry("session.x64quantprecision", "1")
    if saved:
        options.optimized_model_filepath = saved
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: X})[0]


def operators(model: onnx.ModelProto, tmp_path) -> Counter:
    """Operators that ONNX Runtime runs."""
    run(model, level="ENABLE_EXTENDED", saved=str(tmp_path / "saved.onnx"))
    return Counter(node.op_type for node in onnx.load(tmp_path / "saved.onnx").graph.node)


def quantized(graph, *, activation: str = "", upper: float | None = None, scale: float = 0.05, shared: bool = False):
    """x → Q/DQ → Conv → activation → Q/DQ → y, or with the activation itself read in float too."""
    bias = graph.constant("b", graph.rng.standard_normal(6))
    graph.add("Conv", [graph.qdq("x", 0.06), graph.int8_weight("w", (6, 3, 3, 3)), bias], "c", pads=[1, 1, 1, 1])
    last = "c"
    if activation == "Relu":
        last = graph.add("Relu", ["c"], "r")
    elif activation == "Clip":
        bounds = [graph.constant("low", 0.0), graph.constant("high", upper)] if upper else [graph.constant("low", 0.0)]
        last = graph.add("Clip", ["c", *bounds], "r")
    last = graph.qdq(last, scale)
    if shared:
        last = graph.add("Add", [last, "r" if activation else "c"], "sum")
    graph.add("Identity", [last], "y")
    return graph.model({"x": ["n", 3, 8, 8]}, {"y": ["n", 6, 8, 8]})


@pytest.mark.parametrize(
    ("activation", "upper"), [("Relu", None), ("Clip", None), ("Clip", 6.0), ("Clip", 2.0), ("Clip", 0.11)]
)
def test_a_relu_moves_into_the_quantizer_bit_by_bit(activation, upper, graph, tmp_path) -> None:
    model = quantized(graph, activation=activation, upper=upper)
    lowered = lower_for_onnxruntime(model)
    assert lowered.fused == ["n_c"]
    onnx.checker.check_model(lowered.model, full_check=True)
    np.testing.assert_array_equal(run(lowered.model), run(model))
    assert operators(lowered.model, tmp_path)["QLinearConv"] == 1


def test_onnxruntime_alone_would_run_it_in_fp32(graph, tmp_path) -> None:
    found = operators(quantized(graph, activation="Relu"), tmp_path)
    assert found["QLinearConv"] == 0
    assert found["FusedConv"] == 1


def test_a_conv_without_activation_shifts_to_uint8(graph, tmp_path) -> None:
    model = quantized(graph)
    lowered = lower_for_onnxruntime(model)
    assert lowered.fused == []
    assert lowered.shifted == ["n_x_q", "n_c_q"]
    np.testing.assert_array_equal(run(lowered.model), run(model))
    assert operators(lowered.model, tmp_path)["QLinearConv"] == 1


@pytest.mark.parametrize("activation", ["", "Relu"])
def test_a_conv_that_is_also_read_in_float_becomes_an_integer_conv(activation, graph, tmp_path) -> None:
    model = quantized(graph, activation=activation, shared=True)
    lowered = lower_for_onnxruntime(model)
    assert lowered.integer == ["n_c"]
    np.testing.assert_allclose(run(lowered.model), run(model), rtol=1e-5, atol=1e-5)
    assert operators(lowered.model, tmp_path)["ConvInteger"] == 1


def test_a_depthwise_conv_read_in_float_keeps_its_sums(graph) -> None:
    graph.add("Conv", [graph.qdq("x", 0.06), graph.int8_weight("w", (3, 1, 3, 3))], "y", group=3, pads=[1, 1, 1, 1])
    model = graph.model({"x": ["n", 3, 8, 8]}, {"y": ["n", 3, 8, 8]})
    lowered = lower_for_onnxruntime(model)
    assert lowered.integer == ["n_y"]
    np.testing.assert_allclose(run(lowered.model), run(model), rtol=1e-5, atol=1e-5)


def test_a_float_model_is_returned_as_it_is(net) -> None:
    model = onnx.load(net("fp32"))
    assert lower_for_onnxruntime(model).model is model


def test_the_given_model_is_not_changed(graph) -> None:
    model = quantized(graph, activation="Relu")
    before = model.SerializeToString(deterministic=True)
    lower_for_onnxruntime(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_clip_from_below_zero_is_not_moved(graph) -> None:
    graph.add("Conv", [graph.qdq("x", 0.06), graph.int8_weight("w", (6, 3, 1, 1))], "c")
    graph.add("Clip", ["c", graph.constant("low", -1.0), graph.constant("high", 1.0)], "r")
    graph.add("Identity", [graph.qdq("r", 0.01)], "y")
    model = graph.model({"x": ["n", 3, 8, 8]}, {"y": ["n", 6, 8, 8]})
    lowered = lower_for_onnxruntime(model)
    assert lowered.fused == []
    assert lowered.integer == ["n_c"]
    np.testing.assert_array_equal(run(lowered.model), run(model))


def test_asymmetric_quantizers_are_left_alone(graph) -> None:
    graph.add("Identity", [graph.qdq("x", 0.06, zero=3)], "y")
    model = graph.model({"x": ["n", 3, 8, 8]}, {"y": ["n", 3, 8, 8]})
    assert lower_for_onnxruntime(model).model is model
