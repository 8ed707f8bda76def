"""Recording in MLflow: one parent and its children, once, never left running, with nothing secret in it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from enginesmith.tasks.latency import Latency, LatencySession
from enginesmith.tasks.record import CompileRecord, record
from enginesmith.tasks.settings import Pipeline, load_pipeline
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store
from enginesmith.tasks.table import VariantRow

STARTED = datetime(2026, 12, 1, 2, 0, tzinfo=UTC)
PIPELINE = """
model: {name: digits, checkpoint: digits.pt, factory: model:build}
inputs:
  image: {shape: [batch, 1, 8, 8], dims: {batch: {min: 1, opt: 8, max: 32}}}
data:
  metric: {call: metrics:top1}
targets:
  cpu: {backend: onnxruntime}
  rtx: {backend: tensorrt_rtx}
"""
SESSION = LatencySession(
    target="cpu",
    started="2026-12-01T02:01:00+00:00",
    host={"cpu": "a CPU"},
    load=(0.1, 0.2),
    latencies=(
        Latency(variant="int8", backend="onnxruntime", batch=8, runs=200, p50_ms=0.5, p90_ms=0.6, p99_ms=2.5,
                max_ms=3.0, throughput=16000.0, jitter=True),
    ),
    notes=("the machine was not quiet",),
)  # fmt: skip


class Report(BaseModel):
    seen: str = "yes"


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database: migrated once, copied by every test."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    from enginesmith.tasks.record.tracking import connect

    with connect(f"sqlite:///{database}"):
        pass
    return database


@pytest.fixture
def uri(migrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("ENGINESMITH_STORE", raising=False)
    (tmp_path / "artifacts").mkdir(exist_ok=True)
    shutil.copyfile(migrated, tmp_path / "artifacts" / "mlflow.db")
    return f"sqlite:///{tmp_path}/artifacts/mlflow.db"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "artifacts")


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    return load_pipeline(path)


def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def runs(uri: str, query: str = "") -> list[Any]:
    mlflow = client(uri)
    experiment = mlflow.get_experiment_by_name("digits")
    return [] if experiment is None else list(mlflow.search_runs([experiment.experiment_id], query))


def children(uri: str, parent: str) -> dict[str, Any]:
    return {r.info.run_name: r for r in runs(uri, f"tags.`mlflow.parentRunId` = '{parent}'")}


def files(uri: str, run: str, folder: str = "") -> set[str]:
    found: set[str] = set()
    for entry in client(uri).list_artifacts(run, folder or None):
        found |= files(uri, run, entry.path) if entry.is_dir else {entry.path}
    return found


def artifact(store: Store, stage: str, contents: dict[str, bytes], **inputs: object) -> Artifact:
    def write(out: Path, **_: object) -> Report:
        for name, content in contents.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content)
        return Report()

    return Stage(stage, version=1, run=write)(store=store, **{"contents": sorted(contents), **inputs})


def row(target: str, variant: str, **values: Any) -> VariantRow:
    backend = {"cpu": "onnxruntime", "rtx": "tensorrt_rtx"}[target]
    return VariantRow(target=target, backend=backend, variant=variant, **values)  # type: ignore[arg-type]


@pytest.fixture
def compiled(pipeline: Pipeline, store: Store) -> CompileRecord:
    fast = {"latency_p50_ms": 1.5, "latency_p99_ms": 2.5, "throughput": 5333.0, "batch": 8, "evidence": "engine"}
    rows = (
        row("cpu", "fp32", metric=0.98, drop=0.0, fp32_nodes=10, size_bytes=4_000_000, within_budget=True, **fast),
        row("cpu", "int8", metric=0.975, drop=0.005, int8_nodes=4, fp32_nodes=6, size_bytes=1_000_000,
            within_budget=True, build_s=0.5, **{**fast, "latency_p50_ms": 0.5}),
        row("rtx", "fp16", metric=float("nan"), drop=float("inf"), fp16_nodes=10, evidence="emulated",
            within_budget=False, notes=("built, not run: no RTX GPU",)),
    )  # fmt: skip
    made = {
        "slim": artifact(store, "slim", {"weights.safetensors": b"w" * 1000}),
        "simplify": artifact(store, "simplify", {"model.onnx": b"graph", "model.onnx.data": b"weights"}),
        "fallback": artifact(store, "fallback", {"fp16/model.onnx": b"half", "mixed/model.onnx": b"mixed"}),
        "build/cpu/fp32": artifact(store, "build", {"engine.json": b"{}", "model.onnx": b"engine 32"}, variant="fp32"),
        "build/cpu/int8": artifact(store, "build", {"engine.json": b"{}", "model.onnx": b"engine 8"}, variant="int8"),
        "measure/cpu/int8": artifact(store, "measure", {"result.json": b"{}"}, variant="int8"),
    }
    return CompileRecord(
        pipeline=pipeline,
        source_sha256="ab" * 32,
        artifacts=made,
        rows=rows,
        started=STARTED,
        finished=STARTED + timedelta(seconds=90),
        sessions={"cpu": SESSION},
        tags={"trigger": "manual"},
    )


def test_a_compile_is_one_parent_and_one_child_per_variant_and_target(compiled: CompileRecord, uri: str) -> None:
    done = record(compiled)
    parent = client(uri).get_run(done.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.info.run_name == "abababab cpu: int8, rtx: none"
    assert parent.data.tags["checkpoint.sha256"] == "ab" * 32
    assert parent.data.tags["trigger"] == "manual"
    assert parent.data.tags["champion.cpu"] == "int8"
    assert parent.data.tags["champion.rtx"] == "none"
    assert parent.data.params["budget.max_drop"] == "0.01"
    assert parent.data.params["inputs.image.shape"] == '["batch", 1, 8, 8]'
    assert "cpu: int8" in parent.data.tags["mlflow.note.content"]
    assert (parent.info.end_time - parent.info.start_time) == 90_000
    below = children(uri, done.run_id)
    assert set(below) == {"cpu/fp32", "cpu/int8", "rtx/fp16"}
    assert {child.info.status for child in below.values()} == {"FINISHED"}
    assert below["cpu/int8"].data.metrics == {
        "drop": 0.005, "metric": 0.975, "latency_p50_ms": 0.5, "latency_p99_ms": 2.5, "throughput": 5333.0,
        "size_mb": 1.0, "fp32_nodes": 6.0, "fp16_nodes": 0.0, "int8_nodes": 4.0, "build_s": 0.5,
    }  # fmt: skip
    assert below["cpu/int8"].data.tags["champion"] == "true"
    assert below["cpu/fp32"].data.tags["champion"] == "false"


def test_a_nan_metric_is_a_failed_verdict_and_no_number(compiled: CompileRecord, uri: str) -> None:
    child = children(uri, record(compiled).run_id)["rtx/fp16"]
    assert child.data.tags["verdict"] == "failed"
    assert child.data.tags["within_budget"] == "false"
    assert "metric" not in child.data.metrics
    assert "drop" not in child.data.metrics


def test_every_file_of_every_stage_has_a_folder_of_its_own(compiled: CompileRecord, uri: str) -> None:
    done = record(compiled)
    shared = files(uri, done.run_id)
    assert {"slim/weights.safetensors", "slim/report.json", "slim/manifest.json"} <= shared
    assert {"simplify/model.onnx", "simplify/model.onnx.data"} <= shared
    assert {"fallback/fp16/model.onnx", "fallback/mixed/model.onnx"} <= shared
    assert {
        "variants.json",
        "variants.md",
        "stages.json",
        "settings.yaml",
        "plots/pareto.svg",
        "latency/cpu.json",
    } <= shared
    below = children(uri, done.run_id)
    engines = {n: Path(client(uri).download_artifacts(below[n].info.run_id, "build/model.onnx")).read_bytes()
               for n in ("cpu/fp32", "cpu/int8")}  # fmt: skip
    assert engines == {"cpu/fp32": b"engine 32", "cpu/int8": b"engine 8"}
    assert {"measure/result.json"} <= files(uri, below["cpu/int8"].info.run_id)


def test_the_same_compile_is_recorded_once(compiled: CompileRecord, uri: str) -> None:
    first = record(compiled)
    later = replace(compiled, started=STARTED + timedelta(days=1), tags={"trigger": "nightly"})
    second = record(later)
    assert (second.run_id, second.created, first.created) == (first.run_id, False, True)
    assert len(runs(uri)) == 1 + len(compiled.rows)
