"""Claims about the FP32 reference: what it stores, with which metric state, and when it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pydantic import BaseModel

from enginesmith.tasks.data import DATA, data_source, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.metric import MetricRef, load_metric, load_outputs, load_score, metric_ref
from enginesmith.tasks.reference import REFERENCE, run_reference
from enginesmith.tasks.settings import DimSettings, InputSettings, MetricSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store
from enginesmith.tasks.usercode import importable

WEIGHT = np.array([[1.0, -1.0, 0.5], [2.0, 0.0, -1.0]], np.float32)
INPUTS = {"x": InputSettings(shape=("n", 2), dims={"n": DimSettings(min=1, opt=4, max=8)})}


class _Report(BaseModel):
    pass


def _matmul(out: Path, *, operator: str) -> _Report:
    """y = x @ WEIGHT, then an operator."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], name="matmul"),
        helper.make_node(operator, ["product"], ["/head/y:0"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("/head/y:0", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), out / "model.onnx")
    return _Report()


MODEL = Stage("model", version=1, run=_matmul)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mydata.py").write_text(
        "import numpy as np\n"
        "def calibration():\n"
        "    return np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6) % 3\n"
        "def evaluation():\n"
        "    x = np.random.default_rng(0).standard_normal((21, 2)).astype(np.float32)\n"
        "    return x, np.arange(21) % 3\n"
    )
    with importable(tmp_path):
        yield tmp_path


@pytest.fixture
def data(folder: Path, store: Store) -> Artifact:
    return DATA(
        store=store,
        calibration=data_source("mydata:calibration", folder, "data.calibration"),
        evaluation=data_source("mydata:evaluation", folder, "data.evaluation"),
        search=None,
        files=(),
        inputs=INPUTS,
        seed=0,
        samples=1,
    )


Refer = Callable[..., Artifact]


@pytest.fixture
def refer(store: Store, data: Artifact) -> Refer:
    def run(metric: MetricRef, operator: str = "Identity") -> Artifact:
        model = MODEL(store=store, operator=operator)
        return REFERENCE(store=store, model=model, data=data, metric=metric)

    return run


def user(folder: Path, code: str) -> MetricRef:
    (folder / "mymetric.py").write_text("import numpy as np\n" + code)
    settings = MetricSettings(call="mymetric:m", fit="mymetric:fit" if "def fit" in code else None)
    return metric_ref(settings, folder)


def test_outputs_are_those_of_the_model_and_mapped(refer: Refer, data: Artifact) -> None:
    reference = refer(MetricRef("top1"))
    for which in ("search", "verdict"):
        outputs = load_outputs(reference, which)
        assert list(outputs) == ["/head/y:0"]
        assert isinstance(outputs["/head/y:0"], np.memmap)
        np.testing.assert_allclose(
            outputs["/head/y:0"], load_dataset(data, which).inputs["x"] @ WEIGHT, rtol=1e-6, atol=1e-6
        )


def test_the_score_is_the_share_of_right_answers(refer: Refer, data: Artifact) -> None:
    reference = refer(MetricRef("top1"))
    verdict = load_dataset(data, "verdict")
    right = (verdict.inputs["x"] @ WEIGHT).argmax(axis=1) == verdict.targets
    score = load_score(reference, "verdict")
    assert score.value == pytest.approx(right.mean())
    assert score.samples is not None
    assert score.samples.tolist() == right.astype(float).tolist()


def test_the_reference_agrees_with_itself(refer: Refer) -> None:
    reference = refer(MetricRef("agreement"))
    assert load_score(reference, "search").value == 1.0
    assert "argmax" in reference.report["metric"]


@pytest.mark.parametrize("returned", ["np.asarray(outputs).sum(0)", "{'sum': np.asarray(outputs).sum(0)}"])
def test_the_state_is_fitted_on_calibration_outputs(refer: Refer, folder: Path, data: Artifact, returned: str) -> None:
    code = (
        f"def fit(outputs, targets): return {returned}\n"
        "def m(outputs, targets, state): return (state['sum'] if isinstance(state, dict) else state)[0]\n"
    )
    ref = user(folder, code)
    reference = refer(ref)
    # Inputs are 0..11: columns sum to 0+2+..+10 = 30 and 36; times the weight's first column (1, 2): 102.
    assert load_score(reference, "verdict").value == pytest.approx(102)
    metric = load_metric(ref, reference)
    verdict = load_dataset(data, "verdict")
    assert metric(load_outputs(reference, "verdict"), verdict).value == pytest.approx(102)


def test_without_per_sample_scores_there_are_none(refer: Refer, folder: Path) -> None:
    assert load_score(refer(user(folder, "def m(outputs, targets): return 0.5")), "verdict").samples is None


def test_the_same_inputs_give_the_same_bytes(refer: Refer, folder: Path, data: Artifact, tmp_path: Path) -> None:
    fit = "def fit(o, t): return {'b': np.asarray(o)[0], 'a': np.zeros(2)}\n"
    ref = user(folder, fit + "def m(o, t, s): return 0.5, np.full(len(t), 0.5)")
    first = refer(ref)
    out = tmp_path / "again"
    out.mkdir()
    model = MODEL(store=Store(tmp_path / "store"), operator="Identity")
    run_reference(out, model=model, data=data, metric=ref)
    written = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert written == {f.path for f in first.files} - {"report.json"}
    for name in written:
        assert (out / name).read_bytes() == (first.path / name).read_bytes(), name


def test_a_model_that_puts_out_nan_is_refused(refer: Refer) -> None:
    with pytest.raises(EnginesmithError, match="the FP32 model puts out NaN: output '/head/y:0', search sample"):
        refer(MetricRef("agreement"), operator="Log")


@pytest.mark.parametrize("value", ["np.nan", "np.inf"])
def test_a_metric_without_a_value_for_fp32_is_refused(refer: Refer, folder: Path, value: str) -> None:
    with pytest.raises(EnginesmithError, match="is not a finite number for the FP32 model") as caught:
        refer(user(folder, f"\ndef m(outputs, targets): return {value}"))
    assert caught.value.where == f"{folder / 'mymetric.py'}:3"
    assert caught.value.key == "data.metric.call"


def test_one_line_of_the_metric_runs_it_again(refer: Refer, folder: Path) -> None:
    first = refer(user(folder, "def m(outputs, targets): return 1.0"))
    assert refer(user(folder, "def m(outputs, targets): return 1.0")).cached
    assert refer(user(folder, "def m(outputs, targets): return 2.0")).key != first.key
