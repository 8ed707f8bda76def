"""Turns calibration data into a few feeds that show what matters to folding: several samples, sizes and borders."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.settings import InputSettings

SAMPLES = 8
_BATCH = 4

Feed = dict[str, torch.Tensor]


def make_feeds(dataset: Dataset, inputs: Mapping[str, InputSettings]) -> list[Feed]:
    """Feeds on which the folded and the unfolded module are compared.

    The first `SAMPLES` samples in batches of four (as far as the declared batch allows), then the smallest batch and a
    batch of three; then, where other dimensions are dynamic, the first feed again at their smallest and at an odd size,
    cut or repeated along the axis.

    Args:
        dataset: real inputs.
        inputs: the declared inputs, in the order of `forward`.
    """
    few = dataset.take(slice(0, SAMPLES))
    base = min(max(_BATCH, few.batch_min), few.batch_max)
    feeds = [_tensors(feed, inputs) for feed, _ in few.feeds(base if few.batched else None)]
    if few.batched:
        others = [b for b in sorted({few.batch_min, 3} - {base}) if few.batch_min <= b <= few.batch_max]
        feeds += [_tensors(next(few.feeds(batch))[0], inputs) for batch in others]
    if not few.batched:
        feeds = feeds[:_BATCH]
    return feeds + list(_other_sizes(feeds[0], inputs, few.batched))


def _tensors(feed: Mapping[str, np.ndarray], inputs: Mapping[str, InputSettings]) -> Feed:
    return {name: torch.from_numpy(np.array(feed[name], order="C")) for name in inputs}


def _other_sizes(feed: Feed, inputs: Mapping[str, InputSettings], batched: bool) -> list[Feed]:
    ranges = {}
    for declared in inputs.values():
        for axis, size in enumerate(declared.shape):
            if isinstance(size, str) and not (batched and axis == 0):
                ranges[size] = declared.dims[size]
    if not ranges:
        return []
    smallest = {name: dim.min for name, dim in ranges.items()}
    odd = {name: max(dim.min, min(dim.max, dim.opt) - 1 | 1) for name, dim in ranges.items()}
    odd = {name: min(size, ranges[name].max) for name, size in odd.items()}
    return [_resized(feed, inputs, sizes) for sizes in (smallest, odd)]


def _resized(feed: Feed, inputs: Mapping[str, InputSettings], sizes: Mapping[str, int]) -> Feed:
    result = {}
    for name, declared in inputs.items():
        tensor = feed[name]
        for axis, size in enumerate(declared.shape):
            if isinstance(size, str) and size in sizes:
                index = torch.arange(sizes[size]) % tensor.shape[axis]
                tensor = tensor.index_select(axis, index)
        result[name] = tensor
    return result
