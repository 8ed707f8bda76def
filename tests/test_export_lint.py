"""ONNX files and Python source by themselves: what can be judged is, and what cannot is said in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export.built import build_from_source, free_inputs
from enginesmith.tasks.export.lint import judge_file, lint_onnx
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.source import check_source


def linear(**external: str) -> onnx.ModelProto:
    """y = x @ w, w of 4x4 ones in the file, or external with these entries."""
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    if external:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in external.items():
            weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "matmul")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def judged(path: Path, folder: Path, backends: tuple[str, ...] = ()) -> list[Finding]:
    out = folder / "out"
    out.mkdir()
    return [Finding.model_validate(f) for f in judge_file(str(path), str(out), list(backends))]


def cut(folder: Path) -> Path:
    path = folder / "cut.onnx"
    path.write_bytes(linear().SerializeToString()[:-20])
    return path


def noise(folder: Path) -> Path:
    path = folder / "noise.onnx"
    path.write_bytes(bytes(range(256)) * 8)
    return path


def empty(folder: Path) -> Path:
    path = folder / "empty.onnx"
    path.write_bytes(b"")
    return path


def external(location: str, length: int = 64):
    def write(folder: Path) -> Path:
        path = folder / "external.onnx"
        path.write_bytes(linear(location=location, length=str(length)).SerializeToString())
        return path

    return write


def short(folder: Path) -> Path:
    (folder / "w.bin").write_bytes(b"\0" * 32)
    return external("w.bin")(folder)


def link(folder: Path) -> Path:
    outside = folder.parent / "outside.bin"
    outside.write_bytes(b"\0" * 64)
    (folder / "w.bin").symlink_to(outside)
    return external("w.bin")(folder)


def pickle(folder: Path) -> Path:
    path = folder / "zip.onnx"
    np.savez(folder / "a.npz", a=np.ones(3))
    (folder / "a.npz").rename(path)
    return path


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (cut, "not a readable ONNX file"),
        (noise, "not a readable ONNX file"),
        (empty, "not an ONNX model"),
        (pickle, "not a readable ONNX file"),
        (external("absent.bin"), "is missing: 'absent.bin'"),
        (external("../w.bin"), "points outside the file's folder"),
        (external("/etc/passwd"), "points outside the file's folder"),
        (external("C:\\w.bin"), "points outside the file's folder"),
        (short, "goes beyond the end"),
        (link, "is not a plain file"),
    ],
)
def test_file_that_cannot_be_read_is_refused_by_name(write, words, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    path = write(folder)
    with pytest.raises(EnginesmithError) as error:
        judged(path, tmp_path)
    assert words in error.value.found
    assert error.value.where == str(path)


def test_file_without_a_pipeline_is_judged_with_free_dimensions(tmp_path):
    onnx.save(linear(), tmp_path / "a.onnx")
    assert judged(tmp_path / "a.onnx", tmp_path, ("onnxruntime",)) == []
    assert onnx.load(tmp_path / "out" / "model.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"


def test_external_data_beside_the_file_is_read(tmp_path):
    (tmp_path / "w.bin").write_bytes(np.ones((4, 4), np.float32).tobytes())
    assert judged(external("w.bin")(tmp_path), tmp_path) == []


def test_invalid_graph_is_a_finding_and_no_failure(tmp_path):
    model = linear()
    model.graph.node[0].input[0] = "nobody"
    onnx.save(model, tmp_path / "a.onnx")
    assert [f.rule for f in judged(tmp_path / "a.onnx", tmp_path)] == ["operators/invalid-graph"]


def test_file_beyond_protobufs_limit_is_refused_unread(tmp_path):
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 31)  # sparse: no bytes on the disk
    with pytest.raises(EnginesmithError, match="protobuf ends at 2147483647"):
        lint_onnx(path, ())


SOURCE = """
import torch
from torch import nn

class Branch(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        if x.mean() > 0:
            x = x * 2
        return self.linear(x)

class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
    def forward(self, x):
        return x

class Silent(nn.Module):
    pass

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no such file: weights.bin")
    def forward(self, x):
        return x

def build():
    return Branch(8)

def number():
    return 7

SEVEN = 7
"""


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "some_model.py"
    file.write_text(SOURCE)
    return file


def test_every_module_of_a_file_is_judged_and_the_others_are_named(source):
    built, notes = build_from_source(source, "", "", source.parent)
    assert [type(module).__name__ for module in built] == ["Branch"]
    found = [f for module in built for f in check_source(module, free_inputs(module), (source.parent,))]
    assert [(f.rule, f.file, f.line) for f in found] == [("control-flow/branch-on-value", "some_model.py", 10)]
    assert any("Wide" in note and "width" in note for note in notes)
    assert any("Broken" in note and "weights.bin" in note for note in notes)


def test_weights_are_not_allocated(source):
    (built,), _ = build_from_source(source, "", "build", source.parent)
    assert {p.device.type for p in built.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Wide", "needs arguments: width"),
        ("Silent", "has no forward"),
        ("Broken", "building Broken failed: RuntimeError: no such file: weights.bin"),
        ("number", "gives a int, not a torch.nn.Module"),
        ("SEVEN", "is a int, neither a module nor a factory"),
        ("Brunch", "has no 'Brunch'"),
    ],
)
def test_name_that_gives_no_module_is_refused(name, words, source):
    with pytest.raises(EnginesmithError) as error:
        build_from_source(source, "", name, source.parent)
    assert words in error.value.found


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_package_at_all\n", "No module named"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
        ("x = 1\n", "defines no torch.nn.Module"),
    ],
)
def test_file_without_a_module_is_refused(code, words, tmp_path):
    (tmp_path / "a.py").write_text(code)
    with pytest.raises(EnginesmithError) as error:
        build_from_source(tmp_path / "a.py", "", "", tmp_path)
    assert words in error.value.found
