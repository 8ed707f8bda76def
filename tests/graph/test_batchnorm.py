"""Folding on ONNX graphs: outputs stay, and every BatchNormalization that stays has a reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.batchnorm import FoldBatchNorms, GraphFolds, fold_graph, norm_nodes
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.settings import FoldSettings

RNG = np.random.default_rng(0)


def bn(x: str, y: str, channels: int, name: str = "bn", **attributes: Any) -> tuple[list[Any], dict[str, np.ndarray]]:
    """A BatchNormalization node and its statistics."""
    roles = ("gamma", "beta", "mean", "var")
    node = helper.make_node("BatchNormalization", [x, *(f"{name}_{r}" for r in roles)], [y], name=name, **attributes)
    values = [RNG.normal(1, 0.3, channels), RNG.normal(0, 0.3, channels), RNG.normal(0, 1, channels)]
    values.append(RNG.uniform(0.1, 1, channels))
    return [node], {f"{name}_{r}": v.astype(np.float32) for r, v in zip(roles, values, strict=True)}


def weight(*shape: int) -> np.ndarray:
    return RNG.normal(0, 1, shape).astype(np.float32)


def model_of(
    nodes: list[Any],
    constants: Mapping[str, np.ndarray],
    shape: tuple[int, ...],
    outputs: Mapping[str, int],
    opset: int = 18,
) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape[1:]])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * rank) for n, rank in outputs.items()],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(proto)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def outputs_of(model: ir.Model, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    return list(session.run(None, dict(feed)))


def fold(model: ir.Model, *shape: int, **settings: Any) -> GraphFolds:
    """Fold in place; the outputs stay within 1e-5 of their range, the checker passes, names stay."""
    feeds = [
        {"x": RNG.normal(0, 1, shape).astype(np.float32)},
        {"x": RNG.normal(0, 1, (1, *shape[1:])).astype(np.float32)},
    ]
    before = [outputs_of(model, feed) for feed in feeds]
    names = [value.name for value in model.graph.outputs]
    result = fold_graph(model, feeds, FoldSettings(**settings))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [value.name for value in model.graph.outputs] == names
    for feed, expected in zip(feeds, before, strict=True):
        for left, right in zip(outputs_of(model, feed), expected, strict=True):
            assert np.abs(left - right).max() <= 1e-5 * np.ptp(right)
    return result


def reason(result: GraphFolds, norm: str = "bn") -> str:
    assert norm not in [f.norm for f in result.folds]
    return next(k.reason for k in result.kept if k.norm == norm)


LAYERS = [
    ("Conv", (6, 3, 3, 3), {"pads": [1, 1, 1, 1]}, 6, (2, 3, 7, 8)),
    ("Conv", (8, 1, 3, 3), {"group": 4}, 8, (2, 4, 7, 8)),
    ("Conv", (6, 3, 3), {}, 6, (2, 3, 9)),
    ("ConvTranspose", (4, 2, 3, 3), {"group": 2, "strides": [2, 2]}, 4, (2, 4, 5, 5)),
    ("ConvTranspose", (4, 1, 3, 3), {"group": 4}, 4, (2, 4, 5, 5)),
    ("Gemm", (5, 7), {}, 7, (3, 5)),
    ("Gemm", (7, 5), {"transB": 1}, 7, (3, 5)),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("op", "shape", "attributes", "channels", "inputs"), LAYERS)
def test_norm_after_a_layer_is_folded(
    op: str, shape: tuple[int, ...], attributes: dict[str, Any], channels: int, inputs: tuple[int, ...], bias: bool
) -> None:
    names = ["x", "w", "b"] if bias else ["x", "w"]
    layer = helper.make_node(op, names, ["h"], name="layer", **attributes)
    nodes, constants = bn("h", "y", channels, epsilon=1e-3)
    constants |= {"w": weight(*shape)} | ({"b": weight(channels)} if bias else {})
    model = model_of([layer, *nodes], constants, inputs, {"y": len(inputs)})
    result = fold(model, *inputs)
    assert [(f.norm, f.side, f.into) for f in result.folds] == [("bn", "after", ("layer",))]
    assert [n.op_type for n in model.graph] == [op]
    assert sorted(model.graph.initializers) == ["layer.bias", "layer.weight"]


def test_norm_before_a_layer_is_folded_where_borders_allow_it() -> None:
    nodes, constants = bn("x", "h", 3)
    conv = helper.make_node("Conv", ["h", "w"], ["y"], name="conv")
    model = model_of([*nodes, conv], constants | {"w": weight(4, 3, 3, 3)}, (2, 3, 6, 6), {"y": 4})
    assert [f.side for f in fold(model, 2, 3, 6, 6).folds] == ["before"]
    nodes, constants = bn("x", "h", 3)
    conv = helper.make_node("Conv", ["h", "w"], ["y"], name="conv", pads=[1, 1, 1, 1])
    model = model_of([*nodes, conv], constants | {"w": weight(4, 3, 3, 3)}, (2, 3, 6, 6), {"y": 4})
    assert "borders" in reason(fold(model, 2, 3, 6, 6))


def test_one_weight_of_two_convs_with_two_norms_is_copied() -> None:
    convs = [helper.make_node("Conv", ["x", "w"], [f"h{i}"], name=f"conv{i}") for i in "12"]
    first, constants = bn("h1", "y1", 4, "bn1")
    second, more = bn("h2", "y2", 4, "bn2")
    model = model_of(
        [*convs, *first, *second], constants | more | {"w": weight(4, 3, 1, 1)}, (2, 3, 5, 5), {"y1": 4, "y2": 4}
    )
    assert len(fold(model, 2, 3, 5, 5).folds) == 2
    assert sorted(model.graph.initializers) == ["conv1.bias", "conv1.weight", "conv2.bias", "conv2.weight"]


def test_norm_behind_a_concatenation_is_folded_into_all_its_inputs() -> None:
    convs = [helper.make_node("Conv", ["x", f"w{i}"], [f"h{i}"], name=f"conv{i}") for i in "12"]
    cat = helper.make_node("Concat", ["h1", "h2"], ["h"], axis=1, name="cat")
    nodes, constants = bn("h", "y", 6)
    constants |= {"w1": weight(2, 3, 1, 1), "w2": weight(4, 3, 1, 1)}
    model = model_of([*convs, cat, *nodes], constants, (2, 3, 5, 5), {"y": 4})
    assert fold(model, 2, 3, 5, 5).folds[0].into == ("conv1", "conv2")


def conv_then(middle: list[Any], source: str, constants: dict[str, np.ndarray] | None = None, **more: int) -> ir.Model:
    conv = helper.make_node("Conv", ["x", "w"], ["h"], name="conv")
    nodes, statistics = bn(source, "y", 3)
    constants = statistics | {"w": weight(3, 3, 1, 1)} | (constants or {})
    return model_of([conv, *middle, *nodes], constants, (2, 3, 5, 5), {"y": 4} | more)


def test_identity_and_inactive_dropout_are_passed_through() -> None:
    middle = [
        helper.make_node("Identity", ["h"], ["i"], name="identity"),
        helper.make_node("Dropout", ["i"], ["d"], name="dropout"),
    ]
    assert len(fold(conv_then(middle, "d"), 2, 3, 5, 5).folds) == 1


def test_conv_output_that_is_a_graph_output_is_not_folded() -> None:
    assert "is an output of the graph" in reason(fold(conv_then([], "h", h=4), 2, 3, 5, 5))


def test_conv_output_with_another_reader_is_not_folded() -> None:
    relu = helper.make_node("Relu", ["h"], ["r"], name="relu")
    assert "2 readers" in reason(fold(conv_then([relu], "h", r=4), 2, 3, 5, 5))


def test_nonlinearity_in_between_is_not_folded() -> None:
    relu = helper.make_node("Relu", ["h"], ["r"], name="relu")
    assert "relu (Relu) stands before it" in reason(fold(conv_then([relu], "r"), 2, 3, 5, 5))


def test_computed_weight_is_not_folded() -> None:
    conv = helper.make_node("Conv", ["x", "w2"], ["h"], name="conv")
    double = helper.make_node("Mul", ["w", "two"], ["w2"], name="double")
    nodes, constants = bn("h", "y", 3)
    constants |= {"w": weight(3, 3, 1, 1), "two": np.float32(2)}
    result = fold(model_of([double, conv, *nodes], constants, (2, 3, 5, 5), {"y": 4}), 2, 3, 5, 5)
    assert "the weight of conv is computed" in reason(result)


def test_weights_in_constant_nodes_are_folded() -> None:
    value = numpy_helper.from_array(weight(3, 3, 1, 1), "value")
    constant = helper.make_node("Constant", [], ["w"], name="constant", value=value)
    conv = helper.make_node("Conv", ["x", "w"], ["h"], name="conv")
    nodes, constants = bn("h", "y", 3)
    model = model_of([constant, conv, *nodes], constants, (2, 3, 5, 5), {"y": 4})
    assert len(fold(model, 2, 3, 5, 5).folds) == 1
    assert [n.op_type for n in model.graph] == ["Conv"]


def test_statistics_beyond_fp16_become_a_scale_and_shift() -> None:
    nodes, constants = bn("x", "y", 3)
    constants["bn_var"][1] = 1e6
    model = model_of(nodes, constants, (2, 3, 4, 4), {"y": 4})
    result = fold(model, 2, 3, 4, 4)
    assert [k.form for k in result.kept] == ["scale and shift"]
    assert [n.op_type for n in model.graph] == ["Mul", "Add"]
    scale = model.graph.initializers["bn.scale"].const_value
    assert scale is not None
    expected = constants["bn_gamma"][1] / np.sqrt(np.float64(1e6) + 1e-5)
    assert scale.numpy().reshape(-1)[1] == pytest.approx(expected, rel=1e-6)


def test_training_mode_is_not_folded() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["h"], name="conv")
    nodes, constants = bn("h", "y", 3, training_mode=1)
    nodes[0].output.extend(["new_mean", "new_var"])
    model = model_of([conv, *nodes], constants | {"w": weight(3, 3, 1, 1)}, (2, 3, 5, 5), {"y": 4})
    folding = FoldBatchNorms()
    assert not folding(model).modified
    assert "training mode" in folding.result.kept[0].reason


def test_skip_leaves_a_node_alone_and_refuses_unknown_names() -> None:
    model = conv_then([], "h")
    assert reason(fold(model, 2, 3, 5, 5, skip=("b*",))) == "left out by fold.skip"
    with pytest.raises(EnginesmithError) as caught:
        fold(model, 2, 3, 5, 5, skip=("no",))
    assert caught.value.key == "fold.skip"


def test_floor_that_changes_the_outputs_is_refused_and_leaves_the_model_alone() -> None:
    model = conv_then([], "h")
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(EnginesmithError) as caught:
        fold(model, 2, 3, 5, 5, clamp={"floor": 0.9})
    assert caught.value.key == "fold.clamp"
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_running_twice_changes_nothing() -> None:
    model = conv_then([], "h")
    assert FoldBatchNorms()(model).modified
    assert not FoldBatchNorms()(model).modified


def test_norm_in_a_branch_of_an_if_is_folded() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["h"], name="conv")
    nodes, constants = bn("h", "b", 3)
    shape = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
    yes = helper.make_graph([conv, *nodes], "yes", [], [shape])
    no = helper.make_graph([helper.make_node("Relu", ["x"], ["b"], name="relu")], "no", [], [shape])
    branch = helper.make_node("If", ["flag"], ["y"], name="if", then_branch=yes, else_branch=no)
    model = model_of([branch], constants | {"w": weight(3, 3, 1, 1), "flag": np.array(True)}, (2, 3, 5, 5), {"y": 4})
    assert [f.norm for f in fold(model, 2, 3, 5, 5).folds] == ["bn"]


def weight_bytes(model: ir.Model) -> int:
    """Bytes of initializers and of what Constant nodes hold."""
    constants = [
        n.attributes["value"].as_tensor() for n in model.graph if n.op_type == "Constant" and "value" in n.attributes
    ]
    return io.tensor_bytes(model) + sum(tensor.nbytes for tensor in constants)


def test_text_classifier_folds_completely() -> None:
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("rapidocr-onnxruntime is not installed")
    model = io.load(Path(spec.submodule_search_locations[0]) / "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    UniqueNodeNames()(model)
    feeds = [{"x": RNG.normal(0, 0.5, (n, 3, 48, 192)).astype(np.float32)} for n in (2, 1)]
    before = weight_bytes(model)
    result = fold_graph(model, feeds, FoldSettings())
    assert len(result.folds) == 35
    assert weight_bytes(model) < before
    assert not list(norm_nodes(model))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
