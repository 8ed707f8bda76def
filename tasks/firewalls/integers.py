"""Turns a graph's integer constants into findings on those that INT32 or floats cannot hold, judged by their use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.origin import Place
from enginesmith.tasks.firewalls.sized import small_constants

INT32 = np.iinfo(np.int32)

_CLAMPED_ALIKE = {
    "Slice": {1, 2},  # starts and ends are cut to the dimension
    "Clip": {1, 2},
    "Min": None,
    "Max": None,
    "Less": None,
    "LessOrEqual": None,
    "Greater": None,
    "GreaterOrEqual": None,
    "Reshape": {1},
    "Shape": None,
    "Identity": None,
}
"""Uses in which a value cut to INT32 does the same for every tensor that fits into memory; None: every operand."""


def check_integers(model: ir.Model) -> Iterator[Finding]:
    """Constants that change when they are stored in another type.

    1. `operators/int64-range`, warning for the backend tensorrt: an INT64 constant beyond INT32 in arithmetic. TensorRT
       before 10 cuts INT64 to INT32.
    2. `numerics/integer-as-float`, warning: an integer constant is cast to a floating-point type that cannot hold it
       exactly (FLOAT16 above 2048 unless even and so on, FLOAT above 2^24).
    3. `numerics/integer-as-float`, advice: the same in a Cast to FLOAT that FP16 variants would make FLOAT16.

    Not reported: ends of a Slice, bounds and comparisons, where the cut value does the same; constants that nothing
    reads; integers that stay integers (indices, shapes).
    """
    constants = small_constants(model)
    for node in model.graph.all_nodes():
        for position, value in enumerate(node.inputs):
            array = constants.get(str(value.name)) if value is not None else None
            if array is None or array.dtype.kind not in "iu" or not array.size:
                continue
            if node.op_type == "Cast":
                yield from _cast(node, array)
            elif array.dtype == np.int64 and not _alike(node.op_type, position):
                yield from _beyond(node, array)


def _alike(op: str, position: int) -> bool:
    positions = _CLAMPED_ALIKE.get(op, set())
    return positions is None or position in positions


def _beyond(node: ir.Node, array: npt.NDArray[Any]) -> Iterator[Finding]:
    outside = array[(array > INT32.max) | (array < INT32.min)]
    if outside.size:
        yield Place.of(node).put(
            Finding(
                rule="operators/int64-range",
                severity="warning",
                message=f"{node.op_type} computes with {int(outside.flat[0])}, which INT32 cannot hold",
                effect=f"TensorRT before 10 takes {int(np.clip(outside.flat[0], INT32.min, INT32.max))} instead",
                backend="tensorrt",
                versions=("8.6",),
                hint="compute in smaller numbers, or build with TensorRT 10 or later",
            )
        )


def _cast(node: ir.Node, array: npt.NDArray[Any]) -> Iterator[Finding]:
    attribute = node.attributes.get("to")
    target = attribute.as_int() if attribute is not None else 0
    if target not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return
    lost = _inexact(array, np.float16 if target == ir.DataType.FLOAT16 else np.float32)
    if lost.size:
        severity, name = "warning", "FLOAT16" if target == ir.DataType.FLOAT16 else "FLOAT"
    else:
        severity, name = "advice", "FLOAT16"
        lost = _inexact(array, np.float16)
    if not lost.size:
        return
    with np.errstate(over="ignore"):
        became = float(lost.flat[0].astype(np.float16 if name == "FLOAT16" else np.float32))
    yield Place.of(node).put(
        Finding.model_validate(
            {
                "rule": "numerics/integer-as-float",
                "severity": severity,
                "message": f"the integer {int(lost.flat[0])} is {became:g} in {name}"
                + (f"; {lost.size} of {array.size} values change" if array.size > 1 else ""),
                "effect": "an index or a count becomes another one"
                + ("" if severity == "warning" else " in an FP16 variant that converts this Cast"),
                "hint": "keep integers in an integer type, or this Cast in FP32 (precision.fp16.keep_fp32)",
            }
        )
    )


def _inexact(array: npt.NDArray[Any], dtype: type[np.floating[Any]]) -> npt.NDArray[Any]:
    """The values that come back as others from a floating-point type."""
    with np.errstate(over="ignore", invalid="ignore"):
        there = array.astype(dtype).astype(np.longdouble)
    lost: npt.NDArray[Any] = array[there != array.astype(np.longdouble)]
    return lost
