"""Turns the FP32 graph into one with cheaper activations where the metric allows it: the stage `approximate`.

It runs only when `precision.cheap_activations` is set. The fp32 variant and the reference keep the exact form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from enginesmith.tasks import progress
from enginesmith.tasks.data import Dataset, load_dataset
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.gelu import Gelu, cheapen, difference, find_gelus
from enginesmith.tasks.graph.layers import Figure
from enginesmith.tasks.metric import Drop, MetricRef, load_metric, load_outputs, load_score
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import BudgetSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact

CONFIDENCE = 1.645
"""Standard errors that are added to a drop before it is held to its limit: one-sided 95 % of a normal distribution."""

SHARE = 0.5
"""Share of the budget that activations may use: the other half is for FP16 and INT8, which come on top."""

_CALIBRATION = 32


class ActivationRow(BaseModel):
    """One GELU, and what became of it.

    Attributes:
        node: the node that puts out its result.
        form: `erf` or `tanh`.
        nodes: how many nodes it took; the cheaper form takes three.
        error: largest difference of the cheaper form on the calibration samples.
        alone_drop: the metric's drop on the search set with this one alone replaced; None where all together did.
        kept: whether the cheaper form stays.
        reason: why.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    node: str
    form: str
    nodes: int
    error: Figure
    alone_drop: Figure | None
    kept: bool
    reason: str


class ApproximateReport(BaseModel):
    """What the stage did.

    Attributes:
        limit: the largest drop that it held itself to.
        drop: the metric's drop on the search set with what was kept.
        stderr: its paired standard error.
        rows: one per GELU.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    limit: float
    drop: Figure
    stderr: float | None
    rows: tuple[ActivationRow, ...]


def approximate(
    out: Path, *, model: Artifact, data: Artifact, reference: Artifact, metric: MetricRef, budget: BudgetSettings
) -> ApproximateReport:
    """Replace GELUs by x·sigmoid(1.702·x) as long as the metric's drop on the search set stays within half the budget.

    All together first; when that costs too much, each alone, then one after the other by rising drop, each kept only
    when the drop of all that are kept stays within the limit. A drop counts with 95 % confidence.

    Raises:
        EnginesmithError: the model cannot be run, or the metric fails on finite outputs.
    """
    source = io.load(model.path)
    gelus = find_gelus(source)
    search = load_dataset(data, "search")
    outputs, score = load_outputs(reference, "search"), load_score(reference, "search")
    ready = load_metric(metric, reference)
    errors = _errors(source, gelus, load_dataset(data, "calibration"))
    limit = SHARE * budget.max_drop

    def drop(chosen: Sequence[str]) -> Drop:
        with OnnxRunner(cheapen(source, chosen)) as runner, progress.track("approximate", total=len(search)) as bar:
            found = runner.predict(search, bar=bar)
        return ready.drop(score, ready(found, search, outputs))

    kept, measured, alone = _choose([g.node for g in gelus], drop, limit)
    io.save(cheapen(source, kept) if kept else source, out)
    rows = [_row(gelu, errors[gelu.node], alone.get(gelu.node), gelu.node in kept, limit) for gelu in gelus]
    return ApproximateReport(limit=limit, drop=measured.value, stderr=measured.stderr, rows=tuple(rows))


APPROXIMATE = Stage("approximate", version=1, run=approximate, tools=("numpy", "onnx", "onnx-ir", "onnxruntime"))


def _choose(
    names: Sequence[str], drop: Callable[[Sequence[str]], Drop], limit: float
) -> tuple[list[str], Drop, dict[str, Drop]]:
    """Which to replace, the drop of that choice, and the drops of each alone where they were needed."""
    nothing = Drop(0.0, 0.0)
    if not names:
        return [], nothing, {}
    together = drop(names)
    if _within(together, limit):
        return list(names), together, {}
    alone = {name: drop([name]) for name in names}
    kept: list[str] = []
    measured = nothing
    for name in sorted(names, key=lambda n: alone[n].value):
        tried = alone[name] if not kept else drop([*kept, name])
        if _within(tried, limit):
            kept.append(name)
            measured = tried
    return kept, measured, alone


def _within(drop: Drop, limit: float) -> bool:
    return bool(drop.value + CONFIDENCE * (drop.stderr or 0.0) <= limit)


def _errors(model: ir.Model, gelus: Sequence[Gelu], dataset: Dataset) -> dict[str, float]:
    """The largest difference of the cheaper form from each GELU on its inputs in the first calibration samples."""
    if not gelus:
        return {}
    copy = model.clone()
    found = find_gelus(copy)
    for value in {gelu.source for gelu in found}:
        if not value.is_graph_output() and not value.is_graph_input():
            copy.graph.outputs.append(value)
    worst = dict.fromkeys((gelu.node for gelu in found), 0.0)
    with OnnxRunner(copy) as runner:
        for feed, _ in dataset.take(slice(0, min(_CALIBRATION, len(dataset)))).feeds():
            seen = {**feed, **runner.run(feed)}
            for gelu in found:
                x = np.asarray(seen[str(gelu.source.name)], dtype=np.float64).reshape(-1)
                worst[gelu.node] = max(worst[gelu.node], difference(x, gelu.form))
    return worst


def _row(gelu: Gelu, error: float, alone: Drop | None, kept: bool, limit: float) -> ActivationRow:
    if kept:
        reason = f"the drop with all that are kept stays within {limit:g} with 95 % confidence"
    else:
        value = "no value" if alone is None else f"{alone.value:.4g} alone"
        reason = f"refused: its drop is {value}, and with what is kept it exceeds {limit:g} with 95 % confidence"
    return ActivationRow(
        node=gelu.node,
        form=gelu.form,
        nodes=gelu.nodes,
        error=error,
        alone_drop=None if alone is None else alone.value,
        kept=kept,
        reason=reason,
    )
