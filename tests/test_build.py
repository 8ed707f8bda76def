"""Claims about building a variant: what the artifact holds, and how it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.backends import engine_manifest, find_backend, node_precisions, refusal
from enginesmith.tasks.build import BUILD
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.settings import DimSettings, InputSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store

INPUTS = {"x": InputSettings(shape=("n", 3), dims={"n": DimSettings(min=1, opt=4, max=8)})}
Builder = Callable[..., Artifact]


class _Report(BaseModel):
    pass


def _gemm(out: Path, *, half: bool = False) -> _Report:
    """y = relu(x @ w), in FP16 between two casts or in FP32."""
    kind = np.float16 if half else np.float32
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((3, 2)).astype(kind), "w")
    nodes = [
        helper.make_node("MatMul", ["h" if half else "x", "w"], ["product"], name="product"),
        helper.make_node("Relu", ["product"], ["r" if half else "y"], name="relu"),
    ]
    if half:
        nodes.insert(0, helper.make_node("Cast", ["x"], ["h"], name="down", to=TensorProto.FLOAT16))
        nodes.append(helper.make_node("Cast", ["r"], ["y"], name="up", to=TensorProto.FLOAT))
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", TensorProto.FLOAT, ["n", 3])], [value("y", TensorProto.FLOAT, ["n", 2])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), out / "model.onnx")
    return _Report()


MODEL = Stage("model", version=1, run=_gemm)


@pytest.fixture
def build(store: Store) -> Builder:
    def run(variant: str = "fp32", *, backend: str = "onnxruntime", half: bool = False, **changed: Any) -> Artifact:
        given = {"inputs": INPUTS, "options": {}, "fingerprint": find_backend(backend).fingerprint(), **changed}
        model = MODEL(store=store, half=half)
        return BUILD(store=store, model=model, variant=variant, backend=backend, **given)

    return run


def test_the_artifact_is_the_engine_its_manifest_and_the_precision_of_every_node(build: Builder) -> None:
    built = build()
    assert {f.path for f in built.files} == {"engine.onnx", "engine.json", "precision.json", "report.json"}
    rows = json.loads((built.path / "precision.json").read_text())
    assert [(row["node"], row["requested"], row["actual"]) for row in rows] == [
        ("product", "fp32", "fp32"),
        ("relu", "fp32", "fp32"),
    ]


def test_the_size_that_counts_is_the_engines(build: Builder) -> None:
    built = build()
    assert engine_manifest(built).size == (built.path / "engine.onnx").stat().st_size
    assert built.report["size_bytes"] == engine_manifest(built).size


def test_time_and_memory_are_in_the_report_and_not_in_the_manifest(build: Builder) -> None:
    built = build()
    assert built.report["build_s"] > 0
    assert built.report["peak_memory_mb"] > 10
    assert not {"build_s", "seconds", "peak_memory_mb"} & set(json.loads((built.path / "engine.json").read_text()))


def test_the_same_inputs_build_once(build: Builder) -> None:
    assert not build().cached
    assert build().cached


def test_another_timeout_changes_no_byte_of_the_engine(build: Builder) -> None:
    first, second = build(options={"timeout": 100}), build(options={"timeout": 200})
    assert first.key != second.key
    assert first.digest == second.digest


@pytest.mark.parametrize("variant", ["fp16", "mixed", "int8-mixed"])
def test_onnxruntime_refuses_variants_that_it_would_run_in_fp32(variant: str, build: Builder) -> None:
    assert "builds fp32, int8" in refusal("onnxruntime", variant)
    with pytest.raises(EnginesmithError, match=f"does not keep the precision of {variant}") as caught:
        build(variant, half=True)
    assert caught.value.key == "targets"


def test_fp16_in_a_file_that_claims_to_be_fp32_is_found(build: Builder) -> None:
    with pytest.raises(EnginesmithError, match="computes FP16 in FP32") as caught:
        build("fp32", half=True)
    assert caught.value.details[0] == "product (MatMul): asks fp16"


def test_an_unknown_option_is_an_error_at_the_targets(build: Builder) -> None:
    with pytest.raises(EnginesmithError, match="no option 'workspace'") as caught:
        build(options={"workspace": 1})
    assert caught.value.key == "targets"


def test_declared_dims_that_the_graph_does_not_have_are_an_error_at_the_input(build: Builder) -> None:
    wrong = {"x": InputSettings(shape=("n", 4), dims={"n": DimSettings(min=1, opt=4, max=8)})}
    with pytest.raises(EnginesmithError, match="static size 3") as caught:
        build(inputs=wrong)
    assert caught.value.key == "inputs.x.shape"


def test_a_target_that_is_another_host_is_refused_with_both_sides(build: Builder) -> None:
    with pytest.raises(EnginesmithError, match=r"'onnxruntime': '0\.1'.*this host is"):
        build(fingerprint={"onnxruntime": "0.1"})


def test_ctrl_c_stops_a_build_and_leaves_the_store_as_it_was(build: Builder, store: Store) -> None:
    MODEL(store=store, half=False)
    timer = threading.Timer(0.2, progress.interrupt)
    timer.start()
    started = time.monotonic()
    with pytest.raises(Interrupted):
        build()
    assert time.monotonic() - started < 30
    assert not list((store.root / "tmp").iterdir())
    assert not (store.root / "objects" / "build").exists() or not list((store.root / "objects" / "build").iterdir())


def test_nodes_are_counted_without_an_engine(store: Store) -> None:
    assert node_precisions(MODEL(store=store, half=True)) == {"fp16": 2}
    assert node_precisions(MODEL(store=store, half=False)) == {"fp32": 2}


def test_tensorrt_rtx_builds_the_same_file_in_fp16(build: Builder) -> None:
    pytest.importorskip("tensorrt_rtx")
    manifest = engine_manifest(build("fp16", backend="tensorrt_rtx", half=True))
    assert manifest.requested == manifest.read_back == {"fp16": 2}
