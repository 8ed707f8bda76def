"""The search over ranked regions: small sets, few evaluations, honest about what it did not test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from enginesmith.tasks.graph.search import Item, Names, Outcome, Search, evaluation_limit

QUICK = settings(max_examples=200, deadline=None, derandomize=True)


def items(count: int) -> list[Item]:
    return [Item(f"r{i}", (f"r{i}",)) for i in range(count)]


def search(
    measure: Callable[[Names], float],
    count: int,
    *,
    budget: float = 0.0,
    order: Sequence[int] | None = None,
    always: Sequence[Item] = (),
    **options: Callable[..., object],
) -> Outcome:
    every = items(count)
    ranked = [every[i] for i in order] if order is not None else every
    made = Search(measure, budget, count, **options)  # type: ignore[arg-type]
    return made.run(lambda: always, ranked)


def needs(*names: str) -> Callable[[Names], float]:
    """Drop 1 until all of these are restored."""
    return lambda restored: 0.0 if restored.issuperset(names) else 1.0


def kept(outcome: Outcome) -> set[str]:
    return {item.name for item in outcome.kept}


def test_nothing_goes_back_when_nothing_has_to() -> None:
    outcome = search(lambda restored: 0.0, 50)
    assert (outcome.kept, outcome.within, len(outcome.trials)) == ((), True, 1)


def test_the_one_culprit_at_the_head_of_the_ranking_costs_three_evaluations() -> None:
    outcome = search(needs("r0"), 50)
    assert kept(outcome) == {"r0"}
    assert len(outcome.trials) == 2


@QUICK
@given(st.integers(1, 120), st.data())
def test_a_hidden_set_is_found_exactly(count: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(count)))
    hidden = data.draw(st.sets(st.integers(0, count - 1), max_size=min(count, 4)))
    outcome = search(needs(*(f"r{i}" for i in hidden)), count, order=order)
    assert outcome.within
    assert len(outcome.trials) <= evaluation_limit(count, len(outcome.kept))
    needed = {f"r{i}" for i in hidden}
    assert kept(outcome) >= needed
    assert all(outcome.without[name] > 0 for name in outcome.without)
    if set(outcome.without) == kept(outcome):
        assert kept(outcome) == needed


@QUICK
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0, 20))
def test_noise_that_adds_up_is_taken_back_to_a_minimal_set(noise: list[float], budget: float) -> None:
    order = sorted(range(len(noise)), key=lambda i: -noise[i])

    def measure(restored: Names) -> float:
        return math.fsum(value for i, value in enumerate(noise) if f"r{i}" not in restored)

    outcome = search(measure, len(noise), budget=budget, order=order)
    assert outcome.within
    assert outcome.drop == measure(frozenset(kept(outcome)))
    assert len(outcome.trials) <= evaluation_limit(len(noise), len(outcome.kept))
    for item in outcome.kept:
        if item.name in outcome.without:
            assert measure(frozenset(kept(outcome) - {item.name})) > budget


def test_a_failed_metric_is_a_failed_candidate() -> None:
    outcome = search(lambda restored: 0.0 if "r3" in restored else math.nan, 8)
    assert kept(outcome) == {"r3"}
    assert all(math.isinf(trial.drop) for trial in outcome.trials if not trial.within)


def test_the_best_is_kept_when_the_budget_is_out_of_reach() -> None:
    outcome = search(lambda restored: 0.5 if "r5" in restored else 1.0, 16, budget=0.1)
    assert not outcome.within
    assert outcome.drop == 0.5
    assert "r5" in kept(outcome)


def test_items_that_always_go_back_are_not_taken_back() -> None:
    always = items(2)
    outcome = search(needs("r0", "r7"), 8, always=always)
    assert kept(outcome) == {"r0", "r1", "r7"}
    assert set(outcome.without) == {"r7"}


def test_always_is_not_asked_for_when_nothing_has_to_go_back() -> None:
    def refuse() -> Sequence[Item]:
        raise AssertionError

    assert Search(lambda _: 0.0, 0.0, 4).run(refuse, items(4)).within


def test_a_surprise_ranks_the_rest_anew() -> None:
    asked: list[Names] = []

    def rerank(restored: Names) -> list[Item]:
        asked.append(restored)
        return [Item("r63", ("r63",))]

    outcome = search(needs("r63"), 64, rerank=rerank)
    assert kept(outcome) == {"r63"}
    assert asked == [frozenset({"r0", "r1"})]
    assert outcome.reranked == 1


def test_a_needed_run_of_nodes_is_halved() -> None:
    whole = Item("0-15", tuple(f"n{i}" for i in range(16)))

    def split(item: Item) -> tuple[Item, Item] | None:
        middle = len(item.nodes) // 2
        if not middle:
            return None
        return Item(f"{item.name}a", item.nodes[:middle]), Item(f"{item.name}b", item.nodes[middle:])

    outcome = Search(needs("n5"), 0.0, 16, split=split).run(tuple, [whole])
    assert [item.nodes for item in outcome.kept] == [("n5",)]


def test_what_was_not_tested_is_said() -> None:
    # A worst case for taking back: every second of 400 regions is needed, ranked at random.
    needed = [f"r{i}" for i in range(0, 400, 2)]
    outcome = search(needs(*needed), 400)
    assert outcome.within
    untested = kept(outcome) - set(outcome.without)
    assert kept(outcome) >= set(needed)
    assert len(outcome.trials) <= evaluation_limit(400, len(outcome.kept))
    assert untested


@given(seed=st.integers(0, 2**32), count=st.integers(8, 60), budget=st.floats(0.2, 0.8))
@QUICK
def test_the_limit_holds_also_when_what_was_needed_once_is_not_kept(seed: int, count: int, budget: float) -> None:
    def measure(restored: Names) -> float:
        """The share that is not restored, and noise: restoring less may look better."""
        return 1 - len(restored) / count + 0.3 * Random(f"{seed} {sorted(restored)}").random()

    outcome = search(measure, count, budget=budget)
    assert len(outcome.trials) <= evaluation_limit(count, len(outcome.kept))
