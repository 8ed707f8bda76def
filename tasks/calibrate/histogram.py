"""Turns a stream of activations into a magnitude histogram of fixed size, from which every threshold is chosen.

The bins are fixed beforehand: 128 per octave, bin edges are the float32 numbers whose low 16 bits are zero. Nothing is
re-binned when the range grows, one outlier does not coarsen the rest, and the order of the samples does not matter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_SHIFT = 16
_BINS = 0x7F80  # the first bin of infinity and NaN
_MAGNITUDE = np.uint32(0x7FFF_FFFF)

EDGES: FloatArray = (np.arange(_BINS, dtype=np.uint32) << _SHIFT).view(np.float32).astype(np.float64)
"""Lower edges of all bins; bin 0 holds zero and what is below 1.2e-40."""

UPPER: FloatArray = np.append(EDGES[1:], 2.0**128)
"""Upper edges of all bins."""

_CENTERS_SQUARED = ((EDGES + UPPER) / 2) ** 2
_CENTERS_SQUARED[0] = 0.0


class MagnitudeHistogram:
    """Counts of ``|x|`` over samples.

    Attributes:
        counts: int64[32640], elements per bin.
        weights: float64[32640], the same with each sample's elements divided by the sample's sum of squares: what
            turns a mean squared error into the mean over samples of the error relative to the sample.
        samples: samples seen that are not all zero.
        elements: elements seen.
        nonfinite: elements that are NaN or infinite; they are counted nowhere else.
        absmax: largest magnitude seen.
        peak_sample: index, in the order of `add`, of the sample that held it.
        minimum: smallest value seen.
        maximum: largest value seen.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, dtype=np.int64)
        self.weights = np.zeros(_BINS, dtype=np.float64)
        self.samples = 0
        self.elements = 0
        self.nonfinite = 0
        self.absmax = 0.0
        self.peak_sample = -1
        self.minimum = np.inf
        self.maximum = -np.inf
        self._seen = 0

    def add(self, sample: npt.NDArray[np.float32]) -> None:
        """Count one sample's tensor, any shape, float32."""
        bits = np.ascontiguousarray(sample, dtype=np.float32).reshape(-1).view(np.uint32)
        index = ((bits & _MAGNITUDE) >> np.uint32(_SHIFT)).astype(np.int64)
        counts = np.bincount(index)
        broken = int(counts[_BINS:].sum())
        counts = counts[:_BINS]
        first = int(np.flatnonzero(counts[1:])[0]) + 1 if counts[1:].any() else len(counts)
        self.counts[: len(counts)] += counts
        energy = float(counts[first:] @ _CENTERS_SQUARED[first : len(counts)])
        if energy > 0:
            self.weights[first : len(counts)] += counts[first:] / energy
            self.samples += 1
        values = np.asarray(sample, dtype=np.float32)
        if broken:
            values = values[np.isfinite(values)]
        if values.size:
            low, high = float(values.min()), float(values.max())
            peak = max(-low, high)
            if peak > self.absmax or self.peak_sample < 0:
                self.absmax, self.peak_sample = peak, self._seen
            self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        self.nonfinite += broken
        self.elements += bits.size
        self._seen += 1

    def occupied(self) -> tuple[FloatArray, FloatArray, npt.NDArray[np.int64], FloatArray]:
        """Lower edges, upper edges, counts and weights of the nonzero bins; zeros are left out, they are exact."""
        index = np.flatnonzero(self.counts[1:]) + 1
        return EDGES[index], np.minimum(UPPER[index], max(self.absmax, 1e-300)), self.counts[index], self.weights[index]
