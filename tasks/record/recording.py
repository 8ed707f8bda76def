"""Turns a compile into MLflow runs: one parent, one child per variant and target, every file, and a verdict.

A compile is recorded once. Its digest covers everything recorded except places and times, and is kept in the parent's
tag ``enginesmith.digest``; a compile with the same digest finds the finished run and writes nothing.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from enginesmith.tasks import plots, progress
from enginesmith.tasks.graph.layers import LAYERS, LayerTable, load_layers
from enginesmith.tasks.graph.plan import NodeRow, load_plan
from enginesmith.tasks.hardware import this_host
from enginesmith.tasks.record.facts import git_commit, hardware, versions
from enginesmith.tasks.record.files import staged
from enginesmith.tasks.record.masking import MASK, is_secret, mask, mask_data, mask_uris
from enginesmith.tasks.record.names import safe_name
from enginesmith.tasks.record.tracking import Span, Tracking, connect, status_of, sweep_through
from enginesmith.tasks.record.views import experiment_tags, run_path
from enginesmith.tasks.settings import Pipeline
from enginesmith.tasks.stage import digest_of
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.table import VariantRow, Verdict, as_markdown, choose_champions, json_rows

if TYPE_CHECKING:
    from enginesmith.tasks.latency import LatencySession

SCHEMA = 1
DIGEST = "enginesmith.digest"
KIND = "enginesmith.kind"
COPY_ABOVE_MB = 512.0

_LONGEST_PARAM = 6000  # MLflow's own limits
_LONGEST_KEY = 250
_LONGEST_TAG = 8000
_BATCH = 100


@dataclass(frozen=True)
class CompileRecord:
    """A compile as it is to be recorded.

    Attributes:
        pipeline: the pipeline file: the model's name, the settings, where MLflow is.
        source_sha256: digest of the checkpoint.
        artifacts: by label: the name of the stage; ``build/TARGET/VARIANT`` and ``measure/TARGET/VARIANT``.
        rows: the table.
        sessions: by target, the session in which its engines were timed.
        started: when the compile began.
        finished: when it ended.
        tags: what set it off and where: ``trigger``, ``prefect.flow_run_id``, ``git.commit``, …
    """

    pipeline: Pipeline
    source_sha256: str
    artifacts: Mapping[str, Artifact]
    rows: tuple[VariantRow, ...]
    started: datetime
    finished: datetime
    sessions: Mapping[str, LatencySession] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of everything recorded but places, times and what set the compile off."""
        return digest_of(
            {
                "schema": SCHEMA,
                "model": self.pipeline.name,
                "settings": _settings(self.pipeline, places=False),
                "source": self.source_sha256,
                "artifacts": {label: [a.key, a.digest] for label, a in sorted(self.artifacts.items())},
                "rows": [{name: v for name, v in row.items() if name != "build_s"} for row in json_rows(self.rows)],
                "sessions": {name: seen.model_dump(mode="json") for name, seen in sorted(self.sessions.items())},
                "versions": versions(),
                "hardware": this_host().identity(),
            }
        )


@dataclass(frozen=True)
class Recorded:
    """Where MLflow keeps a compile.

    Attributes:
        run_id: the parent run.
        experiment_id: the model's experiment.
        url: the run's page; for a database, once `command` runs.
        command: what opens it; empty when the server runs already.
        created: whether this call created the run; False when the same compile was recorded before.
    """

    run_id: str
    experiment_id: str
    url: str
    command: str
    created: bool


def record(
    compiled: CompileRecord,
    *,
    tracking_uri: str | None = None,
    artifacts: Path | None = None,
    copy_above_mb: float = COPY_ABOVE_MB,
) -> Recorded:
    """Record a finished compile, once.

    Runs that a killed process of this host left RUNNING in the same MLflow are marked KILLED on the way.

    Args:
        compiled: what to record.
        tracking_uri: MLflow's address; by default the pipeline's.
        artifacts: folder for artifacts, where no MLflow server decides; by default ``mlruns`` beside the database.
        copy_above_mb: larger files are recorded by place and digest instead of copied; MB of 10^6 bytes.

    Raises:
        EnginesmithError: MLflow cannot be reached or refuses (key tracking.uri), or an artifact's file is gone. The
            runs begun are marked FAILED, or KILLED when the user stopped the program.
    """
    uri = tracking_uri or compiled.pipeline.tracking_uri
    turn = compiled.pipeline.store_root / "locks" / "record"  # by store: the same artifacts are the same compile
    with connect(uri, artifacts=_artifact_root(compiled.pipeline, uri, artifacts), turn=turn) as tracking:
        sweep_through(tracking)
        experiment = tracking.experiment(compiled.pipeline.name, experiment_tags)
        digest = compiled.digest
        found = _finished(tracking, experiment, digest, compiled)
        if found:
            return _recorded(uri, experiment, found, created=False)
        run = _record(tracking, experiment, compiled, digest, copy_above_mb)
        return _recorded(uri, experiment, run, created=True)


def record_failure(
    pipeline: Pipeline,
    error: BaseException,
    *,
    started: datetime,
    stage: str = "",
    source_sha256: str = "",
    artifacts: Mapping[str, Artifact] | None = None,
    tags: Mapping[str, str] | None = None,
    tracking_uri: str | None = None,
) -> Recorded:
    """Record that a compile failed or was stopped: a run marked FAILED or KILLED with the error's text.

    Args:
        pipeline: the pipeline file.
        error: what ended the compile.
        started: when it began.
        stage: the stage in which it ended, where that is known.
        source_sha256: digest of the checkpoint, where it was read.
        artifacts: what had been made by then; their reports are kept, not their files.
        tags: as in `CompileRecord`.
        tracking_uri: MLflow's address; by default the pipeline's.

    Raises:
        EnginesmithError: MLflow cannot be reached, refuses, or is busy for half a minute.
    """
    uri = tracking_uri or pipeline.tracking_uri
    finished = datetime.now(UTC)
    word = "stopped" if status_of(error) == "KILLED" else "failed"
    verdict = f"{word} in {stage}" if stage else word
    text = mask(str(error).strip() or type(error).__name__)
    all_tags = {
        **_parent_tags(pipeline, source_sha256, tags or {}),
        "verdict": verdict,
        "error": f"{type(error).__name__}: {text.splitlines()[0]}",
        "mlflow.note.content": f"**{verdict.capitalize()}**\n\n```\n{text}\n```\n",
    }
    reports = {
        f"reports/{safe_name(label)}.json": json.dumps(mask_data(artifact.report), indent=1) + "\n"
        for label, artifact in (artifacts or {}).items()
    }
    with connect(uri, artifacts=_artifact_root(pipeline, uri, None), patience=30) as tracking:
        experiment = tracking.experiment(pipeline.name, experiment_tags)
        span = Span(started, finished)
        with tracking.run(
            experiment, _run_name(source_sha256, verdict), _tags(all_tags), span, status=status_of(error)
        ) as run:
            _log_params(tracking, run, _settings(pipeline))
            files = {"error.txt": text + "\n", "settings.yaml": _settings_text(pipeline), **reports}
            with staged({}, files, copy_above_mb=COPY_ABOVE_MB) as folder:
                tracking.client.log_artifacts(run, str(folder))
        return _recorded(uri, experiment, run, created=True)


def _record(tracking: Tracking, experiment: str, compiled: CompileRecord, digest: str, copy_above_mb: float) -> str:
    pipeline = compiled.pipeline
    rows, verdicts = choose_champions(compiled.rows)
    own, shared = _split(compiled)
    table = load_layers(shared["probe"].path) if "probe" in shared else None
    plan = load_plan(shared["fallback"].path) if "fallback" in shared else None
    nodes = {node.name: node for node in plan.nodes} if plan else {}
    tables = {
        "variants.json": json_rows(rows),
        "stages.json": _stage_rows(compiled),
        LAYERS: _layer_rows(table, nodes),
    }
    tables = {name: content for name, content in tables.items() if content}
    tags = {
        **_parent_tags(pipeline, compiled.source_sha256, compiled.tags),
        DIGEST: digest,
        "mlflow.loggedArtifacts": json.dumps([{"path": name, "type": "table"} for name in tables]),
        "verdict": ", ".join(f"{v.target}: {v.champion or 'none'}" for v in verdicts),
        **{f"champion.{v.target}": v.champion or "none" for v in verdicts},
        "mlflow.note.content": _note(pipeline, rows, verdicts),
    }
    name = _run_name(compiled.source_sha256, tags["verdict"])
    span = Span(compiled.started, compiled.finished)
    with (
        progress.track("record", total=len(rows) + 1) as bar,
        tracking.run(experiment, name, _tags(tags), span) as parent,
    ):
        _log_params(tracking, parent, _settings(pipeline))
        texts = {
            "settings.yaml": _settings_text(pipeline),
            "variants.md": _note(pipeline, rows, verdicts),
            **{name: _table(content) for name, content in tables.items()},
            **{f"latency/{name}.json": seen.model_dump_json(indent=1) for name, seen in compiled.sessions.items()},
            **_plots(rows, table, nodes, pipeline),
        }
        with staged(shared, texts, copy_above_mb=copy_above_mb) as folder:
            tracking.client.log_artifacts(parent, str(folder))
        bar.advance()
        for row in rows:
            child = {**_variant_tags(row), "mlflow.parentRunId": parent, **_checkpoint(compiled.source_sha256)}
            with tracking.run(experiment, row.name, _tags(child), span) as run:
                _log_variant(tracking, run, row, compiled)
                with staged(own.get(row.name, {}), {}, copy_above_mb=copy_above_mb) as folder:
                    tracking.client.log_artifacts(run, str(folder))
            bar.advance()
    return parent


def _split(compiled: CompileRecord) -> tuple[dict[str, dict[str, Artifact]], dict[str, Artifact]]:
    """Artifacts of single variants by ``TARGET/VARIANT`` and stage, and those of the whole compile by stage."""
    names = {row.name for row in compiled.rows}
    own: dict[str, dict[str, Artifact]] = {}
    shared: dict[str, Artifact] = {}
    for label, artifact in compiled.artifacts.items():
        stage, _, name = label.partition("/")
        if name in names:
            own.setdefault(name, {})[stage] = artifact
        else:
            shared[label] = artifact
    return own, shared


def _log_variant(tracking: Tracking, run: str, row: VariantRow, compiled: CompileRecord) -> None:
    from mlflow.entities import Metric

    moment = int(compiled.finished.timestamp() * 1000)
    values = {
        "drop": row.drop,
        "drop_stderr": row.drop_stderr,
        "metric": row.metric,
        "latency_p50_ms": row.latency_p50_ms,
        "latency_p99_ms": row.latency_p99_ms,
        "throughput": row.throughput,
        "size_mb": None if row.size_bytes is None else row.size_bytes / 1e6,
        "fp32_nodes": row.fp32_nodes,
        "fp16_nodes": row.fp16_nodes,
        "int8_nodes": row.int8_nodes,
        "build_s": row.build_s,
    }
    metrics = [Metric(n, float(v), moment, 0) for n, v in values.items() if v is not None and math.isfinite(v)]
    tracking.client.log_batch(run, metrics=metrics)


def _variant_tags(row: VariantRow) -> dict[str, str]:
    return {
        KIND: "variant",
        "target": row.target,
        "backend": row.backend,
        "variant": row.variant,
        "evidence": row.evidence,
        "within_budget": "unknown" if row.within_budget is None else str(row.within_budget).lower(),
        "champion": str(row.champion).lower(),
        "verdict": row.verdict,
        "mlflow.note.content": "\n".join(f"- {note}" for note in row.notes),
    }


def _parent_tags(pipeline: Pipeline, source_sha256: str, given: Mapping[str, str]) -> dict[str, str]:
    return {
        KIND: "compile",
        **_checkpoint(source_sha256),
        "pipeline.sha256": digest_of(_settings(pipeline, places=False)),
        "mlflow.source.name": f"enginesmith compile {pipeline.path.name}",
        "mlflow.source.type": "LOCAL",
        "git.commit": git_commit(pipeline.folder),
        **{f"version.{tool}": version for tool, version in versions().items()},
        **{f"hardware.{name}": value for name, value in hardware().items()},
        **{str(name): MASK if is_secret(name) else mask(str(value)) for name, value in given.items()},
    }


def _checkpoint(sha256: str) -> dict[str, str]:
    return {"checkpoint": sha256[:8], "checkpoint.sha256": sha256}


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags with names and lengths that MLflow takes, the empty ones left out."""
    return {_key(name): _cut(value, _LONGEST_TAG) for name, value in tags.items() if value}


def _log_params(tracking: Tracking, run: str, settings: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    params = [Param(_key(name), _cut(value, _LONGEST_PARAM)) for name, value in _flat(settings).items()]
    for start in range(0, len(params), _BATCH):
        tracking.client.log_batch(run, params=params[start : start + _BATCH])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows in the form of `mlflow.log_table`, which MLflow's UI draws; columns in order of appearance.

    (`log_table` itself imports pandas, and reads the whole artifact folder first.)
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    data = [[_cell(row.get(column)) for column in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, allow_nan=False) + "\n"


def _cell(value: object) -> object:
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if isinstance(value, Mapping):
        return json.dumps(value)
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _layer_rows(table: LayerTable | None, plan: Mapping[str, NodeRow]) -> list[dict[str, Any]]:
    """The layer table with one figure per column and the plan's decision; nodes that could be FP16 only."""
    return [
        {
            "index": row.index,
            "node": row.name,
            "op": row.op,
            "precision": plan[row.name].precision if row.name in plan else "",
            "drop": row.drop,
            "drop_stderr": row.stderr,
            "local_rel_l2": row.local.rel_l2 if row.local else None,
            "end_rel_l2": row.end.rel_l2 if row.end else None,
            "cumulative_rel_l2": row.cumulative.rel_l2 if row.cumulative else None,
            "absmax": row.outputs.absmax if row.outputs else None,
            "overflow": row.outputs.overflow if row.outputs else None,
            "subnormal": row.outputs.subnormal if row.outputs else None,
            "vanish": row.outputs.vanish if row.outputs else None,
            "lossy_constants": [constant.name for constant in row.lossy],
            "module": row.module,
            "reason": plan[row.name].reason if row.name in plan else "",
        }
        for row in (table.candidates if table else ())
    ]


def _plots(
    rows: Sequence[VariantRow], table: LayerTable | None, plan: Mapping[str, NodeRow], pipeline: Pipeline
) -> dict[str, str]:
    """The plots by path."""
    settings = pipeline.settings
    found = {"plots/pareto.svg": plots.pareto_plot(rows, max_drop=settings.budget.max_drop, title=pipeline.name)}
    if table is not None:
        found["plots/layers.svg"] = plots.layer_plot(
            plots.layer_points(table, {name for name, node in plan.items() if node.precision == "fp32"}),
            title=f"{pipeline.name}: what FP16 does to each node ({table.samples} samples)",
            layer_drop=settings.precision.fp16.layer_drop,
        )
    return found


def _stage_rows(compiled: CompileRecord) -> list[dict[str, Any]]:
    return [
        {
            "stage": label,
            "seconds": artifact.seconds,
            "cached": artifact.cached,
            "size_mb": round(artifact.size / 1e6, 3),
            "key": artifact.key,
            "digest": artifact.digest,
        }
        for label, artifact in compiled.artifacts.items()
    ]


def _settings(pipeline: Pipeline, *, places: bool = True) -> dict[str, Any]:
    """The settings as JSON data, secrets masked; without `places`, what is not content is left out."""
    data = pipeline.settings.model_dump(mode="json", exclude=None if places else {"store", "tracking"})
    masked = mask_data(data)
    assert isinstance(masked, dict)  # noqa: S101 - as a mapping goes in
    return masked


def _settings_text(pipeline: Pipeline) -> str:
    return yaml.safe_dump(_settings(pipeline), sort_keys=False, allow_unicode=True)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted key; lists as JSON, absent values as empty text."""
    flat: dict[str, str] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{key}.")
        elif value is None:
            flat[key] = ""
        else:
            flat[key] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _key(name: str) -> str:
    """A name that MLflow takes; one too long for it is cut, and told apart by its digest."""
    safe = safe_name(name)
    return safe if len(safe) <= _LONGEST_KEY else f"{safe[: _LONGEST_KEY - 13]}-{digest_of(name)[:12]}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _run_name(source_sha256: str, verdict: str) -> str:
    """Which checkpoint, and what became of it: the list of runs shows little more than twenty characters."""
    return f"{source_sha256[:8]} {verdict}".strip()


def _note(pipeline: Pipeline, rows: Sequence[VariantRow], verdicts: Sequence[Verdict]) -> str:
    settings = pipeline.settings
    lines = [
        f"**{v.target}: {v.champion}**, {v.reason}" if v.champion else f"**{v.target}: no champion**, {v.reason}"
        for v in verdicts
    ]
    metric = settings.data.metric
    judged = f"Metric `{metric.call}`, {metric.better} is better; budget: a drop of {settings.budget.max_drop:g}."
    return "\n\n".join([*lines, as_markdown(rows, metric=_metric_name(pipeline)), judged]) + "\n"


def _metric_name(pipeline: Pipeline) -> str:
    """What the metric's column is headed: the function's name."""
    return pipeline.settings.data.metric.call.rpartition(":")[2]


def _finished(tracking: Tracking, experiment: str, digest: str, compiled: CompileRecord) -> str | None:
    """The finished run of this digest whose files are still there."""
    query = f"tags.`{DIGEST}` = '{digest}' and attributes.status = 'FINISHED'"
    expected = {label.partition("/")[0] for label in _split(compiled)[1]}
    for run in tracking.client.search_runs([experiment], query):
        there = {file.path for file in tracking.client.list_artifacts(run.info.run_id)}
        if expected <= there:
            return str(run.info.run_id)
    return None


def _artifact_root(pipeline: Pipeline, uri: str, given: Path | None) -> Path | None:
    """Where artifacts of a database's experiments go: beside SQLite, else into the store; http servers decide alone."""
    if given is not None or uri.startswith(("http://", "https://", "sqlite:")):
        return given
    return pipeline.store_root / "mlruns"


def _recorded(uri: str, experiment: str, run: str, *, created: bool) -> Recorded:
    served = uri.startswith("http")
    base = mask_uris(uri).rstrip("/") if served else "http://127.0.0.1:5000"
    url = f"{base}/#{run_path(experiment, run)}"
    return Recorded(run, experiment, url, "" if served else _command(uri), created)


def _command(uri: str) -> str:
    """The command that serves a database; background jobs, of which there are none, double its start-up time."""
    program = Path(sys.executable).with_name("mlflow")
    shown = [str(program) if program.exists() else "mlflow", "ui", "--backend-store-uri", mask_uris(uri)]
    return "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false " + shlex.join(shown)
