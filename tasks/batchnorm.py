"""Turns BatchNorm statistics into a scale and a shift, and these into the weights of a neighbouring layer, all in FP64.

Used on PyTorch modules (`tasks.fold`) and on ONNX graphs (`tasks.graph.batchnorm`). In evaluation a BatchNorm computes,
per channel (Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 2)::

    y = gamma * (x - mean) / sqrt(var + eps) + beta = scale * x + shift
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from enginesmith.tasks.errors import EnginesmithError

Floats = npt.NDArray[np.float64]
Layout = Literal["conv", "transposed", "linear"]
Clamp = Literal["auto", "off"] | float

FP16_MAX = 65504.0
FP16_TINY = 2.0**-24  # the smallest subnormal FP16 number
FP32_NORMAL = 2.0**-126  # the smallest normal FP32 number
GAIN_LIMIT = 1e4  # eps 1e-5 alone cannot reach it: it allows a gain of at most 316 per unit of gamma


@dataclass(frozen=True)
class Norm:
    """One BatchNorm in evaluation.

    Attributes:
        gamma: weight, shape (channels,).
        beta: bias, shape (channels,).
        mean: running mean, shape (channels,).
        var: running variance, shape (channels,).
        eps: the module's own.
    """

    gamma: Floats
    beta: Floats
    mean: Floats
    var: Floats
    eps: float

    @property
    def scale(self) -> Floats:
        """``gamma / sqrt(var + eps)``; infinite or NaN where var + eps is not positive."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scale: Floats = self.gamma / np.sqrt(self.var + self.eps)
        return scale

    @property
    def shift(self) -> Floats:
        """``beta - mean * scale``."""
        with np.errstate(invalid="ignore", over="ignore"):
            shift: Floats = self.beta - self.mean * self.scale
        return shift

    def part(self, channels: slice) -> Norm:
        """The same for some of the channels."""
        return Norm(self.gamma[channels], self.beta[channels], self.mean[channels], self.var[channels], self.eps)

    def broken(self) -> Sequence[int]:
        """Channels whose scale or shift is not finite."""
        return np.flatnonzero(~(np.isfinite(self.scale) & np.isfinite(self.shift))).tolist()


@dataclass(frozen=True)
class Observed:
    """What one BatchNorm saw on real inputs.

    Attributes:
        distance: largest ``|x - mean|`` per channel, (channels,).
        span: range of its output over all channels.
    """

    distance: Floats
    span: float


@dataclass(frozen=True)
class ClampedChannel:
    """A channel whose variance was raised.

    Attributes:
        channel: its index in the BatchNorm.
        var: running variance before.
        floor: running variance after.
        reason: what the channel would have done otherwise.
        change: largest absolute change of the BatchNorm's output on the measured inputs.
    """

    channel: int
    var: float
    floor: float
    reason: str
    change: float


def clamp_variance(
    norm: Norm, clamp: Clamp, *, weight_peak: Floats, bias: Floats, distance: Floats, tolerance: float
) -> tuple[Norm, tuple[ClampedChannel, ...]]:
    """Raise variances where the folded layer would leave FP16's range or amplify noise without bound.

    ``auto`` looks at each channel: where the folded weight or bias would exceed 65504, or the gain `GAIN_LIMIT`, the
    variance is raised as far as needed, but only if that changes the BatchNorm's output on the measured inputs by no
    more than `tolerance`. A small variance alone is no reason. A number is a floor for every channel, ``off`` does
    nothing; what a floor changes is reported, and judged by whoever compares outputs.

    Args:
        norm: the BatchNorm.
        clamp: the policy.
        weight_peak: largest absolute weight of each output channel of the layer it is folded into, (channels,).
        bias: that layer's bias, (channels,).
        distance: largest ``|x - mean|`` per channel on real inputs, (channels,).
        tolerance: absolute change of the output that ``auto`` may cause.

    Returns:
        the BatchNorm to fold, and the channels that were changed.
    """
    if clamp == "off":
        return norm, ()
    gain = np.abs(norm.scale)
    if clamp == "auto":
        with np.errstate(divide="ignore", invalid="ignore"):
            by_weight = FP16_MAX / weight_peak
            by_bias = np.maximum(FP16_MAX - np.abs(norm.beta), 0) / np.abs(bias - norm.mean)
            allowed = np.fmin(np.fmin(by_weight, by_bias), GAIN_LIMIT)
            floor = np.square(norm.gamma / allowed) - norm.eps
        wanted = ~(gain <= allowed) & (norm.gamma != 0) & (floor > norm.var)
        reasons = [
            "folded weight beyond FP16"
            if weight > FP16_MAX
            else "folded bias beyond FP16"
            if shift > FP16_MAX
            else f"gain above {GAIN_LIMIT:g}"
            for weight, shift in zip(gain * weight_peak, np.abs((bias - norm.mean) * norm.scale), strict=True)
        ]
    else:
        floor = np.full_like(norm.var, clamp)
        wanted = norm.var < clamp
        reasons = [f"below the floor {clamp:g}"] * len(norm.var)
    raised = replace(norm, var=np.where(wanted, floor, norm.var))
    with np.errstate(invalid="ignore"):
        change = np.where(distance == 0, 0.0, np.abs(norm.scale - raised.scale) * distance)
    if clamp == "auto":
        wanted &= change <= tolerance
        raised = replace(norm, var=np.where(wanted, floor, norm.var))
    changed = tuple(
        ClampedChannel(int(c), float(norm.var[c]), float(raised.var[c]), reasons[c], float(change[c]))
        for c in np.flatnonzero(wanted)
    )
    return raised, changed


def fold_after(
    weight: Floats, bias: Floats | None, norm: Norm, layout: Layout, groups: int = 1
) -> tuple[Floats, Floats]:
    """Weights and bias of the layer that does what the layer and then the BatchNorm did.

    Args:
        weight: ``conv`` and ``linear``: (out, in / groups, ...); ``transposed``: (in, out / groups, ...).
        bias: (out,), or None for zero.
        norm: the BatchNorm, (out,) channels.
        layout: which of the three.
        groups: of a convolution.
    """
    scale = norm.scale
    if layout == "transposed":
        inside = weight.reshape(groups, -1, *weight.shape[1:])
        by_channel = scale.reshape(groups, 1, -1, *([1] * (weight.ndim - 2)))
        folded = (inside * by_channel).reshape(weight.shape)
    else:
        folded = weight * scale.reshape(-1, *([1] * (weight.ndim - 1)))
    start = 0.0 if bias is None else bias
    return folded, (start - norm.mean) * scale + norm.beta


def fold_before(
    weight: Floats, bias: Floats | None, norm: Norm, layout: Layout, groups: int = 1
) -> tuple[Floats, Floats | None]:
    """Weights and bias of the layer that does what the BatchNorm and then the layer did.

    The caller makes sure that the shift reaches every output alike: no zero padding, or no shift. A ``linear`` layer
    may stand behind a flattening, so that each channel of the BatchNorm feeds several consecutive columns.

    Args:
        weight: as for `fold_after`.
        bias: (out,), or None for zero.
        norm: the BatchNorm, (in,) channels.
        layout: which of the three; ``transposed`` only without a shift.
        groups: of a convolution.

    Returns:
        the weight, and the bias, None when there was none and none is needed.
    """
    scale, shift = norm.scale, norm.shift
    if layout == "transposed":
        return weight * scale.reshape(-1, *([1] * (weight.ndim - 1))), bias
    if layout == "linear":
        repeat = weight.shape[1] // len(scale)
        scale, shift = np.repeat(scale, repeat), np.repeat(shift, repeat)
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    trailing = [1] * (weight.ndim - 2)
    folded = (grouped * scale.reshape(groups, 1, -1, *trailing)).reshape(weight.shape)
    if not shift.any():
        return folded, bias
    moved = (grouped * shift.reshape(groups, 1, -1, *trailing)).reshape(weight.shape[0], -1).sum(axis=1)
    return folded, moved if bias is None else bias + moved


def weight_peaks(weight: Floats, layout: Layout, groups: int = 1) -> Floats:
    """Largest absolute weight of each output channel."""
    if layout == "transposed":
        grouped = weight.reshape(groups, -1, *weight.shape[1:])
        by_group: Floats = np.abs(grouped).max(axis=(1, *range(3, grouped.ndim))).reshape(-1)
        return by_group
    peaks: Floats = np.abs(weight).reshape(weight.shape[0], -1).max(axis=1)
    return peaks


def flushed(values: Floats) -> tuple[Floats, int]:
    """The values with those that FP32 could hold only as subnormal numbers set to zero, and how many there were."""
    tiny = (np.abs(values) < FP32_NORMAL) & (values != 0)
    return np.where(tiny, 0.0, values), int(np.count_nonzero(tiny))


def constant_channels(weight: Floats, layout: Layout, groups: int = 1) -> tuple[int, ...]:
    """Output channels whose weights are all zero: their output is their bias, whatever comes in."""
    return tuple(np.flatnonzero(weight_peaks(weight, layout, groups) == 0).tolist())


def fits_fp16(values: Floats) -> bool:
    """Whether FP16 holds every value without overflow, and no value that is not zero vanishes."""
    magnitude = np.abs(values)
    return bool(np.all(magnitude <= FP16_MAX) and np.all((magnitude >= FP16_TINY) | (magnitude == 0)))


def needs_scale_shift(norm: Norm) -> bool:
    """Whether FP16 cannot hold a BatchNorm's statistics, while it can hold its scale and shift."""
    statistics = np.concatenate([norm.gamma, norm.beta, norm.mean, norm.var + norm.eps])
    if fits_fp16(statistics) or norm.broken():
        return False
    return fits_fp16(np.concatenate([norm.scale, norm.shift]))


def check_norm(norm: Norm, where: str) -> None:
    """Refuse statistics that define no function.

    Raises:
        EnginesmithError: a channel's variance plus eps is negative, or a statistic is not finite.
    """
    values = np.stack([norm.gamma, norm.beta, norm.mean, norm.var])
    bad = np.flatnonzero(~np.isfinite(values).all(axis=0) | (norm.var + norm.eps < 0))
    if bad.size:
        raise EnginesmithError(
            f"its statistics are not finite or its variance is negative in {bad.size} channels",
            where=where,
            key="model.checkpoint",
            details=[f"channel {c}: mean {norm.mean[c]:g}, var {norm.var[c]:g}" for c in bad[:8].tolist()],
            hint="the training run diverged, or the checkpoint is damaged",
        )
