"""Comparing outputs: what counts as agreement, and that NaN never does by accident."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.firewalls.experiment import Case, differences, output_range
from enginesmith.tasks.firewalls.findings import BlockedError, Finding, load_findings, readable_path, save_findings
from enginesmith.tasks.firewalls.samples import MAX_ELEMENTS, cases_of, feed_of, load_cases, save_cases
from enginesmith.tasks.firewalls.shape import name_output_dims
from enginesmith.tasks.settings import DimSettings, InputSettings

NAN, INF = math.nan, math.inf


def found(want, have, *, real=True, tolerance=1e-4):
    want, have = (np.asarray(v, dtype=getattr(v, "dtype", np.float32)) for v in (want, have))
    case = Case("opt", {}, {}, real=real)
    wrong, _ = differences({"y": want}, {"y": have}, case=case, tolerance=tolerance, ranges={"y": output_range([want])})
    return wrong[0].found if wrong else ""


@pytest.mark.parametrize(
    ("want", "have", "said"),
    [
        ([0, 10], [0, 10], ""),
        ([0, 10], [0.0009, 10], ""),
        ([0, 10], [0.0011, 10], "differs by 0.0011 where 0.001 is allowed"),
        ([0, 10], [NAN, 10], "has NaN or infinity"),
        ([0, 10], [0, INF], "has NaN or infinity"),
        ([0, INF], [0, -INF], "has NaN or infinity"),
        ([0, INF], [0, INF], ""),
        ([NAN, 10], [NAN, 10], "is NaN in 1 of 2 values"),
        ([[0, 10]], [0, 10], "has shape [2] where [1, 2] is right"),
        (np.int64([1, 2]), np.int64([1, 3]), "differs in 1 of 2 values"),
        (np.int64([1, 2]), np.int32([1, 2]), "is int32 where int64 is right"),
        ([1000.0, 1000.0], [1000.05, 1000.0], ""),
        ([1000.0, 1000.0], [1000.2, 1000.0], "differs by 0.2 where 0.1 is allowed"),
    ],
)
def test_difference_is_measured_against_the_range(want, have, said):
    assert found(want, have).startswith(said) if said else found(want, have) == ""


def test_nan_at_the_same_place_agrees_where_the_values_are_no_samples():
    assert found([NAN, 10], [NAN, 10], real=False) == ""
    assert found([NAN, 10], [0, 10], real=False) != ""


def test_narrow_range_on_a_large_offset_allows_float32_rounding():
    """16 units in the last place of 1e6: 16 * 2**-23 * 1e6 = 1.9."""
    assert found([1e6, 1e6 + 1], [1e6 + 1, 1e6 + 2]) == ""
    assert found([1e6, 1e6 + 1], [1e6 + 3, 1e6 + 4]) != ""


def test_missing_output_differs():
    wrong, _ = differences({"y": np.zeros(1)}, {}, case=Case("opt", {}, {}), tolerance=1, ranges={})
    assert wrong[0].found == "is missing"


def test_range_ignores_what_is_not_finite_and_is_the_magnitude_of_a_constant():
    assert output_range([np.float32([1, NAN]), np.float32([INF, 5])]) == 4
    assert output_range([np.float32([-3, -3])]) == 3
    assert output_range([np.float32([NAN])]) == 0


SQUARE = {
    "x": InputSettings(
        shape=("batch", 3, "side"),
        dims={"batch": DimSettings(min=1, opt=2, max=4), "side": DimSettings(min=2, opt=4, max=1 << 22)},
    )
}


def samples():
    return Dataset({"x": np.arange(36, dtype=np.float32).reshape(3, 3, 4)}, None, True, 1, 2, 4)


def test_cases_are_corners_middle_and_between_and_bounded():
    cases = {case.word: case for case in cases_of(samples(), SQUARE)}
    assert cases["opt"].feed["x"].shape == (2, 3, 4)
    assert cases["min"].feed["x"].shape == (1, 3, 2)
    assert cases["between"].feed["x"].shape == (3, 3, 5)
    assert not cases["between"].declared
    assert np.array_equal(cases["opt negated"].feed["x"], -cases["opt"].feed["x"])
    assert not cases["opt zero"].feed["x"].any()
    assert max(case.feed["x"].size for case in cases.values()) <= MAX_ELEMENTS
    assert {"max", "max but batch", "max but side"} <= set(cases)


def test_feed_repeats_real_values_where_a_larger_size_is_asked():
    feed = feed_of(samples(), SQUARE, {"batch": 4, "side": 6})["x"]
    assert feed[0, 0].tolist() == [0, 1, 2, 3, 0, 1]
    assert np.array_equal(feed[3], feed[0])


def test_cases_travel_through_files(tmp_path):
    cases = [case for case in cases_of(samples(), SQUARE) if case.word != "max" and "but" not in case.word]
    save_cases(cases, tmp_path)
    for before, after in zip(cases, load_cases(tmp_path), strict=True):
        assert (before.word, before.sizes, before.real, before.declared) == (
            after.word,
            after.sizes,
            after.real,
            after.declared,
        )
        assert np.array_equal(before.feed["x"], after.feed["x"])


def test_output_shapes_are_corrected_by_what_was_seen():
    value = ir.Value(name="y", shape=ir.Shape([1, "old", None, 7]))
    model = ir.Model(ir.Graph([], [value], nodes=[]), ir_version=10)
    seen = [({"n": 2, "t": 3}, {"y": (2, 3, 5, 7)}), ({"n": 4, "t": 6}, {"y": (4, 6, 5, 7)})]
    name_output_dims(model, seen)
    assert [d if isinstance(d, int) else d.value for d in value.shape] == ["n", "t", 5, 7]


def test_findings_are_written_worst_first_and_once(tmp_path):
    advice = Finding(rule="operators/not-judged", severity="advice", message="m", backend="tensorrt")
    block = Finding(rule="shape/value", severity="error", message="m", file="net.py", line=3, hint="h")
    save_findings([advice, block, advice], tmp_path)
    assert load_findings(tmp_path) == (block, advice)
    error = BlockedError.of([advice, block], what="the export")
    assert (error.where, error.hint, error.findings) == ("net.py:3", "h", (block, advice))


def test_path_is_shown_relative_to_the_pipeline_or_to_the_packages(tmp_path):
    assert readable_path(str(tmp_path / "models" / "net.py"), [tmp_path]) == "models/net.py"
    assert readable_path(np.__file__) == "numpy/__init__.py"
    assert readable_path("/nowhere/at/all/net.py") == "net.py"
