import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from enginesmith.tasks.graph.names import UniqueNodeNames, all_nodes


def _names(*names: str) -> list[str]:
    """A chain of Relus with these names, renamed."""
    nodes = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"], name=name) for i, name in enumerate(names)]
    return [node.name or "" for node in _renamed(nodes, "t0", f"t{len(names)}").graph]


def _renamed(nodes: list[onnx.NodeProto], source: str, result: str) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(source, TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, [2])],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    return UniqueNodeNames()(model).model


def test_unique_names_stay() -> None:
    assert _names("a", "b", "c") == ["a", "b", "c"]


def test_an_unnamed_node_is_called_after_operator_and_output() -> None:
    assert _names("", "b", "") == ["Relu_t1", "b", "Relu_t3"]


def test_the_first_of_equal_names_keeps_it_and_numbers_skip_names_that_come_later() -> None:
    assert _names("a", "a", "a_1", "a") == ["a", "a_2", "a_1", "a_3"]


def test_a_made_up_name_does_not_take_one_that_a_later_node_has() -> None:
    assert _names("", "Relu_t1") == ["Relu_t1_1", "Relu_t1"]


def test_nodes_in_bodies_of_if_share_one_space_of_names() -> None:
    def body(name: str) -> onnx.GraphProto:
        node = helper.make_node("Relu", ["x"], [f"{name}_out"], name="same")
        return helper.make_graph(
            [node], name, [], [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [2])]
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], name="same", keepdims=0),
        helper.make_node("Cast", ["sum"], ["which"], to=TensorProto.BOOL),
        helper.make_node("If", ["which"], ["y"], then_branch=body("yes"), else_branch=body("no")),
    ]
    model = _renamed(nodes, "x", "y")
    names = [node.name for node in all_nodes(model)]
    assert names == ["same", "Cast_which", "If_y", "same_1", "same_2"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_running_twice_changes_nothing() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    model = _renamed(nodes, "x", "y")
    assert not UniqueNodeNames()(model).modified
