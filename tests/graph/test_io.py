from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io


def _model(values: np.ndarray) -> ir.Model:
    x = ir.val("x", ir.DataType.FLOAT, [values.size])
    weight = ir.val("w", const_value=ir.tensor(values, name="w"))
    node = ir.node("Add", [x, weight], name="add")
    node.outputs[0].name = "y"
    graph = ir.Graph([x], [node.outputs[0]], nodes=[node], initializers=[weight], opset_imports={"": 18}, name="g")
    return ir.Model(graph, ir_version=10)


def test_a_small_model_is_one_file_and_comes_back(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    assert io.save(_model(values), tmp_path) == tmp_path / "model.onnx"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    again = io.load(tmp_path)
    np.testing.assert_array_equal(again.graph.initializers["w"].const_value.numpy(), values)


def test_tensors_above_the_limit_go_beside_the_model(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    model = _model(values)
    io.save(model, tmp_path, embed_limit=3999)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (tmp_path / "model.onnx").stat().st_size < 1000
    loaded = io.load(tmp_path / "model.onnx")
    assert io.has_external_data(loaded)
    np.testing.assert_array_equal(loaded.graph.initializers["w"].const_value.numpy(), values)
    assert not io.has_external_data(model), "saving leaves the model as it was"


def test_external_data_below_the_limit_is_embedded_when_saved_elsewhere(tmp_path: Path) -> None:
    values = np.arange(1000, dtype=np.float32)
    io.save(_model(values), tmp_path / "a", embed_limit=0)
    loaded = io.load(tmp_path / "a")
    io.save(loaded, tmp_path / "b")
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["model.onnx"]
    assert io.has_external_data(loaded), "saving leaves the model as it was"
    np.testing.assert_array_equal(io.load(tmp_path / "b").graph.initializers["w"].const_value.numpy(), values)


def test_saving_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        io.save(_model(np.ones(3, np.float32)), tmp_path / name)
    assert (tmp_path / "a/model.onnx").read_bytes() == (tmp_path / "b/model.onnx").read_bytes()


def test_missing_external_data_names_tensor_and_file(tmp_path: Path) -> None:
    io.save(_model(np.ones(1000, np.float32)), tmp_path, embed_limit=0)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(EnginesmithError, match=r"model\.onnx\.data.*'w'.*missing"):
        io.load(tmp_path)


def test_a_missing_file_and_garbage_are_errors_that_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(EnginesmithError, match=r"none\.onnx"):
        io.load(tmp_path / "none.onnx")
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(b"\xff\x00not protobuf" * 20)
    with pytest.raises(EnginesmithError, match=r"garbage\.onnx.*not a readable ONNX file"):
        io.load(garbage)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    file = io.save(_model(np.ones(1000, np.float32)), tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(EnginesmithError, match="not a readable ONNX file"):
        io.load(file)
