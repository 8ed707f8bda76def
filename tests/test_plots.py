"""Plots: deterministic SVG that shows what it should, also at its edges."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from enginesmith.tasks.graph.layers import Error, LayerRow, LayerTable
from enginesmith.tasks.plots import LayerPoint, layer_plot, layer_points, pareto_plot
from enginesmith.tasks.table import VariantRow

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314 - our own


def layers(count: int) -> list[LayerPoint]:
    return [LayerPoint(f"/layer.{i}/Conv", "Conv", 1e-4 * (1 + i % 7), 1e-3 * (i % 5), False) for i in range(count)]


def rows() -> list[VariantRow]:
    return [
        VariantRow(target="cpu", backend="onnxruntime", variant="fp32", drop=0.0, size_bytes=9_000_000,
                   latency_p50_ms=5.0, evidence="engine", within_budget=True),
        VariantRow(target="cpu", backend="onnxruntime", variant="int8", drop=0.004, drop_stderr=0.001, champion=True,
                   size_bytes=3_000_000, latency_p50_ms=2.0, evidence="engine", within_budget=True),
        VariantRow(target="rtx", backend="tensorrt_rtx", variant="fp16", drop=math.inf, size_bytes=5_000_000),
        VariantRow(target="rtx", backend="tensorrt_rtx", variant="mixed", drop=0.03, size_bytes=6_000_000),
    ]  # fmt: skip


def test_the_same_numbers_give_the_same_bytes() -> None:
    assert layer_plot(layers(120), title="m") == layer_plot(layers(120), title="m")
    assert pareto_plot(rows(), max_drop=0.01, title="m") == pareto_plot(rows(), max_drop=0.01, title="m")


def test_a_plot_holds_no_date_and_asks_for_nothing_elsewhere() -> None:
    svg = layer_plot(layers(3), title="m")
    assert "dc:date" not in svg
    root = ET.fromstring(svg)  # noqa: S314
    links = [v for node in root.iter() for name, v in node.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)


def test_three_hundred_layers_are_three_hundred_bars_and_a_small_file() -> None:
    svg = layer_plot(layers(300), title="m", layer_drop=0.02)
    assert len(svg) < 300_000
    assert "300" in " ".join(texts(svg)) or "250" in texts(svg)


def test_nodes_kept_in_fp32_and_the_worst_ones_are_named() -> None:
    points = layers(100)
    points[40] = LayerPoint("/norm/ReduceSum", "ReduceSum", math.inf, 0.8, True)
    points[41] = LayerPoint("/norm/$Sqrt_1$", "Sqrt", 0.3, math.inf, True)
    said = texts(layer_plot(points, title="m", layer_drop=0.02))
    assert "/norm/ReduceSum (ReduceSum)" in said
    assert "/norm/$Sqrt_1$ (Sqrt)" in said
    assert "kept in FP32 (2)" in said
    assert "0.001" in said  # a tick of the logarithmic scale, as text and not as a formula
    assert not [text for text in said if "mathdefault" in text]


@pytest.mark.parametrize(
    "points",
    [[], layers(1), [LayerPoint("a", "Add", math.nan, math.nan, False)], [LayerPoint("a", "Add", 0.0, 0.0, False)]],
    ids=["none", "one", "unknown", "exact"],
)
def test_a_table_with_little_in_it_can_be_drawn(points: list[LayerPoint]) -> None:
    ET.fromstring(layer_plot(points, title="m", layer_drop=0.0))  # noqa: S314


def test_layer_points_are_the_candidates_of_the_table() -> None:
    error = Error(sqnr_db=40.0, rel_l2=0.01, nonfinite=0.0)
    table = LayerTable(
        samples=1,
        end=error,
        rows=(
            LayerRow(index=0, name="a", op="Conv", candidate=True, local=error, drop=0.5),
            LayerRow(index=1, name="b", op="Shape", candidate=False),
            LayerRow(index=2, name="c", op="Conv", candidate=True),
        ),
    )
    first, second = layer_points(table, {"c"})
    assert first == LayerPoint("a", "Conv", 0.01, 0.5, False)
    assert (second.node, second.kept_fp32) == ("c", True)
    assert math.isnan(second.local_error)
    assert math.isnan(second.drop)


def test_the_pareto_plot_names_variants_and_targets() -> None:
    said = texts(pareto_plot(rows(), max_drop=0.01, title="digits"))
    assert said.count("int8") == 2
    assert said.count("mixed") == 1  # it has a size and no latency
    assert "fp16" not in said  # its drop is infinite
    assert {"digits", "cpu", "rtx"} <= set(said)


def test_a_compile_without_latencies_says_so() -> None:
    said = texts(pareto_plot(rows()[2:3], max_drop=0.01, title="m"))
    assert said.count("not measured") == 2
