"""Turns calibration samples into weights and biases that make up for the quantization of what a convolution reads.

A convolution whose output is a small difference of large terms (a BatchNorm with a tiny variance was folded into it)
multiplies the rounding of its input. Least squares finds the weights that come closest to the FP32 convolution when
they read the *quantized* input: directions in which the input is mostly rounding noise are damped, and what remains
on average goes into the bias. With p a patch of the exact input, q of the quantized one, w the weights:

    w' = w + H⁻¹ C w,  H = cov(q, q),  C = cov(q, p - q)        (normal equations of min E |p·w - q·w'|²)
    b' = b + E[p]·w - E[q]·ŵ                                    (ŵ: w' after rounding to INT8)

The bias alone (w' = w) is the bias correction of Nagel et al., "Data-Free Quantization Through Weight Equalization and
Bias Correction" (2019), here with measured means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from enginesmith.tasks import progress
from enginesmith.tasks.calibrate.collect import stream
from enginesmith.tasks.data import Array, Dataset
from enginesmith.tasks.graph import qdq
from enginesmith.tasks.graph.trial import QdqRunner, noise
from enginesmith.tasks.progress import Bar

FloatArray = npt.NDArray[np.float64]

POSITIONS = 128
"""Output positions looked at per sample."""

FIT_SAMPLES = 64
"""Calibration samples that corrections are made on."""

CHECK_SAMPLES = 32
"""Other calibration samples on which they must help."""

LEAST_SAMPLES = 8
"""Fewer samples than that correct nothing."""

Correction = Literal["none", "bias", "refit"]

_LARGEST_PATCH = 512
_RIDGE = 1e-5


@dataclass(frozen=True)
class Geometry:
    """How a Conv cuts its input into patches.

    Attributes:
        kernel: extent per spatial axis.
        strides: step per spatial axis.
        dilations: spacing of the kernel per spatial axis.
        pads: zeros before and after, per spatial axis.
        groups: groups of channels.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    groups: int

    @classmethod
    def of(cls, node: ir.Node, weight_shape: Sequence[int]) -> Geometry | None:
        """The geometry of a Conv node; None for another operator and for padding that depends on the input's size."""
        if node.op_type != "Conv":
            return None
        padding = node.attributes.get("auto_pad")
        if padding is not None and padding.as_string() not in ("NOTSET", "VALID"):
            return None
        kernel = tuple(weight_shape[2:])

        def listed(name: str, default: Sequence[int]) -> tuple[int, ...]:
            attribute = node.attributes.get(name)
            return tuple(attribute.as_ints()) if attribute is not None else tuple(default)

        pads = listed("pads", [0] * 2 * len(kernel))
        group = node.attributes.get("group")
        return cls(
            kernel,
            listed("strides", [1] * len(kernel)),
            listed("dilations", [1] * len(kernel)),
            tuple(zip(pads[: len(kernel)], pads[len(kernel) :], strict=True)),
            group.as_int() if group is not None else 1,
        )

    def patches(self, sample: npt.NDArray[np.float32], rng: np.random.Generator) -> npt.NDArray[np.float32]:
        """Patches at up to `POSITIONS` random output positions of one sample.

        Args:
            sample: [channels, *spatial].
            rng: chooses the positions; the same state gives the same positions for every sample of this shape.

        Returns:
            [positions, groups, channels / groups * kernel elements], in the order of the weight's elements.
        """
        padded = np.pad(sample, ((0, 0), *self.pads))
        spans = tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True))
        axes = tuple(range(1, padded.ndim))
        windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=axes)
        every: tuple[slice, ...] = tuple(slice(None, None, stride) for stride in self.strides)
        inside: tuple[slice, ...] = tuple(slice(None, None, dilation) for dilation in self.dilations)
        windows = windows[(slice(None), *every, *inside)]
        extents = windows.shape[1 : padded.ndim]
        total = int(np.prod(extents))
        chosen = np.sort(rng.choice(total, min(total, POSITIONS), replace=False))
        places: tuple[slice | npt.NDArray[np.int64], ...] = (slice(None), *np.unravel_index(chosen, extents))
        taken = windows[places]
        return np.moveaxis(taken, 1, 0).reshape(len(chosen), self.groups, -1)


class PatchStatistics:
    """First and second moments of the exact and the quantized patches that one convolution reads.

    Args:
        geometry: how the convolution cuts its input.
        scale: activation scale of its input.
        size: elements per patch.
    """

    def __init__(self, geometry: Geometry, scale: float, size: int) -> None:
        self._geometry = geometry
        self._scale = np.float32(scale)
        self._rng = np.random.default_rng(0)
        self._full = size <= _LARGEST_PATCH
        groups = geometry.groups
        self.count = 0
        self.exact: FloatArray = np.zeros((groups, size))
        self.quantized: FloatArray = np.zeros((groups, size))
        shape = (groups, size, size) if self._full else (0, 0, 0)
        self.products: FloatArray = np.zeros(shape)
        self.cross: FloatArray = np.zeros(shape)

    def add(self, sample: npt.NDArray[np.float32]) -> None:
        """Count one sample of the convolution's input, [channels, *spatial], or several: [..., channels, *spatial].

        A model may have more rows here than samples (frames, crops), or a batch axis inside of a sample.
        """
        for image in sample.reshape(-1, *sample.shape[-(len(self._geometry.kernel) + 1) :]):
            self._add(image)

    def _add(self, image: npt.NDArray[np.float32]) -> None:
        p = self._geometry.patches(image, self._rng)
        q = np.clip(np.rint(p / self._scale), -qdq.LEVELS - 1, qdq.LEVELS) * self._scale
        self.count += len(p)
        self.exact += p.sum(axis=0, dtype=np.float64)
        self.quantized += q.sum(axis=0, dtype=np.float64)
        if self._full:
            columns = q.transpose(1, 2, 0).astype(np.float64)
            self.products += columns @ columns.transpose(0, 2, 1)
            self.cross += columns @ (p - q).transpose(1, 0, 2).astype(np.float64)

    def refit(self, weight: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
        """The weights of least squared error on quantized input; the weights as they are where patches are too large.

        Args:
            weight: [outputs, channels / groups, *kernel].
        """
        if not self._full or self.count == 0:
            return weight.astype(np.float32)
        mean_q, mean_e = self.quantized / self.count, (self.exact - self.quantized) / self.count
        covariance = self.products / self.count - mean_q[:, :, None] * mean_q[:, None, :]
        cross = self.cross / self.count - mean_q[:, :, None] * mean_e[:, None, :]
        size = covariance.shape[1]
        energy = np.trace(covariance, axis1=1, axis2=2) / size
        floor = _RIDGE * energy + np.finfo(np.float64).tiny
        damped = covariance + floor[:, None, None] * np.eye(size)
        rows = self._rows(weight)
        change = np.linalg.solve(damped, cross @ rows.transpose(0, 2, 1))
        found: npt.NDArray[np.float32] = (rows + change.transpose(0, 2, 1)).reshape(weight.shape).astype(np.float32)
        return found

    def bias_shift(self, weight: npt.NDArray[np.floating], stored: npt.NDArray[np.floating]) -> FloatArray:
        """What the bias must gain, per output channel, so that the mean output stays what it was.

        Args:
            weight: the FP32 weights.
            stored: the weights that INT8 stands for.
        """
        if self.count == 0:
            return np.zeros(len(weight))
        before = np.einsum("god,gd->go", self._rows(weight), self.exact / self.count)
        after = np.einsum("god,gd->go", self._rows(stored), self.quantized / self.count)
        shift: FloatArray = (before - after).reshape(-1)
        return shift

    def _rows(self, weight: npt.NDArray[np.floating]) -> FloatArray:
        """[groups, outputs / groups, patch elements]."""
        groups = self._geometry.groups
        return weight.astype(np.float64).reshape(groups, len(weight) // groups, -1)


def corrected(
    graph: ir.Model, plan: qdq.Quantization, dataset: Dataset
) -> tuple[Correction, qdq.Quantization, dict[Correction, float]]:
    """The plan with the correction that helps most, that correction, and the noise to signal of each.

    Corrections are made on up to `FIT_SAMPLES` of the samples and judged on up to `CHECK_SAMPLES` others, by the noise
    that the whole INT8 graph puts on its worst output. `none` wins ties, and with fewer than `LEAST_SAMPLES` samples
    nothing else is tried.

    Args:
        graph: the FP32 graph.
        plan: its quantization.
        dataset: calibration samples.
    """
    if not plan.convs or len(dataset) < LEAST_SAMPLES:
        return "none", plan, {}
    order = np.random.default_rng(0).permutation(len(dataset))
    checked = min(CHECK_SAMPLES, len(dataset) // 4)
    check = dataset.take(np.sort(order[:checked]).tolist())
    fit = dataset.take(np.sort(order[checked : checked + FIT_SAMPLES]).tolist())
    with progress.track("correct", total=len(fit) + 4 * len(check)) as bar:
        statistics = gather(graph, plan, fit, bar)
        plans: dict[Correction, qdq.Quantization] = {
            "none": plan,
            "bias": correct_biases(graph, plan, statistics),
            "refit": refit_weights(graph, plan, statistics),
        }
        exact = QdqRunner(graph).predict(check, bar=bar)
        found = {name: noise(_outputs(graph, tried, check, bar), exact) for name, tried in plans.items()}
    best = min(found, key=lambda name: found[name])
    return best, plans[best], found


def _outputs(graph: ir.Model, plan: qdq.Quantization, dataset: Dataset, bar: Bar) -> dict[str, Array]:
    copy = graph.clone()
    qdq.QuantizePass(plan)(copy)
    return QdqRunner(copy).predict(dataset, bar=bar)


def gather(graph: ir.Model, plan: qdq.Quantization, dataset: Dataset, bar: Bar) -> dict[str, PatchStatistics]:
    """Patch statistics of every convolution that can be corrected: a Conv with a constant bias or none."""
    nodes = {node.name: node for node in graph.graph}
    statistics: dict[str, PatchStatistics] = {}
    readers: dict[str, list[str]] = {}
    for subgraph in plan.convs:
        node = nodes[subgraph.conv]
        weight, bias = qdq.parameters(node)
        geometry = Geometry.of(node, weight.shape)
        if geometry is None or (bias is None and len(node.inputs) > 2 and node.inputs[2] is not None):
            continue
        size = int(np.prod(weight.shape[1:]))
        statistics[subgraph.conv] = PatchStatistics(geometry, plan.scales[subgraph.input], size)
        readers.setdefault(subgraph.input, []).append(subgraph.conv)

    def add(tensor: str, sample: npt.NDArray[np.float32]) -> None:
        for conv in readers[tensor]:
            statistics[conv].add(sample)

    stream(graph, list(readers), dataset, add, bar)
    return statistics


def correct_biases(
    graph: ir.Model, plan: qdq.Quantization, statistics: Mapping[str, PatchStatistics]
) -> qdq.Quantization:
    """The plan with each bias moved by what rounding does to the convolution's mean output."""
    nodes = {node.name: node for node in graph.graph}
    biases: dict[str, npt.NDArray[np.float32]] = {}
    for name, seen in statistics.items():
        weight, bias = qdq.parameters(nodes[name])
        shift = seen.bias_shift(weight, plan.weights[name].dequantized())
        biases[name] = ((0.0 if bias is None else bias) + shift).astype(np.float32)
    return replace(plan, biases=biases)


def refit_weights(
    graph: ir.Model, plan: qdq.Quantization, statistics: Mapping[str, PatchStatistics]
) -> qdq.Quantization:
    """The plan with the weights of least squared error on quantized input, and the biases that go with them."""
    nodes = {node.name: node for node in graph.graph}
    weights = dict(plan.weights)
    for subgraph in plan.convs:
        if (seen := statistics.get(subgraph.conv)) is None:
            continue
        weight, bias = qdq.parameters(nodes[subgraph.conv])
        found = seen.refit(weight)
        moved = (0.0 if bias is None else bias) + seen.bias_shift(weight, found)
        weights[subgraph.conv] = qdq.quantize_parameters(found, moved, subgraph, plan.scales[subgraph.input])
    return correct_biases(graph, replace(plan, weights=weights), statistics)
