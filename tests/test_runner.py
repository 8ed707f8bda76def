from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.graph import io
from enginesmith.tasks.runner import OnnxRunner


@dataclass(frozen=True)
class Samples:
    """What `predict` uses of a dataset."""

    inputs: Mapping[str, np.ndarray]
    batched: bool
    batch: int = 2

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def feeds(self, batch: int | None = None) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        if not self.batched:
            yield from (({n: v[i] for n, v in self.inputs.items()}, 1) for i in range(len(self)))
            return
        for start in range(0, len(self), self.batch):
            indices = np.minimum(np.arange(start, start + self.batch), len(self) - 1)
            yield {n: v[indices] for n, v in self.inputs.items()}, min(self.batch, len(self) - start)


def _affine(weight: float = 2.0) -> onnx.ModelProto:
    """y = weight * x + 1, and the sum over everything."""
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "w"], ["h"]),
            helper.make_node("Add", ["h", "one"], ["y"]),
            helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        ],
        "affine",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("total", TensorProto.FLOAT, []),
        ],
        [
            numpy_helper.from_array(np.float32(weight), "w"),
            numpy_helper.from_array(np.float32(1), "one"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _only(model: onnx.ModelProto, *outputs: str) -> onnx.ModelProto:
    kept = [value for value in model.graph.output if value.name in outputs]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return model


def _rows(count: int) -> np.ndarray:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


def test_a_file_a_folder_a_proto_and_an_ir_model_give_the_same(tmp_path: Path) -> None:
    model = ir.from_proto(_affine())
    file = io.save(model, tmp_path)
    for source in (file, tmp_path, _affine(), model):
        with OnnxRunner(source) as runner:
            assert runner.inputs == ("x",)
            assert runner.outputs == ("y", "total")
            outputs = runner.run({"x": _rows(2)})
        np.testing.assert_array_equal(outputs["y"], 2 * _rows(2) + 1)
        assert outputs["total"] == 15


def test_a_model_whose_weights_lie_outside_runs_from_memory(tmp_path: Path) -> None:
    proto = _affine()
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((200, 3), 2, np.float32), "w"))
    io.save(ir.from_proto(proto), tmp_path, embed_limit=0)
    model = io.load(tmp_path)
    assert io.has_external_data(model)
    np.testing.assert_array_equal(OnnxRunner(model).run({"x": _rows(200)})["y"], 2 * _rows(200) + 1)


def test_padding_is_cut_and_batches_are_concatenated() -> None:
    runner = OnnxRunner(_only(_affine(), "y"))
    outputs = runner.predict(Samples({"x": _rows(5)}, batched=True))
    np.testing.assert_array_equal(outputs["y"], 2 * _rows(5) + 1)


def test_unbatched_samples_are_stacked() -> None:
    runner = OnnxRunner(_affine())
    samples = np.stack([_rows(2), _rows(2) + 1, _rows(2) - 5])
    outputs = runner.predict(Samples({"x": samples}, batched=False))
    np.testing.assert_array_equal(outputs["y"], 2 * samples + 1)
    np.testing.assert_array_equal(outputs["total"], samples.sum(axis=(1, 2)))


def test_an_output_without_the_batch_axis_is_an_error_that_names_it() -> None:
    with pytest.raises(EnginesmithError, match=r"'total'.*axis 0 is not the batch"):
        OnnxRunner(_affine()).predict(Samples({"x": _rows(5)}, batched=True))


def test_outputs_of_different_shapes_are_an_error_that_names_them() -> None:
    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["where"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("where", TensorProto.INT64, [1, "n"])],
    )
    runner = OnnxRunner(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    with pytest.raises(EnginesmithError, match="'where' has different shapes"):
        runner.predict(Samples({"x": _rows(2)}, batched=False))


def test_missing_unknown_and_mistyped_inputs_are_named() -> None:
    runner = OnnxRunner(_affine())
    with pytest.raises(EnginesmithError, match="'x' is not fed"):
        runner.run({})
    with pytest.raises(EnginesmithError, match="no input 'z'"):
        runner.run({"x": _rows(1), "z": _rows(1)})
    with pytest.raises(EnginesmithError, match="'x' is float64, the model reads float32"):
        runner.run({"x": _rows(1).astype(np.float64)})


def test_a_wrong_shape_is_an_error_that_shows_the_shapes() -> None:
    with pytest.raises(EnginesmithError, match=r"'x': float32\[1, 4\]"):
        OnnxRunner(_affine()).run({"x": np.zeros((1, 4), np.float32)})


def test_a_model_that_onnx_runtime_refuses_is_an_error() -> None:
    model = _affine()
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(EnginesmithError, match=r"(?s)refuses the model.*NoSuchOperator"):
        OnnxRunner(model)


def test_int8_products_do_not_saturate() -> None:
    """255 * 127 * 2 exceeds int16, which the fast kernel of CPUs without VNNI adds in."""
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["x", "s", "ux"], ["dx"]),
            helper.make_node("DequantizeLinear", ["w", "s", "zw"], ["dw"]),
            helper.make_node("MatMul", ["dx", "dw"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [4, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 8])],
        [
            numpy_helper.from_array(np.full((64, 8), 127, np.int8), "w"),
            numpy_helper.from_array(np.float32(1), "s"),
            numpy_helper.from_array(np.uint8(0), "ux"),
            numpy_helper.from_array(np.int8(0), "zw"),
        ],
    )
    runner = OnnxRunner(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    assert (runner.run({"x": np.full((4, 64), 255, np.uint8)})["y"] == 255 * 127 * 64).all()


def test_predict_stops_when_the_user_asks() -> None:
    progress.interrupt()
    try:
        with pytest.raises(Interrupted):
            OnnxRunner(_only(_affine(), "y")).predict(Samples({"x": _rows(5)}, batched=True))
    finally:
        progress.reset()
