"""GELUs are found in every form, and replaced by one that differs by what its source says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.gelu import LARGEST_ERROR, by_sigmoid, cheapen, exact, find_gelus
from enginesmith.tasks.runner import OnnxRunner

FORMS = {
    "torch": (
        "r={1.4142135}, float one={1.0}, float h={0.5}",
        "a = Div(x, r) b = Erf(a) c = Add(b, one) d = Mul(x, c) z = Mul(d, h)",
    ),
    "halved-first": (
        "r={0.70710678}, float one={1.0}, float h={0.5}",
        "a = Mul(x, r) b = Erf(a) c = Add(b, one) d = Mul(x, h) z = Mul(d, c)",
    ),
    "inside": (
        "r={0.70710678}, float h={0.5}",
        "a = Mul(x, r) b = Erf(a) c = Mul(b, h) d = Add(c, h) z = Mul(d, x)",
    ),
    "tanh-pow": (
        "k={0.79788456}, float c3={0.044715}, float three={3.0}, float one={1.0}, float h={0.5}",
        (
            "p = Pow(x, three) q = Mul(p, c3) s = Add(x, q) t = Mul(s, k) b = Tanh(t) "
            "c = Add(b, one) d = Mul(x, h) z = Mul(d, c)"
        ),
    ),
    "tanh-products": (
        "k={0.79788456}, float c3={0.044715}, float one={1.0}, float h={0.5}",
        (
            "p = Mul(x, x) q = Mul(p, c3) s = Add(q, one) u = Mul(x, s) t = Mul(u, k) b = Tanh(t) "
            "c = Add(b, one) d = Mul(x, h) z = Mul(d, c)"
        ),
    ),
}


def model(constants, body):
    text = (
        f'<ir_version: 8, opset_import: ["": 20]> g (float[n, 8] x) => (float[n, 8] z) <float {constants}> {{ {body} }}'
    )
    proto = onnx.parser.parse_model(text)
    for index, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{index}"
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


@pytest.mark.parametrize("form", FORMS)
def test_written_out_form_is_found_and_replaced(form):
    given = model(*FORMS[form])
    (gelu,) = find_gelus(given)
    assert gelu.form == ("tanh" if "tanh" in form else "erf")
    assert gelu.source.name == "x"
    assert gelu.nodes == len(list(given.graph))
    made = cheapen(given, [gelu.node])
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    assert [n.op_type for n in made.graph] == ["Mul", "Sigmoid", "Mul"]
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    result = OnnxRunner(made).run({"x": x})["z"]
    assert np.abs(result - by_sigmoid(x.astype(np.float64))).max() < 1e-6
    assert [n.op_type for n in cheapen(given, []).graph] == [n.op_type for n in given.graph]


@pytest.mark.parametrize(
    ("constants", "body"),
    [
        ("one={1.0}", "s = Sigmoid(x) m = Mul(x, s) z = Mul(m, one)"),
        ("one={1.0}", "b = Tanh(x) c = Add(b, one) z = Mul(x, c)"),
        (
            "r={0.5}, float one={1.0}, float h={0.5}",
            "a = Mul(x, r) b = Erf(a) c = Add(b, one) d = Mul(x, h) z = Mul(d, c)",
        ),
    ],
    ids=["silu", "plain-tanh", "erf-of-another-scale"],
)
def test_other_activations_are_left_alone(constants, body):
    assert find_gelus(model(constants, body)) == []


def test_gelu_node_is_found():
    (gelu,) = find_gelus(model("one={1.0}", 'y = Gelu<approximate = "tanh">(x) z = Mul(y, one)'))
    assert (gelu.form, gelu.nodes) == ("tanh", 1)


def test_largest_error_is_the_one_that_is_stated():
    x = np.linspace(-8, 8, 32001)
    assert abs(np.abs(by_sigmoid(x) - exact(x)).max() - LARGEST_ERROR) < 1e-5


def test_tanh_gelus_of_a_real_model_are_found():
    spec = importlib.util.find_spec("magika")
    if spec is None:
        pytest.skip("magika is not installed")
    given = io.load(Path(spec.submodule_search_locations[0]) / "models/standard_v3_3/model.onnx")
    found = find_gelus(given)
    assert {g.form for g in found} == {"tanh"}
    assert len(found) == sum(n.op_type == "Tanh" for n in given.graph)
    made = cheapen(given, [g.node for g in found])
    assert not any(n.op_type == "Tanh" for n in made.graph)
    feed = {"bytes": np.random.default_rng(0).integers(0, 256, (4, 2048)).astype(np.int32)}
    (before,), (after,) = (OnnxRunner(m).run(feed).values() for m in (given, made))
    assert 0 < np.abs(before - after).max() < 0.5
