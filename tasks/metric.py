"""Turns model outputs into scores, and two scores into a drop with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from enginesmith.tasks.data import Array, Dataset, Targets, Which
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import MetricSettings
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.usercode import UserCode

STATE = "state.npz"
REFERENCE_FILE = "reference.json"
KEY = "data.metric"

State = Array | dict[str, Array] | None

AGREEMENT = (
    "agreement with FP32, mean over samples and outputs: equal argmax for a float output [n, classes] with two or more "
    "classes, unless it overflowed; 1 - |y - y32| / |y32| (L2, clamped to 0..1) for other float outputs; share of "
    "equal elements for the rest"
)
TOP1 = "share of samples whose largest logit is at the target's index"
BUILTINS = {"agreement": AGREEMENT, "top1": TOP1}


@dataclass(frozen=True)
class MetricRef:
    """Which metric to compute.

    Attributes:
        call: the user's function ``(outputs, targets[, state]) -> value or (value, per-sample scores)``, or the name of
            a built-in: agreement, top1.
        fit: the user's function ``(outputs, targets) -> state``, run once on the FP32 model's calibration outputs.
        better: the direction in which the value improves.
    """

    call: UserCode | str
    fit: UserCode | None = None
    better: Literal["higher", "lower"] = "higher"

    def key_part(self) -> object:
        """Code or name of the metric, and its direction."""
        return {
            "call": self.call if isinstance(self.call, str) else self.call.key_part(),
            "fit": self.fit.key_part() if self.fit else None,
            "better": self.better,
        }


def metric_ref(settings: MetricSettings, folder: Path, key: str = f"{KEY}.call") -> MetricRef:
    """The metric that settings name.

    Args:
        settings: as in pipeline.yaml.
        folder: the pipeline file's folder, where the user's modules are.
        key: what named the metric, for errors.
    """
    call = settings.call if settings.call in BUILTINS else UserCode(folder, settings.call, key=key)
    fit = UserCode(folder, settings.fit, key=f"{KEY}.fit") if settings.fit else None
    return MetricRef(call, fit, settings.better)


class Outputs(Mapping[str, Array]):
    """Outputs by name that also behave as the array itself when there is just one.

    ``outputs["name"]`` is an array by name; ``np.asarray(outputs)``, ``outputs[:, 0]``, ``outputs.argmax(axis=1)`` and
    ``outputs @ weight`` work on the single one.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = dict(arrays)

    def __getitem__(self, key: Any) -> Array:
        found: Array = self._arrays[key] if isinstance(key, str) else self._single()[key]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self._single(), dtype=dtype, copy=copy)

    def __matmul__(self, other: Array) -> Array:
        found: Array = self._single() @ other
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._single(), name)

    def _single(self) -> Array:
        if len(self._arrays) != 1:
            raise TypeError(f"the model has {len(self._arrays)} outputs, name one: {', '.join(self._arrays)}")
        return next(iter(self._arrays.values()))


@dataclass(frozen=True)
class Score:
    """A metric's value, NaN when it failed, and per-sample scores (float64, in sample order) where it has any."""

    value: float
    samples: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Drop:
    """How much worse than FP32, in the metric's unit (positive is worse, inf failed), and its standard error."""

    value: float
    stderr: float | None


FAILED = Score(math.nan)


@dataclass(frozen=True)
class Metric:
    """A metric ready to be computed.

    Attributes:
        ref: what it is.
        state: what `ref.fit` returned for the FP32 model, None without `fit`.
    """

    ref: MetricRef
    state: State = field(default=None, repr=False)

    @property
    def better(self) -> Literal["higher", "lower"]:
        """The direction in which the value improves."""
        return self.ref.better

    @property
    def definition(self) -> str:
        """One sentence for reports."""
        return self.ref.call.spec if isinstance(self.ref.call, UserCode) else BUILTINS[self.ref.call]

    def __call__(
        self, outputs: Mapping[str, Array], dataset: Dataset, reference: Mapping[str, Array] | None = None
    ) -> Score:
        """The score of one model.

        Args:
            outputs: by output name; axis 0 is the sample.
            dataset: the samples that these outputs belong to.
            reference: outputs of the FP32 model for the same samples; the metric "agreement" needs them.

        Returns:
            The score; a failed one (NaN) when an output holds NaN, the value is not finite, or the user's metric raised
            on outputs that hold infinities. For the built-in metrics a sample that became infinite scores nothing.

        Raises:
            EnginesmithError: the metric raised on finite outputs or returned something else than it should.
        """
        if any(_has_nan(array) for array in outputs.values()):
            return FAILED
        if self.ref.call == "agreement":
            if reference is None:
                raise ValueError("agreement needs the FP32 outputs")
            return _agreement(outputs, reference, len(dataset))
        if not isinstance(self.ref.call, UserCode):
            return _top1(outputs, dataset.targets, len(dataset), reference or {})
        return self._user(self.ref.call, outputs, dataset)

    def drop(self, reference: Score, candidate: Score) -> Drop:
        """How much worse a candidate is than the FP32 model on the same samples.

        The standard error is that of a mean of paired differences, ``std(d, ddof=1) / sqrt(n)`` with d the differences
        of the per-sample scores (NIST/SEMATECH e-Handbook of Statistical Methods, 7.3.1.1, analysis of paired
        observations). It is None without per-sample scores, for fewer than two samples, and when a value is not the
        mean of its per-sample scores: the formula says nothing about such a metric.
        """
        if not (math.isfinite(reference.value) and math.isfinite(candidate.value)):
            return Drop(math.inf, None)
        sign = 1.0 if self.better == "higher" else -1.0
        return Drop(sign * (reference.value - candidate.value), _paired_stderr(reference, candidate))

    def _user(self, call: UserCode, outputs: Mapping[str, Array], dataset: Dataset) -> Score:
        own = {name: np.array(array) for name, array in outputs.items()}  # it may write into them
        arguments = (Outputs(own), dataset.targets, *(() if self.state is None else (self.state,)))
        try:
            result = call(*arguments)
        except EnginesmithError as error:
            if not all(_is_finite(array) for array in outputs.values()):
                return FAILED
            if dataset.targets is None and not error.hint:
                error.hint = "the data has no targets; return (inputs, targets) from it if the metric needs them"
            raise
        score = _read_result(result, len(dataset), call)
        return score if math.isfinite(score.value) else FAILED


class ScoreEntry(BaseModel):
    """The FP32 model's value on one set, and the file of its per-sample scores."""

    value: float
    samples: str | None


class ReferenceFile(BaseModel):
    """reference.json: where the FP32 outputs, scores and the metric's state lie."""

    outputs: dict[str, str]
    scores: dict[str, ScoreEntry]
    state: Literal["none", "array", "dict"]


def load_metric(ref: MetricRef, reference: Artifact | None) -> Metric:
    """The metric with the state that the reference artifact holds; without an artifact it has none."""
    if reference is None:
        return Metric(ref)
    kind = _reference(reference).state
    if kind == "none":
        return Metric(ref)
    with np.load(reference.path / STATE, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return Metric(ref, arrays if kind == "dict" else arrays["state"])


def load_outputs(reference: Artifact, which: Which) -> dict[str, Array]:
    """Outputs of the FP32 model on the search or verdict set, by output name, memory-mapped."""
    folder = reference.path / "outputs" / which
    return {name: np.load(folder / file, mmap_mode="r") for name, file in _reference(reference).outputs.items()}


def load_score(reference: Artifact, which: Which) -> Score:
    """The FP32 model's own score on the search or verdict set."""
    entry = _reference(reference).scores[which]
    return Score(entry.value, None if entry.samples is None else np.load(reference.path / entry.samples))


def fit_state(fit: UserCode, outputs: Mapping[str, Array], targets: Targets | None) -> State:
    """What the user's `fit` returns for the FP32 model, as arrays.

    Raises:
        EnginesmithError: it raised, or returned no array, no dict of arrays, or values that are not finite.
    """
    value = fit(Outputs({name: np.array(array) for name, array in outputs.items()}), targets)
    named = value if isinstance(value, Mapping) else {"state": value}
    arrays: dict[str, Array] = {}
    for name, item in named.items():
        array = np.asarray(item)
        if not isinstance(name, str) or array.dtype.kind not in "biufUS":
            raise _wrong(fit, f"returned {type(item).__name__} for {name!r}", "return an array or a dict of arrays")
        if not _is_finite(array):
            raise _wrong(fit, f"returned NaN or infinity in {name!r}", "check what it divides by")
        arrays[name] = array
    if not arrays:
        raise _wrong(fit, "returned an empty dict", "return an array or a dict of arrays")
    return arrays if isinstance(value, Mapping) else arrays["state"]


def place_of(code: UserCode) -> str:
    """``file:line`` of a user function's definition, empty when it has none."""
    function: Callable[..., Any] = code.load()
    raw = getattr(function, "__code__", None)
    return f"{raw.co_filename}:{raw.co_firstlineno}" if raw else ""


def _reference(reference: Artifact) -> ReferenceFile:
    return ReferenceFile.model_validate_json((reference.path / REFERENCE_FILE).read_text())


def _wrong(code: UserCode, found: str, hint: str) -> EnginesmithError:
    return EnginesmithError(f"{code.spec} {found}", where=place_of(code), key=code.key, hint=hint)


def _read_result(result: object, count: int, code: UserCode) -> Score:
    """What a user's metric returned: a number, or a number and per-sample scores."""
    hint = "return a number, or (number, per-sample scores or None)"
    value, samples = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise _wrong(code, f"returned {type(value).__name__} {str(value)[:60]!r} as its value", hint)
    if samples is None:
        return Score(float(array.reshape(())))
    try:
        scores = np.asarray(samples, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise _wrong(code, f"returned per-sample scores that are no numbers: {error}", hint) from error
    if scores.shape != (count,):
        raise _wrong(code, f"returned per-sample scores of shape {list(scores.shape)} for {count} samples", hint)
    return Score(float(array.reshape(())), scores)


def _paired_stderr(reference: Score, candidate: Score) -> float | None:
    a, b = reference.samples, candidate.samples
    if a is None or b is None or a.shape != b.shape or len(a) < 2:
        return None
    for score, samples in ((reference, a), (candidate, b)):
        if not math.isclose(float(samples.mean()), score.value, rel_tol=1e-6, abs_tol=1e-9):
            return None
    return float(np.std(a - b, ddof=1)) / math.sqrt(len(a))


def _agreement(outputs: Mapping[str, Array], reference: Mapping[str, Array], count: int) -> Score:
    for name, expected in reference.items():
        if outputs[name].shape != expected.shape:
            raise EnginesmithError(
                f"output {name!r} has shape {list(outputs[name].shape)}, FP32 {list(expected.shape)}",
                hint="a variant must compute what the FP32 model computes",
            )
    scores = np.mean([_agree(outputs[name], reference[name], count) for name in reference], axis=0)
    return Score(float(scores.mean()), scores)


def _agree(output: Array, reference: Array, count: int) -> npt.NDArray[np.float64]:
    """Per-sample agreement of one output; an output that does not divide into samples counts as a whole for each."""
    is_float = reference.dtype.kind == "f"
    if is_float and reference.ndim == 2 and len(reference) == count and reference.shape[1] >= 2:
        same_class = output.argmax(axis=1) == reference.argmax(axis=1)
        return np.asarray(same_class & ~_overflowed(output, reference).any(axis=1), dtype=np.float64)
    rows = count if reference.ndim and len(reference) % count == 0 else 1
    ours, theirs = output.reshape(rows, -1), reference.reshape(rows, -1)
    if is_float:
        same = np.equal(ours, theirs)
        ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.linalg.norm(np.where(same, 0.0, ours - theirs), axis=1)
            scale = np.linalg.norm(np.where(np.isfinite(theirs), theirs, 0.0), axis=1)
            score = np.where(error == 0, 1.0, 1.0 - error / scale)
        score = np.nan_to_num(np.clip(score, 0.0, 1.0), nan=0.0)
    else:
        score = np.equal(ours, theirs).mean(axis=1)
    return np.broadcast_to(np.asarray(score, dtype=np.float64), (count,))


def _top1(outputs: Mapping[str, Array], targets: Targets | None, count: int, reference: Mapping[str, Array]) -> Score:
    names = [n for n, a in outputs.items() if a.ndim == 2 and a.shape[0] == count and a.shape[1] >= 2]
    logits = [outputs[name] for name in names]
    if len(logits) != 1:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in outputs.items())
        raise EnginesmithError(
            f"top1 needs one output [samples, classes], the model has {shapes}",
            key=f"{KEY}.call",
            hint="write a metric",
        )
    if targets is None:
        raise EnginesmithError(
            "top1 needs targets, the data has none",
            key=f"{KEY}.call",
            hint="return (inputs, targets) from data.evaluation",
        )
    if not isinstance(targets, np.ndarray) or targets.dtype.kind not in "iu" or targets.shape != (count,):
        shape = f"{targets.dtype} {list(targets.shape)}" if isinstance(targets, np.ndarray) else type(targets).__name__
        raise EnginesmithError(f"top1 needs integer targets [{count}], they are {shape}", key=f"{KEY}.call")
    classes = logits[0].shape[1]
    outside = np.flatnonzero((targets < 0) | (targets >= classes))
    if len(outside):
        raise EnginesmithError(
            f"target {targets[outside[0]]} of sample {outside[0]} is outside 0..{classes - 1}", key=f"{KEY}.call"
        )
    right = logits[0].argmax(axis=1) == targets
    if names[0] in reference:
        right &= ~_overflowed(logits[0], reference[names[0]]).any(axis=1)
    scores = right.astype(np.float64)
    return Score(float(scores.mean()), scores)


def _has_nan(array: Array) -> bool:
    return array.dtype.kind == "f" and bool(np.isnan(array).any())


def _overflowed(output: Array, reference: Array) -> npt.NDArray[np.bool_]:
    """Where an output is infinite and the FP32 model's is finite."""
    if output.dtype.kind != "f" or output.shape != reference.shape:
        return np.zeros(output.shape, dtype=np.bool_)
    return np.isinf(output) & np.isfinite(reference)


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())
