"""Turns a graph and calibration samples into samples of its tensors and their histograms, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

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
    """One histogram per tensor; see `stream` for the arguments. Each counts one sample at a time, in order."""
    histograms = {name: MagnitudeHistogram() for name in tensors}
    stream(model, tensors, dataset, lambda name, sample: histograms[name].add(sample), bar, live_bytes=live_bytes)
    return histograms


def stream(
    model: ir.Model,
    tensors: Sequence[str],
    dataset: Dataset,
    use: Callable[[str, np.ndarray], None],
    bar: Bar,
    *,
    live_bytes: int = LIVE_BYTES,
) -> None:
    """Run the model and hand over what the tensors hold, sample by sample.

    The batch is as large as the model's declaration and `live_bytes` allow. When one batch of the smallest size is
    still too much, the tensors are fetched in groups, one run per group.

    Args:
        model: the FP32 graph.
        tensors: float32 tensors of the main graph, graph inputs included.
        dataset: samples.
        use: called with a tensor's name and one sample of it, without the batch axis where it has one; a tensor whose
            axis 0 is not the batch or a multiple of it is handed over whole.
        bar: advances by samples.
        live_bytes: activations held at a time.
    """
    fed = [name for name in tensors if name in dataset.inputs]
    watched = [name for name in tensors if name not in dataset.inputs]
    runner = OnnxRunner(_observed(model, watched))
    sizes = _sizes(runner, watched, dataset)
    batch = _batch(dataset, sum(sizes.values()), live_bytes)
    groups = list(_groups(sizes, live_bytes // max(batch, 1)))
    for feed, count in dataset.feeds(batch if dataset.batched else None):
        rows = batch if dataset.batched else None
        for name in fed:
            _hand_over(name, feed[name], rows, count, use)
        for group in groups:
            for name, value in zip(group, runner.session.run(group, dict(feed)), strict=True):
                _hand_over(name, value, rows, count, use)
        bar.advance(count)


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


def _hand_over(
    name: str, value: np.ndarray, batch: int | None, count: int, use: Callable[[str, np.ndarray], None]
) -> None:
    """One call per sample, the first `count` only; `batch` is None when a feed is one sample."""
    if batch is None or value.ndim == 0 or value.shape[0] == 0 or value.shape[0] % batch:
        use(name, value)
        return
    rows = value if value.shape[0] == batch else value.reshape(batch, -1, *value.shape[1:])
    for row in rows[:count]:
        use(name, row)
