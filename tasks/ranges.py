"""Turns calibrated ranges into ranges.json and into a TensorRT calibration cache, and both back into ranges."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from enginesmith.tasks.errors import EnginesmithError

RANGES_FILE = "ranges.json"
CACHE_FILE = "calibration.cache"
SCHEMA = 1

_CACHE_HEADER = "TRT-8600-EntropyCalibration2"
_KNOWN_HEADER = re.compile(r"TRT-\d+-\w+")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class TensorRange(_Record):
    """One calibrated tensor.

    Attributes:
        tensor: its name in the FP32 graph.
        absmax: largest magnitude seen.
        minimum: smallest value seen.
        maximum: largest value seen.
        threshold: the range is -threshold..threshold; None where there is none (see `problem`).
        scale: threshold / 127, rounded up to an FP16 number.
        method: what chose the threshold: the calibrator, or `error` where the calibrator's choice cost too much.
        clipped: share of elements beyond the threshold.
        sqnr_db: signal to quantization noise of this tensor, from the mean over samples of noise / signal.
        outlier: the largest magnitude is more than eight times the threshold of least error.
        peak_sample: calibration sample that holds the largest magnitude.
        read_by: quantized convolutions and residual Adds that read it through Q/DQ.
        problem: why it has no range.
    """

    tensor: str
    absmax: float
    minimum: float
    maximum: float
    threshold: float | None
    scale: float | None
    method: Literal["entropy", "minmax", "percentile", "mse", "error", "none"]
    clipped: float
    sqnr_db: float | None
    outlier: bool
    peak_sample: int
    read_by: tuple[str, ...] = ()
    problem: str = ""


class QuantizedLayer(_Record):
    """One quantized convolution.

    Attributes:
        conv: node name.
        op_type: Conv or ConvTranspose.
        members: nodes of its subgraph: convolution, normalization, activation.
        input: tensor it reads through Q/DQ.
        output: tensor its range was taken of, after the activation.
        weight: its weight's tensor.
        axis: channel axis of the weight's scales; None: one scale.
        depthwise: every output channel reads one input channel.
        weight_sqnr_db: signal to quantization noise of the weight; None: exact.
        worst_channel_db: the same for its worst channel that is not all zero.
        tiny_channels: channels whose weights are so small that all became zero.
    """

    conv: str
    op_type: str
    members: tuple[str, ...]
    input: str
    output: str
    weight: str
    axis: int | None
    depthwise: bool
    weight_sqnr_db: float | None
    worst_channel_db: float | None
    tiny_channels: int


class SkippedLayer(_Record):
    """A convolution that stays in floating point, and why."""

    conv: str
    reason: str


class RangeTable(_Record):
    """ranges.json: what an INT8 graph is made of.

    Attributes:
        model: digest of the FP32 model that was calibrated.
        data: digest of the calibration set.
        samples: calibration samples used.
        seed: seed of their choice.
        calibrator: as asked for.
        placement: as asked for.
        correction: what was done to weights and biases: see tasks/calibrate/refit.py.
        tensors: in graph order.
        layers: quantized convolutions, in graph order.
        skipped: all other convolutions.
    """

    schema_version: int = SCHEMA
    model: str
    data: str
    samples: int
    seed: int
    calibrator: str
    placement: Literal["conv-relu", "conv", "conv+residual"]
    correction: Literal["none", "bias", "refit"]
    tensors: tuple[TensorRange, ...]
    layers: tuple[QuantizedLayer, ...]
    skipped: tuple[SkippedLayer, ...]

    def scales(self) -> dict[str, float]:
        """Activation scale by tensor, for those that have one."""
        return {row.tensor: row.scale for row in self.tensors if row.scale is not None}


def write_ranges(table: RangeTable, folder: Path) -> None:
    """Write ranges.json and the TensorRT calibration cache."""
    (folder / RANGES_FILE).write_text(table.model_dump_json(indent=1) + "\n")
    (folder / CACHE_FILE).write_text(format_cache(table.scales()))


def read_ranges(folder: Path, *, model: str | None = None) -> RangeTable:
    """Read ranges.json.

    Args:
        folder: of the calibration artifact.
        model: digest of the model that the ranges are to be used for. Ranges of another model are refused, whether or
            not its tensors have the same names.

    Raises:
        EnginesmithError: no such file, not a range table, or made for another model.
    """
    path = folder / RANGES_FILE
    try:
        table = RangeTable.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EnginesmithError(f"the ranges cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise EnginesmithError(
            f"not a table of ranges: {'.'.join(map(str, problem['loc']))}: {problem['msg']}",
            where=str(path),
            hint="calibrate again",
        ) from error
    if model is not None and table.model != model:
        raise EnginesmithError(
            f"these ranges were calibrated on model {table.model[:12]}, not on {model[:12]}",
            where=str(path),
            hint="equal tensor names prove nothing: other weights have other ranges; calibrate this model",
        )
    return table


def format_cache(scales: Mapping[str, float]) -> str:
    """A TensorRT calibration cache: a header, then a tensor a line with its scale as big-endian float32 in hex."""
    lines = [_CACHE_HEADER, *(f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in scales.items())]
    return "\n".join(lines) + "\n"


def read_cache(path: Path, *, tensors: set[str] | None = None) -> dict[str, float]:
    """Scales by tensor name from a TensorRT calibration cache.

    A cache does not say which model it was made of: give `tensors` to find out at least whether the names fit.

    Args:
        path: the cache file.
        tensors: names of the tensors in the model.

    Raises:
        EnginesmithError: no such file, not a calibration cache, a scale that is not a positive number, or no tensor of
            the cache is in the model.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise EnginesmithError(f"the calibration cache cannot be read: {reason}", where=str(path)) from error
    if not lines or not _KNOWN_HEADER.fullmatch(lines[0].strip()):
        raise EnginesmithError(
            "not a TensorRT calibration cache", where=str(path), hint=f"its first line is like {_CACHE_HEADER}"
        )
    scales: dict[str, float] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, _, text = line.rpartition(": ")
        try:
            (scale,) = struct.unpack(">f", bytes.fromhex(text.strip()))
        except (ValueError, struct.error):
            scale = math.nan
        if not name or not (0 < scale < math.inf):
            raise EnginesmithError(
                f"no tensor with a positive scale: {line.strip()[:80]!r}",
                where=f"{path}:{number}",
                hint="a line is NAME: and eight hex digits, a big-endian float32",
            )
        scales[name] = scale
    if tensors is not None and not tensors & set(scales):
        raise EnginesmithError(
            f"none of its {len(scales)} tensors is in the model",
            where=str(path),
            details=[f"cache: {', '.join(sorted(scales)[:3])}", f"model: {', '.join(sorted(tensors)[:3])}"],
            hint="it belongs to another model; calibrate this one",
        )
    return scales
