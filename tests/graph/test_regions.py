"""What goes back to FP32 together: closed by measured ranges, whole where a pattern is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser

from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.graph.regions import Region, Regions


def graph(text: str, **constants: np.ndarray | float | list[float]) -> ir.Model:
    """A model from onnx's text form, with float32 initializers; nodes are named after their outputs."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype=np.float32), name))
    model = ir.from_proto(proto)
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name
    return model


SUM = "g (float[N,8] x) => (float[N,1] y) { s = ReduceSum(x, axes) m = Mul(s, eighth) r = Exp(m) y = Tanh(r) }"


def sums() -> ir.Model:
    model = graph(SUM, eighth=0.125)
    model.graph.register_initializer(ir.Value(name="axes", const_value=ir.tensor(np.array([1]), name="axes")))
    for node in model.graph:
        for i, value in enumerate(node.inputs):
            if value is not None and value.name == "axes":
                node.replace_input_with(i, model.graph.initializers["axes"])
    return model


LAYER_NORM = (
    "g (float[N,1,8] x) => (float[N,1,8] y) { w = Mul(x, k) mean = ReduceMean <axes = [-1]> (w) d = Sub(w, mean) "
    "p = Pow(d, two) var = ReduceMean <axes = [-1]> (p) e = Add(var, eps) s = Sqrt(e) n = Div(d, s) y = Mul(n, k) }"
)
SOFTMAX = (
    "g (float[N,8] x) => (float[N,8] y) { a = Tanh(x) top = ReduceMax <axes = [-1]> (a) d = Sub(a, top) e = Exp(d) "
    "z = ReduceSum(e, last) q = Div(e, z) y = Sqrt(q) }"
)


def layer_norm() -> ir.Model:
    return graph(LAYER_NORM, k=1.0, two=2.0, eps=1e-5)


class TestClosed:
    def test_a_node_whose_values_fit_stands_alone(self) -> None:
        assert Regions(sums(), {"s": 100.0}).around("s") == Region("s", ("s",), "node")

    def test_an_overflowing_sum_takes_what_brings_it_back(self) -> None:
        assert Regions(sums(), {"s": 2.4e5, "m": 470.0}).around("s") == Region("s", ("s", "m"), "closed")

    def test_the_reader_of_an_overflowing_sum_takes_the_sum(self) -> None:
        assert Regions(sums(), {"s": 2.4e5, "m": 470.0}).around("m").nodes == ("s", "m")

    def test_closing_goes_on_until_values_fit(self) -> None:
        assert Regions(sums(), {"s": 1e7, "m": 1e6, "r": 3.0}).close(["s"]) == ("s", "m", "r")

    def test_all_readers_of_an_overflowing_value_come_along(self) -> None:
        model = graph(
            "g (float[4] x) => (float[4] y) { a = Mul(x, k) b = Mul(a, k) c = Tanh(a) t = Reshape(a, shape) "
            "d = Tanh(t) y = Sum(b, c, d) }",
            k=1.0,
        )
        model.graph.register_initializer(ir.Value(name="shape", const_value=ir.tensor(np.array([4]), name="shape")))
        model.graph.node("t").replace_input_with(1, model.graph.initializers["shape"])
        assert Regions(model, {"a": 7e4, "t": 7e4, "b": 1.0}).close(["b"]) == ("a", "b", "c", "t", "d")

    @pytest.mark.parametrize(("absmax", "closed"), [(65519.0, ("s",)), (65520.0, ("s", "m"))])
    def test_the_border_is_where_rounding_reaches_infinity(self, absmax: float, closed: tuple[str, ...]) -> None:
        assert Regions(sums(), {"s": absmax}).close(["s"]) == closed

    def test_what_is_infinite_in_fp32_already_is_no_reason(self) -> None:
        assert Regions(sums(), {"s": float("inf")}).close(["s"]) == ("s",)

    def test_overflow_is_followed_out_of_a_loop(self) -> None:
        model = graph(
            "g (float[2] x) => (float[2] y) { n = Constant <value_int = 3> () t = Constant <value = bool {1}> () "
            "big = Loop(n, t, x) <body = b (int64 i, bool k, float[2] s) => (bool ok, float[2] next) "
            "{ ok = Identity(k) next = Mul(s, w) }> y = Tanh(big) }",
            w=[1e3, 1e3],
        )
        assert Regions(model, {"next": 1e9}).close(["next"]) == ("next", "y")


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[tuple[str, tuple[str, ...]]], dict[str, float], list[str]]:
    """A random network of unary and binary nodes, the largest magnitude of each result, and some seeds."""
    nodes: list[tuple[str, tuple[str, ...]]] = []
    for i in range(draw(st.integers(1, 14))):
        sources = ["x", *(name for name, _ in nodes)]
        reads = tuple(draw(st.lists(st.sampled_from(sources), min_size=1, max_size=2)))
        nodes.append((f"n{i}", reads))
    names = [name for name, _ in nodes]
    absmax = {name: draw(st.sampled_from([1.0, 6e4, 7e4, 1e9])) for name in names}
    return nodes, absmax, draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(networks())
def test_no_value_at_a_border_overflows_and_nothing_is_taken_without_need(
    case: tuple[list[tuple[str, tuple[str, ...]]], dict[str, float], list[str]],
) -> None:
    nodes, absmax, seeds = case
    body = " ".join(f"{name} = {'Add' if len(reads) == 2 else 'Tanh'}({', '.join(reads)})" for name, reads in nodes)
    region = set(Regions(graph(f"g (float[4] x) => (float[4] {nodes[-1][0]}) {{ {body} }}"), absmax).close(seeds))
    linked = {frozenset((reader, name)) for reader, reads in nodes for name in reads if absmax.get(name, 0.0) >= 65520}
    assert not any(len(link & region) == 1 < len(link) for link in linked)
    reached = set(seeds)
    while more := {name for link in linked if link & reached for name in link} - reached:
        reached |= more
    assert region == reached


class TestPatterns:
    def test_layer_norm_written_out(self) -> None:
        assert Regions(layer_norm(), {}).patterns == (("mean", "d", "p", "var", "e", "s", "n"),)

    def test_softmax_written_out(self) -> None:
        model = graph(SOFTMAX)
        model.graph.register_initializer(ir.Value(name="last", const_value=ir.tensor(np.array([-1]), name="last")))
        model.graph.node("z").replace_input_with(1, model.graph.initializers["last"])
        assert Regions(model, {}).patterns == (("top", "d", "e", "z", "q"),)

    def test_rms_norm_written_out(self) -> None:
        model = graph(
            "g (float[N,8] x) => (float[N,8] y) { p = Mul(x, x) m = ReduceMean <axes = [-1]> (p) r = Sqrt(m) "
            "i = Reciprocal(r) n = Mul(x, i) y = Mul(n, k) }",
            k=2.0,
        )
        assert Regions(model, {}).patterns == (("p", "m", "r", "i", "n"),)

    def test_a_mean_that_meets_nothing_again_is_no_pattern(self) -> None:
        model = graph("g (float[N,8] x) => (float[N,1] y) { m = ReduceMean <axes = [-1]> (x) y = Tanh(m) }")
        assert Regions(model, {}).patterns == ()

    def test_a_gate_with_matrix_products_is_no_pattern(self) -> None:
        model = graph(
            "g (float[N,8] x) => (float[N,8] y) { m = ReduceMean <axes = [-1]> (x) h = MatMul(m, w) s = Sigmoid(h) "
            "y = Mul(x, s) }",
            w=np.ones((1, 8)),
        )
        assert Regions(model, {}).patterns == ()

    def test_squares_that_overflow_take_the_whole_layer_norm(self) -> None:
        found = Regions(layer_norm(), {"d": 700.0, "p": 4.9e5, "var": 1.6e5, "e": 1.6e5, "s": 400.0}).around("p")
        assert found == Region("p", ("mean", "d", "p", "var", "e", "s", "n"), "pattern")

    def test_a_small_part_of_a_pattern_goes_alone(self) -> None:
        assert Regions(layer_norm(), {"var": 1e3}).around("var").kind == "node"


def magika() -> ir.Model:
    found = importlib.util.find_spec("magika")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("magika is not installed")
    model = io.load(Path(found.submodule_search_locations[0]) / "models/standard_v3_3/model.onnx")
    UniqueNodeNames()(model)
    return model


def test_magika_has_two_layer_norms_and_a_softmax() -> None:
    model = magika()
    patterns = Regions(model, {}).patterns
    assert [len(p) for p in patterns] == [18, 18, 10]
    operators = {node.name: node.op_type for node in model.graph}
    for pattern in patterns[:2]:
        assert [operators[n] for n in pattern].count("ReduceSum") == 2
        assert operators[pattern[-1]] == "Mul"
    assert operators[patterns[2][-1]] == "Div"


def test_regions_do_not_depend_on_names() -> None:
    plain, renamed = layer_norm(), layer_norm()
    for index, node in enumerate(renamed.graph):
        node.name = f"node_{index}"
    names = [node.name for node in plain.graph]
    found = Regions(renamed, {}).patterns
    assert [tuple(names[int(n.split("_")[1])] for n in p) for p in found] == list(Regions(plain, {}).patterns)
