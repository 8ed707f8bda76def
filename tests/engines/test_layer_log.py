"""Precision is read back from the layer table that a builder prints, real or written by hand."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from enginesmith.tasks.engines.layer_log import EngineLayer, NetworkTypes, parse_layers, read_back
from enginesmith.tasks.engines.precision import Request, check_obeyed, requests
from enginesmith.tasks.engines.spec import EngineError

FIXTURES = Path(__file__).with_name("fixtures")
WEIGHTS = {"n_c0": 8 * 3 * 9, "n_c1": 16 * 8 * 9, "n_y": 160}
NOTHING = NetworkTypes({}, frozenset())


def table(precision: str) -> tuple[EngineLayer, ...]:
    return parse_layers((FIXTURES / f"tensorrt_rtx-1.7-{precision}.log").read_text())


def tensor(name: str, dims: str, kind: str) -> str:
    return f"{{ Name: {name}, Dimensions: [{dims}], Strides: [1], Datatype: {kind}, Format: Row major linear }}"


def line(name: str, kind: str, inputs: list[str], constants: list[str], outputs: list[str], metadata: str = "") -> str:
    parts = (f"{label}: [ {', '.join(items)}]" for label, items in
             (("Inputs", inputs), ("Constants", constants), ("Outputs", outputs)))  # fmt: skip
    return f"Name: {name}, LayerType: {kind}, {', '.join(parts)}, TacticName: t, StreamId: 0, Metadata: {metadata}"


def norm(node: str) -> Request:
    return Request(node, "LayerNormalization", "fp32", f"{node}_out", anchor=False)


def test_a_real_table_is_read() -> None:
    layers = table("int8")
    assert [layer.kind for layer in layers] == [
        "shape_call", "kgen", "correlation", "kgen", "correlation", "kgen", "runtime_fusion",
    ]  # fmt: skip
    first_conv = layers[2]
    assert first_conv.name == "n_c0_myl0_2"
    assert first_conv.nodes == ("n_c0", "n_x_dq", "n_w0")
    assert [(t.type, t.dims) for t in first_conv.inputs] == [("Int8", (-1, 4, 16, 16))]
    assert [(t.type, t.elements) for t in first_conv.constants] == [("Int8", 288), ("Float", 8), ("Float", 8)]


@pytest.mark.parametrize(("precision", "convs"), [("int8", ("int8", "int8")), ("mixed", ("fp16", "fp32"))])
def test_convolutions_have_the_type_of_the_weights_that_the_engine_holds(precision, convs, net) -> None:
    rows = {r.node: r for r in read_back(requests(onnx.load(net(precision))), NOTHING, table(precision), WEIGHTS)}
    assert (rows["n_c0"].actual, rows["n_c1"].actual) == convs
    assert rows["n_y"].actual == "fp32"
    assert rows["n_y"].layer == "__myl_FcAdd_myl0_6"


def test_an_int8_conv_that_the_engine_runs_in_fp16_fails(net) -> None:
    wanted = requests(onnx.load(net("int8")))
    rows = read_back(wanted, NOTHING, table("mixed"), WEIGHTS)
    assert {r.node: r.actual for r in rows}["n_c0"] == "fp16"
    with pytest.raises(EngineError, match=r"did not keep the precision of 2 node\(s\)") as caught:
        check_obeyed(rows, backend="tensorrt_rtx", variant="int8")
    assert caught.value.details[0] == "n_c0 (Conv): asked int8, has fp16 in __myl_CorrCast_myl0_2"


def test_an_int8_weight_read_by_a_float_kernel_is_not_int8() -> None:
    wanted = [Request("conv", "Conv", "int8", "c", anchor=True)]
    text = "Layers:\n" + line(
        "conv", "conv", [tensor("x", "1,3", "Half")], [tensor("w", "4,3", "Int8")], [tensor("c", "1,4", "Half")],
        "[ONNX Layer: conv]",
    )  # fmt: skip
    (row,) = read_back(wanted, NOTHING, parse_layers(text), {"conv": 12})
    assert row.actual == "fp16"


def test_two_fp32_norms_fused_into_one_fp16_layer_fail_the_build() -> None:
    """The report of a weakly typed build: one layer named "a + b", all of it FP16, although FP32 was asked for."""
    text = "Layers:\n" + line(
        "/a/LayerNorm + /b/LayerNorm", "NoOp", [tensor("x", "-1,8", "Half")], [], [tensor("y", "-1,8", "Half")]
    )
    wanted = [norm("/a/LayerNorm"), norm("/b/LayerNorm")]
    rows = read_back(wanted, NetworkTypes({"/a/LayerNorm_out": "fp32"}, frozenset()), parse_layers(text), {})
    with pytest.raises(EngineError, match=r"did not keep the precision of 2 node\(s\)") as caught:
        check_obeyed(rows, backend="tensorrt", variant="mixed")
    assert caught.value.details == (
        "/a/LayerNorm (LayerNormalization): asked fp32, has fp16 in /a/LayerNorm + /b/LayerNorm",
        "/b/LayerNorm (LayerNormalization): asked fp32, has fp16 in /a/LayerNorm + /b/LayerNorm",
    )


def test_an_fp32_norm_between_casts_of_its_own_layer_obeys() -> None:
    """Cast, norm and Cast in one kernel: FP16 at its borders says nothing about its inside."""
    text = "Layers:\n" + line(
        "k", "kgen", [tensor("x", "-1,8", "Half")], [], [tensor("y", "-1,8", "Half")],
        "[ONNX Layer: up][ONNX Layer: norm][ONNX Layer: down]",
    )  # fmt: skip
    (row,) = read_back([norm("norm")], NetworkTypes({"norm_out": "fp32"}, frozenset()), parse_layers(text), {})
    assert row.actual == "fp32"


def test_without_a_table_the_network_stands() -> None:
    wanted = [Request("conv", "Conv", "int8", "c", anchor=True), norm("norm"), norm("folded")]
    network = NetworkTypes({"c": "fp32", "norm_out": "fp16"}, frozenset({"conv"}))
    assert [row.actual for row in read_back(wanted, network, (), {"conv": 12})] == ["int8", "fp16", ""]


def test_nodes_separated_by_control_characters_are_found() -> None:
    text = "Layers:\n" + line("k", "kgen", [], [], [], "[ONNX Layer: /a/Conv]\x1e[ONNX Layer: /a/Relu[0]]")
    assert parse_layers(text)[0].nodes == ("/a/Conv", "/a/Relu[0]")


@pytest.mark.parametrize("text", ["", "Layers:\n", "no table here\nName: x"])
def test_a_log_without_a_table_has_no_layers(text: str) -> None:
    assert parse_layers(text) == ()
