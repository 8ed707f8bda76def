"""Turns an FP32 model and samples into the layer table: for every node, what FP16 storage does to it and to the end.

Per node (see `LayerRow`): the range of its tensors and constants against FP16's, its local error (it alone, on FP32
operands), its end effect (it alone, on the model's outputs and on the user's metric), and the cumulative error (all
candidates in FP16).

All of it comes from one switched model, cut into segments. A node's effect on the end needs only what lies behind it:
its segment and the later ones run, starting from the FP32 tensors at the segment's border. So the table costs about
half as many forward passes as there are nodes. Samples go through in batches; at any time there are in memory the
activations of one segment for one batch, the tensors at two borders for all samples (on disk when they are large), and
the final outputs of a group of nodes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.data import Array, Dataset, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.origin import module_of
from enginesmith.tasks.graph import half, io
from enginesmith.tasks.graph.layers import Error, Figure, LayerRow, LayerTable, LossyConstant, Values
from enginesmith.tasks.graph.sums import largest_sums
from enginesmith.tasks.metric import Drop, Metric, MetricRef, Score, load_metric
from enginesmith.tasks.progress import Bar
from enginesmith.tasks.runner import Gatherer, OnnxRunner
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact

_BATCH = 16
_BATCH_BYTES = 16 << 20
_NODES_PER_SEGMENT = 8
_MOST_SEGMENTS = 24
_SHELF_BYTES = 512 << 20
_GROUP_BYTES = 512 << 20
_BLOCK = 1 << 15
_SHOWN = 10


class ProbeReport(BaseModel):
    """What the table says, in short."""

    samples: int
    nodes: int
    candidates: int
    metric: str
    value: Figure | None
    all_fp16_drop: Figure | None
    all_fp16: Error
    overflowing: list[str]
    accumulation_risk: list[str]
    lossy_constants: list[str]
    worst: dict[str, Figure]


def probe_layers(
    out: Path, *, model: Artifact, data: Artifact, reference: Artifact, metric: MetricRef, samples: int
) -> ProbeReport:
    """Probe the first `samples` of the search set; write layers.json.

    Raises:
        EnginesmithError: the model cannot be run, or the metric fails on finite outputs.
    """
    dataset = load_dataset(data, "search")
    table = probe(
        io.load(model.path), dataset.take(slice(0, min(samples, len(dataset)))), load_metric(metric, reference)
    )
    table.save(out)
    return _report(table)


PROBE = Stage("probe", version=1, run=probe_layers, tools=("numpy", "onnx", "onnx-ir", "onnxruntime"))


def probe(
    model: ir.Model,
    dataset: Dataset,
    metric: Metric | None = None,
    *,
    segments: int | None = None,
    threads: int | None = None,
) -> LayerTable:
    """The layer table of a model on all samples of a dataset.

    Args:
        model: FP32 model; every node has a unique name.
        dataset: samples, a few dozen.
        metric: the user's metric; None leaves the drops out.
        segments: sessions that the graph is cut into; None means one per eight candidates, 24 at most. It changes how
            long the probe takes, and no figure.
        threads: threads per session; None means as many as this process may use.

    Raises:
        EnginesmithError: no samples, or the model cannot be run.
    """
    if not len(dataset):
        raise EnginesmithError("there are no samples to probe with", key="data", hint="the search set is empty")
    wanted = segments or min(_MOST_SEGMENTS, math.ceil(len(half.candidates(model)) / _NODES_PER_SEGMENT))
    switched = half.SwitchedModel(model, segments=wanted, threads=threads)
    return _Probe(half.prepared(model), switched, dataset, metric, threads).table()


@dataclass
class _Tally:
    """Counts over values of the FP32 model, batch by batch; see `Values`."""

    elements: int = 0
    absmax: float = 0.0
    overflow: int = 0
    subnormal: int = 0
    vanish: int = 0
    nonfinite: int = 0
    absmin: float = math.inf

    def add(self, values: Array) -> None:
        magnitudes = np.abs(values)
        self.elements += values.size
        if not values.size:
            return
        top = float(magnitudes.max())
        if not math.isfinite(top):
            finite = magnitudes[np.isfinite(magnitudes)]
            self.nonfinite += values.size - finite.size
            magnitudes, top = finite, float(finite.max(initial=0))
        self.absmax = max(self.absmax, top)
        if top >= half.OVERFLOW:
            self.overflow += int(np.count_nonzero(magnitudes >= half.OVERFLOW))
        small = magnitudes[(magnitudes > 0) & (magnitudes < half.SUBNORMAL)]
        vanished = int(np.count_nonzero(small <= half.VANISH))
        self.vanish += vanished
        self.subnormal += small.size - vanished
        self.absmin = min(
            self.absmin, float((small if small.size else magnitudes[magnitudes > 0]).min(initial=math.inf))
        )

    def values(self) -> Values:
        n = self.elements or 1
        return Values(
            elements=self.elements,
            absmax=self.absmax,
            overflow=self.overflow / n,
            subnormal=self.subnormal / n,
            vanish=self.vanish / n,
            nonfinite=self.nonfinite / n,
        )


def _merged(tallies: Sequence[_Tally]) -> Values | None:
    if not tallies:
        return None
    total = _Tally()
    for tally in tallies:
        total.absmax = max(total.absmax, tally.absmax)
        for name in ("elements", "overflow", "subnormal", "vanish", "nonfinite"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
    return total.values()


@dataclass
class _Deviation:
    """Squares of signal and noise, batch by batch; see `Error`."""

    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    broken: int = 0

    def add(self, result: Array, exact: Array) -> None:
        self.elements += exact.size
        if result.shape != exact.shape:
            self.broken += max(exact.size, 1)
            return
        with np.errstate(invalid="ignore", over="ignore"):
            noise, signal = _energy(result - exact), _energy(exact)
        if not (math.isfinite(noise) and math.isfinite(signal)):
            same = (result == exact) | (np.isnan(result) & np.isnan(exact))
            usable = np.isfinite(result) & np.isfinite(exact)
            self.broken += int(np.count_nonzero(~usable & ~same))
            x16, x32 = result[usable].astype(np.float64), exact[usable].astype(np.float64)
            noise, signal = _energy(x16 - x32), _energy(x32)
        self.noise += noise
        self.signal += signal

    def error(self) -> Error:
        if self.broken:
            return Error(sqnr_db=-math.inf, rel_l2=math.inf, nonfinite=self.broken / max(self.elements, 1))
        if not self.noise:
            return Error(sqnr_db=math.inf, rel_l2=0.0, nonfinite=0.0)
        if not self.signal:
            return Error(sqnr_db=-math.inf, rel_l2=math.inf, nonfinite=0.0)
        ratio = self.noise / self.signal
        return Error(sqnr_db=-10 * math.log10(ratio), rel_l2=math.sqrt(ratio), nonfinite=0.0)


def _as_float(values: Array) -> Array:
    """Outputs of any numeric type, so that a changed label counts as an error too."""
    return values if values.dtype == np.float32 else values.astype(np.float64)


def _energy(values: Array) -> float:
    """Sum of squares in float64, block by block so that the float64 copy stays in the cache.

    `einsum` adds in one thread and in a fixed order: the same bits on every run, unlike a BLAS dot product.
    """
    flat = values.reshape(-1)
    total = 0.0
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        total += float(np.einsum("i,i->", block, block))
    return total


@dataclass
class _Effect:
    """What one choice of nodes in FP16 does at the end."""

    end: Error
    drop: Drop | None


@dataclass
class _Found:
    """Everything measured so far."""

    tensors: dict[str, _Tally] = field(default_factory=dict)
    cumulative: dict[str, _Deviation] = field(default_factory=dict)
    local: dict[str, _Deviation] = field(default_factory=dict)
    effects: dict[str, _Effect] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)


class _Shelf:
    """Keeps tensors between two segments: in memory up to a limit, beyond it in files that are mapped back."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def put(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        return {name: self._put(value) for name, value in tensors.items()}

    def _put(self, value: Array) -> Array:
        self._left -= value.nbytes
        if self._left >= 0 or not value.nbytes or isinstance(value, np.memmap):
            return value
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="enginesmith-")
        file = Path(self._folder.name) / f"{self._files}.npy"
        self._files += 1
        np.save(file, value)
        mapped: Array = np.load(file, mmap_mode="r")
        return mapped


class _Probe:
    """One probing of one model; `table` runs it."""

    def __init__(
        self,
        prepared: ir.Model,
        switched: half.SwitchedModel,
        dataset: Dataset,
        metric: Metric | None,
        threads: int | None,
    ) -> None:
        self._model = prepared
        self._switched = switched
        self._dataset = dataset
        self._metric = metric
        self._threads = threads
        self._feeds = list(dataset.feeds(_batch(dataset)))
        self._holder = _holders(prepared)
        self._results = {str(node.name): _float_results(node) for node in prepared.graph} | switched.inside
        self._found = _Found()

    def table(self) -> LayerTable:
        nodes = len(self._switched.nodes)
        with progress.track("probe", total=(nodes + 4) * len(self._feeds)) as bar:
            self._add_up(bar)
            self._exact = self._predict((), bar)
            self._score = self._judge(self._exact)
            together = self._effect(self._predict(self._switched.nodes, bar))
            for feed, count in self._feeds:
                self._observe(feed, feed, count)
            states = [dict(feed) for feed, _ in self._feeds]
            halves = [dict(feed) for feed, _ in self._feeds]
            for index, segment in enumerate(self._switched.segments):
                states, halves = self._segment(index, segment, states, halves, bar)
        return LayerTable(
            samples=len(self._dataset),
            metric="" if self._metric is None else self._metric.definition,
            better="higher" if self._metric is None else self._metric.better,
            value=None if self._score is None else self._score.value,
            end=together.end,
            drop=None if together.drop is None else together.drop.value,
            stderr=None if together.drop is None else together.drop.stderr,
            rows=tuple(self._rows()),
        )

    def _segment(
        self,
        index: int,
        segment: half.Segment,
        states: list[dict[str, Array]],
        halves: list[dict[str, Array]],
        bar: Bar,
    ) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
        """Measure the nodes of one segment; returns the tensors at its end, in FP32 and with all candidates in FP16."""
        known = self._floats(segment)
        needed = self._needed_after(index)
        groups = self._groups(segment.nodes)
        shelf = _Shelf(_SHELF_BYTES)
        next_states: list[dict[str, Array]] = []
        next_halves: list[dict[str, Array]] = []
        for number, group in enumerate(groups):
            gatherers = {name: Gatherer(self._dataset) for name in group}
            for place, (feed, count) in enumerate(self._feeds):
                fetch = tuple(dict.fromkeys((*segment.carried, *known)))
                exact = segment.run(states[place], (), fetch)
                if number == 0:
                    rounded = segment.run(halves[place], self._switched.nodes, fetch)
                    self._observe({name: exact[name] for name in known}, feed, count)
                    self._deviate(self._found.cumulative, known, rounded, exact, feed, count)
                    next_states.append(shelf.put(_kept(states[place], exact, needed)))
                    next_halves.append(shelf.put(_kept(halves[place], rounded, needed)))
                    bar.advance(1 / len(self._switched.segments))
                for name in group:
                    self._alone(name, index, states[place], exact, gatherers[name], feed, count)
                    bar.advance()
            for name, gatherer in gatherers.items():
                self._found.effects[name] = self._effect(gatherer.result())
                progress.checkpoint()
        return next_states, next_halves

    def _alone(
        self,
        name: str,
        index: int,
        state: Mapping[str, Array],
        exact: Mapping[str, Array],
        gatherer: Gatherer,
        feed: Mapping[str, Array],
        count: int,
    ) -> None:
        """One node in FP16, from the start of its segment to the end of the model, for one batch."""
        results = self._results_of(name)
        tensors = self._switched.forward(state, (name,), start=index, keep=results)
        gatherer.add({output: tensors[output] for output in self._switched.outputs}, feed, count)
        deviation = self._found.local.setdefault(name, _Deviation())
        for tensor in results:
            deviation.add(self._counted(tensors[tensor], feed, count), self._counted(exact[tensor], feed, count))

    def _add_up(self, bar: Bar) -> None:
        """The largest sums inside of operators, over all feeds."""
        graph, names = largest_sums(self._model)
        if not names:
            return
        with OnnxRunner(graph, threads=self._threads) as runner:
            for feed, _ in self._feeds:
                sums = runner.run({name: feed[name] for name in runner.inputs})
                for node, output in names.items():
                    value = float(sums[output])
                    known = self._found.sums.get(node, 0.0)
                    self._found.sums[node] = max(known, math.inf if math.isnan(value) else value)
                bar.advance()

    def _observe(self, tensors: Mapping[str, Array], feed: Mapping[str, Array], count: int) -> None:
        for name, value in tensors.items():
            if value.dtype == np.float32:
                self._found.tensors.setdefault(name, _Tally()).add(self._counted(value, feed, count))

    def _deviate(
        self,
        into: dict[str, _Deviation],
        names: Sequence[str],
        result: Mapping[str, Array],
        exact: Mapping[str, Array],
        feed: Mapping[str, Array],
        count: int,
    ) -> None:
        for name in names:
            into.setdefault(name, _Deviation()).add(
                self._counted(result[name], feed, count), self._counted(exact[name], feed, count)
            )

    def _counted(self, value: Array, feed: Mapping[str, Array], count: int) -> Array:
        """A tensor without the part that belongs to padding."""
        if not self._dataset.batched or not value.ndim:
            return value
        batch = next(iter(feed[name].shape[0] for name in self._dataset.inputs))
        return value[:count] if value.shape[0] == batch else value

    def _predict(self, chosen: Sequence[str], bar: Bar) -> dict[str, Array]:
        gatherer = Gatherer(self._dataset)
        for feed, count in self._feeds:
            gatherer.add(self._switched.forward(feed, frozenset(chosen)), feed, count)
            bar.advance()
        return gatherer.result()

    def _judge(self, outputs: Mapping[str, Array]) -> Score | None:
        """The FP32 model's score; None when the metric has no value on so few samples."""
        if self._metric is None:
            return None
        score = self._metric(outputs, self._dataset, self._exact)
        return score if math.isfinite(score.value) else None

    def _effect(self, outputs: Mapping[str, Array]) -> _Effect:
        deviation = _Deviation()
        for name, exact in self._exact.items():
            deviation.add(_as_float(outputs[name]), _as_float(exact))
        if self._metric is None or self._score is None:
            return _Effect(deviation.error(), None)
        score = self._metric(outputs, self._dataset, self._exact)
        return _Effect(deviation.error(), self._metric.drop(self._score, score))

    def _floats(self, segment: half.Segment) -> tuple[str, ...]:
        """Float32 tensors of the main graph that a segment computes, in order."""
        return tuple(name for names in self._results.values() for name in names if name in segment.tensors)

    def _results_of(self, name: str) -> tuple[str, ...]:
        """The tensors of the main graph at which a node is judged: its own, or those of the node that holds it."""
        return self._results[name] if name in self._results else self._results[self._holder[name]]

    def _read(self, node: ir.Node) -> list[str]:
        """Float32 tensors that a node reads, each once, constants excepted, by the names that they have in runs."""
        names = []
        for value in dict.fromkeys(node.inputs):
            if value is None or value.dtype != ir.DataType.FLOAT or half.is_constant(value):
                continue
            producer = value.producer()
            inside = () if producer is None else self._switched.inside.get(str(producer.name), ())
            own = [] if producer is None else _float_results(producer)
            names.append(inside[own.index(str(value.name))] if inside else str(value.name))
        return names

    def _needed_after(self, index: int) -> set[str]:
        later = self._switched.segments[index + 1 :]
        return {name for segment in later for name in segment.inputs} | set(self._switched.outputs)

    def _groups(self, nodes: Sequence[str]) -> list[Sequence[str]]:
        """Nodes whose final outputs are kept at the same time."""
        size = sum(value.nbytes for value in self._exact.values())
        step = max(1, _GROUP_BYTES // max(size, 1))
        return [nodes[i : i + step] for i in range(0, len(nodes), step)] or [()]

    def _rows(self) -> Iterator[LayerRow]:
        reasons = half.obstacles(self._model)
        nodes = [node for node in self._model.graph.all_nodes() if str(node.name) in reasons]
        for index, node in enumerate(nodes):
            yield self._row(index, node, reasons[str(node.name)])

    def _row(self, index: int, node: ir.Node, reason: str) -> LayerRow:
        name = str(node.name)
        holder = self._holder.get(name, "")
        found = self._found
        shown = self._results_of(name)
        effect = found.effects.get(name)
        constants = _constants(node, self._model.opset_imports)
        tensors = found.tensors
        return LayerRow(
            index=index,
            name=name,
            op=f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
            module=module_of(node),
            body=holder,
            candidate=not reason,
            reason=reason,
            operands=_merged([tensors[name] for name in self._read(node) if name in tensors]),
            constants=_merged([tally for _, _, tally in constants]),
            lossy=tuple(
                _lossy(position, value, tally)
                for position, value, tally in constants
                if tally.overflow or tally.vanish or tally.subnormal
            ),
            outputs=_merged([tensors[t] for t in self._results.get(name, ())]),
            accumulated=found.sums.get(name),
            local=found.local[name].error() if name in found.local and shown else None,
            end=None if effect is None else effect.end,
            drop=None if effect is None or effect.drop is None else effect.drop.value,
            stderr=None if effect is None or effect.drop is None else effect.drop.stderr,
            cumulative=_sum([found.cumulative[t] for t in shown]),
        )


def _sum(deviations: Sequence[_Deviation]) -> Error | None:
    if not deviations:
        return None
    total = _Deviation()
    for deviation in deviations:
        total.elements += deviation.elements
        total.signal += deviation.signal
        total.noise += deviation.noise
        total.broken += deviation.broken
    return total.error()


def _kept(before: Mapping[str, Array], new: Mapping[str, Array], needed: set[str]) -> dict[str, Array]:
    return {name: value for name, value in {**before, **new}.items() if name in needed}


def _batch(dataset: Dataset) -> int | None:
    """Samples per run: at most 16 and 16 MiB of inputs, and preferably without a last batch that needs padding."""
    if not dataset.batched:
        return None
    size = sum(array[:1].nbytes for array in dataset.inputs.values())
    most = max(1, min(_BATCH, _BATCH_BYTES // max(size, 1), len(dataset)))
    most = min(max(most, dataset.batch_min), dataset.batch_max)
    whole = [batch for batch in range(dataset.batch_min, most + 1) if len(dataset) % batch == 0]
    return whole[-1] if whole and whole[-1] * 2 >= most else most


def _holders(model: ir.Model) -> dict[str, str]:
    """For each node inside of a body, the node of the main graph that holds it."""
    return {
        str(inner.name): str(node.name)
        for node in model.graph
        for body in half.bodies(node)
        for inner in body.all_nodes()
    }


def _float_results(node: ir.Node) -> tuple[str, ...]:
    return tuple(str(value.name) for value in node.outputs if value.name and value.dtype == ir.DataType.FLOAT)


def _constants(node: ir.Node, opsets: Mapping[str, int]) -> list[tuple[int, ir.Value, _Tally]]:
    """Position, value and counts of the float32 constants that are rounded when a node is in FP16."""
    found = []
    for position in half.operands(node, opsets):
        value = node.inputs[position]
        if value is not None and value.const_value is not None and half.is_constant(value):
            tally = _Tally()
            tally.add(value.const_value.numpy())
            found.append((position, value, tally))
    return found


def _lossy(position: int, value: ir.Value, tally: _Tally) -> LossyConstant:
    return LossyConstant(
        name=str(value.name),
        operand=position,
        elements=tally.elements,
        absmax=tally.absmax,
        absmin=tally.absmin,
        overflow=tally.overflow,
        subnormal=tally.subnormal,
        vanish=tally.vanish,
    )


def _accumulates_too_much(row: LayerRow) -> bool:
    """Whether FP16 accumulators could overflow where the results do not."""
    fits = row.outputs is not None and not row.outputs.overflow
    return fits and row.accumulated is not None and row.accumulated > half.LARGEST


def _matters(constant: LossyConstant) -> bool:
    """Whether a constant is worth a line: it overflows, or most of it is too small (a few tiny weights are usual)."""
    return bool(constant.overflow) or 2 * (constant.vanish + constant.subnormal) > constant.elements


def _report(table: LayerTable) -> ProbeReport:
    ranked = sorted(
        (row for row in table.candidates if row.drop is not None and row.drop > 0), key=lambda row: -(row.drop or 0)
    )
    return ProbeReport(
        samples=table.samples,
        nodes=len(table.rows),
        candidates=len(table.candidates),
        metric=table.metric,
        value=table.value,
        all_fp16_drop=table.drop,
        all_fp16=table.end,
        overflowing=[row.name for row in table.candidates if row.outputs is not None and row.outputs.overflow],
        accumulation_risk=[row.name for row in table.candidates if _accumulates_too_much(row)],
        lossy_constants=[row.name for row in table.candidates if any(map(_matters, row.lossy))],
        worst={row.name: row.drop or 0.0 for row in ranked[:_SHOWN]},
    )
