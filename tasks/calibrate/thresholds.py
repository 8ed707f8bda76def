"""Turns a magnitude histogram into the threshold of symmetric INT8: minmax, percentile, entropy or error.

A threshold T gives the scale T / 127. Values beyond T are clipped to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from enginesmith.tasks.calibrate.histogram import MagnitudeHistogram

FloatArray = npt.NDArray[np.float64]
Calibrator = Literal["entropy", "minmax", "percentile", "mse"]
Method = Literal["entropy", "minmax", "percentile", "mse", "error"]

LEVELS = 127
PERCENTILE = 0.9999
"""Share of elements that the percentile calibrator leaves unclipped."""

TOLERATED = 4.0
"""How many times the least possible error (6 dB) a calibrator's choice may cost before the error decides."""

NEGLIGIBLE = 1e-3
"""Relative squared error (30 dB) below which a calibrator's choice stands in any case."""

OUTLIER = 8.0
"""A largest magnitude this many times the least-error threshold is called an outlier."""

_FINE = 16
_OCTAVES = 24
_COARSE_STEPS = 8
_FINE_STEPS = 64


@dataclass(frozen=True)
class Threshold:
    """A chosen range.

    Attributes:
        value: the threshold.
        method: what chose it: the calibrator asked for, or `error` where that one did too badly.
        error: its expected quantization error: mean over samples of ``sum((x - q)²) / sum(x²)``.
        clipped: share of the elements beyond it.
        least_error_value: the threshold of least error, for comparison.
        least_error: its error.
    """

    value: float
    method: Method
    error: float
    clipped: float
    least_error_value: float
    least_error: float


def choose(histogram: MagnitudeHistogram, calibrator: Calibrator) -> Threshold:
    """The threshold that a calibrator chooses, or the one of least error where the calibrator's costs too much.

    On eight samples of which one holds a value of 1000, minmax, percentile and entropy give a scale at which all other
    values become zero. Such a choice is replaced: its relative error is more than four times the least possible and
    above 30 dB, or
    there is an outlier and the choice is not the one of least error.

    Raises:
        ValueError: the histogram holds nothing but zeros.
    """
    if histogram.absmax == 0 or histogram.samples == 0:
        raise ValueError("nothing but zeros: no threshold")
    best, least = least_error(histogram)
    value = {
        "minmax": lambda: histogram.absmax,
        "percentile": lambda: percentile(histogram, PERCENTILE),
        "entropy": lambda: entropy(histogram),
        "mse": lambda: best,
    }[calibrator]()
    error = float(relative_error(histogram, np.array([value]))[0])
    method: Method = calibrator
    outlier = histogram.absmax > OUTLIER * best
    if not error <= max(TOLERATED * least, NEGLIGIBLE) or (outlier and error > least):
        value, error, method = best, least, "error"
    return Threshold(value, method, error, clipped_share(histogram, value), best, least)


def percentile(histogram: MagnitudeHistogram, share: float) -> float:
    """The magnitude that a share of all elements does not exceed; inside a bin, elements are taken as evenly spread."""
    lower, upper, counts, _ = histogram.occupied()
    total = histogram.elements - histogram.nonfinite
    wanted = share * total - (total - counts.sum())
    if wanted <= 0:
        return float(lower[0])
    cumulative = np.cumsum(counts)
    index = int(np.searchsorted(cumulative, wanted))
    inside = (wanted - (cumulative[index] - counts[index])) / counts[index]
    return float(lower[index] + inside * (upper[index] - lower[index]))


def least_error(histogram: MagnitudeHistogram) -> tuple[float, float]:
    """The threshold of least `relative_error`, and that error: a grid of 1/8 octaves, then of 1/64 around its best."""
    exponents = np.arange(_OCTAVES * _COARSE_STEPS) / _COARSE_STEPS
    grid = histogram.absmax * 2.0**-exponents
    start = exponents[int(np.argmin(relative_error(histogram, grid)))]
    around = np.arange(-_FINE_STEPS // _COARSE_STEPS, _FINE_STEPS // _COARSE_STEPS + 1) / _FINE_STEPS
    grid = histogram.absmax * 2.0 ** -np.maximum(start + around, 0.0)
    errors = relative_error(histogram, grid)
    index = int(np.argmin(errors))
    return float(grid[index]), float(errors[index])


def relative_error(histogram: MagnitudeHistogram, thresholds: FloatArray) -> FloatArray:
    """Mean over samples of ``sum((x - q(x))²) / sum(x²)`` for each threshold, elements evenly spread inside a bin.

    Each sample counts relative to its own energy, so that one loud sample does not decide for all others.
    """
    lower, upper, _, weights = histogram.occupied()
    scales = np.asarray(thresholds, dtype=np.float64) / LEVELS
    errors = np.empty(len(scales))
    for position, scale in enumerate(scales):
        integral = _error_integral(upper / scale) - _error_integral(lower / scale)
        width = np.maximum(upper - lower, 1e-300)
        # A bin narrower than float64 can integrate over (the one that ends at absmax) takes its edge's own error.
        exact = upper - lower < 1e-9 * upper
        mean = np.where(exact, scale**2 * _error(upper / scale), scale**3 * integral / width)
        errors[position] = weights @ np.maximum(mean, 0.0)
    return errors / histogram.samples


def clipped_share(histogram: MagnitudeHistogram, threshold: float) -> float:
    """Share of all elements beyond a threshold."""
    lower, upper, counts, _ = histogram.occupied()
    width = np.maximum(upper - lower, 1e-300)
    beyond = np.clip((upper - threshold) / width, 0.0, 1.0)
    return float(counts @ beyond) / max(histogram.elements - histogram.nonfinite, 1)


def entropy(histogram: MagnitudeHistogram) -> float:
    """The threshold at which the quantized distribution differs least from the original in Kullback-Leibler divergence.

    For a threshold T, P is the distribution of the nonzero magnitudes over bins of 1/16 of a quantization step, from
    zero to T, with all that is clipped in the last bin; Q spreads the unclipped mass of each of the integers 0..127
    evenly over its bins that are not empty. T minimizes ``sum(P log(P / Q))``. After Migacz, "8-bit inference with
    TensorRT" (2017), with bins that follow the threshold, so that all thresholds are judged at one resolution. Zeros
    are left out: they are exact at every scale.
    """
    lower, upper, counts, _ = histogram.occupied()
    # Gaps between occupied bins hold nothing: repeat the cumulative count at both ends of a gap.
    points = np.stack([lower, upper], axis=1).reshape(-1)
    after = np.cumsum(counts).astype(np.float64)
    cumulative = np.stack([after - counts, after], axis=1).reshape(-1)
    total = after[-1]
    grid = histogram.absmax * 2.0 ** -(np.arange(_OCTAVES * _COARSE_STEPS) / _COARSE_STEPS)
    best = min(grid, key=lambda t: (_divergence(points, cumulative, total, float(t)), -t))
    around = np.arange(-_FINE_STEPS // _COARSE_STEPS, _FINE_STEPS // _COARSE_STEPS + 1) / _FINE_STEPS
    fine = np.minimum(best * 2.0**around, histogram.absmax)
    return float(min(fine, key=lambda t: (_divergence(points, cumulative, total, float(t)), -t)))


def _divergence(points: FloatArray, cumulative: FloatArray, total: float, threshold: float) -> float:
    edges = np.arange(LEVELS * _FINE + 1) * (threshold / (LEVELS * _FINE))
    mass = np.diff(np.interp(edges, points, cumulative, left=0.0, right=total))
    level = (np.arange(LEVELS * _FINE) + _FINE // 2) // _FINE
    filled = mass > 0
    if not filled.any():
        return np.inf
    per_level = np.bincount(level, weights=mass, minlength=LEVELS + 1)
    occupied = np.bincount(level, weights=filled, minlength=LEVELS + 1)
    share = np.divide(per_level, occupied, out=np.zeros_like(per_level), where=occupied > 0)
    quantized = np.where(filled, share[level], 0.0)
    reference = mass.copy()
    reference[-1] += total - mass.sum()
    p, q = reference / total, quantized / quantized.sum()
    present = p > 0
    if (q[present] == 0).any():
        return np.inf
    return float(np.sum(p[present] * np.log(p[present] / q[present])))


def _error(steps: FloatArray) -> FloatArray:
    """Squared quantization error, in steps squared, of a magnitude in steps."""
    result: FloatArray = (steps - np.minimum(np.rint(steps), LEVELS)) ** 2
    return result


def _error_integral(steps: FloatArray) -> FloatArray:
    """Integral of `_error` from zero: 1/12 per whole step, and the cubic within the last one or beyond the range."""
    nearest = np.minimum(np.rint(steps), LEVELS)
    result: FloatArray = nearest / 12 + (steps - nearest) ** 3 / 3
    return result
