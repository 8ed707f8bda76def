"""What the rules on graphs report, and what they let pass, each against a value that was worked out by hand."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.cost import costs
from enginesmith.tasks.firewalls.gpus import GPUS, find_gpu
from enginesmith.tasks.firewalls.graph_rules import graph_findings
from enginesmith.tasks.firewalls.hardware import check_hardware
from enginesmith.tasks.firewalls.integers import check_integers
from enginesmith.tasks.firewalls.numerics import check_numerics
from enginesmith.tasks.firewalls.profiles import buckets
from enginesmith.tasks.firewalls.sized import Sizer
from enginesmith.tasks.firewalls.subgraphs import check_subgraphs
from enginesmith.tasks.firewalls.support import VERSIONS, check_support, load_table
from enginesmith.tasks.firewalls.tables import generate
from enginesmith.tasks.graph import io
from enginesmith.tasks.settings import DimSettings, InputSettings


def model(text, opset=18):
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def declared(*shape, **dims):
    ranges = {name: DimSettings(min=a, opt=b, max=c) for name, (a, b, c) in dims.items()}
    return {"x": InputSettings(shape=shape, dims=ranges)}


def rules(findings):
    return [f.rule for f in findings]


def package_file(package, path):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / path


# --- sizes and profiles ----------------------------------------------------------------------------------------------

FOURS = "g (float[batch, 4] x) => (float[n, 16] z) <int64[2] s = {-1, 16}> { z = Reshape(x, s) }"


def test_batch_that_must_be_a_multiple_of_four_is_said_so():
    (finding,) = graph_findings(model(FOURS), declared("batch", 4, batch=(4, 8, 12)))
    assert (finding.rule, finding.severity, finding.node) == ("shape/size-refused", "warning", "Reshape_0")
    assert "batch = 9" in finding.message
    assert "batch must be a multiple of 4" in finding.message


def test_declared_minimum_that_cannot_run_blocks():
    (finding,) = graph_findings(model(FOURS), declared("batch", 4, batch=(1, 8, 12)))
    assert finding.severity == "error"
    assert "batch = 1" in finding.message


def test_icalabel_takes_multiples_of_four_only():
    file = package_file("mne_icalabel", "iclabel/network/assets/ICLabelNet.onnx")
    given = io.load(file)
    inputs = {
        str(v.name): InputSettings(shape=("batch", *v.shape[1:]), dims={"batch": DimSettings(min=4, opt=8, max=32)})
        for v in given.graph.inputs
    }
    (finding,) = [f for f in graph_findings(given, inputs) if f.rule == "shape/size-refused"]
    assert "batch must be a multiple of 4" in finding.message


@pytest.mark.parametrize(
    "text",
    [
        "g (float[time, 4] x) => (float[time, 4] z) <int64[2] s = {3, 4}> { z = Reshape(x, s) }",
        (
            "g (float[time, 4] x) => (float[time, 4] z) <int64[2] s = {3, 4}, float[1, 1] o = {1.0}> "
            "{ e = Expand(o, s) z = Add(x, e) }"
        ),
        (
            "g (float[time, 4] x) => (float[time, 4] z) "
            "<float[3, 4] p = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 1.0, 2.0, 3.0}> { z = Add(x, p) }"
        ),
        (
            "g (float[time, 4] x) => (float[time, 4] z) <int64 a={0}, int64 n={3}, int64 d={1}, int64[2] s={-1, 1}>"
            "{ r = Range(a, n, d) f = Cast<to = 1>(r) c = Reshape(f, s) z = Add(x, c) }"
        ),
        "g (float[time, 4] x) => (float[time, 4] z) <int64[2] s = {3, 4}> {o = ConstantOfShape(s) z = Add(x, o)}",
        (
            "g (float[time, 4] x) => (float[time, 4] z) <int64[1] a = {0}, int64[1] e = {3}> "
            "{ y = Slice(x, a, e, a) z = Add(x, y) }"
        ),
    ],
    ids=["reshape", "expand", "position-table", "range", "constant-of-shape", "slice"],
)
def test_size_of_the_export_that_was_written_into_the_graph_is_found(text):
    """At time 3 all of them run and at time 6 none; a Slice of three rows takes fewer."""
    (finding,) = [
        f for f in graph_findings(model(text), declared("time", 4, time=(2, 3, 6))) if f.rule == "shape/size-refused"
    ]
    assert finding.severity == "error"
    assert finding.message.endswith(("these run: 3", "these run: 2, 3"))
    assert graph_findings(model(text), declared(3, 4)) == []


@pytest.mark.parametrize(
    "text",
    [
        "g (float[time, 4] x) => (float[time, 4] z) { z = Relu(x) }",
        (
            "g (float[time, 4] x) => (float[n] z) { s = Shape(x) o = ConstantOfShape(s) y = Add(x, o) "
            "f = Flatten<axis = 0>(y) z = Squeeze(f) }"
        ),
        "g (float[time, 4] x) => (float[1, 4] z) <int64[1] a = {0}, int64[1] e = {1}> { z = Slice(x, a, e, a) }",
    ],
    ids=["free", "computed-from-the-shape", "first-row"],
)
def test_sizes_that_the_graph_follows_are_not_reported(text):
    assert graph_findings(model(text), declared("time", 4, time=(1, 3, 12))) == []


def test_wide_range_is_cut_into_ranges_of_ratio_four_at_most():
    (finding,) = graph_findings(
        model("g (float[1, n] x) => (float[1, n] z) { z = Relu(x) }"), declared(1, "n", n=(32, 320, 1280))
    )
    assert (finding.rule, finding.severity) == ("shape/wide-profile", "advice")
    assert finding.hint.endswith("32 to 112, 113 to 376, 377 to 1280")
    assert buckets(DimSettings(min=1, opt=2, max=4)) == [(1, 4)]
    for first, last in ((1, 1000), (8, 8), (224, 4096), (3, 49)):
        cut = buckets(DimSettings(min=first, opt=first, max=last))
        assert (cut[0][0], cut[-1][1]) == (first, last)
        assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(cut))


# --- integers: the cases of a Slice's end, a sum and an index ---------------------------------------------------------

BIG = 2**40


def test_slice_end_beyond_int32_is_harmless():
    text = (
        "g (int64[n, 4] x) => (int64[n, m] z) <int64[1] a = {1}, int64[1] e = {9223372036854775807}, int64[1] k = {1}>"
        "{ z = Slice(x, a, e, k) }"
    )
    assert list(check_integers(model(text))) == []


def test_adding_beyond_int32_is_not():
    (finding,) = check_integers(model(f"g (int64[n] x) => (int64[n] z) <int64 b = {{{BIG}}}> {{ z = Add(x, b) }}"))
    assert (finding.rule, finding.backend) == ("operators/int64-range", "tensorrt")
    assert str(BIG) in finding.message
    assert str(2**31 - 1) in finding.effect


@pytest.mark.parametrize(
    ("value", "to", "severity", "becomes"),
    [(70001, 10, "warning", "inf"), (2049, 10, "warning", "2048"), (2**24 + 1, 1, "warning", "1.67772e+07")],
)
def test_index_that_a_float_does_not_hold_is_found(value, to, severity, becomes):
    body = f"{{ c = Cast<to = {to}>(i) f = Cast<to = 1>(c) z = Add(x, f) }}"
    text = f"g (float[n] x) => (float[n] z) <int64 i = {{{value}}}> {body}"
    (finding,) = check_integers(model(text))
    assert (finding.rule, finding.severity) == ("numerics/integer-as-float", severity)
    assert f"the integer {value} is {becomes} in FLOAT" in finding.message


def test_index_70001_matters_to_fp16_only_when_it_is_cast_to_float():
    text = "g (float[n] x) => (float[n] z) <int64 i = {70001}> { f = Cast<to = 1>(i) z = Add(x, f) }"
    (finding,) = check_integers(model(text))
    assert (finding.severity, finding.rule) == ("advice", "numerics/integer-as-float")
    as_index = "g (float[80000] x) => (float z) <int64 i = {70001}> { z = Gather(x, i) }"
    assert list(check_integers(model(as_index))) == []


# --- control flow ----------------------------------------------------------------------------------------------------


def test_branches_of_other_ranks_are_found_and_those_of_a_rank_test_are_not():
    branches = (
        "<then_branch = a () => (float[n, 4] y) { y = Relu(x) }, "
        "else_branch = b () => (float[n] w) { w = ReduceSum<keepdims = 0>(x, axis) }>"
    )
    head = "g (float[n, 4] x) => (float z) <int64[1] axis = {1}, float limit = {0.0}, int64 four = {4}> "
    by_value = head + "{ t = ReduceMax<keepdims = 0>(x) c = Greater(t, limit) y = If(c) " + branches
    by_rank = head + "{ t = Size(x) c = Equal(t, four) y = If(c) " + branches
    tail = " z = ReduceMax<keepdims = 0>(y) }"
    assert rules(check_subgraphs(model(by_value + tail), ["tensorrt"])) == ["control-flow/branches-differ"]
    assert rules(check_subgraphs(model(by_value + tail), ["onnxruntime"])) == []
    assert rules(check_subgraphs(model(by_rank + tail), ["tensorrt"])) == []


# --- tables ----------------------------------------------------------------------------------------------------------


def test_tables_say_where_they_come_from():
    for version in VERSIONS:
        table = load_table(version)
        assert (table.version, len(table.commit)) == (version, 40)
        assert table.commit in table.sources[0]
    assert [load_table(v).opset for v in VERSIONS] == [17, 24, 25]
    assert all("Unique" in load_table(v).unsupported for v in VERSIONS)
    assert ["DFT" in load_table(v).operators for v in VERSIONS] == [False, False, True]
    assert ["NonZero" in load_table(v).operators for v in VERSIONS] == [True, True, True]


def test_a_matrix_is_read_into_types_limits_and_what_is_missing():
    text = """TensorRT 9 supports operators up to Opset 17.
## Operator Support Matrix
| Operator | Supported | Supported Types | Restrictions |
|---|---|---|---|
| Abs | Y | FP32, INT32 |
| Det | N |
| TopK | Y | FP32 | `sorted` must be 1.
"""
    opset, operators, missing = generate.parse(text)
    assert (opset, missing) == (17, ["Det"])
    assert operators == {
        "Abs": {"types": ["FP32", "INT32"]},
        "TopK": {"types": ["FP32"], "limits": ["attribute:sorted=1"]},
    }


@pytest.mark.parametrize(
    ("text", "said", "severity"),
    [
        ("g (float[4] x) => (int64[m] z) { v, i, j, c = Unique(x) z = Identity(i) }", "8.6, 10, 11", "error"),
        ("g (float[1,8,8,1] x) => (float[1,m,8,2] z) { z = DFT<axis = 1>(x) }", "8.6, 10 does not", "warning"),
        (
            (
                "g (float[1,1,4,4] x) => (float[1,1,8,8] z) <float[4] s = {1.0, 1.0, 2.0, 2.0}> "
                '{ z = Resize<mode = "cubic">(x, , s) }'
            ),
            "with mode = cubic",
            "error",
        ),
        (
            "g (float[9] x) => (float[3] z) <int64[1] k = {3}> { z, i = TopK<sorted = 0>(x, k) }",
            "sorted = 0",
            "warning",
        ),
        (
            (
                "g (float[1,1,4,4] x) => (float[1,1,2,2] z) { z, i = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x) "
                "j = Identity(i) }"
            ),
            "",
            "",
        ),
        (
            "g (float[1,2,2,2,2,2] x, float[1,3,3,3,3,4] y) => (float[1,2,3,3,3,3] z) { z = GridSample(x, y) }",
            "6 dim",
            "",
        ),
    ],
    ids=["operator", "newer-release", "attribute", "limit", "indices", "rank"],
)
def test_what_a_release_does_not_support_is_found(text, said, severity):
    found = list(check_support(model(text)))
    if severity:
        (finding,) = found
        assert (finding.rule, finding.severity, finding.backend) == ("operators/unsupported", severity, "tensorrt")
        assert said in finding.message
    else:
        assert all(said in f.message for f in found)


def test_ordinary_graph_is_supported_everywhere():
    text = (
        "g (float[n,3,8,8] x, float[3,3,3,3] w) => (float[n,3,16,16] z) <float[4] s = {1.0, 1.0, 2.0, 2.0}> "
        '{ y = Conv<pads = [1,1,1,1]>(x, w) r = Relu(y) z = Resize<mode = "linear">(r, , s) }'
    )
    assert list(check_support(model(text))) == []


# --- FP16 ------------------------------------------------------------------------------------------------------------


def numerics(text, ranges=None):
    given = model(text)
    return list(check_numerics(given, Sizer(given, declared("n", 4, n=(1, 2, 4))).at({"n": 2}), ranges))


def test_mean_at_which_a_long_sum_overflows_is_said():
    """65504 / (64 · 64) = 15.99."""
    given = model("g (float[1,64,64] x) => (float[1] z) <int64[2] a = {1, 2}> { z = ReduceSum<keepdims = 0>(x, a) }")
    inputs = {"x": InputSettings(shape=(1, 64, 64))}
    (finding,) = graph_findings(given, inputs)
    assert finding.rule == "numerics/sum-overflow"
    assert "a mean of 16 overflows" in finding.message


def test_measured_overflow_turns_advice_into_a_warning_with_the_figure():
    text = "g (float[n,4] x) => (float[n,4] z) { z = Exp(x) }"
    assert [f.severity for f in numerics(text)] == ["advice"]
    (finding,) = numerics(text, {"z": 1.2e5})
    assert (finding.severity, finding.rule) == ("warning", "numerics/exp-overflow")
    assert "1.2e+05" in finding.message
    assert numerics(text, {"z": 100.0}) == []


def test_overflow_that_no_other_rule_explains_is_reported_when_measured():
    text = "g (float[n,4] x) => (float[n,4] z) { z = Relu(x) }"
    assert rules(numerics(text, {"z": 1e5})) == ["numerics/overflow-measured"]
    assert numerics(text, {"z": 6e4}) == []


@pytest.mark.parametrize(
    ("constant", "op", "found"),
    [("-1000000000.0", "Add", True), ("-10000.0", "Add", False), ("0.000000000001", "Add", False)],
)
def test_constants_that_fp16_does_not_hold(constant, op, found):
    text = f"g (float[n,4] x) => (float[n,4] z) <float c = {{{constant}}}> {{ z = {op}(x, c) }}"
    assert (rules(numerics(text)) == ["numerics/constant-range"]) == found


def test_epsilon_below_the_smallest_fp16_number_is_zero_there():
    text = "g (float[n,4] x) => (float[n,4] z) <float c = {0.000000000001}> { y = Add(x, c) z = Div(x, y) }"
    (finding,) = numerics(text)
    assert finding.message == "the constant 1e-12 is 0 in FP16"


def test_infinity_and_clip_bounds_are_not_reported():
    text = "g (float[n,4] x) => (float[n,4] z) <float a = {-100000.0}, float b = {100000.0}> { z = Clip(x, a, b) }"
    assert numerics(text) == []


# --- cost and hardware -----------------------------------------------------------------------------------------------


def one_cost(text, **shapes):
    given = model(text)
    inputs = {name: InputSettings(shape=shape) for name, shape in shapes.items()}
    (cost,) = costs(given, Sizer(given, inputs).at({}))
    return cost


def test_flops_are_those_of_the_closed_forms():
    conv = one_cost(
        "g (float[1,8,16,16] x, float[12,4,3,3] w) => (float[1,12,14,14] z) { z = Conv<group = 2>(x, w) }",
        x=(1, 8, 16, 16),
        w=(12, 4, 3, 3),
    )
    assert conv.flops == 2 * 12 * 14 * 14 * 4 * 9
    assert conv.elements == 8 * 256 + 12 * 196 + 12 * 4 * 9
    up = one_cost(
        "g (float[1,8,5,5] x, float[8,6,3,3] w) => (float[1,6,11,11] z) { z = ConvTranspose<strides = [2,2]>(x, w) }",
        x=(1, 8, 5, 5),
        w=(8, 6, 3, 3),
    )
    assert up.flops == 2 * 8 * 25 * 6 * 9
    product = one_cost(
        "g (float[3,5,7] x, float[7,11] w) => (float[3,5,11] z) { z = MatMul(x, w) }", x=(3, 5, 7), w=(7, 11)
    )
    assert product.flops == 2 * 3 * 5 * 7 * 11
    assert product.intensity(2) == 2 * 3 * 5 * 7 * 11 / (2 * (105 + 77 + 165))


def test_flops_of_a_real_model_are_those_that_torch_counts(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
        torch.nn.Conv2d(16, 24, 1),
        torch.nn.ConvTranspose2d(24, 8, 4, stride=2, padding=1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    ).eval()
    x = torch.zeros(2, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        net(x)
    torch.onnx.export(net, (x,), tmp_path / "m.onnx", dynamo=False, input_names=["x"])
    given = io.load(tmp_path / "m.onnx")
    sized = Sizer(given, {"x": InputSettings(shape=(2, 3, 32, 32))}).at({})
    ours = sum(c.flops for c in costs(given, sized) if c.node.op_type in ("Conv", "ConvTranspose", "Gemm"))
    assert ours == counter.get_total_flops()


def hardware(text, shape, gpu="l4"):
    given = model(text)
    return list(check_hardware(given, Sizer(given, {"x": InputSettings(shape=shape)}).at({}), find_gpu(gpu)))


@pytest.mark.parametrize(("channels", "waste"), [(65, True), (64, False)])
def test_channels_beyond_a_tile_are_advice_with_their_share(channels, waste):
    weight = np.zeros((channels, channels, 3, 3), np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Relu", ["x"], ["a"], name="before"),
            onnx.helper.make_node("Conv", ["a", "w"], ["y"], name="conv", pads=[1, 1, 1, 1]),
            onnx.helper.make_node("Relu", ["y"], ["z"], name="after"),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [8, channels, 112, 112])],
        [onnx.helper.make_tensor_value_info("z", 1, None)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    given = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]))
    sized = Sizer(given, {"x": InputSettings(shape=(8, channels, 112, 112))}).at({})
    found = list(check_hardware(given, sized, GPUS["t4"]))
    assert rules(found) == (["hardware/tile-waste"] if waste else [])
    if waste:  # 1 - (65/72)² = 18.5 %
        assert "conv 65x65 wastes 18%" in found[0].message
        assert found[0].severity == "advice"


def test_depthwise_convolution_is_bound_by_memory_and_a_chain_of_small_nodes_by_launches():
    weight = np.zeros((64, 1, 3, 3), np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Conv", ["x", "w"], ["z"], name="deep", group=64, pads=[1, 1, 1, 1])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [1, 64, 112, 112])],
        [onnx.helper.make_tensor_value_info("z", 1, None)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    given = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]))
    sized = Sizer(given, {"x": InputSettings(shape=(1, 64, 112, 112))}).at({})
    (finding,) = check_hardware(given, sized, GPUS["l4"])
    assert finding.rule == "hardware/memory-bound"
    assert "4.5 FLOP per byte, l4 needs 403" in finding.message  # 18·n / 2·2·n, and 121e12 / 300e9
    chain = " ".join(f"y{i + 1} = Relu(y{i})" for i in range(29))
    text = f"g (float[1,4] x) => (float[1,4] z) {{ y0 = Relu(x) {chain} z = Relu(y29) }}"
    assert rules(hardware(text, (1, 4))) == ["hardware/launch-bound"]
    large = text.replace("[1,4]", "[16384,4096]")
    assert rules(hardware(large, (16384, 4096))) == []


def test_gelu_in_nine_nodes_is_advice_on_a_real_model():
    given = io.load(package_file("magika", "models/standard_v3_3/model.onnx"))
    inputs = {
        "bytes": InputSettings(shape=("batch", 2048), dtype="int32", dims={"batch": DimSettings(min=1, opt=64, max=64)})
    }
    found = {f.rule: f for f in graph_findings(given, inputs, gpu=GPUS["l4"])}
    assert "2 GELU(s) are written out as 9 nodes each" in found["hardware/expensive-activation"].message
    assert "0.0203" in found["hardware/expensive-activation"].message
    assert "2 normalisation(s)" in found["numerics/layernorm-by-hand"].message


def test_gpu_is_found_by_how_people_write_it():
    assert find_gpu("NVIDIA H200").fp16 == 989
    assert find_gpu("RTX 4090").bandwidth == 1008
    with pytest.raises(EnginesmithError, match="no GPU 'h20'"):
        find_gpu("h20")


def test_roofline_is_the_larger_of_arithmetic_and_memory():
    gpu = GPUS["h200"]
    assert gpu.seconds(989e12, 1) == 1.0
    assert gpu.seconds(1, 4.8e12) == 1.0


# --- real models -----------------------------------------------------------------------------------------------------


def test_rules_are_fast_and_quiet_on_a_real_model():
    file = package_file("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    inputs = {"x": InputSettings(shape=("batch", 3, 48, 192), dims={"batch": DimSettings(min=1, opt=4, max=16)})}
    given = io.load(file)
    before = time.process_time()
    assert graph_findings(given, inputs, ["onnxruntime", "tensorrt"]) == []
    assert time.process_time() - before < 10  # a bound for any machine; 0.15 s where it was written


def test_tables_are_json_in_one_form():
    folder = Path(generate.__file__).parent
    for version in VERSIONS:
        table = json.loads((folder / f"tensorrt-{version}.json").read_text())
        assert list(table) == ["version", "sources", "commit", "date", "opset", "operators", "unsupported"]
