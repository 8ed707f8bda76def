"""Plain files turn into the artifacts of single stages: what `enginesmith probe MODEL.onnx` and its like run on."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import DimSettings, ExportSettings, InputSettings, MetricSettings, SimplifySettings
from enginesmith.tasks.sources import onnx_source
from enginesmith.tasks.store import REPORT, Artifact, Store
from enginesmith.tasks.usercode import importable

BATCH = DimSettings(min=1, opt=8, max=32)


class Workbench:
    """One ONNX file and one set of feeds, with the artifacts that single stages need.

    Args:
        store: where the artifacts go.
        model: an .onnx file.
        feeds: an .npz (input names, optional ``targets``) or a folder of .npy; it serves as every data set.
        metric: ``agreement``, ``top1`` or ``module:function``, importable from the current folder.
        dims: ranges of dynamic dimensions; without one, a leading dynamic dimension is a batch of 1 to 32, and
            another one has the size that it has in the feeds.
    """

    def __init__(
        self,
        store: Store,
        model: Path,
        feeds: Path | None = None,
        *,
        metric: str = "agreement",
        dims: Mapping[str, DimSettings] | None = None,
    ) -> None:
        self.store = store
        self.source = onnx_source(model)
        self.feeds = feeds
        self._metric = metric
        self._dims = dict(dims or {})

    @cached_property
    def inputs(self) -> dict[str, InputSettings]:
        """Shape and dtype of every model input, dynamic dimensions with their ranges."""
        sizes = _sizes(self.feeds)
        found = {name: self._input(name, value, sizes.get(name)) for name, value in _graph_inputs(self.source.path)}
        known = {dim for settings in found.values() for dim in settings.dims}
        for name in self._dims:
            if name not in known:
                raise EnginesmithError(
                    f"--dim {name}: the model has no dynamic dimension of this name",
                    where=str(self.source.path),
                    hint=f"it has {', '.join(sorted(known)) or 'none'}",
                )
        return found

    @cached_property
    def data(self) -> Artifact:
        """The feeds as calibration, search and verdict set."""
        from enginesmith.tasks.data import DATA, data_source

        source = None if self.feeds is None else data_source(str(self.feeds.resolve()), Path.cwd(), "--data")
        return DATA(
            store=self.store,
            calibration=source,
            evaluation=source,
            search=source,
            files=(),
            inputs=self.inputs,
            seed=0,
            samples=64,
        )

    @cached_property
    def model(self) -> Artifact:
        """The model, checked and with named nodes."""
        return self.adopt(self.source.path)

    def adopt(self, path: Path) -> Artifact:
        """An .onnx file with the same inputs, checked and with named nodes."""
        from enginesmith.tasks.export import ADOPT

        return ADOPT(
            store=self.store,
            source=onnx_source(path),
            data=self.data,
            inputs=self.inputs,
            settings=ExportSettings(),
            backends=(),
        )

    @cached_property
    def simplified(self) -> Artifact:
        """The model after onnxsim and its gate."""
        from enginesmith.tasks.simplify import SIMPLIFY

        return SIMPLIFY(
            store=self.store, model=self.model, data=self.data, inputs=self.inputs, settings=SimplifySettings()
        )

    @cached_property
    def judged(self) -> dict[str, Any]:
        """Data, FP32 reference and metric: the inputs of every stage that judges accuracy."""
        from enginesmith.tasks.metric import BUILTINS, metric_ref
        from enginesmith.tasks.reference import REFERENCE

        if ":" not in self._metric and self._metric not in BUILTINS:
            raise EnginesmithError(
                f"there is no metric {self._metric!r}",
                key="--metric",
                hint=f"{', '.join(BUILTINS)}, or module:function",
            )
        metric = metric_ref(MetricSettings(call=self._metric), Path.cwd(), "--metric")
        reference = REFERENCE(store=self.store, model=self.model, data=self.data, metric=metric)
        return {"data": self.data, "reference": reference, "metric": metric}

    def _input(self, name: str, value: onnx.TypeProto.Tensor, size: tuple[int, ...] | None) -> InputSettings:
        shape: list[int | str] = []
        dims: dict[str, DimSettings] = {}
        for axis, dim in enumerate(value.shape.dim):
            if dim.dim_value > 0:
                shape.append(dim.dim_value)
                continue
            # Exporters write -1, 0 and "?" for sizes that they do not know, the same mark for different ones.
            symbol = "".join(c if c.isalnum() else "_" for c in dim.dim_param)
            if not symbol.strip("_") or not (symbol[0].isalpha() or symbol[0] == "_"):
                symbol = f"{''.join(c if c.isalnum() else '_' for c in name)}_{axis}"
            shape.append(symbol)
            dims[symbol] = self._dims.get(symbol) or _range(name, symbol, axis, size)
        dtype: Any = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.elem_type)).name
        return InputSettings(shape=tuple(shape), dtype=dtype, dims=dims)


@contextmanager
def workbench(
    model: Path, feeds: Path | None = None, *, near: Path | None = None, **options: Any
) -> Iterator[Workbench]:
    """A workbench over a store that is gone afterwards."""
    with scratch_store(near=near) as store, importable(Path.cwd()):
        yield Workbench(store, model, feeds, **options)


@contextmanager
def scratch_store(near: Path | None = None) -> Iterator[Store]:
    """A store that is gone afterwards, on the same disk as the output that will be taken from it."""
    parent = None if near is None else near.resolve().parent
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".enginesmith-", dir=parent) as folder:
        yield Store(Path(folder))


def ranges(dims: Sequence[str]) -> dict[str, DimSettings]:
    """``NAME=MIN:OPT:MAX`` texts as ranges by name."""
    found = {}
    for text in dims:
        name, _, numbers = text.partition("=")
        parts = numbers.split(":")
        if not name or len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise EnginesmithError(f"--dim {text} is not NAME=MIN:OPT:MAX", hint="for example --dim batch=1:8:32")
        low, best, high = map(int, parts)
        if not 1 <= low <= best <= high:
            raise EnginesmithError(f"--dim {text} needs 1 <= MIN <= OPT <= MAX")
        found[name] = DimSettings(min=low, opt=best, max=high)
    return found


def option_values(options: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` texts as values by name; a value is read as YAML."""
    found: dict[str, Any] = {}
    for text in options:
        name, equals, value = text.partition("=")
        if not equals:
            raise EnginesmithError(f"--option {text} is not NAME=VALUE")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise EnginesmithError(f"--option {text}: {value!r} is no YAML value") from error
    return found


def put(artifact: Artifact, out: Path) -> Path:
    """Copy an artifact's files, report included, into a folder; whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EnginesmithError(f"{out} exists already", hint="name a folder that does not exist yet")
    with tempfile.TemporaryDirectory(prefix=".enginesmith-", dir=out.parent) as scratch:
        staged = Path(scratch) / "out"
        for entry in artifact.files:
            target = staged / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact.path / entry.path, target)
        if out.exists():
            out.rmdir()
        staged.rename(out)
    return out


def put_file(artifact: Artifact, name: str, out: Path) -> Path:
    """Copy one file of an artifact to a path, replacing what is there in one step; external data goes beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for entry in artifact.files:
        if entry.path in (REPORT, name) or not entry.path.startswith(name):
            continue
        _replace(artifact.path / entry.path, out.with_name(Path(entry.path).name))
    return _replace(artifact.path / name, out)


def _replace(source: Path, out: Path) -> Path:
    handle, scratch = tempfile.mkstemp(prefix=f".{out.name}-", dir=out.parent)
    os.close(handle)
    try:
        shutil.copyfile(source, scratch)
        Path(scratch).chmod(0o666 & ~_umask())
        Path(scratch).replace(out)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return out


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _graph_inputs(path: Path) -> Iterator[tuple[str, onnx.TypeProto.Tensor]]:
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except Exception as error:  # protobuf raises several kinds, with messages of its own
        raise EnginesmithError("this is not an ONNX file", where=str(path), details=[str(error)]) from error
    weights = {initializer.name for initializer in graph.initializer}
    for value in graph.input:
        if value.name not in weights:
            yield value.name, value.type.tensor_type


def _sizes(feeds: Path | None) -> dict[str, tuple[int, ...]]:
    if feeds is None or feeds.suffix != ".npz":
        return {}
    try:
        with np.load(feeds, allow_pickle=False) as data:
            return {name: data[name].shape for name in data.files}
    except (OSError, ValueError) as error:
        raise EnginesmithError("this is not an .npz of arrays", where=str(feeds), details=[str(error)]) from error


def _range(name: str, symbol: str, axis: int, size: tuple[int, ...] | None) -> DimSettings:
    if axis == 0:
        return BATCH
    if size is not None and axis < len(size):
        return DimSettings(min=size[axis], opt=size[axis], max=size[axis])
    raise EnginesmithError(
        f"dimension {axis} ({symbol}) of input {name!r} is dynamic and has no range",
        hint=f"give one: --dim {symbol}=MIN:OPT:MAX",
    )
