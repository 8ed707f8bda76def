"""Small ONNX files and backends for the tests of enginesmith.tasks.engines.

These tests need CPython 3.10 or newer, numpy, onnx, onnxruntime and pytest, and nothing else of enginesmith:

    PYTHONPATH=build/typing python3.10 -m pytest -c /dev/null --rootdir tests/engines --confcutdir tests/engines \
        --import-mode importlib tests/engines
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks.engines import backend
from enginesmith.tasks.engines.child import build_engine
from enginesmith.tasks.engines.profiles import profile_of
from enginesmith.tasks.engines.spec import BuildRequest, BuildResult, Dim, Input

NetWriter = Callable[..., Path]
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


class Graph:
    """Collects nodes and constants of one small model."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []

    def add(self, op: str, inputs: list[str], output: str, **attributes: object) -> str:
        """A node named as its output with "n_" in front."""
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"n_{output}", **attributes))
        return output

    def constant(self, name: str, value: object, dtype: object = np.float32) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def qdq(self, tensor: str, scale: float, *, dtype: type = np.int8, zero: int = 0) -> str:
        """A QuantizeLinear → DequantizeLinear pair behind a tensor."""
        s = self.constant(f"{tensor}_s", scale)
        z = self.constant(f"{tensor}_z", zero, dtype)
        self.add("QuantizeLinear", [tensor, s, z], f"{tensor}_q")
        return self.add("DequantizeLinear", [f"{tensor}_q", s, z], f"{tensor}_dq")

    def int8_weight(self, name: str, shape: tuple[int, ...]) -> str:
        """Random INT8 weights behind a per-channel DequantizeLinear."""
        values = self.constant(f"{name}_q", self.rng.integers(-127, 128, shape), np.int8)
        scale = self.constant(f"{name}_s", self.rng.uniform(0.001, 0.004, shape[0]))
        zero = self.constant(f"{name}_z", np.zeros(shape[0]), np.int8)
        return self.add("DequantizeLinear", [values, scale, zero], name, axis=0)

    def model(
        self, inputs: dict[str, list], outputs: dict[str, list], *, opset: int = 18, dtype: int = FLOAT
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(n, dtype, shape) for n, shape in inputs.items()],
            [helper.make_tensor_value_info(n, FLOAT, shape) for n, shape in outputs.items()],
            self.constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        onnx.checker.check_model(model, full_check=True)
        return model


def conv_net(precision: str) -> onnx.ModelProto:
    """x [batch,3,16,16] → Conv-Relu → Conv-Relu → average → Gemm → y [batch,10].

    fp32; fp16 (all); mixed (first Conv-Relu in FP16); int8 (both Conv, between Q/DQ pairs).
    """
    g = Graph()
    half = precision in ("fp16", "mixed")
    current, kind = ("x", np.float32) if not half else (g.add("Cast", ["x"], "x16", to=FLOAT16), np.float16)

    def conv(source: str, index: int, channels: tuple[int, int]) -> str:
        shape = (channels[1], channels[0], 3, 3)
        if precision == "int8":
            source, weight = g.qdq(source, 0.03), g.int8_weight(f"w{index}", shape)
        else:
            weight = g.constant(f"w{index}", g.rng.standard_normal(shape) * 0.2, kind)
        bias = g.constant(f"b{index}", g.rng.standard_normal(channels[1]), kind)
        g.add("Conv", [source, weight, bias], f"c{index}", pads=[1, 1, 1, 1])
        return g.add("Relu", [f"c{index}"], f"r{index}")

    current = conv(current, 0, (3, 8))
    if precision == "mixed":
        current, kind = g.add("Cast", [current], "m32", to=FLOAT), np.float32
    current = conv(current, 1, (8, 16))
    if precision == "int8":
        current = g.qdq(current, 0.03)
    current = g.add("GlobalAveragePool", [current], "pooled")
    current = g.add("Flatten", [current], "flat")
    weight = g.constant("gw", g.rng.standard_normal((16, 10)), kind)
    bias = g.constant("gb", g.rng.standard_normal(10), kind)
    g.add("Gemm", [current, weight, bias], "y16" if precision == "fp16" else "y")
    if precision == "fp16":
        g.add("Cast", ["y16"], "y", to=FLOAT)
    opset = 19 if precision == "int8" else 18  # from 19 on, ONNX's reference evaluator knows Q/DQ
    return g.model({"x": ["batch", 3, 16, 16]}, {"y": ["batch", 10]}, opset=opset)


@pytest.fixture
def graph() -> Graph:
    return Graph()


def write_net(model: str | onnx.ModelProto, folder: Path) -> Path:
    """Write the small network of a precision, or any model, into a folder."""
    folder.mkdir(exist_ok=True)
    onnx.save(conv_net(model) if isinstance(model, str) else model, folder / "model.onnx")
    return folder / "model.onnx"


def build_request(file: Path, variant: str, **options: object) -> BuildRequest:
    """Batch 1 to 8, tuned for 4."""
    x = Input("x", ("batch", 3, 16, 16), "float32", {"batch": Dim(1, 4, 8)})
    return BuildRequest(file, variant, (profile_of([x]),), options)


@pytest.fixture
def net(tmp_path: Path) -> NetWriter:
    """Writes a model and returns the file."""
    return lambda model: write_net(model, tmp_path / "model")


@pytest.fixture
def request_for(net: NetWriter) -> Callable[..., BuildRequest]:
    """A build request for the small network of a precision, or for any model with its input."""

    def make(model: str | onnx.ModelProto, variant: str = "", **options: object) -> BuildRequest:
        return build_request(net(model), variant or (model if isinstance(model, str) else "fp32"), **options)

    return make


@pytest.fixture(scope="session")
def ort_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, BuildResult]]:
    """The ONNX Runtime engine of a precision and how its build went; built once, to be read only."""

    @lru_cache
    def build(precision: str) -> tuple[Path, BuildResult]:
        folder = tmp_path_factory.mktemp(precision)
        (folder / "engine").mkdir()
        request = build_request(write_net(precision, folder / "model"), precision)
        return folder / "engine", build_engine(backend("onnxruntime"), request, folder / "engine")

    return build


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    return folder
