"""Export: what passes the firewalls computes what PyTorch computes; what they block is wrong."""

from __future__ import annotations

import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from enginesmith.tasks.data import DATA, Dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export import EXPORT, judge_module
from enginesmith.tasks.export.judge import Judgement
from enginesmith.tasks.firewalls.findings import BlockedError, load_findings, refused_backends
from enginesmith.tasks.fold import FOLD
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import DimSettings, ExportSettings, FoldSettings, InputSettings
from enginesmith.tasks.slim import SLIM, checkpoint_source
from enginesmith.tasks.store import Store
from enginesmith.tasks.usercode import UserCode, importable

HERE = Path(__file__).parent
BATCH = {"batch": DimSettings(min=1, opt=2, max=5)}


class Net(nn.Module):
    """Layers by name, and a forward pass given as a function of the module and its input."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def declared(*shape, dtype="float32", **dims):
    return InputSettings(shape=("batch", *shape), dtype=dtype, dims={**BATCH, **dims})


def dataset(inputs, seed=0):
    """Eight samples of standard normal values (integers: 0 to 9) at opt."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, given in inputs.items():
        shape = tuple(d if isinstance(d, int) else given.dims[d].opt for d in given.shape[1:])
        values = rng.integers(0, 10, (8, *shape)) if "int" in given.dtype else rng.standard_normal((8, *shape))
        arrays[name] = values.astype(given.dtype)
    return Dataset(arrays, None, True, 1, 2, 5)


def judge(module, folder, inputs=None, *, backends=(), **settings) -> Judgement:
    inputs = inputs or {"x": declared(4)}
    return judge_module(
        module.eval(), dataset(inputs), inputs, ExportSettings(**settings), backends, folder, roots=(HERE,)
    )


def rules(judgement):
    return [f.rule for f in judgement.findings if f.severity == "error" and not f.backend]


def run(folder, **feeds: Any):
    return OnnxRunner(folder / "model.onnx").run({n: np.asarray(v, dtype=np.float32) for n, v in feeds.items()})


# --- values ----------------------------------------------------------------------------------------------------------


def test_maximum_read_as_a_number_stays_a_function_of_the_input(tmp_path):
    assert rules(judge(Net(lambda _, x: x / x.max().item()), tmp_path)) == []
    assert np.allclose(run(tmp_path, x=[[1, 2, 3, 4]])["output"], [[0.25, 0.5, 0.75, 1.0]])
    assert np.allclose(run(tmp_path, x=[[10, 20, 30, 40]])["output"], [[0.25, 0.5, 0.75, 1.0]])


def test_unused_input_shifts_no_other(tmp_path):
    class Difference(nn.Module):
        def forward(self, a, b, c):
            return a - 2 * c

    inputs = {"a": declared(2), "b": declared(2), "c": declared(2)}
    judgement = judge(Difference(), tmp_path, inputs)
    assert [(f.rule, f.severity) for f in judgement.findings] == [("shape/input-unused", "warning")]
    assert np.array_equal(run(tmp_path, a=[[5, 6]], b=[[9, 9]], c=[[1, 2]])["output"], [[3, 2]])


def test_unused_input_that_the_legacy_exporter_drops_is_blocked(tmp_path):
    class Difference(nn.Module):
        def forward(self, a, b, c):
            return a - 2 * c

    inputs = {"a": declared(2), "b": declared(2), "c": declared(2)}
    judgement = judge(Difference(), tmp_path, inputs, exporter="legacy")
    assert rules(judgement) == ["shape/input-gone"]
    assert "'b'" in judgement.findings[0].message


def test_inputs_declared_in_another_order_are_bound_by_name(tmp_path):
    class Difference(nn.Module):
        def forward(self, a, b):
            return a - b

    assert rules(judge(Difference(), tmp_path, {"b": declared(2), "a": declared(2)})) == []
    assert np.array_equal(run(tmp_path, b=[[1, 2]], a=[[5, 5]])["output"], [[4, 3]])


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a", "z"), "no parameter z"), (("a",), "needs b, which is not declared"), (("y", "z"), "no parameter y, z")],
)
def test_inputs_that_forward_does_not_have_are_refused(tmp_path, names, said):
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b

    with pytest.raises(EnginesmithError, match=said):
        judge(Two(), tmp_path, {name: declared(2) for name in names})


def test_single_input_may_have_a_name_of_its_own(tmp_path):
    judge(Net(lambda _, x: x + 1), tmp_path, {"image": declared(3)})
    assert np.array_equal(run(tmp_path, image=[[1, 2, 3]])["output"], [[2, 3, 4]])


def test_dimension_of_one_name_must_have_one_range(tmp_path):
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b

    other = InputSettings(shape=("batch", 2), dims={"batch": DimSettings(min=1, opt=2, max=9)})
    with pytest.raises(EnginesmithError, match="another range"):
        judge(Two(), tmp_path, {"a": declared(2), "b": other})


EXACT = {
    "bicubic-antialias": (
        lambda _, x: functional.interpolate(x, size=(3, 5), mode="bicubic", antialias=True),
        (2, 7, 9),
    ),
    "average-pool-ceil-padded": (
        lambda _, x: functional.avg_pool2d(x, 4, 3, 1, ceil_mode=True, count_include_pad=True),
        (1, 7, 9),
    ),
    "grid-sample-beyond-the-border": (
        lambda _, x: functional.grid_sample(
            x, torch.linspace(-1.2, 1.2, 24).reshape(1, 3, 4, 2).expand(x.shape[0], 3, 4, 2), align_corners=False
        ),
        (1, 7, 9),
    ),
    "adaptive-pool-uneven": (lambda _, x: functional.adaptive_avg_pool2d(x, 3), (1, 5, 7)),
    "rfft": (lambda _, x: torch.fft.rfft(x).abs(), (16,)),
}


@pytest.mark.parametrize("name", EXACT)
def test_operation_that_exporters_get_wrong_is_exact_to_1e5_of_its_range(tmp_path, name):
    forward, shape = EXACT[name]
    judgement = judge(Net(forward), tmp_path, {"x": declared(*shape)}, tolerance=1e-5)
    assert rules(judgement) == []
    assert judgement.errors["output"] <= 1e-5


def test_padded_average_pool_with_ceil_mode_counts_as_pytorch_counts(tmp_path):
    """Ones: places of each 4x4 window inside the image over those inside the padded image, 9 rows by 11 columns."""
    judge(Net(EXACT["average-pool-ceil-padded"][0]), tmp_path, {"x": declared(1, 7, 9)})
    rows, columns = np.arange(-1, 7, 3), np.arange(-1, 9, 3)
    expected = [
        [
            np.sum([0 <= r < 7 for r in range(top, top + 4)])
            * np.sum([0 <= c < 9 for c in range(left, left + 4)])
            / ((min(top + 4, 8) - top) * (min(left + 4, 10) - left))
            for left in columns
        ]
        for top in rows
    ]
    found = run(tmp_path, x=np.ones((1, 1, 7, 9)))["output"][0, 0]
    assert np.allclose(found, expected, atol=1e-6)


def test_random_module_is_blocked(tmp_path):
    judgement = judge(Net(lambda _, x: functional.dropout(x, 0.5, training=True)), tmp_path)
    assert rules(judgement) == ["shape/random"]


# --- control flow ----------------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def forward(self, x):
        if x.mean() > 0:  # the finding's line
            return x * 2
        return x - 10


class Loop(nn.Module):
    def forward(self, x):
        total = x[:, 0] * 0
        for step in range(x.shape[1]):  # the finding's line
            total = total + x[:, step]
        return total


def line_of(name):
    text = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(text) if line.startswith(f"class {name}("))
    return next(i + 1 for i in range(start, len(text)) if "# the finding's line" in text[i])


@pytest.mark.parametrize("exporter", ["auto", "dynamo"])
def test_branch_on_a_tensors_value_is_blocked_at_its_line(tmp_path, exporter):
    finding = judge(Branch(), tmp_path, exporter=exporter).findings[0]
    assert (finding.rule, finding.severity) == ("control-flow/data-dependent", "error")
    assert (finding.file, finding.line) == ("test_export.py", line_of("Branch"))
    assert "torch.where" in finding.hint


def test_branch_frozen_by_the_legacy_exporter_is_found_by_experiment(tmp_path):
    assert "shape/value" in rules(judge(Branch(), tmp_path, exporter="legacy"))


def test_loop_over_a_dynamic_dimension_is_blocked_at_its_line(tmp_path):
    judgement = judge(Loop(), tmp_path, {"x": declared("time", time=DimSettings(min=2, opt=3, max=6))})
    assert "control-flow/loop-over-size" in rules(judgement)
    assert {"shape/value", "shape/graph-fails"} & set(rules(judgement))
    blocked = [f for f in judgement.findings if f.severity == "error"]
    assert {(f.file, f.line) for f in blocked} == {("test_export.py", line_of("Loop"))}


class Rare(nn.Module):
    def forward(self, x):
        if x.abs().sum() > 1e9:  # the finding's line
            return x * 0
        return x + 1


def test_branch_that_no_tried_input_takes_is_blocked_when_tracing_froze_it(tmp_path):
    judgement = judge(Rare(), tmp_path, exporter="legacy")
    assert rules(judgement) == ["control-flow/branch-on-value"]
    assert (judgement.findings[0].file, judgement.findings[0].line) == ("test_export.py", line_of("Rare"))


def test_loop_over_a_static_dimension_is_exported(tmp_path):
    assert rules(judge(Loop(), tmp_path)) == []
    assert np.array_equal(run(tmp_path, x=[[1, 2, 3, 4]])["output"], [10])


# --- dimensions ------------------------------------------------------------------------------------------------------


def shape_of(folder, name):
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    value = next(v for v in (*model.graph.input, *model.graph.output) if v.name == name)
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_dynamic_batch_is_read_back_from_the_file(tmp_path, exporter):
    net = Net(lambda m, x: m.head(torch.flatten(m.conv(x), 1)), conv=nn.Conv2d(1, 2, 3), head=nn.Linear(2 * 36, 5))
    judgement = judge(net, tmp_path, {"x": declared(1, 8, 8)}, exporter=exporter)
    assert rules(judgement) == []
    assert shape_of(tmp_path, "x") == ["batch", 1, 8, 8]
    assert shape_of(tmp_path, "output") == ["batch", 5]


def test_size_baked_into_a_value_is_found_though_all_shapes_are_right(tmp_path):
    assert rules(judge(Net(lambda _, x: x * len(x)), tmp_path)) == ["shape/size-as-number", "shape/value"]


def test_dimension_whose_range_is_one_number_is_static(tmp_path):
    fixed = InputSettings(shape=("batch", 3), dims={"batch": DimSettings(min=2, opt=2, max=2)})
    assert rules(judge(Net(lambda _, x: x + 1), tmp_path, {"x": fixed})) == []
    assert shape_of(tmp_path, "x") == [2, 3]


def test_sizes_that_the_module_refuses_block_when_declared_and_warn_between(tmp_path):
    net = Net(lambda _, x: x.reshape(-1, 4, 3).sum(1))
    wrong = {"x": InputSettings(shape=("batch", 3), dims={"batch": DimSettings(min=1, opt=4, max=8)})}
    assert rules(judge(net, tmp_path, wrong)) == ["shape/original-fails"]
    right = {"x": InputSettings(shape=("batch", 3), dims={"batch": DimSettings(min=4, opt=8, max=12)})}
    judgement = judge(net, tmp_path, right)
    assert [(f.rule, f.severity) for f in judgement.findings] == [("shape/constrained-dim", "warning")]
    assert judgement.exported.exporter == "dynamo"
    assert "batch = 4*_batch" in judgement.findings[0].message
    assert run(tmp_path, x=np.ones((8, 3)))["output"].tolist() == [[4, 4, 4], [4, 4, 4]]


# --- the file --------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Fields:
    mean: Any
    parts: Any


@pytest.mark.parametrize(
    ("forward", "names"),
    [
        (lambda _, x: x + 1, ["output"]),
        (lambda _, x: (x + 1, [x + 2, None]), ["output_0", "output_1_0"]),
        (lambda _, x: {"logits": x + 1, "aux": {"a b": x + 2}}, ["logits", "aux_a_b"]),
        (lambda _, x: Pair(x + 1, x + 2), ["left", "right"]),
        (lambda _, x: Fields(x.mean(1), (x + 1, x + 2)), ["mean", "parts_0", "parts_1"]),
        (lambda _, x: {"x": x, "y": x}, ["x_out", "y"]),
    ],
    ids=["tensor", "tuple", "dict", "namedtuple", "dataclass", "the-input-itself"],
)
@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_outputs_are_named_after_what_forward_returns(tmp_path, forward, names, exporter):
    assert rules(judge(Net(forward), tmp_path, exporter=exporter)) == []
    assert [v.name for v in onnx.load(tmp_path / "model.onnx").graph.output] == names


def test_output_that_is_no_tensor_is_refused(tmp_path):
    with pytest.raises(EnginesmithError, match="returns a float as output_1"):
        judge(Net(lambda _, x: (x, 1.5)), tmp_path)


def small_net():
    torch.manual_seed(3)
    return Net(
        lambda m, x: m.head(m.pool(torch.relu(m.conv(x))).flatten(1)),
        conv=nn.Conv2d(3, 4, 3),
        pool=nn.AdaptiveAvgPool2d(1),
        head=nn.Linear(4, 2),
    )


@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_file_names_nodes_by_module_and_keeps_no_path_of_this_machine(tmp_path, exporter):
    for folder in ("a", "b"):
        judge(small_net(), tmp_path / folder, {"x": declared(3, 8, 8)}, exporter=exporter)
    first, second = ((tmp_path / f / "model.onnx").read_bytes() for f in ("a", "b"))
    assert first == second
    for place in (str(HERE), str(Path(torch.__file__).parent), str(Path.home()), "/tmp/"):  # noqa: S108
        assert place.encode() not in first
    model = onnx.load_model_from_string(first)
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"conv/Conv", "head/Gemm"} <= set(names)
    assert {"conv.weight", "head.weight"} <= {i.name for i in model.graph.initializer}
    assert not any(node.op_type == "Constant" or node.doc_string for node in model.graph.node)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = torch.relu(x)
        return self.conv(y)  # the finding's line


def test_node_knows_its_module_and_source_line(tmp_path):
    judge(Conv(), tmp_path, {"x": declared(3, 8, 8)})
    conv = next(n for n in onnx.load(tmp_path / "model.onnx").graph.node if n.op_type == "Conv")
    origin = {p.key: p.value for p in conv.metadata_props}
    assert origin["enginesmith.module"] == "conv"
    assert origin["enginesmith.source"] == f"test_export.py:{line_of('Conv')}"


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_opset_is_the_one_asked_for(tmp_path, opset):
    assert rules(judge(small_net(), tmp_path, {"x": declared(3, 8, 8)}, opset=opset)) == []
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == opset


def test_older_opset_comes_from_the_exporter_that_writes_it(tmp_path):
    judgement = judge(small_net(), tmp_path, {"x": declared(3, 8, 8)}, opset=16)
    assert rules(judgement) == []
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 16
    assert judgement.exported.exporter == "legacy"
    assert "no opset below 18" in judgement.exported.failures[0].message


def test_opset_that_the_exporter_only_writes_on_the_label_is_blocked(tmp_path):
    """ReduceSum takes its axes as an input since 13; under the number 12 the file is no ONNX."""
    judgement = judge(Net(lambda _, x: x.sum(1)), tmp_path, opset=12, exporter="dynamo")
    assert {"operators/invalid-graph", "operators/opset"} & set(rules(judgement))


def test_tied_weights_are_written_once(tmp_path):
    net = Net(lambda m, x: m.head(m.words(x)), words=nn.Embedding(1000, 64), head=nn.Linear(64, 1000, bias=False))
    net.head.weight = net.words.weight
    judgement = judge(net, tmp_path, {"x": declared(5, dtype="int64")})
    assert rules(judgement) == []
    assert 256_000 <= (tmp_path / "model.onnx").stat().st_size < 270_000


def test_legacy_exporter_is_a_fallback_that_is_reported_with_its_reason(tmp_path):
    judgement = judge(Net(lambda _, x: x + float(torch.ones(3).numpy().sum()) + x.detach().data_ptr() * 0), tmp_path)
    assert judgement.exported.exporter == "legacy"
    warned = next(f for f in judgement.findings if f.rule == "operators/legacy-exporter")
    assert (warned.severity, warned.file) == ("warning", "test_export.py")


# --- backends --------------------------------------------------------------------------------------------------------


def test_refused_operator_blocks_its_backend_alone_and_names_the_place(tmp_path):
    pytest.importorskip("tensorrt_rtx")
    judgement = judge(Net(lambda _, x: torch.fft.rfft(x).abs()), tmp_path, backends=("onnxruntime", "tensorrt_rtx"))
    assert not judgement.blocked
    (finding,) = refused_backends(judgement.findings)["tensorrt_rtx"]
    assert finding.node == "DFT"
    assert (finding.file, finding.line > 0) == ("test_export.py", True)
    assert "opset 18" in finding.message


def test_backend_whose_runtime_is_not_here_is_said_to_be_not_judged(tmp_path):
    judgement = judge(Net(lambda _, x: x + 1), tmp_path, backends=("tensorrt",))
    assert [(f.rule, f.severity, f.backend) for f in judgement.findings] == [
        ("operators/not-judged", "advice", "tensorrt")
    ]


# --- the stage -------------------------------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.conv, self.norm, self.branch = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), branch

    def forward(self, image):
        x = self.norm(self.conv(image))
        if self.branch and x.sum() > 0:
            x = -x
        return {"logits": x.mean((2, 3))}

def build(): return Net(False)
def branching(): return Net(True)
"""
IMAGE = {"image": declared(3, 8, 8)}


def export_stage(folder, function):
    (folder / "net.py").write_text(FACTORY)
    store = Store(folder / "store")
    factory = UserCode(folder, f"net:{function}", key="model.factory")
    data = DATA(store=store, calibration=None, evaluation=None, search=None, files=(), inputs=IMAGE, seed=0, samples=8)
    with importable(folder):
        torch.save(factory().state_dict(), folder / "c.pt")
        weights = SLIM(store=store, checkpoint=checkpoint_source(folder / "c.pt"))
        folded = FOLD(store=store, weights=weights, factory=factory, data=data, inputs=IMAGE, settings=FoldSettings())
        return EXPORT(
            store=store,
            model=folded,
            factory=factory,
            data=data,
            inputs=IMAGE,
            settings=ExportSettings(),
            backends=("onnxruntime",),
        )


def test_stage_publishes_graph_and_findings(tmp_path):
    exported = export_stage(tmp_path, "build")
    assert sorted(f.path for f in exported.files) == ["findings.json", "model.onnx", "report.json"]
    assert load_findings(exported.path) == ()
    assert exported.report["exporter"] == "dynamo"
    assert exported.report["outputs"] == {"logits": ["batch", 4]}
    assert [n.op_type for n in onnx.load(exported.path / "model.onnx").graph.node] == ["Conv", "ReduceMean"]


def test_stage_stops_at_a_blocking_finding_and_shows_it(tmp_path):
    with pytest.raises(BlockedError) as caught:
        export_stage(tmp_path, "branching")
    assert re.search(r"net\.py:12", str(caught.value))
    assert caught.value.findings[0].rule == "control-flow/data-dependent"
    assert not list((tmp_path / "store" / "objects").glob("export/*"))
