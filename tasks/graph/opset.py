"""Turns a graph into the same graph at a newer opset, by ONNX's version converter and behind an equality check."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import version_converter

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io
from enginesmith.tasks.runner import OnnxRunner

TOLERANCE = 1e-5
"""Largest difference of an output, relative to its largest magnitude."""


def raise_opset(model: ir.Model, opset: int, feed: Mapping[str, np.ndarray]) -> ir.Model:
    """The model at `opset` or newer.

    1. A model that is there already is returned as it is.
    2. Otherwise operators are rewritten by ONNX's version converter (Softmax without axis, Clip's bounds, …); the
       opset number alone is never changed.
    3. Both are run on `feed`: outputs that differ are an error.

    Nodes that the converter leaves alone keep their names.

    Args:
        model: any ONNX model.
        opset: of the default domain.
        feed: one feed of real data.

    Raises:
        EnginesmithError: the converter does not know an operator, or the converted model computes something else.
    """
    found = model.graph.opset_imports.get("", 0)
    if found >= opset:
        return model
    if io.tensor_bytes(model) > io.EMBED_LIMIT:
        raise EnginesmithError(
            f"a model of {io.tensor_bytes(model) / 1e9:.1f} GB cannot be converted from opset {found} to {opset}",
            hint=f"export it at opset {opset}",
        )
    try:
        converted = ir.from_proto(version_converter.convert_version(_embedded(model), opset))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise EnginesmithError(
            f"opset {found} could not be converted to {opset}",
            details=lines[:4],
            hint=f"export the model at opset {opset}",
        ) from error
    before, after = OnnxRunner(model).run(feed), OnnxRunner(converted).run(feed)
    for name, value in before.items():
        if not _equal(value, after[name]):
            raise EnginesmithError(
                f"converted from opset {found} to {opset}, the model puts out something else",
                where=f"output {name!r}",
                hint=f"export the model at opset {opset}",
            )
    return converted


def _embedded(model: ir.Model) -> onnx.ModelProto:
    copy = model.clone()
    ir.external_data.load_to_model(copy)
    return ir.to_proto(copy)


def _equal(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.kind != "f":
        return bool(np.array_equal(left, right))
    scale = float(np.max(np.abs(left), initial=0.0, where=np.isfinite(left)))
    return bool(np.allclose(left, right, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True))
