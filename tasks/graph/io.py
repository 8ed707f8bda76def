"""Turns an ONNX file, with or without external data, into an `onnx_ir.Model` and back."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from enginesmith.tasks.errors import EnginesmithError

MODEL = "model.onnx"
DATA = "model.onnx.data"

EMBED_LIMIT = 1_500_000_000
"""Bytes of tensor data up to which a model is one file; protobuf itself ends at 2 GiB."""


def load(path: Path) -> ir.Model:
    """Read a model; external data stays on disk and is memory-mapped when it is read.

    Args:
        path: an ONNX file, or an artifact's folder that holds `model.onnx`.

    Raises:
        EnginesmithError: no such file, not an ONNX file, or its external data is not beside it.
    """
    file = path / MODEL if path.is_dir() else path
    try:
        model = ir.load(file)
    except OSError as error:
        raise EnginesmithError(f"the model cannot be read: {error.strerror or error}", where=str(file)) from error
    except (DecodeError, ValueError, TypeError, ir.serde.SerdeError) as error:
        raise EnginesmithError(
            f"not a readable ONNX file: {error}", where=str(file), hint="it may be cut off; fetch or export it again"
        ) from error
    for tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
            raise EnginesmithError(
                f"the external data file {tensor.location!s} of tensor {tensor.name!r} is missing",
                where=str(file),
                hint="an ONNX file above 2 GB travels together with its data file; put it beside the model",
            )
    return model


def save(model: ir.Model, folder: Path, *, embed_limit: int | None = None) -> Path:
    """Write `model.onnx`, and `model.onnx.data` when the tensors exceed `embed_limit` bytes (1.5 GB).

    Returns the ONNX file.

    The model is the same after the call. Tensors that are external already are read from where they lie, and streamed
    when they stay external: a model larger than memory can be saved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MODEL
    if tensor_bytes(model) > (EMBED_LIMIT if embed_limit is None else embed_limit):
        ir.save(model, file, external_data=DATA)
        return file
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    originals = [value.const_value for value in values]
    try:
        ir.external_data.load_to_model(model)
        ir.save(model, file)
    finally:
        for value, tensor in zip(values, originals, strict=True):
            value.const_value = tensor
    return file


def tensor_bytes(model: ir.Model) -> int:
    """Bytes of all initializers, those of subgraphs included."""
    return sum(tensor.nbytes for tensor in _tensors(model))


def has_external_data(model: ir.Model) -> bool:
    """Whether any initializer lies in a file of its own."""
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in _tensors(model))


def _tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    return [
        value.const_value
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    ]
