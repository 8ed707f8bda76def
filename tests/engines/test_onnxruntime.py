"""ONNX Runtime engines: what is built, what it computes, what is refused."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from enginesmith.tasks.engines import backend
from enginesmith.tasks.engines.child import build_engine
from enginesmith.tasks.engines.manifest import model_digest, read_layers
from enginesmith.tasks.engines.spec import EngineError

X = np.random.default_rng(2).standard_normal((4, 3, 16, 16)).astype(np.float32)
ORT = backend("onnxruntime")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_engine_computes_what_the_graph_says(precision, ort_engine, net) -> None:
    expected = ReferenceEvaluator(onnx.load(net(precision))).run(None, {"x": X})[0]
    with ORT.load(ort_engine(precision)[0]) as engine:
        found = engine.run({"x": X})["y"]
    assert found.shape == (4, 10)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=0.03 if precision == "int8" else 1e-5)


def test_int8_sums_are_exact_where_16_bit_pairs_would_saturate(graph, request_for, out) -> None:
    """All operands at their limits: 4 * (127 * 127 + 127 * 127), beyond 2**15 after one pair of products."""
    graph.constant("wq", np.full((1, 8, 1, 1), 127), np.int8)
    graph.constant("ws", [1.0])
    graph.constant("wz", [0], np.int8)
    graph.add("DequantizeLinear", ["wq", "ws", "wz"], "w", axis=0)
    graph.add("Conv", [graph.qdq("x8", 1.0), "w"], "y4")
    graph.nodes.insert(0, onnx.helper.make_node("Concat", ["x", "x", "x5"], ["x8"], name="widen", axis=1))
    graph.nodes.insert(0, onnx.helper.make_node("Slice", ["x", "zero", "two", "one"], ["x5"], name="cut"))
    for name, value in (("zero", [0]), ("two", [2]), ("one", [1])):
        graph.constant(name, value, np.int64)
    model = graph.model({"x": ["batch", 3, 16, 16]}, {"y4": ["batch", 1, 16, 16]})
    build_engine(ORT, request_for(model, "int8"), out)
    with ORT.load(out) as engine:
        found = engine.run({"x": np.full((1, 3, 16, 16), 127, np.float32)})["y4"]
    np.testing.assert_array_equal(found, np.full((1, 1, 16, 16), 8 * 127 * 127, np.float32))


def test_int8_runs_as_integers_and_the_manifest_says_so(ort_engine) -> None:
    folder, result = ort_engine("int8")
    assert result.manifest.requested == {"fp32": 3, "int8": 4}
    assert result.manifest.read_back["int8"] == 2
    assert {row.layer for row in read_layers(folder) if row.op == "Conv"} == {
        "n_c0 (QLinearConv)",
        "n_c1 (QLinearConv)",
    }


@pytest.mark.parametrize("precision", ["fp16", "mixed"])
def test_fp16_is_refused_because_it_would_run_in_fp32(precision, request_for, out) -> None:
    with pytest.raises(EngineError, match=f"computes FP16 in FP32, so it cannot build the {precision}") as caught:
        build_engine(ORT, request_for(precision), out)
    assert caught.value.details[0] == "n_c0 (Conv): asks fp16"


def test_the_backend_declares_what_it_builds_and_executes() -> None:
    assert ORT.builds() == ORT.executes() == {"fp32", "int8"}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_two_builds_have_the_same_bytes(precision, ort_engine, request_for, out) -> None:
    build_engine(ORT, request_for(precision), out)
    first, second = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (ort_engine(precision)[0], out))
    assert first == second


def test_the_manifest_has_what_the_engine_is_tied_to(ort_engine) -> None:
    data = json.loads((ort_engine("fp32")[0] / "engine.json").read_text())
    assert data["fingerprint"] == ORT.fingerprint()
    assert data["options"] == {"threads": 0}
    assert data["profiles"][0]["shapes"]["x"] == {"min": [1, 3, 16, 16], "opt": [4, 3, 16, 16], "max": [8, 3, 16, 16]}
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": [None, 3, 16, 16]}]
    assert [file["path"] for file in data["files"]] == ["engine.onnx"]


def test_a_prepared_call_runs_the_engine_on_its_feeds(ort_engine) -> None:
    with ORT.load(ort_engine("fp32")[0]) as engine:
        infer = engine.prepare({"x": X[:2]})
        assert infer() is None
        assert engine.run({"x": X[:2]})["y"].shape == (2, 10)


def test_an_unknown_operator_is_reported_by_node(graph, net) -> None:
    graph.nodes.append(onnx.helper.make_node("Nonsense", ["x"], ["y"], name="strange", domain="com.example"))
    value = onnx.helper.make_tensor_value_info
    model = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, "g", [value("x", 1, [1])], [value("y", 1, [1])]),
        opset_imports=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.example", 1)],
        ir_version=10,
    )
    (refusal,) = ORT.check(net(model))
    assert "Nonsense" in refusal.reason


def test_a_good_model_is_refused_nothing(net) -> None:
    assert ORT.check(net("fp32")) == ()


def test_a_model_with_external_data_is_digested_with_it(net, request_for, out) -> None:
    request = request_for("fp32")
    model = onnx.load(request.model)
    onnx.save(model, request.model, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    first = model_digest(request.model)
    assert build_engine(ORT, request, out).manifest.model_sha256 == first
    data = request.model.with_name("model.onnx.data")
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(bytes(content))
    assert model_digest(request.model) != first
