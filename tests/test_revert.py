from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks import progress
from enginesmith.tasks.calibrate import CALIBRATE
from enginesmith.tasks.data import DATA, Dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io, qdq
from enginesmith.tasks.graph.half import candidates, emulate
from enginesmith.tasks.graph.plan import NodeRow, Plan
from enginesmith.tasks.graph.trial import QdqRunner, SwitchedQuantization, noise
from enginesmith.tasks.metric import MetricRef
from enginesmith.tasks.reference import REFERENCE
from enginesmith.tasks.revert import REVERT, REVERTED_FILE, RevertTable
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import BudgetSettings, DimSettings, InputSettings, Int8Settings
from enginesmith.tasks.stage import SourceFile
from enginesmith.tasks.store import Artifact, FileEntry, Store, sha256_file

Compiled = tuple[Artifact, RevertTable]
Revert = Callable[..., Compiled]


def sensitive_model(*, opset: int = 18, factor: float = 1.0) -> bytes:
    """Channel 0 of x is 1000 times channel 1, and only channel 1 matters: INT8 on `picky` loses it, on `plain` not.

    `factor` is multiplied and divided out again at the end: beyond 65504 it does not survive FP16.
    """
    rng = np.random.default_rng(0)
    pick = np.zeros((8, 2, 1, 1), np.float32)
    pick[:, 1, 0, 0] = np.linspace(-1, 1, 8) * 10
    weights = {
        "pick": pick,
        "pick_bias": np.full(8, 0.1, np.float32),
        "plain_weight": rng.standard_normal((8, 8, 3, 3)).astype(np.float32) * 0.3,
        "plain_bias": rng.standard_normal(8).astype(np.float32) * 0.1,
        "head": rng.standard_normal((8, 4)).astype(np.float32),
        "factor": np.asarray(factor, np.float32),
        "inverse": np.asarray(1 / factor, np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "pick", "pick_bias"], ["c1"], name="picky"),
        helper.make_node("Relu", ["c1"], ["r1"], name="picky_relu"),
        helper.make_node("Conv", ["r1", "plain_weight", "plain_bias"], ["c2"], name="plain"),
        helper.make_node("Relu", ["c2"], ["r2"], name="plain_relu"),
        helper.make_node("GlobalAveragePool", ["r2"], ["g"], name="pool"),
        helper.make_node("Flatten", ["g"], ["f"], name="flatten"),
        helper.make_node("MatMul", ["f", "head"], ["m"], name="head_matmul"),
        helper.make_node("Mul", ["m", "factor"], ["big"], name="up"),
        helper.make_node("Mul", ["big", "inverse"], ["y"], name="down"),
    ]
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9).SerializeToString()


def samples(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 2, 6, 6)).astype(np.float32) + 2 * rng.standard_normal((count, 2, 1, 1))
    x[:, 0] *= 1000
    return x.astype(np.float32)


def folder_artifact(stage: str, folder: Path) -> Artifact:
    files = tuple(
        FileEntry(path=p.relative_to(folder).as_posix(), size=p.stat().st_size, sha256=sha256_file(p))
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    )
    return Artifact(stage, "0" * 64, folder, files)


def plan(folder: Path, model: bytes, fp32: tuple[str, ...]) -> Artifact:
    graph = ir.from_proto(onnx.load_from_string(model))
    half = set(candidates(graph)) - set(fp32)
    nodes = tuple(
        NodeRow(
            name=str(n.name),
            op=n.op_type,
            precision="fp16" if n.name in half else "fp32",
            half=n.name in half,
            reason="",
        )
        for n in graph.graph.all_nodes()
    )
    zeros = dict.fromkeys(
        ("evaluations", "limit", "reranked", "fp16_casts", "mixed_casts", "unmoved_casts", "drop", "start_drop"), 0
    )
    empty = dict.fromkeys(("obstacles", "regions", "untested", "pins", "trials"), ())
    folder.mkdir(exist_ok=True)
    Plan(
        metric="agreement",
        better="higher",
        samples=1,
        reference=1.0,
        max_drop=0.01,
        layer_drop=0.02,
        within_budget=True,
        stderr=None,
        nodes=nodes,
        **zeros,
        **empty,
    ).save(folder)
    return folder_artifact("fallback", folder)


@pytest.fixture
def revert(tmp_path: Path) -> Revert:
    progress.quiet()
    store = Store(tmp_path / "store")

    def run(
        model: bytes, *, max_drop: float = 0.01, fp32: tuple[str, ...] = (), into: Store = store, **options: object
    ) -> Compiled:
        np.savez(tmp_path / "calibration.npz", x=samples(64, 1))
        np.savez(tmp_path / "evaluation.npz", x=samples(400, 2))
        data = DATA(
            store=store,
            calibration=SourceFile.of(tmp_path / "calibration.npz"),
            evaluation=SourceFile.of(tmp_path / "evaluation.npz"),
            search=None,
            files=(),
            inputs={"x": InputSettings(shape=("n", 2, 6, 6), dims={"n": DimSettings(min=1, opt=32, max=64)})},
            seed=0,
            samples=4,
        )
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "model.onnx").write_bytes(model)
        fp32_model = folder_artifact("simplify", tmp_path / "model")
        metric = MetricRef("agreement")
        int8 = Int8Settings(calibrator="minmax", **options)
        made = REVERT(
            store=into,
            model=fp32_model,
            int8=CALIBRATE(store=store, model=fp32_model, data=data, settings=int8),
            fallback=plan(tmp_path / "plan", model, fp32),
            data=data,
            reference=REFERENCE(store=store, model=fp32_model, data=data, metric=metric),
            metric=metric,
            settings=int8,
            budget=BudgetSettings(max_drop=max_drop),
        )
        return made, RevertTable.model_validate_json((made.path / REVERTED_FILE).read_text())

    return run


def graph_of(made: Artifact) -> ir.Model:
    file = made.path / "int8-mixed" / "model.onnx"
    onnx.checker.check_model(str(file), full_check=True)
    return io.load(file)


def quantized_convs(model: ir.Model) -> set[str]:
    found = set()
    for node in model.graph:
        if node.op_type == "Conv":
            writer = node.inputs[1].producer()
            if writer is not None and writer.op_type == "DequantizeLinear":
                found.add(node.name)
    return found


def test_the_harmful_convolution_is_reverted_and_the_harmless_one_is_not(revert: Revert) -> None:
    made, table = revert(sensitive_model(), max_drop=0.03)
    assert made.report["reverted"] == ["picky"]
    assert made.report["quantized"] == 1
    assert made.report["within_budget"]
    assert made.report["minimal"]
    assert quantized_convs(graph_of(made)) == {"plain"}
    picky, plain = table.rows
    assert (picky.conv, picky.rank, picky.quantized) == ("picky", 1, False)
    assert (plain.conv, plain.rank, plain.quantized) == ("plain", 2, True)
    # Quantized with a step of 8, a channel of ±3 is gone.
    assert picky.alone_sqnr_db is not None
    assert plain.alone_sqnr_db is not None
    assert picky.alone_sqnr_db < 10 < 30 < plain.alone_sqnr_db
    assert picky.alone_drop > 0.2
    assert picky.drop_if_quantized is not None
    assert picky.drop_if_quantized > 0.03
    assert picky.reason.startswith(f"quantized again, it alone brings the drop to {picky.drop_if_quantized:.4g} ± ")


def test_drop_is_that_of_the_written_graph_on_the_search_set(revert: Revert, tmp_path: Path) -> None:
    made, table = revert(sensitive_model(), max_drop=0.02)
    search = next((tmp_path / "store" / "objects" / "data").iterdir()) / "search"
    x = np.load(next(search.glob("*.npy")))
    exact = OnnxRunner(tmp_path / "model").run({"x": x})["y"]
    found = OnnxRunner(emulate(graph_of(made))).run({"x": x})["y"]
    differing = np.mean(found.argmax(axis=1) != exact.argmax(axis=1))
    assert table.drop == pytest.approx(differing, abs=1e-9)
    assert table.stderr == pytest.approx(np.sqrt(differing * (1 - differing) / (len(x) - 1)), rel=1e-6)


def test_nothing_is_reverted_within_a_generous_budget(revert: Revert) -> None:
    made, table = revert(sensitive_model(), max_drop=1.0)
    assert made.report["reverted"] == []
    assert [row.quantized for row in table.rows] == [True, True]
    # With everything reverted, and with nothing reverted: that was it.
    assert made.report["evaluations"] == 2
    assert quantized_convs(graph_of(made)) == {"picky", "plain"}


def test_verdict_data_is_not_touched(revert: Revert, tmp_path: Path) -> None:
    revert(sensitive_model(), max_drop=0.03)
    data = next((tmp_path / "store" / "objects" / "data").iterdir())
    shutil.rmtree(tmp_path / "store" / "objects" / "revert")
    shutil.move(data / "verdict", tmp_path / "verdict")
    reference = next((tmp_path / "store" / "objects" / "reference").iterdir())
    shutil.move(reference / "outputs" / "verdict", tmp_path / "outputs")
    out = tmp_path / "out"
    out.mkdir()
    report = REVERT.run(
        out,
        model=folder_artifact("simplify", tmp_path / "model"),
        int8=folder_artifact("calibrate", next((tmp_path / "store" / "objects" / "calibrate").iterdir())),
        fallback=folder_artifact("fallback", tmp_path / "plan"),
        data=folder_artifact("data", data),
        reference=folder_artifact("reference", reference),
        metric=MetricRef("agreement"),
        settings=Int8Settings(calibrator="minmax"),
        budget=BudgetSettings(max_drop=0.03),
    )
    assert report.reverted == ("picky",)


def test_rest_of_the_graph_is_fp16_with_fp16_scales(revert: Revert) -> None:
    made, _ = revert(sensitive_model(), max_drop=1.0)
    model = graph_of(made)
    assert model.graph.opset_imports[""] == 19
    types = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert types["plain_weight_quantized"] == ir.DataType.INT8
    assert types["plain_weight_scale"] == types["plain_bias_corrected"] == types["head"] == ir.DataType.FLOAT16


def test_nodes_that_the_plan_keeps_in_fp32_stay_fp32(revert: Revert) -> None:
    made, _ = revert(sensitive_model(), max_drop=1.0, fp32=("plain", "plain_relu", "head_matmul"))
    types = {name: value.dtype for name, value in graph_of(made).graph.initializers.items()}
    assert types["plain_weight_quantized"] == ir.DataType.INT8
    assert types["plain_weight_scale"] == types["plain_bias_corrected"] == types["head"] == ir.DataType.FLOAT
    assert types["pick_scale"] == ir.DataType.FLOAT16


def test_the_best_candidate_is_written_also_when_fp16_alone_is_over_budget(revert: Revert) -> None:
    made, table = revert(sensitive_model(factor=1e5), max_drop=0.0)
    assert not made.report["within_budget"]
    assert table.drop_without_int8 > 0.1
    assert any("the FP16 plan alone drops by" in warning for warning in made.report["warnings"])
    graph_of(made)


def test_a_budget_that_only_no_int8_meets_reverts_everything(revert: Revert) -> None:
    made, table = revert(
        sensitive_model(), max_drop=0.0, fp32=tuple(candidates(ir.from_proto(onnx.load_from_string(sensitive_model()))))
    )
    assert table.drop == table.drop_without_int8 == 0.0
    assert made.report["within_budget"]
    assert "picky" in made.report["reverted"]


def test_model_without_convolutions_is_the_mixed_graph(revert: Revert) -> None:
    made, table = revert(sensitive_model().replace(b"Relu", b"Tanh"))
    assert table.rows == ()
    assert table.drop == table.drop_without_int8
    assert "calibration quantized no convolution: int8-mixed is the mixed FP16 graph" in made.report["warnings"]
    assert quantized_convs(graph_of(made)) == set()


def test_ranges_of_another_model_are_refused(revert: Revert, tmp_path: Path) -> None:
    made, _ = revert(sensitive_model(), max_drop=1.0)
    int8 = next((tmp_path / "store" / "objects" / "calibrate").iterdir())
    ranges = json.loads((int8 / "ranges.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "ranges.json").write_text(json.dumps(ranges | {"model": "f" * 64}))
    with pytest.raises(EnginesmithError, match="were calibrated on model ffffffffffff"):
        REVERT.run(
            tmp_path,
            model=folder_artifact("simplify", tmp_path / "model"),
            int8=folder_artifact("calibrate", other),
            fallback=made,
            data=made,
            reference=made,
            metric=MetricRef("agreement"),
            settings=Int8Settings(),
            budget=BudgetSettings(),
        )


def test_same_inputs_give_the_same_bytes(revert: Revert, tmp_path: Path) -> None:
    first, _ = revert(sensitive_model(), max_drop=0.02)
    second, _ = revert(sensitive_model(), max_drop=0.02, into=Store(tmp_path / "again"))
    assert first.digest == second.digest


def test_old_opset_is_raised_for_fp16_scales(revert: Revert) -> None:
    made, _ = revert(sensitive_model(opset=12), max_drop=1.0)
    assert graph_of(made).graph.opset_imports[""] == 19


# One session for all choices


def test_switched_session_computes_what_separate_graphs_compute() -> None:
    model = ir.from_proto(onnx.load_from_string(sensitive_model()))
    convs, _ = qdq.find_convs(model, "conv+residual")
    quantization = qdq.plan_quantization(model, convs, {"x": 8.0, "r1": 0.25})
    x = samples(16, 3)
    dataset = Dataset({"x": x}, None, True, 1, 16, 16)
    switched = SwitchedQuantization(model, quantization)
    for chosen in ((), ("picky",), ("plain",), ("picky", "plain")):
        alone = model.clone()
        qdq.QuantizePass(quantization.only(chosen))(alone)
        expected = OnnxRunner(alone).run({"x": x})["y"]
        np.testing.assert_allclose(switched.predict(dataset, chosen)["y"], expected, rtol=1e-4, atol=1e-4)


def test_float_weight_behind_a_dequantized_input_is_not_quantized_behind_our_back() -> None:
    # ONNX Runtime's default session takes one scale for both channels and loses the first.
    weight = np.array([1e-3, 100.0], np.float32).reshape(2, 1, 1, 1)
    made = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="d"),
            helper.make_node("Conv", ["d", "w"], ["y"], name="conv"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 2, 2])],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.float32(0.5), "s"),
            numpy_helper.from_array(np.int8(0), "z"),
        ],
    )
    model = ir.from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    y = QdqRunner(model).run({"x": np.ones((1, 1, 2, 2), np.float32)})["y"]
    np.testing.assert_allclose(y[0, :, 0, 0], weight.reshape(-1), rtol=1e-6)


def test_switched_shortcut_follows_its_convolution() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Add", ["x", "c"], ["y"], name="add"),
    ]
    weight = np.zeros((2, 2, 1, 1), np.float32)
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 2, 2])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = ir.from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    convs, _ = qdq.find_convs(model, "conv+residual")
    shortcuts = qdq.find_shortcuts(model, convs)
    switched = SwitchedQuantization(model, qdq.plan_quantization(model, convs, {"x": 0.5}, shortcuts=shortcuts))
    x = np.full((1, 2, 2, 2), 0.7, np.float32)
    dataset = Dataset({"x": x}, None, True, 1, 1, 1)
    np.testing.assert_array_equal(switched.predict(dataset, ())["y"], x)
    np.testing.assert_array_equal(switched.predict(dataset, ["conv"])["y"], np.full_like(x, 0.5))


def test_noise_is_of_the_worst_output_and_infinite_for_nan() -> None:
    exact = {"a": np.array([3.0, 4.0], np.float32), "b": np.array([1.0], np.float32), "i": np.array([1])}
    assert noise({"a": np.array([3.0, 4.5]), "b": np.array([1.5]), "i": np.array([2])}, exact) == pytest.approx(0.25)
    assert noise({"a": np.array([np.nan, 4.0]), "b": exact["b"], "i": exact["i"]}, exact) == np.inf
