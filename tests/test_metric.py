"""Claims about metrics: what scores mean, when they fail, and the standard error of a drop."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.metric import Drop, Metric, MetricRef, Outputs, Score, fit_state, load_metric, metric_ref
from enginesmith.tasks.settings import MetricSettings
from enginesmith.tasks.stage import digest_of
from enginesmith.tasks.usercode import UserCode, importable

RNG = np.random.default_rng(0)


def dataset(count: int, targets: Any = None) -> Dataset:
    return Dataset({"x": np.zeros((count, 1), np.float32)}, targets, True, 1, 1, 1)


def score(call: str, outputs: Mapping[str, Any], targets: Any = None, reference: Any = None) -> Score:
    arrays = {name: np.asarray(array) for name, array in outputs.items()}
    count = len(next(iter(arrays.values())))
    return Metric(MetricRef(call))(arrays, dataset(count, targets), reference)


class TestAgreement:
    def test_classes_agree_where_the_largest_logit_is_the_same(self) -> None:
        reference = {"y": np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6], [1.0, 0.0]])}
        found = score("agreement", {"y": [[0.4, 0.6], [0.1, 0.9], [0.0, 9.0], [5.0, 4.9]]}, reference=reference)
        assert found.samples is not None
        assert found.samples.tolist() == [1, 0, 1, 1]
        assert found.value == 0.75

    def test_other_floats_agree_by_relative_distance(self) -> None:
        reference = {"y": np.array([[[3.0, 4.0]], [[3.0, 4.0]], [[3.0, 4.0]]])}
        found = score("agreement", {"y": [[[3.0, 4.0]], [[3.0, 3.0]], [[30.0, 40.0]]]}, reference=reference)
        assert found.samples is not None
        np.testing.assert_allclose(found.samples, [1.0, 0.8, 0.0])

    def test_one_column_is_a_regression(self) -> None:
        found = score("agreement", {"y": [[2.0], [3.0]]}, reference={"y": np.array([[2.0], [4.0]])})
        assert found.samples is not None
        np.testing.assert_allclose(found.samples, [1.0, 0.75])

    def test_integers_agree_element_by_element(self) -> None:
        found = score("agreement", {"y": [[1, 2, 3, 4]]}, reference={"y": np.array([[1, 2, 0, 0]])})
        assert found.value == 0.5

    def test_outputs_are_averaged(self) -> None:
        reference = {"a": np.array([[1.0], [1.0]]), "b": np.array([1, 2])}
        assert score("agreement", {"a": [[1.0], [1.0]], "b": [1, 3]}, reference=reference).value == 0.75

    def test_all_zero_outputs_agree_only_with_zeros(self) -> None:
        reference = {"y": np.zeros((2, 1))}
        found = score("agreement", {"y": [[0.0], [1e-9]]}, reference=reference)
        assert found.samples is not None
        assert found.samples.tolist() == [1, 0]

    def test_equal_infinities_agree_and_new_ones_do_not(self) -> None:
        reference = {"y": np.array([[[np.inf, 1.0]], [[2.0, 1.0]]])}
        found = score("agreement", {"y": [[[np.inf, 1.0]], [[np.inf, 1.0]]]}, reference=reference)
        assert found.samples is not None
        assert found.samples.tolist() == [1, 0]

    def test_a_model_agrees_with_itself(self) -> None:
        outputs = {"a": RNG.standard_normal((4, 3)), "b": RNG.standard_normal((4, 2, 2)), "c": np.arange(4)}
        assert score("agreement", outputs, reference=outputs).value == 1.0

    def test_outputs_of_different_shapes_are_an_error(self) -> None:
        with pytest.raises(EnginesmithError, match=r"'y' has shape \[2, 3\], FP32 \[2, 4\]"):
            score("agreement", {"y": np.zeros((2, 3))}, reference={"y": np.zeros((2, 4))})


class TestTop1:
    def test_share_of_hits(self) -> None:
        found = score("top1", {"y": [[0, 1], [1, 0], [0, 1]]}, np.array([1, 1, 1]))
        assert found.value == pytest.approx(2 / 3)
        assert found.samples is not None
        assert found.samples.tolist() == [1, 0, 1]

    @pytest.mark.parametrize(
        ("outputs", "targets", "found"),
        [
            ({"y": [[0, 1]]}, None, "top1 needs targets"),
            ({"y": [[0, 1]]}, np.array([0.5]), r"integer targets \[1\], they are float64 \[1\]"),
            ({"y": [[0, 1]]}, {"a": np.array([1])}, "they are dict"),
            ({"y": [[0, 1]]}, np.array([2]), r"target 2 of sample 0 is outside 0\.\.1"),
            ({"y": [[0, 1]]}, np.array([-1]), "target -1 of sample 0"),
            ({"y": [[[0, 1]]]}, np.array([1]), r"the model has y \[1, 1, 2\]"),
            ({"y": [[0, 1]], "z": [[0, 1]]}, np.array([1]), r"the model has y \[1, 2\], z \[1, 2\]"),
        ],
    )
    def test_what_it_cannot_score(self, outputs: dict[str, Any], targets: Any, found: str) -> None:
        with pytest.raises(EnginesmithError, match=found) as caught:
            score("top1", outputs, targets)
        assert caught.value.key == "data.metric.call"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path):
        yield tmp_path


def user(folder: Path, code: str, *, fit: bool = False) -> MetricRef:
    (folder / "mymetric.py").write_text("import numpy as np\n" + textwrap.dedent(code))
    return metric_ref(MetricSettings(call="mymetric:m", fit="mymetric:fit" if fit else None), folder)


class TestUserMetric:
    @pytest.mark.parametrize(
        ("returned", "samples"),
        [("0.5", None), ("(0.5, None)", None), ("np.float32(0.5)", None), ("(np.array([0.5]), [0, 1])", [0, 1])],
    )
    def test_what_it_may_return(self, folder: Path, returned: str, samples: list[int] | None) -> None:
        found = load_metric(user(folder, f"def m(outputs, targets): return {returned}"), None)(
            {"y": np.zeros((2, 1))}, dataset(2)
        )
        assert found.value == 0.5
        assert (None if found.samples is None else found.samples.tolist()) == samples

    @pytest.mark.parametrize(
        ("returned", "found"),
        [
            ("None", "returned NoneType 'None' as its value"),
            ("'good'", "returned str 'good'"),
            ("{}", "returned dict"),
            ("np.zeros(2)", "returned ndarray"),
            ("(1.0, 2.0, 3.0)", "returned tuple"),
            ("(1.0, [1, 2, 3])", "per-sample scores of shape [3] for 2 samples"),
            ("(1.0, 'ab')", "per-sample scores that are no numbers"),
        ],
    )
    def test_what_it_may_not_return(self, folder: Path, returned: str, found: str) -> None:
        ref = user(folder, f"\n\ndef m(outputs, targets): return {returned}")
        with pytest.raises(EnginesmithError) as caught:
            Metric(ref)({"y": np.zeros((2, 1))}, dataset(2))
        assert found in caught.value.found
        assert caught.value.where == f"{folder / 'mymetric.py'}:4"
        assert caught.value.key == "data.metric.call"

    def test_an_exception_names_its_line(self, folder: Path) -> None:
        ref = user(folder, "def m(outputs, targets):\n    y = np.asarray(outputs)\n    return targets[0] + y")
        with pytest.raises(EnginesmithError, match="mymetric:m failed: TypeError") as caught:
            Metric(ref)({"y": np.zeros((2, 1))}, dataset(2))
        assert caught.value.where == f"{folder / 'mymetric.py'}:4"
        assert "no targets" in caught.value.hint

    def test_nan_in_an_output_fails_before_the_metric_sees_it(self, folder: Path) -> None:
        ref = user(folder, "def m(outputs, targets): raise AssertionError")
        found = Metric(ref)({"a": np.zeros(2), "b": np.array([[1.0], [np.nan]], np.float16)}, dataset(2))
        assert math.isnan(found.value)

    @pytest.mark.parametrize("value", ["np.nan", "np.inf", "-np.inf"])
    def test_a_value_that_is_not_finite_is_a_failed_score(self, folder: Path, value: str) -> None:
        metric = Metric(user(folder, f"def m(outputs, targets): return {value}"))
        failed = metric({"y": np.zeros((2, 1))}, dataset(2))
        assert metric.drop(Score(0.5), failed) == Drop(math.inf, None)

    def test_raising_on_infinite_outputs_is_a_failed_score(self, folder: Path) -> None:
        metric = Metric(user(folder, "def m(outputs, targets): raise ValueError('Input contains infinity')"))
        assert math.isnan(metric({"y": np.array([[np.inf], [0.0]])}, dataset(2)).value)

    def test_outputs_behave_as_the_only_array(self) -> None:
        y = RNG.standard_normal((3, 4))
        outputs = Outputs({"y": y})
        np.testing.assert_array_equal(np.asarray(outputs), y)
        np.testing.assert_array_equal(np.asarray(outputs, dtype=np.float32), y.astype(np.float32))
        np.testing.assert_array_equal(outputs["y"], y)
        np.testing.assert_array_equal(outputs[:, 1], y[:, 1])
        np.testing.assert_array_equal(outputs.argmax(axis=1), y.argmax(axis=1))
        np.testing.assert_array_equal(outputs @ np.ones(4), y @ np.ones(4))
        np.testing.assert_array_equal(np.abs(outputs), np.abs(y))
        np.testing.assert_array_equal(y - outputs, np.zeros_like(y))
        assert outputs.shape == (3, 4)
        assert list(outputs) == ["y"]

    def test_two_outputs_have_to_be_named(self) -> None:
        with pytest.raises(TypeError, match="the model has 2 outputs, name one: a, b"):
            np.asarray(Outputs({"a": np.zeros(1), "b": np.zeros(1)}))

    def test_the_key_follows_code_name_and_direction(self, folder: Path) -> None:
        def key(code: str, better: Any = "higher") -> str:
            (folder / "mymetric.py").write_text(code)
            return digest_of(metric_ref(MetricSettings(call="mymetric:m", better=better), folder).key_part())

        first = key("def m(o, t): return 1")
        assert first == key("def m(o, t): return 1")
        assert first != key("def m(o, t): return 2")
        assert first != key("def m(o, t): return 1", "lower")
        assert digest_of(MetricRef("top1").key_part()) != digest_of(MetricRef("agreement").key_part())


class TestFit:
    def test_state_is_the_third_argument(self, folder: Path) -> None:
        ref = user(folder, "def m(outputs, targets, state): return state['a'].sum()", fit=True)
        assert Metric(ref, {"a": np.array([1.0, 2.0])})({"y": np.zeros((2, 1))}, dataset(2)).value == 3.0

    @pytest.mark.parametrize(
        ("returned", "found"),
        [
            ("None", "returned NoneType"),
            ("{}", "returned an empty dict"),
            ("{'a': object()}", "returned object for 'a'"),
            ("np.array([np.nan])", "returned NaN or infinity"),
        ],
    )
    def test_what_fit_may_not_return(self, folder: Path, returned: str, found: str) -> None:
        user(folder, f"def fit(outputs, targets): return {returned}")
        code = UserCode(folder, "mymetric:fit", "data.metric.fit")
        with pytest.raises(EnginesmithError, match=found) as caught:
            fit_state(code, {"y": np.zeros((2, 1))}, None)
        assert caught.value.where == f"{folder / 'mymetric.py'}:2"
        assert caught.value.key == "data.metric.fit"


class TestDrop:
    def test_positive_is_worse_whatever_is_better(self) -> None:
        assert Metric(MetricRef("top1")).drop(Score(0.9), Score(0.7)).value == pytest.approx(0.2)
        assert Metric(MetricRef("top1", better="lower")).drop(Score(0.9), Score(0.7)).value == pytest.approx(-0.2)

    def test_standard_error_of_paired_differences(self) -> None:
        # d = 1, 0, 0, 0: mean 1/4, variance ((3/4)^2 + 3 (1/4)^2) / 3 = 1/4, standard error sqrt(1/4) / sqrt(4) = 1/4.
        before, after = np.array([1.0, 1.0, 0.0, 1.0]), np.array([0.0, 1.0, 0.0, 1.0])
        drop = Metric(MetricRef("top1")).drop(Score(0.75, before), Score(0.5, after))
        assert drop.value == 0.25
        assert drop.stderr == pytest.approx(0.25)

    def test_the_error_is_that_of_the_paired_t_test(self) -> None:
        from scipy.stats import ttest_rel

        before, after = RNG.standard_normal(50), RNG.standard_normal(50)
        drop = Metric(MetricRef("top1")).drop(Score(before.mean(), before), Score(after.mean(), after))
        assert drop.stderr is not None
        assert drop.value / drop.stderr == pytest.approx(ttest_rel(before, after).statistic)

    def test_equal_samples_have_no_error(self) -> None:
        scores = Score(0.5, np.array([0.0, 1.0]))
        assert Metric(MetricRef("top1")).drop(scores, scores) == Drop(0.0, 0.0)

    @pytest.mark.parametrize(
        ("reference", "candidate"),
        [
            (Score(0.5), Score(0.5)),
            (Score(1.0, np.ones(1)), Score(1.0, np.ones(1))),
            (Score(1.0, np.ones(3)), Score(1.0, np.ones(2))),
            # F1, say: not the mean of what it gives per sample.
            (Score(0.7, np.ones(4)), Score(0.6, np.ones(4))),
            (Score(1.0, np.array([1.0, np.nan])), Score(1.0, np.ones(2))),
        ],
    )
    def test_no_error_where_the_formula_does_not_hold(self, reference: Score, candidate: Score) -> None:
        assert Metric(MetricRef("top1")).drop(reference, candidate).stderr is None


def test_infinity_where_fp32_is_finite_counts_though_the_argmax_agrees() -> None:
    reference = {"y": np.array([[1.0, 2.0], [1.0, 2.0]])}
    outputs = {"y": np.array([[1.0, np.inf], [1.0, 2.0]])}
    assert score("agreement", outputs, None, reference).value == 0.5
    assert score("top1", outputs, np.array([1, 1]), reference).value == 0.5


def test_infinity_that_fp32_has_too_is_no_failure() -> None:
    masked = np.array([[-np.inf, 2.0], [-np.inf, 3.0]])
    assert score("agreement", {"y": masked}, None, {"y": masked.copy()}).value == 1.0


def test_a_metric_that_writes_into_the_outputs_changes_nothing_of_ours(folder: Path) -> None:
    ref = user(folder, "def m(outputs, targets):\n    outputs['y'][:] = 0\n    return 0.5")
    outputs = {"y": np.ones((2, 1))}
    assert Metric(ref)(outputs, dataset(2)).value == 0.5
    np.testing.assert_array_equal(outputs["y"], np.ones((2, 1)))
