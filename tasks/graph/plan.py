"""The precision plan: which nodes run in FP16 and which in FP32, and why, as rows on disk (plan.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph.layers import Figure

PLAN = "plan.json"


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class NodeRow(_Row):
    """One node.

    Attributes:
        name: the node.
        op: its operator.
        precision: in what mixed/model.onnx runs it: "fp16", "fp32", or "none" when it touches no float32 data.
        half: whether the plan rounds what it reads and writes to FP16. Differs from `precision` only for nodes that
            give the same values in either.
        region: seed of the region that it went back to FP32 with, empty for others.
        reason: why, with the figures.
    """

    name: str
    op: str
    precision: Literal["fp16", "fp32", "none"]
    half: bool
    region: str = ""
    reason: str


class RegionRow(_Row):
    """Nodes that went back to FP32 together.

    Attributes:
        seed: the node that FP16 harms, or for a segment its first node.
        nodes: all of them, in graph order.
        kind: see `regions.Region`; "segment": consecutive nodes, found by bisection because no single one explains
            the drop.
        cause: "layer_drop": a node costs more than that alone. "budget": needed to get within the budget.
        drop_alone: the largest drop that one of its nodes causes alone in FP16, as the probe measured it.
        drop_without: drop when only this region returns to FP16; None when not tested.
    """

    seed: str
    nodes: tuple[str, ...]
    kind: Literal["node", "closed", "pattern", "segment"]
    cause: Literal["layer_drop", "budget"]
    drop_alone: Figure | None
    drop_without: Figure | None


class TrialRow(_Row):
    """One evaluation of the metric on the whole search set.

    Attributes:
        step: what was tried.
        fp32: how many nodes were in FP32, pinned ones not counted.
        drop: against FP32; positive is worse, infinity when the metric had no value.
        within: whether that is within the budget.
    """

    step: str
    fp32: int
    drop: Figure
    within: bool


class PinRow(_Row):
    """One entry of precision.fp16.keep_fp32 and the nodes that it names."""

    pin: str
    nodes: tuple[str, ...]


class Plan(_Row):
    """The plan.

    Attributes:
        metric: what the metric is.
        better: its direction.
        samples: how many samples the search set has.
        reference: the FP32 model's value on them.
        max_drop: the budget.
        layer_drop: what a single layer may cost.
        within_budget: whether the mixed model's drop is within the budget on the search set.
        drop: the mixed model's drop on the search set.
        stderr: its paired standard error, where the metric has per-sample scores.
        start_drop: drop with every candidate that is not pinned in FP16.
        obstacles: what stands in the way of the budget, or of knowing that no region is kept in vain.
        nodes: a row per node.
        regions: what went back to FP32.
        untested: seeds of regions of which it is not known whether they are needed.
        pins: the user's.
        trials: the search's evaluations, in order.
        evaluations: how often the metric was computed on the whole search set, single layers included.
        limit: how many evaluations were allowed.
        reranked: how often a step surprised, so that the rest was ranked anew.
        fp16_casts: Cast nodes in fp16/model.onnx that the FP32 model does not have.
        mixed_casts: the same for mixed/model.onnx; no placement with the same values has fewer.
        unmoved_casts: how many there would be without moving nodes that give the same values in either precision.
    """

    metric: str
    better: Literal["higher", "lower"]
    samples: int
    reference: Figure
    max_drop: float
    layer_drop: float
    within_budget: bool
    drop: Figure
    stderr: Figure | None
    start_drop: Figure
    obstacles: tuple[str, ...]
    nodes: tuple[NodeRow, ...]
    regions: tuple[RegionRow, ...]
    untested: tuple[str, ...]
    pins: tuple[PinRow, ...]
    trials: tuple[TrialRow, ...]
    evaluations: int
    limit: int
    reranked: int
    fp16_casts: int
    mixed_casts: int
    unmoved_casts: int

    @property
    def half(self) -> tuple[str, ...]:
        """Names of the nodes that the plan has in FP16, in graph order."""
        return tuple(row.name for row in self.nodes if row.half)

    def save(self, folder: Path) -> None:
        """Write plan.json."""
        (folder / PLAN).write_text(self.model_dump_json(indent=1) + "\n")


def load_plan(folder: Path) -> Plan:
    """Read plan.json from a fallback artifact's folder.

    Raises:
        EnginesmithError: it is not there or not a plan.
    """
    file = folder / PLAN
    try:
        return Plan.model_validate_json(file.read_bytes())
    except OSError as error:
        raise EnginesmithError(f"no precision plan: {error.strerror}", where=str(file), hint="run fallback") from error
    except ValidationError as error:
        raise EnginesmithError(f"not a precision plan: {error}", where=str(file)) from error
