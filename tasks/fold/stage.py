"""Turns slim's weights and the user's factory into a folded module: fewer operations, and exactly the same function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import nn

from enginesmith.tasks import progress
from enginesmith.tasks.batchnorm import Clamp
from enginesmith.tasks.data import load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.fold.apply import Folded, apply_plan, observe_norms
from enginesmith.tasks.fold.compare import Difference, Feeds, compare_modules, exact_outputs, run_all
from enginesmith.tasks.fold.feeds import make_feeds
from enginesmith.tasks.fold.flow import Flow, trace_flow
from enginesmith.tasks.fold.layers import is_norm, norm_of
from enginesmith.tasks.fold.plan import Fold, Kept, Plan, plan_folds
from enginesmith.tasks.modules import FOLDS, load_module
from enginesmith.tasks.settings import FoldSettings, InputSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.usercode import UserCode
from enginesmith.tasks.weights import WEIGHTS, write_state

SMALL_VARIANCE = 1e-5


class FoldRow(BaseModel):
    """A BatchNorm that was folded, and into which layers."""

    norm: str
    side: str
    into: tuple[str, ...]


class KeptRow(BaseModel):
    """A BatchNorm that stays, why, and as what: ``BatchNorm`` or ``scale and shift``."""

    norm: str
    reason: str
    form: str


class ClampedRow(BaseModel):
    """A channel whose variance was raised, why, and what that changes at most of the BatchNorm's output."""

    norm: str
    channel: int
    var: float
    floor: float
    reason: str
    change: float


class OutputRow(BaseModel):
    """Largest difference between folded and unfolded module, in units of the output's range.

    `fold` is the fold's own error, both computed in FP64; `difference` that of the FP32 results; `rounding` the
    unfolded module's own distance from its FP64 result. None where the module does not run in FP64.
    """

    output: str
    fold: float | None
    difference: float
    rounding: float | None


class FoldReport(BaseModel):
    """What folding did."""

    summary: str
    evidence: str
    channels: int
    small_variances: int
    folds: tuple[FoldRow, ...]
    kept: tuple[KeptRow, ...]
    clamped: tuple[ClampedRow, ...]
    clamp_change: float
    constant_channels: dict[str, tuple[int, ...]]
    flushed_subnormals: int
    outputs: tuple[OutputRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class FoldResult:
    """A folded module that passed the comparison, and the report."""

    folded: Folded
    report: FoldReport


def fold_weights(
    out: Path,
    *,
    weights: Artifact,
    factory: UserCode,
    data: Artifact,
    inputs: Mapping[str, InputSettings],
    settings: FoldSettings,
) -> FoldReport:
    """Write `out`/weights.safetensors and `out`/folds.json; `tasks.modules.load_folded` loads them.

    Args:
        out: folder to write into.
        weights: slim's artifact.
        factory: builds the module. Call inside `importable`.
        data: the data artifact; its calibration set feeds the comparison.
        inputs: declared inputs of the model.
        settings: clamp policy, tolerance, and BatchNorms to leave alone.

    Raises:
        EnginesmithError: weights that do not fit, outputs that are not finite, or a fold that changes the model.
    """
    module = load_module(factory, weights.path / WEIGHTS)
    feeds = make_feeds(load_dataset(data, "calibration"), inputs)
    result = fold_module(module, feeds, settings)
    for norm in result.report.kept:
        if "of the batch" in norm.reason:
            progress.note(f"fold: {norm.norm} stays, {norm.reason}: outputs depend on what else is in the batch")
    write_state(dict(result.folded.module.state_dict()), out / WEIGHTS)
    (out / FOLDS).write_text(result.folded.structure.model_dump_json(indent=1) + "\n")
    return result.report


FOLD = Stage("fold", version=2, run=fold_weights, tools=("torch",))


def fold_module(module: nn.Module, feeds: Feeds, settings: FoldSettings) -> FoldResult:
    """Fold a module's BatchNorms and prove that it still computes the same.

    Args:
        module: in eval mode; it is left as it is.
        feeds: real inputs by name; the first one is also what the data flow is traced with.
        settings: clamp policy, tolerance, and BatchNorms to leave alone.

    Raises:
        EnginesmithError: outputs that are not finite, or a fold or clamp that changes the model.
    """
    notes: list[str] = []
    runnable, expected = _expected(module, feeds, notes)
    flow = trace_flow(module, feeds[0])
    plan = plan_folds(module, flow, settings.skip)
    observed = observe_norms(module, runnable)
    judge = _Judge(runnable, expected, settings.tolerance, module)
    if judge.problem:
        notes.append(judge.problem)
    clamp: Clamp = settings.clamp["floor"] if isinstance(settings.clamp, dict) else settings.clamp
    folded = apply_plan(module, plan, clamp, observed, settings.tolerance)
    progress.checkpoint()
    differences = judge.compare(folded)
    change = 0.0
    if folded.clamped:
        plain = apply_plan(module, plan, "off", observed, settings.tolerance)
        without = judge.compare(plain)
        change = judge.distance(folded, plain)
        if not all(d.passed for d in differences) and all(d.passed for d in without):
            if clamp != "auto":
                raise EnginesmithError(
                    f"raising variances to {clamp:g} changes the outputs by {change:.2g} of their range",
                    key="fold.clamp",
                    details=[f"{n}: {len(c)} channels" for n, c in folded.clamped.items()],
                    hint=f"at most {settings.tolerance:g} is allowed (fold.tolerance); use clamp: auto",
                )
            notes.append(f"clamping would have changed the outputs by {change:.2g} of their range and was not done")
            folded, differences, change = plain, without, 0.0
    if not all(d.passed for d in differences):
        raise _guilty(module, plan, clamp, judge, differences)
    return FoldResult(folded, _report(module, flow, plan, folded, differences, change, notes))


class _Judge:
    """Compares folded modules with the original, in FP32 and in FP64, on the same feeds."""

    def __init__(
        self, feeds: Feeds, expected: list[dict[str, torch.Tensor]], tolerance: float, module: nn.Module
    ) -> None:
        self.feeds = feeds
        self.expected = expected
        self.tolerance = tolerance
        self.exact: list[dict[str, torch.Tensor]] | None = None
        self.problem = ""
        try:
            self.exact = exact_outputs(module, feeds)
        except Exception as error:  # a forward that insists on float32 may raise anything
            self.problem = f"compared in FP32 only: the model does not run in FP64 ({type(error).__name__}: {error})"

    def compare(self, folded: Folded) -> list[Difference]:
        return compare_modules(self.expected, self.exact, folded.module, self.feeds, self.tolerance)

    def distance(self, one: Folded, other: Folded) -> float:
        """How far two folded modules are apart: in FP64 where the original runs in FP64."""
        exact = None if self.exact is None else exact_outputs(other.module, self.feeds)
        expected = run_all(other.module, self.feeds)
        differences = compare_modules(expected, exact, one.module, self.feeds, float("inf"))
        return max(d.worst for d in differences)


def _expected(
    module: nn.Module, feeds: Feeds, notes: list[str]
) -> tuple[list[Mapping[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Feeds that the module takes, and its outputs; the first feed must work."""
    runnable: list[Mapping[str, torch.Tensor]] = []
    expected: list[dict[str, torch.Tensor]] = []
    for index, feed in enumerate(feeds):
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in feed.items())
        try:
            outputs = run_all(module, [feed])[0]
        except EnginesmithError:
            raise
        except Exception as error:
            if index == 0:
                raise EnginesmithError(
                    f"the model fails on the calibration data: {type(error).__name__}: {error}",
                    key="inputs",
                    hint=f"it was given {shapes}",
                ) from error
            notes.append(f"not compared at {shapes}: the model fails there ({type(error).__name__})")
            continue
        bad = [name for name, tensor in outputs.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise EnginesmithError(
                f"the model's output {', '.join(bad)} is not finite on the calibration data, before anything is folded",
                key="model.checkpoint",
                details=[
                    f"BatchNorm {path}: variance + eps is 0 in channels {', '.join(map(str, channels[:8]))}"
                    for path, layer in module.named_modules()
                    if is_norm(layer)
                    and getattr(layer, "running_var", None) is not None
                    and (channels := norm_of(layer).broken())
                ],
                hint="take another checkpoint, or look at the data",
            )
        runnable.append(feed)
        expected.append(outputs)
    return runnable, expected


def _guilty(
    module: nn.Module, plan: Plan, clamp: Clamp, judge: _Judge, differences: Sequence[Difference]
) -> EnginesmithError:
    """Find by bisection the fold that makes the difference: folds[:passing] pass, folds[:failing] do not."""

    def attempt(count: int) -> list[Difference]:
        rest = tuple(Kept(f.norm, "") for f in plan.folds[count:])
        part = replace(plan, folds=plan.folds[:count], kept=plan.kept + rest)
        return judge.compare(apply_plan(module, part, clamp, {}, judge.tolerance))

    worst = max((d for d in differences if not d.passed), key=lambda d: d.worst)
    found = f"output {worst.output} by {_amount(worst)}"
    if not plan.folds or not all(d.passed for d in attempt(0)):
        return EnginesmithError(f"writing BatchNorms as scale and shift changes {found}", key="fold")
    passing, failing = 0, len(plan.folds)
    with progress.track("fold: looking for the fold that changes the model", total=failing.bit_length()) as bar:
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if all(d.passed for d in attempt(middle)):
                passing = middle
            else:
                failing = middle
            bar.advance()
    guilty = plan.folds[failing - 1]
    return EnginesmithError(
        f"folding {guilty} changes {found}",
        where=guilty.norm,
        key="fold.skip",
        details=[f"{d.output}: {_amount(d)}" for d in differences if not d.passed],
        hint=f"at most {judge.tolerance:g} is allowed (fold.tolerance); leave this one out with "
        f"fold: {{skip: [{guilty.norm}]}}",
    )


def _amount(difference: Difference) -> str:
    if difference.fold is None or difference.relative == float("inf"):
        return f"{difference.relative:.2g} of its range"
    return (
        f"{difference.fold:.2g} of its range in FP64, {difference.relative:.2g} in FP32 "
        f"(the unfolded model's own rounding: {difference.rounding:.2g})"
    )


def _report(
    module: nn.Module,
    flow: Flow,
    plan: Plan,
    folded: Folded,
    differences: Sequence[Difference],
    change: float,
    notes: list[str],
) -> FoldReport:
    gone = set(folded.structure.identities)
    done: list[Fold] = [f for f in plan.folds if f.norm in gone]
    variances = [
        norm_of(layer).var
        for _, layer in module.named_modules()
        if is_norm(layer) and getattr(layer, "running_var", None) is not None
    ]
    total = sum(len(v) for v in variances)
    small = sum(int((v < SMALL_VARIANCE).sum()) for v in variances)
    clamped = sum(len(c) for c in folded.clamped.values())
    shifted = len(folded.structure.scale_shifts)
    return FoldReport(
        summary=f"{len(done)} BatchNorms folded, {shifted} turned into scale and shift, "
        f"{len(folded.kept) - shifted} kept; {clamped} channels clamped",
        evidence=flow.evidence,
        channels=total,
        small_variances=small,
        folds=tuple(FoldRow(norm=f.norm, side=f.side, into=tuple(p.layer for p in f.parts)) for f in done),
        kept=tuple(
            KeptRow(
                norm=k.norm,
                reason=k.reason,
                form="scale and shift" if k.norm in folded.structure.scale_shifts else "BatchNorm",
            )
            for k in folded.kept
        ),
        clamped=tuple(
            ClampedRow(norm=norm, channel=c.channel, var=c.var, floor=c.floor, reason=c.reason, change=c.change)
            for norm, channels in folded.clamped.items()
            for c in channels
        ),
        clamp_change=change,
        constant_channels=folded.constants,
        flushed_subnormals=folded.flushed,
        outputs=tuple(
            OutputRow(output=d.output, fold=d.fold, difference=d.relative, rounding=d.rounding) for d in differences
        ),
        notes=tuple(notes),
    )
