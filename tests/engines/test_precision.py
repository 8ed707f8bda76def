"""What each node of a graph asks for, and what counts as not obeying it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.tasks.engines.precision import check_obeyed, counts, requests
from enginesmith.tasks.engines.spec import EngineError, NodePrecision


def asked(model: onnx.ModelProto) -> dict[str, str]:
    return {request.node: request.precision for request in requests(model)}


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("fp32", {"fp32": 7}),
        ("fp16", {"fp16": 7}),
        ("mixed", {"fp16": 2, "fp32": 5}),
        ("int8", {"int8": 4, "fp32": 3}),
    ],
)
def test_nodes_are_counted_by_their_tensors_types(precision, expected, net) -> None:
    model = onnx.load(net(precision))
    assert counts(asked(model).values()) == expected


def test_casts_and_quantizers_carry_and_are_not_counted(net) -> None:
    convs = {"n_c0", "n_r0", "n_c1", "n_r1", "n_pooled", "n_flat"}
    assert set(asked(onnx.load(net("int8")))) == convs | {"n_y"}
    assert set(asked(onnx.load(net("fp16")))) == convs | {"n_y16"}


def test_a_conv_with_only_its_weight_quantized_is_not_int8(graph) -> None:
    weight = graph.int8_weight("w", (4, 3, 1, 1))
    graph.add("Conv", ["x", weight], "y")
    assert asked(graph.model({"x": [1, 3, 4, 4]}, {"y": [1, 4, 4, 4]})) == {"n_y": "fp32"}


def test_a_relu_read_in_float_behind_an_int8_conv_is_fp32(graph) -> None:
    graph.add("Conv", [graph.qdq("x", 0.1), graph.int8_weight("w", (4, 3, 1, 1))], "c")
    graph.add("Relu", ["c"], "y")
    assert asked(graph.model({"x": [1, 3, 4, 4]}, {"y": [1, 4, 4, 4]})) == {"n_c": "int8", "n_y": "fp32"}


def test_an_add_between_quantized_tensors_is_int8(graph) -> None:
    graph.add("Add", [graph.qdq("x", 0.1), graph.qdq("z", 0.1)], "s")
    graph.qdq("s", 0.1)
    model = graph.model({"x": [1, 4], "z": [1, 4]}, {"s_dq": [1, 4]})
    assert asked(model) == {"n_s": "int8"}


def test_integer_nodes_ask_for_nothing(graph) -> None:
    graph.add("Shape", ["x"], "shape")
    graph.constant("one", [1], np.int64)
    graph.add("Mul", ["shape", "one"], "same")
    graph.add("Reshape", ["x", "same"], "y")
    assert asked(graph.model({"x": [2, 3]}, {"y": ["a", "b"]})) == {"n_y": "fp32"}


def test_nodes_inside_if_are_counted(graph) -> None:
    def branch(op: str) -> onnx.GraphProto:
        node = helper.make_node(op, ["x"], [f"{op}_out"], name=op)
        return helper.make_graph([node], op, [], [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, [2])])

    condition = graph.constant("condition", True, bool)
    graph.add("If", [condition], "y", then_branch=branch("Relu"), else_branch=branch("Abs"))
    found = asked(graph.model({"x": [2]}, {"y": [2]}))
    assert found == {"Relu": "fp32", "Abs": "fp32", "n_y": "fp32"}


def row(requested: str, actual: str, op: str = "Conv") -> NodePrecision:
    return NodePrecision("node", op, requested, actual, "fused")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("requested", "actual"), [("fp32", "fp16"), ("fp16", "fp32"), ("int8", "fp16"), ("int8", "fp32"), ("fp32", "int8")]
)
def test_another_precision_fails_the_build_naming_node_and_layer(requested: str, actual: str) -> None:
    with pytest.raises(EngineError, match="did not keep the precision of 1 node") as caught:
        check_obeyed([row(requested, actual)], backend="b", variant="mixed")
    assert caught.value.details == (f"node (Conv): asked {requested}, has {actual} in fused",)


def test_a_node_that_the_engine_shows_nothing_about_is_no_mismatch() -> None:
    check_obeyed([row("fp16", "")], backend="b", variant="fp16")


def test_a_weightless_node_between_quantizers_may_run_in_float() -> None:
    check_obeyed([row("int8", "fp32", "Relu")], backend="b", variant="int8")


def test_an_fp32_norm_that_runs_in_fp16_is_a_mismatch_though_it_has_no_weights() -> None:
    with pytest.raises(EngineError):
        check_obeyed([row("fp32", "fp16", "LayerNormalization")], backend="b", variant="mixed")
