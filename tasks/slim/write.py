"""Turns kept tensors into one .safetensors file, written straight from the mapped checkpoint in a single pass."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from enginesmith.tasks import progress
from enginesmith.tasks.progress import Bar
from enginesmith.tasks.slim.numerics import Counts
from enginesmith.tasks.slim.readers import read_safetensors
from enginesmith.tasks.slim.tensors import DTYPES, FLOATS, Array, MappedFile, Tensor
from enginesmith.tasks.weights import Row, header

A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")

_THREADS = 4


@dataclass(frozen=True)
class Written:
    """One tensor as it was written.

    Attributes:
        name: its name.
        dtype: safetensors' name of the element type in the file.
        shape: sizes.
        nbytes: bytes in the file; 0 for an alias.
        sha256: hex SHA-256 of its bytes in the file.
        alias_of: name under which the same elements are stored, empty when they are stored under its own.
        counts: what its source's elements are.
        overflow: elements that became infinite in the conversion to `dtype`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str
    alias_of: str
    counts: Counts
    overflow: int = 0


def target_dtype(name: str, tensor: Tensor, dtype: str | None) -> str:
    """Element type in the output: floating point follows the `dtype` setting, BatchNorm statistics stay FP32 or wider.

    Integers, booleans and types without a conversion setting are never changed.
    """
    if dtype is None or tensor.dtype not in FLOATS:
        return tensor.dtype
    if name.rpartition(".")[2] in ("running_mean", "running_var"):
        return tensor.dtype if tensor.dtype == "F64" and dtype == "float16" else "F32"
    return {"float32": "F32", "float16": "F16"}[dtype]


def write_weights(path: Path, tensors: Mapping[str, Tensor], prefix: str, dtype: str | None) -> list[Written]:
    """Write the file. The same tensors give the same bytes, wherever and however the checkpoint stored them.

    Tied tensors are stored once, under the first of their names in alphabetical order; the metadata entry ``aliases``
    maps the others to it.

    Args:
        path: the new file.
        tensors: what to write, by name.
        prefix: the names' common leading part that was taken off, kept in the metadata.
        dtype: ``float32``, ``float16``, or None to keep each tensor's type.

    Returns:
        every name in alphabetical order.
    """
    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        identity = (*tensors[name].identity, target_dtype(name, tensors[name], dtype))
        owner = owners.setdefault(identity, name) if tensors[name].numel else name
        if owner != name:
            aliases[name] = owner
    rows = []
    for name in tensors:
        target = target_dtype(name, tensors[name], dtype)
        if name not in aliases:
            rows.append(Row(name, target, tensors[name].shape, DTYPES[target].itemsize))
    order, head = header(rows, aliases, prefix)
    with path.open("wb") as file, progress.track("slim", total=max(sum(r.nbytes for r in rows), 1)) as bar:
        file.write(head)
        file.flush()
        places = itertools.accumulate((row.nbytes for row in order), initial=len(head))

        def write(row: Row, place: int) -> Written:
            return _write_tensor(file.fileno(), place, row, tensors[row.name], bar)

        written = {w.name: w for w in _in_threads(write, order, places)}
    for name, owner in aliases.items():
        first = written[owner]
        written[name] = Written(name, first.dtype, first.shape, 0, first.sha256, owner, Counts())
    return [written[name] for name in sorted(written)]


def verify(path: Path, tensors: Mapping[str, Tensor], written: Sequence[Written]) -> list[str]:
    """Read the file back; the names of tensors whose bytes are not those of the checkpoint (converted as asked)."""
    file = MappedFile(path)
    found, _ = read_safetensors(file)
    stored = [w for w in written if not w.alias_of]

    def same(entry: Written, copy: object) -> bool:
        if not isinstance(copy, Tensor) or (copy.dtype, copy.shape) != (entry.dtype, entry.shape):
            return False
        place = copy.storage.start
        for block in tensors[entry.name].blocks():
            progress.checkpoint()
            expected = _bytes(_converted(block, entry.dtype))
            if not np.array_equal(expected, np.frombuffer(file.map, np.uint8, expected.size, place)):
                return False
            file.release(place, expected.size)
            place += expected.size
        return True

    results = _in_threads(same, stored, [found.get(w.name) for w in stored])
    return [entry.name for entry, right in zip(stored, results, strict=True) if not right]


def _write_tensor(handle: int, place: int, row: Row, tensor: Tensor, bar: Bar) -> Written:
    """Write one tensor at its place in the file, digesting and examining it on the way."""
    digest, counts, overflow = hashlib.sha256(), Counts(), 0
    scratch = np.empty(0, np.uint8)  # one for all blocks: fresh memory for each would cost more than counting
    for block in tensor.blocks():
        if scratch.size < block.nbytes:
            scratch = np.empty(block.nbytes, np.uint8)
        counts.add(tensor.dtype, block, scratch)
        output = _converted(block, row.dtype)
        if output is not block and row.dtype == "F16":
            overflow += int(np.count_nonzero(np.isinf(output))) - int(np.count_nonzero(np.isinf(block)))
        data = _bytes(output).data
        digest.update(data)
        done = 0
        while done < data.nbytes:
            done += os.pwrite(handle, data[done:], place + done)
        place += data.nbytes
        bar.advance(data.nbytes)
    return Written(row.name, row.dtype, row.shape, row.nbytes, digest.hexdigest(), "", counts, overflow)


def _in_threads(function: Callable[[A, B], R], first: Sequence[A], second: Iterable[B]) -> list[R]:
    """Map over pairs; the work (hashing, comparing, reading, writing) leaves Python's lock, so threads share it."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, first, second))


def _bytes(block: Array) -> npt.NDArray[np.uint8]:
    return block.view(np.uint8)


def _converted(block: Array, target: str) -> Array:
    wanted = DTYPES[target]
    if block.dtype == wanted:
        return block
    with np.errstate(over="ignore", invalid="ignore"):
        return block.astype(wanted)
