"""The layer table: what FP16 storage does to every node of a graph, as rows on disk (layers.json)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from enginesmith.tasks.errors import EnginesmithError

if TYPE_CHECKING:
    from rich.table import Table

LAYERS = "layers.json"

DIGITS = 6
"""Significant decimal digits of every measured figure."""


def _rounded(value: object) -> object:
    return float(f"{value:.{DIGITS - 1}e}") + 0.0 if isinstance(value, float | int) else value  # no minus zero


Figure = Annotated[float, BeforeValidator(_rounded)]
"""A measured figure, rounded to `DIGITS` significant digits; infinities are written as "Infinity", "-Infinity"."""


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Values(_Row):
    """What FP16 storage does to a set of float32 values; the values are those of the FP32 model.

    Attributes:
        elements: number of values, over all samples.
        absmax: largest finite magnitude.
        overflow: share that is finite and becomes infinite (65520 and more).
        subnormal: share that becomes an FP16 subnormal (below 6.1e-5): loses bits, and becomes zero on hardware that
            flushes subnormals.
        vanish: share that is not zero and becomes zero (up to 2.98e-8).
        nonfinite: share that is NaN or infinite already in FP32.
    """

    elements: int
    absmax: Figure
    overflow: Figure
    subnormal: Figure
    vanish: Figure
    nonfinite: Figure


class Error(_Row):
    """How far values are from those of the FP32 model, over all samples.

    Where a value that is finite in FP32 comes out as NaN or infinite, or a tensor with another shape (a branch or a
    selection went the other way), no finite figure describes the result: SQNR is then minus infinity and the relative
    error infinity.

    Attributes:
        sqnr_db: signal to quantization noise, ``10 log10(sum(x32^2) / sum((x16 - x32)^2))``; infinity when exact.
        rel_l2: ``sqrt(sum((x16 - x32)^2) / sum(x32^2))``; 0 when exact.
        nonfinite: share of values that are NaN or infinite and are not the same in FP32, or have another shape.
    """

    sqnr_db: Figure
    rel_l2: Figure
    nonfinite: Figure


class LossyConstant(_Row):
    """A constant that FP16 does not hold.

    Attributes:
        name: name of the initializer, or of the Constant node's output.
        operand: position among the node's operands.
        elements: number of values.
        absmax: largest finite magnitude.
        absmin: smallest magnitude that is not zero.
        overflow: how many values become infinite.
        subnormal: how many become FP16 subnormals (below 6.1e-5).
        vanish: how many are not zero and become zero.
    """

    name: str
    operand: int
    elements: int
    absmax: Figure
    absmin: Figure
    overflow: int
    subnormal: int
    vanish: int


class LayerRow(_Row):
    """One node.

    Attributes:
        index: position in topological order; nodes of bodies follow the control-flow node that holds them.
        name: the node.
        op: its operator, with its domain when that is not ONNX's own (`com.microsoft.Gelu`).
        module: dotted path of the module it was exported from, empty when unknown.
        body: the node of the main graph that holds it, empty for nodes of the main graph.
        candidate: whether it can be in FP16.
        reason: why it cannot, empty for candidates.
        operands: the float32 tensors that it reads, without those inside of Loop and Scan; None when there are none.
        constants: its float32 constants; None when it has none.
        lossy: those of them that FP16 does not hold.
        outputs: its float32 results, of no elements in a branch that no sample takes; None when it has none, or is
            inside of a Loop or Scan.
        accumulated: largest sum of the magnitudes of the terms that it adds up (`tasks/graph/sums.py`): above 65504 an
            FP16 accumulator may overflow although the result fits. No FP16 figure here assumes such an accumulator.
            None for operators that add up nothing, and inside of bodies.
        local: this node alone in FP16, on the tensors of the FP32 model: error of its results (of the results of
            `body` when it is inside of a Loop or Scan). None when it is no candidate or has no float32 result.
        end: this node alone in FP16: error of the model's outputs, labels included. None when it is no candidate.
        drop: this node alone in FP16: drop of the metric on the probed samples; positive is worse, infinity when the
            metric has no value. None when it is no candidate, or without a metric.
        stderr: paired standard error of `drop`, where the metric has per-sample scores.
        cumulative: all candidates in FP16: error of its results (of those of `body` when it is in a Loop or Scan).
    """

    index: int
    name: str
    op: str
    module: str = ""
    body: str = ""
    candidate: bool
    reason: str = ""
    operands: Values | None = None
    constants: Values | None = None
    lossy: tuple[LossyConstant, ...] = ()
    outputs: Values | None = None
    accumulated: Figure | None = None
    local: Error | None = None
    end: Error | None = None
    drop: Figure | None = None
    stderr: Figure | None = None
    cumulative: Error | None = None


class LayerTable(_Row):
    """The table.

    Attributes:
        samples: samples that every figure is over.
        metric: what the metric is, empty without one.
        better: its direction.
        value: the FP32 model's value of the metric on these samples; None when it has none on so few.
        end: all candidates in FP16: error of the model's outputs, labels included.
        drop: all candidates in FP16: drop of the metric on these samples.
        stderr: its paired standard error.
        rows: one per node, Constant nodes excepted.
    """

    samples: int
    metric: str = ""
    better: Literal["higher", "lower"] = "higher"
    value: Figure | None = None
    end: Error
    drop: Figure | None = None
    stderr: Figure | None = None
    rows: tuple[LayerRow, ...]

    def row(self, name: str) -> LayerRow:
        """The row of a node.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def candidates(self) -> tuple[LayerRow, ...]:
        """The rows of nodes that can be in FP16."""
        return tuple(row for row in self.rows if row.candidate)

    def save(self, folder: Path) -> None:
        """Write layers.json."""
        (folder / LAYERS).write_text(self.model_dump_json(indent=1) + "\n")


def load_layers(path: Path) -> LayerTable:
    """Read a layer table.

    Args:
        path: layers.json, or the probe artifact's folder.

    Raises:
        EnginesmithError: it is not there or not a layer table.
    """
    file = path / LAYERS if path.is_dir() else path
    try:
        return LayerTable.model_validate_json(file.read_bytes())
    except OSError as error:
        raise EnginesmithError(f"no layer table: {error.strerror}", where=str(file), hint="run the probe") from error
    except ValidationError as error:
        raise EnginesmithError(f"not a layer table: {error}", where=str(file)) from error


def table(layers: LayerTable) -> Table:
    """The rows for a terminal."""
    from rich.table import Table

    shown = Table(caption=_caption(layers), caption_justify="left")
    shown.add_column("node", overflow="fold")
    shown.add_column("operator")
    for heading in ("absmax", "overflow", "tiny", "local dB", "end dB", "drop", "all FP16 dB"):
        shown.add_column(heading, justify="right")
    for row in layers.rows:
        if row.outputs is None and not row.candidate:
            continue
        values = row.outputs
        shown.add_row(
            row.name,
            row.op,
            "" if values is None else f"{values.absmax:.3g}",
            _share(0.0 if values is None else values.overflow),
            _share(0.0 if values is None else values.subnormal + values.vanish),
            _decibels(row.local),
            _decibels(row.end),
            "" if row.drop is None else f"{row.drop:.4f}",
            _decibels(row.cumulative),
            style=None if row.candidate else "dim",
        )
    return shown


def _caption(layers: LayerTable) -> str:
    drop = "" if layers.drop is None else f", drop {layers.drop:.4f}"
    return (
        f"{layers.samples} samples; all candidates in FP16: {_decibels(layers.end)} dB at the outputs{drop}. "
        "absmax, overflow, tiny: results in FP32, share that FP16 makes infinite, share below FP16's normal range. "
        "local, end: signal to noise with this node alone in FP16, at its results and at the model's outputs."
    )


def _share(share: float) -> str:
    return f"{share:.2%}" if share else ""


def _decibels(error: Error | None) -> str:
    if error is None:
        return ""
    if error.nonfinite:
        return "NaN/inf"
    return "exact" if error.sqnr_db == float("inf") else f"{error.sqnr_db:.1f}"
