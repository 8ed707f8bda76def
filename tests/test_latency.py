"""Claims about timing: fair turns, honest percentiles, sessions that are found again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from pydantic import BaseModel

from enginesmith.tasks.backends import find_backend
from enginesmith.tasks.build import BUILD
from enginesmith.tasks.data import DATA
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.latency import (
    Latency,
    LatencySettings,
    TimedEngine,
    batch_sizes,
    latest,
    session_key,
    take_turns,
    time_engines,
)
from enginesmith.tasks.settings import DimSettings, InputSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store

INPUTS = {"x": InputSettings(shape=("n", 3), dims={"n": DimSettings(min=1, opt=4, max=8)})}
QUICK = LatencySettings(seconds=0.05, min_runs=20, max_runs=40, warmup_s=0.01)


class _Report(BaseModel):
    pass


def _relu(out: Path, *, operator: str) -> _Report:
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", TensorProto.FLOAT, ["n", 3])], [value("y", TensorProto.FLOAT, ["n", 3])]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], name="only")], "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), out / "model.onnx")
    return _Report()


MODEL = Stage("model", version=1, run=_relu)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Where engines and data are made once; sessions go to each test's own store."""
    return Store(tmp_path_factory.mktemp("bank"))


@pytest.fixture(scope="module")
def data(bank: Store) -> Artifact:
    return DATA(store=bank, calibration=None, evaluation=None, search=None, files=(), inputs=INPUTS, seed=0, samples=8)


@pytest.fixture(scope="module")
def engine(bank: Store) -> Callable[[str], TimedEngine]:
    def make(variant: str, operator: str = "Relu") -> TimedEngine:
        built = BUILD(
            store=bank,
            model=MODEL(store=bank, operator=operator),
            variant=variant,
            inputs=INPUTS,
            backend="onnxruntime",
            options={},
            fingerprint=find_backend("onnxruntime").fingerprint(),
        )
        return TimedEngine(variant, "onnxruntime", built)

    return make


def test_calls_take_turns_and_get_the_same_number_of_runs() -> None:
    seen: list[str] = []
    calls = {name: lambda name=name: (seen.append(name), time.sleep(0.001))[0] for name in ("a", "b", "c")}
    times = take_turns(calls, LatencySettings(seconds=0.0, min_runs=20, max_runs=20, warmup_s=0.0, block=5))
    assert {name: len(t) for name, t in times.items()} == {"a": 20, "b": 20, "c": 20}
    rounds = [seen[9:][i : i + 18] for i in range(0, 72, 18)]
    assert all(sorted(r) == ["a"] * 6 + ["b"] * 6 + ["c"] * 6 for r in rounds)
    assert len({"".join(r) for r in rounds}) > 1


def test_a_slow_call_is_measured_as_slow() -> None:
    calls = {"fast": lambda: time.sleep(0.001), "slow": lambda: time.sleep(0.01)}
    times = take_turns(calls, LatencySettings(seconds=0.0, min_runs=10, max_runs=10, warmup_s=0.0))
    assert np.median(times["slow"]) >= 0.01
    assert np.median(times["fast"]) < np.median(times["slow"])


def test_time_ends_a_slow_call_before_its_most_runs() -> None:
    settings = LatencySettings(seconds=0.05, min_runs=2, max_runs=1000, warmup_s=0.0, block=2)
    times = take_turns({"a": lambda: time.sleep(0.01)}, settings)
    assert 2 <= len(times["a"]) <= 6


def test_a_session_has_each_engine_at_batch_one_and_opt(store: Store, data: Artifact, engine) -> None:
    session = time_engines(store, "cpu", [engine("fp32"), engine("int8", "Abs")], data, settings=QUICK)
    assert session is not None
    assert [(row.variant, row.batch) for row in session.latencies] == [
        ("fp32", 1), ("int8", 1), ("fp32", 4), ("int8", 4),
    ]  # fmt: skip
    for row in session.latencies:
        assert 0 < row.p50_ms <= row.p90_ms <= row.p99_ms <= row.max_ms
        assert row.throughput == pytest.approx(1000 * row.batch / row.p50_ms)
        assert row.runs >= 20
    assert session.of("fp32") == session.latencies[2]
    assert session.of("fp32", 1) == session.latencies[0]
    assert session.of("fp16") is None


def test_a_second_run_finds_the_session_and_times_nothing(store: Store, data: Artifact, engine) -> None:
    engines = [engine("fp32")]
    first = time_engines(store, "cpu", engines, data, settings=QUICK)
    assert time_engines(store, "cpu", engines, data, settings=QUICK) == first
    assert len(store.observations("latency", session_key("cpu", engines, data))) == 1


def test_asking_again_times_again_and_the_last_session_counts(store: Store, data: Artifact, engine) -> None:
    engines = [engine("fp32")]
    time_engines(store, "cpu", engines, data, settings=QUICK)
    second = time_engines(store, "cpu", engines, data, settings=QUICK, again=True)
    assert latest(store, "cpu", engines, data) == second
    assert len(store.observations("latency", session_key("cpu", engines, data))) == 2


def test_another_engine_in_the_session_makes_it_another_session(store: Store, data: Artifact, engine) -> None:
    time_engines(store, "cpu", [engine("fp32")], data, settings=QUICK)
    assert latest(store, "cpu", [engine("fp32"), engine("int8", "Abs")], data) is None
    assert latest(store, "cpu", [engine("fp32", "Abs")], data) is None


def test_nothing_to_time_is_no_session(store: Store, data: Artifact) -> None:
    assert time_engines(store, "cpu", [], data) is None


def test_an_engine_that_changed_on_disk_is_not_timed(store: Store, data: Artifact, engine, tmp_path: Path) -> None:
    timed = engine("fp32")
    copy = shutil.copytree(timed.engine.path, tmp_path / "copy")
    (copy / "engine.onnx").chmod(0o644)
    (copy / "engine.onnx").write_bytes(b"spoiled")
    spoiled = replace(timed, engine=replace(timed.engine, path=copy))
    with pytest.raises(EnginesmithError, match=r"engine\.onnx has changed"):
        time_engines(store, "cpu", [spoiled], data, settings=QUICK)


def test_jitter_is_p99_beyond_twice_p50(store: Store, data: Artifact, engine) -> None:
    session = time_engines(store, "cpu", [engine("fp32")], data, settings=QUICK)
    assert session is not None
    for row in session.latencies:
        assert row.jitter == (row.p99_ms > 2 * row.p50_ms)
    jittery = [row for row in session.latencies if row.jitter]
    assert bool(jittery) == any("p99 is over 2 x p50" in note for note in session.notes)


def test_a_session_survives_its_way_through_the_store(store: Store, data: Artifact, engine) -> None:
    engines = [engine("fp32")]
    session = time_engines(store, "cpu", engines, data, settings=QUICK)
    found = latest(store, "cpu", engines, data)
    assert found == session
    assert found is not None
    assert isinstance(found.latencies[0], Latency)
    assert found.host["cpus"] >= 1


def test_batch_sizes_of_a_model_without_a_batch_axis(store: Store) -> None:
    from enginesmith.tasks.data import load_dataset

    fixed = {"x": InputSettings(shape=(2, 3))}
    artifact = DATA(
        store=store, calibration=None, evaluation=None, search=None, files=(), inputs=fixed, seed=0, samples=4
    )
    dataset = load_dataset(artifact, "verdict")
    assert batch_sizes(dataset) == ((2,) if dataset.batched else (1,))
