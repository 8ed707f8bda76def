"""Turns two modules and real inputs into a verdict: is the folded one the same function, and does FP32 keep it?

Two errors are kept apart. The *fold's own*: both modules run in FP64, the folded one with its weights as they are
stored, rounded once to FP32; nothing but the fold separates them, so the tolerance holds without exception. And
*rounding*: both run in FP32, where each is off the exact result by errors that no fold made.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from enginesmith.tasks.modules import call_module

Feeds = Sequence[Mapping[str, torch.Tensor]]
Outputs = Sequence[Mapping[str, torch.Tensor]]
ROUNDING = 2.0  # how much further from the exact result than the original a folded module may be in FP32


@dataclass(frozen=True)
class Difference:
    """How far one output of two modules is apart; all numbers in units of the output's range over all feeds.

    Attributes:
        output: its name.
        fold: largest difference in FP64; None where the module does not run in FP64.
        relative: largest difference in FP32; infinity where either is not finite or has another shape.
        rounding: the original's own distance from its FP64 result; None as above.
        passed: both are within what is allowed, see `compare_modules`.
    """

    output: str
    fold: float | None
    relative: float
    rounding: float | None
    passed: bool

    @property
    def worst(self) -> float:
        """The number that the tolerance is for."""
        return self.relative if self.fold is None or self.relative == float("inf") else self.fold


def run_all(module: nn.Module, feeds: Feeds) -> list[dict[str, torch.Tensor]]:
    """Outputs of a module on each feed, in float64 (integers and booleans too)."""
    return [{name: t.double() for name, t in call_module(module, feed).items()} for feed in feeds]


def exact_outputs(module: nn.Module, feeds: Feeds) -> list[dict[str, torch.Tensor]]:
    """Outputs of a module computed in FP64 with its weights as they are.

    Raises:
        Exception: whatever a module raises that insists on another type.
    """
    double = copy.deepcopy(module).double()
    wide = [{n: t.double() if t.is_floating_point() else t for n, t in feed.items()} for feed in feeds]
    return run_all(double, wide)


def compare_modules(
    expected: Outputs, exact: Outputs | None, folded: nn.Module, feeds: Feeds, tolerance: float
) -> list[Difference]:
    """Compare per output.

    An output passes when the fold's own error is at most `tolerance` times the output's range, and when FP32 brings the
    folded module no further from the exact result than that, or than `ROUNDING` times the original's own distance from
    it. Where the module does not run in FP64, the FP32 results must be within the tolerance of each other.

    Args:
        expected: outputs of the original (`run_all`).
        exact: its outputs in FP64 (`exact_outputs`), None where it does not run in FP64.
        folded: the folded module.
        feeds: real inputs.
        tolerance: relative to each output's range.

    Raises:
        EnginesmithError: the folded module cannot be run, or has other outputs.
    """
    found = run_all(folded, feeds)
    precise = None if exact is None else exact_outputs(folded, feeds)
    differences = []
    for name in expected[0]:
        theirs, ours = [e[name] for e in expected], [f.get(name) for f in found]
        span = _span(theirs)
        relative = _distance(ours, theirs, span)
        fold, rounding, passed = None, None, relative <= tolerance
        if exact is not None and precise is not None:
            truth = [e[name] for e in exact]
            fold = _distance([p.get(name) for p in precise], truth, span)
            rounding, own = _distance(theirs, truth, span), _distance(ours, truth, span)
            passed = fold <= tolerance and own <= max(tolerance, ROUNDING * rounding) and relative < float("inf")
        differences.append(Difference(name, fold, relative, rounding, passed))
    return differences


def _span(tensors: Sequence[torch.Tensor]) -> float:
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return 1.0
    low, high = min(float(t.min()) for t in filled), max(float(t.max()) for t in filled)
    return (high - low) or max(abs(low), abs(high)) or 1.0


def _distance(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor], span: float) -> float:
    """Largest difference in units of `span`; infinite for other shapes or NaN."""
    worst = 0.0
    for left, right in zip(ours, theirs, strict=True):
        if left is None or left.shape != right.shape:
            return float("inf")
        if not right.numel():
            continue
        value = float((left - right).abs().max()) / span
        if not value <= worst:
            worst = value if value == value else float("inf")  # NaN is not itself
    return worst
