"""The emulation against numpy's own float16 arithmetic, operator by operator, in both of its forms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import half, io
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.runner import OnnxRunner

F16, F32 = np.float16, np.float32
LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]
TIE_DOWN, TIE_UP = 1 + 2.0**-11, 1 + 3 * 2.0**-11  # half-way between neighbours; even is below, and above


untyped = helper.make_empty_tensor_value_info


def value_info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] = ("y",),
    *,
    opset: int = 18,
) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [value_info(name, value) for name, value in inputs.items()],
        [value_info(name, inputs[name]) if name in inputs else untyped(name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    model = ir.from_proto(proto)
    UniqueNodeNames()(model)
    return model


def node(op: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, ["y"], **attributes)


def in_half(
    operation: onnx.NodeProto,
    inputs: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray] | None = None,
    opset: int = 18,
) -> np.ndarray:
    """The result of one operation in FP16, from float32 data: by the switch, and by emulating the typed graph."""
    constants = constants or {}
    switched = half.SwitchedModel(model_of([operation], inputs, constants, opset=opset))
    result = switched.forward(inputs, switched.nodes)["y"]
    with np.errstate(over="ignore"):
        typed_inputs = {name: _narrow(value) for name, value in inputs.items()}
        typed_constants = {name: _narrow(value) for name, value in constants.items()}
    emulated = half.emulate(model_of([operation], typed_inputs, typed_constants, opset=opset))
    for level in LEVELS:
        again = OnnxRunner(emulated, level=level).run(typed_inputs)["y"]
        assert again.dtype == F16
        np.testing.assert_array_equal(again.astype(F32), result, err_msg=str(level))
    return result


def _narrow(value: np.ndarray) -> np.ndarray:
    return value.astype(F16) if value.dtype == F32 else value


def spread(count: int, seed: int = 0) -> np.ndarray:
    """Values of every kind: normal, subnormal, vanishing and overflowing in FP16, and ties."""
    rng = np.random.default_rng(seed)
    values = rng.choice([-1.0, 1.0], count) * np.exp2(rng.uniform(-28, 17, count))
    values[:8] = [TIE_DOWN, TIE_UP, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 0.0]
    return values.astype(F32)


def numpy_half(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(F16)


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance in FP16 steps; both arrays hold FP16 values."""

    def place(values: np.ndarray) -> np.ndarray:
        bits = values.astype(F16).view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(place(a) - place(b))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (TIE_DOWN, 1.0),
        (TIE_UP, 1 + 2.0**-9),
        (65519.99, 65504.0),
        (65520.0, np.inf),
        (-65520.0, -np.inf),
        (3.4e38, np.inf),
        (2.0**-24, 2.0**-24),
        (2.0**-25, 0.0),
        (np.nextafter(F32(2.0**-25), F32(1)), 2.0**-24),
        (1.5 * 2.0**-24, 2.0**-23),
        (2.5 * 2.0**-24, 2.0**-23),
        (np.inf, np.inf),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_a_pair_of_casts_rounds_at_every_optimization_level(
    value: float, rounded: float, level: ort.GraphOptimizationLevel
) -> None:
    graph = model_of(
        [
            helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT),
        ],
        {"x": np.zeros(1, F32)},
    )
    assert OnnxRunner(graph, level=level).run({"x": np.array([value], F32)})["y"][0] == F32(rounded)
    assert half.round_half(np.array([value], F32))[0] == F32(rounded)


def test_the_bounds_are_where_rounding_changes_kind() -> None:
    below = np.nextafter(F32(half.OVERFLOW), F32(0))
    assert half.round_half(np.array([half.OVERFLOW, below], F32)).tolist() == [np.inf, half.LARGEST]
    above = np.nextafter(F32(half.VANISH), F32(1))
    assert half.round_half(np.array([half.VANISH, above], F32)).tolist() == [0, 2.0**-24]
    assert float(np.finfo(F16).tiny) == half.SMALLEST_NORMAL


@pytest.mark.parametrize(
    ("op", "function"), [("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide)]
)
def test_arithmetic_is_numpys_float16_arithmetic_bit_for_bit(op: str, function: np.ufunc) -> None:
    x, w = spread(20000), spread(20000, seed=1)[::-1].copy()
    with np.errstate(all="ignore"):
        expected = function(numpy_half(x), numpy_half(w))
    result = in_half(node(op, "x", "w"), {"x": x, "w": w})
    np.testing.assert_array_equal(result, expected.astype(F32))
    with_constant = in_half(node(op, "x", "w"), {"x": x}, {"w": w})
    np.testing.assert_array_equal(with_constant, expected.astype(F32))
    assert np.isinf(result).any()
    assert ((result != 0) & (np.abs(result) < half.SMALLEST_NORMAL)).any()


def test_sqrt_is_numpys_float16_sqrt_bit_for_bit() -> None:
    x = np.abs(spread(20000))
    np.testing.assert_array_equal(in_half(node("Sqrt", "x"), {"x": x}), np.sqrt(numpy_half(x)).astype(F32))


@pytest.mark.parametrize(
    ("op", "function", "low", "high"),
    [("Exp", np.exp, -20, 12), ("Tanh", np.tanh, -6, 6), ("Log", np.log, 1e-6, 6e4)],
)
def test_transcendental_functions_are_within_one_step_of_the_rounded_exact_result(
    op: str, function: np.ufunc, low: float, high: float
) -> None:
    x = np.random.default_rng(0).uniform(low, high, 20000).astype(F32)
    exact = numpy_half(function(numpy_half(x).astype(np.float64)))
    result = in_half(node(op, "x"), {"x": x})
    assert ulps(result, exact).max() <= 1
    assert (ulps(result, exact) == 0).mean() > 0.999


def test_matmul_accumulates_in_float32() -> None:
    """4096 ones: FP16 accumulation stops at 2048. Then terms that cancel beyond FP16's range."""
    assert in_half(node("MatMul", "x", "w"), {"x": np.ones((1, 4096), F32)}, {"w": np.ones((4096, 1), F32)}) == 4096
    x = np.array([[60000, 60000, -60000, -59968]], F32)
    assert in_half(node("MatMul", "x", "w"), {"x": x}, {"w": np.ones((4, 1), F32)}) == 32
    assert np.isinf(in_half(node("MatMul", "x", "w"), {"x": x[:, :2]}, {"w": np.ones((2, 1), F32)}))


def test_matmul_rounds_operands_constants_and_results() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(32, 64)).astype(F32), rng.normal(size=(64, 16)).astype(F32)
    exact = numpy_half(x).astype(np.float64) @ numpy_half(w).astype(np.float64)
    result = in_half(node("MatMul", "x", "w"), {"x": x}, {"w": w})
    assert (ulps(result, numpy_half(exact)) == 0).mean() > 0.99
    np.testing.assert_allclose(result, exact, rtol=2.0**-11, atol=1e-5)


@pytest.mark.parametrize("group", [1, 8])
def test_conv_rounds_operands_and_accumulates_in_float32(group: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 9, 9)).astype(F32) * 100
    w = rng.normal(size=(8, 8 // group, 3, 3)).astype(F32)
    b = rng.normal(size=8).astype(F32)
    windows = np.lib.stride_tricks.sliding_window_view(numpy_half(x).astype(np.float64), (3, 3), axis=(2, 3))
    x64 = windows.reshape(2, group, 8 // group, 7, 7, 3, 3)
    w64 = numpy_half(w).astype(np.float64).reshape(group, 8 // group, 8 // group, 3, 3)
    exact = np.einsum("ngihwkl,goikl->ngohw", x64, w64).reshape(2, 8, 7, 7)
    exact += numpy_half(b).astype(np.float64)[:, None, None]
    result = in_half(node("Conv", "x", "w", "b", group=group), {"x": x}, {"w": w, "b": b})
    np.testing.assert_allclose(result, exact, rtol=2.0**-11, atol=1e-3)
    assert (ulps(result, numpy_half(exact)) == 0).mean() > 0.99


def test_reduce_sum_overflows_only_where_its_result_does() -> None:
    x = np.array([[60000, 60000, -60000], [60000, 60000, 60000]], F32)
    result = in_half(node("ReduceSum", "x", "axes", keepdims=0), {"x": x}, {"axes": np.array([1])})
    assert result.tolist() == [60000, np.inf]


def test_softmax_keeps_a_mask_of_the_lowest_float32() -> None:
    x = np.array([[1.0, 2.0, -3.4e38]], F32)
    result = in_half(node("Softmax", "x", axis=1), {"x": x})
    exact = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
    np.testing.assert_array_equal(result[0], numpy_half(np.array([*exact, 0])).astype(F32))


def test_layer_normalization_as_one_operator_computes_in_float32() -> None:
    """The variance is 1.6e5: as an FP16 tensor it would be infinite, inside the kernel it is not."""
    x = np.array([[-600, -400, -200, -100, 100, 200, 400, 600]], F32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5)
    ones = {"scale": np.ones(8, F32)}
    result = in_half(node("LayerNormalization", "x", "scale", axis=-1, epsilon=1e-5), {"x": x}, ones)
    assert ulps(result, numpy_half(exact)).max() <= 1


def written_out_layer_norm(eps: float = 1e-5) -> tuple[list[onnx.NodeProto], dict[str, np.ndarray]]:
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], name="mean"),
        helper.make_node("Sub", ["x", "mean"], ["centred"], name="sub"),
        helper.make_node("Pow", ["centred", "two"], ["squares"], name="pow"),
        helper.make_node("ReduceMean", ["squares", "axes"], ["var"], name="var"),
        helper.make_node("Add", ["var", "eps"], ["shifted"], name="add"),
        helper.make_node("Sqrt", ["shifted"], ["std"], name="sqrt"),
        helper.make_node("Div", ["centred", "std"], ["y"], name="div"),
    ]
    return nodes, {"axes": np.array([-1]), "two": np.array(2, F32), "eps": np.array(eps, F32)}


LAYER = np.array([[-700, -500, -300, -100, 100, 300, 500, 700]], F32)


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_norm_written_out_collapses_to_finite_zeros_and_no_fusion_hides_it(
    level: ort.GraphOptimizationLevel,
) -> None:
    nodes, constants = written_out_layer_norm()
    model = model_of(nodes, {"x": LAYER}, constants)
    switched = half.SwitchedModel(model, level=level)
    exact = LAYER / np.sqrt((LAYER.astype(np.float64) ** 2).mean() + 1e-5)
    np.testing.assert_allclose(switched.forward({"x": LAYER}, ())["y"], exact, rtol=1e-6)
    assert not switched.forward({"x": LAYER}, switched.nodes)["y"].any()
    whole = set(switched.nodes)
    assert not switched.forward({"x": LAYER}, whole - {"pow"})["y"].any(), "one node in FP32 restores nothing"
    region = {"pow", "var", "add", "sqrt"}
    np.testing.assert_allclose(switched.forward({"x": LAYER}, whole - region)["y"], exact, rtol=2e-3)
    typed = half.emulate(model_of(nodes, {"x": _narrow(LAYER)}, {n: _narrow(v) for n, v in constants.items()}))
    assert not OnnxRunner(typed, level=level).run({"x": _narrow(LAYER)})["y"].any()


@pytest.mark.parametrize("level", LEVELS)
def test_no_optimization_takes_a_rounding_out_of_a_chain_that_it_would_fuse(
    level: ort.GraphOptimizationLevel,
) -> None:
    """GELU (Div, Erf, Add, Mul, Mul), Conv with BatchNormalization and Clip, MatMul with Add, and a constant chain."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 4, 8, 8)).astype(F32) * 30
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"]),
        helper.make_node("Clip", ["n", "low", "high"], ["r"]),
        helper.make_node("Add", ["k1", "k2"], ["k"]),
        helper.make_node("Mul", ["r", "k"], ["s"]),
        helper.make_node("MatMul", ["s", "u"], ["d"]),
        helper.make_node("Add", ["d", "k1"], ["e"]),
        helper.make_node("Div", ["e", "root"], ["e1"]),
        helper.make_node("Erf", ["e1"], ["e2"]),
        helper.make_node("Add", ["e2", "one"], ["e3"]),
        helper.make_node("Mul", ["e", "e3"], ["e4"]),
        helper.make_node("Mul", ["e4", "point5"], ["y"]),
    ]
    constants = {
        "w": rng.normal(size=(4, 4, 1, 1)).astype(F32),
        **{name: rng.uniform(0.5, 2, 4).astype(F32) for name in "gbmv"},
        "low": np.array(0, F32),
        "high": np.array(6, F32),
        "k1": np.array(0.3333, F32),
        "k2": np.array(0.0001, F32),
        "u": rng.normal(size=(8, 8)).astype(F32),
        "root": np.array(np.sqrt(2), F32),
        "one": np.array(1, F32),
        "point5": np.array(0.5, F32),
    }
    steps = [output for step in nodes for output in step.output]
    switched = half.SwitchedModel(model_of(nodes, {"x": x}, constants), level=level)
    by_switch = switched.forward({"x": x}, switched.nodes)
    typed = model_of(nodes, {"x": _narrow(x)}, {n: _narrow(v) for n, v in constants.items()})
    emulated = OnnxRunner(half.emulate(typed), level=level).run({"x": _narrow(x)})
    np.testing.assert_array_equal(emulated["y"].astype(F32), by_switch["y"])
    # Every tensor as a graph output stops every fusion: the same values, so nothing was fused away before.
    open_graph = model_of(nodes, {"x": _narrow(x)}, {n: _narrow(v) for n, v in constants.items()}, steps)
    unfused = OnnxRunner(half.emulate(open_graph), level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    np.testing.assert_array_equal(unfused.run({"x": _narrow(x)})["y"], emulated["y"])


def test_one_node_alone_rounds_only_itself() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Mul", ["h", "b"], ["y"], name="second"),
    ]
    x = np.array([300.0, 1 / 3], F32)
    constants = {"a": np.array(300, F32), "b": np.array(0.01, F32)}
    switched = half.SwitchedModel(model_of(nodes, {"x": x}, constants))
    assert switched.nodes == ("first", "second")
    r = half.round_half
    with np.errstate(over="ignore"):
        assert switched.forward({"x": x}, ())["y"].tolist() == (x * F32(300) * F32(0.01)).tolist()
        first = switched.forward({"x": x}, ["first"])["y"]
        assert first.tolist() == (r(r(x) * F32(300)) * F32(0.01)).tolist()
        assert first[0] == np.inf
        second = switched.forward({"x": x}, ["second"])["y"]
        assert second.tolist() == r(r(x * F32(300)) * r(np.array(0.01, F32))).tolist()


def test_where_the_graph_is_cut_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 16)).astype(F32)
    nodes, constants = [], {}
    for i in range(12):
        constants[f"w{i}"] = rng.normal(size=(16, 16)).astype(F32)
        nodes.append(helper.make_node("MatMul", ["x" if i == 0 else f"r{i - 1}", f"w{i}"], [f"m{i}"], name=f"m{i}"))
        nodes.append(helper.make_node("Add", [f"m{i}", "x"], [f"r{i}"], name=f"r{i}"))
    model = model_of(nodes, {"x": x}, constants, ["r11", "m3", "x"])
    whole = half.SwitchedModel(model)
    parts = half.SwitchedModel(model, segments=5)
    assert len(whole.segments) == 1
    assert len(parts.segments) == 5
    assert [name for segment in parts.segments for name in segment.nodes] == list(whole.nodes)
    chosen = whole.nodes[3:17]
    expected = whole.forward({"x": x}, chosen, keep=["m7"])
    result = parts.forward({"x": x}, chosen, keep=["m7"])
    assert list(result) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value)
    reached = parts.forward({"x": x}, chosen, keep=parts.segments[2].inputs)
    late = parts.forward({**reached, "m3": reached["m3"], "x": x}, chosen, start=2)
    np.testing.assert_array_equal(late["r11"], expected["r11"])


def test_one_and_two_threads_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 32, 32)).astype(F32)
    constants = {"w": rng.normal(size=(16, 8, 3, 3)).astype(F32), "u": rng.normal(size=(30, 30)).astype(F32)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("MatMul", ["c", "u"], ["d"]),
        helper.make_node("ReduceMean", ["d"], ["y"], keepdims=0),
    ]
    model = model_of(nodes, {"x": x}, constants)
    one, two = (half.SwitchedModel(model, threads=threads) for threads in (1, 2))
    for chosen in ((), one.nodes):
        np.testing.assert_array_equal(one.forward({"x": x}, chosen)["y"], two.forward({"x": x}, chosen)["y"])


def test_constants_are_rounded_and_the_model_stays_as_it_was() -> None:
    x = np.array([1.0], F32)
    model = model_of([node("Mul", "x", "w")], {"x": x}, {"w": np.array([1e-9], F32)})
    before = ir.to_proto(model).SerializeToString()
    switched = half.SwitchedModel(model)
    assert switched.forward({"x": x}, switched.nodes)["y"] == 0
    assert switched.forward({"x": x}, ())["y"] == F32(1e-9)
    half.emulate(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_constants_in_constant_nodes_are_constants() -> None:
    nodes = [
        helper.make_node("Constant", [], ["w"], value_float=70000.0, name="w"),
        helper.make_node("Mul", ["x", "w"], ["y"], name="mul"),
    ]
    model = model_of(nodes, {"x": np.ones(1, F32)})
    assert half.candidates(model) == ("mul",)
    assert half.SwitchedModel(model).forward({"x": np.ones(1, F32)}, ["mul"])["y"] == np.inf


def test_scales_of_resize_stay_float32() -> None:
    """0.1 is no FP16 number: rounded, the output would be 3 wide only by luck; 3.0007 exposes it on a long axis."""
    x = np.arange(4096, dtype=F32).reshape(1, 1, 1, 4096) % 7
    scales = np.array([1, 1, 1, 3.0007], F32)
    operation = node("Resize", "x", "", "scales", mode="nearest")
    switched = half.SwitchedModel(model_of([operation], {"x": x}, {"scales": scales}))
    assert switched.forward({"x": x}, switched.nodes)["y"].shape[-1] == int(4096 * 3.0007)
    model = half.prepared(model_of([operation], {"x": x}, {"scales": scales}))
    assert half.operands(model.graph[0], model.opset_imports) == (0,)


def test_an_index_above_2048_never_goes_through_fp16() -> None:
    """Case 22: Cast and what reads the integers stay FP32; index arithmetic does up to its Cast back."""
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Mul", ["f", "step"], ["angle"], name="mul"),
        helper.make_node("Sin", ["angle"], ["sine"], name="sin"),
        helper.make_node("Div", ["angle", "two"], ["middle"], name="div"),
        helper.make_node("Floor", ["middle"], ["down"], name="floor"),
        helper.make_node("Cast", ["down"], ["back"], to=TensorProto.INT64, name="back"),
        helper.make_node("Gather", ["table", "back"], ["y"], name="gather"),
    ]
    i = np.array([2049, 4097, 70001])
    table = np.arange(70002, dtype=F32) % 100
    constants = {"step": np.array(1.5, F32), "two": np.array(2, F32), "table": table}
    model = model_of(nodes, {"i": i}, constants, ["y", "sine"])
    assert half.candidates(model) == ("sin", "gather")
    switched = half.SwitchedModel(model)
    assert switched.forward({"i": i}, switched.nodes)["y"].tolist() == [36, 72, 0]


def test_pixels_cast_from_bytes_may_go_through_fp16() -> None:
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Div", ["f", "k"], ["y"], name="div"),
    ]
    model = model_of(nodes, {"i": np.array([255], np.uint8)}, {"k": np.array(255, F32)})
    assert half.candidates(model) == ("cast", "div")


def test_operators_without_an_fp16_form_in_the_opset_are_no_candidates() -> None:
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["y"], name="sum")]
    inputs, constants = {"x": np.ones(3, F32)}, {"axis": np.array(0, np.int32)}
    assert half.obstacles(model_of(nodes, inputs, constants, opset=13)) == {"sum": "no FP16 form in opset 13"}
    assert half.candidates(model_of(nodes, inputs, constants, opset=14)) == ("sum",)


def branching() -> ir.Model:
    """y = x > 0 anywhere ? x * 300 * 300 : Cast(x) + 1; the branches differ in kind and length."""

    def body(name: str, *steps: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(
            list(steps), name, [], [helper.make_tensor_value_info(steps[-1].output[0], TensorProto.FLOAT, [2])]
        )

    yes = body(
        "yes",
        helper.make_node("Mul", ["x", "k"], ["p"], name="p"),
        helper.make_node("Mul", ["p", "k"], ["q"], name="q"),
    )
    no = body("no", helper.make_node("Add", ["x", "one"], ["r"], name="r"))
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0, name="top"),
        helper.make_node("Greater", ["top", "zero"], ["which"], name="greater"),
        helper.make_node("If", ["which"], ["chosen"], then_branch=yes, else_branch=no, name="if"),
        helper.make_node("Mul", ["chosen", "small"], ["y"], name="last"),
    ]
    constants = {"k": 300, "one": 1, "zero": 0, "small": 1e-3}
    return model_of(nodes, {"x": np.zeros(2, F32)}, {name: np.array(v, F32) for name, v in constants.items()})


def test_nodes_in_the_bodies_of_an_if_are_candidates() -> None:
    model = branching()
    switched = half.SwitchedModel(model, segments=2)
    assert switched.nodes == ("top", "greater", "r", "p", "q", "last")
    x = np.array([1.0, -2.0], F32)
    np.testing.assert_allclose(switched.forward({"x": x}, ())["y"], [90, -180], rtol=1e-6)
    np.testing.assert_array_equal(switched.forward({"x": x}, ["q"])["y"], [np.inf, -np.inf])
    np.testing.assert_allclose(switched.forward({"x": x}, ["p", "r"])["y"], [90, -180], rtol=1e-3)
    tiny = np.array([-(2.0**-26), -1], F32)
    np.testing.assert_array_equal(switched.forward({"x": tiny}, ["r"])["y"], np.array([1, 0], F32) * F32(1e-3))


def test_nodes_in_the_body_of_a_loop_are_candidates() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["state", "k"], ["next"], name="step"),
            helper.make_node("Identity", ["going"], ["still"], name="still"),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [1]),
        ],
    )
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], body=body, name="loop")
    model = model_of([loop], {"x": np.ones(1, F32)}, {"times": np.array(3), "k": np.array(100, F32)})
    switched = half.SwitchedModel(model)
    assert switched.nodes == ("step",)
    assert switched.forward({"x": np.ones(1, F32)}, ())["y"] == 1e6
    assert switched.forward({"x": np.ones(1, F32)}, ["step"])["y"] == np.inf


def test_nodes_in_the_body_of_a_scan_are_candidates() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["sum", "item"], ["next"], name="add"),
            helper.make_node("Identity", ["next"], ["partial"], name="keep"),
        ],
        "body",
        [value_info("sum", np.zeros(1, F32)), value_info("item", np.zeros(1, F32))],
        [value_info("next", np.zeros(1, F32)), value_info("partial", np.zeros(1, F32))],
    )
    scan = helper.make_node("Scan", ["start", "x"], ["last", "y"], body=body, num_scan_inputs=1, name="scan")
    x = np.array([[2048.0], [1.0], [1.0]], F32)
    switched = half.SwitchedModel(model_of([scan], {"x": x}, {"start": np.zeros(1, F32)}))
    assert switched.nodes == ("add", "keep")
    assert switched.forward({"x": x}, ())["y"].ravel().tolist() == [2048, 2049, 2050]
    assert switched.forward({"x": x}, ["add"])["y"].ravel().tolist() == [2048, 2048, 2048]
    assert switched.forward({"x": x}, ["keep"])["y"].ravel().tolist() == [2048, 2048, 2050]


def test_an_fp16_input_that_is_an_output_too_stays_as_it_is() -> None:
    x = np.array([1.0, 2.0], F16)
    model = model_of([node("Add", "x", "x")], {"x": x}, outputs=("y", "x"))
    outputs = OnnxRunner(half.emulate(model)).run({"x": x})
    assert outputs["x"].dtype == outputs["y"].dtype == F16
    assert outputs["y"].tolist() == [2, 4]
    assert outputs["x"].tolist() == [1, 2]


def test_emulating_leaves_integer_and_float32_parts_alone_and_keeps_names_and_types() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["h", "h"], ["p"]),
        helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("Exp", ["x"], ["z"]),
    ]
    x = np.array([300.0, 1.0], F32)
    model = model_of(nodes, {"x": x}, outputs=("y", "p", "z"))
    runner = OnnxRunner(half.emulate(model))
    assert runner.outputs == ("y", "p", "z")
    outputs = runner.run({"x": x})
    assert outputs["y"].tolist() == [np.inf, 1]
    assert outputs["p"].dtype == F16
    assert outputs["p"].tolist() == [np.inf, 1]
    np.testing.assert_allclose(outputs["z"], [np.inf, np.e], rtol=1e-6)


def test_emulating_quantized_tensors_with_fp16_scales() -> None:
    """Opset 19 allows FP16 scales: 0.1 becomes 0.09998, and 100 steps of it 9.9976 → 10.0 as FP16 value 9.998…"""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    x = np.array([10.0, -3.33], F16)
    constants = {"s": np.array(0.1, F16), "z": np.array(0, np.int8)}
    outputs = OnnxRunner(half.emulate(model_of(nodes, {"x": x}, constants, opset=19))).run({"x": x})
    scale = F32(F16(0.1))
    steps = np.round(x.astype(F32) / scale)
    assert outputs["y"].tolist() == (steps * scale).astype(F16).tolist()


def test_emulating_control_flow_with_fp16_tensors() -> None:
    def body(name: str, op: str) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node(op, ["x", "k"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2])],
        )

    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=body("m", "Mul"), else_branch=body("a", "Add"))]
    inputs = {"x": np.array([300, 2.0**-24], F16), "c": np.array(True)}
    runner = OnnxRunner(half.emulate(model_of(nodes, inputs, {"k": np.array(300, F16)})))
    assert runner.run(inputs)["y"].tolist() == [np.inf, F16(300 * 2.0**-24)]
    assert runner.run({**inputs, "c": np.array(False)})["y"].tolist() == [600, 300]


def test_fp16_constants_in_attributes_and_castlike_are_emulated() -> None:
    fill = numpy_helper.from_array(np.array([0.1], F16))
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["c"], value=fill),
        helper.make_node("CastLike", ["x", "c"], ["h"]),
        helper.make_node("Add", ["h", "c"], ["y"]),
    ]
    x = np.array([70000.0, 1.0], F32)
    outputs = OnnxRunner(half.emulate(model_of(nodes, {"x": x}, {"shape": np.array([2])}))).run({"x": x})
    assert outputs["y"].tolist() == [np.inf, F16(1) + F16(0.1)]


def test_a_name_that_is_no_candidate_is_an_error() -> None:
    switched = half.SwitchedModel(model_of([node("Exp", "x")], {"x": np.ones(1, F32)}))
    with pytest.raises(EnginesmithError, match="'typo' cannot be in FP16"):
        switched.checked(["typo"])


def test_unnamed_nodes_are_an_error() -> None:
    model = model_of([node("Exp", "x")], {"x": np.ones(1, F32)})
    model.graph[0].name = ""
    with pytest.raises(EnginesmithError, match="Exp has no name of its own"):
        half.SwitchedModel(model)


def test_types_behind_an_operator_of_another_domain_are_known() -> None:
    nodes = [
        helper.make_node("FastGelu", ["x"], ["h"], domain="com.microsoft", name="gelu"),
        helper.make_node("Mul", ["h", "h"], ["y"], name="mul"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value_info("x", np.zeros(2, F32))],
        [value_info("y", np.zeros(2, F32))],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    reasons = half.obstacles(model)
    assert reasons["mul"] == ""
    assert "com.microsoft" in reasons["gelu"]
    x = np.array([300.0, 1.0], F32)
    assert half.SwitchedModel(model).forward({"x": x}, ["mul"])["y"][0] == np.inf


def test_a_call_of_a_function_of_the_model_is_no_candidate_and_runs() -> None:
    double = helper.make_function(
        "mine",
        "Double",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"], name="add")],
        [helper.make_opsetid("", 18)],
    )
    nodes = [
        helper.make_node("Double", ["x"], ["h"], domain="mine", name="call"),
        helper.make_node("Mul", ["h", "k"], ["y"], name="mul"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value_info("x", np.zeros(2, F32))],
        [value_info("y", np.zeros(2, F32))],
        [numpy_helper.from_array(np.array(300, F32), "k")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[double])
    model = ir.from_proto(proto)
    assert half.obstacles(model) == {"call": "calls a function of the model", "mul": ""}
    switched = half.SwitchedModel(model, segments=2)
    x = np.array([300.0, 1.0], F32)
    assert switched.forward({"x": x}, ())["y"].tolist() == [180000, 600]
    assert switched.forward({"x": x}, ["mul"])["y"].tolist() == [np.inf, 600]


def test_sequences_stay_whole_when_the_graph_is_cut() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "k"], ["a"], name="a"),
        helper.make_node("Mul", ["a", "k"], ["b"], name="b"),
        helper.make_node("SequenceConstruct", ["a", "b"], ["s"], name="s"),
        helper.make_node("Mul", ["b", "k"], ["c"], name="c"),
        helper.make_node("ConcatFromSequence", ["s"], ["d"], axis=0, name="d"),
        helper.make_node("Mul", ["d", "k"], ["y"], name="y"),
    ]
    x = np.array([1.0, 2.0], F32)
    model = model_of(nodes, {"x": x}, {"k": np.array(3, F32)}, ["y", "c"])
    switched = half.SwitchedModel(model, segments=4)
    assert switched.nodes == ("a", "b", "c", "y")
    assert len(switched.segments) > 1
    for chosen in ((), switched.nodes):
        outputs = switched.forward({"x": x}, chosen)
        assert outputs["y"].tolist() == [9, 18, 27, 54]
        assert outputs["c"].tolist() == [27, 54]


def test_operators_with_several_and_with_unused_outputs() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 1, 4)).astype(F32)
    weights = {
        "w": rng.normal(size=(1, 12, 4)).astype(F32),
        "r": rng.normal(size=(1, 12, 3)).astype(F32),
        "parts": np.array([1, 2]),
    }
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["", "last"], hidden_size=3, name="lstm"),
        helper.make_node("Split", ["last", "parts"], ["p", "q"], axis=2, name="split"),
        helper.make_node("TopK", ["q", "one"], ["y", "where"], name="topk"),
    ]
    model = model_of(nodes, {"x": x}, {**weights, "one": np.array([1])}, ["y", "p", "where"])
    switched = half.SwitchedModel(model, segments=2)
    assert switched.nodes == ("lstm", "split", "topk")
    exact, rounded = switched.forward({"x": x}, ()), switched.forward({"x": x}, switched.nodes)
    plain = OnnxRunner(model).run({"x": x})
    for name in ("y", "p"):
        np.testing.assert_array_equal(exact[name], plain[name])
        assert (rounded[name] != exact[name]).all()
        np.testing.assert_array_equal(rounded[name], half.round_half(rounded[name]))
        np.testing.assert_allclose(rounded[name], exact[name], rtol=5e-3)
    assert rounded["where"].dtype == np.int64


def test_models_too_large_for_protobuf_go_through_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the limit at zero every model is too large: constants of all branches lie in data files."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 64)).astype(F32), rng.normal(size=(64, 64)).astype(F32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    model = model_of(nodes, {"x": x}, {"w": w})
    expected = half.SwitchedModel(model)
    io.save(model, tmp_path, embed_limit=0)
    loaded = io.load(tmp_path)
    monkeypatch.setattr(io, "EMBED_LIMIT", 0)
    large = half.SwitchedModel(loaded, segments=2)
    for chosen in ((), expected.nodes):
        result = large.forward({"x": x}, chosen)["y"]
        np.testing.assert_array_equal(result, expected.forward({"x": x}, chosen)["y"])
    emulated = OnnxRunner(half.emulate(loaded)).run({"x": x})["y"]
    np.testing.assert_allclose(emulated, x @ w @ w, rtol=1e-3, atol=1e-3)
