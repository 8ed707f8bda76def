"""Turns checked batches into the .npy files of one set, with memory for one batch only."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.feeds import MAX_BYTES, Array, Layout, TargetKind, Targets, kind_of, take_targets

FEEDS = "feeds.json"
MAX_SAMPLES = 1_000_000
_COINS = 4096


class ColumnReport(BaseModel):
    """One input of one set. Statistics are over all its values."""

    shape: tuple[int, ...]
    dtype: str
    min: float
    max: float
    mean: float
    std: float


class SetReport(BaseModel):
    """One set: where it comes from and what is in it."""

    source: str
    samples: int
    inputs: dict[str, ColumnReport]
    targets: str


class SetFile(BaseModel):
    """feeds.json: which .npy files hold one set."""

    inputs: dict[str, str]
    targets: TargetKind
    target_files: dict[str, str]
    batched: bool
    batch_min: int
    batch_opt: int
    batch_max: int


class SetWriter:
    """Writes one set.

    Args:
        folder: where; created.
        layout: what the inputs are declared to be.
        key: the key of pipeline.yaml that fills the set, for errors.
    """

    def __init__(self, folder: Path, layout: Layout, key: str) -> None:
        self.folder = folder
        self.source = ""
        self.layout = layout
        self.key = key
        self.count = 0
        self.bytes = 0
        self._columns: dict[str, _Column] = {}
        self._moments = {name: _Moments() for name in layout.inputs}
        self._targets: _TargetWriter | None = None
        folder.mkdir(parents=True)
        self._limit = min(MAX_BYTES, shutil.disk_usage(folder).free // 2)

    def append(self, inputs: Mapping[str, Array], targets: Targets | None) -> None:
        """Add checked samples.

        Raises:
            EnginesmithError: there is no end to them.
        """
        count = len(next(iter(inputs.values())))
        for index, (name, array) in enumerate(inputs.items()):
            column = self._columns.get(name)
            if column is None:
                column = _Column(self.folder / f"input{index}.npy", array.dtype, array.shape[1:])
                self._columns[name] = column
            column.append(array)
            self._moments[name].add(array)
            self.bytes += array.nbytes
        if targets is not None:
            self._targets = self._targets or _TargetWriter(self.folder, targets)
            self._targets.append(targets)
        self.count += count
        if self.count > MAX_SAMPLES or self.bytes > self._limit:
            raise EnginesmithError(
                f"{self.count} samples, {self.bytes / 2**30:.1f} GiB and still more to come",
                key=self.key,
                hint=f"end the generator, with itertools.islice say; a set holds up to {MAX_SAMPLES} samples, "
                f"{MAX_BYTES >> 30} GiB and half of the free disk ({self._limit / 2**30:.1f} GiB)",
            )

    def finish(self, source: str) -> None:
        """Say where the samples came from."""
        self.source = source

    def close(self) -> SetReport:
        """Finish the files; write feeds.json."""
        low, opt, high = self.layout.batch
        for column in self._columns.values():
            column.close()
        content = SetFile(
            inputs={name: column.path.name for name, column in self._columns.items()},
            targets=self._targets.kind if self._targets else "none",
            target_files=self._targets.close() if self._targets else {},
            batched=self.layout.batched,
            batch_min=low,
            batch_opt=opt,
            batch_max=high,
        )
        (self.folder / FEEDS).write_text(content.model_dump_json(indent=1) + "\n")
        return SetReport(
            source=self.source,
            samples=self.count,
            inputs={
                name: self._moments[name].report(column.shape, str(column.dtype))
                for name, column in self._columns.items()
            },
            targets=self._targets.shown if self._targets else "none",
        )


class Dealer:
    """Deals samples out to two writers, one of each pair of neighbours to either; the coin is seeded."""

    def __init__(self, find: SetWriter, judge: SetWriter | None, seed: int) -> None:
        self.find = find
        self.judge = judge
        self.count = 0
        self._seed = seed

    def append(self, inputs: Mapping[str, Array], targets: Targets | None) -> None:
        """Deal out checked samples."""
        count = len(next(iter(inputs.values())))
        found = self._is_search(np.arange(self.count, self.count + count))
        for writer, rows in ((self.find, np.flatnonzero(found)), (self.judge, np.flatnonzero(~found))):
            if writer is not None and len(rows):
                writer.append({name: array[rows] for name, array in inputs.items()}, take_targets(targets, rows))
        self.count += count

    def finish(self, source: str) -> None:
        """Say that everything was dealt out, and where it came from.

        Raises:
            EnginesmithError: one sample has no halves.
        """
        if self.count < 2:
            raise EnginesmithError(
                "one sample cannot be split into a search half and a verdict half",
                key=self.find.key,
                hint="give at least two, or name the search samples under data.search",
            )
        self.find.finish(f"{source}, search half")
        if self.judge is not None:
            self.judge.finish(f"{source}, verdict half")

    def _is_search(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        pairs = indices // 2
        blocks = np.arange(pairs[0] // _COINS, pairs[-1] // _COINS + 1)
        coins = np.concatenate([np.random.default_rng([self._seed, int(b)]).integers(2, size=_COINS) for b in blocks])
        found: npt.NDArray[np.bool_] = indices % 2 == coins[pairs - blocks[0] * _COINS]
        return found


class _TargetWriter:
    """Writes the targets of one set."""

    def __init__(self, folder: Path, first: Targets) -> None:
        self.folder = folder
        self.kind = kind_of(first)
        self._names = {name: f"targets{i}.npy" for i, name in enumerate(sorted(_named(first)))}
        self._columns: dict[str, _Column] = {}
        # Strings: their width is known only at the end.
        self._texts: dict[str, list[Array]] = {}

    def append(self, targets: Targets) -> None:
        for name, array in _named(targets).items():
            if array.dtype.kind in "US":
                self._texts.setdefault(name, []).append(array)
                continue
            column = self._columns.get(name)
            if column is None:
                column = _Column(self.folder / self._names[name], array.dtype, array.shape[1:])
                self._columns[name] = column
            column.append(array)

    def close(self) -> dict[str, str]:
        for column in self._columns.values():
            column.close()
        for name, texts in self._texts.items():
            np.save(self.folder / self._names[name], np.concatenate(texts))
        return self._names

    @property
    def shown(self) -> str:
        """One line for the report."""
        columns = [f"{name}: {c.dtype} {['n', *c.shape]}" for name, c in sorted(self._columns.items())]
        return f"{self.kind} ({', '.join([*columns, *(f'{name}: text' for name in self._texts)])})".replace("'", "")


class _Column:
    """A .npy file that grows along axis 0."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path = path
        self.dtype = dtype
        self.shape = shape
        self.count = 0
        with path.open("wb") as file:
            self._write_header(file)

    def append(self, rows: Array) -> None:
        if rows.size:
            # Not tofile: its OSError does not say that the disk is full.
            with self.path.open("ab") as file:
                file.write(np.ascontiguousarray(rows).data)
        self.count += len(rows)

    def close(self) -> None:
        with self.path.open("r+b") as file:
            self._write_header(file)

    def _write_header(self, file: BinaryIO) -> None:
        # numpy pads headers for a growing axis 0, so that the final one has the length of the first.
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.count, *self.shape)}
        np.lib.format.write_array_header_1_0(file, header)


class _Moments:
    """Running range, mean and standard deviation."""

    def __init__(self) -> None:
        self.low, self.high, self.sum, self.square, self.size = np.inf, -np.inf, 0.0, 0.0, 0

    def add(self, values: Array) -> None:
        wide = values.astype(np.float64)
        self.low, self.high = min(self.low, float(wide.min())), max(self.high, float(wide.max()))
        self.sum += float(wide.sum())
        self.square += float(np.square(wide).sum())
        self.size += wide.size

    def report(self, shape: tuple[int, ...], dtype: str) -> ColumnReport:
        mean = self.sum / self.size
        spread = max(self.square / self.size - mean * mean, 0.0) ** 0.5
        return ColumnReport(shape=shape, dtype=dtype, min=self.low, max=self.high, mean=mean, std=spread)


def _named(targets: Targets) -> dict[str, Array]:
    """Targets as named columns; a ragged list as its values end to end and the shape of each."""
    if isinstance(targets, dict):
        return targets
    if isinstance(targets, list):
        return {
            "values": np.concatenate([a.reshape(-1) for a in targets]),
            "shapes": np.array([a.shape for a in targets], dtype=np.int64),
        }
    return {"targets": targets}


def unpack_ragged(values: Array, shapes: npt.NDArray[np.int64]) -> list[Array]:
    """A ragged list back from its values end to end and the shape [samples, rank] of each."""
    ends = np.cumsum(np.prod(shapes, axis=1))
    pieces = np.split(values, ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
