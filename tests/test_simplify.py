"""Simplifying: the result is the same function with the same dimensions and about the same size, or it is not taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks import simplify
from enginesmith.tasks.child import Limits
from enginesmith.tasks.data import DATA
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import DimSettings, InputSettings, SimplifySettings
from enginesmith.tasks.simplify import simplify_graph
from enginesmith.tasks.store import Artifact, Store

BATCH = {"N": DimSettings(min=1, opt=2, max=5)}


def tensor(name, values, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(values, dtype=dtype), name)


def value(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


class Case:
    """One graph as an artifact, its inputs declared, and random data for it."""

    def __init__(self, folder: Path, nodes, inputs, outputs, initializers=(), opset=18):
        graph = helper.make_graph(
            nodes,
            "g",
            [value(n, s) for n, s in inputs.items()],
            [value(n, s) for n, s in outputs.items()],
            initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        (folder / "before").mkdir()
        (folder / "after").mkdir()
        onnx.save(model, folder / "before" / "model.onnx")
        self.out = folder / "after"
        self.model = Artifact("export", "0" * 64, folder / "before", ())
        self.inputs = {
            n: InputSettings(shape=tuple(s), dims={d: BATCH[d] for d in s if isinstance(d, str)})
            for n, s in inputs.items()
        }
        self.data = DATA(
            store=Store(folder / "store"),
            calibration=None,
            evaluation=None,
            search=None,
            files=(),
            inputs=self.inputs,
            seed=0,
            samples=2,
        )

    def run(self, **settings):
        return simplify_graph(
            self.out, model=self.model, data=self.data, inputs=self.inputs, settings=SimplifySettings(**settings)
        )

    def same(self):
        return (self.out / "model.onnx").read_bytes() == (self.model.path / "model.onnx").read_bytes()

    def outputs(self, **feeds):
        feeds = {n: np.asarray(v, dtype=np.float32) for n, v in feeds.items()}
        return OnnxRunner(self.model.path).run(feeds), OnnxRunner(self.out).run(feeds)

    def shape(self, name):
        graph = onnx.load(self.out / "model.onnx").graph
        found = next(v for v in (*graph.input, *graph.output) if v.name == name)
        return [d.dim_param or d.dim_value for d in found.type.tensor_type.shape.dim]


def node(operator, inputs, outputs, **attributes):
    return helper.make_node(operator, inputs, outputs, name=f"{operator}_{outputs[0]}", **attributes)


def conv(source, weight, output, bias=None, **attributes):
    return node("Conv", [source, weight, *([bias] if bias else [])], [output], **attributes)


RNG = np.random.default_rng(0)
IMAGE = RNG.standard_normal((3, 2, 9, 9)).astype(np.float32)


def test_scalar_expanded_to_a_million_values_does_not_grow_the_file(tmp_path):
    case = Case(
        tmp_path,
        [node("Expand", ["one", "shape"], ["wide"]), node("Add", ["x", "wide"], ["y"])],
        {"x": [1, 1000, 1000]},
        {"y": [1, 1000, 1000]},
        [tensor("one", 1.0), tensor("shape", [1000, 1000], np.int64)],
    )
    report = case.run()
    assert (case.out / "model.onnx").stat().st_size < 1000 + (1 << 20)
    assert report.attempts[0].refused == "" or report.attempts[0].refused.startswith("it grew")
    before, after = case.outputs(x=np.zeros((1, 1000, 1000)))
    assert np.array_equal(before["y"], after["y"])


def test_growth_beyond_the_limit_is_refused_and_the_original_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(simplify, "ROOM", -(1 << 40))
    case = tied(tmp_path)
    report = case.run()
    assert report.kept
    assert report.reason.startswith("it grew")
    assert [bool(a.refused) for a in report.attempts] == [True, True]
    assert case.same()


def test_reshape_that_merges_dimensions_leaves_the_batch_dynamic(tmp_path):
    case = Case(
        tmp_path,
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"]),
            node("Concat", ["n", "rest"], ["to"], axis=0),
            node("Reshape", ["x", "to"], ["y"]),
        ],
        {"x": ["N", 3, 2]},
        {"y": ["N", 6]},
        [tensor("zero", [0], np.int64), tensor("rest", [-1], np.int64)],
    )
    assert not case.run().kept
    assert (case.shape("x"), case.shape("y")) == (["N", 3, 2], ["N", 6])
    for batch in (1, 4):
        assert case.outputs(x=np.ones((batch, 3, 2)))[1]["y"].shape == (batch, 6)


def tied(folder):
    """An embedding table that is also the head: 256 kB once."""
    table = RNG.standard_normal((1000, 64)).astype(np.float32)
    return Case(
        folder,
        [
            node("Cast", ["x"], ["ids"], to=TensorProto.INT64),
            node("Gather", ["table", "ids"], ["words"]),
            node("Transpose", ["table"], ["head"], perm=[1, 0]),
            node("MatMul", ["words", "head"], ["y"]),
        ],
        {"x": ["N", 3]},
        {"y": ["N", 3, 1000]},
        [tensor("table", table)],
    )


def test_tied_weights_do_not_double_beyond_the_limit(tmp_path):
    case = tied(tmp_path)
    case.run()
    assert (case.out / "model.onnx").stat().st_size <= 1.5 * 257_606 + (1 << 20)


PADDED = {
    "constant-one": (["pads", "one"], {"mode": "constant"}, [0, 0, 1, 1, 0, 0, 1, 1]),
    "reflect": (["pads"], {"mode": "reflect"}, [0, 0, 1, 1, 0, 0, 1, 1]),
    "negative": (["pads"], {"mode": "constant"}, [0, 0, -1, -1, 0, 0, -1, -1]),
}


@pytest.mark.parametrize("name", PADDED)
def test_pad_before_a_conv_stays_exact(tmp_path, name):
    extra, attributes, pads = PADDED[name]
    case = Case(
        tmp_path,
        [node("Pad", ["x", *extra], ["p"], **attributes), conv("p", "w", "y", pads=[1, 1, 1, 1])],
        {"x": ["N", 2, 9, 9]},
        {"y": ["N", 4, None, None]},
        [
            tensor("pads", pads, np.int64),
            *([tensor("one", 1.0)] if "one" in extra else []),
            tensor("w", RNG.standard_normal((4, 2, 3, 3))),
        ],
    )
    case.run()
    before, after = case.outputs(x=IMAGE)
    assert np.allclose(before["y"], after["y"], rtol=0, atol=1e-5)


def test_pad_that_feeds_two_kernels_and_a_pool_on_negative_data_stays_exact(tmp_path):
    case = Case(
        tmp_path,
        [
            node("Pad", ["x", "pads"], ["p"]),
            conv("p", "small", "a"),
            conv("p", "large", "b"),
            node("MaxPool", ["p"], ["c"], kernel_shape=[2, 2]),
        ],
        {"x": ["N", 2, 9, 9]},
        {"a": ["N", 4, None, None], "b": ["N", 4, None, None], "c": ["N", 2, None, None]},
        [
            tensor("pads", [0, 0, 2, 2, 0, 0, 2, 2], np.int64),
            tensor("small", RNG.standard_normal((4, 2, 3, 3))),
            tensor("large", RNG.standard_normal((4, 2, 5, 5))),
        ],
    )
    case.run()
    before, after = case.outputs(x=-np.abs(IMAGE) - 1)
    assert float(after["c"].max()) == 0.0
    for name in ("a", "b", "c"):
        assert np.allclose(before[name], after[name], rtol=0, atol=1e-4)


def norm(source, output, number):
    parameters = [f"{kind}{number}" for kind in ("gamma", "beta", "mean", "var")]
    rng = np.random.default_rng(number)
    tensors = [tensor(name, rng.random(4) + 0.5) for name in parameters]
    return node("BatchNormalization", [source, *parameters], [output]), tensors


def test_conv_output_that_is_a_graph_output_stays_exact(tmp_path):
    after_conv, tensors = norm("c", "y", 1)
    case = Case(
        tmp_path,
        [conv("x", "w", "c"), after_conv],
        {"x": ["N", 2, 9, 9]},
        {"c": ["N", 4, 7, 7], "y": ["N", 4, 7, 7]},
        [tensor("w", RNG.standard_normal((4, 2, 3, 3))), *tensors],
    )
    case.run()
    before, after = case.outputs(x=IMAGE)
    for name in ("c", "y"):
        assert np.allclose(before[name], after[name], rtol=0, atol=1e-4)


def test_one_weight_in_two_convs_with_two_norms_stays_exact(tmp_path):
    first, tensors = norm("a", "y", 1)
    second, more = norm("b", "z", 2)
    case = Case(
        tmp_path,
        [conv("x", "w", "a"), first, conv("x", "w", "b", strides=[2, 2]), second],
        {"x": ["N", 2, 9, 9]},
        {"y": ["N", 4, 7, 7], "z": ["N", 4, 4, 4]},
        [tensor("w", RNG.standard_normal((4, 2, 3, 3))), *tensors, *more],
    )
    report = case.run()
    assert not report.kept
    before, after = case.outputs(x=IMAGE)
    for name in ("y", "z"):
        assert np.allclose(before[name], after[name], rtol=0, atol=1e-4)


# --- a simplifier that misbehaves ---------------------------------------------------------------------------------


MISBEHAVIOUR = {
    "crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
    "hang": ("import time; time.sleep(600)", "did not finish in 8 s"),
    "memory": ("x = bytearray(3 << 30); x[::4096] = b'1' * len(x[::4096])", "needed more than"),
    "raises": ("raise RuntimeError('no idea')", "no idea"),
    "wrong-value": ("scale(model, 1.001)", "output 'y' of the graph differs by"),
    "nan": ("scale(model, float('nan'))", "NaN"),
    "static-batch": (
        "model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2",
        "dimension N of x became 2",
    ),
    "other-opset": ("model.opset_import[0].version = 17", "the opset changed from 18 to 17"),
    "lost-output": ("del model.graph.output[1]", "the outputs changed"),
    "invalid": ("model.graph.node[0].op_type = 'Nonsense'", ""),
}

FAKE = """
import onnx
from onnx import numpy_helper

def scale(model, factor):
    for tensor in model.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * factor, "w"))

def simplify(model, **options):
    {body}
    return model, True
"""


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaving_simplifier_leaves_the_original_and_the_reason(tmp_path, monkeypatch, name):
    body, said = MISBEHAVIOUR[name]
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "onnxsim.py").write_text(FAKE.format(body=body))
    monkeypatch.setenv("PYTHONPATH", str(fake))
    monkeypatch.setattr(simplify, "LIMITS", Limits(seconds=8, memory=1 << 30))
    case = Case(
        tmp_path,
        [node("MatMul", ["x", "w"], ["y"]), node("Relu", ["y"], ["z"])],
        {"x": ["N", 4]},
        {"y": ["N", 4], "z": ["N", 4]},
        [tensor("w", np.eye(4))],
    )
    report = case.run()
    assert report.kept
    assert said in report.reason
    assert case.same()


def test_switched_off_keeps_the_original(tmp_path):
    case = tied(tmp_path)
    report = case.run(enabled=False)
    assert (report.kept, report.reason, report.attempts) == (True, "switched off in the settings", ())
    assert case.same()


# --- the form of the result ---------------------------------------------------------------------------------------


def test_result_has_unique_names_origins_and_nothing_dead(tmp_path):
    origin = {"enginesmith.module": "head", "enginesmith.source": "net.py:3"}
    product = node("MatMul", ["x", "w"], ["m"])
    product.name = "head/MatMul"
    for key, text in origin.items():
        product.metadata_props.add(key=key, value=text)
    case = Case(
        tmp_path,
        [product, node("Identity", ["m"], ["i"]), node("Identity", ["i"], ["j"]), node("Relu", ["j"], ["y"])],
        {"x": ["N", 4]},
        {"y": ["N", 4]},
        [tensor("w", np.eye(4)), tensor("unused", np.ones(1000))],
    )
    assert not case.run().kept
    graph = onnx.load(case.out / "model.onnx").graph
    assert [n.op_type for n in graph.node] == ["MatMul", "Relu"]
    assert graph.node[0].name == "head/MatMul"
    assert {p.key: p.value for p in graph.node[0].metadata_props} == origin
    assert [i.name for i in graph.initializer] == ["w"]


def test_same_graph_gives_the_same_bytes(tmp_path):
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        case = Case(
            tmp_path / name,
            [conv("x", "w", "c"), norm("c", "y", 1)[0]],
            {"x": ["N", 2, 9, 9]},
            {"y": ["N", 4, 7, 7]},
            [tensor("w", np.ones((4, 2, 3, 3))), *norm("c", "y", 1)[1]],
        )
        case.run()
        written.append((case.out / "model.onnx").read_bytes())
    assert written[0] == written[1]
