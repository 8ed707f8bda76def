"""Turns a variant into its verdict: the user's metric on the verdict half, once, by the strongest evidence there is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.backends import engine_errors, find_backend, refused
from enginesmith.tasks.data import load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.half import emulate
from enginesmith.tasks.metric import Drop, MetricRef, Score, load_metric, load_outputs, load_score
from enginesmith.tasks.runner import OnnxRunner, predict
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact

RESULT = "result.json"
SCORES = "scores.npz"

Evidence = Literal["engine", "emulated", "none"]


class Result(BaseModel):
    """The verdict on one variant, result.json.

    Attributes:
        evidence: what gave the value: the built engine; the variant's graph run on the CPU with every FP16 rounding
            made explicit; or nothing, when that graph cannot be run either.
        value: the metric on the verdict set; None when it failed or nothing ran.
        reference: the FP32 model's value on the same set.
        drop: how much worse than FP32, in the metric's unit, positive when worse; None when it failed or nothing ran.
        stderr: paired standard error of the drop; None when the metric has no per-sample scores.
        within_noise: whether the drop is at most two standard errors from zero; None without a standard error.
        failed: whether the metric or an output was NaN: never within budget.
        samples: size of the verdict set.
        reason: why there is no evidence, empty when there is.
    """

    evidence: Evidence
    value: float | None
    reference: float
    drop: float | None
    stderr: float | None
    within_noise: bool | None
    failed: bool
    samples: int
    reason: str = ""


def measure_variant(
    out: Path,
    *,
    model: Artifact,
    engine: Artifact | None,
    backend: str | None,
    data: Artifact,
    reference: Artifact,
    metric: MetricRef,
) -> Result:
    """Compute the metric of one variant on the verdict set.

    Args:
        out: empty folder; receives result.json and scores.npz (``variant`` and ``reference``, float64 per sample; no
            arrays when the metric has no per-sample scores).
        model: the variant's ONNX artifact.
        engine: its engine, when the backend executes the variant's precision on this host; None to emulate, as is
            done when the backend refused the model.
        backend: the engine's backend; None to emulate.
        data: the data artifact.
        reference: the FP32 model's outputs and scores.
        metric: the user's metric.

    Raises:
        EnginesmithError: the engine cannot be loaded on this host, or the metric does not accept the outputs.
    """
    dataset = load_dataset(data, "verdict")
    baseline = load_score(reference, "verdict")
    judge = load_metric(metric, reference)
    with progress.track("measure", total=len(dataset)) as bar:
        if engine is not None and backend is not None and not refused(engine):
            evidence: Evidence = "engine"
            with engine_errors(), find_backend(backend).load(engine.path) as loaded:
                outputs = predict(loaded.run, dataset, bar=bar)
        else:
            evidence = "emulated"
            runner, reason = _emulation(model)
            if runner is None:
                return _write(out, "none", None, None, baseline, len(dataset), reason)
            with runner:
                outputs = runner.predict(dataset, bar=bar)
    score = judge(outputs, dataset, load_outputs(reference, "verdict"))
    return _write(out, evidence, score, judge.drop(baseline, score), baseline, len(dataset), "")


MEASURE = Stage("measure", version=1, run=measure_variant, tools=("numpy", "onnxruntime"))


def load_result(measured: Artifact) -> Result:
    """The verdict in a measure artifact."""
    return Result.model_validate_json((measured.path / RESULT).read_text())


def _emulation(model: Artifact) -> tuple[OnnxRunner | None, str]:
    """The variant's graph ready to run on the CPU; or why it cannot be."""
    try:
        return OnnxRunner(emulate(io.load(model.path / io.MODEL))), ""
    except EnginesmithError as error:
        return None, f"the graph cannot be emulated: {error.found}"


def _write(
    out: Path,
    evidence: Evidence,
    score: Score | None,
    drop: Drop | None,
    baseline: Score,
    samples: int,
    reason: str,
) -> Result:
    value = _finite(score.value) if score else None
    fall = _finite(drop.value) if drop else None
    stderr = _finite(drop.stderr) if drop and drop.stderr is not None else None
    result = Result(
        evidence=evidence,
        value=value,
        reference=baseline.value,
        drop=fall,
        stderr=stderr,
        within_noise=None if fall is None or stderr is None else abs(fall) <= 2 * stderr,
        failed=score is not None and (value is None or fall is None),
        samples=samples,
        reason=reason,
    )
    (out / RESULT).write_text(result.model_dump_json(indent=1) + "\n")
    arrays = {
        name: found.samples
        for name, found in (("variant", score), ("reference", baseline))
        if found is not None and found.samples is not None
    }
    np.savez(out / SCORES, allow_pickle=False, **arrays)
    return result


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
