from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.graph import io, qdq
from enginesmith.tasks.runner import OnnxRunner

RNG = np.random.default_rng(0)


def graph(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    *,
    opset: int = 18,
    channels: int = 3,
    outputs: tuple[str, ...] = ("y",),
) -> ir.Model:
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", channels, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "k", "h", "w"]) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return ir.from_proto(model)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def conv_relu(weight: np.ndarray | None = None, bias: np.ndarray | None = None) -> ir.Model:
    weight = normal(4, 3, 3, 3) if weight is None else weight
    bias = normal(len(weight)) if bias is None else bias
    return graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv"),
            helper.make_node("Relu", ["c"], ["y"], name="relu"),
        ],
        {"w": weight, "b": bias},
        channels=weight.shape[1],
    )


def quantize(model: ir.Model, scales: dict[str, float], placement: qdq.Placement = "conv-relu") -> ir.Model:
    convs, _ = qdq.find_convs(model, placement)
    shortcuts = qdq.find_shortcuts(model, convs) if placement == "conv+residual" else ()
    pass_ = qdq.QuantizePass(qdq.plan_quantization(model, convs, scales, shortcuts=shortcuts))
    pass_.requires(model)
    pass_(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def fake_quantized(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    return (np.clip(np.rint(x / scale), -128, 127) * scale).astype(np.float32)


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


# What is quantized


def test_conv_relu_takes_relu_and_relu6_and_nothing_else() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c1"], name="before_relu"),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu"),
        helper.make_node("Conv", ["r1", "w"], ["c2"], name="before_relu6"),
        helper.make_node("Clip", ["c2", "zero", "six"], ["r2"], name="relu6"),
        helper.make_node("Conv", ["r2", "w"], ["c3"], name="before_symmetric_clip"),
        helper.make_node("Clip", ["c3", "minus", "six"], ["r3"], name="clip"),
        helper.make_node("Conv", ["r3", "w"], ["c4"], name="before_sigmoid"),
        helper.make_node("Sigmoid", ["c4"], ["r4"], name="sigmoid"),
        helper.make_node("Conv", ["r4", "w"], ["y"], name="last"),
    ]
    constants = {"zero": np.float32(0), "six": np.float32(6), "minus": np.float32(-1)}
    model = graph(nodes, {"w": normal(3, 3, 1, 1)} | {n: np.asarray(v) for n, v in constants.items()})

    convs, refused = qdq.find_convs(model, "conv-relu")

    assert [(c.conv, c.output) for c in convs] == [("before_relu", "r1"), ("before_relu6", "r2")]
    assert {r.conv: r.reason for r in refused} == {
        "before_symmetric_clip": "Clip follows it, not Relu or Clip from 0",
        "before_sigmoid": "Sigmoid follows it, not Relu or Clip from 0",
        "last": "its result is a graph output before any activation",
    }
    assert len(qdq.find_convs(model, "conv")[0]) == 5


def test_batchnorm_between_conv_and_relu_belongs_to_the_subgraph() -> None:
    model = graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"], name="norm"),
            helper.make_node("Relu", ["n"], ["y"], name="relu"),
        ],
        {"w": normal(3, 3, 1, 1)} | {name: np.ones(3, np.float32) for name in "gbmv"},
    )
    (conv,), _ = qdq.find_convs(model, "conv-relu")
    assert conv.members == ("conv", "norm", "relu")
    assert conv.output == "y"


def test_conv_read_before_its_activation_is_refused() -> None:
    model = graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
            helper.make_node("Relu", ["c"], ["r"], name="relu"),
            helper.make_node("Add", ["c", "r"], ["y"], name="add"),
        ],
        {"w": normal(3, 3, 1, 1)},
    )
    found, (refused,) = qdq.find_convs(model, "conv-relu")
    assert found == ()
    assert refused.reason == "its result has several readers before any activation: Add, Relu"


def test_computed_weight_is_refused() -> None:
    model = graph(
        [
            helper.make_node("Abs", ["w"], ["w2"], name="abs"),
            helper.make_node("Conv", ["x", "w2"], ["c"], name="conv"),
            helper.make_node("Relu", ["c"], ["y"], name="relu"),
        ],
        {"w": normal(3, 3, 1, 1)},
    )
    _, (refused,) = qdq.find_convs(model, "conv")
    assert refused.reason == "its weight is computed or fed at run time"


def test_conv_with_nan_weight_is_refused() -> None:
    weight = normal(4, 3, 3, 3)
    weight[0, 0, 0, 0] = np.nan
    _, (refused,) = qdq.find_convs(conv_relu(weight), "conv")
    assert refused.reason == "its weight holds NaN or infinity"


def test_conv_in_a_branch_is_refused() -> None:
    branch = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["inner"], name="conv_in_branch")],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["same"], name="same")],
        "other",
        [],
        [helper.make_tensor_value_info("same", TensorProto.FLOAT, None)],
    )
    model = graph(
        [helper.make_node("If", ["flag"], ["y"], name="if", then_branch=branch, else_branch=other)],
        {"w": normal(3, 3, 1, 1), "flag": np.asarray(True)},
    )
    found, (refused,) = qdq.find_convs(model, "conv")
    assert found == ()
    assert (refused.conv, refused.reason) == ("conv_in_branch", "it is inside a subgraph")


# The numbers


@pytest.mark.parametrize("absmax", [1.0, 3e-4, 1e-6, 700.0])
def test_weight_is_within_half_a_step_and_nothing_is_clipped(absmax: float) -> None:
    weight = normal(4, 3, 3, 3)
    weight *= absmax / np.abs(weight).max()
    quantized = qdq.quantize_weight(weight, 0)
    step = quantized.scale.reshape(-1, 1, 1, 1)
    assert (np.abs(quantized.dequantized() - weight) <= 0.5001 * step).all()
    assert np.abs(quantized.values).max() <= 127
    # An FP16 number, at most one FP16 step above absmax / 127.
    wanted = np.abs(weight).max(axis=(1, 2, 3)) / 127
    assert (quantized.scale == quantized.scale.astype(np.float16)).all()
    assert (quantized.scale >= wanted).all()
    assert (quantized.scale <= np.maximum(wanted * (1 + 2**-10), wanted + 2**-24)).all()


def test_scales_are_per_channel() -> None:
    weight = np.stack([np.full((3, 1, 1), 127.0), np.full((3, 1, 1), 0.127)]).astype(np.float32)
    scale = qdq.quantize_weight(weight, 0).scale
    np.testing.assert_allclose(scale, [1.0, 0.001], rtol=1e-3)


def test_channel_of_zeros_stays_zero() -> None:
    weight = normal(2, 3, 1, 1)
    weight[1] = 0
    quantized = qdq.quantize_weight(weight, 0)
    assert not quantized.dequantized()[1].any()
    assert (quantized.scale > 0).all()


def test_scale_beyond_fp16_stays_exact() -> None:
    assert qdq.representable_scale(1e6) == np.float32(1e6)


def test_tiny_channel_keeps_its_bias_within_int32() -> None:
    weight = np.stack([np.full((3, 1, 1), 1.0), np.full((3, 1, 1), 1e-20)]).astype(np.float32)
    bias = np.array([0.5, 2000.0], np.float32)
    model = conv_relu(weight, bias)
    convs, _ = qdq.find_convs(model, "conv-relu")
    scale = 1e-4
    plan = qdq.plan_quantization(model, convs, {"x": scale})
    assert (bias / (scale * plan.weights["conv"].scale) < 2**31).all()
    assert not plan.weights["conv"].values[1].any()

    quantize(model, {"x": scale, "y": 1.0})
    x = np.full((1, 3, 8, 8), 0.01, np.float32)
    y = OnnxRunner(model).run({"x": x})["y"]
    np.testing.assert_allclose(y[0, 1], 2000.0, rtol=1e-6)


def test_grouped_conv_transpose_takes_one_scale_and_a_plain_one_the_output_channels() -> None:
    # Case 27: weight (4, 2, 3, 3), groups 2, has four output channels, but no axis of length four that means them.
    weight = normal(4, 2, 3, 3) * np.array([1.0, 30.0], np.float32).reshape(1, 2, 1, 1)
    expected = np.abs(weight).max()
    for groups, axis, scales in ((2, None, ()), (1, 1, (2,))):
        model = graph(
            [
                helper.make_node("ConvTranspose", ["x", "w"], ["c"], name="up", group=groups),
                helper.make_node("Relu", ["c"], ["y"], name="relu"),
            ],
            {"w": weight},
            channels=4,
        )
        (conv,), _ = qdq.find_convs(model, "conv-relu")
        assert conv.axis == axis
        plan = qdq.plan_quantization(model, [conv], {"x": 0.01})
        assert plan.weights["up"].scale.shape == scales
        assert plan.weights["up"].scale.max() == pytest.approx(expected / 127, rel=1e-3)
        quantize(model, {"x": 0.01})
        x = normal(2, 4, 8, 8)
        stored = plan.weights["up"].dequantized()
        exact = graph(
            [
                helper.make_node("ConvTranspose", ["x", "w"], ["c"], name="up", group=groups),
                helper.make_node("Relu", ["c"], ["y"], name="relu"),
            ],
            {"w": stored},
            channels=4,
        )
        expected_y = OnnxRunner(exact).run({"x": fake_quantized(x, np.float32(plan.scales["x"]))})["y"]
        np.testing.assert_allclose(OnnxRunner(model).run({"x": x})["y"], expected_y, atol=1e-4)


# The graph


def test_graph_computes_what_fake_quantization_computes() -> None:
    model = conv_relu()
    weight = model.graph.initializers["w"].const_value.numpy()
    bias = model.graph.initializers["b"].const_value.numpy()
    scale = float(qdq.representable_scale(3.0 / 127))
    x = normal(2, 3, 8, 8)
    steps = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127
    stored = fake_quantized(weight, qdq.representable_scale(steps))
    windows = np.lib.stride_tricks.sliding_window_view(fake_quantized(x, np.float32(scale)), (3, 3), axis=(2, 3))
    expected = np.maximum(np.einsum("nchwij,ocij->nohw", windows, stored) + bias.reshape(1, -1, 1, 1), 0)

    quantize(model, {"x": scale})

    assert ops(model) == ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Conv", "Relu"]
    np.testing.assert_allclose(OnnxRunner(model).run({"x": x})["y"], expected, atol=1e-4)


def test_weights_are_stored_as_integers_and_biases_as_floats(tmp_path: Path) -> None:
    model = conv_relu(normal(64, 64, 3, 3))
    before = io.save(model, tmp_path / "before").stat().st_size
    after = io.save(quantize(model, {"x": 0.01}), tmp_path / "after").stat().st_size
    assert after < 0.3 * before
    assert "w" not in model.graph.initializers
    types = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert types["w_quantized"] == ir.DataType.INT8
    assert types["b"] == ir.DataType.FLOAT


def test_zero_points_are_zero_and_int8() -> None:
    model = quantize(conv_relu(), {"x": 0.01})
    for node in model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = node.inputs[2].const_value
            assert zero.dtype == ir.DataType.INT8
            assert not zero.numpy().any()


def test_pair_stands_behind_the_activation_and_is_shared_by_quantized_readers_only() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "w"], ["c1"], name="left"),
        helper.make_node("Relu", ["c1"], ["r1"], name="left_relu"),
        helper.make_node("Conv", ["r", "w"], ["c2"], name="right"),
        helper.make_node("Relu", ["c2"], ["r2"], name="right_relu"),
        helper.make_node("Sum", ["r", "r1", "r2"], ["y"], name="sum"),
    ]
    model = quantize(graph(nodes, {"w": normal(3, 3, 1, 1)}), {"x": 0.01, "r": 0.02})
    by_name = {node.name: node for node in model.graph}
    assert by_name["left"].inputs[0] is by_name["right"].inputs[0]
    assert by_name["left"].inputs[0].producer().inputs[0].producer().inputs[0].name == "r"
    assert by_name["sum"].inputs[0].name == "r"
    assert by_name["relu"].inputs[0].producer().name == "conv"
    # Two quantized tensors and three weights: the same one, but each convolution has integers of its own.
    assert ops(model).count("QuantizeLinear") == 2
    assert ops(model).count("DequantizeLinear") == 5
    OnnxRunner(model)


def test_weight_that_an_unquantized_conv_also_reads_stays_for_it() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="quantized"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "w"], ["y"], name="linear"),
    ]
    model = quantize(graph(nodes, {"w": normal(3, 3, 1, 1)}), {"x": 0.01})
    by_name = {node.name: node for node in model.graph}
    assert by_name["linear"].inputs[1].name == "w"
    assert by_name["quantized"].inputs[1].producer().op_type == "DequantizeLinear"


def test_weight_in_a_constant_node_behind_identity_is_quantized_per_channel() -> None:
    weight = normal(4, 3, 1, 1) * np.array([1, 10, 100, 1000], np.float32).reshape(4, 1, 1, 1)
    nodes = [
        helper.make_node("Constant", [], ["w0"], name="constant", value=numpy_helper.from_array(weight)),
        helper.make_node("Identity", ["w0"], ["w"], name="identity"),
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Relu", ["c"], ["y"], name="relu"),
    ]
    model = quantize(graph(nodes, {}), {"x": 0.01})
    assert "Constant" not in ops(model)
    assert "Identity" not in ops(model)
    scale = model.graph.initializers["w_scale"].const_value.numpy()
    np.testing.assert_allclose(scale, np.abs(weight).max(axis=(1, 2, 3)) / 127, rtol=1e-3)


def residual(first_has_norm: bool = False) -> ir.Model:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c0"], name="stem"),
        helper.make_node("Relu", ["c0"], ["r0"], name="stem_relu"),
        helper.make_node("Conv", ["r0", "w"], ["c1"], name="branch"),
        helper.make_node("Add", ["r0", "c1"], ["s"], name="add"),
        helper.make_node("Relu", ["s"], ["y"], name="relu"),
    ]
    return graph(nodes, {"w": normal(3, 3, 1, 1)})


def test_residual_placement_quantizes_the_shortcut_and_not_the_branch() -> None:
    model = quantize(residual(), {"x": 0.01, "r0": 0.02}, "conv+residual")
    add = next(node for node in model.graph if node.name == "add")
    assert add.inputs[0].producer().op_type == "DequantizeLinear"
    assert add.inputs[0].producer().inputs[0].producer().inputs[0].name == "r0"
    assert add.inputs[1].producer().name == "branch"
    # The shortcut and the branch's convolution share the pair.
    assert ops(model).count("QuantizeLinear") == 2


def test_of_two_convolutions_that_meet_in_an_add_the_later_one_fuses() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["down"], name="downsample"),
        helper.make_node("Conv", ["x", "w"], ["c"], name="branch"),
        helper.make_node("Add", ["c", "down"], ["y"], name="add"),
    ]
    model = graph(nodes, {"w": normal(3, 3, 1, 1)})
    (shortcut,) = qdq.find_shortcuts(model, qdq.find_convs(model, "conv+residual")[0])
    assert (shortcut.tensor, shortcut.index, shortcut.conv) == ("down", 1, "branch")


def test_add_of_a_constant_is_no_shortcut() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Add", ["c", "bias"], ["y"], name="add"),
    ]
    model = graph(nodes, {"w": normal(3, 3, 1, 1), "bias": normal(1, 3, 1, 1)})
    assert qdq.find_shortcuts(model, qdq.find_convs(model, "conv")[0]) == ()


def test_part_of_a_plan_quantizes_only_that_part() -> None:
    model = residual()
    convs, _ = qdq.find_convs(model, "conv+residual")
    plan = qdq.plan_quantization(
        model, convs, {"x": 0.01, "r0": 0.02}, shortcuts=qdq.find_shortcuts(model, convs)
    ).only({"stem"})
    qdq.QuantizePass(plan)(model)
    assert ops(model).count("QuantizeLinear") == 1
    add = next(node for node in model.graph if node.name == "add")
    assert add.inputs[0].name == "r0"


def test_opset_too_old_for_per_channel_is_a_failed_precondition() -> None:
    model = conv_relu()
    model.graph.opset_imports[""] = 11
    pass_ = qdq.QuantizePass(qdq.plan_quantization(model, qdq.find_convs(model, "conv")[0], {"x": 0.01}))
    with pytest.raises(ir.passes.PreconditionError, match="needs opset 13, the model has 11"):
        pass_.requires(model)


@pytest.mark.parametrize("opset", [18, 19])
def test_fp16_conv_takes_fp16_scales_from_opset_19_on(opset: int) -> None:
    model = conv_relu()
    convs, _ = qdq.find_convs(model, "conv")
    pass_ = qdq.QuantizePass(qdq.plan_quantization(model, convs, {"x": 0.01}))
    half = graph(
        [
            helper.make_node("Cast", ["x"], ["x16"], name="cast", to=TensorProto.FLOAT16),
            helper.make_node("Conv", ["x16", "w", "b"], ["c"], name="conv"),
            helper.make_node("Cast", ["c"], ["y"], name="back", to=TensorProto.FLOAT),
        ],
        {"w": normal(4, 3, 3, 3).astype(np.float16), "b": normal(4).astype(np.float16)},
        opset=opset,
    )
    if opset < qdq.MIN_OPSET_HALF:
        with pytest.raises(ir.passes.PreconditionError, match="FP16 needs opset 19"):
            pass_.requires(half)
        return
    pass_.requires(half)
    pass_(half)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    assert half.graph.initializers["w_scale"].dtype == ir.DataType.FLOAT16
    assert half.graph.initializers["x16_scale"].dtype == ir.DataType.FLOAT16


def test_names_that_are_taken_are_not_taken_again() -> None:
    model = graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="x_QuantizeLinear"),
            helper.make_node("Relu", ["c"], ["x_scale"], name="relu"),
            helper.make_node("Identity", ["x_scale"], ["y"], name="identity"),
        ],
        {"w": normal(3, 3, 1, 1)},
    )
    quantize(model, {"x": 0.01})
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)
    assert "x_QuantizeLinear_1" in names
    assert "x_scale_1" in model.graph.initializers


def test_tensorrt_parses_integers_and_float_biases(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    model = quantize(residual(), {"x": 0.01, "r0": 0.02}, "conv+residual")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(io.save(model, tmp_path))), [
        str(parser.get_error(i)) for i in range(parser.num_errors)
    ]
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    assert kinds.count(trt.LayerType.QUANTIZE) == 2
    assert kinds.count(trt.LayerType.DEQUANTIZE) == 4
