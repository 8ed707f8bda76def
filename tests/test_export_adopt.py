"""Adopting ONNX files: the same function in the pipeline's form, at opset 18 where that changes nothing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks import export
from enginesmith.tasks.child import Limits
from enginesmith.tasks.data import DATA
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export import adopt_onnx
from enginesmith.tasks.firewalls.findings import BlockedError, load_findings
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import DimSettings, ExportSettings, InputSettings
from enginesmith.tasks.stage import SourceFile
from enginesmith.tasks.store import Store

BATCH = {"batch": DimSettings(min=1, opt=2, max=5)}


def declared(*shape, dtype="float32", **dims):
    return InputSettings(shape=("batch", *shape), dtype=dtype, dims={**BATCH, **dims})


def adopt(path, folder, inputs, *, backends=(), samples=4, calibration=None):
    out = folder / "adopted"
    out.mkdir()
    data = DATA(
        store=Store(folder / "store"),
        calibration=calibration,
        evaluation=None,
        search=None,
        files=(),
        inputs=inputs,
        seed=0,
        samples=samples,
    )
    report = adopt_onnx(
        out, source=SourceFile.of(path), data=data, inputs=inputs, settings=ExportSettings(), backends=backends
    )
    return out, report


def value(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def tensor(name, values, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(values, dtype=dtype), name)


def write(folder, nodes, inputs, outputs, initializers=(), *, opset=18, ir_version=8, functions=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, functions=list(functions))
    path = folder / "source.onnx"
    onnx.save(model, path)
    return path


def test_old_softmax_over_all_trailing_axes_keeps_its_meaning(tmp_path):
    """Softmax-11 without axis flattens from axis 1; with only the number bumped it would normalise the last axis."""
    path = write(
        tmp_path, [helper.make_node("Softmax", ["x"], ["y"])], [value("x", ["n", 3, 4])], [value("y", ["n", 3, 4])],
        opset=11, ir_version=7,
    )  # fmt: skip
    out, report = adopt(path, tmp_path, {"x": declared(3, 4)})
    assert report.opset == (11, 18)
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    e = np.exp(x - x.max(axis=(1, 2), keepdims=True))
    found = OnnxRunner(out).run({"x": x})["y"]
    assert np.allclose(found, e / e.sum(axis=(1, 2), keepdims=True), atol=1e-6)


def test_file_that_no_converter_can_bring_to_18_keeps_its_opset_with_a_warning(tmp_path):
    """Upsample left ONNX with opset 10."""
    path = write(
        tmp_path,
        [helper.make_node("Upsample", ["x", "scales"], ["y"], mode="nearest")],
        [value("x", ["n", 1, 2, 2])],
        [value("y", ["n", 1, 4, 4])],
        [tensor("scales", [1, 1, 2, 2])],
        opset=9,
        ir_version=4,
    )
    out, report = adopt(path, tmp_path, {"x": declared(1, 2, 2)})
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    assert np.array_equal(OnnxRunner(out).run({"x": x})["y"], x.repeat(2, 2).repeat(2, 3))
    if report.opset == (9, 9):
        assert [f.rule for f in report.findings] == ["operators/opset-kept"]
    else:
        assert report.opset == (9, 18)


def test_newer_opset_is_kept(tmp_path):
    path = write(
        tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [value("x", ["n", 3])], [value("y", ["n", 3])], opset=21,
        ir_version=10,
    )  # fmt: skip
    assert adopt(path, tmp_path, {"x": declared(3)})[1].opset == (21, 21)


def test_declared_dimensions_are_written_into_the_file(tmp_path):
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Relu", ["x"], ["y"])]
    path = write(
        tmp_path,
        nodes,
        [value("x", [-1, "chan", None])],
        [value("y", [1, "foo", "bar"]), value("s", [3], TensorProto.INT64)],
    )
    time = DimSettings(min=2, opt=4, max=6)
    out, report = adopt(path, tmp_path, {"x": declared(3, "time", time=time)})
    assert report.inputs == {"x": ("batch", 3, "time")}
    assert report.outputs == {"y": ("batch", 3, "time"), "s": (3,)}
    graph = onnx.load(out / "model.onnx").graph
    assert all(node.name for node in graph.node)


@pytest.mark.parametrize(
    ("inputs", "rule"),
    [
        ({"x": declared(3)}, "shape/static-dim"),
        ({"x": InputSettings(shape=(7, 3))}, "shape/static-dim"),
        ({"x": InputSettings(shape=(4,))}, "shape/static-dim"),
        ({"x": InputSettings(shape=(4, 3), dtype="int64")}, "shape/dtype"),
        ({"image": InputSettings(shape=(4, 3))}, "shape/input-gone"),
    ],
)
def test_file_that_does_not_fit_the_declared_inputs_is_blocked(tmp_path, inputs, rule):
    path = write(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [value("x", [4, 3])], [value("y", [4, 3])])
    with pytest.raises(BlockedError) as caught:
        adopt(path, tmp_path, inputs)
    assert caught.value.findings[0].rule == rule
    assert not list((tmp_path / "adopted").iterdir())


def test_size_that_the_file_has_baked_in_is_blocked_though_it_says_dynamic(tmp_path):
    path = write(
        tmp_path,
        [helper.make_node("Reshape", ["x", "to"], ["y"])],
        [value("x", ["n", 6])],
        [value("y", [2, 3, 2])],
        [tensor("to", [2, 3, 2], np.int64)],
    )
    with pytest.raises(BlockedError, match="original-fails"):
        adopt(path, tmp_path, {"x": declared(6)})


def test_constants_functions_and_old_style_initializers_become_plain_initializers(tmp_path):
    double = helper.make_function(
        "local", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    constant = helper.make_node("Constant", [], ["two"], value=tensor("t", 2.0), doc_string="/somewhere/x.py")
    path = write(
        tmp_path,
        [
            constant,
            helper.make_node("Double", ["x"], ["d"], domain="local"),
            helper.make_node("Mul", ["d", "two"], ["m"]),
            helper.make_node("Add", ["m", "w"], ["y"]),
        ],
        [value("x", ["n", 3]), value("w", [3])],
        [value("y", ["n", 3])],
        [tensor("w", [1, 2, 3])],
        functions=[double],
    )
    out, _ = adopt(path, tmp_path, {"x": declared(3)})
    model = onnx.load(out / "model.onnx")
    assert [n.op_type for n in model.graph.node] == ["Add", "Mul", "Add"]
    assert [i.name for i in model.graph.input] == ["x"]
    assert not model.functions
    assert b"/somewhere" not in (out / "model.onnx").read_bytes()
    assert OnnxRunner(out).run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [[5, 6, 7]]


# --- files that must not be trusted ----------------------------------------------------------------------------------


def external(folder, **entries):
    """A file whose weight lies in external data described by `entries`."""
    path = write(
        folder, [helper.make_node("Add", ["x", "w"], ["y"])], [value("x", ["n", 4])], [value("y", ["n", 4])],
        [tensor("w", np.arange(4))],
    )  # fmt: skip
    model = onnx.load(path)
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, text in entries.items():
        weight.external_data.add(key=key, value=text)
    onnx.save(model, path)
    return path


def test_external_data_beside_the_file_is_taken_in(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    np.arange(4, dtype=np.float32).tofile(source / "w.bin")
    out, _ = adopt(external(source, location="w.bin", offset="0", length="16"), tmp_path, {"x": declared(4)})
    assert sorted(p.name for p in out.iterdir()) == ["findings.json", "model.onnx"]
    assert OnnxRunner(out).run({"x": np.zeros((1, 4), np.float32)})["y"].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"location": "../secret"}, "points outside"),
        ({"location": "{folder}/secret"}, "points outside"),
        ({"location": "sub/../../secret"}, "points outside"),
        ({"location": "..\\secret"}, "points outside"),
        ({"location": "link"}, "not a plain file"),
        ({"location": "linked/secret"}, "not a plain file"),
        ({"location": "in"}, "is missing"),
        ({"location": ""}, "names no file"),
        ({"location": "w.bin", "offset": "8", "length": "16"}, "beyond the end"),
        ({"location": "w.bin", "offset": "-8"}, "beyond the end"),
        ({"location": "w.bin", "length": "many"}, "no number"),
    ],
)
def test_external_data_that_lies_elsewhere_is_refused(tmp_path, entries, said):
    (tmp_path / "secret").write_bytes(bytes(64))
    source = tmp_path / "in"
    source.mkdir()
    (source / "w.bin").write_bytes(bytes(16))
    (source / "link").symlink_to(tmp_path / "secret")
    (source / "linked").symlink_to(tmp_path)
    path = external(source, **{key: text.format(folder=tmp_path) for key, text in entries.items()})
    with pytest.raises(EnginesmithError, match=said) as caught:
        export.foreign.read_foreign(path)
    assert "'w'" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a model", bytes(4096), b"\x08\x08\x12\x07pytorch"])
def test_file_that_is_no_model_is_one_clear_error(tmp_path, content):
    path = tmp_path / "source.onnx"
    path.write_bytes(content)
    with pytest.raises(EnginesmithError) as caught:
        export.foreign.read_foreign(path)
    assert caught.value.key == "model.checkpoint"


def test_truncated_file_is_an_error_that_names_it(tmp_path):
    path = write(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [value("x", [4, 3])], [value("y", [4, 3])])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EnginesmithError, match=r"source\.onnx"):
        adopt(path, tmp_path, {"x": InputSettings(shape=(4, 3))})


def test_endless_loop_in_a_file_is_stopped(tmp_path, monkeypatch):
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["again"]), helper.make_node("Add", ["v", "v"], ["w"])],
        "body",
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("v", [4, 3])],
        [value("again", [], TensorProto.BOOL), value("w", [4, 3])],
    )
    path = write(
        tmp_path,
        [helper.make_node("Loop", ["", "yes", "x"], ["y"], body=body)],
        [value("x", [4, 3])],
        [value("y", [4, 3])],
        [tensor("yes", True, np.bool_)],
    )
    monkeypatch.setattr(export.foreign, "LIMITS", Limits(seconds=12))
    with pytest.raises(EnginesmithError, match="did not finish in 12 s"):
        adopt(path, tmp_path, {"x": InputSettings(shape=(4, 3))})


# --- published files -------------------------------------------------------------------------------------------------


def package_file(package, path):
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / path


def test_magika_goes_through(tmp_path):
    path = package_file("magika", "models/standard_v3_3/model.onnx")
    inputs = {"bytes": declared(2048, dtype="int32")}
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "feeds.npz", bytes=rng.integers(0, 257, (4, 2048)).astype(np.int32))
    out, report = adopt(path, tmp_path, inputs, calibration=SourceFile.of(tmp_path / "feeds.npz"))
    assert report.opset == (15, 18)
    assert report.outputs == {"target_label": ("batch", 214)}
    (finding,) = load_findings(out)
    assert (finding.rule, finding.severity) == ("numerics/layernorm-by-hand", "warning")
    assert re.search(r"largest value measured is [1-3]\.\d+e\+05", finding.message)  # far beyond 65504
    x = rng.integers(0, 257, (3, 2048)).astype(np.int32)
    expected = OnnxRunner(path).run({"bytes": x})["target_label"]
    assert np.allclose(OnnxRunner(out).run({"bytes": x})["target_label"], expected, atol=1e-6)


def test_paddle_text_classifier_goes_through(tmp_path):
    path = package_file("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    out, report = adopt(path, tmp_path, {"x": declared(3, 48, 192)}, samples=2)
    assert report.opset == (11, 18)
    (name,) = report.outputs
    x = np.random.default_rng(1).standard_normal((3, 3, 48, 192)).astype(np.float32)
    expected = OnnxRunner(path).run({"x": x})[name]
    assert np.allclose(OnnxRunner(out).run({"x": x})[name], expected, atol=1e-5)


def test_silero_with_its_if_and_lstm_goes_through(tmp_path):
    path = package_file("silero_vad", "data/silero_vad_16k_op15.onnx")
    inputs = {
        "input": declared(512),
        "state": InputSettings(shape=(2, "batch", 128), dims=BATCH),
        "sr": InputSettings(shape=(), dtype="int64"),
    }
    rng = np.random.default_rng(0)
    feeds = {
        "input": rng.standard_normal((3, 2, 512)).astype(np.float32),
        "state": rng.standard_normal((3, 2, 2, 128)).astype(np.float32),
        "sr": np.full(3, 16000),
    }
    np.savez(tmp_path / "feeds.npz", **feeds)
    out, report = adopt(path, tmp_path, inputs, calibration=SourceFile.of(tmp_path / "feeds.npz"))
    assert report.opset == (15, 18)
    assert report.outputs == {"output": ("batch", 1), "stateN": (2, "batch", 128)}
    names = [n.name for n in all_nodes(onnx.load(out / "model.onnx").graph)]
    assert all(names)
    assert len(set(names)) == len(names)


def all_nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)
