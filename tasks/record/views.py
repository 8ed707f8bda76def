"""Turns an experiment into what a person finds on opening it: an explanation, and views with the right columns.

MLflow's UI shows no metric columns by itself. It keeps a shared view as JSON in the experiment's tag
``mlflow.sharedViewState.KEY``, and opens it under ``…/runs?viewStateShareKey=KEY``.
"""

from __future__ import annotations

import json

_NOTE = """\
One run per compile, and inside it one run per target and variant. The fastest variant within budget is the target's
champion.

| column | meaning |
|---|---|
| `drop`, `drop_stderr` | how much worse than FP32, in the metric's unit, positive is worse; its paired standard error |
| `metric` | the metric itself, on the same verdict half of the data |
| `latency_p50_ms`, `latency_p99_ms` | milliseconds per call, where the engine really executes that precision |
| `throughput` | samples per second of the same calls |
| `size_mb` | the engine's files, 10^6 bytes |
| `fp32_nodes`, `fp16_nodes`, `int8_nodes` | nodes that compute in each precision |
| `build_s` | seconds that the build took |

Views: [fastest within budget]({fastest}), [all variants]({variants}), [champions]({champions}),
[compiles]({compiles}).
"""

_METRICS = ("drop", "latency_p50_ms", "latency_p99_ms", "metric", "size_mb", "throughput")
# Sorted by anything but time, the UI lists variants by themselves; else it hides them inside their compiles.
_FASTEST = {"orderByKey": "metrics.`latency_p50_ms`", "orderByAsc": True}
_VIEWS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "fastest": ('tags.evidence = "engine" and tags.within_budget = "true"', _FASTEST, ("checkpoint", "verdict")),
    "variants": (
        'tags.enginesmith.kind = "variant"',
        {"orderByKey": "metrics.`drop`", "orderByAsc": True},
        ("checkpoint", "evidence", "verdict"),
    ),
    "champions": (
        'tags.champion = "true"',
        {"orderByKey": "tags.`target`", "orderByAsc": True},
        ("checkpoint", "target", "variant"),
    ),
    "compiles": ('tags.enginesmith.kind = "compile"', {}, ("checkpoint", "trigger", "verdict")),
}


def experiment_tags(experiment: str) -> dict[str, str]:
    """The tags of an experiment of this id: its note and its views."""
    links = {name: f"#{view_path(experiment, name)}" for name in _VIEWS}
    return {
        "mlflow.note.content": _NOTE.format(**links),
        "mlflow.experimentKind": "custom_model_development",
        **{f"mlflow.sharedViewState.enginesmith-{name}": _state(*view) for name, view in _VIEWS.items()},
    }


def view_path(experiment: str, view: str) -> str:
    """Path of a view behind the ``#`` of MLflow's address: fastest, variants, champions, compiles.

    Without the workflow type the UI opens on its other face, made for language models.
    """
    return f"/experiments/{experiment}/runs?viewStateShareKey=enginesmith-{view}&workflowType=machine_learning"


def run_path(experiment: str, run: str) -> str:
    """Path of a run's page behind the ``#`` of MLflow's address."""
    return f"/experiments/{experiment}/runs/{run}?workflowType=machine_learning"


def _state(query: str, order: dict[str, object], tags: tuple[str, ...]) -> str:
    columns = [*(f"metrics.`{metric}`" for metric in _METRICS), *(f"tags.`{tag}`" for tag in tags)]
    return json.dumps({"searchFilter": query, **order, "selectedColumns": columns})
