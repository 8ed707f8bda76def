"""Folding a model that arrives as ONNX, as a stage: a published text classifier with 35 BatchNormalization nodes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from enginesmith.flows.workbench import Workbench
from enginesmith.tasks.data import load_dataset
from enginesmith.tasks.fold import FOLD_GRAPH
from enginesmith.tasks.settings import DimSettings, FoldSettings
from enginesmith.tasks.store import Artifact, Store


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    spec = find_spec("rapidocr_onnxruntime")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    model = Path(spec.submodule_search_locations[0]) / "models" / "ch_ppocr_mobile_v2.0_cls_infer.onnx"
    folder = tmp_path_factory.mktemp("cls")
    images = np.random.default_rng(0).uniform(-1, 1, (8, 3, 48, 192)).astype(np.float32)
    np.savez(folder / "feeds.npz", x=images)
    size = {"x_2": 48, "x_3": 192}
    return Workbench(
        Store(folder / "store"),
        model,
        folder / "feeds.npz",
        dims={name: DimSettings(min=n, opt=n, max=n) for name, n in size.items()},
    )


@pytest.fixture(scope="module")
def folded(bench: Workbench) -> Artifact:
    return FOLD_GRAPH(
        store=bench.store, model=bench.model, data=bench.data, inputs=bench.inputs, settings=FoldSettings()
    )


def operators(artifact: Artifact) -> list[str]:
    return [node.op_type for node in onnx.load(artifact.path / "model.onnx").graph.node]


def test_every_batch_normalization_goes_into_its_convolution(bench: Workbench, folded: Artifact) -> None:
    assert operators(bench.model).count("BatchNormalization") == 35
    assert operators(folded).count("BatchNormalization") == 0
    assert operators(folded).count("Conv") == operators(bench.model).count("Conv") == 53
    assert len(folded.report["folds"]) == 35


def test_the_folded_graph_computes_the_same(bench: Workbench, folded: Artifact) -> None:
    images = np.asarray(load_dataset(bench.data, "verdict").inputs["x"][:4])
    outputs = []
    for artifact in (bench.model, folded):
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(artifact.path / "model.onnx", options, providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": images})[0])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-5 * np.ptp(outputs[0]))
