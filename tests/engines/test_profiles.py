"""Profiles that no build can satisfy are refused before it starts, naming input and dimension."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.engines.profiles import check_profiles, profile_of, shape_tensors
from enginesmith.tasks.engines.spec import Dim, EngineError, Input, Profile, Range

IMAGE = Input("image", ("batch", 3, "side", "side"), dims={"batch": Dim(1, 8, 32), "side": Dim(96, 224, 224)})


def model(shape: list[object], *, extra: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
    value = helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)
    nodes = [helper.make_node("Relu", ["image"], ["y"], name="relu"), *(extra or [])]
    graph = helper.make_graph(nodes, "g", [value], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def resizing(*, through_arithmetic: bool) -> onnx.ModelProto:
    """image reshaped to the two sizes in `size`, doubled on the way or not."""
    two = numpy_helper.from_array(np.array([2, 2], np.int64), "two")
    nodes = [helper.make_node("Mul", ["size", "two"], ["twice"], name="mul")] if through_arithmetic else []
    nodes.append(helper.make_node("Reshape", ["image", "twice" if nodes else "size"], ["y"], name="reshape"))
    inputs = [
        helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("size", TensorProto.INT64, [2]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [two])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def profile(low: int, best: int, high: int) -> Profile:
    return Profile({"image": Range((low, 3), (best, 3), (high, 3))})


def test_declared_ranges_become_one_profile() -> None:
    found = profile_of([IMAGE]).shapes["image"]
    assert found == Range((1, 3, 96, 96), (8, 3, 224, 224), (32, 3, 224, 224))


def test_a_dynamic_dimension_without_a_range_is_refused() -> None:
    with pytest.raises(EngineError, match="input 'image' has a dynamic dimension 'batch'") as caught:
        profile_of([Input("image", ("batch", 3))])
    assert caught.value.key == "inputs.image.dims"


def test_one_name_with_two_ranges_is_refused() -> None:
    other = Input("mask", ("batch",), dims={"batch": Dim(1, 4, 8)})
    with pytest.raises(EngineError, match=r"'batch' has range \(1, 8, 32\) in input 'image' and \(1, 4, 8\)"):
        profile_of([IMAGE, other])


def test_a_profile_inside_the_graphs_dims_is_accepted() -> None:
    check_profiles(model(["batch", 3]), [profile(1, 8, 32)])


@pytest.mark.parametrize(("low", "best", "high"), [(1, 8, 4), (4, 1, 8), (8, 4, 1)])
def test_min_opt_max_out_of_order_is_refused(low: int, best: int, high: int) -> None:
    with pytest.raises(EngineError, match=rf"input 'image', dim 0: .* {low}, {best}, {high}"):
        check_profiles(model(["batch", 3]), [profile(low, best, high)])


def test_a_model_without_any_profile_is_refused() -> None:
    with pytest.raises(EngineError, match="no optimization profile"):
        check_profiles(model(["batch", 3]), [])


def test_an_input_without_a_range_is_refused() -> None:
    with pytest.raises(EngineError, match="input 'image' has no profile"):
        check_profiles(model(["batch", 3]), [Profile({})])


def test_a_range_for_no_input_is_refused() -> None:
    with pytest.raises(EngineError, match="no input 'picture'") as caught:
        check_profiles(model(["batch", 3]), [Profile({"picture": Range((1,), (1,), (1,))})])
    assert caught.value.hint == "its inputs: image"


def test_a_static_size_of_the_graph_is_not_overruled() -> None:
    with pytest.raises(EngineError, match="input 'image', dim 1: the graph has the static size 4, the profile 3 to 3"):
        check_profiles(model(["batch", 4]), [profile(1, 8, 32)])


def test_another_rank_is_refused() -> None:
    with pytest.raises(EngineError, match="rank 3 in the graph and 2 in the profile"):
        check_profiles(model(["batch", 3, 3]), [profile(1, 8, 32)])


def test_the_second_of_two_profiles_is_checked_too() -> None:
    with pytest.raises(EngineError, match="profile 1"):
        check_profiles(model(["batch", 3]), [profile(1, 8, 32), profile(1, 8, 4)])


@pytest.mark.parametrize("through_arithmetic", [False, True])
def test_a_shape_tensor_without_values_is_refused(through_arithmetic: bool) -> None:
    given = Profile({"image": Range((4,), (4,), (4,)), "size": Range((2,), (2,), (2,))})
    with pytest.raises(EngineError, match=r"input 'size' is a shape tensor: its 2 element\(s\) become sizes"):
        check_profiles(resizing(through_arithmetic=through_arithmetic), [given])


def test_a_shape_tensor_with_values_is_accepted() -> None:
    shapes = {"image": Range((4,), (4,), (4,)), "size": Range((2,), (2,), (2,))}
    check_profiles(resizing(through_arithmetic=True), [Profile(shapes, {"size": Range((1, 1), (1, 1), (2, 2))})])


def test_values_out_of_order_are_refused() -> None:
    shapes = {"image": Range((4,), (4,), (4,)), "size": Range((2,), (2,), (2,))}
    with pytest.raises(EngineError, match="input 'size', dim 0"):
        check_profiles(resizing(through_arithmetic=True), [Profile(shapes, {"size": Range((2, 1), (1, 1), (2, 2))})])


def test_integer_data_that_becomes_no_size_is_no_shape_tensor() -> None:
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])
    table = numpy_helper.from_array(np.zeros((5, 2), np.float32), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"], name="embed")],
        "g",
        [ids],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [table],
    )
    assert shape_tensors(helper.make_model(graph)) == frozenset()
