"""Turns kept tensors into one .safetensors file, written straight from the mapped checkpoint in a single pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginesmith.tasks import progress
from enginesmith.tasks.slim.numerics import Counts
from enginesmith.tasks.slim.readers import read_safetensors
from enginesmith.tasks.slim.tensors import DTYPES, FLOATS, Array, MappedFile, Tensor
from enginesmith.tasks.weights import Row, header


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
    written: dict[str, Written] = {}
    with path.open("wb") as file, progress.track("slim", total=max(sum(r.nbytes for r in rows), 1)) as bar:
        file.write(head)
        for row in order:
            name, target, tensor = row.name, row.dtype, tensors[row.name]
            digest, counts, overflow, size = hashlib.sha256(), Counts(), 0, 0
            for block in tensor.blocks():
                counts.add(tensor.dtype, block)
                output = _converted(block, target)
                if output is not block and target == "F16":
                    overflow += int(np.count_nonzero(np.isinf(output))) - int(np.count_nonzero(np.isinf(block)))
                data = output.view(np.uint8).data
                digest.update(data)
                file.write(data)
                size += data.nbytes
                bar.advance(data.nbytes)
            written[name] = Written(name, target, tensor.shape, size, digest.hexdigest(), "", counts, overflow)
    for name, owner in aliases.items():
        first = written[owner]
        written[name] = Written(name, first.dtype, first.shape, 0, first.sha256, owner, Counts())
    return [written[name] for name in sorted(written)]


def verify(path: Path, written: list[Written]) -> Iterator[str]:
    """Read the file back; yields the names of tensors whose bytes are not those that were meant."""
    file = MappedFile(path)
    tensors, _ = read_safetensors(file)
    for entry in written:
        if entry.alias_of:
            continue
        found = tensors.get(entry.name)
        digest = hashlib.sha256()
        if isinstance(found, Tensor):
            for block in found.blocks():
                progress.checkpoint()
                digest.update(block.view(np.uint8).data)
        if not isinstance(found, Tensor) or found.shape != entry.shape or digest.hexdigest() != entry.sha256:
            yield entry.name


def _converted(block: Array, target: str) -> Array:
    wanted = DTYPES[target]
    if block.dtype == wanted:
        return block
    with np.errstate(over="ignore", invalid="ignore"):
        return block.astype(wanted)
