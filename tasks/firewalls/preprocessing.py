"""Turns the training pipeline's tensors and those that a compile feeds into what differs between them, in figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.usercode import UserCode

KEY = "data.reference"
Array = npt.NDArray[Any]

_SAMPLES = 16
"""Samples that are compared."""

_ALIKE = 0.9
"""Correlation from which on two samples are taken for the same one, prepared differently."""

_POINTS = 4096
"""Elements of a sample that correlations look at."""


def load_reference(text: str, folder: Path, inputs: Mapping[str, object]) -> dict[str, Array]:
    """Tensors of the training pipeline by input name, samples first.

    Args:
        text: `module:function`, which returns an array or a dict by input name; or a .npy or .npz file.
        folder: the pipeline file's folder.
        inputs: declared inputs; a single array belongs to a single input.

    Raises:
        EnginesmithError: no such file or function, or not numeric arrays for declared inputs.
    """
    path = folder / text
    if path.suffix in (".npy", ".npz"):
        try:
            loaded = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise EnginesmithError(f"{text} cannot be read: {error}", key=KEY, hint="save plain arrays") from error
        given: Any = loaded if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    else:
        given = UserCode(folder, text, KEY)()
    named = given if isinstance(given, Mapping) else {next(iter(inputs)): given}
    unknown = sorted(set(named) - set(inputs))
    if unknown or (not isinstance(given, Mapping) and len(inputs) != 1):
        raise EnginesmithError(
            f"the reference has {', '.join(unknown) or 'one array'}, the inputs are {', '.join(inputs)}",
            key=KEY,
            hint="give arrays by input name",
        )
    arrays = {name: np.asarray(value) for name, value in named.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or not array.ndim or not array.size:
            raise EnginesmithError(f"the reference of {name} is no array of numbers with samples first", key=KEY)
    return arrays


def check_preprocessing(reference: Mapping[str, Array], fed: Mapping[str, Array], which: str) -> Iterator[Finding]:
    """What a set's inputs differ in from the training pipeline's.

    1. `preprocessing/form`, error: another dtype, or another shape of a sample; said to be the layout when one is the
       other with its channels moved.
    2. `preprocessing/values`, error: the same samples (found by their correlation, in any order) with other values.
       Said is what explains them first: a reversed channel order; another scale and offset, the same for all
       channels (0..255 against 0..1) or one per channel (mean and standard deviation); otherwise the largest and the
       mean difference, as another resize or decoder makes.
    3. `preprocessing/values`, warning: other samples, whose mean and spread lie apart by more than 2 to 1.

    Not reported: equal bytes; differences in the last bits of a float (1e-6 of the range); other samples of the same
    distribution.

    Args:
        reference: the training pipeline's tensors by input name, samples first.
        fed: what the set holds.
        which: the set's name, for the message.
    """
    for name, theirs in reference.items():
        ours = np.asarray(fed[name][: 4 * _SAMPLES])
        found = _form(theirs, ours)
        if found:
            yield _finding("preprocessing/form", "error", f"{name} ({which}): {found}")
        theirs, ours = _aligned(theirs[:_SAMPLES], ours)
        if theirs.shape[1:] == ours.shape[1:] and theirs.ndim > 1:
            yield from _values(name, which, theirs.astype(np.float64), ours.astype(np.float64))


def _finding(rule: str, severity: str, message: str) -> Finding:
    return Finding.model_validate(
        {
            "rule": rule,
            "severity": severity,
            "message": message,
            "effect": "ranges are calibrated and accuracy is judged on inputs that the model was not trained for",
            "hint": "use one preprocessing object for training, calibration, evaluation and serving",
        }
    )


def _form(theirs: Array, ours: Array) -> str:
    said = []
    if theirs.dtype != ours.dtype:
        said.append(f"training feeds {theirs.dtype}, this set {ours.dtype}")
    if theirs.shape[1:] != ours.shape[1:]:
        shapes = f"{list(theirs.shape[1:])} in training, {list(ours.shape[1:])} here"
        moved = theirs.ndim == ours.ndim == 4 and _moved(theirs).shape[1:] == ours.shape[1:]
        said.append(f"channels are elsewhere: {shapes}" if moved else f"a sample is {shapes}")
    return "; ".join(said)


def _moved(images: Array) -> Array:
    """NHWC as NCHW, or the other way round, by where the few channels are."""
    return np.moveaxis(images, 3, 1) if images.shape[3] <= images.shape[1] else np.moveaxis(images, 1, 3)


def _aligned(theirs: Array, ours: Array) -> tuple[Array, Array]:
    if theirs.shape[1:] != ours.shape[1:] and theirs.ndim == ours.ndim == 4:
        return _moved(theirs), ours
    return theirs, ours


@dataclass(frozen=True)
class _Pairs:
    theirs: Array
    ours: Array
    channel: int


def _values(name: str, which: str, theirs: Array, ours: Array) -> Iterator[Finding]:
    channel = _channel_axis(theirs)
    pairs = _paired(theirs, ours, channel)
    if pairs is None:
        yield from _distribution(name, which, theirs, ours)
        return
    spread = float(np.ptp(pairs.theirs)) or 1.0
    difference = np.abs(pairs.theirs - pairs.ours)
    if difference.max() <= 1e-6 * spread:
        return
    yield _finding("preprocessing/values", "error", f"{name} ({which}): {_explained(pairs, difference, spread)}")


def _explained(pairs: _Pairs, difference: Array, spread: float) -> str:
    channels = pairs.theirs.shape[pairs.channel] if pairs.channel >= 0 else 1
    if channels == 3:
        other = np.flip(pairs.ours, pairs.channel)
        left, before = (_residual(pairs.theirs, ours, pairs.channel) for ours in (other, pairs.ours))
        if left < 1e-3 and before > 10 * left:
            same = np.abs(pairs.theirs - other).max() <= 1e-6 * spread
            also = "" if same else ", and scale or offset differ too"
            return f"the channel order is reversed (RGB against BGR): {difference.max():.4g} apart at most{also}"
    if _residual(pairs.theirs, pairs.ours, pairs.channel) < 1e-3:
        fits = [_fit(*both) for both in _by_channel(pairs.theirs, pairs.ours, pairs.channel)]
        lines = ", ".join(
            dict.fromkeys(f"training = {a:.6g} · this {'+' if b >= 0 else '-'} {abs(b):.4g}" for a, b in fits)
        )
        ranges = f"{_range(pairs.theirs)} in training, {_range(pairs.ours)} here"
        kind = "scale or offset differ" if len(fits) == 1 or "," not in lines else "mean or standard deviation differ"
        return f"{kind}: {lines} ({ranges})"
    return (
        f"the same samples differ by {difference.max():.4g} at most and {difference.mean():.4g} on average "
        f"({difference.max() / spread:.1%} of the range): another resize, crop or decoder"
    )


def _range(values: Array) -> str:
    return f"{values.min():.4g}..{values.max():.4g}"


def _channel_axis(samples: Array) -> int:
    if samples.ndim != 4:
        return -1
    return 1 if samples.shape[1] <= samples.shape[3] else 3


def _by_channel(theirs: Array, ours: Array, axis: int) -> Iterator[tuple[Array, Array]]:
    if axis < 0:
        yield theirs.reshape(-1), ours.reshape(-1)
        return
    for index in range(theirs.shape[axis]):
        yield theirs.take(index, axis).reshape(-1), ours.take(index, axis).reshape(-1)


def _fit(theirs: Array, ours: Array) -> tuple[float, float]:
    """Scale and offset of the least-squares line from ours to theirs."""
    variance = float(ours.var())
    scale = float(((theirs - theirs.mean()) * (ours - ours.mean())).mean() / variance) if variance else 0.0
    return scale, float(theirs.mean() - scale * ours.mean())


def _residual(theirs: Array, ours: Array, axis: int) -> float:
    """What a line per channel leaves of the spread, 0 to 1."""
    worst = 0.0
    for their, our in _by_channel(theirs, ours, axis):
        scale, offset = _fit(their, our)
        spread = float(their.std())
        worst = max(worst, float((their - scale * our - offset).std()) / spread if spread else 0.0)
    return worst


def _paired(theirs: Array, ours: Array, channel: int) -> _Pairs | None:
    """Each reference sample with the fed sample that it correlates with; None when most have none."""
    found = []
    grey = [s.mean(channel) if channel >= 0 else s for s in (theirs, ours)]  # blind to the channels' order and scale
    left, right = (_standard(s.reshape(len(s), -1)) for s in grey)
    likeness = left @ right.T / left.shape[1]
    for index, row in enumerate(likeness):
        best = int(row.argmax())
        if row[best] >= _ALIKE:
            found.append((index, best))
    if len(found) * 2 < len(theirs):
        return None
    first, second = (list(side) for side in zip(*found, strict=True))
    return _Pairs(theirs[first], ours[second], channel)


def _standard(rows: Array) -> Array:
    step = max(1, rows.shape[1] // _POINTS)
    rows = rows[:, ::step]
    spread = rows.std(1, keepdims=True)
    return np.asarray((rows - rows.mean(1, keepdims=True)) / np.where(spread > 0, spread, 1))


def _distribution(name: str, which: str, theirs: Array, ours: Array) -> Iterator[Finding]:
    (m1, s1), (m2, s2) = ((float(x.mean()), float(x.std())) for x in (theirs, ours))
    ratio = max(s1, s2) / max(min(s1, s2), 1e-12)
    if ratio > 2 or abs(m1 - m2) > max(s1, s2):
        yield _finding(
            "preprocessing/values",
            "warning",
            f"{name} ({which}): training feeds {m1:.4g} ± {s1:.4g} in {_range(theirs)}, "
            f"this set {m2:.4g} ± {s2:.4g} in {_range(ours)}",
        )
