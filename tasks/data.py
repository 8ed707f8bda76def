"""Turns the user's data (code, .npz, .npy, or nothing) into checked calibration, search and verdict sets on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.columns import FEEDS, Dealer, SetFile, SetReport, SetWriter, unpack_ragged
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.feeds import Array, Layout, Targets, read_feeds, take_targets
from enginesmith.tasks.settings import InputSettings
from enginesmith.tasks.sources import DataSource, FolderSource, data_source, keyed_files, resolve_source
from enginesmith.tasks.stage import SourceFile, Stage
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.usercode import UserCode

__all__ = [
    "DATA",
    "Array",
    "DataReport",
    "DataSource",
    "Dataset",
    "FolderSource",
    "Targets",
    "Which",
    "data_source",
    "keyed_files",
    "load_dataset",
    "prepare_data",
    "resolve_source",
]

Which = Literal["calibration", "search", "verdict"]


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
            targets=take_targets(self.targets, rows),
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


class DataReport(BaseModel):
    """What the three sets are, and what is odd about them."""

    sets: dict[str, SetReport]
    warnings: tuple[str, ...]


def load_dataset(data: Artifact, which: Which) -> Dataset:
    """One set of a data artifact, memory-mapped."""
    folder = data.path / which
    feeds = SetFile.model_validate_json((folder / FEEDS).read_text())
    columns = {name: np.load(folder / file, mmap_mode="r") for name, file in feeds.target_files.items()}
    targets: Targets | None = None
    if feeds.targets == "array":
        targets = columns["targets"]
    elif feeds.targets == "dict":
        targets = columns
    elif feeds.targets == "ragged":
        targets = unpack_ragged(columns["values"], columns["shapes"])
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
    layout = Layout.of(inputs)
    warnings: list[str] = []
    calibrate = SetWriter(out / "calibration", layout, "data.calibration")
    find = SetWriter(out / "search", layout, "data.search" if search else "data.evaluation")
    judge = SetWriter(out / "verdict", layout, "data.evaluation")

    def fill(source: DataSource, key: str, sink: SetWriter | Dealer) -> None:
        with progress.track(key.replace(".", ": "), total=None) as bar:
            for feed, targets in read_feeds(source, layout, key, out):
                sink.append(feed, targets)
                bar.advance(len(next(iter(feed.values()))))
        sink.finish(source.spec if isinstance(source, UserCode) else source.path.name)

    judged = evaluation or calibration
    if judged is None:
        for index, writer in enumerate((calibrate, find, judge)):
            _fill_randomly(writer, layout, np.random.default_rng([seed, index]), samples)
            writer.finish(f"random, seed {seed}")
    else:
        key = "data.evaluation" if evaluation else "data.calibration"
        if search is None:
            fill(judged, key, Dealer(find, judge, seed))
        else:
            fill(search, "data.search", find)
            fill(judged, key, judge)
        if calibration is not None:
            fill(calibration, "data.calibration", calibrate)
        elif search is not None:
            fill(search, "data.search", calibrate)
        else:
            fill(judged, key, Dealer(calibrate, None, seed))
    if evaluation is None and calibration is not None:
        warnings.append("data.evaluation is not given: the verdict is computed on calibration samples")
    if calibration is None and evaluation is not None:
        warnings.append("data.calibration is not given: the search samples calibrate")
    sets = {writer.folder.name: writer.close() for writer in (calibrate, find, judge)}
    return DataReport(sets=sets, warnings=(*warnings, *_drift(sets)))


DATA = Stage("data", version=1, run=prepare_data, tools=("numpy",))


def _fill_randomly(writer: SetWriter, layout: Layout, rng: np.random.Generator, samples: int) -> None:
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
