"""TensorRT-RTX engines, built for real where the wheel is installed: it needs no GPU."""

from __future__ import annotations

import json

import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.tasks.engines import backend
from enginesmith.tasks.engines.child import build_engine
from enginesmith.tasks.engines.manifest import read_layers
from enginesmith.tasks.engines.spec import EngineError

pytest.importorskip("tensorrt_rtx")
RTX = backend("tensorrt_rtx")


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("fp32", {"n_c0": "fp32", "n_c1": "fp32", "n_y": "fp32"}),
        ("fp16", {"n_c0": "fp16", "n_c1": "fp16", "n_y16": "fp16"}),
        ("mixed", {"n_c0": "fp16", "n_c1": "fp32", "n_y": "fp32"}),
        ("int8", {"n_c0": "int8", "n_c1": "int8", "n_y": "fp32"}),
    ],
)
def test_an_engine_has_the_precision_that_the_graph_asks_for(precision, expected, request_for, out) -> None:
    manifest = build_engine(RTX, request_for(precision), out).manifest
    assert {row.node: row.actual for row in read_layers(out) if row.op in ("Conv", "Gemm")} == expected
    assert manifest.unseen == 0
    assert manifest.read_from.startswith("the engine's layer table")
    assert all(row.layer for row in read_layers(out) if row.op in ("Conv", "Gemm"))


def test_two_builds_have_the_same_bytes(request_for, tmp_path) -> None:
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        build_engine(RTX, request_for("int8", compute_capabilities=[8.9]), tmp_path / name)
        contents.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]


def test_the_manifest_names_the_gpus_it_is_for(request_for, out) -> None:
    build_engine(RTX, request_for("fp32", compute_capabilities=[8.6, 12.0]), out)
    data = json.loads((out / "engine.json").read_text())
    assert data["options"]["compute_capabilities"] == ["8.6", "12.0"]
    assert data["options"]["tf32"] is False
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": [None, 3, 16, 16]}]
    assert data["fingerprint"]["tensorrt_rtx"] == RTX.version()


def test_a_gpu_that_it_does_not_build_for_is_refused(request_for, out) -> None:
    with pytest.raises(EngineError, match=r"compute_capabilities does not take 9\.0") as caught:
        build_engine(RTX, request_for("fp32", compute_capabilities=[9.0]), out)
    assert "8.9, 12.0" in caught.value.hint


def test_loading_here_is_refused_after_the_manifest_was_checked(request_for, out) -> None:
    build_engine(RTX, request_for("fp32"), out)
    with pytest.raises(EngineError, match="runs on an RTX GPU only"):
        RTX.load(out)
    (out / "engine.trt").write_bytes(b"spoiled")
    with pytest.raises(EngineError, match=r"engine\.trt has changed"):
        RTX.load(out)


def refused_model() -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="fine"),
        helper.make_node("NonZero", ["a"], ["n"], name="where"),
        helper.make_node("Det", ["a"], ["y"], name="volume"),
    ]
    inputs = [value("x", TensorProto.FLOAT, ["batch", 3, 16, 16])]
    outputs = [value("y", TensorProto.FLOAT, ["batch", 3]), value("n", TensorProto.INT64, [4, "k"])]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_every_node_it_refuses_is_named(net) -> None:
    refused = RTX.check(net(refused_model()))
    assert [(r.node, r.op) for r in refused] == [("where", "NonZero"), ("volume", "Det")]
    assert "NonZero" in refused[0].reason


def test_a_model_it_takes_is_refused_nothing(net) -> None:
    assert RTX.check(net("int8")) == ()


def test_building_what_it_refuses_is_an_error_that_names_the_node(request_for, out) -> None:
    with pytest.raises(EngineError, match="refuses 1 node") as caught:
        build_engine(RTX, request_for(refused_model()), out)
    assert caught.value.details[0].startswith("where (NonZero)")


def test_it_builds_everything_and_executes_nothing_here() -> None:
    assert RTX.builds() == {"fp32", "fp16", "mixed", "int8", "int8-mixed"}
    assert RTX.executes() == frozenset()
