"""FP32 nodes between FP16 casts are guarded without changing a bit, and then stay FP32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from enginesmith.tasks.engines import backend
from enginesmith.tasks.engines.child import build_engine
from enginesmith.tasks.engines.islands import guard_islands
from enginesmith.tasks.engines.manifest import read_layers

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


def island(graph, *, op: str = "Conv", bias: bool = False, read_in_float: bool = False) -> onnx.ModelProto:
    """x → FP16 → FP32 → Conv → FP16 → FP32 → y; the Conv's own result is read in FP32 too or not."""
    graph.add("Cast", ["x"], "half", to=FLOAT16)
    graph.add("Cast", ["half"], "wide", to=FLOAT)
    shape = {"Conv": (4, 3, 3, 3), "ConvTranspose": (3, 4, 3, 3), "MatMul": (16, 16)}[op]
    operands = ["wide", graph.constant("w", graph.rng.standard_normal(shape))]
    if bias:
        operands.append(graph.constant("b", graph.rng.standard_normal(4)))
    graph.add(op, operands, "c", **({} if op == "MatMul" else {"pads": [1, 1, 1, 1]}))
    graph.add("Cast", ["c"], "narrow", to=FLOAT16)
    graph.add("Cast", ["narrow"], "y", to=FLOAT)
    outputs = {"y": ["batch", 3 if op == "MatMul" else 4, 16, 16]}
    if read_in_float:
        graph.add("Sigmoid", ["c"], "z")
        outputs["z"] = outputs["y"]
    return graph.model({"x": ["batch", 3, 16, 16]}, outputs)


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "MatMul"])
def test_a_guard_changes_no_bit_not_even_of_inf_and_nan(op, graph) -> None:
    model = island(graph, op=op)
    guarded, names = guard_islands(model)
    assert names == ("n_c",)
    onnx.checker.check_model(guarded, full_check=True)
    x = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    x[0, 0, 0, 0], x[1, 0, 0, 0], x[1, 0, 5, 5] = np.inf, np.nan, -0.0
    with np.errstate(all="ignore"):
        before, after = (ReferenceEvaluator(m).run(None, {"x": x})[0] for m in (model, guarded))
    assert np.isnan(before).any()
    np.testing.assert_array_equal(after.view(np.uint32), before.view(np.uint32))


def test_the_given_model_is_not_changed(graph) -> None:
    model = island(graph)
    before = model.SerializeToString(deterministic=True)
    guard_islands(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_result_read_in_fp32_needs_no_guard(graph) -> None:
    model = island(graph, read_in_float=True)
    assert guard_islands(model) == (model, ())


@pytest.mark.parametrize("precision", ["fp32", "fp16", "mixed", "int8"])
def test_larger_regions_need_no_guard(precision, net) -> None:
    assert guard_islands(onnx.load(net(precision)))[1] == ()


@pytest.mark.parametrize(("op", "bias"), [("Conv", False), ("Conv", True), ("ConvTranspose", False), ("MatMul", False)])
def test_tensorrt_rtx_keeps_a_guarded_island_in_fp32(op, bias, graph, request_for, out) -> None:
    pytest.importorskip("tensorrt_rtx")
    result = build_engine(backend("tensorrt_rtx"), request_for(island(graph, op=op, bias=bias), "mixed"), out)
    (row,) = [row for row in read_layers(out) if row.node == "n_c"]
    assert (row.requested, row.actual) == ("fp32", "fp32")
    assert result.manifest.lowered == ("1 FP32 node(s) between FP16 casts guarded by LeakyRelu(alpha=1)",)
