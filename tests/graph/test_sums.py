from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.graph.sums import largest_sums
from enginesmith.tasks.runner import OnnxRunner

F32 = np.float32


def sums_of(op: str, x: Any, *constants: Any, opset: int = 18, **attributes: Any) -> float:
    """The largest sum inside one operator on x and constants."""
    x = np.asarray(x, F32)
    values = [np.asarray(c) if isinstance(c, np.ndarray) else np.array(c, F32) for c in constants]
    names = [f"c{i}" for i in range(len(values))]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", *names], ["y"], name="node", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * x.ndim)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for value, name in zip(values, names, strict=True)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = ir.from_proto(proto)
    UniqueNodeNames()(model)
    summing, outputs = largest_sums(model)
    assert outputs == {"node": "sum:node"}
    onnx.checker.check_model(ir.to_proto(summing), full_check=True)
    return float(OnnxRunner(summing).run({"x": x})["sum:node"])


def test_terms_that_cancel_count_with_their_magnitudes() -> None:
    x = [[60000, 60000, -60000, -59968]]
    assert sums_of("MatMul", x, np.array([[1], [1], [-1], [1]], F32)) == 239968
    assert sums_of("ReduceSum", x, np.array([1])) == 239968
    assert sums_of("CumSum", x, np.array(1)) == 239968
    assert sums_of("ReduceL1", x, np.array([1])) == 239968


@pytest.mark.parametrize("opset", [13, 18])
def test_means_are_counted_before_the_division(opset: int) -> None:
    x = np.arange(-4, 4).reshape(1, 2, 4)
    if opset == 13:
        assert sums_of("ReduceMean", x, opset=13, axes=[2]) == 10
    else:
        assert sums_of("ReduceMean", x, np.array([2])) == 10
    assert sums_of("GlobalAveragePool", x[..., None], opset=opset) == 10


def test_norms_are_counted_as_sums_of_squares() -> None:
    assert sums_of("ReduceL2", [[300, 400]], np.array([1])) == 250000
    assert sums_of("ReduceSumSquare", [[300, -400]], np.array([1])) == 250000


def test_gemm_counts_its_factors_and_its_addend() -> None:
    w, c = np.array([[1], [2]], F32), np.array([-5], F32)
    assert sums_of("Gemm", [[3, -4]], w, c, alpha=-2.0, beta=10.0) == 2 * 11 + 50


def test_conv_counts_the_bias_too() -> None:
    x = np.ones((1, 1, 3, 3))
    w = np.full((1, 1, 3, 3), -2, F32)
    assert sums_of("Conv", x, w, np.array([0.5], F32)) == 18.5
    assert sums_of("ConvTranspose", x, w) == 18


def test_an_operator_on_no_elements_sums_to_zero() -> None:
    assert sums_of("MatMul", np.zeros((0, 4)), np.ones((4, 2), F32)) == 0


def test_einsum_counts_every_factor() -> None:
    assert sums_of("Einsum", [[1, -2]], np.array([[3, -4]], F32), equation="ij,kj->ik") == 11


def test_other_nodes_have_no_sum() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"], name="relu")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    assert largest_sums(ir.from_proto(helper.make_model(graph)))[1] == {}
