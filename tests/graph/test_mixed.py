"""to_mixed: valid typed graphs, exactly the asked-for roundings, no wasted casts."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser
from onnx_ir.passes.common import ShapeInferencePass

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io, placement
from enginesmith.tasks.graph.emulate import emulate
from enginesmith.tasks.graph.fp16 import candidates
from enginesmith.tasks.graph.mixed import convert, to_mixed
from enginesmith.tasks.graph.switched import SwitchedModel
from enginesmith.tasks.runner import OnnxRunner

HEADER = '<ir_version: 8, opset_import: ["": 17]>'


def graph(text: str, **constants: np.ndarray) -> ir.Model:
    """A model from onnx's text form, with float32 initializers; nodes are named after their outputs."""
    proto = parser.parse_model(f"{HEADER} {text}")
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype=np.float32), name))
    model = ir.from_proto(proto)
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name
    return model


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    proto = ir.to_proto(model)
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def widened(typed: ir.Model) -> ir.Model:
    """The typed graph with every FLOAT16 tensor held as float32: what runs it faithfully on a CPU.

    Independent of the code under test: each result typed FLOAT16 is rounded by a pair of Casts, FLOAT16 constants are
    widened, and Casts become Identity or a pair.
    """
    proto = ir.to_proto(typed)
    _widen(proto.graph, {})
    return ir.from_proto(proto)


def _widen(g: onnx.GraphProto, outer: dict[str, int]) -> None:
    types = dict(outer)
    for v in (*g.input, *g.value_info, *g.output):
        types[v.name] = v.type.tensor_type.elem_type
    for initializer in g.initializer:
        types[initializer.name] = initializer.data_type
        if initializer.data_type == TensorProto.FLOAT16:
            wide = numpy_helper.to_array(initializer).astype(np.float32)
            initializer.CopyFrom(numpy_helper.from_array(wide, initializer.name))
    nodes = list(g.node)
    del g.node[:]
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _widen(attribute.g, types)
            if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
        halves = [i for i, name in enumerate(node.output) if types.get(name) == TensorProto.FLOAT16]
        names = [node.output[i] for i in halves]
        for i in halves:
            node.output[i] += "|wide"
        g.node.append(node)
        for name in names:
            g.node.append(helper.make_node("Cast", [f"{name}|wide"], [f"{name}|half"], to=TensorProto.FLOAT16))
            g.node.append(helper.make_node("Cast", [f"{name}|half"], [name], to=TensorProto.FLOAT))
    for v in (*g.input, *g.value_info, *g.output):
        if v.type.tensor_type.elem_type == TensorProto.FLOAT16:
            v.type.tensor_type.elem_type = TensorProto.FLOAT


def check(model: ir.Model) -> onnx.ModelProto:
    """Full checker, strict inference, unique names, topological order; loads in ONNX Runtime."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    names = Counter(n.name for n in model.graph.all_nodes())
    assert all(names)
    assert max(names.values(), default=1) == 1
    options = ort.SessionOptions()
    options.log_severity_level = 3
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return proto


def casts(model: ir.Model) -> list[tuple[str, str]]:
    return [(n.inputs[0].name, n.outputs[0].name) for n in model.graph.all_nodes() if n.op_type == "Cast"]


def dtypes(model: ir.Model) -> dict[str, str]:
    return {n.name: n.outputs[0].dtype.name for n in model.graph.all_nodes()}


class TestCasts:
    def test_one_cast_is_shared_by_all_readers(self) -> None:
        model = graph(
            "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Tanh(a) c = Exp(a) d = Mul(a, b) y = Sum(b, c, d) }"
        )
        mixed = convert(model, {"b", "c", "d", "y"})
        check(mixed.model)
        assert mixed.casts == 2
        assert casts(mixed.model) == [("a", "a_fp16"), ("y_fp16", "y")]

    def test_cast_to_float32_is_shared_by_the_graph_output_and_other_readers(self) -> None:
        model = graph("g (float[2] x) => (float[2] y, float[2] z) { y = Exp(x) a = Tanh(y) z = Exp(a) }")
        mixed = convert(model, {"y"})
        check(mixed.model)
        assert casts(mixed.model) == [("x", "x_fp16"), ("y_fp16", "y")]

    def test_no_node_means_no_change(self) -> None:
        model = graph("g (float[2] x) => (float[2] y) { y = Exp(x) }")
        mixed = convert(model, set())
        assert (mixed.casts, mixed.half) == (0, ())
        assert ir.to_proto(mixed.model).graph == ir.to_proto(ShapeInferencePass()(model.clone()).model).graph

    def test_transpose_between_two_half_nodes_follows_them(self) -> None:
        model = graph("g (float[2,3] x) => (float[3,2] y) { a = Exp(x) t = Transpose <perm = [1, 0]> (a) y = Tanh(t) }")
        mixed = convert(model, {"a", "y"})
        check(mixed.model)
        assert mixed.moved == ("t",)
        assert (mixed.casts, mixed.unmoved_casts) == (2, 4)

    def test_transpose_wanted_in_half_between_float_nodes_keeps_rounding(self) -> None:
        model = graph("g (float[2,3] x) => (float[3,2] y) { a = Exp(x) t = Transpose <perm = [1, 0]> (a) y = Tanh(t) }")
        mixed = convert(model, {"t"})
        check(mixed.model)
        assert dtypes(mixed.model)["t"] == "FLOAT16"
        x = np.full((2, 3), 0.123456, np.float32)
        expected = np.tanh(np.exp(x).astype(np.float16).astype(np.float32)).T
        np.testing.assert_allclose(run(widened(mixed.model), {"x": x})[0], expected, rtol=1e-6)

    def test_concat_of_float_tensors_read_in_half_is_cast_once_behind_it(self) -> None:
        model = graph(
            "g (float[2] x) => (float[6] y) "
            "{ a = Exp(x) b = Tanh(x) c = Sqrt(x) d = Concat <axis = 0> (a, b, c) y = Relu(d) }"
        )
        mixed = convert(model, {"d", "y"})
        check(mixed.model)
        assert casts(mixed.model) == [("d", "d_fp16"), ("y_fp16", "y")]

    def test_integer_source_is_cast_to_half_at_once(self) -> None:
        model = graph("g (bool[4] m, float[4] x) => (float[4] y) { f = Cast <to = 1> (m) y = Mul(f, x) }")
        mixed = convert(model, {"y"})
        check(mixed.model)
        assert dtypes(mixed.model)["f"] == "FLOAT16"
        assert mixed.casts == 2  # x in, y out

    def test_shape_reads_either_precision_without_cast(self) -> None:
        model = graph(
            "g (float[N,3] x) => (float[N,3] y, int64[2] s) { a = Exp(x) s = Shape(a) y = Tanh(a) }",
        )
        mixed = convert(model, {"a", "y"})
        check(mixed.model)
        assert mixed.casts == 2


class TestConstants:
    def test_constant_shared_by_both_precisions_has_one_copy_each(self) -> None:
        model = graph("g (float[2] x) => (float[2] y) { a = Pow(x, c) b = Mul(a, c) y = Add(b, c) }", c=[3.0])
        mixed = to_mixed(model, {"b", "y"})
        check(mixed)
        stored = {v.name: v.dtype.name for v in mixed.graph.initializers.values()}
        assert stored == {"c": "FLOAT", "c_fp16": "FLOAT16"}
        assert mixed.graph.node("b").inputs[1] is mixed.graph.node("y").inputs[1]

    def test_weight_of_two_convs_is_split(self) -> None:
        w = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
        model = graph("g (float[1,1,5,5] x) => (float[1,1,1,1] y) { a = Conv(x, w) y = Conv(a, w) }", w=w)
        mixed = to_mixed(model, {"a"})
        check(mixed)
        assert mixed.graph.node("a").inputs[1].dtype == ir.DataType.FLOAT16
        assert mixed.graph.node("y").inputs[1].dtype == ir.DataType.FLOAT

    def test_constant_read_only_in_half_keeps_its_name(self) -> None:
        model = graph("g (float[2] x) => (float[2] y) { y = Mul(x, c) }", c=[3.0])
        stored = to_mixed(model, {"y"}).graph.initializers
        assert [(v.name, v.dtype.name) for v in stored.values()] == [("c", "FLOAT16")]

    def test_nothing_is_clamped(self) -> None:
        c = np.array([1e9, -1e-9, 3e-6, 1.0], np.float32)
        model = graph("g (float[4] x) => (float[4] y) { y = Mul(x, c) }", c=c)
        mixed = convert(model, {"y"})
        stored = mixed.model.graph.initializers["c"].const_value.numpy()
        np.testing.assert_array_equal(stored[[0, 1, 3]], [np.inf, 0, 1])

    def test_resize_scales_stay_float32(self) -> None:
        model = graph(
            'g (float[1,1,4,4] x) => (float[1,1,8,8] y) { y = Resize <mode = "nearest"> (x, roi, scales) }',
            roi=np.zeros(0),
            scales=[1, 1, 2, 2],
        )
        mixed = to_mixed(model, {"y"})
        check(mixed)
        assert [v.dtype.name for v in mixed.graph.node("y").inputs] == ["FLOAT16", "FLOAT", "FLOAT"]

    def test_constant_nodes_and_their_shared_use_in_a_branch(self) -> None:
        model = graph(
            "g (bool c, float[2] x) => (float[2] y) { k = Constant <value_floats = [2.0, 3.0]> () a = Mul(x, k) "
            "y = If(c) <then_branch = t () => (float[2] u) { u = Mul(a, k) }, "
            "else_branch = e () => (float[2] v) { v = Exp(a) }> }"
        )
        mixed = to_mixed(model, {"u"})
        check(mixed)
        assert dtypes(mixed)["u"] == "FLOAT16"


class TestTypes:
    def test_graph_inputs_and_outputs_keep_names_types_and_order(self) -> None:
        model = graph("g (float[N,3] x, int64[1] i) => (float[N,3] y, float[N,3] z) { y = Exp(x) z = Tanh(y) }")
        before = ir.to_proto(model).graph
        after = check(to_mixed(model, {"y", "z"})).graph
        assert list(after.input) == list(before.input)
        assert list(after.output) == list(before.output)

    def test_indices_never_go_through_half(self) -> None:
        # 4097 is no FP16 number: an index that took the way through FP16 would read element 4096.
        model = graph(
            "g (int64[1] i, float[5000] x) => (float[1] y) "
            "{ f = Cast <to = 1> (i) d = Add(f, one) j = Cast <to = 7> (d) p = Exp(x) y = Gather <axis = 0> (p, j) }",
            one=[1.0],
        )
        half = set(candidates(model))
        assert half == {"p", "y"}
        mixed = to_mixed(model, half)
        check(mixed)
        x = np.zeros(5000, np.float32)
        x[4097] = 1
        assert run(widened(mixed), {"i": np.array([4096]), "x": x})[0] == np.float16(np.e)

    @pytest.mark.filterwarnings("ignore:overflow")
    def test_int64_input_cast_to_float_then_mul(self) -> None:
        model = graph("g (int64[3] i) => (float[3] y) { f = Cast <to = 1> (i) a = Mul(f, c) y = Exp(a) }", c=[0.001])
        for half in ({"y"}, {"a", "y"}, {"f", "a", "y"}):
            mixed = to_mixed(model, half)
            check(mixed)
            i = np.array([1, 2049, 70001])
            f = i.astype(np.float32)
            a = f.astype(np.float16).astype(np.float32) if "a" in half else f
            a = a * np.float32(np.float16(0.001) if "a" in half else 0.001)
            expected = np.exp(a.astype(np.float16).astype(np.float32)).astype(np.float16)
            np.testing.assert_array_equal(run(widened(mixed), {"i": i})[0], expected.astype(np.float32))

    def test_layer_normalization_statistics_stay_float32(self) -> None:
        model = graph(
            "g (float[2,4] x) => (float[2,4] y, float[2,1] m) { y, m = LayerNormalization(x, s) }", s=np.ones(4)
        )
        mixed = to_mixed(model, {"y"})
        check(mixed)
        assert [v.dtype.name for v in mixed.graph.node("y").outputs] == ["FLOAT16", "FLOAT"]

    def test_constant_of_shape_makes_half(self) -> None:
        model = graph("g (int64[1] n) => (float[K] y) { a = ConstantOfShape <value = float[1] {3.0}> (n) y = Exp(a) }")
        mixed = to_mixed(model, {"a", "y"})
        check(mixed)
        assert dtypes(mixed)["a"] == "FLOAT16"
        assert len(casts(mixed)) == 1


IF = (
    "g (bool c, float[2] x) => (float[2] y) { a = Exp(x) "
    "b = If(c) <then_branch = t () => (float[2] p) { p = Tanh(a) }, "
    "else_branch = e () => (float[2] q) { q = Sqrt(a) }> "
    "y = Relu(b) }"
)
LOOP = (
    "g (float[2] x) => (float[2] y, float[3,2] all) "
    "{ n = Constant <value_int = 3> () t = Constant <value = bool {1}> () "
    "y, all = Loop(n, t, x) <body = body (int64 i, bool k, float[2] s) => (bool ok, float[2] next, float[2] seen) "
    "{ ok = Identity(k) d = Mul(s, w) next = Tanh(d) seen = Exp(next) }> }"
)
SCAN = (
    "g (float[2] z, float[3,2] x) => (float[2] y, float[3,2] all) { y, all = Scan <num_scan_inputs = 1, "
    "body = body (float[2] s, float[2] e) => (float[2] next, float[2] out) "
    "{ next = Add(s, e) out = Tanh(next) }> (z, x) }"
)


FOREIGN = '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>'
ODD = {
    "foreign": "{ a = Exp(x) b = com.microsoft.Gelu(a) y = Tanh(b) }",
    "castlike": "{ a = Exp(x) i = Cast <to = 7> (x) b = CastLike(i, a) y = Mul(a, b) }",
    "eyelike": "{ a = EyeLike(x) b = Exp(x) y = Add(a, b) }",
    "topk": "{ a = Exp(x) k = Constant <value_ints = [4]> () y, i = TopK(a, k) }",
    "double": "{ d = Cast <to = 11> (x) a = Cast <to = 1> (d) y = Tanh(a) }",
    "argmax": "{ a = Exp(x) m = ArgMax <axis = 1> (a) f = Cast <to = 9> (m) g = Cast <to = 1> (f) y = Mul(a, g) }",
    "quantized": "{ a = Exp(x) s = Constant <value_float = 0.013> () z = Constant <value = int8 {0}> () "
    "q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) y = Tanh(d) }",
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_odd_operators_are_typed_as_they_are_emulated(body: str) -> None:
    proto = parser.parse_model(f"{FOREIGN} g (float[2,4] x) => (float[2,4] y) {body}")
    model = ir.from_proto(proto)
    for node in model.graph:
        node.name = node.outputs[0].name
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    switched = SwitchedModel(model, level=level)
    for size in range(len(switched.nodes) + 1):
        for half in itertools.combinations(switched.nodes, size):
            mixed = to_mixed(model, half)
            check(mixed)
            emulated = OnnxRunner(emulate(mixed), level=level).run({"x": x})["y"]
            np.testing.assert_array_equal(emulated, switched.forward({"x": x}, half)["y"], err_msg=str(half))


def test_sequences_have_no_half_form() -> None:
    model = graph(
        "g (float[2] x) => (float[4] y) { a = Exp(x) s = SequenceConstruct(a, x) c = ConcatFromSequence <axis = 0> (s) "
        "y = Tanh(c) }"
    )
    with pytest.raises(EnginesmithError, match="no FP16 form"):
        to_mixed(model, {"s"})


class TestBodies:
    @pytest.mark.parametrize("size", range(5))
    def test_if_with_every_choice_of_halves(self, size: int) -> None:
        model = graph(IF)
        x = np.array([0.3, 1.7], np.float32)
        for half in itertools.combinations(["a", "p", "q", "y"], size):
            mixed = to_mixed(model, half)
            check(mixed)
            for c in (True, False):
                feeds = {"c": np.array(c), "x": x}
                np.testing.assert_array_equal(
                    run(widened(mixed), feeds)[0], rounded_by_hand(model, half, feeds)[0], err_msg=f"{half}"
                )

    def test_branches_that_agree_need_no_cast_between(self) -> None:
        mixed = convert(graph(IF), {"a", "p", "q", "y"})
        assert mixed.casts == 2

    def test_branches_that_differ_are_unified_at_the_border(self) -> None:
        mixed = to_mixed(graph(IF), {"p"})
        check(mixed)
        assert mixed.graph.node("b").outputs[0].dtype == ir.DataType.FLOAT

    @pytest.mark.parametrize("half", [(), ("d",), ("next",), ("d", "next"), ("d", "next", "seen"), ("seen",)])
    def test_loop(self, half: tuple[str, ...]) -> None:
        model = graph(LOOP, w=[1.1, 0.9])
        mixed = to_mixed(model, half)
        check(mixed)
        feeds = {"x": np.array([0.3, 1.7], np.float32)}
        for got, expected in zip(run(widened(mixed), feeds), rounded_by_hand(model, half, feeds), strict=True):
            np.testing.assert_array_equal(got, expected)

    def test_loop_state_is_carried_in_half_when_that_saves_casts(self) -> None:
        mixed = convert(graph(LOOP, w=[1.1, 0.9]), {"d", "next", "seen"})
        assert mixed.casts == 3  # x in, both results out: none inside the loop

    @pytest.mark.parametrize("half", [("next",), ("out",), ("next", "out")])
    def test_scan(self, half: tuple[str, ...]) -> None:
        model = graph(SCAN)
        mixed = to_mixed(model, half)
        check(mixed)
        rng = np.random.default_rng(0)
        feeds = {"z": np.zeros(2, np.float32), "x": rng.standard_normal((3, 2)).astype(np.float32)}
        for got, expected in zip(run(widened(mixed), feeds), rounded_by_hand(model, half, feeds), strict=True):
            np.testing.assert_array_equal(got, expected)


class TestRefused:
    def test_converting_twice(self) -> None:
        once = to_mixed(graph("g (float[2] x) => (float[2] y) { y = Exp(x) }"), {"y"})
        with pytest.raises(EnginesmithError, match="already"):
            to_mixed(once, {"y"})

    def test_a_name_that_matches_nothing(self) -> None:
        with pytest.raises(EnginesmithError, match="conv_1") as caught:
            to_mixed(graph("g (float[2] x) => (float[2] conv1) { conv1 = Exp(x) }"), {"conv_1"})
        assert "conv1" in caught.value.hint

    def test_a_node_without_half_form(self) -> None:
        with pytest.raises(EnginesmithError, match="no FP16 form"):
            to_mixed(graph("g (int64[2] x) => (int64[2] y) { y = Abs(x) }"), {"y"})

    def test_an_invalid_model(self) -> None:
        model = graph("g (float[2] x) => (float[2] y) { y = Exp(x) }")
        model.graph.node("y").op_type = "Frobnicate"
        with pytest.raises(EnginesmithError, match="checker"):
            to_mixed(model, {"y"})


def test_a_wrongly_declared_shape_is_no_reason_to_refuse() -> None:
    model = graph("g (float[2,3] x) => (float[2,4] y) { a = Exp(x) y = Tanh(a) }")
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert convert(model, {"a"}).half == ("a",)


def test_unnamed_nodes_are_named() -> None:
    model = graph("g (float[2] x) => (float[2] y) { a = Exp(x) y = Tanh(a) }")
    model.graph.node("a").name = ""
    check(to_mixed(model, {"y"}))


def test_the_given_model_is_not_changed() -> None:
    model = graph(IF)
    before = ir.to_proto(model)
    to_mixed(model, {"a", "p", "y"})
    assert ir.to_proto(model) == before


def test_same_input_same_bytes() -> None:
    first, second = (ir.to_proto(to_mixed(graph(IF), {"y", "p", "a"})).SerializeToString() for _ in range(2))
    assert first == second


def test_external_data_stays_external_and_lazy(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((600, 600)).astype(np.float32)
    v = np.full((600, 600), 0.1, np.float32)
    model = graph("g (float[1,600] x) => (float[1,600] y) { a = MatMul(x, w) y = MatMul(a, v) }", w=w, v=v)
    io.save(model, tmp_path / "fp32", embed_limit=1000)
    mixed = to_mixed(io.load(tmp_path / "fp32"), {"a"})
    assert isinstance(mixed.graph.initializers["w"].const_value, ir.LazyTensor)
    assert isinstance(mixed.graph.initializers["v"].const_value, ir.ExternalTensor)
    file = io.save(mixed, tmp_path / "mixed", embed_limit=1000)
    assert (tmp_path / "mixed" / io.DATA).stat().st_size >= w.size * 2 + v.size * 4
    onnx.checker.check_model(str(file), full_check=True)
    stored = io.load(tmp_path / "mixed").graph.initializers
    np.testing.assert_array_equal(stored["w"].const_value.numpy(), w.astype(np.float16))
    np.testing.assert_array_equal(stored["v"].const_value.numpy(), v)


# --- independent oracle and random graphs -----------------------------------------------------------------------------


def rounded_by_hand(
    model: ir.Model, half: tuple[str, ...] | set[str], feeds: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """Outputs of the FP32 model with a pair of Casts on every float operand and result of each half node."""
    proto = ir.to_proto(ShapeInferencePass()(model.clone()).model)
    _round(proto.graph, set(half), {})
    return run(ir.from_proto(proto), feeds)


def _round(g: onnx.GraphProto, half: set[str], outer: dict[str, int]) -> None:
    types = dict(outer)
    for v in (*g.input, *g.value_info, *g.output):
        types[v.name] = v.type.tensor_type.elem_type
    types.update((i.name, i.data_type) for i in g.initializer)
    nodes = list(g.node)
    del g.node[:]

    def pair(source: str, target: str) -> None:
        g.node.append(helper.make_node("Cast", [source], [f"{target}|half"], to=TensorProto.FLOAT16))
        g.node.append(helper.make_node("Cast", [f"{target}|half"], [target], to=TensorProto.FLOAT))

    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _round(attribute.g, half, types)
        if node.name not in half:
            g.node.append(node)
            continue
        for i, name in enumerate(node.input):
            if types.get(name) == TensorProto.FLOAT:
                pair(name, f"{node.name}|{i}")
                node.input[i] = f"{node.name}|{i}"
        results = [name for name in node.output if types.get(name) == TensorProto.FLOAT]
        for i, name in enumerate(node.output):
            if name in results:
                node.output[i] = f"{name}|wide"
        g.node.append(node)
        for name in results:
            pair(f"{name}|wide", name)


UNARY = ("Exp", "Tanh", "Sqrt", "Relu", "Neg", "Abs", "Sigmoid", "Identity", "Softmax", "Reciprocal")
BINARY = ("Add", "Mul", "Sub", "Max", "MatMul", "Where", "Concat")


@st.composite
def models(draw: st.DrawFn) -> tuple[ir.Model, set[str]]:
    """A small graph on 4x4 tensors: arithmetic, data movement, constants, a bool source, If; and a random half set."""
    nodes: list[onnx.NodeProto] = []
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    constants = {
        "k": rng.standard_normal((4, 4)).astype(np.float32),
        "s": np.array(draw(st.sampled_from([0.1, 2.0, 1e5, 3e-8])), np.float32),
    }
    values = ["x", "z", "k", "s2"]
    nodes += [
        helper.make_node("Cast", ["m"], ["f"], name="f", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "s"], ["s2"], name="s2"),
    ]
    values.append("f")
    pick = st.sampled_from
    for i in range(draw(st.integers(1, 9))):
        a, b, name = draw(pick(values)), draw(pick(values)), f"n{i}"
        kind = draw(st.integers(0, 4))
        if kind == 0:
            nodes.append(helper.make_node(draw(pick(UNARY)), [a], [name], name=name))
        elif kind == 1:
            op = draw(pick(BINARY))
            if op == "Where":
                nodes.append(helper.make_node("Greater", [a, b], [f"{name}c"], name=f"{name}c"))
                nodes.append(helper.make_node("Where", [f"{name}c", b, a], [name], name=name))
            elif op == "Concat":
                nodes.append(helper.make_node("Concat", [a, b], [f"{name}c"], name=f"{name}c", axis=0))
                nodes.append(helper.make_node("Split", [f"{name}c"], [f"{name}l", name], name=name, axis=0))
                values.append(f"{name}l")
            else:
                nodes.append(helper.make_node(op, [a, b], [name], name=name))
        elif kind == 2:
            nodes.append(helper.make_node("Transpose", [a], [name], name=name, perm=[1, 0]))
        elif kind == 3:
            nodes.append(helper.make_node("ReduceMean", [a], [f"{name}r"], name=f"{name}r", axes=[0], keepdims=1))
            nodes.append(helper.make_node("Expand", [f"{name}r", "shape"], [name], name=name))
        else:
            branches = []
            for side, source in (("t", a), ("e", b)):
                op = draw(pick(("Tanh", "Transpose", "Identity")))
                out = helper.make_tensor_value_info(f"{name}{side}", TensorProto.FLOAT, [4, 4])
                inner = helper.make_node(op, [source], [f"{name}{side}"], name=f"{name}{side}")
                branches.append(helper.make_graph([inner], f"{name}{side}", [], [out]))
            nodes.append(
                helper.make_node("If", ["c"], [name], name=name, then_branch=branches[0], else_branch=branches[1])
            )
        values.append(name)
    outputs = sorted(set(draw(st.lists(pick(values[4:]), min_size=1, max_size=3))) | {values[-1]})
    info = helper.make_tensor_value_info
    made = helper.make_graph(
        nodes,
        "g",
        [
            info("x", TensorProto.FLOAT, [4, 4]),
            info("z", TensorProto.FLOAT, [4, 4]),
            info("m", TensorProto.BOOL, [4, 4]),
            info("c", TensorProto.BOOL, []),
        ],
        [info(name, TensorProto.FLOAT, [4, 4]) for name in outputs],
        [
            *(numpy_helper.from_array(value, name) for name, value in constants.items()),
            numpy_helper.from_array(np.array([4, 4]), "shape"),
        ],
    )
    model = ir.from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    half = {name for name in candidates(model) if draw(st.booleans())}
    return model, half


def feeds_for_random_graphs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        "x": (rng.standard_normal((4, 4)) * 3).astype(np.float32),
        "z": np.exp(rng.standard_normal((4, 4)) * 6).astype(np.float32),
        "m": rng.random((4, 4)) > 0.5,
        "c": np.array(True),
    }


RANDOM = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@RANDOM
@given(models())
def test_random_graphs_are_valid_and_round_exactly_what_was_asked(case: tuple[ir.Model, set[str]]) -> None:
    model, half = case
    mixed = to_mixed(model, half)
    check(mixed)
    feeds = feeds_for_random_graphs()
    for node in mixed.graph.all_nodes():
        source = node.inputs[0].producer() if node.op_type == "Cast" else None
        assert source is None or source.op_type != "Cast" or source.inputs[0].dtype == ir.DataType.BOOL
    names = [v.name for v in model.graph.outputs]
    by_hand = rounded_by_hand(model, half, feeds)
    for name, got, expected in zip(names, run(widened(mixed), feeds), by_hand, strict=True):
        np.testing.assert_array_equal(got, expected, err_msg=f"{name} {sorted(half)}")


@RANDOM
@given(models())
def test_random_graphs_have_the_fewest_casts(case: tuple[ir.Model, set[str]]) -> None:
    model, half = case
    copy = model.clone()
    ShapeInferencePass()(copy)
    survey = placement.Survey(copy)
    wanted = frozenset(u for u in survey.units if u.node is not None and u.node.name in half)
    free = sorted(placement._free(survey, wanted), key=survey.units.index)
    if len(free) > 10:
        free = free[:0]
    fixed = wanted - set(free)
    fewest = min(
        sum(
            any((r.unit in chosen) != (survey.writer.get(value) in chosen) for r in readers)
            for value, readers in survey.readers.items()
        )
        for picks in itertools.product((False, True), repeat=len(free))
        for chosen in [fixed | {u for u, pick in zip(free, picks, strict=True) if pick}]
    )
    made = convert(model, half)
    assert made.casts <= fewest
    assert made.casts <= made.unmoved_casts
    assert sum(n.op_type == "Cast" for n in made.model.graph.all_nodes()) == made.casts + 1


PARSE = """
import sys, tensorrt_rtx as trt
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
for path in sys.argv[1:]:
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(path):
        print(path, [parser.get_error(i).desc() for i in range(parser.num_errors)])
        sys.exit(1)
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed")
def test_tensorrt_rtx_parses_the_result_strongly_typed(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    w = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    conv = graph(
        "g (float[N,3,8,8] x) => (float[N,4] y) { a = Conv <pads = [1,1,1,1]> (x, w) b = Relu(a) "
        "p = GlobalAveragePool(b) f = Flatten(p) y = Mul(f, s) }",
        w=w,
        s=[2.0],
    )
    files = []
    for index, (model, half) in enumerate(
        [(conv, {"a", "b"}), (conv, {"p", "y"}), (conv, {"a", "b", "p", "f", "y"}), (graph(IF), {"p", "y"})]
    ):
        files.append(str(io.save(to_mixed(model, half), tmp_path / str(index))))
    found = subprocess.run(
        [sys.executable, "-c", PARSE, *files], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr


@RANDOM
@given(models())
def test_the_emulated_result_is_the_switched_model_bit_for_bit(case: tuple[ir.Model, set[str]]) -> None:
    model, half = case
    level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    feeds = feeds_for_random_graphs()
    switched = SwitchedModel(model, level=level, threads=1).forward(feeds, half)
    emulated = OnnxRunner(emulate(to_mixed(model, half)), level=level, threads=1).run(feeds)
    assert list(emulated) == list(switched)
    for name, expected in switched.items():
        np.testing.assert_array_equal(emulated[name], expected, err_msg=f"{name} {sorted(half)}")


@pytest.mark.parametrize("half", [(), ("d",), ("next",), ("d", "next"), ("d", "next", "seen")])
def test_the_emulated_loop_is_the_switched_loop(half: tuple[str, ...]) -> None:
    model = graph(LOOP, w=[1.1, 0.9])
    feeds = {"x": np.array([0.3, 1.7], np.float32)}
    level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    switched = SwitchedModel(model, level=level).forward(feeds, half)
    emulated = OnnxRunner(emulate(to_mixed(model, half)), level=level).run(feeds)
    for name, expected in switched.items():
        np.testing.assert_array_equal(emulated[name], expected)
