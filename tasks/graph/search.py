"""Turns ranked regions and a measurement into a small set of regions that brings a drop within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from enginesmith.tasks import progress

Names = frozenset[str]

_SURPRISE = 4


@dataclass(frozen=True)
class Item:
    """Nodes that are restored, or not, together."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """One evaluation.

    Attributes:
        step: what was tried.
        restored: how many nodes were restored, those that always are not counted.
        drop: what the measurement gave; inf when it failed.
        within: whether that is within the budget.
    """

    step: str
    restored: int
    drop: float
    within: bool


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        kept: the items to restore, in rank order.
        drop: with them restored; inf when even that failed.
        within: whether `drop` is within the budget.
        without: by name of a kept item, the drop with all kept items but this one; items not tested have none.
        trials: every evaluation, in order.
        limit: how many evaluations were allowed.
        reranked: how often a step surprised, so that the rest was ranked anew.
    """

    kept: tuple[Item, ...]
    drop: float
    within: bool
    without: dict[str, float]
    trials: tuple[Trial, ...]
    limit: int
    reranked: int


def evaluation_limit(nodes: int, kept: int) -> int:
    """How many evaluations a search over so many nodes may take: ``3 log2(nodes) + 20``, and one per item kept."""
    return math.floor(3 * math.log2(max(nodes, 1))) + 20 + kept


@dataclass
class Search:
    """Add ranked items until the drop is within budget, then take back what was not needed.

    1. With nothing restored the drop may be within budget: nothing is kept.
    2. Grow: the first 1, 2, 4, … of the ranked items; between the last two counts by bisection. When the first four
       or more do no better than fewer, that is a surprise: what the step added is dropped, and `rerank` says how to go
       on from what is restored so far, once per search.
    3. Take back: groups of items, halved when they turn out to be needed, from the lowest rank up. An item that is
       needed and that `split` divides is replaced by one of its halves when that is enough. Then every item alone,
       until returning any single one breaks the budget (1-minimal).

    The number of evaluations stays within `evaluation_limit`. When it is used up, or everything has been added in vain,
    the best set so far is the result: within budget the smallest, else the one with the lowest drop.

    Args:
        measure: the drop with these nodes restored; inf or NaN when it failed.
        max_drop: the budget.
        nodes: how many nodes could be restored at all.
        rerank: from the nodes restored so far to a new ranking of what is left.
        split: an item's two halves, None when it is not to be divided.
    """

    measure: Callable[[Names], float]
    max_drop: float
    nodes: int
    rerank: Callable[[Names], Sequence[Item]] = lambda _: ()
    split: Callable[[Item], tuple[Item, Item] | None] = lambda _: None
    _known: dict[Names, float] = field(default_factory=dict)
    _trials: list[Trial] = field(default_factory=list)
    _needed: set[str] = field(default_factory=set)
    _best: tuple[tuple[bool, float, float], tuple[Item, ...]] | None = None
    _reranked: int = 0
    _charged: int = 0

    def run(self, always: Callable[[], Sequence[Item]], ranked: Sequence[Item]) -> Outcome:
        """Search.

        Args:
            always: asked once restoring anything is needed: items to restore in every case, which are not taken back.
            ranked: further items, most promising first.
        """
        fixed: tuple[Item, ...] = ()
        try:
            if not self._try((), "nothing restored"):
                fixed = tuple(always())
                kept = fixed
                if not (kept and self._try(kept, "layers over layer_drop")):
                    kept = self._grow(kept, ranked)
                self._take_back(kept, len(fixed))
        except _OutOfEvaluationsError:
            pass
        return self._outcome(fixed)

    def charge(self, evaluations: int) -> None:
        """Count evaluations that were made elsewhere."""
        self._charged += evaluations

    def _grow(self, found: tuple[Item, ...], ranked: Sequence[Item]) -> tuple[Item, ...]:
        rest = [item for item in ranked if not _nodes(found).issuperset(item.nodes)]
        best = self._drop(found)
        low, count = 0, 1
        while low < len(rest):
            count = min(count, len(rest))
            tried = (*found, *rest[:count])
            if self._try(tried, f"with {count} more"):
                return (*found, *rest[: self._bisect(found, rest, low, count)])
            drop = self._drop(tried)
            if count >= _SURPRISE and not drop < best and not self._reranked:
                before = (*found, *rest[:low])
                if anew := self.rerank(_nodes(before)):
                    self._reranked += 1
                    return self._grow(before, anew)
            best = min(best, drop)
            low, count = count, 2 * count
        return (*found, *rest)

    def _bisect(self, found: tuple[Item, ...], rest: list[Item], low: int, high: int) -> int:
        """The smallest count above `low` that is within budget; `high` is."""
        while high - low > 1:
            middle = (low + high) // 2
            if self._try((*found, *rest[:middle]), f"with {middle} more"):
                high = middle
            else:
                low = middle
        return high

    def _take_back(self, kept: tuple[Item, ...], fixed: int) -> None:
        if not self._within(self._drop(kept)):
            return
        size = max(1, (len(kept) - fixed) // 8)
        groups = [kept[i : i + size] for i in range(fixed, len(kept), size)]
        while groups:
            group = groups.pop()
            if self._try(less := _without(kept, group), f"without {_described(group)}"):
                kept = less
            elif len(group) > 1:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
            else:
                self._needed.add(group[0].name)
                kept = self._halve(kept, group[0])
        while (smaller := self._single(kept, fixed)) is not None:
            kept = smaller

    def _halve(self, kept: tuple[Item, ...], item: Item) -> tuple[Item, ...]:
        for half in self.split(item) or ():
            smaller = tuple(half if other is item else other for other in kept)
            if self._try(smaller, f"{half.name} instead of {item.name}"):
                return self._halve(smaller, half)
        return kept

    def _single(self, kept: tuple[Item, ...], fixed: int) -> tuple[Item, ...] | None:
        """One item less, None when each is needed."""
        for item in reversed(kept[fixed:]):
            if self._try(less := _without(kept, [item]), f"without {item.name}"):
                return less
            self._needed.add(item.name)
        return None

    def _try(self, items: tuple[Item, ...], step: str) -> bool:
        nodes = _nodes(items)
        if nodes not in self._known:
            # Needed once is not needed for good: what is kept in the end may be as few as these.
            counted = min(len(self._needed), len(items))
            if len(self._trials) + self._charged >= evaluation_limit(self.nodes, counted):
                raise _OutOfEvaluationsError
            progress.checkpoint()
            drop = self.measure(nodes)
            self._known[nodes] = math.inf if math.isnan(drop) else drop
            self._trials.append(Trial(step, len(nodes), self._known[nodes], self._within(drop)))
        drop = self._known[nodes]
        within = self._within(drop)
        size = float(len(nodes))
        rank = (not within, size, drop) if within else (not within, drop, size)
        if self._best is None or rank < self._best[0]:
            self._best = (rank, items)
        return within

    def _drop(self, items: Iterable[Item]) -> float:
        return self._known.get(_nodes(items), math.inf)

    def _within(self, drop: float) -> bool:
        """Whether a drop is within the budget; 1 - 0.95 is 0.05 and a rounding error."""
        return drop <= self.max_drop or math.isclose(drop, self.max_drop, rel_tol=1e-9)

    def _outcome(self, fixed: Sequence[Item]) -> Outcome:
        kept = self._best[1] if self._best else ()
        without = {
            item.name: self._known[less]
            for item in kept
            if item not in fixed and (less := _nodes(_without(kept, [item]))) in self._known
        }
        return Outcome(
            kept,
            self._drop(kept),
            self._within(self._drop(kept)),
            without,
            tuple(self._trials),
            evaluation_limit(self.nodes, len(kept)),
            self._reranked,
        )


class _OutOfEvaluationsError(Exception):
    pass


def _nodes(items: Iterable[Item]) -> Names:
    return frozenset(name for item in items for name in item.nodes)


def _without(kept: Sequence[Item], group: Sequence[Item]) -> tuple[Item, ...]:
    return tuple(item for item in kept if item not in group)


def _described(group: Sequence[Item]) -> str:
    return group[0].name if len(group) == 1 else f"{len(group)} regions"
