import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import ShapeInferencePass

from enginesmith.tasks.graph.expose import expose_branches
from enginesmith.tasks.runner import OnnxRunner

F32 = np.float32


def info(name: str, dtype: int = TensorProto.FLOAT, shape: tuple[int, ...] = (2,)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def nested() -> ir.Model:
    """y = a ? (b ? 2x : 3x) + 1 : -x."""
    inner = helper.make_node(
        "If",
        ["b"],
        ["chosen"],
        name="inner",
        then_branch=helper.make_graph(
            [helper.make_node("Mul", ["x", "two"], ["t"], name="twice")], "t", [], [info("t")]
        ),
        else_branch=helper.make_graph(
            [helper.make_node("Mul", ["x", "three"], ["u"], name="thrice")], "u", [], [info("u")]
        ),
    )
    outer = helper.make_node(
        "If",
        ["a"],
        ["y"],
        name="outer",
        then_branch=helper.make_graph(
            [inner, helper.make_node("Add", ["chosen", "one"], ["p"], name="plus")], "p", [], [info("p")]
        ),
        else_branch=helper.make_graph([helper.make_node("Neg", ["x"], ["n"], name="minus")], "n", [], [info("n")]),
    )
    constants = [numpy_helper.from_array(np.array(v, F32), n) for n, v in (("one", 1), ("two", 2), ("three", 3))]
    flags = [info(name, TensorProto.BOOL, ()) for name in "ab"]
    graph = helper.make_graph([outer], "g", [info("x"), *flags], [info("y")], constants)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    return ShapeInferencePass(check_type=False, strict_mode=False)(model).model


def run(model: ir.Model, a: bool, b: bool) -> dict[str, list[float]]:
    """The result of every node inside, by its name."""
    places = expose_branches(model)
    model.graph.outputs.extend(model.graph[0].outputs[1:])
    feed = {"x": np.array([1, 2], F32), "a": np.array(a), "b": np.array(b)}
    tensors = OnnxRunner(model).run(feed)
    return {"y": tensors["y"].tolist(), **{name: tensors[place].tolist() for name, (place,) in places.items()}}


def test_results_of_nested_branches_come_out_and_those_not_taken_are_empty() -> None:
    assert run(nested(), True, True) == {
        "y": [3, 5],
        "inner": [2, 4],
        "twice": [2, 4],
        "thrice": [],
        "plus": [3, 5],
        "minus": [],
    }
    assert run(nested(), True, False)["thrice"] == [3, 6]
    assert run(nested(), False, True) == {
        "y": [-1, -2],
        "inner": [],
        "twice": [],
        "thrice": [],
        "plus": [],
        "minus": [-1, -2],
    }


def test_the_graph_stays_valid() -> None:
    model = nested()
    expose_branches(model)
    onnx.checker.check_model(ir.to_proto(model))
