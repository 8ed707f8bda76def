"""Turns two modules and real inputs into a verdict: do they compute the same, up to FP32 rounding?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from enginesmith.tasks.modules import call_module

Feeds = Sequence[Mapping[str, torch.Tensor]]
ROUNDING = 4.0  # how much further from the exact result than the original a folded module may be


@dataclass(frozen=True)
class Difference:
    """How far one output of two modules is apart.

    Attributes:
        output: its name.
        relative: largest absolute difference, in units of the output's range over all feeds; NaN or infinity where
            either is not finite.
        feed: index of the feed where it is largest.
        rounding: the original's own distance from the FP64 result, likewise; None when it was not needed.
        passed: the difference is within the tolerance, or is rounding.
    """

    output: str
    relative: float
    feed: int
    rounding: float | None
    passed: bool


def run_all(module: nn.Module, feeds: Feeds) -> list[dict[str, torch.Tensor]]:
    """Outputs of a module on each feed, in float64 (integers and booleans too)."""
    return [{name: t.double() for name, t in call_module(module, feed).items()} for feed in feeds]


def compare_modules(
    expected: Sequence[Mapping[str, torch.Tensor]],
    folded: nn.Module,
    feeds: Feeds,
    tolerance: float,
    exact: Callable[[int], Mapping[str, torch.Tensor]],
) -> list[Difference]:
    """Compare per output.

    An output passes when its largest difference is at most `tolerance` times its range. An output that does not is
    judged by the FP64 result of the original on the feed where they differ most: it passes when the folded module is
    not much further from it than the original itself is (`ROUNDING` times), for then FP32 rounding separates them.

    Args:
        expected: outputs of the original (`run_all`).
        folded: the folded module.
        feeds: real inputs.
        tolerance: relative to each output's range.
        exact: gives the original's outputs in FP64 on one feed, by its index; called only when needed.

    Raises:
        EnginesmithError: the folded module cannot be run, or has other outputs.
    """
    found = run_all(folded, feeds)
    differences = []
    for name in expected[0]:
        theirs = [e[name] for e in expected]
        ours = [f.get(name) for f in found]
        span = _span(theirs)
        relative, feed = _distance(ours, theirs, span)
        passed, rounding = relative <= tolerance, None
        if not passed and relative < float("inf"):
            truth = [exact(feed)[name]]
            rounding, _ = _distance([theirs[feed]], truth, span)
            own, _ = _distance([ours[feed]], truth, span)
            passed = own <= max(tolerance, ROUNDING * rounding)
        differences.append(Difference(name, relative, feed, rounding, passed))
    return differences


def exact_outputs(module: nn.Module, feed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of a module on one feed, computed in FP64."""
    double = copy.deepcopy(module).double()
    wide = {n: t.double() if t.is_floating_point() else t for n, t in feed.items()}
    return run_all(double, [wide])[0]


def _span(tensors: Sequence[torch.Tensor]) -> float:
    filled = [t for t in tensors if t.numel()]
    if not filled:
        return 1.0
    low, high = min(float(t.min()) for t in filled), max(float(t.max()) for t in filled)
    return (high - low) or max(abs(low), abs(high)) or 1.0


def _distance(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor], span: float) -> tuple[float, int]:
    """Largest difference in units of `span` and the feed where it is; infinite for other shapes or NaN."""
    worst, where = 0.0, 0
    for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        if left is None or left.shape != right.shape:
            return float("inf"), index
        if not right.numel():
            continue
        value = float((left - right).abs().max()) / span
        if not value <= worst:
            worst, where = (value if value == value else float("inf")), index  # NaN is not itself
    return worst, where
