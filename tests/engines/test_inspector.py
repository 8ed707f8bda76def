"""What TensorRT's inspector says of an engine, mapped back to the graph's nodes. The reports here are hand-written."""

from __future__ import annotations

import json

import pytest

from enginesmith.tasks.engines.inspector import parse_inspector, read_back
from enginesmith.tasks.engines.precision import Request, check_obeyed
from enginesmith.tasks.engines.spec import EngineError

FP16 = "Channel major FP16 format where channel % 8 == 0"
FP32 = "Row major linear FP32"
INT8 = "Thirty-two wide channel vectorized row major Int8 format"


def report(name: str, inputs: str, output: str, *, result: str = "t", **fields: object) -> str:
    layer = {
        "Name": name,
        "LayerType": "CaskConvolution",
        "Inputs": [{"Name": "x", "Format/Datatype": inputs}],
        "Outputs": [{"Name": result, "Format/Datatype": output}],
        **fields,
    }
    return json.dumps({"Layers": [layer]})


def found(text: str, *wanted: Request, order: tuple[str, ...] = ()) -> dict[str, str]:
    layers = parse_inspector(text, order or [request.node for request in wanted])
    return {row.node: row.actual for row in read_back(wanted, layers)}


def conv(node: str, precision: str) -> Request:
    return Request(node, "Conv", precision, f"{node}_out", anchor=True)


def other(node: str, precision: str, op: str = "Relu") -> Request:
    return Request(node, op, precision, f"{node}_out", anchor=False)


def test_two_fp32_norms_fused_into_one_fp16_layer_fail_the_build() -> None:
    wanted = [other(name, "fp32", "LayerNormalization") for name in ("a", "b")]
    rows = read_back(wanted, parse_inspector(report("a + b", FP16, FP16), ["a", "b"]))
    assert [(row.node, row.actual, row.layer) for row in rows] == [("a", "fp16", "a + b"), ("b", "fp16", "a + b")]
    with pytest.raises(EngineError, match=r"did not keep the precision of 2 node\(s\)") as caught:
        check_obeyed(rows, backend="tensorrt", variant="mixed")
    assert caught.value.details[0] == "a (LayerNormalization): asked fp32, has fp16 in a + b"


def test_a_conv_is_known_by_its_weights_although_a_cast_is_fused_behind_it() -> None:
    text = report("c + cast", FP16, FP32, Weights={"Type": "Half", "Count": 9})
    assert found(text, conv("c", "fp16"), order=("c", "cast")) == {"c": "fp16"}


def test_int8_weights_behind_a_float_input_are_not_int8() -> None:
    text = report("c", FP16, FP16, Weights={"Type": "Int8", "Count": 9})
    assert found(text, conv("c", "int8")) == {"c": "fp16"}
    text = report("c", INT8, FP16, Weights={"Type": "Int8", "Count": 9})
    assert found(text, conv("c", "int8")) == {"c": "int8"}


def test_what_is_fused_in_the_middle_is_unseen() -> None:
    text = report("c + r + s", FP16, FP16, Weights={"Type": "Half", "Count": 9})
    assert found(text, conv("c", "fp16"), other("r", "fp16"), other("s", "fp16")) == {
        "c": "fp16",
        "r": "",
        "s": "fp16",
    }


def test_inside_a_foreign_node_nothing_is_seen() -> None:
    text = report("{ForeignNode[a...c]}", FP32, FP32)
    wanted = [other(name, "fp16") for name in "abc"]
    assert found(text, *wanted) == {"a": "", "b": "", "c": ""}
    assert parse_inspector(text, ["a", "b", "c"])[0].nodes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("PWN(a, b)", ""),
        ("PWN(PWN(a), b)", ""),
        ("a || b", ""),
        ("anything", "[ONNX Layer: a]\x1e[ONNX Layer: b]"),
    ],
)
def test_fused_names_are_mapped_back(name, metadata) -> None:
    assert parse_inspector(report(name, FP16, FP16, Metadata=metadata), ["a", "b"])[0].nodes == ("a", "b")


def test_raw_control_characters_as_8_6_writes_them_are_read() -> None:
    text = report("a", FP16, FP16, Metadata="SEPARATOR").replace("SEPARATOR", "[ONNX Layer: a]\x1e")
    with pytest.raises(ValueError, match="control character"):
        json.loads(text)
    assert parse_inspector(text, ["a"])[0].nodes == ("a",)


@pytest.mark.parametrize("text", ["", "[]", '{"Layers": 3}', '{"Layers": ["a"]}'])
def test_a_report_without_details_is_an_error(text) -> None:
    with pytest.raises(EngineError, match="inspector"):
        parse_inspector(text, ["a"])
