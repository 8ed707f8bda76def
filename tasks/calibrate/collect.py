"""Turns a graph and calibration samples into a magnitude histogram per tensor, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from enginesmith.tasks.calibrate.histogram import MagnitudeHistogram
from enginesmith.tasks.data import Dataset
from enginesmith.tasks.progress import Bar
from enginesmith.tasks.runner import OnnxRunner

LIVE_BYTES = 256 << 20
"""Activations held at a time."""

_PROBED = 8


def collect(
    model: ir.Model, tensors: Sequence[str], dataset: Dataset, bar: Bar, *, live_bytes: int = LIVE_BYTES
) -> dict[str, MagnitudeHistogram]:
    """Run the model and count what the tensors hold.

    The batch is as large as the model's declaration and `live_bytes` allow. When one batch of the smallest size is
    still too much, the tensors are fetched in groups, one run per group.

    Args:
        model: the FP32 graph.
        tensors: float32 tensors of the main graph, graph inputs included.
        dataset: samples.
        bar: advances by samples.
        live_bytes: activations held at a time.

    Returns:
        One histogram per tensor; `add` was called once per sample, in order.
    """
    fed = set(dataset.inputs)
    watched = [name for name in tensors if name not in fed]
    runner = OnnxRunner(_observed(model, watched))
    sizes = _sizes(runner, watched, dataset)
    batch = _batch(dataset, sum(sizes.values()), live_bytes)
    groups = list(_groups(sizes, live_bytes // max(batch, 1)))
    histograms = {name: MagnitudeHistogram() for name in tensors}
    for feed, count in dataset.feeds(batch if dataset.batched else None):
        for name in tensors:
            if name in fed:
                _add(histograms[name], feed[name], feed, dataset, count)
        for group in groups:
            for name, value in zip(group, runner.session.run(group, dict(feed)), strict=True):
                _add(histograms[name], value, feed, dataset, count)
        bar.advance(count)
    return histograms


def _observed(model: ir.Model, tensors: Sequence[str]) -> ir.Model:
    """A copy of the model that also puts out these tensors."""
    copy = model.clone()
    values = {value.name: value for node in copy.graph for value in node.outputs}
    for name in tensors:
        value = values[name]
        if not value.is_graph_output():
            value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
            copy.graph.outputs.append(value)
    return copy


def _sizes(runner: OnnxRunner, tensors: Sequence[str], dataset: Dataset) -> dict[str, int]:
    """Bytes of each tensor per sample, from one run on the smallest batch."""
    smallest = dataset.batch_min if dataset.batched else None
    feed, _ = next(iter(dataset.take(slice(0, 1)).feeds(smallest)))
    sizes: dict[str, int] = {}
    for start in range(0, len(tensors), _PROBED):
        group = list(tensors[start : start + _PROBED])
        for name, value in zip(group, runner.session.run(group, dict(feed)), strict=True):
            sizes[name] = -(-value.nbytes // max(smallest or 1, 1))
    return sizes


def _batch(dataset: Dataset, bytes_per_sample: int, live_bytes: int) -> int:
    if not dataset.batched:
        return 1
    fitting = live_bytes // max(bytes_per_sample, 1)
    return int(np.clip(fitting, dataset.batch_min, min(dataset.batch_max, max(dataset.batch_opt, dataset.batch_min))))


def _groups(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _add(
    histogram: MagnitudeHistogram,
    value: np.ndarray,
    feed: Mapping[str, np.ndarray],
    dataset: Dataset,
    count: int,
) -> None:
    """Count the first `count` samples of a tensor whose axis 0 is the batch or a multiple of it; else all as one."""
    batch = next(iter(feed[name].shape[0] for name in dataset.inputs)) if dataset.batched else 1
    if dataset.batched and value.ndim and value.shape[0] and value.shape[0] % batch == 0:
        rows = value.reshape(batch, -1)
        for row in rows[:count]:
            histogram.add(row)
    else:
        histogram.add(value)
