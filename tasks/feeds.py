"""Turns what the user's data code, .npz, .npy or folder holds into checked batches of inputs and targets.

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

import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import InputSettings
from enginesmith.tasks.sources import DataSource, FolderSource
from enginesmith.tasks.usercode import UserCode, user_error

Array = npt.NDArray[Any]
Targets = Array | dict[str, Array] | list[Array]
TargetKind = Literal["none", "array", "dict", "ragged"]
Wrong = Callable[..., EnginesmithError]

CHUNK_BYTES = 32 << 20
MAX_BYTES = 32 << 30


@dataclass(frozen=True)
class Layout:
    """The declared inputs, and what their first dimensions say about batches.

    Attributes:
        inputs: declared inputs by name.
        batched: whether all inputs begin with the same dimension, the batch.
        batch: its min, opt and max; all 1 when not batched.
    """

    inputs: Mapping[str, InputSettings]
    batched: bool
    batch: tuple[int, int, int]

    @classmethod
    def of(cls, inputs: Mapping[str, InputSettings]) -> Layout:
        """The layout of declared inputs.

        Raises:
            EnginesmithError: no batch satisfies the ranges of all inputs.
        """
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


def read_feeds(
    source: DataSource, layout: Layout, key: str, scratch: Path
) -> Iterator[tuple[dict[str, Array], Targets | None]]:
    """Inputs in declared order and targets, in pieces of at most `CHUNK_BYTES` or one sample, axis 0 the sample.

    Args:
        source: what pipeline.yaml names.
        layout: what the inputs are declared to be.
        key: the key of pipeline.yaml that names the source.
        scratch: folder in which archives are unpacked for a while.

    Raises:
        EnginesmithError: it yields nothing, or something else than declared; names the sample and what was expected.
    """
    where = "" if isinstance(source, UserCode) else str(source.path)
    first = 0
    form: dict[str, str] = {}
    for number, item in enumerate(_items(source, layout, key, scratch)):
        inputs, targets, count = _read_item(item, number, layout, first, key, where)
        form = _check_steady(_form(inputs, targets), form, first, key, where)
        step = max(1, CHUNK_BYTES // max(1, sum(a[:1].nbytes for a in inputs.values())))
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            part = {name: array[rows] for name, array in inputs.items()}
            _check_finite(part, first + start, key, where)
            yield part, take_targets(targets, rows)
        first += count
    if first == 0:
        name = source.spec if isinstance(source, UserCode) else source.path.name
        raise EnginesmithError(f"{name} yields no samples", where=where, key=key)


def kind_of(targets: Targets | None) -> TargetKind:
    """The form in which targets are given."""
    if targets is None:
        return "none"
    return "dict" if isinstance(targets, dict) else "ragged" if isinstance(targets, list) else "array"


def take_targets(targets: Targets | None, rows: slice | npt.NDArray[np.int64]) -> Targets | None:
    """Targets of some of the samples."""
    if targets is None:
        return None
    if isinstance(targets, dict):
        return {name: array[rows] for name, array in targets.items()}
    if isinstance(targets, list):
        return targets[rows] if isinstance(rows, slice) else [targets[int(i)] for i in rows]
    found: Array = targets[rows]
    return found


def _items(source: DataSource, layout: Layout, key: str, scratch: Path) -> Iterator[object]:
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
        except (Exception, SystemExit) as error:
            raise user_error(error, f"{source.spec} failed", folder=source.folder, key=key) from error
        # torch's default collation turns (image, label) into a list.
        yield tuple(item) if isinstance(item, list) and len(item) == 2 else item


def _from_folder(source: FolderSource, layout: Layout, key: str) -> Iterator[object]:
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


def _from_npz(path: Path, layout: Layout, key: str, scratch: Path) -> Iterator[object]:
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
    item: object, number: int, layout: Layout, first: int, key: str, where: str
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


def _check_declared(name: str, array: Array, layout: Layout, sizes: dict[str, int], wrong: Wrong) -> None:
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


def _form(inputs: Mapping[str, Array], targets: Targets | None) -> dict[str, str]:
    """What all samples of a set have to have in common, in words."""
    form = {f"{name!r}": f"of shape {list(array.shape[1:])}" for name, array in inputs.items()}
    form["targets"] = kind_of(targets)
    if isinstance(targets, dict):
        form |= {f"targets {name!r}": _column_form(array) for name, array in targets.items()}
    elif isinstance(targets, list):
        form["targets"] += f" {targets[0].dtype} of rank {targets[0].ndim}"
    elif targets is not None:
        form["targets"] = _column_form(targets)
    return form


def _column_form(array: Array) -> str:
    return f"{'text' if array.dtype.kind in 'US' else array.dtype} {list(array.shape[1:])}"


def _check_steady(form: dict[str, str], before: dict[str, str], first: int, key: str, where: str) -> dict[str, str]:
    for part in {**form, **before} if before else {}:
        if form.get(part) != before.get(part):
            raise EnginesmithError(
                f"sample {first}: {part} {form.get(part, 'absent')}, before it {before.get(part, 'absent')}",
                where=where,
                key=key,
                hint="targets that differ in size go into a list, one array per sample"
                if part.startswith("targets")
                else "all samples of a set have one shape; resize, pad or crop them",
            )
    return form


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


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape")


def _to_array(value: object, wrong: Wrong) -> Array:
    if not _is_array(value):
        raise wrong(f"is {_shown(value)}, not an array")
    try:
        return np.asarray(value)
    except Exception as error:
        raise wrong(f"cannot be turned into a numpy array: {error}") from error


def _to_targets(value: object, wrong: Wrong) -> Targets | None:
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


def _natural(stem: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", stem) if part]


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'…' if len(text) > 60 else ''}"
