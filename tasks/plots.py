"""Turns probed layers and table rows into SVG plots, the same bytes for the same numbers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginesmith.tasks.graph.layers import LayerTable
from enginesmith.tasks.table import VariantRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HALF, _FULL, _INT8, _LINE = "#4c72b0", "#c44e52", "#dd8452", "#8c8c8c"
_MARKERS = "os^DvP*X"
_LABELLED = 6  # nodes named in the plot: the worst ones


@dataclass(frozen=True)
class LayerPoint:
    """One node of the model as the layer plot shows it.

    Attributes:
        node: its name.
        op: its operator.
        local_error: relative L2 error of its output when it alone computes in FP16; NaN when unknown, inf on overflow.
        drop: loss of the user's metric when it alone computes in FP16; NaN when unknown, inf when the model fails.
        kept_fp32: whether the mixed variant keeps it in FP32.
    """

    node: str
    op: str
    local_error: float
    drop: float
    kept_fp32: bool


def layer_points(table: LayerTable, kept_fp32: Collection[str]) -> tuple[LayerPoint, ...]:
    """The nodes of a probed model that could be FP16, in graph order; `kept_fp32` names those that are not."""
    return tuple(
        LayerPoint(
            node=row.name,
            op=row.op,
            local_error=row.local.rel_l2 if row.local else math.nan,
            drop=math.nan if row.drop is None else row.drop,
            kept_fp32=row.name in kept_fp32,
        )
        for row in table.candidates
    )


def layer_plot(layers: Sequence[LayerPoint], *, title: str, layer_drop: float | None = None) -> str:
    """SVG of every node's FP16 error, in graph order: its own error above, its effect on the metric below.

    Nodes that stay in FP32 are red; a triangle at the upper edge stands for an infinite value (overflow, NaN outputs).

    Args:
        layers: nodes in graph order.
        title: heading.
        layer_drop: the limit above which a node goes back to FP32, drawn as a line.
    """
    with _drawing(12, 5.6, rows=2, sharex=True) as (figure, (error, drop)):
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        _bars(error, layers, [p.local_error for p in layers], log=True)
        _bars(drop, layers, [p.drop for p in layers], log=False)
        error.set_ylabel("local error (rel. L2)")
        drop.set_ylabel("drop, this node in FP16")
        if layer_drop:
            drop.set_yscale("symlog", linthresh=layer_drop)  # linear below the limit, logarithmic above
            drop.set_ylim(min(0, *_finite(layers)) * 1.2, max(layer_drop, *_finite(layers)) * 1.5)
            _plain_ticks(drop)
            drop.axhline(layer_drop, color=_LINE, linestyle="--", linewidth=0.8)
            drop.annotate(
                f"layer_drop {layer_drop:g}", (1, layer_drop), xycoords=("axes fraction", "data"), fontsize=7,
                color=_LINE, ha="right", va="bottom",
            )  # fmt: skip
        drop.set_xlabel("node, in graph order")
        drop.set_xlim(-1, max(len(layers), 1))
        _name_worst(error, layers)
        _legend(figure, [(_HALF, "may be FP16"), (_FULL, f"kept in FP32 ({sum(p.kept_fp32 for p in layers)})")])
        return _svg(figure)


def pareto_plot(rows: Sequence[VariantRow], *, max_drop: float, title: str) -> str:
    """SVG of accuracy against cost: drop over latency where it was measured, and over size.

    Filled markers ran as an engine, hollow ones were emulated; a ring marks the champion; the band is the budget.
    """
    with _drawing(12, 4.2, columns=2, sharey=True) as (figure, (speed, size)):
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        _cloud(speed, rows, lambda r: r.latency_p50_ms, max_drop)
        _cloud(size, rows, lambda r: None if r.size_bytes is None else r.size_bytes / 1e6, max_drop)
        bottom, top = speed.get_ylim()  # shared, and final only now
        for axes in (speed, size):
            axes.axhspan(bottom, max_drop, color="#55a868", alpha=0.08, linewidth=0)
        speed.set_ylim(bottom, top)
        speed.set_xlabel("latency p50 (ms)")
        size.set_xlabel("size (MB)")
        speed.set_ylabel("drop against FP32")
        targets = list(dict.fromkeys(r.target for r in rows))
        _legend(figure, [("#333333", target) for target in targets], _MARKERS)
        return _svg(figure)


def _bars(axes: Axes, layers: Sequence[LayerPoint], values: Sequence[float], *, log: bool) -> None:
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    floor = min(finite) / 3 if log and finite else 0.0
    if log and finite:
        axes.set_yscale("log")
        axes.set_ylim(floor, max(finite) * 3)
        _plain_ticks(axes)
    for colour, kept in ((_HALF, False), (_FULL, True)):
        chosen = [(i, v) for i, (p, v) in enumerate(zip(layers, values, strict=True)) if p.kept_fp32 is kept]
        shown = [(i, v) for i, v in chosen if math.isfinite(v) and (v > 0 or not log)]
        if shown:
            axes.bar([i for i, _ in shown], [v - floor for _, v in shown], bottom=floor, width=0.8, color=colour)
        endless = [i for i, v in chosen if v == math.inf]
        if endless:
            transform = axes.get_xaxis_transform()
            axes.plot(endless, [0.97] * len(endless), "^", color=colour, markersize=6, transform=transform)
    if not log:
        axes.axhline(0, color=_LINE, linewidth=0.6)
    if not finite and not any(v == math.inf for v in values):
        axes.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color=_LINE)


def _finite(layers: Sequence[LayerPoint]) -> list[float]:
    """The finite drops, and 0."""
    return [0.0, *(p.drop for p in layers if math.isfinite(p.drop))]


def _plain_ticks(axes: Axes) -> None:
    """Numbers as text: a logarithmic scale writes its powers as formulas, which are off (see `_drawing`)."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _name_worst(axes: Axes, layers: Sequence[LayerPoint]) -> None:
    """Name the nodes whose FP16 form costs most: by drop, then by local error."""
    order = sorted(range(len(layers)), key=lambda i: _badness(layers[i]), reverse=True)[:_LABELLED]
    for rank, index in enumerate(sorted(order)):
        point = layers[index]
        right = index > len(layers) / 2
        axes.annotate(
            f"{_short(point.node)} ({point.op})",
            (index, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if right else 4, 6 + 9 * (rank % _LABELLED)),
            textcoords="offset points",
            fontsize=7,
            ha="right" if right else "left",
            color=_FULL if point.kept_fp32 else "#333333",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": _LINE, "relpos": (1 if right else 0, 0)},
        )


def _badness(point: LayerPoint) -> tuple[float, float]:
    return tuple(-math.inf if math.isnan(v) else v for v in (point.drop, point.local_error))  # type: ignore[return-value]


def _cloud(axes: Axes, rows: Sequence[VariantRow], cost: Callable[[VariantRow], float | None], max_drop: float) -> None:
    targets = list(dict.fromkeys(r.target for r in rows))
    axes.axhline(max_drop, color="#55a868", linestyle="--", linewidth=0.8)
    shown = [(r, x, y) for r in rows if (x := cost(r)) is not None and (y := r.drop) is not None and math.isfinite(y)]
    for row, x, y in shown:
        colour = _FULL if row.within_budget is not True else _HALF
        filled = row.evidence == "engine"
        marker = _MARKERS[targets.index(row.target) % len(_MARKERS)]
        if row.drop_stderr is not None and math.isfinite(row.drop_stderr):
            axes.errorbar([x], [y], yerr=[row.drop_stderr], color=colour, linewidth=0.8, capsize=2, zorder=2)
        axes.plot([x], [y], marker, color=colour, markerfacecolor=colour if filled else "white", markersize=7, zorder=3)
        if row.champion:
            axes.plot([x], [y], "o", color="#222222", markerfacecolor="none", markersize=14, zorder=4)
        axes.annotate(row.variant, (x, y), xytext=(8, 4), textcoords="offset points", fontsize=8)
    axes.set_axisbelow(True)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    if shown:
        axes.margins(x=0.15, y=0.2)
    else:
        axes.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color=_LINE)


def _legend(figure: Figure, entries: Sequence[tuple[str, str]], markers: str = "s") -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", marker=markers[i % len(markers)], color=colour, label=label)
        for i, (colour, label) in enumerate(entries)
    ]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=8)


def _short(name: str, length: int = 44) -> str:
    """A node name cut in its middle: its beginning and its end say most."""
    return name if len(name) <= length else f"{name[: length // 2 - 1]}…{name[-length // 2 :]}"


@contextmanager
def _drawing(width: float, height: float, **grid: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure without pyplot: no global state, no window, no thread that owns it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = {"rows": "nrows", "columns": "ncols"}
    with mpl.rc_context(
        {
            "svg.hashsalt": "enginesmith",
            "svg.fonttype": "none",
            "text.parse_math": False,  # names may hold dollar signs
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(**{names.get(name, name): value for name, value in grid.items()})


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()
