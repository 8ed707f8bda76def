"""Turns an ONNX model and feeds into outputs, by ONNX Runtime on the CPU, set up for accuracy and not for speed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io
from enginesmith.tasks.progress import Bar

if TYPE_CHECKING:
    from enginesmith.tasks.data import Dataset

_ERROR = 3


class OnnxRunner:
    """One ONNX Runtime session on the CPU provider.

    INT8 kernels are the exact ones on CPUs without VNNI too (session.x64quantprecision), kernels are the deterministic
    ones where there is a choice, and graph optimizations are on: they keep Cast(FLOAT16)→Cast(FLOAT) pairs.

    Args:
        model: an ONNX file or a folder with `model.onnx`; or a model in memory. One in memory with external data, or
            too large for protobuf, goes through a temporary folder.
        threads: intra-op threads; None means as many as this process may use.
        level: graph optimization level; None means all.
        spinning: whether idle threads spin for more work; off when several sessions take turns.

    Attributes:
        inputs: names of the inputs that must be fed, in order.
        outputs: names of the outputs, in order.

    Raises:
        EnginesmithError: ONNX Runtime does not accept the model.
    """

    def __init__(
        self,
        model: Path | onnx.ModelProto | ir.Model,
        *,
        threads: int | None = None,
        level: ort.GraphOptimizationLevel | None = None,
        spinning: bool = True,
    ) -> None:
        options = session_options(threads=threads, level=level, spinning=spinning)
        if isinstance(model, onnx.ModelProto):
            model = ir.from_proto(model)
        if isinstance(model, ir.Model):
            self.session = _session_in_memory(model, options)
        else:
            file = model / io.MODEL if model.is_dir() else model
            self.session = _session(str(file), options, where=str(file))
        self._dtypes = {value.name: _NUMPY.get(value.type) for value in self.session.get_inputs()}
        self.inputs = tuple(self._dtypes)
        self.outputs = tuple(value.name for value in self.session.get_outputs())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the session's memory."""
        del self.session

    def run(self, feeds: Mapping[str, np.ndarray], fetch: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """Outputs by name for one feed: those in `fetch`, or all.

        Raises:
            EnginesmithError: an input is missing, unknown or of another dtype than declared, or the run failed.
        """
        self._check(feeds)
        names = self.outputs if fetch is None else fetch
        try:
            results = self.session.run(names, dict(feeds))
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            raise EnginesmithError(
                "ONNX Runtime could not run the model",
                details=[*_lines(error), *(f"input {name!r}: {f.dtype}{list(f.shape)}" for name, f in feeds.items())],
            ) from error
        return dict(zip(names, results, strict=True))

    def predict(self, dataset: Dataset, *, bar: Bar | None = None) -> dict[str, np.ndarray]:
        """Outputs for all samples, by name; axis 0 is the sample.

        Batched: concatenated along the model's batch axis, padding cut off. Otherwise one run per sample, stacked.
        `bar` advances by samples.
        """
        return predict(self.run, dataset, bar=bar)

    def _check(self, feeds: Mapping[str, np.ndarray]) -> None:
        for name, dtype in self._dtypes.items():
            if name not in feeds:
                raise EnginesmithError(f"input {name!r} is not fed", hint=f"the model reads {', '.join(self.inputs)}")
            if dtype is not None and feeds[name].dtype != dtype:
                raise EnginesmithError(f"input {name!r} is {feeds[name].dtype}, the model reads {np.dtype(dtype)}")
        for name in feeds:
            if name not in self._dtypes:
                raise EnginesmithError(
                    f"the model has no input {name!r}", hint=f"the model reads {', '.join(self.inputs)}"
                )


class Gatherer:
    """Collects the outputs of one feed after the other into one array per output, axis 0 being the sample."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, outputs: Mapping[str, np.ndarray], feed: Mapping[str, np.ndarray], count: int) -> None:
        """Keep the first `count` samples of one feed's outputs."""
        for name, value in outputs.items():
            self._parts.setdefault(name, []).append(self._cut(name, value, feed, count))

    def result(self) -> dict[str, np.ndarray]:
        """Everything added so far, by output name."""
        return {name: self._joined(name, parts) for name, parts in self._parts.items()}

    def _cut(self, name: str, value: np.ndarray, feed: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        if not self._dataset.batched:
            return value
        batch = next(iter(feed[n].shape[0] for n in self._dataset.inputs))
        if value.ndim == 0 or value.shape[0] != batch:
            raise EnginesmithError(
                f"output {name!r} has shape {list(value.shape)} for a batch of {batch}: its axis 0 is not the batch",
                hint="every output needs the batch as its axis 0; move or split what has none out of the model",
            )
        return value[:count]

    def _joined(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        shapes = {part.shape[1:] if self._dataset.batched else part.shape for part in parts}
        if len(shapes) > 1:
            raise EnginesmithError(
                f"output {name!r} has different shapes for different samples: {sorted(shapes)[:3]}",
                hint="pad the samples to one size; outputs of all samples are compared as one array",
            )
        return np.concatenate(parts) if self._dataset.batched else np.stack(parts)


def predict(run: Any, dataset: Dataset, *, bar: Bar | None = None) -> dict[str, np.ndarray]:
    """`run` over all feeds of a dataset; see `OnnxRunner.predict`.

    Args:
        run: from one feed (arrays by input name) to outputs by name.
        dataset: samples.
        bar: advances by samples.
    """
    gatherer = Gatherer(dataset)
    for feed, count in dataset.feeds():
        gatherer.add(run(feed), feed, count)
        if bar is not None:
            bar.advance(count)
        else:
            progress.checkpoint()
    return gatherer.result()


def session_options(
    *, threads: int | None = None, level: ort.GraphOptimizationLevel | None = None, spinning: bool = True
) -> ort.SessionOptions:
    """The session options of every accuracy run; see `OnnxRunner` for the arguments."""
    options = ort.SessionOptions()
    options.log_severity_level = _ERROR
    options.intra_op_num_threads = threads or usable_cpus()
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL if level is None else level
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    options.add_session_config_entry("session.x64quantprecision", "1")
    # Q/DQ pairs do what they say: no kernels of its own choice, no float weight quantized unasked (ONNX Runtime 1.32).
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _session_in_memory(model: ir.Model, options: ort.SessionOptions) -> ort.InferenceSession:
    where = f"graph {model.graph.name!r}"
    if not io.has_external_data(model) and io.tensor_bytes(model) <= io.EMBED_LIMIT:
        return _session(ir.to_proto(model).SerializeToString(), options, where=where)
    with tempfile.TemporaryDirectory(prefix="enginesmith-") as folder:
        return _session(str(io.save(model, Path(folder))), options, where=where)


def _session(model: str | bytes, options: ort.SessionOptions, *, where: str) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise EnginesmithError("ONNX Runtime refuses the model", where=where, details=_lines(error)) from error


def _lines(error: Exception) -> list[str]:
    return [line for line in str(error).splitlines() if line.strip()][:6]


_NUMPY: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint64)": np.uint64,
    "tensor(uint32)": np.uint32,
    "tensor(uint16)": np.uint16,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
