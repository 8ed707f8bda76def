"""Turns a module and its graph into the measured difference of their outputs, by name, over the declared sizes.

The judge of last resort: what passes here computes the same as eager PyTorch at the corners and in the middle of the
declared range, on real samples and on inputs that flip branches on their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Outputs = Mapping[str, Array]

_ULPS = 16


@dataclass(frozen=True)
class Case:
    """One feed to compare on.

    Attributes:
        word: which one, for people (`min`, `opt negated`).
        feed: arrays by input name.
        sizes: the dynamic dimensions.
        real: whether the values are samples of the user's; otherwise NaN in both outputs is agreement.
        declared: whether the settings name these sizes (min, opt, max), so that the model must accept them.
    """

    word: str
    feed: dict[str, Array]
    sizes: dict[str, int]
    real: bool = True
    declared: bool = True

    @property
    def place(self) -> str:
        """Sizes and word, for messages."""
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"at {sizes} ({self.word})" if sizes else f"on {self.word} inputs"


@dataclass(frozen=True)
class Difference:
    """Where two outputs disagree.

    Attributes:
        output: its name.
        case: the word of the feed.
        found: what differs, in words, with numbers.
        error: largest absolute difference; inf for shapes, dtypes and NaN in one of them only.
    """

    output: str
    case: str
    found: str
    error: float


def output_range(values: list[Array]) -> float:
    """Largest minus smallest finite value over all arrays; the largest magnitude when they are all equal."""
    low, high = math.inf, -math.inf
    for value in values:
        finite = value[np.isfinite(value)] if np.issubdtype(value.dtype, np.floating) else value
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low > high:
        return 0.0
    return high - low if high > low else abs(high)


def differences(
    expected: Outputs, found: Outputs, *, case: Case, tolerance: float, ranges: Mapping[str, float]
) -> tuple[list[Difference], dict[str, float]]:
    """Compare all outputs of one run.

    An output agrees when shape and dtype are equal, integers and booleans are equal, infinities and NaN stand at the
    same places, and every finite value differs by at most ``max(tolerance * range, 16 ulp of its largest magnitude)``.

    Args:
        expected: of the original: eager PyTorch, or the graph before a transformation.
        found: of the graph.
        case: what was fed.
        tolerance: relative to the output's range.
        ranges: range of each output over all cases, see `output_range`.

    Returns:
        the differences, and for each output its largest error relative to its range.
    """
    wrong: list[Difference] = []
    relative: dict[str, float] = {}
    for name, want in expected.items():
        have = found.get(name)
        if have is None:
            wrong.append(Difference(name, case.word, "is missing", math.inf))
            continue
        problem, error = _compare(want, have, tolerance * ranges.get(name, 0.0), real=case.real)
        if problem:
            wrong.append(Difference(name, case.word, problem, error))
        scale = ranges.get(name, 0.0)
        relative[name] = error / scale if scale else error
    return wrong, relative


def _compare(want: Array, have: Array, allowed: float, *, real: bool) -> tuple[str, float]:
    """What is wrong, empty when nothing is, and the largest absolute error."""
    if want.shape != have.shape:
        return f"has shape {list(have.shape)} where {list(want.shape)} is right", math.inf
    if want.dtype != have.dtype:
        return f"is {have.dtype} where {want.dtype} is right", math.inf
    if not np.issubdtype(want.dtype, np.floating):
        unequal = int(np.count_nonzero(want != have))
        return (f"differs in {unequal} of {want.size} values", float(unequal)) if unequal else ("", 0.0)
    if real and np.isnan(want).any():
        return (
            f"is NaN in {int(np.isnan(want).sum())} of {want.size} values on real samples, in the original already",
            math.inf,
        )
    places = ~np.isfinite(want) | ~np.isfinite(have)
    if places.any() and not np.array_equal(want[places], have[places], equal_nan=True):
        return "has NaN or infinity where the original has not, or the other way round", math.inf
    left = want[~places].astype(np.float64)
    right = have[~places].astype(np.float64)
    if not left.size:
        return "", 0.0
    error = float(np.max(np.abs(left - right)))
    limit = max(allowed, _ULPS * float(np.finfo(want.dtype).eps) * float(np.max(np.abs(left))))
    if not error <= limit:
        return f"differs by {error:.3g} where {limit:.3g} is allowed", error
    return "", error
