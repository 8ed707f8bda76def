"""Claims about verdicts: what evidence they rest on, and what NaN does to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import BaseModel

from enginesmith.tasks.backends import find_backend
from enginesmith.tasks.build import BUILD
from enginesmith.tasks.data import DATA, data_source, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.measure import MEASURE, load_result
from enginesmith.tasks.metric import MetricRef
from enginesmith.tasks.reference import REFERENCE
from enginesmith.tasks.settings import DimSettings, InputSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store
from enginesmith.tasks.usercode import UserCode, importable

INPUTS = {"x": InputSettings(shape=("n", 2), dims={"n": DimSettings(min=1, opt=4, max=8)})}
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


class _Report(BaseModel):
    pass


def _scaled(out: Path, *, half: bool = False, factor: float = 1.0, noise: float = 0.0) -> _Report:
    """y = (x * factor) * (1 / factor) + noise: in FP16 it overflows for a large factor, in FP32 it is x + noise."""
    kind = np.float16 if half else np.float32
    constants = {"up": factor, "down": 1 / factor, "noise": noise}
    source = "h" if half else "x"
    with np.errstate(over="ignore"):
        tensors = [numpy_helper.from_array(np.array(v).astype(kind), name) for name, v in constants.items()]
    nodes = [
        helper.make_node("Mul", [source, "up"], ["big"], name="big"),
        helper.make_node("Mul", ["big", "down"], ["same"], name="same"),
        helper.make_node("Add", ["same", "noise"], ["r" if half else "y"], name="noisy"),
    ]
    if half:
        nodes.insert(0, helper.make_node("Cast", ["x"], ["h"], name="down_cast", to=FLOAT16))
        nodes.append(helper.make_node("Cast", ["r"], ["y"], name="up_cast", to=FLOAT))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", FLOAT, ["n", 2])],
        [value("y", FLOAT, ["n", 2])],
        tensors,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), out / "model.onnx")
    return _Report()


MODEL = Stage("model", version=1, run=_scaled)


class Bench:
    """A reference and a way to measure other models against it."""

    def __init__(self, store: Store, folder: Path, metric: MetricRef) -> None:
        self.store = store
        self.metric = metric
        self.data = DATA(
            store=store,
            calibration=None,
            evaluation=data_source("mydata:evaluation", folder, "data.evaluation"),
            search=None,
            files=(),
            inputs=INPUTS,
            seed=0,
            samples=8,
        )
        self.fp32 = MODEL(store=store)
        self.reference = REFERENCE(store=store, model=self.fp32, data=self.data, metric=metric)

    def measure(self, model: Artifact, engine: Artifact | None = None, backend: str | None = None) -> Artifact:
        return MEASURE(
            store=self.store,
            model=model,
            engine=engine,
            backend=backend,
            data=self.data,
            reference=self.reference,
            metric=self.metric,
        )

    def build(self, model: Artifact) -> Artifact:
        fingerprint = find_backend("onnxruntime").fingerprint()
        given: dict[str, Any] = {"inputs": INPUTS, "options": {}, "fingerprint": fingerprint}
        return BUILD(store=self.store, model=model, variant="fp32", backend="onnxruntime", **given)


@pytest.fixture
def bench(tmp_path: Path, store: Store) -> Any:
    """Labels are argmax(x), so the FP32 model scores 1; the metric is the user's own top-1."""
    (tmp_path / "mydata.py").write_text(
        "import numpy as np\n"
        "def evaluation():\n"
        "    x = np.random.default_rng(0).standard_normal((41, 2)).astype(np.float32)\n"
        "    return x, x.argmax(axis=1)\n"
        "def top1(outputs, targets):\n"
        "    hits = (np.asarray(outputs).argmax(axis=1) == targets).astype(float)\n"
        "    return hits.mean(), hits\n"
        "def whole(outputs, targets):\n"
        "    return float((np.asarray(outputs).argmax(axis=1) == targets).mean())\n"
    )
    with importable(tmp_path):
        yield lambda call="top1": Bench(store, tmp_path, MetricRef(UserCode(tmp_path, f"mydata:{call}")))


def test_the_built_engine_gives_the_value_where_there_is_one(bench: Callable[..., Bench]) -> None:
    b = bench()
    result = load_result(b.measure(b.fp32, b.build(b.fp32), "onnxruntime"))
    assert result.evidence == "engine"
    assert (result.value, result.reference, result.drop, result.stderr) == (1.0, 1.0, 0.0, 0.0)
    assert result.samples == len(load_dataset(b.data, "verdict"))
    assert result.within_noise


def test_the_engine_is_what_ran_and_not_the_file_beside_it(bench: Callable[..., Bench]) -> None:
    b = bench()
    wrong = MODEL(store=b.store, noise=1.0, factor=-1.0)
    swapped = MODEL(store=b.store, factor=1e9, half=True)
    assert load_result(b.measure(swapped, b.build(wrong), "onnxruntime")).value == 1.0


def test_without_an_engine_fp16_is_emulated_with_its_overflow(bench: Callable[..., Bench]) -> None:
    b = bench()
    result = load_result(b.measure(MODEL(store=b.store, half=True, factor=60000.0)))
    assert result.evidence == "emulated"
    x = np.asarray(load_dataset(b.data, "verdict").inputs["x"]).astype(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        y = (x * np.float16(60000)) * np.float16(1 / 60000)
    assert np.isinf(y).any()
    assert result.failed == bool(np.isnan(y).any())
    if not result.failed:
        assert result.value == pytest.approx((y.argmax(axis=1) == x.argmax(axis=1)).mean())


def test_nan_is_a_failed_verdict_with_no_number(bench: Callable[..., Bench]) -> None:
    b = bench()
    measured = b.measure(MODEL(store=b.store, noise=float("nan")))
    result = load_result(measured)
    assert result.failed
    assert (result.value, result.drop, result.within_noise) == (None, None, None)
    assert "NaN" not in (measured.path / "result.json").read_text()


def test_a_drop_comes_with_its_paired_standard_error(bench: Callable[..., Bench]) -> None:
    """Noise of 0.4 on one of two logits moves labels one way; hits are counted by hand."""
    b = bench()
    x = np.asarray(load_dataset(b.data, "verdict").inputs["x"])

    def shifted(out: Path) -> _Report:
        _scaled(out)
        model = onnx.load(out / "model.onnx")
        model.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.array([0.4, 0.0], np.float32), "noise"))
        onnx.save(model, out / "model.onnx")
        return _Report()

    measured = b.measure(Stage("shifted", version=1, run=shifted)(store=b.store))
    result = load_result(measured)
    hits = ((x + np.array([0.4, 0.0], np.float32)).argmax(axis=1) == x.argmax(axis=1)).astype(float)
    assert 0 < hits.mean() < 1
    assert result.drop == pytest.approx(1 - hits.mean())
    assert result.stderr == pytest.approx(np.std(1 - hits, ddof=1) / np.sqrt(len(hits)))
    scores = np.load(measured.path / "scores.npz")
    np.testing.assert_array_equal(scores["variant"], hits)
    np.testing.assert_array_equal(scores["reference"], np.ones(len(hits)))


def test_a_metric_without_samples_has_no_standard_error(bench: Callable[..., Bench]) -> None:
    b = bench("whole")
    measured = b.measure(b.fp32)
    result = load_result(measured)
    assert (result.stderr, result.within_noise, result.drop) == (None, None, 0.0)
    assert np.load(measured.path / "scores.npz").files == []


def test_an_engine_of_another_host_is_refused_and_not_measured(bench: Callable[..., Bench]) -> None:
    b = bench()
    engine = b.build(b.fp32)
    path = engine.path / "engine.json"
    data = json.loads(path.read_text())
    data["fingerprint"]["machine"] = "riscv64"
    path.chmod(0o644)
    path.write_text(json.dumps(data))
    with pytest.raises(EnginesmithError, match="the engine has riscv64, this host"):
        b.measure(b.fp32, engine, "onnxruntime")


def test_a_graph_that_cannot_be_emulated_gives_no_evidence(bench: Callable[..., Bench]) -> None:
    def foreign(out: Path) -> _Report:
        value = helper.make_tensor_value_info
        node = helper.make_node("Secret", ["x"], ["y"], name="secret", domain="com.example")
        graph = helper.make_graph([node], "g", [value("x", FLOAT, ["n", 2])], [value("y", FLOAT, ["n", 2])])
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), out / "model.onnx")
        return _Report()

    b = bench()
    result = load_result(b.measure(Stage("foreign", version=1, run=foreign)(store=b.store)))
    assert (result.evidence, result.value, result.drop, result.failed) == ("none", None, None, False)
    assert result.reason.startswith("the graph cannot be emulated")


def test_two_measurements_have_the_same_bytes(bench: Callable[..., Bench], tmp_path: Path) -> None:
    b = bench()
    first = b.measure(b.fp32)
    again = tmp_path / "again"
    again.mkdir()
    MEASURE.run(again, model=b.fp32, engine=None, backend=None, data=b.data, reference=b.reference, metric=b.metric)
    for name in ("result.json", "scores.npz"):
        assert (again / name).read_bytes() == (first.path / name).read_bytes()
