"""Turns a data set and declared dynamic dimensions into feeds of chosen sizes, real values first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.firewalls.dims import declared_dims, fixed_shape
from enginesmith.tasks.firewalls.experiment import Case
from enginesmith.tasks.settings import DimSettings, InputSettings

Feed = dict[str, npt.NDArray[Any]]
Sizes = dict[str, int]

MAX_ELEMENTS = 1 << 22
"""Input elements of the largest feed: what an experiment costs does not grow with the declared maximum beyond it."""


def cases_of(dataset: Dataset, inputs: Mapping[str, InputSettings]) -> Iterator[Case]:
    """What a graph and its original are compared on.

    Real samples at the declared sizes (`declared_sizes`) and next to opt, since min, opt and max are often all
    even; at opt also negated and all zero, for both sides of a branch on a sign or a sum.
    """
    dims = declared_dims(inputs)
    for word, sizes in declared_sizes(inputs, dims).items():
        feed = feed_of(dataset, inputs, sizes)
        yield Case(word, feed, sizes)
        if word in ("opt", "declared"):
            for change, other in flipped(feed).items():
                yield Case(f"{word} {change}", other, sizes, real=False)
    if dims:
        between = {name: dim.opt + 1 if dim.opt < dim.max else dim.opt - 1 for name, dim in dims.items()}
        yield Case("between", feed_of(dataset, inputs, between), between, declared=False)


def declared_sizes(inputs: Mapping[str, InputSettings], dims: Mapping[str, DimSettings]) -> dict[str, Sizes]:
    """The corners and the middle of the declared range, by a word for each.

    `opt`, `min` and `max` of all dimensions together; with several dimensions also the corners where one is at its
    minimum and all others at their maximum. What exceeds `MAX_ELEMENTS` is scaled down, but not below opt.
    """
    if not dims:
        return {"declared": {}}
    smallest = {name: dim.min for name, dim in dims.items()}
    best = {name: dim.opt for name, dim in dims.items()}
    largest = _bounded({name: dim.max for name, dim in dims.items()}, best, inputs)
    named = {"opt": best, "min": smallest, "max": largest}
    if len(dims) > 1:
        for name in dims:
            named[f"max but {name}"] = {**largest, name: smallest[name]}
    unique: dict[str, Sizes] = {}
    for word, sizes in named.items():
        if sizes not in unique.values():
            unique[word] = sizes
    return unique


def example_sizes(dims: Mapping[str, DimSettings]) -> Sizes:
    """Sizes to export at: opt, but at least 2, since torch takes sizes 0 and 1 for constants."""
    return {name: max(dim.opt, min(2, dim.max)) for name, dim in dims.items()}


def feed_of(dataset: Dataset, inputs: Mapping[str, InputSettings], sizes: Sizes) -> Feed:
    """One feed of the given sizes: real samples, repeated or cut along each dynamic dimension where they do not fit."""
    feed: Feed = {}
    for name, declared in inputs.items():
        shape = fixed_shape(declared, sizes)
        array = dataset.inputs[name]
        value = np.asarray(array[: shape[0]] if dataset.batched else array[0])
        for axis, wanted in enumerate(shape):
            if value.shape[axis] != wanted:
                value = np.take(value, np.arange(wanted) % value.shape[axis], axis=axis)
        feed[name] = np.ascontiguousarray(value)
    return feed


def flipped(feed: Feed) -> dict[str, Feed]:
    """The feed with its floating-point inputs negated, and all zero: both sides of a branch on a sign or a sum."""
    floats = [name for name, value in feed.items() if np.issubdtype(value.dtype, np.floating)]
    if not floats:
        return {}
    return {
        "negated": {name: -value if name in floats else value for name, value in feed.items()},
        "zero": {name: np.zeros_like(value) if name in floats else value for name, value in feed.items()},
    }


def _bounded(sizes: Sizes, least: Sizes, inputs: Mapping[str, InputSettings]) -> Sizes:
    """Shrink the dimension that is farthest above `least` until all inputs together have at most `MAX_ELEMENTS`."""
    sizes = dict(sizes)
    while _elements(inputs, sizes) > MAX_ELEMENTS:
        name = max(sizes, key=lambda n: sizes[n] / least[n])
        if sizes[name] <= least[name]:
            break
        sizes[name] = max(least[name], sizes[name] * 3 // 4)
    return sizes


def _elements(inputs: Mapping[str, InputSettings], sizes: Sizes) -> int:
    return sum(math.prod(fixed_shape(declared, sizes)) for declared in inputs.values())


def save_cases(cases: Iterable[Case], folder: Path) -> None:
    """Write cases as one .npz and one JSON line each, for a child process."""
    lines = []
    for index, case in enumerate(cases):
        np.savez(folder / f"{index}.npz", allow_pickle=False, **{f"input {name}": a for name, a in case.feed.items()})
        lines.append(json.dumps({"word": case.word, "sizes": case.sizes, "real": case.real, "declared": case.declared}))
    (folder / "cases.jsonl").write_text("\n".join(lines))


def load_cases(folder: Path) -> Iterator[Case]:
    """Read what `save_cases` wrote, one case in memory at a time."""
    for index, line in enumerate((folder / "cases.jsonl").read_text().splitlines()):
        with np.load(folder / f"{index}.npz") as arrays:
            feed = {name.removeprefix("input "): arrays[name] for name in arrays.files}
        yield Case(feed=feed, **json.loads(line))
