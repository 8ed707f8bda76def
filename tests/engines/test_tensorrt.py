"""The TensorRT backend where no GPU is: its names against three versions, and its decisions on fakes."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from enginesmith.tasks.engines import tensorrt_config as config
from enginesmith.tasks.engines import tensorrt_network as network
from enginesmith.tasks.engines.precision import Request, load_model
from enginesmith.tasks.engines.spec import EngineError

NAMES = json.loads((Path(__file__).parent / "fixtures/tensorrt-names.json").read_text())
V86, V10, V11 = (set(NAMES[version]) for version in ("8.6.0", "10.13.0.35.1", "11.4.0.106"))
UNCONDITIONAL = {
    "Builder", "OnnxParser", "Runtime", "ILogger", "DataType", "BuilderFlag", "NetworkDefinitionCreationFlag",
    "create_network", "parse", "num_errors", "get_error", "desc", "node", "create_builder_config",
    "profiling_verbosity", "DETAILED", "set_flag", "clear_flag", "TF32", "set_memory_pool_limit", "MemoryPoolType",
    "WORKSPACE", "builder_optimization_level", "set_tactic_sources", "TacticSource", "add_optimization_profile",
    "create_optimization_profile", "set_shape", "set_shape_input", "create_timing_cache", "set_timing_cache",
    "get_timing_cache", "serialize", "build_serialized_network", "deserialize_cuda_engine",
    "create_engine_inspector", "get_engine_information", "LayerInformationFormat", "JSON",
    "create_execution_context", "num_io_tensors", "get_tensor_name", "get_tensor_mode", "TensorIOMode",
    "get_tensor_dtype", "nptype", "set_input_shape", "get_tensor_shape", "set_tensor_address", "execute_async_v3",
    "set_optimization_profile_async", "num_inputs", "get_input", "num_outputs", "get_output",
}  # fmt: skip
GONE_IN_11 = {
    "EXPLICIT_BATCH", "OBEY_PRECISION_CONSTRAINTS", "IInt8EntropyCalibrator2", "int8_calibrator",
    "set_calibration_profile", "set_output_type",
}  # fmt: skip
NOT_IN_8_6 = {"STRONGLY_TYPED", "IProgressMonitor", "progress_monitor", "WEIGHT_STREAMING"}


@pytest.mark.parametrize(("version", "known"), [("8.6", V86), ("10.13 stubs", V10), ("11.4 bindings", V11)])
def test_names_used_without_detection_exist_in_every_version(version, known) -> None:
    assert sorted(UNCONDITIONAL - known) == [], version


def library_names() -> set[str]:
    """Every name that the TensorRT modules take from the library itself: `trt.A` and `trt.A.B`."""
    found: set[str] = set()
    for module in ("tensorrt", "tensorrt_config", "tensorrt_engine", "tensorrt_network"):
        source = (Path(network.__file__).parent / f"{module}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute):
                inner = node.value
                if isinstance(inner, ast.Attribute):
                    inner = inner.value
                if isinstance(inner, ast.Name) and inner.id == "trt":
                    found.add(node.attr)
    return found


def test_every_name_taken_from_the_library_is_in_one_of_the_lists() -> None:
    names = library_names()
    assert {"Builder", "BuilderFlag", "IInt8EntropyCalibrator2", "IProgressMonitor"} <= names  # the walk sees them
    own = {"__init__"}
    in_all = V86 & V10 & V11
    assert sorted(names - UNCONDITIONAL - GONE_IN_11 - NOT_IN_8_6 - in_all - own) == []


def test_names_that_11_lost_are_those_of_weakly_typed_networks() -> None:
    assert GONE_IN_11.isdisjoint(V11)
    assert GONE_IN_11 <= V86


def test_names_that_8_6_lacks_are_in_10_and_11() -> None:
    assert NOT_IN_8_6.isdisjoint(V86)
    assert NOT_IN_8_6 <= V10 & V11


class Layer:
    """A layer of a weakly typed network: everything reads as FLOAT."""

    def __init__(self, name: str, kind: str = "CONVOLUTION", metadata: str = "", dtype: str = "FLOAT") -> None:
        self.name, self.type, self.metadata = name, f"LayerType.{kind}", metadata
        self.num_outputs, self._dtype = 1, dtype
        self.precision: object = None
        self.types: dict[int, object] = {}

    def get_output(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(dtype=f"DataType.{self._dtype}")

    def set_output_type(self, index: int, dtype: object) -> None:
        self.types[index] = dtype


def impose(*layers: Layer, wanted: list[Request], implicit: frozenset[str] = frozenset()) -> int:
    trt = SimpleNamespace(DataType=SimpleNamespace(FLOAT="F", HALF="H", INT8="I"))
    fake = SimpleNamespace(num_layers=len(layers), get_layer=lambda i: layers[i])
    return network.impose(trt, fake, wanted, implicit)


def test_each_layer_gets_the_type_that_its_node_asks_for() -> None:
    a, b = Layer("a"), Layer("(Unnamed Layer* 1)", metadata="[ONNX Layer: b]")
    wanted = [Request("a", "Conv", "fp16", "x", True), Request("b", "Conv", "fp32", "y", True)]
    assert impose(a, b, wanted=wanted) == 2
    assert (a.precision, a.types, b.precision, b.types) == ("H", {0: "H"}, "F", {0: "F"})


@pytest.mark.parametrize("kind", ["SHAPE", "CONSTANT", "CAST", "SHUFFLE", "QUANTIZE", "DEQUANTIZE"])
def test_layers_that_carry_data_are_left_alone(kind) -> None:
    layer = Layer("a", kind)
    assert impose(layer, wanted=[Request("a", "Reshape", "fp16", "x", False)]) == 0
    assert layer.precision is None


def test_integer_results_and_int8_between_quantizers_are_left_alone() -> None:
    integer, quantized = Layer("a", dtype="INT32"), Layer("b")
    wanted = [Request("a", "Mul", "fp16", "x", False), Request("b", "Conv", "int8", "y", True)]
    assert impose(integer, quantized, wanted=wanted) == 0


def test_a_conv_without_a_layer_of_its_name_is_an_error() -> None:
    with pytest.raises(EngineError, match="have no layer of their name") as caught:
        impose(Layer("other"), wanted=[Request("a", "Conv", "fp16", "x", True)])
    assert caught.value.details == ("a",)


def test_implicit_int8_takes_conv_and_relu_and_leaves_the_rest(net) -> None:
    model = load_model(net("fp32"), weights=False)
    assert network.implicit_nodes(model) == {"n_c0", "n_r0", "n_c1", "n_r1"}


class Cache:
    """A builder configuration's timing cache; it does not take what starts with "bad"."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def create_timing_cache(self, content: bytes) -> bytes:
        if content.startswith(b"bad"):
            raise RuntimeError("damaged")
        return content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self.taken.append(cache)
        return True

    def get_timing_cache(self) -> SimpleNamespace:
        return SimpleNamespace(serialize=lambda: b"timings")


def test_a_damaged_timing_cache_counts_as_none_and_is_replaced(tmp_path) -> None:
    file, fake = tmp_path / "t.cache", Cache()
    file.write_bytes(b"bad")
    config.attach_cache(fake, file)
    config.keep_cache(fake, file)
    assert fake.taken == [b""]
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"timings"]


def test_a_timing_cache_that_cannot_be_written_does_not_fail_the_build(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    config.keep_cache(Cache(), tmp_path / "file" / "t.cache")
    assert "timing cache not kept" in capsys.readouterr().err


def test_timing_caches_of_two_versions_and_two_gpus_are_two_files(monkeypatch) -> None:
    first = config.cache_file("caches", "8.6.0")
    assert first != config.cache_file("caches", "10.13")
    monkeypatch.setattr(config.gpu, "devices", lambda: ("another GPU",))
    assert first != config.cache_file("caches", "8.6.0")
    assert config.cache_file("", "8.6.0") is None
