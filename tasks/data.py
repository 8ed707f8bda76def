"""Turns the user's data (code, .npz, .npy, or nothing) into checked calibration, search and verdict sets on disk.

What a ``module:function`` may return or yield, for a model with one input ``x`` or several:

1. an array (one input only), a dict of arrays by input name, or a tuple ``(inputs, targets)`` of either and targets:
   the whole set;
2. a list, a generator or any other iterable of these: one batch each.

Axis 0 of every array is the sample. Where the model has no batch axis (its inputs do not all begin with the same
dimension), an item is one feed in exactly the declared shapes, or a stack of feeds with an axis 0 of its own.
Targets are an array, a dict of arrays, or a list with one array per sample (ragged).

Dtypes must be the declared ones. A float64 where float32 is declared is refused even if the values would survive: it
says that calibration and deployment do not share their preprocessing.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import InputSettings
from enginesmith.tasks.sources import DataSource, FolderSource
from enginesmith.tasks.stage import SourceFile, Stage
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.usercode import UserCode, user_error

Array = npt.NDArray[Any]
Targets = Array | dict[str, Array] | list[Array]
Which = Literal["calibration", "search", "verdict"]

FEEDS = "feeds.json"
CHUNK_BYTES = 32 << 20
MAX_BYTES = 32 << 30
MAX_SAMPLES = 1_000_000


@dataclass(frozen=True)
class Dataset:
    """Samples and their targets.

    Attributes:
        inputs: by input name; axis 0 is the sample. Memory-mapped and read-only when loaded from an artifact.
        targets: an array (axis 0 is the sample), a dict of such arrays, a list of one array per sample, or None.
        batched: True when axis 0 is the model's own batch axis; False when every sample is one whole feed.
        batch_min: smallest batch that the model takes; 1 when not batched.
        batch_opt: the batch it is tuned for.
        batch_max: largest batch.
    """

    inputs: Mapping[str, Array]
    targets: Targets | None
    batched: bool
    batch_min: int
    batch_opt: int
    batch_max: int

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def take(self, indices: Sequence[int] | slice) -> Dataset:
        """Some of the samples, in the order given. A slice stays memory-mapped; indices are copied into memory."""
        rows = indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            inputs={name: array[rows] for name, array in self.inputs.items()},
            targets=_take_targets(self.targets, rows),
        )

    def feeds(self, batch: int | None = None) -> Iterator[tuple[dict[str, Array], int]]:
        """Feeds for the model, all of one size, and how many of each feed's samples count.

        Args:
            batch: samples per feed, `batch_opt` when None. The last feed is filled up by repeating the last sample.

        Raises:
            ValueError: the model does not take that batch.
        """
        if not self.batched:
            for index in range(len(self)):
                yield {name: np.asarray(array[index]) for name, array in self.inputs.items()}, 1
            return
        size = self.batch_opt if batch is None else batch
        if not self.batch_min <= size <= self.batch_max:
            raise ValueError(f"batch {size} is outside {self.batch_min}..{self.batch_max}")
        for start in range(0, len(self), size):
            feed = {name: array[start : start + size] for name, array in self.inputs.items()}
            count = min(size, len(self) - start)
            if count < size:
                feed = {n: np.concatenate([a, np.repeat(a[-1:], size - count, axis=0)]) for n, a in feed.items()}
            yield feed, count


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


class DataReport(BaseModel):
    """What the three sets are, and what is odd about them."""

    sets: dict[str, SetReport]
    warnings: tuple[str, ...]


class _Feeds(BaseModel):
    """feeds.json: which .npy files hold one set."""

    inputs: dict[str, str]
    targets: Literal["none", "array", "dict", "ragged"]
    target_files: dict[str, str]
    batched: bool
    batch_min: int
    batch_opt: int
    batch_max: int


def load_dataset(data: Artifact, which: Which) -> Dataset:
    """One set of a data artifact, memory-mapped."""
    folder = data.path / which
    feeds = _Feeds.model_validate_json((folder / FEEDS).read_text())
    columns = {name: np.load(folder / file, mmap_mode="r") for name, file in feeds.target_files.items()}
    targets: Targets | None = None
    if feeds.targets == "array":
        targets = columns["targets"]
    elif feeds.targets == "dict":
        targets = columns
    elif feeds.targets == "ragged":
        targets = _unpack(columns["values"], columns["shapes"])
    return Dataset(
        inputs={name: np.load(folder / file, mmap_mode="r") for name, file in feeds.inputs.items()},
        targets=targets,
        batched=feeds.batched,
        batch_min=feeds.batch_min,
        batch_opt=feeds.batch_opt,
        batch_max=feeds.batch_max,
    )


def prepare_data(
    out: Path,
    *,
    calibration: DataSource | None,
    evaluation: DataSource | None,
    search: DataSource | None,
    files: Sequence[SourceFile | FolderSource],  # noqa: ARG001 - read by the callables, here for the key
    inputs: Mapping[str, InputSettings],
    seed: int,
    samples: int,
) -> DataReport:
    """Write the sets that the other stages load with `load_dataset`.

    Evaluation data is dealt out to search and verdict pairwise: of samples 2k and 2k+1, a coin seeded with `seed` sends
    one to each. With `search`, all of evaluation is verdict. Sets that are not given:

    - none at all: `samples` random inputs each, seeded (floats from N(0, 1), uint8 uniform, other integers 0 or 1);
    - calibration only: it is dealt out to search and verdict, with a warning that the verdict has seen it;
    - evaluation without calibration: the search set calibrates.

    Args:
        out: empty folder.
        calibration: source of the calibration samples.
        evaluation: source of the samples that are judged.
        search: source of the samples on which precision decisions are made.
        files: what the callables read; only part of the key.
        inputs: declared inputs of the model, by name.
        seed: seeds the split and the random inputs.
        samples: random samples per set.

    Raises:
        EnginesmithError: the data is not what `inputs` declares; names the key, the sample and what was expected.
    """
    if evaluation is None and search is not None:
        raise EnginesmithError("data.search without data.evaluation", key="data.search", hint="add data.evaluation")
    layout = _Layout.of(inputs)
    warnings: list[str] = []
    calibrate = _Writer(out / "calibration", layout, "data.calibration")
    find = _Writer(out / "search", layout, "data.search" if search else "data.evaluation")
    judge = _Writer(out / "verdict", layout, "data.evaluation")

    def fill(source: DataSource, key: str, sink: _Writer | _Dealer) -> None:
        _copy(source, layout, key, sink, scratch=out)

    if calibration is None and evaluation is None:
        for index, writer in enumerate((calibrate, find, judge)):
            writer.source = f"random, seed {seed}"
            _random(layout, writer, np.random.default_rng([seed, index]), samples)
    else:
        if calibration is not None:
            fill(calibration, "data.calibration", calibrate)
        if evaluation is None and calibration is not None:
            fill(calibration, "data.calibration", _Dealer(find, judge, seed))
            warnings.append("data.evaluation is not given: the verdict is computed on calibration samples")
        elif evaluation is not None and search is None:
            fill(evaluation, "data.evaluation", _Dealer(find, judge, seed))
        elif evaluation is not None and search is not None:
            fill(evaluation, "data.evaluation", judge)
            fill(search, "data.search", find)
        if calibration is None and evaluation is not None:
            fill(search or evaluation, "data.search", calibrate if search else _Dealer(calibrate, None, seed))
            warnings.append("data.calibration is not given: the search samples calibrate")
    sets = {w.folder.name: w.close() for w in (calibrate, find, judge)}
    return DataReport(sets=sets, warnings=(*warnings, *_drift(sets)))


DATA = Stage("data", version=1, run=prepare_data, tools=("numpy",))


@dataclass(frozen=True)
class _Layout:
    """The declared inputs, and what their first dimensions say about batches."""

    inputs: Mapping[str, InputSettings]
    batched: bool
    batch: tuple[int, int, int]

    @classmethod
    def of(cls, inputs: Mapping[str, InputSettings]) -> _Layout:
        first = {s.shape[0] if s.shape else None for s in inputs.values()}
        (dim, *others) = first
        if others or dim is None:
            return cls(inputs, batched=False, batch=(1, 1, 1))
        if isinstance(dim, int):
            return cls(inputs, batched=True, batch=(dim, dim, dim))
        # The same name may carry a range in each input; a feed has to satisfy all of them.
        ranges = [s.dims[dim] for s in inputs.values()]
        low, high = max(r.min for r in ranges), min(r.max for r in ranges)
        if low > high:
            raise EnginesmithError(f"dimension {dim!r} has ranges that exclude each other", key="inputs")
        return cls(inputs, batched=True, batch=(low, min(max(ranges[0].opt, low), high), high))

    def sample_shape(self, name: str) -> tuple[int | str, ...]:
        """Declared shape of one sample."""
        return self.inputs[name].shape[1:] if self.batched else self.inputs[name].shape

    def shown(self, name: str) -> str:
        """The declaration as the user wrote it."""
        settings = self.inputs[name]
        return f"{settings.dtype} [{', '.join(str(d) for d in settings.shape)}]"


class _Column:
    """A .npy file that grows along axis 0."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path = path
        self.dtype = dtype
        self.shape = shape
        self.count = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._header()

    def append(self, rows: Array) -> None:
        self._file.write(np.ascontiguousarray(rows).data if rows.size else b"")
        self.count += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._header()
        self._file.close()

    def _header(self) -> None:
        # numpy pads headers for a growing axis 0, so that the final one has the length of the first.
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.count, *self.shape)}
        np.lib.format.write_array_header_1_0(self._file, header)


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


class _Writer:
    """Checks samples and writes one set."""

    def __init__(self, folder: Path, layout: _Layout, key: str) -> None:
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
        """Add samples whose arrays have passed `_check`."""
        count = len(next(iter(inputs.values())))
        for index, (name, array) in enumerate(inputs.items()):
            column = self._columns.get(name)
            if column is None:
                column = _Column(self.folder / f"input{index}.npy", array.dtype, array.shape[1:])
                self._columns[name] = column
            if array.shape[1:] != column.shape:
                raise EnginesmithError(
                    f"{name!r}: sample {self.count} has shape {list(array.shape[1:])}, "
                    f"the samples before it {list(column.shape)}",
                    key=self.key,
                    hint="all samples of a set have one shape; resize, pad or crop them",
                )
            column.append(array)
            self._moments[name].add(array)
            self.bytes += array.nbytes
        if self.count == 0:
            self._targets = _TargetWriter.of(targets, self.folder, self.key)
        elif (targets is None) != (self._targets is None):
            raise EnginesmithError(f"sample {self.count}: some samples have targets and others have none", key=self.key)
        if targets is not None and self._targets is not None:
            self._targets.append(targets, self.count)
        self.count += count
        if self.count > MAX_SAMPLES or self.bytes > self._limit:
            raise EnginesmithError(
                f"{self.count} samples, {self.bytes / 2**30:.1f} GiB and still more to come",
                key=self.key,
                hint=f"end the generator, with itertools.islice say; a set holds up to {MAX_SAMPLES} samples, "
                f"{MAX_BYTES >> 30} GiB and half of the free disk ({self._limit / 2**30:.1f} GiB)",
            )

    def close(self) -> SetReport:
        """Finish the files; write feeds.json."""
        low, opt, high = self.layout.batch
        for column in self._columns.values():
            column.close()
        kind, files = self._targets.close() if self._targets else ("none", {})
        feeds = {
            "inputs": {name: column.path.name for name, column in self._columns.items()},
            "targets": kind,
            "target_files": files,
            "batched": self.layout.batched,
            "batch_min": low,
            "batch_opt": opt,
            "batch_max": high,
        }
        (self.folder / FEEDS).write_text(json.dumps(feeds, indent=1) + "\n")
        return SetReport(
            source=self.source,
            samples=self.count,
            inputs={
                name: self._moments[name].report(column.shape, str(column.dtype))
                for name, column in self._columns.items()
            },
            targets=self._targets.shown if self._targets else "none",
        )


class _TargetWriter:
    """Writes the targets of one set; the first ones decide their kind."""

    def __init__(self, kind: Literal["array", "dict", "ragged"], first: Targets, folder: Path, key: str) -> None:
        self.kind = kind
        self.key = key
        self.folder = folder
        self._names = {name: f"targets{i}.npy" for i, name in enumerate(sorted(_named(first)))}
        self._columns: dict[str, _Column] = {}
        # Strings: their width is known only at the end.
        self._texts: dict[str, list[Array]] = {}

    @classmethod
    def of(cls, targets: Targets | None, folder: Path, key: str) -> _TargetWriter | None:
        if targets is None:
            return None
        kind: Literal["array", "dict", "ragged"] = (
            "dict" if isinstance(targets, dict) else "ragged" if isinstance(targets, list) else "array"
        )
        return cls(kind, targets, folder, key)

    def append(self, targets: Targets, first: int) -> None:
        kind = "dict" if isinstance(targets, dict) else "ragged" if isinstance(targets, list) else "array"
        if kind != self.kind:
            raise EnginesmithError(f"sample {first}: targets change from {self.kind} to {kind}", key=self.key)
        named = _named(targets)
        if set(named) != set(self._names):
            raise EnginesmithError(
                f"sample {first}: targets {sorted(named)}, before it {sorted(self._names)}", key=self.key
            )
        for name, array in named.items():
            if array.dtype.kind in "US":
                self._texts.setdefault(name, []).append(array)
                continue
            column = self._columns.get(name)
            if column is None:
                column = _Column(self.folder / self._names[name], array.dtype, array.shape[1:])
                self._columns[name] = column
            if (array.dtype, array.shape[1:]) != (column.dtype, column.shape):
                raise EnginesmithError(
                    f"sample {first}: targets are {array.dtype} {list(array.shape[1:])}, "
                    f"before it {column.dtype} {list(column.shape)}",
                    key=self.key,
                    hint="give ragged targets as a list with one array per sample",
                )
            column.append(array)

    def close(self) -> tuple[str, dict[str, str]]:
        for column in self._columns.values():
            column.close()
        for name, texts in self._texts.items():
            np.save(self.folder / self._names[name], np.concatenate(texts))
        return self.kind, self._names

    @property
    def shown(self) -> str:
        """One line for the report."""
        columns = [f"{name}: {c.dtype} {['n', *c.shape]}" for name, c in sorted(self._columns.items())]
        return f"{self.kind} ({', '.join([*columns, *(f'{name}: text' for name in self._texts)])})".replace("'", "")


class _Dealer:
    """Deals samples out to two writers, one of each pair to either; the coin is seeded. An odd last one is judged."""

    def __init__(self, find: _Writer, judge: _Writer | None, seed: int) -> None:
        self.find = find
        self.judge = judge
        self.count = 0
        self._seed = seed

    @property
    def key(self) -> str:
        return self.find.key

    @property
    def source(self) -> str:
        return self.find.source

    @source.setter
    def source(self, value: str) -> None:
        self.find.source = f"{value}, search half"
        if self.judge:
            self.judge.source = f"{value}, verdict half"

    def append(self, inputs: Mapping[str, Array], targets: Targets | None) -> None:
        count = len(next(iter(inputs.values())))
        found = self._is_search(np.arange(self.count, self.count + count))
        for writer, rows in ((self.find, np.flatnonzero(found)), (self.judge, np.flatnonzero(~found))):
            if writer is not None and len(rows):
                writer.append({name: array[rows] for name, array in inputs.items()}, _take_targets(targets, rows))
        self.count += count

    def _is_search(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        pairs = np.unique(indices // 2)
        coins = {int(p): int(np.random.default_rng([self._seed, int(p)]).integers(2)) for p in pairs}
        return np.array([i % 2 == coins[int(i) // 2] for i in indices])


def _copy(source: DataSource, layout: _Layout, key: str, sink: _Writer | _Dealer, *, scratch: Path) -> None:
    """Check everything a source yields and append it to a writer."""
    sink.source = source.spec if isinstance(source, UserCode) else source.path.name
    where = "" if isinstance(source, UserCode) else str(source.path)
    with progress.track(f"data: {key.removeprefix('data.')}", total=None) as bar:
        for number, item in enumerate(_items(source, layout, key, scratch)):
            inputs, targets, count = _read_item(item, number, layout, sink.count, key, where)
            width = sum(a[:1].nbytes for a in inputs.values())
            step = max(1, CHUNK_BYTES // max(1, width))
            for start in range(0, count, step):
                rows = slice(start, min(start + step, count))
                part = {name: array[rows] for name, array in inputs.items()}
                _check_finite(part, sink.count, key, where)
                sink.append(part, _take_targets(targets, rows))
                bar.advance(rows.stop - rows.start)
    if sink.count == 0:
        raise EnginesmithError(f"{sink.source.split(',')[0]} yields no samples", where=where, key=key)
    if isinstance(sink, _Dealer) and sink.count < 2:
        raise EnginesmithError(
            "one sample cannot be split into a search half and a verdict half",
            where=where,
            key=key,
            hint="give at least two, or name the search samples under data.search",
        )


def _items(source: DataSource, layout: _Layout, key: str, scratch: Path) -> Iterator[object]:
    """Whole sets or batches, as the source gives them."""
    if isinstance(source, UserCode):
        yield from _from_code(source, key)
    elif isinstance(source, FolderSource):
        yield from _from_folder(source, layout, key)
    elif source.path.suffix == ".npy":
        yield _load_npy(source.path, key)
    else:
        yield from _from_npz(source.path, layout, key, scratch)


def _from_code(source: UserCode, key: str) -> Iterator[object]:
    value = source()
    if _is_array(value) or isinstance(value, Mapping | tuple):
        yield value
        return
    if value is None or isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise EnginesmithError(
            f"{source.spec} returned {_shown(value)}",
            key=key,
            hint="return an array, a dict of arrays by input name, (inputs, targets), or yield such batches",
        )
    iterator = iter(value)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except EnginesmithError:
            raise
        except Exception as error:
            raise user_error(error, f"{source.spec} failed", folder=source.folder, key=key) from error
        # torch's default collation turns (image, label) into a list.
        yield tuple(item) if isinstance(item, list) and len(item) == 2 else item


def _from_folder(source: FolderSource, layout: _Layout, key: str) -> Iterator[object]:
    stems = {Path(name).stem: source.path / name for name, _ in source.files}
    targets = _load_npy(stems.pop("targets"), key) if "targets" in stems and "targets" not in layout.inputs else None
    if set(stems) & set(layout.inputs) or len(layout.inputs) > 1:
        inputs = {stem: _load_npy(path, key) for stem, path in sorted(stems.items())}
        yield inputs if targets is None else (inputs, targets)
        return
    order = sorted(stems)
    if targets is not None and order != sorted(stems, key=_natural):
        raise EnginesmithError(
            f"the order of the batches in {source.path} is ambiguous, and targets.npy depends on it",
            where=str(stems[order[0]]),
            key=key,
            hint="pad the numbers in the file names with zeros",
        )
    start = 0
    for stem in order:
        batch = _load_npy(stems[stem], key)
        stop = start + (len(batch) if batch.ndim else 1)
        yield batch if targets is None else (batch, targets[start:stop])
        start = stop
    if targets is not None and start != len(targets):
        raise EnginesmithError(f"{start} samples and {len(targets)} targets", where=str(source.path), key=key)


def _from_npz(path: Path, layout: _Layout, key: str, scratch: Path) -> Iterator[object]:
    """The arrays of a .npz, unpacked beside the artifact so that they can be memory-mapped."""
    folder = scratch / "unpacked"
    folder.mkdir()
    try:
        arrays: dict[str, Array] = {}
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > min(MAX_BYTES, shutil.disk_usage(scratch).free // 2):
                raise EnginesmithError(f"unpacks to {size / 2**30:.1f} GiB", where=str(path), key=key)
            for index, member in enumerate(archive.infolist()):
                unpacked = folder / f"{index}.npy"
                with archive.open(member) as packed, unpacked.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 20)
                arrays[member.filename.removesuffix(".npy")] = _load_npy(
                    unpacked, key, shown=f"{path}:{member.filename}"
                )
        targets = arrays.pop("targets", None) if "targets" not in layout.inputs else None
        yield arrays if targets is None else (arrays, targets)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise EnginesmithError(f"not a readable .npz: {error}", where=str(path), key=key) from error
    finally:
        shutil.rmtree(folder)


def _load_npy(path: Path, key: str, *, shown: str = "") -> Array:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        if "pickle" in str(error).lower() or "object" in str(error).lower():
            raise EnginesmithError(
                "holds Python objects, which are never unpickled",
                where=shown or str(path),
                key=key,
                hint="save plain numeric arrays",
            ) from error
        raise EnginesmithError(f"not a readable .npy: {error}", where=shown or str(path), key=key) from error
    if not isinstance(loaded, np.ndarray):
        raise EnginesmithError("not a .npy file", where=shown or str(path), key=key)
    return loaded


def _read_item(
    item: object, number: int, layout: _Layout, first: int, key: str, where: str
) -> tuple[dict[str, Array], Targets | None, int]:
    """Inputs in declared order, targets and number of samples of one batch, checked against the declaration."""

    def wrong(found: str, hint: str = "") -> EnginesmithError:
        return EnginesmithError(f"batch {number} (from sample {first}): {found}", where=where, key=key, hint=hint)

    raw_inputs, raw_targets = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(raw_inputs, Mapping):
        if not _is_array(raw_inputs):
            raise wrong(
                f"inputs are {_shown(raw_inputs)}", "give an array or a dict of arrays by input name, numpy or torch"
            )
        if len(layout.inputs) > 1:
            raise wrong(
                f"one array for a model with {len(layout.inputs)} inputs", f"give a dict: {', '.join(layout.inputs)}"
            )
        raw_inputs = {next(iter(layout.inputs)): raw_inputs}
    unknown = [str(name) for name in raw_inputs if name not in layout.inputs]
    missing = [name for name in layout.inputs if name not in raw_inputs]
    if unknown or missing:
        found = f"no input is called {', '.join(unknown)}" if unknown else f"input {', '.join(missing)} is missing"
        raise wrong(found, f"the declared inputs are {', '.join(layout.inputs)}")

    inputs: dict[str, Array] = {}
    for name in layout.inputs:
        inputs[name] = _to_array(raw_inputs[name], lambda found, name=name: wrong(f"{name!r} {found}"))
    single = not layout.batched and all(a.ndim == len(layout.inputs[n].shape) for n, a in inputs.items())
    if single:
        inputs = {name: array[np.newaxis] for name, array in inputs.items()}
    sizes: dict[str, int] = {}
    for name, array in inputs.items():
        _check_declared(name, array, layout, sizes, wrong)
    counts = {name: len(array) for name, array in inputs.items()}
    count = next(iter(counts.values()))
    if len(set(counts.values())) > 1:
        raise wrong("inputs of different lengths: " + ", ".join(f"{n} has {c}" for n, c in counts.items()))
    if count == 0:
        raise wrong("it is empty")
    targets = _to_targets(raw_targets, wrong)
    if single and targets is not None:
        targets = _add_axis(targets)
    for name, length in _lengths(targets).items():
        if length != count:
            raise wrong(f"{count} samples and {length} {name}", "axis 0 of the targets is the sample")
    return inputs, targets, count


def _check_declared(name: str, array: Array, layout: _Layout, sizes: dict[str, int], wrong: Any) -> None:
    """Dtype, rank and dimensions of one input; `sizes` remembers dynamic dimensions that inputs share."""
    settings = layout.inputs[name]
    if array.dtype != np.dtype(settings.dtype):
        raise wrong(
            f"{name!r} is {array.dtype}, declared {layout.shown(name)}",
            f"convert it where it is made, with .astype(np.{settings.dtype}), so that deployment does the same",
        )
    expected = layout.sample_shape(name)
    if array.ndim != len(expected) + 1:
        fix = "add the batch axis, x[None]" if layout.batched and array.ndim == len(expected) else ""
        raise wrong(f"{name!r} has shape {list(array.shape)}, declared {layout.shown(name)}", fix)
    for axis, (size, dim) in enumerate(zip(array.shape[1:], expected, strict=True), start=1):
        if isinstance(dim, int):
            if size != dim:
                raise wrong(
                    f"{name!r} has shape {list(array.shape)}, declared {layout.shown(name)}: axis {axis} is {size}"
                )
            continue
        bounds = settings.dims[dim]
        if not bounds.min <= size <= bounds.max:
            raise wrong(f"{name!r} has {dim} = {size}, declared {bounds.min}..{bounds.max}")
        if sizes.setdefault(dim, size) != size:
            raise wrong(f"{name!r} has {dim} = {size}, another input {sizes[dim]}")


def _check_finite(inputs: Mapping[str, Array], first: int, key: str, where: str) -> None:
    for name, array in inputs.items():
        if array.dtype.kind != "f":
            continue
        finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
        if not finite.all():
            bad = int(np.flatnonzero(~finite)[0])
            raise EnginesmithError(
                f"{name!r}: sample {first + bad} holds NaN or infinity",
                where=where,
                key=key,
                hint="a division by a zero standard deviation is the usual cause",
            )


def _random(layout: _Layout, writer: _Writer, rng: np.random.Generator, samples: int) -> None:
    """Seeded inputs of the declared shapes; dynamic dimensions at opt. Integers fit any index table."""
    shapes = {
        name: tuple(d if isinstance(d, int) else settings.dims[d].opt for d in layout.sample_shape(name))
        for name, settings in layout.inputs.items()
    }
    for _ in range(samples):
        feed: dict[str, Array] = {}
        for name, shape in shapes.items():
            dtype = np.dtype(layout.inputs[name].dtype)
            if dtype.kind == "f":
                feed[name] = rng.standard_normal((1, *shape)).astype(dtype)
            else:
                feed[name] = rng.integers(256 if dtype == np.uint8 else 2, size=(1, *shape)).astype(dtype)
        writer.append(feed, None)
        progress.checkpoint()


def _drift(sets: Mapping[str, SetReport]) -> list[str]:
    """Float inputs whose spread differs tenfold between calibration and verdict: two different preprocessings."""
    found = []
    for name, seen in sets["calibration"].inputs.items():
        judged = sets["verdict"].inputs[name]
        if not seen.dtype.startswith("float"):
            continue
        low, high = sorted((seen.std + abs(seen.mean), judged.std + abs(judged.mean)))
        if high > 10 * low:
            found.append(
                f"{name}: calibration is {seen.mean:.3g} ± {seen.std:.3g} in {seen.min:.3g}..{seen.max:.3g}, verdict "
                f"{judged.mean:.3g} ± {judged.std:.3g} in {judged.min:.3g}..{judged.max:.3g}; "
                "do both use the same preprocessing?"
            )
    return found


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape")


def _to_array(value: object, wrong: Any) -> Array:
    if not _is_array(value):
        raise wrong(f"is {_shown(value)}, not an array")
    try:
        return np.asarray(value)
    except Exception as error:
        raise wrong(f"cannot be turned into a numpy array: {error}") from error


def _to_targets(value: object, wrong: Any) -> Targets | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        found: Targets = {str(n): _to_array(v, lambda f, n=n: wrong(f"target {n!r} {f}")) for n, v in value.items()}
    elif isinstance(value, list) and value and all(_is_array(v) and np.ndim(v) > 0 for v in value):
        found = [_to_array(v, lambda f: wrong(f"targets: {f}")) for v in value]
        if len({(a.dtype, a.ndim) for a in found}) > 1:
            raise wrong("targets of one list differ in dtype or rank")
    elif isinstance(value, list):
        try:
            found = np.asarray(value)
        except ValueError as error:
            raise wrong(f"targets: {error}", "give one array per sample") from error
    elif _is_array(value):
        found = _to_array(value, lambda f: wrong(f"targets {f}"))
    else:
        raise wrong(
            f"targets are {_shown(value)}", "give an array, a dict of arrays, or a list of one array per sample"
        )
    arrays = found.values() if isinstance(found, dict) else found if isinstance(found, list) else [found]
    for array in arrays:
        if array.dtype.kind not in ("biufUS" if not isinstance(found, list) else "biuf"):
            raise wrong(f"targets have dtype {array.dtype}", "give numbers, booleans or text")
    return found


def _add_axis(targets: Targets) -> Targets:
    if isinstance(targets, dict):
        return {name: array[np.newaxis] for name, array in targets.items()}
    return targets if isinstance(targets, list) else targets[np.newaxis]


def _lengths(targets: Targets | None) -> dict[str, int]:
    """Number of samples that each part of the targets has; 0 for a scalar."""
    if targets is None:
        return {}
    if isinstance(targets, dict):
        return {f"targets {name!r}": len(a) if a.ndim else 0 for name, a in targets.items()}
    return {"targets": len(targets) if isinstance(targets, list) or targets.ndim else 0}


def _take_targets(targets: Targets | None, rows: slice | npt.NDArray[np.int64]) -> Targets | None:
    if targets is None:
        return None
    if isinstance(targets, dict):
        return {name: array[rows] for name, array in targets.items()}
    if isinstance(targets, list):
        return targets[rows] if isinstance(rows, slice) else [targets[int(i)] for i in rows]
    found: Array = targets[rows]
    return found


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


def _unpack(values: Array, shapes: npt.NDArray[np.int64]) -> list[Array]:
    ends = np.cumsum(np.prod(shapes, axis=1))
    pieces = np.split(values, ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _natural(stem: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", stem) if part]


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
