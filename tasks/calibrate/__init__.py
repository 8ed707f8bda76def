"""Turns the FP32 graph and calibration samples into ranges and the INT8 graph: the stage `calibrate`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.calibrate.choice import excluded
from enginesmith.tasks.calibrate.collect import collect
from enginesmith.tasks.calibrate.histogram import MagnitudeHistogram
from enginesmith.tasks.calibrate.refit import corrected
from enginesmith.tasks.calibrate.thresholds import OUTLIER, Calibrator, choose
from enginesmith.tasks.data import Dataset, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io, qdq
from enginesmith.tasks.graph.opset import raise_opset
from enginesmith.tasks.ranges import QuantizedLayer, RangeTable, SkippedLayer, TensorRange, write_ranges
from enginesmith.tasks.settings import Int8Settings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact

SEED = 0
KEY = "data.calibration"


class CalibrateReport(BaseModel):
    """What was quantized, on how much data, and what is odd about the ranges.

    `output_sqnr_db` is that of the worst output of the whole INT8 graph, by correction tried, on calibration samples
    that the corrections were not made on.
    """

    calibrator: str
    placement: str
    samples: int
    samples_asked: int
    quantized: int
    convolutions: int
    nodes: int
    bytes_fp32: int
    bytes_int8: int
    skipped: dict[str, int]
    chosen_by_error: int
    worst_tensor: str
    correction: str
    output_sqnr_db: dict[str, float | None]
    warnings: tuple[str, ...]


def calibrate(out: Path, *, model: Artifact, data: Artifact, settings: Int8Settings) -> CalibrateReport:
    """Calibrate every tensor that INT8 needs and write the INT8 graph.

    Weights and biases are corrected for what quantization does to them where that helps (tasks/calibrate/refit.py).

    Writes ``int8/model.onnx`` (the placement's convolutions in INT8 by Q/DQ, everything else FP32; the FP32 graph
    itself when nothing can be quantized), ``ranges.json`` and ``calibration.cache`` (see tasks/ranges.py).

    Args:
        out: empty folder.
        model: the FP32 graph.
        data: data artifact; its calibration set is used, a seeded choice of `settings.samples` where it has more.
        settings: calibrator, samples, placement, exclusions.

    Raises:
        EnginesmithError: calibration data that says nothing (key data.calibration), or an exclusion that matches
            nothing (key precision.int8.exclude.N).
    """
    graph = io.load(model.path)
    found, refusals = qdq.find_convs(graph, settings.placement)
    by_entry = excluded(graph, found, settings.exclude)
    convs = [c for c in found if c.conv not in by_entry]
    skipped = [SkippedLayer(conv=r.conv, reason=r.reason) for r in refusals]
    skipped += [SkippedLayer(conv=c, reason=f"excluded by {entry!r}") for c, entry in by_entry.items()]
    shortcuts = qdq.find_shortcuts(graph, convs) if settings.placement == "conv+residual" else ()
    dataset = _calibration_samples(load_dataset(data, "calibration"), settings.samples)

    rows = _ranges(graph, convs, shortcuts, dataset, settings.calibrator)
    convs, unusable = _usable(convs, rows)
    skipped += unusable
    usable = {c.conv for c in convs}
    shortcuts = tuple(s for s in shortcuts if s.conv in usable and rows[s.tensor].scale is not None)
    rows = {name: row.model_copy(update={"read_by": _readers(name, convs, shortcuts)}) for name, row in rows.items()}
    scales = {name: row.scale for name, row in rows.items() if row.scale is not None}
    plan = qdq.plan_quantization(graph, convs, scales, shortcuts=shortcuts)
    nodes = sum(1 for _ in graph.graph.all_nodes())
    if convs:
        feed, _ = next(iter(dataset.feeds(dataset.batch_min if dataset.batched else None)))
        graph = raise_opset(graph, qdq.MIN_OPSET, feed)
    correction, final, tried = corrected(graph, plan, dataset)
    table = RangeTable(
        model=model.digest,
        data=data.part("calibration").digest,
        samples=len(dataset),
        seed=SEED,
        calibrator=settings.calibrator,
        placement=settings.placement,
        correction=correction,
        tensors=tuple(rows.values()),
        layers=tuple(_layer(c, plan, graph) for c in convs),
        skipped=tuple(skipped),
    )
    write_ranges(table, out)
    qdq.QuantizePass(final)(graph)
    file = io.save(graph, out / "int8")
    sizes = (model.size, sum(f.stat().st_size for f in file.parent.iterdir()))
    sqnr: dict[str, float | None] = {
        name: None if math.isinf(ratio) else _decibels(ratio) for name, ratio in tried.items()
    }
    return _report(table, settings, nodes, sizes, sqnr)


CALIBRATE = Stage("calibrate", version=1, run=calibrate, tools=("numpy", "onnx", "onnx-ir", "onnxruntime"))


def _calibration_samples(dataset: Dataset, wanted: int) -> Dataset:
    """A seeded choice of the samples, checked for saying something about ranges."""
    if len(dataset) == 0:
        raise EnginesmithError(
            "the calibration set is empty",
            key=KEY,
            hint="a generator that was read once yields nothing the second time",
        )
    if len(dataset) > wanted:
        chosen = np.random.default_rng(SEED).choice(len(dataset), wanted, replace=False)
        dataset = dataset.take(np.sort(chosen).tolist())
    floats = {name: array for name, array in dataset.inputs.items() if array.dtype.kind == "f"}
    for name, array in floats.items():
        for index, sample in enumerate(array):
            if not np.isfinite(sample).all():
                raise EnginesmithError(f"{name!r}: calibration sample {index} holds NaN or infinity", key=KEY)
    if floats and all(_constant(array) for array in floats.values()):
        shown = ", ".join(f"{name} is {float(array.reshape(-1)[0]):g}" for name, array in floats.items())
        raise EnginesmithError(
            f"the calibration data is constant: {shown} everywhere",
            key=KEY,
            hint="ranges of such data say nothing; give samples like those that will be seen in use",
        )
    if len(dataset) > 1 and all(_repeated(array) for array in dataset.inputs.values()):
        raise EnginesmithError(
            f"all {len(dataset)} calibration samples are the same one",
            key=KEY,
            hint="give different samples; a loader that returns its first batch for ever does this",
        )
    return dataset


def _constant(array: np.ndarray) -> bool:
    first = array.reshape(-1)[0]
    return all(bool((sample == first).all()) for sample in array)


def _repeated(array: np.ndarray) -> bool:
    return all(np.array_equal(array[0], sample) for sample in array[1:])


def _ranges(
    graph: ir.Model,
    convs: Sequence[qdq.ConvSubgraph],
    shortcuts: Sequence[qdq.Shortcut],
    dataset: Dataset,
    calibrator: Calibrator,
) -> dict[str, TensorRange]:
    """Rows of all tensors that the convolutions read or write, in graph order."""
    wanted = {c.input for c in convs} | {c.output for c in convs} | {s.tensor for s in shortcuts}
    order = [value.name for value in graph.graph.inputs] + [v.name for node in graph.graph for v in node.outputs]
    tensors = [name for name in order if name in wanted and name is not None]
    if not tensors:
        return {}
    with progress.track("calibrate", total=len(dataset)) as bar:
        histograms = collect(graph, tensors, dataset, bar)
    return {name: tensor_range(name, histogram, calibrator) for name, histogram in histograms.items()}


def tensor_range(name: str, histogram: MagnitudeHistogram, calibrator: Calibrator) -> TensorRange:
    """The row of one tensor: its threshold, or why it has none."""
    problem = ""
    if histogram.nonfinite:
        problem = f"{histogram.nonfinite} NaN or infinite values on the calibration data"
    elif histogram.absmax == 0:
        problem = "zero on all calibration data"
    elif histogram.samples == 0:
        problem = "too small for a range on all calibration data"
    base = {
        "tensor": name,
        "absmax": histogram.absmax,
        "minimum": histogram.minimum if math.isfinite(histogram.minimum) else 0.0,
        "maximum": histogram.maximum if math.isfinite(histogram.maximum) else 0.0,
        "peak_sample": histogram.peak_sample,
    }
    if problem:
        return TensorRange(
            **base,
            threshold=None,
            scale=None,
            method="none",
            clipped=0.0,
            sqnr_db=None,
            outlier=False,
            problem=problem,
        )
    chosen = choose(histogram, calibrator)
    return TensorRange(
        **base,
        threshold=chosen.value,
        scale=float(qdq.representable_scale(chosen.value / qdq.LEVELS)),
        method=chosen.method,
        clipped=chosen.clipped,
        sqnr_db=_decibels(chosen.error),
        outlier=histogram.absmax > OUTLIER * chosen.least_error_value,
    )


def _usable(
    convs: Sequence[qdq.ConvSubgraph], rows: Mapping[str, TensorRange]
) -> tuple[list[qdq.ConvSubgraph], list[SkippedLayer]]:
    """The convolutions whose input has a range, and the others with the reason."""
    kept: list[qdq.ConvSubgraph] = []
    skipped: list[SkippedLayer] = []
    for subgraph in convs:
        problem = rows[subgraph.input].problem
        if problem:
            skipped.append(SkippedLayer(conv=subgraph.conv, reason=f"its input {subgraph.input} is {problem}"))
        else:
            kept.append(subgraph)
    return kept, skipped


def _readers(name: str, convs: Collection[qdq.ConvSubgraph], shortcuts: Collection[qdq.Shortcut]) -> tuple[str, ...]:
    return (*(c.conv for c in convs if c.input == name), *(s.add for s in shortcuts if s.tensor == name))


def _layer(subgraph: qdq.ConvSubgraph, plan: qdq.Quantization, graph: ir.Model) -> QuantizedLayer:
    """The row of one convolution, with what quantization did to its weight channel by channel."""
    node = next(n for n in graph.graph if n.name == subgraph.conv)
    weight = qdq.constant(node.inputs[1])
    if weight is None:
        raise ValueError(f"{subgraph.conv} has no constant weight")
    quantized = plan.weights[subgraph.conv]
    axis = 0 if subgraph.axis is None else subgraph.axis
    exact = np.moveaxis(weight.astype(np.float64), axis, 0).reshape(weight.shape[axis], -1)
    stored = np.moveaxis(quantized.dequantized().astype(np.float64), axis, 0).reshape(exact.shape)
    noise, signal = ((exact - stored) ** 2).sum(axis=1), (exact**2).sum(axis=1)
    alive = signal > 0
    worst = float(np.max(noise[alive] / signal[alive], initial=0.0))
    return QuantizedLayer(
        conv=subgraph.conv,
        op_type=subgraph.op_type,
        members=subgraph.members,
        input=subgraph.input,
        output=subgraph.output,
        weight=subgraph.weight,
        axis=subgraph.axis,
        depthwise=subgraph.depthwise,
        weight_sqnr_db=_decibels(float(noise.sum() / signal.sum())) if alive.any() else None,
        worst_channel_db=_decibels(worst),
        tiny_channels=int(np.count_nonzero(alive & ~stored.any(axis=1))),
    )


def _decibels(ratio: float) -> float | None:
    """Noise to signal as decibels of signal to noise; None for no noise."""
    return round(-10 * math.log10(ratio), 3) if ratio > 0 else None


def _report(
    table: RangeTable,
    settings: Int8Settings,
    nodes: int,
    sizes: tuple[int, int],
    sqnr: Mapping[str, float | None],
) -> CalibrateReport:
    ranged = [row for row in table.tensors if row.threshold is not None]
    by_error = [row for row in ranged if row.method == "error"]
    warnings = [
        f"{row.tensor}: largest magnitude {row.absmax:.4g} (sample {row.peak_sample}) is an outlier; "
        f"range ±{row.threshold:.4g} chosen by {row.method}, {row.clipped:.2%} clipped"
        for row in ranged
        if row.outlier
    ]
    warnings += [f"{row.tensor}: {row.problem}" for row in table.tensors if row.problem]
    if table.samples < min(settings.samples, 32):
        warnings.append(f"only {table.samples} calibration samples; ranges of fewer than 32 are a guess")
    if not table.layers:
        warnings.append(f"no convolution fits placement {table.placement}: the INT8 graph is the FP32 graph")
    reasons: dict[str, int] = {}
    for layer in table.skipped:
        reasons[layer.reason] = reasons.get(layer.reason, 0) + 1
    worst = min((row for row in ranged if row.read_by), key=lambda row: row.sqnr_db or math.inf, default=None)
    return CalibrateReport(
        calibrator=table.calibrator,
        placement=table.placement,
        samples=table.samples,
        samples_asked=settings.samples,
        quantized=len(table.layers),
        convolutions=len(table.layers) + len(table.skipped),
        nodes=nodes,
        bytes_fp32=sizes[0],
        bytes_int8=sizes[1],
        skipped=reasons,
        chosen_by_error=len(by_error),
        worst_tensor=f"{worst.tensor}: {worst.sqnr_db:.1f} dB" if worst and worst.sqnr_db is not None else "",
        correction=table.correction,
        output_sqnr_db=dict(sqnr),
        warnings=tuple(warnings),
    )
