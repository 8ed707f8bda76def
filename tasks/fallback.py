"""Turns an FP32 model and its layer table into a plan of what runs in FP16, and into the fp16 and mixed models."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.data import Array, Dataset, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.layers import Figure, LayerRow, LayerTable, load_layers
from enginesmith.tasks.graph.mixed import Conversion, convert
from enginesmith.tasks.graph.plan import NodeRow, PinRow, Plan, RegionRow, TrialRow
from enginesmith.tasks.graph.regions import Region, Regions
from enginesmith.tasks.graph.search import Item, Names, Outcome, Search, evaluation_limit
from enginesmith.tasks.graph.switched import SwitchedModel
from enginesmith.tasks.metric import Drop, Metric, MetricRef, Score, load_metric, load_outputs, load_score
from enginesmith.tasks.settings import BudgetSettings, Fp16Settings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact

PINS_KEY = "precision.fp16.keep_fp32"

_SEGMENTS = 16
_RERANK_SAMPLES = 16


class FallbackReport(BaseModel):
    """The plan in short."""

    within_budget: bool
    drop: Figure
    stderr: Figure | None
    start_drop: Figure
    max_drop: float
    candidates: int
    fp32_nodes: int
    pinned: int
    regions: list[str]
    casts: int
    evaluations: int
    limit: int
    obstacles: list[str]


def fall_back(
    out: Path,
    *,
    model: Artifact,
    probe: Artifact,
    data: Artifact,
    reference: Artifact,
    metric: MetricRef,
    settings: Fp16Settings,
    budget: BudgetSettings,
) -> FallbackReport:
    """Search which nodes go back to FP32; write plan.json, fp16/model.onnx (all candidates) and mixed/model.onnx.

    Only the search set is used. The best plan is written also when it misses the budget.

    Raises:
        EnginesmithError: a pin matches nothing; the metric fails on finite outputs; the model cannot be run.
    """
    source = io.load(model.path)
    dataset = load_dataset(data, "search")
    judge = Judge(
        SwitchedModel(source),
        dataset,
        load_metric(metric, reference),
        load_outputs(reference, "search"),
        load_score(reference, "search"),
    )
    plan, fp16, mixed = make_plan(source, load_layers(probe.path), judge, settings, budget)
    plan.save(out)
    io.save(fp16.model, out / "fp16")
    io.save(mixed.model, out / "mixed")
    return _report(plan)


FALLBACK = Stage("fallback", version=1, run=fall_back, tools=("numpy", "onnx", "onnx-ir", "onnxruntime", "networkx"))


@dataclass
class Judge:
    """Measures on the search set what a choice of FP16 nodes costs.

    Args:
        model: the FP32 model, switched.
        dataset: the search set.
        metric: the user's metric.
        outputs: the FP32 model's outputs on the search set, by name.
        reference: its score.
    """

    model: SwitchedModel
    dataset: Dataset
    metric: Metric
    outputs: Mapping[str, Array]
    reference: Score
    drops: dict[Names, Drop] = field(default_factory=dict)

    def drop(self, half: Iterable[str]) -> Drop:
        """The metric's drop with these nodes in FP16, on the whole search set; inf when the metric has no value."""
        chosen = frozenset(half)
        if chosen not in self.drops:
            with progress.track("fallback", total=len(self.dataset)) as bar:
                outputs = self.model.predict(self.dataset, chosen, bar=bar)
            score = self.metric(outputs, self.dataset, self.outputs)
            self.drops[chosen] = self.metric.drop(self.reference, score)
        return self.drops[chosen]

    def error(self, half: Iterable[str], samples: int) -> float:
        """Relative L2 error of the float outputs on the first samples, the mean over outputs; inf when not finite."""
        part = self.dataset.take(slice(0, min(samples, len(self.dataset))))
        outputs = self.model.predict(part, frozenset(half))
        errors = []
        for name, found in outputs.items():
            expected = np.asarray(self.outputs[name][: len(found)], dtype=np.float64)
            if found.dtype.kind != "f":
                continue
            with np.errstate(all="ignore"):
                error = np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected)
            errors.append(float(error) if np.isfinite(error) else math.inf)
        return float(np.mean(errors)) if errors else 0.0


def make_plan(
    model: ir.Model, table: LayerTable, judge: Judge, settings: Fp16Settings, budget: BudgetSettings
) -> tuple[Plan, Conversion, Conversion]:
    """The plan, the model with all candidates in FP16, and the mixed model.

    Args:
        model: FP32 model; every node has a unique name.
        table: its layer table.
        judge: measures on the search set.
        settings: layer_drop and pins.
        budget: what the metric may drop.

    Raises:
        EnginesmithError: a pin matches nothing.
    """
    pins = pinned_nodes(table.rows, settings.keep_fp32)
    search = _PlanSearch(model, table, judge, pins, settings.layer_drop, budget.max_drop)
    outcome = search.run()
    fp32 = search.pinned | {name for item in outcome.kept for name in item.nodes}
    fp16 = convert(model, judge.model.nodes)
    mixed = convert(model, [name for name in judge.model.nodes if name not in fp32])
    return search.plan(outcome, fp16, mixed), fp16, mixed


def pinned_nodes(rows: Sequence[LayerRow], pins: Sequence[str]) -> tuple[PinRow, ...]:
    """The nodes that each pin names: by name, glob pattern, operator, or path of the module that it comes from.

    Raises:
        EnginesmithError: a pin matches nothing; its key is ``precision.fp16.keep_fp32.N``.
    """
    found = []
    for index, pin in enumerate(pins):
        nodes = tuple(row.name for row in rows if _matches(row, pin))
        if not nodes:
            known = [name for row in rows for name in (row.name, row.op, row.module) if name]
            close = difflib.get_close_matches(pin, dict.fromkeys(known), n=3)
            raise EnginesmithError(
                f"{pin!r} matches no node",
                key=f"{PINS_KEY}.{index}",
                hint=f"did you mean {', '.join(close)}?"
                if close
                else "write a node's name, a pattern such as */norm*, or an operator; the layer table lists them",
            )
        found.append(PinRow(pin=pin, nodes=nodes))
    return tuple(found)


def _matches(row: LayerRow, pin: str) -> bool:
    return any(text and (text == pin or fnmatch.fnmatchcase(text, pin)) for text in (row.name, row.op, row.module))


class _PlanSearch:
    """One search: from the layer table to ranked regions, and from what was kept to the plan."""

    def __init__(
        self,
        model: ir.Model,
        table: LayerTable,
        judge: Judge,
        pins: tuple[PinRow, ...],
        layer_drop: float,
        max_drop: float,
    ) -> None:
        self._table = table
        self._judge = judge
        self._pins = pins
        self._layer_drop = layer_drop
        self.pinned = frozenset(name for pin in pins for name in pin.nodes)
        self._open = [name for name in judge.model.nodes if name not in self.pinned]
        self._rows = {row.name: row for row in table.rows}
        absmax = {row.name: row.outputs.absmax for row in table.rows if row.outputs is not None}
        self._regions = Regions(model, absmax)
        self._found: dict[str, Region] = {}
        self._over: dict[str, float] = {}
        self._search = Search(
            measure=lambda restored: self._drop(restored).value,
            max_drop=max_drop,
            nodes=len(self._open),
            rerank=self._segments,
            split=self._halves,
        )

    def run(self) -> Outcome:
        if not math.isfinite(self._judge.reference.value):
            return Outcome((), math.inf, False, {}, (), evaluation_limit(len(self._open), 0), 0)
        return self._search.run(self._layers_over, self._ranked())

    def _drop(self, restored: Iterable[str]) -> Drop:
        fp32 = frozenset(restored) | self.pinned
        return self._judge.drop(name for name in self._judge.model.nodes if name not in fp32)

    def _ranked(self) -> list[Item]:
        """Regions around each node, the most harmful first."""
        worst = sorted((self._rows[name] for name in self._open), key=_harm, reverse=True)
        return self._items(self._regions.around(row.name) for row in worst)

    def _items(self, regions: Iterable[Region]) -> list[Item]:
        """One item per set of nodes, pinned ones left out, in order."""
        items: dict[tuple[str, ...], Item] = {}
        for region in regions:
            nodes = tuple(name for name in region.nodes if name not in self.pinned)
            if nodes and nodes not in items:
                items[nodes] = Item(region.seed, nodes)
                self._found[items[nodes].name] = region
        return list(items.values())

    def _layers_over(self) -> list[Item]:
        """Regions around the nodes that cost more than layer_drop alone.

        The probe's few samples decide where they leave no doubt: twice the standard error away from layer_drop, or
        measured on the whole search set. Doubtful ones are measured on the whole search set, the most harmful first, at
        most log2(nodes) + 4 of them; the probe's figure stands for the rest.
        """
        over: list[str] = []
        checks = math.floor(math.log2(max(len(self._open), 1))) + 4
        suspects = [r for n in self._open if (r := self._rows[n]).drop is not None and r.drop > self._layer_drop]
        for row in sorted(suspects, key=_harm, reverse=True):
            drop = row.drop or 0.0
            certain = (
                self._table.samples >= len(self._judge.dataset)
                or drop - 2 * (row.stderr or 0.0) > self._layer_drop
                or not checks
            )
            if not certain:
                checks -= 1
                self._search.charge(1)
                drop = self._judge.drop([row.name]).value
            if not drop <= self._layer_drop:
                over.append(row.name)
                self._over[row.name] = drop
        return self._items(self._regions.around(name) for name in over)

    def _segments(self, restored: Names) -> list[Item]:
        """Runs of consecutive nodes, ranked by how much the outputs gain when each is restored beside `restored`.

        Empty when no single one makes the outputs finite: the ranking would be arbitrary.
        """
        rest = [name for name in self._open if name not in restored]
        size = max(1, math.ceil(len(rest) / _SEGMENTS))
        items = [self._segment(rest[start : start + size]) for start in range(0, len(rest), size)]
        errors: dict[str, float] = {}
        with progress.track("fallback: ranking anew", total=len(items)) as bar:
            for item in items:
                fp32 = restored | self.pinned | set(item.nodes)
                half = [name for name in self._judge.model.nodes if name not in fp32]
                errors[item.name] = self._judge.error(half, _RERANK_SAMPLES)
                bar.advance()
        if not any(math.isfinite(error) for error in errors.values()):
            return []
        return sorted(items, key=lambda item: errors[item.name])

    def _segment(self, nodes: Sequence[str]) -> Item:
        closed = tuple(name for name in self._regions.close(nodes) if name not in self.pinned)
        return Item(f"{nodes[0]} … {nodes[-1]}" if len(nodes) > 1 else nodes[0], closed)

    def _halves(self, item: Item) -> tuple[Item, Item] | None:
        if item.name in self._found or len(item.nodes) < 2:
            return None
        middle = len(item.nodes) // 2
        halves = self._segment(item.nodes[:middle]), self._segment(item.nodes[middle:])
        return halves if all(len(half.nodes) < len(item.nodes) for half in halves) else None

    def plan(self, outcome: Outcome, fp16: Conversion, mixed: Conversion) -> Plan:
        regions = tuple(self._region_row(item, outcome) for item in outcome.kept)
        untested = tuple(r.seed for r in regions if r.cause == "budget" and r.drop_without is None)
        final = self._drop(name for item in outcome.kept for name in item.nodes) if outcome.trials else None
        start = outcome.trials[0].drop if outcome.trials else math.inf
        region_of = {name: row for row in reversed(regions) for name in row.nodes}
        return Plan(
            metric=self._judge.metric.definition,
            better=self._judge.metric.better,
            samples=len(self._judge.dataset),
            reference=self._judge.reference.value,
            max_drop=self._search.max_drop,
            layer_drop=self._layer_drop,
            within_budget=outcome.within,
            drop=outcome.drop,
            stderr=final.stderr if final else None,
            start_drop=start,
            obstacles=self._obstacles(outcome, untested),
            nodes=tuple(self._node_row(row, region_of.get(row.name), mixed) for row in self._table.rows),
            regions=regions,
            untested=untested,
            pins=self._pins,
            trials=tuple(TrialRow(step=t.step, fp32=t.restored, drop=t.drop, within=t.within) for t in outcome.trials),
            evaluations=len(self._judge.drops),
            limit=outcome.limit,
            reranked=outcome.reranked,
            fp16_casts=fp16.casts,
            mixed_casts=mixed.casts,
            unmoved_casts=mixed.unmoved_casts,
        )

    def _region_row(self, item: Item, outcome: Outcome) -> RegionRow:
        found = self._found.get(item.name)
        seed = found.seed if found else item.nodes[0]
        alone = [drop for name in item.nodes if (drop := self._rows[name].drop) is not None]
        return RegionRow(
            seed=seed,
            nodes=item.nodes,
            kind=found.kind if found else "segment",
            cause="layer_drop" if seed in self._over else "budget",
            drop_alone=max(alone) if alone else None,
            drop_without=outcome.without.get(item.name),
        )

    def _obstacles(self, outcome: Outcome, untested: tuple[str, ...]) -> tuple[str, ...]:
        found = []
        if not outcome.trials:
            found.append("the FP32 model itself has no value of the metric on the search set: nothing can be compared")
        elif not outcome.within:
            restored = sum(len(item.nodes) for item in outcome.kept)
            found.append(
                f"the best plan drops {outcome.drop:.4g} with {restored} of {len(self._open)} nodes in FP32; "
                f"the budget is {self._search.max_drop:.4g}"
            )
            if any(t.restored == len(self._open) for t in outcome.trials):
                found.append("with every node in FP32 the drop is no smaller: it does not come from FP16")
            else:
                found.append(f"all {outcome.limit} evaluations are used up")
        if untested and outcome.within:
            found.append(f"evaluations ran out before it was known whether {', '.join(untested)} could return to FP16")
        return tuple(found)

    def _node_row(self, row: LayerRow, region: RegionRow | None, mixed: Conversion) -> NodeRow:
        runs_half = row.name in mixed.half
        wanted = row.candidate and row.name not in self.pinned and region is None
        floats = row.operands is not None or row.constants is not None or row.outputs is not None or row.candidate
        return NodeRow(
            name=row.name,
            op=row.op,
            precision="fp16" if runs_half else "fp32" if floats else "none",
            half=wanted,
            region=region.seed if region else "",
            reason="; ".join([self._reason(row, region), *_remarks(row, wanted, runs_half)]),
        )

    def _reason(self, row: LayerRow, region: RegionRow | None) -> str:
        if not row.candidate:
            return row.reason
        for index, pin in enumerate(self._pins):
            if row.name in pin.nodes:
                return f"pinned by {PINS_KEY}.{index} ({pin.pin!r})"
        if region is None:
            return _alone(row)
        if row.name in self._over:
            return f"alone in FP16 it costs {self._over[row.name]:.4g}, more than layer_drop {self._layer_drop:.4g}"
        if region.kind == "segment":
            why = "errors add up: no single node explains the drop, this run of nodes does"
        elif row.name == region.seed:
            why = _alone(row)
        elif region.kind == "pattern":
            why = f"part of the written-out normalisation around {region.seed}"
        else:
            reach = max((v.absmax for v in (row.operands, row.outputs) if v is not None), default=0.0)
            why = f"keeps the region of {region.seed} closed: its values reach {reach:.4g}"
        if region.drop_without is not None:
            return f"{why}; with the region in FP16 the drop is {region.drop_without:.4g}"
        return why


def _harm(row: LayerRow) -> tuple[float, float]:
    """How much a node alone in FP16 harms: the metric first, then the model's outputs."""
    return (max(row.drop or 0.0, 0.0), row.end.rel_l2 if row.end is not None else 0.0)


def _alone(row: LayerRow) -> str:
    parts = [] if row.drop is None else [f"alone in FP16 it costs {row.drop:.4g}"]
    if row.end is not None:
        parts.append(f"output SQNR {row.end.sqnr_db:.4g} dB")
    return ", ".join(parts) or "not measured"


def _remarks(row: LayerRow, wanted: bool, runs_half: bool) -> list[str]:
    remarks = []
    if wanted and not runs_half:
        remarks.append("runs in FP32 on values rounded to FP16: same result, fewer casts")
    if runs_half and not wanted:
        remarks.append("runs in FP16 as its neighbours do: same result, fewer casts")
    for constant in row.lossy if runs_half else ():
        counts = {"overflow": constant.overflow, "vanish": constant.vanish, "are subnormal": constant.subnormal}
        lost = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        remarks.append(f"of {constant.elements} elements of {constant.name} {lost} in FP16")
    return remarks


def _report(plan: Plan) -> FallbackReport:
    candidates = [row for row in plan.nodes if row.half or row.region]
    pinned = {name for pin in plan.pins for name in pin.nodes}
    return FallbackReport(
        within_budget=plan.within_budget,
        drop=plan.drop,
        stderr=plan.stderr,
        start_drop=plan.start_drop,
        max_drop=plan.max_drop,
        candidates=len(candidates),
        fp32_nodes=sum(1 for row in candidates if not row.half),
        pinned=len(pinned),
        regions=[f"{r.seed}: {len(r.nodes)} nodes ({r.kind}, {r.cause})" for r in plan.regions],
        casts=plan.mixed_casts,
        evaluations=plan.evaluations,
        limit=plan.limit,
        obstacles=list(plan.obstacles),
    )
