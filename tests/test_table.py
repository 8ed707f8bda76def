"""Rows, champions and how they are shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from enginesmith.tasks.engines.spec import FileSpec, Manifest
from enginesmith.tasks.latency import Latency, LatencySession
from enginesmith.tasks.measure import Result
from enginesmith.tasks.settings import VARIANTS
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store
from enginesmith.tasks.table import (
    VariantRow,
    as_markdown,
    as_text,
    assemble_rows,
    choose_champions,
    json_rows,
    within_budget,
)

NAN, INF = math.nan, math.inf


def row(variant: str = "fp32", target: str = "cpu", **values: Any) -> VariantRow:
    """A row that qualifies as champion unless told otherwise."""
    given = {"metric": 0.9, "drop": 0.0, "size_bytes": 1_000_000, "latency_p50_ms": 5.0, "batch": 8,
             "evidence": "engine", "within_budget": True, **values}  # fmt: skip
    return VariantRow(target=target, backend="onnxruntime", variant=variant, **given)  # type: ignore[arg-type]


def champion(*rows: VariantRow) -> str | None:
    marked, (verdict,) = choose_champions(rows)
    assert [r.variant for r in marked if r.champion] == ([verdict.champion] if verdict.champion else [])
    return verdict.champion


def test_the_fastest_variant_within_budget_is_champion() -> None:
    assert champion(row("fp32"), row("int8", latency_p50_ms=2.0), row("mixed", latency_p50_ms=3.0)) == "int8"


@pytest.mark.parametrize(
    "values",
    [
        {"within_budget": False, "drop": 0.02},
        {"within_budget": None, "drop": None, "metric": None},
        {"evidence": "emulated"},
        {"evidence": "none"},
        {"latency_p50_ms": None},
        {"latency_p50_ms": NAN},
        {"latency_p50_ms": 0.0},
        {"drop": NAN},
        {"drop": INF},
    ],
    ids=str,
)
def test_a_faster_variant_that_does_not_qualify_is_no_champion(values: dict[str, Any]) -> None:
    assert champion(row("fp32"), row("int8", **{"latency_p50_ms": 2.0, **values})) == "fp32"


def test_a_variant_in_which_everything_stayed_fp32_is_no_champion() -> None:
    same = row("int8", latency_p50_ms=9.0, fp32_nodes=10, fp16_nodes=0, int8_nodes=0)
    assert champion(row("fp32", latency_p50_ms=10.0, fp32_nodes=10), same) == "fp32"


def test_equally_fast_variants_tie_and_the_smaller_file_wins() -> None:
    assert champion(row("fp32", latency_p50_ms=5.001), row("int8", latency_p50_ms=5.002, size_bytes=9)) == "int8"
    assert champion(row("int8", size_bytes=9), row("mixed", size_bytes=9)) == "mixed"


def test_speed_is_per_sample_where_batches_differ() -> None:
    assert champion(row("fp32", latency_p50_ms=4.0, batch=8), row("int8", latency_p50_ms=1.0, batch=1)) == "fp32"


def test_every_target_has_a_champion_of_its_own() -> None:
    marked, verdicts = choose_champions([row("fp32"), row("int8", "gpu"), row("fp16", "gpu", latency_p50_ms=1.0)])
    assert [(v.target, v.champion) for v in verdicts] == [("cpu", "fp32"), ("gpu", "fp16")]
    assert [r.champion for r in marked] == [True, False, True]


def test_a_target_that_ran_nothing_has_candidates_and_no_champion() -> None:
    rows = [row(v, evidence="emulated", latency_p50_ms=None, notes=("no GPU",)) for v in ("fp32", "fp16")]
    _, (verdict,) = choose_champions([*rows, row("int8", evidence="emulated", within_budget=False)])
    assert verdict.champion is None
    assert "no GPU" in verdict.reason
    assert "candidates by accuracy: fp32, fp16" in verdict.reason


def test_a_target_where_all_miss_the_budget_names_the_closest() -> None:
    over = {"within_budget": False}
    _, (verdict,) = choose_champions([row("fp16", drop=0.5, **over), row("int8", drop=0.03, **over)])
    assert verdict.champion is None
    assert "closest is int8" in verdict.reason


@pytest.mark.parametrize(
    ("drop", "expected"), [(0.01, True), (-0.2, True), (0.0101, False), (NAN, False), (INF, False), (None, None)]
)
def test_only_a_finite_drop_is_within_budget(drop: float | None, expected: bool | None) -> None:
    assert within_budget(drop, 0.01) is expected


@pytest.mark.parametrize(
    ("drop", "stderr", "expected"),
    [(0.004, 0.002, True), (-0.004, 0.002, True), (0.0041, 0.002, False), (0.1, None, None), (NAN, 0.1, None)],
)
def test_a_drop_within_two_standard_errors_is_noise(drop: float, stderr: float | None, expected: bool | None) -> None:
    assert row(drop=drop, drop_stderr=stderr).within_noise is expected


def test_shares_are_of_all_counted_nodes() -> None:
    counted = row(fp32_nodes=1, fp16_nodes=2, int8_nodes=5)
    assert (counted.fp32_share, counted.fp16_share, counted.int8_share) == (0.125, 0.25, 0.625)
    assert row().fp32_share is None


def test_json_rows_are_json_and_keep_what_cannot_be_a_number_apart() -> None:
    (data,) = json_rows([row(metric=NAN, drop=INF, within_budget=False, notes=("a", "b"))])
    json.dumps(data, allow_nan=False)
    assert (data["metric"], data["drop"], data["within_budget"], data["verdict"]) == (None, None, False, "failed")
    assert data["notes"] == ["a", "b"]


def full_table() -> list[VariantRow]:
    rows = []
    for target in ("jetson-orin-nx", "cpu"):
        for size, variant in enumerate(VARIANTS):
            rows.append(
                row(variant, target, metric=0.98765, drop=0.01234, drop_stderr=0.00567, size_bytes=123_456_789,
                    fp32_nodes=1, fp16_nodes=998, int8_nodes=1, latency_p50_ms=1234.5 / (size + 1),
                    latency_p99_ms=2345.6, throughput=12345.6, notes=("built, not run",))
            )  # fmt: skip
    return list(choose_champions(rows)[0])


@pytest.mark.parametrize("width", [100, 120])
def test_the_table_keeps_every_number_whole(width: int) -> None:
    text = as_text(full_table(), metric="a_very_long_metric_name", width=width)
    assert max(map(len, text.splitlines())) <= width
    for shown in ("123 ", "0.9877", "+0.0123 ±0.0057", "1/99/1", "1234", "2346", "12346", "champion"):
        assert text.count(shown) >= 1, shown
    assert text.count("built, not run") == 1


def test_missing_and_failed_figures_show_as_a_dash() -> None:
    text = as_text([row(metric=NAN, drop=INF, latency_p50_ms=None, size_bytes=None, within_budget=False)])
    (line,) = [line for line in text.splitlines() if "fp32" in line]
    assert line.split() == ["cpu", "fp32", "-", "-", "-", "-", "-", "-", "-", "engine", "failed"]
    assert "nan" not in text
    assert "inf" not in text


def test_markdown_escapes_what_would_end_a_cell() -> None:
    text = as_markdown([row(notes=("a|b <i>",), champion=True)], metric="top|1")
    heading, _, line, _, note = text.splitlines()
    assert "top\\|1" in heading
    assert "**champion [1]**" in line
    assert note == "1. a\\|b &lt;i>"


class Report(BaseModel):
    text: str = ""


def written(store: Store, stage: str, files: dict[str, str | bytes], **inputs: object) -> Artifact:
    def run(out: Path, **_: object) -> Report:
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return Report()

    return Stage(stage, version=1, run=run)(store=store, **inputs)


def engine(variant: str, nodes: dict[str, int], size: int) -> str:
    return Manifest(
        backend="onnxruntime", variant=variant, model_sha256="", fingerprint={}, options={}, profiles=(), inputs=(),
        outputs=(), requested=nodes, read_back=nodes, unseen=0, read_from="", lowered=(), warnings=(),
        files=(FileSpec("engine.onnx", size, ""),),
    ).to_json()  # fmt: skip


def verdict(evidence: str, **values: Any) -> str:
    given = {"value": 0.9, "reference": 0.91, "drop": 0.01, "stderr": 0.004, "within_noise": False, "failed": False,
             "samples": 100, **values}  # fmt: skip
    return Result(evidence=evidence, **given).model_dump_json()  # type: ignore[arg-type]


def half_model() -> bytes:
    import onnx
    from onnx import TensorProto, helper

    cast = helper.make_node("Cast", ["x"], ["h"], name="to_half", to=TensorProto.FLOAT16)
    add = helper.make_node("Add", ["h", "h"], ["s"], name="add")
    back = helper.make_node("Cast", ["s"], ["f"], name="to_float", to=TensorProto.FLOAT)
    relu = helper.make_node("Relu", ["f"], ["y"], name="relu")
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y")]
    graph = helper.make_graph([cast, add, back, relu], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, VariantRow]:
    store = Store(tmp_path)
    failed = {"value": None, "drop": None, "stderr": None, "within_noise": None, "failed": True}
    none = {**failed, "failed": False, "reason": "the graph cannot be emulated: no kernel"}
    made = {
        "fallback": written(store, "fallback", {"fp16/model.onnx": half_model(), "mixed/model.onnx": half_model()}),
        "build/cpu/int8": written(store, "build", {"engine.json": engine("int8", {"fp32": 3, "int8": 1}, 2_000_000)}),
        "measure/cpu/int8": written(store, "measure", {"result.json": verdict("engine")}, v="int8"),
        "measure/cpu/fp16": written(store, "measure", {"result.json": verdict("emulated", **failed)}, v="fp16"),
        "measure/cpu/mixed": written(store, "measure", {"result.json": verdict("none", **none)}, v="mixed"),
    }
    timed = {"backend": "onnxruntime", "runs": 20, "p90_ms": 1.0, "max_ms": 9.0}
    session = LatencySession(
        target="cpu", started="", host={}, load=(0, 0), notes=("noisy",),
        latencies=(
            Latency(variant="int8", batch=1, p50_ms=0.4, p99_ms=0.5, throughput=2500.0, jitter=False, **timed),
            Latency(variant="int8", batch=8, p50_ms=2.0, p99_ms=6.0, throughput=4000.0, jitter=True, **timed),
        ),
    )  # fmt: skip
    found = assemble_rows(
        made, targets={"cpu": "onnxruntime"}, variants=VARIANTS, max_drop=0.01, sessions={"cpu": session},
        notes={"cpu/int8": ["by hand"]},
    )  # fmt: skip
    return {r.variant: r for r in found}


def test_rows_exist_for_what_was_measured(rows: dict[str, VariantRow]) -> None:
    assert list(rows) == ["fp16", "mixed", "int8"]


def test_a_built_and_timed_variant_has_its_engines_figures(rows: dict[str, VariantRow]) -> None:
    int8 = rows["int8"]
    assert (int8.size_bytes, int8.fp32_nodes, int8.int8_nodes) == (2_000_000, 3, 1)
    assert (int8.metric, int8.drop, int8.drop_stderr) == (0.9, 0.01, 0.004)
    assert (int8.batch, int8.latency_p50_ms, int8.latency_p99_ms, int8.throughput) == (8, 2.0, 6.0, 4000.0)
    assert int8.champion
    assert int8.notes == ("noisy", "by hand")


def test_a_failed_metric_is_never_within_budget(rows: dict[str, VariantRow]) -> None:
    fp16 = rows["fp16"]
    assert math.isnan(fp16.metric or 0)
    assert (fp16.within_budget, fp16.verdict) == (False, "failed")
    assert any("NaN" in note for note in fp16.notes)


def test_a_variant_without_an_engine_has_its_graphs_size_and_nodes(rows: dict[str, VariantRow]) -> None:
    fp16 = rows["fp16"]
    assert (fp16.size_bytes, fp16.fp16_nodes, fp16.fp32_nodes) == (len(half_model()), 1, 1)
    assert "not built: onnxruntime keeps the precision of fp32, int8 only" in fp16.notes


def test_a_variant_that_nothing_can_run_is_unmeasured_and_says_why(rows: dict[str, VariantRow]) -> None:
    mixed = rows["mixed"]
    assert (mixed.evidence, mixed.metric, mixed.within_budget, mixed.verdict) == ("none", None, None, "unmeasured")
    assert "the graph cannot be emulated: no kernel" in mixed.notes
