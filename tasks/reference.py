"""Turns the FP32 graph and the data into what every variant is compared with: outputs, scores, the metric's state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.data import Array, Which, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.metric import (
    KEY,
    REFERENCE_FILE,
    STATE,
    Metric,
    MetricRef,
    ReferenceFile,
    Score,
    ScoreEntry,
    State,
    fit_state,
    place_of,
)
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.usercode import UserCode

_JUDGED: tuple[Which, ...] = ("search", "verdict")


class ReferenceReport(BaseModel):
    """How well the FP32 model does, and in which metric."""

    metric: str
    better: Literal["higher", "lower"]
    fitted: bool
    value: dict[str, float]
    samples: dict[str, int]


def run_reference(out: Path, *, model: Artifact, data: Artifact, metric: MetricRef) -> ReferenceReport:
    """Run the FP32 model on the search and verdict sets, and on the calibration set when the metric is fitted.

    Writes ``outputs/<set>/*.npy``, ``scores/<set>.npy`` (where the metric has per-sample scores), ``state.npz`` (where
    it is fitted) and ``reference.json``, which says what is in them. `load_outputs`, `load_score` and `load_metric`
    read them.

    Raises:
        EnginesmithError: the FP32 model itself puts out NaN or scores NaN, or the user's metric does not hold to its
            interface.
    """
    sets = {which: load_dataset(data, which) for which in (*(("calibration",) if metric.fit else ()), *_JUDGED)}
    outputs: dict[Which, dict[str, Array]] = {}
    with OnnxRunner(model.path) as runner, progress.track("reference", total=sum(map(len, sets.values()))) as bar:
        for which, dataset in sets.items():
            outputs[which] = runner.predict(dataset, bar=bar)
            _refuse_nan(outputs[which], which, model)

    state: State = None
    if metric.fit is not None:
        state = fit_state(metric.fit, outputs["calibration"], sets["calibration"].targets)
        np.savez(out / STATE, allow_pickle=False, **(state if isinstance(state, dict) else {"state": state}))
    ready = Metric(metric, state)
    scores = {which: ready(outputs[which], sets[which], outputs[which]) for which in _JUDGED}
    for which, score in scores.items():
        if not math.isfinite(score.value):
            raise _no_value(metric, which)

    names = {name: f"output{index}.npy" for index, name in enumerate(outputs["verdict"])}
    for which in _JUDGED:
        folder = out / "outputs" / which
        folder.mkdir(parents=True)
        for name, file in names.items():
            np.save(folder / file, outputs[which][name])
    content = ReferenceFile(
        outputs=names,
        scores={which: _write_score(out, which, score) for which, score in scores.items()},
        state="none" if state is None else "dict" if isinstance(state, dict) else "array",
    )
    (out / REFERENCE_FILE).write_text(content.model_dump_json(indent=1) + "\n")
    return ReferenceReport(
        metric=ready.definition,
        better=ready.better,
        fitted=state is not None,
        value={which: score.value for which, score in scores.items()},
        samples={which: len(dataset) for which, dataset in sets.items()},
    )


REFERENCE = Stage("reference", version=1, run=run_reference, tools=("numpy", "onnxruntime"))


def _write_score(out: Path, which: Which, score: Score) -> ScoreEntry:
    if score.samples is None:
        return ScoreEntry(value=score.value, samples=None)
    file = out / "scores" / f"{which}.npy"
    file.parent.mkdir(exist_ok=True)
    np.save(file, score.samples)
    return ScoreEntry(value=score.value, samples=file.relative_to(out).as_posix())


def _refuse_nan(outputs: Mapping[str, Array], which: Which, model: Artifact) -> None:
    for name, array in outputs.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            sample = int(np.argwhere(np.isnan(array))[0][0])
            raise EnginesmithError(
                f"the FP32 model puts out NaN: output {name!r}, {which} sample {sample}",
                where=str(model.path),
                hint="nothing can be compared with it; look at that sample and at the layers that divide",
            )


def _no_value(metric: MetricRef, which: Which) -> EnginesmithError:
    code = metric.call if isinstance(metric.call, UserCode) else None
    return EnginesmithError(
        f"{code.spec if code else metric.call} is not a finite number for the FP32 model on the {which} set",
        where=place_of(code) if code else "",
        key=f"{KEY}.call",
        hint="a metric has to have a value for the model that all others are compared with",
    )
