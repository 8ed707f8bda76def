"""Recording in MLflow: one parent and its children, once, never left running, with nothing secret in it."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.graph.layers import Error, LayerRow, LayerTable
from enginesmith.tasks.latency import Latency, LatencySession
from enginesmith.tasks.record import CompileRecord, record, record_failure, sweep
from enginesmith.tasks.record.facts import Process
from enginesmith.tasks.record.masking import mask
from enginesmith.tasks.record.names import original_name, safe_name
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

GOOD = Error(sqnr_db=60.0, rel_l2=1e-3, nonfinite=0.0)
BROKEN = Error(sqnr_db=-math.inf, rel_l2=math.inf, nonfinite=0.5)
TABLE = LayerTable(
    samples=64,
    end=BROKEN,
    rows=(
        LayerRow(index=0, name="conv", op="Conv", candidate=True, local=GOOD, end=GOOD, drop=0.001),
        LayerRow(index=1, name="sum", op="ReduceSum", candidate=True, local=BROKEN, end=BROKEN, drop=math.inf),
        LayerRow(index=2, name="shape", op="Shape", candidate=False, reason="no float data"),
    ),
)
PLAN = {"metric": "top1", "better": "higher", "samples": 64, "reference": 0.98, "max_drop": 0.01,
        "layer_drop": 0.02, "within_budget": True, "drop": 0.001, "stderr": None, "start_drop": "Infinity",
        "obstacles": [], "regions": [], "untested": [], "pins": [], "trials": [], "evaluations": 1, "limit": 9,
        "reranked": 0, "fp16_casts": 2, "mixed_casts": 4, "unmoved_casts": 4, "nodes": [
            {"name": "conv", "op": "Conv", "precision": "fp16", "half": True, "reason": "costs 0.001"},
            {"name": "sum", "op": "ReduceSum", "precision": "fp32", "half": False, "reason": "overflows"},
        ]}  # fmt: skip


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
        "probe": artifact(store, "probe", {"layers.json": TABLE.model_dump_json().encode()}),
        "fallback": artifact(
            store,
            "fallback",
            {"plan.json": json.dumps(PLAN).encode(), "fp16/model.onnx": b"half", "mixed/model.onnx": b"mixed"},
        ),
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


def test_the_commit_of_the_pipeline_file_is_a_tag(compiled: CompileRecord, uri: str) -> None:
    assert "git.commit" not in client(uri).get_run(record(compiled).run_id).data.tags
    folder = compiled.pipeline.folder
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", compiled.pipeline.path.name], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    failed = record_failure(compiled.pipeline, RuntimeError("x"), started=compiled.started)
    assert client(uri).get_run(failed.run_id).data.tags["git.commit"] == head
    compiled.pipeline.path.write_text(compiled.pipeline.path.read_text() + "\n")
    failed = record_failure(compiled.pipeline, RuntimeError("x"), started=compiled.started)
    assert client(uri).get_run(failed.run_id).data.tags["git.commit"] == f"{head}-dirty"


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


def test_names_that_mlflow_refuses_are_kept_reversibly() -> None:
    assert safe_name("mAP@0.5") == "mAP_x0040_0.5"
    assert safe_name("/conv1/Conv_output_0") == "_x002F_conv1_x002F_Conv_output_0"
    assert safe_name("model.onnx") == "model.onnx"
    assert safe_name("..") == "_x002E_."


@given(st.text(min_size=1))
def test_a_safe_name_is_a_path_component_and_gives_the_text_back(text: str) -> None:
    name = safe_name(text)
    assert original_name(name) == text
    assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
    assert name not in (".", "..")


@given(st.lists(st.sampled_from(["_", "x", "0040", "@", "F", "_x005F_", "00e4", "ä"]), min_size=1).map("".join))
def test_texts_that_look_like_escapes_are_escaped(text: str) -> None:
    assert original_name(safe_name(text)) == text


def test_params_of_odd_input_names_are_recorded(tmp_path: Path, compiled: CompileRecord, uri: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(PIPELINE.replace("  image:", '  "mAP@0.5:/x":').replace("pipeline", "odd"))
    done = record(replace(compiled, pipeline=load_pipeline(path)))
    params = client(uri).get_run(done.run_id).data.params
    assert params["inputs.mAP_x0040_0.5_x003A__x002F_x.dtype"] == "float32"


def test_external_data_lies_beside_its_model_and_the_model_loads(
    compiled: CompileRecord, store: Store, uri: str, tmp_path: Path
) -> None:
    weight = np.arange(4096, dtype=np.float32)
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", 1, [4096])], [value("y", 1, [4096])], [onnx.numpy_helper.from_array(weight, "w")]
    )
    folder = tmp_path / "onnx"
    folder.mkdir()
    onnx.save(
        onnx.helper.make_model(graph), folder / "model.onnx", save_as_external_data=True, location="model.onnx.data"
    )
    contents = {name: (folder / name).read_bytes() for name in ("model.onnx", "model.onnx.data")}
    exported = artifact(store, "export", contents, real=True)
    done = record(replace(compiled, artifacts={**compiled.artifacts, "export": exported}))
    place = Path(client(uri).download_artifacts(done.run_id, "export"))
    loaded = onnx.load(place / "model.onnx")
    assert np.array_equal(onnx.numpy_helper.to_array(loaded.graph.initializer[0]), weight)


def test_a_large_file_is_recorded_by_place_and_digest(compiled: CompileRecord, uri: str) -> None:
    done = record(compiled, copy_above_mb=0.0005)
    assert "slim/weights.safetensors" not in files(uri, done.run_id)
    fact = json.loads(
        Path(client(uri).download_artifacts(done.run_id, "slim/weights.safetensors.uri.json")).read_text()
    )
    assert fact["size"] == 1000
    assert fact["sha256"] == hashlib.sha256(b"w" * 1000).hexdigest()
    assert Path(fact["uri"].removeprefix("file://")).read_bytes() == b"w" * 1000


def test_tables_are_what_mlflow_draws_as_tables(compiled: CompileRecord, uri: str) -> None:
    done = record(compiled)
    parent = client(uri).get_run(done.run_id)
    logged = json.loads(parent.data.tags["mlflow.loggedArtifacts"])
    assert {"path": "variants.json", "type": "table"} in logged
    table = json.loads(Path(client(uri).download_artifacts(done.run_id, "variants.json")).read_text())
    assert set(table) == {"columns", "data"}  # as pandas writes a table with orient="split"
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["variant"], row["champion"]) for row in rows] == [("fp32", False), ("int8", True), ("fp16", False)]


def test_the_layer_table_says_which_nodes_stay_in_fp32_and_why(compiled: CompileRecord, uri: str) -> None:
    done = record(compiled)
    text = Path(client(uri).download_artifacts(done.run_id, "layers.json")).read_text()
    table = json.loads(text)
    rows = {row[1]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    assert set(rows) == {"conv", "sum"}
    assert rows["conv"]["precision"] == "fp16"
    assert (rows["sum"]["precision"], rows["sum"]["drop"], rows["sum"]["reason"]) == ("fp32", "inf", "overflows")
    svg = Path(client(uri).download_artifacts(done.run_id, "plots/layers.svg")).read_text()
    assert "kept in FP32 (1)" in svg


def test_a_deleted_database_is_recorded_again(compiled: CompileRecord, uri: str) -> None:
    record(compiled)
    Path(uri.removeprefix("sqlite:///")).unlink()
    assert record(compiled).created
    assert len(runs(uri)) == 1 + len(compiled.rows)


def test_a_run_whose_files_were_deleted_is_recorded_again(compiled: CompileRecord, uri: str) -> None:
    first = record(compiled)
    shutil.rmtree(Path(client(uri).get_run(first.run_id).info.artifact_uri.removeprefix("file://")) / "slim")
    assert record(compiled).created


def test_a_deleted_experiment_comes_back(compiled: CompileRecord, uri: str) -> None:
    first = record(compiled)
    client(uri).delete_experiment(first.experiment_id)
    assert record(compiled).experiment_id == first.experiment_id


def test_another_weight_setting_row_or_latency_is_another_compile(compiled: CompileRecord, tmp_path: Path) -> None:
    budget = tmp_path / "budget.yaml"
    budget.write_text(PIPELINE + "budget: {max_drop: 0.02}\n")
    place = tmp_path / "place.yaml"
    place.write_text(PIPELINE + "tracking: {uri: 'http://elsewhere:5000'}\n")
    faster = SESSION.model_copy(update={"started": "2026-12-02T02:01:00+00:00"})
    built_slower = tuple(row.model_copy(update={"build_s": 99.0}) for row in compiled.rows)
    assert replace(compiled, source_sha256="cd" * 32).digest != compiled.digest
    assert replace(compiled, pipeline=load_pipeline(budget)).digest != compiled.digest
    assert replace(compiled, rows=compiled.rows[:2]).digest != compiled.digest
    assert replace(compiled, sessions={"cpu": faster}).digest != compiled.digest
    assert replace(compiled, artifacts=dict(list(compiled.artifacts.items())[1:])).digest != compiled.digest
    assert replace(compiled, started=STARTED + timedelta(days=1), tags={}, rows=built_slower).digest == compiled.digest
    assert Pipeline(place, load_pipeline(place).settings).name == compiled.pipeline.name
    assert replace(compiled, pipeline=load_pipeline(place)).digest == compiled.digest


@pytest.mark.parametrize(
    ("method", "call", "error", "expected"),
    [
        ("create_run", 0, KeyboardInterrupt(), "KILLED"),  # the run is there, its id never arrived
        ("create_run", 1, KeyboardInterrupt(), "KILLED"),
        ("log_batch", 0, Interrupted("stopped"), "KILLED"),
        ("log_artifacts", 1, RuntimeError("broken"), "FAILED"),
        ("set_terminated", 0, KeyboardInterrupt(), "KILLED"),
    ],
)
def test_no_run_is_left_running_when_recording_stops(
    compiled: CompileRecord,
    uri: str,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: int,
    error: BaseException,
    expected: str,
) -> None:
    from mlflow import MlflowClient

    real: Callable[..., Any] = getattr(MlflowClient, method)
    calls = iter(range(1000))

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = None if method == "set_terminated" else real(self, *args, **kwargs)
        if next(calls) == call:
            raise error
        return real(self, *args, **kwargs) if method == "set_terminated" else result

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, method, interrupted)
        with pytest.raises(type(error)):
            record(compiled)
    statuses = [run.info.status for run in runs(uri)]
    assert statuses
    assert set(statuses) <= {expected, "FINISHED"}
    assert [r.info.status for r in runs(uri, "tags.enginesmith.kind = 'compile'")] == [expected]
    assert record(compiled).created


def test_an_artifact_that_lost_a_file_is_an_error_that_names_it(compiled: CompileRecord, uri: str) -> None:
    (compiled.artifacts["measure/cpu/int8"].path / "result.json").unlink()
    with pytest.raises(EnginesmithError, match=r"result\.json of the measure artifact"):
        record(compiled)
    assert {run.info.status for run in runs(uri)} <= {"FAILED", "FINISHED"}


def test_a_failed_compile_is_a_failed_run_with_its_error(pipeline: Pipeline, compiled: CompileRecord, uri: str) -> None:
    error = EnginesmithError("node 'Resize_1' is refused", where="model.py:12", hint="use nearest")
    done = record_failure(
        pipeline, error, started=STARTED, stage="export", source_sha256="ef" * 32, artifacts=compiled.artifacts
    )
    run = client(uri).get_run(done.run_id)
    assert (run.info.status, run.info.run_name) == ("FAILED", "efefefef failed in export")
    assert "node 'Resize_1' is refused" in run.data.tags["mlflow.note.content"]
    assert {"error.txt", "settings.yaml", "reports/slim.json"} <= files(uri, done.run_id)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped by the user")], ids=type)
def test_a_stopped_compile_is_a_killed_run(pipeline: Pipeline, uri: str, error: BaseException) -> None:
    done = record_failure(pipeline, error, started=STARTED)
    assert client(uri).get_run(done.run_id).info.status == "KILLED"


def test_a_failure_is_recorded_while_everything_is_asked_to_stop(pipeline: Pipeline, uri: str) -> None:
    progress.interrupt()
    try:
        assert record_failure(pipeline, RuntimeError("x"), started=STARTED).created
    finally:
        progress.reset()


def test_no_secret_reaches_the_database_or_a_file(
    compiled: CompileRecord, store: Store, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "tok-1234567890")
    path = tmp_path / "secret.yaml"
    path.write_text(
        PIPELINE.replace("{backend: onnxruntime}", "{backend: onnxruntime, options: {password: hunter2hunter2}}")
        + "tracking: {uri: 'https://me:pw-in-uri@host/x'}\n"
    )
    pipeline = load_pipeline(path)
    leaky = artifact(store, "export", {"findings.json": b'{"url": "https://me:pw-in-uri@host/x"}'})
    secret = {**compiled.artifacts, "export": leaky}
    tags = {"trigger": "https://me:pw-in-uri@host", "prefect.api_key": "hunter2hunter2"}
    record(replace(compiled, pipeline=pipeline, artifacts=secret, tags=tags), tracking_uri=uri)
    error = RuntimeError(f"cannot reach https://me:pw-in-uri@host from {Path.home()}/x: token tok-1234567890")
    failed = record_failure(pipeline, error, started=STARTED, tags=tags, tracking_uri=uri)
    root = tmp_path / "artifacts"
    written = {p: p.read_bytes() for p in [root / "mlflow.db", *(root / "mlruns").rglob("*")] if p.is_file()}
    assert len(written) > 20
    for secret_text in (b"pw-in-uri", b"hunter2hunter2", b"tok-1234567890"):
        assert [p for p, content in written.items() if secret_text in content] == []
    text = Path(client(uri).download_artifacts(failed.run_id, "error.txt")).read_text()
    assert text == "cannot reach https://***@host from ~/x: token ***\n"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://u:p%40ss@db:5432/x", "postgresql://***@db:5432/x"),
        ("https://token@host/x", "https://***@host/x"),
        ("s3://bucket/x?X-Amz-Signature=abc&part=1", "s3://bucket/x?X-Amz-Signature=***&part=1"),
        ("PASSWORD = 'a b c', next", "PASSWORD = ***, next"),
        ('{"api_key": "k"}', '{"api_key": ***}'),
        ("Authorization: Bearer abcdefghij", "Authorization: Bearer ***"),
        ("/home/alice/models/x.pt: bad", "~/models/x.pt: bad"),
        ("https://host/a@b.c", "https://host/a@b.c"),
        ("the tokenizer: fine", "the tokenizer: fine"),
        ("bypass=1", "bypass=1"),
    ],
)
def test_text_is_masked_where_it_is_secret_and_only_there(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_a_run_of_a_killed_process_is_swept(compiled: CompileRecord, uri: str, tmp_path: Path) -> None:
    script = f"""
        import os, signal
        from datetime import UTC, datetime
        from enginesmith.tasks.record.tracking import Span, connect
        now = datetime.now(UTC)
        with connect({uri!r}) as tracking:
            experiment = tracking.experiment("digits", lambda _: {{}})
            with tracking.run(experiment, "left", {{}}, Span(now, now)):
                os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [run.info.status for run in runs(uri)] == ["RUNNING"]
    assert sweep(uri) == 1
    assert [run.info.status for run in runs(uri)] == ["KILLED"]


def test_a_run_that_may_be_alive_is_not_swept(uri: str) -> None:
    me = Process.current()
    others = {
        "this process": me,
        "another host": replace(me, host="elsewhere", pid=1),
        "another container": replace(me, boot=me.boot.partition("/")[0] + "/pid:[1]", pid=999_999),
    }
    dead = {
        "its number was used again": replace(me, started="1"),
        "before a reboot": replace(me, boot="another-boot/pid:[1]"),
    }
    mlflow = client(uri)
    experiment = mlflow.create_experiment("digits")
    for name, process in {**others, **dead}.items():
        mlflow.create_run(experiment, run_name=name, tags={"enginesmith.process": f"{process} session"})
    assert sweep(uri) == len(dead)
    assert {r.info.run_name for r in runs(uri) if r.info.status == "RUNNING"} == set(others)


def test_sweeping_a_database_that_is_not_there_creates_none(tmp_path: Path) -> None:
    assert sweep(f"sqlite:///{tmp_path}/none.db") == 0
    assert not (tmp_path / "none.db").exists()


def test_processes_that_record_the_same_at_once_record_it_once(compiled: CompileRecord, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/fresh/mlflow.db"
    pickled = tmp_path / "compiled.pickle"
    pickled.write_bytes(pickle.dumps(compiled))
    script = f"""
        import pickle
        from pathlib import Path
        from enginesmith.tasks.record import record
        print(record(pickle.loads(Path({str(pickled)!r}).read_bytes()), tracking_uri={uri!r}).created)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=240)[0].strip() for process in started]
    assert sorted(said) == ["False", "True"]
    assert [run.info.status for run in runs(uri)] == ["FINISHED"] * (1 + len(compiled.rows))
    assert [p.name for p in (tmp_path / "fresh").iterdir() if p.name.startswith(".")] == []


def test_what_a_killed_creation_left_is_replaced(migrated: Path, compiled: CompileRecord, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    (tmp_path / ".mlflow.db-half").write_bytes(migrated.read_bytes()[:100_000])
    assert record(compiled, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db").created
    assert not (tmp_path / ".mlflow.db-half").exists()


def test_recording_writes_nothing_into_the_current_folder(
    compiled: CompileRecord, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    record(compiled)
    assert list(here.iterdir()) == []


def test_an_unreachable_server_is_an_error_within_seconds(compiled: CompileRecord) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(EnginesmithError, match="cannot be used") as caught:
        record(compiled, tracking_uri=f"http://me:secret@127.0.0.1:{port}")
    assert time.monotonic() - started < 15
    assert caught.value.key == "tracking.uri"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", [b"this is no database" * 100, None], ids=["garbage", "folder"])
def test_a_file_that_is_no_database_is_an_error_within_seconds(
    compiled: CompileRecord, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "other.db"
    if content is None:
        (path / "inside").mkdir(parents=True)
    else:
        path.write_bytes(content)
    started = time.monotonic()
    with pytest.raises(EnginesmithError, match="cannot be used") as caught:
        record(compiled, tracking_uri=f"sqlite:///{path}")
    assert time.monotonic() - started < 15
    assert caught.value.key == "tracking.uri"


def test_a_relative_database_is_refused(compiled: CompileRecord) -> None:
    with pytest.raises(EnginesmithError, match="not a SQLite file"):
        record(compiled, tracking_uri="sqlite:///mlflow.db")


def test_the_experiment_explains_itself_and_has_views_with_columns(compiled: CompileRecord, uri: str) -> None:
    done = record(compiled)
    tags = client(uri).get_experiment(done.experiment_id).tags
    view = json.loads(tags["mlflow.sharedViewState.enginesmith-fastest"])
    assert view["orderByKey"] == "metrics.`latency_p50_ms`"
    found = client(uri).search_runs([done.experiment_id], view["searchFilter"], order_by=["metrics.latency_p50_ms ASC"])
    assert [run.info.run_name for run in found] == ["cpu/int8", "cpu/fp32"]
    assert (
        f"/experiments/{done.experiment_id}/runs?viewStateShareKey=enginesmith-fastest" in tags["mlflow.note.content"]
    )


def test_importing_the_package_imports_no_mlflow() -> None:
    script = "import sys, enginesmith.tasks.record; assert not {'mlflow', 'matplotlib', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
