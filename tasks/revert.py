"""Turns the INT8 plan and the mixed FP16 plan into one graph within the budget: the stage `revert`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from enginesmith.tasks import progress
from enginesmith.tasks.data import Array, Dataset, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io, qdq
from enginesmith.tasks.graph.half import candidates, emulate
from enginesmith.tasks.graph.layers import Figure
from enginesmith.tasks.graph.mixed import to_mixed
from enginesmith.tasks.graph.opset import raise_opset
from enginesmith.tasks.graph.plan import load_plan
from enginesmith.tasks.graph.search import Item, Outcome, Search, evaluation_limit
from enginesmith.tasks.graph.trial import QdqRunner, SwitchedQuantization, noise
from enginesmith.tasks.metric import Drop, Metric, MetricRef, Score, load_metric, load_outputs, load_score
from enginesmith.tasks.ranges import RangeTable, read_ranges
from enginesmith.tasks.settings import BudgetSettings, Int8Settings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact

REVERTED_FILE = "reverted.json"
CONFIDENCE = 1.645
"""Standard errors that are added to a drop before it is held to the budget: one-sided 95 % of a normal distribution."""

RANKED_SAMPLES = 32
"""Search samples on which each convolution is quantized alone."""


class RevertRow(BaseModel):
    """One convolution that calibration quantized, and what became of it.

    Attributes:
        conv: node name.
        depthwise: every output channel reads one input channel.
        quantized: whether it is INT8 in int8-mixed.
        rank: its place in the order of damage, 1 the most damaging.
        alone_sqnr_db: signal to quantization noise of the worst output with this convolution alone in INT8, everything
            else FP32, on `ranked_samples` search samples; None: no noise at all.
        alone_drop: drop of the metric in that run, on those samples.
        drop_if_quantized: for a reverted one, the drop on the whole search set when it alone is quantized again; None
            where that was not tested.
        reason: why.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    conv: str
    depthwise: bool
    quantized: bool
    rank: int
    alone_sqnr_db: float | None
    alone_drop: Figure
    drop_if_quantized: Figure | None
    reason: str


class RevertTrial(BaseModel):
    """One evaluation on the whole search set.

    Attributes:
        step: what was tried.
        reverted: how many convolutions were reverted.
        drop: of the metric.
        stderr: its paired standard error, where the metric has per-sample scores.
        within: whether the drop was within the target with 95 % confidence.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    step: str
    reverted: int
    drop: Figure
    stderr: Figure | None
    within: bool


class RevertTable(BaseModel):
    """reverted.json.

    Attributes:
        budget: largest drop allowed.
        target: what the upper end of a drop's confidence interval was held to: the budget, or that end without any INT8
            where it is more.
        drop: drop of int8-mixed on the search set; infinite when the metric had no value.
        stderr: its paired standard error.
        drop_without_int8: drop of the same graph with every convolution reverted.
        ranked_samples: search samples that ranked the convolutions.
        rows: by damage.
        trials: every evaluation in order.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    schema_version: int = 1
    budget: float
    target: float
    drop: Figure
    stderr: float | None
    drop_without_int8: Figure
    ranked_samples: int
    rows: tuple[RevertRow, ...]
    trials: tuple[RevertTrial, ...]


class RevertReport(BaseModel):
    """Which convolutions had to leave INT8, and at what drop."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    within_budget: bool
    budget: float
    drop: Figure
    stderr: float | None
    drop_all_int8: Figure
    drop_without_int8: Figure
    quantized: int
    reverted: tuple[str, ...]
    minimal: bool
    evaluations: int
    evaluation_limit: int
    ranking_runs: int
    warnings: tuple[str, ...]


def revert(
    out: Path,
    *,
    model: Artifact,
    int8: Artifact,
    fallback: Artifact,
    data: Artifact,
    reference: Artifact,
    metric: MetricRef,
    settings: Int8Settings,  # noqa: ARG001 - part of the key: the placement came through `int8`
    budget: BudgetSettings,
) -> RevertReport:
    """Revert convolutions from INT8 to the mixed FP16 plan until the drop on the search set is within the budget.

    1. Rank: each convolution alone in INT8, everything else FP32, on a few search samples, by the noise it puts on the
       worst output.
    2. Search (tasks/graph/search.py): revert from the most damaging down until the drop is within the budget with
       95 % confidence, then quantize again what turned out harmless, until quantizing any single one breaks that.
       Each evaluation is the FP16 emulation of exactly the graph that would be written, on the whole search set.
    3. Where the FP16 plan without INT8 is over the budget already, the search aims at not being worse than that.

    Writes ``int8-mixed/model.onnx`` (always: the best candidate found) and ``reverted.json``.

    Args:
        out: empty folder.
        model: the FP32 graph.
        int8: the calibration artifact of that graph.
        fallback: the artifact with plan.json.
        data: data artifact; its search set is used.
        reference: FP32 outputs, scores and the metric's state.
        metric: what the budget is about.
        settings: as for calibration.
        budget: the largest drop.

    Raises:
        EnginesmithError: `int8` was calibrated on another model.
    """
    table = read_ranges(int8.path, model=model.digest)
    graph = io.load(model.path)
    dataset = load_dataset(data, "search")
    judge = _Judge(dataset, load_metric(metric, reference), load_score(reference, "search"), reference)
    half = load_plan(fallback.path).half
    plan = _quantization(graph, table, io.load(int8.path / "int8"))
    builder = _Builder.of(graph, plan, half, dataset)

    with progress.track("revert", total=None) as bar:
        ranking = _rank(graph, plan, judge, bar)
        without = judge.drop(builder.build(()))
        target = max(budget.max_drop, _cautious(without)) if math.isfinite(without.value) else budget.max_drop
        drops: dict[frozenset[str], Drop] = {frozenset(): without}
        measured: list[Drop] = []

        def measure(reverted: frozenset[str]) -> float:
            kept = frozenset(builder.convs) - reverted
            if kept not in drops:
                drops[kept] = judge.drop(builder.build(kept))
                bar.advance()
            measured.append(drops[kept])
            return _cautious(drops[kept])

        order = [Item(row.conv, (row.conv,)) for row in ranking]
        search = Search(measure, target, nodes=max(len(order), 1))
        search.charge(1)
        outcome = search.run(lambda: (), order)

    reverted = {item.name for item in outcome.kept}
    kept = frozenset(builder.convs) - reverted
    io.save(builder.build(kept), out / "int8-mixed")
    found = drops[kept]
    minimal = outcome.within and all(item.name in outcome.without for item in outcome.kept)
    written = RevertTable(
        budget=budget.max_drop,
        target=target,
        drop=found.value,
        stderr=found.stderr,
        drop_without_int8=without.value,
        ranked_samples=min(RANKED_SAMPLES, len(dataset)),
        rows=tuple(_row(rank, entry, kept, drops, target) for rank, entry in enumerate(ranking, start=1)),
        trials=tuple(
            RevertTrial(step=t.step, reverted=t.restored, drop=d.value, stderr=d.stderr, within=t.within)
            for t, d in zip(outcome.trials, measured, strict=True)
        ),
    )
    (out / REVERTED_FILE).write_text(written.model_dump_json(indent=1) + "\n")
    return RevertReport(
        within_budget=found.value <= budget.max_drop,
        budget=budget.max_drop,
        drop=found.value,
        stderr=found.stderr,
        drop_all_int8=drops[frozenset(builder.convs)].value,
        drop_without_int8=without.value,
        quantized=len(kept),
        reverted=tuple(entry.conv for entry in ranking if entry.conv in reverted),
        minimal=minimal,
        evaluations=len(outcome.trials) + 1,
        evaluation_limit=evaluation_limit(len(order), len(outcome.kept)),
        ranking_runs=len(ranking),
        warnings=tuple(_warnings(found, without, budget, outcome, builder)),
    )


REVERT = Stage("revert", version=1, run=revert, tools=("numpy", "onnx", "onnx-ir", "onnxruntime"))


@dataclass(frozen=True)
class _Judge:
    """Scores outputs on the search set."""

    dataset: Dataset
    metric: Metric
    score: Score
    reference: Artifact

    def drop(self, typed: ir.Model) -> Drop:
        """The drop of a typed graph, emulated."""
        outputs = QdqRunner(emulate(typed)).predict(self.dataset)
        return self.metric.drop(self.score, self.metric(outputs, self.dataset, self.outputs))

    @property
    def outputs(self) -> dict[str, Array]:
        """The FP32 outputs."""
        return load_outputs(self.reference, "search")


@dataclass(frozen=True)
class _Builder:
    """Makes the int8-mixed graph for any choice of convolutions.

    Attributes:
        mixed: the FP16 mix without INT8.
        plan: numbers of all convolutions.
        problem: why the quantized convolutions are FP32 and not FP16, empty otherwise.
    """

    mixed: ir.Model
    plan: qdq.Quantization
    problem: str = ""
    convs: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, graph: ir.Model, plan: qdq.Quantization, half: Collection[str], dataset: Dataset) -> _Builder:
        """Convert to FP16 once; where the model cannot reach opset 19, quantized convolutions stay FP32."""
        chosen = set(half)
        names = tuple(c.conv for c in plan.convs)
        problem = ""
        if names:
            feed, _ = next(iter(dataset.feeds(dataset.batch_min if dataset.batched else None)))
            try:
                graph = raise_opset(graph, qdq.MIN_OPSET_HALF, feed)
            except EnginesmithError as error:
                problem = str(error.found)
                graph = raise_opset(graph, qdq.MIN_OPSET, feed)
                chosen -= set(names) | {s.add for s in plan.shortcuts}
        return cls(to_mixed(graph, chosen & set(candidates(graph))), plan, problem, names)

    def build(self, quantized: Collection[str]) -> ir.Model:
        """The typed graph with these convolutions in INT8."""
        typed = self.mixed.clone()
        _own_types(typed)
        pass_ = qdq.QuantizePass(self.plan.only(quantized))
        pass_.requires(typed)
        pass_(typed)
        return typed


def _own_types(model: ir.Model) -> None:
    """Part a clone from its original, with which it shares the type object of every value."""
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            value.type = copy(value.type)


@dataclass(frozen=True)
class _Ranked:
    conv: str
    depthwise: bool
    noise: float
    drop: float


def _quantization(graph: ir.Model, table: RangeTable, int8: ir.Model) -> qdq.Quantization:
    """The numbers of the INT8 graph: its own weights and biases, and the calibrated ranges."""
    quantized = {layer.conv for layer in table.layers}
    convs = [c for c in qdq.find_convs(graph, table.placement)[0] if c.conv in quantized]
    shortcuts: Sequence[qdq.Shortcut] = ()
    if table.placement == "conv+residual":
        read = {reader for row in table.tensors for reader in row.read_by}
        shortcuts = [s for s in qdq.find_shortcuts(graph, convs) if s.add in read]
    return qdq.read_quantization(graph, int8, convs, table.scales(), shortcuts=shortcuts)


def _rank(graph: ir.Model, plan: qdq.Quantization, judge: _Judge, bar: progress.Bar) -> list[_Ranked]:
    """The convolutions by the damage that each does alone, worst first; equal ones in graph order."""
    if not plan.convs:
        return []
    subset = judge.dataset.take(slice(0, RANKED_SAMPLES))
    switched = SwitchedQuantization(graph, plan)
    exact = switched.predict(subset, ())
    score = judge.metric(exact, subset, exact)
    ranked: list[_Ranked] = []
    for subgraph in plan.convs:
        outputs = switched.predict(subset, [subgraph.conv])
        drop = judge.metric.drop(score, judge.metric(outputs, subset, exact))
        ranked.append(_Ranked(subgraph.conv, subgraph.depthwise, noise(outputs, exact), drop.value))
        bar.advance()
    return sorted(ranked, key=lambda entry: -entry.noise)


def _cautious(drop: Drop) -> float:
    """The upper end of the drop's one-sided 95 % confidence interval (normal approximation).

    A choice that only just looks good on the search set is not taken.
    """
    return drop.value + CONFIDENCE * (drop.stderr or 0.0)


def _row(
    rank: int, entry: _Ranked, kept: frozenset[str], drops: Mapping[frozenset[str], Drop], target: float
) -> RevertRow:
    again = drops.get(kept | {entry.conv}) if entry.conv not in kept else None
    if entry.conv in kept:
        reason = f"in INT8 together with the others the drop is {_shown(drops[kept])}"
    elif again is None:
        reason = "reverted by its rank; evaluations ran out before it was tested alone"
    elif _cautious(again) <= target:
        reason = "it could be quantized again, but evaluations ran out"
    else:
        reason = f"quantized again, it alone brings the drop to {_shown(again)}; 95 % sure of {target:.4g} is wanted"
    return RevertRow(
        conv=entry.conv,
        depthwise=entry.depthwise,
        quantized=entry.conv in kept,
        rank=rank,
        alone_sqnr_db=round(-10 * math.log10(entry.noise), 2) if 0 < entry.noise < math.inf else None,
        alone_drop=entry.drop,
        drop_if_quantized=None if again is None else again.value,
        reason=reason,
    )


def _shown(drop: Drop) -> str:
    return f"{drop.value:.4g}" if drop.stderr is None else f"{drop.value:.4g} ± {drop.stderr:.2g}"


def _warnings(found: Drop, without: Drop, budget: BudgetSettings, outcome: Outcome, builder: _Builder) -> list[str]:
    warnings: list[str] = []
    if not builder.convs:
        warnings.append("calibration quantized no convolution: int8-mixed is the mixed FP16 graph")
    if builder.problem:
        warnings.append(f"quantized convolutions are FP32, not FP16: {builder.problem}")
    if not without.value <= budget.max_drop:
        warnings.append(
            f"the FP16 plan alone drops by {without.value:.4g}, more than the budget of {budget.max_drop:.4g}: "
            "INT8 was reverted only as far as it made that worse"
        )
    elif not found.value <= budget.max_drop:
        warnings.append(
            f"the drop is {found.value:.4g}, over the budget of {budget.max_drop:.4g}, after "
            f"{len(outcome.trials)} evaluations; the best candidate was kept"
        )
    if outcome.within and (untested := [i.name for i in outcome.kept if i.name not in outcome.without]):
        warnings.append(f"evaluations ran out before these were tested alone: {', '.join(untested)}")
    if found.stderr is not None and 0 < found.value < found.stderr:
        warnings.append(f"the drop of {found.value:.4g} is within its standard error of {found.stderr:.4g}")
    return warnings
