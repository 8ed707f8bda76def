"""Turns an ONNX file into a TensorRT-RTX engine for named compute capabilities, on a host that needs no GPU.

The network is strongly typed: precision is what the ONNX file says, and TF32 is off unless asked for. The engine cannot
be loaded without an RTX GPU, so its precision is read back from the parsed network and from the engine's own layer
table in the build log.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from enginesmith.tasks.engines import gpu
from enginesmith.tasks.engines.islands import guard_islands
from enginesmith.tasks.engines.layer_log import NetworkTypes, parse_layers, read_back
from enginesmith.tasks.engines.manifest import verified_manifest
from enginesmith.tasks.engines.precision import COMPUTE, DEQUANTIZE, load_model, requests
from enginesmith.tasks.engines.spec import (
    VARIANTS,
    BuildRequest,
    Built,
    Engine,
    EngineError,
    Option,
    Precision,
    Profile,
    Progress,
    Refusal,
    RefusedError,
    TensorSpec,
    Tick,
)

ENGINE = "engine.trt"
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")

_DISTRIBUTIONS = ("tensorrt-rtx", "tensorrt_rtx_cu13_bindings", "tensorrt_rtx_cu12_bindings")
_FLOATING: Mapping[str, Precision] = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}
_NUMPY = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "UINT8": "uint8", "BOOL": "bool"}


class TensorRtRtx:
    """NVIDIA TensorRT for RTX: builds anywhere, runs on RTX GPUs only."""

    name = "tensorrt_rtx"
    extra = "rtx"
    options = (
        Option(
            "compute_capabilities",
            "list",
            ["8.6", "8.9", "12.0"],
            "GPUs to build for: 8.6 is RTX 30, 8.9 RTX 40, 12.0 RTX 50",
            CAPABILITIES,
        ),
        Option("tf32", "bool", False, "let FP32 convolutions and products round their operands to TF32"),
        Option("workspace_mb", "int", 0, "memory that one layer may use for scratch, MiB; 0 is all there is"),
    )

    def version(self) -> str | None:
        """Version of the installed wheel."""
        for distribution in _DISTRIBUTIONS:
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(distribution)
        return None

    def fingerprint(self) -> dict[str, str]:
        """Version, operating system and architecture; what GPUs the engine is for stands in its options."""
        return {
            "tensorrt_rtx": self.version() or "none",
            "system": platform.system(),
            "machine": platform.machine(),
        }

    def builds(self) -> frozenset[str]:
        """Every variant."""
        return frozenset(VARIANTS)

    def executes(self) -> frozenset[str]:
        """Nothing: its engines are built here and run elsewhere."""
        return frozenset()

    def check(self, model: Path) -> tuple[Refusal, ...]:
        """Nodes that the parser refuses, and nodes of every operator that it does not know."""
        trt = _library()
        _logger().lines.clear()
        loaded = load_model(model, weights=False)
        _, parser = _parse(trt, _builder(trt), loaded, model)
        refused = {error.node: error for error in _errors(parser)}
        for node in loaded.graph.node:
            if node.domain in ("", "ai.onnx") and not parser.supports_operator(node.op_type):
                refused.setdefault(
                    node.name, Refusal(node.name, node.op_type, "TensorRT-RTX does not know this operator")
                )
        return tuple(refused.values())

    def compile(self, request: BuildRequest, out: Path, say: Tick) -> Built:
        """Parse, build for every compute capability, and read the precision back."""
        trt = _library()
        _logger().loud = True
        model = load_model(request.model, weights=False)
        wanted = requests(model)
        guarded, islands = guard_islands(model)
        say(Progress("parsing"))
        builder = _builder(trt)
        network, parser = _parse(trt, builder, guarded, request.model)
        refused = _errors(parser)
        if refused:
            raise RefusedError(
                f"TensorRT-RTX refuses {len(refused)} node(s)", where=str(request.model), refusals=refused
            )
        config = _config(trt, builder, request, say)
        engine = builder.build_serialized_network(network, config)
        if engine is None:
            raise RefusedError(
                "TensorRT-RTX could not build the engine", where=str(request.model), details=_logger().errors()[-10:]
            )
        (out / ENGINE).write_bytes(memoryview(engine))
        say(Progress("reading precision back"))
        layers = parse_layers("\n".join(_logger().messages()))
        return Built(
            files=(ENGINE,),
            inputs=_tensors(network.get_input(i) for i in range(network.num_inputs)),
            outputs=_tensors(network.get_output(i) for i in range(network.num_outputs)),
            layers=read_back(wanted, _network_types(network), layers, _weight_elements(model)),
            read_from="the engine's layer table in the build log, and the parsed strongly typed network"
            if layers
            else "the parsed strongly typed network",
            lowered=(f"{len(islands)} FP32 node(s) between FP16 casts guarded by LeakyRelu(alpha=1)",)
            if islands
            else (),
            warnings=tuple(dict.fromkeys(_logger().warnings())),
        )

    def load(self, folder: Path) -> Engine:
        """Refused on this host, after the manifest was checked: it has no GPU that runs the engine."""
        verified_manifest(folder, backend=self.name, fingerprint=self.fingerprint())
        found = ", ".join(map(str, gpu.devices())) or "no GPU"
        raise EngineError(
            f"a TensorRT-RTX engine runs on an RTX GPU only, this host has {found}",
            where=str(folder),
            hint="copy the folder to a host with such a GPU; here its variants are measured by emulation",
        )


@lru_cache(maxsize=1)
def _logger() -> Any:
    """The one logger of this process: the library keeps the first one it is given for good."""
    trt = _library()

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        """Keeps everything; in the builder's process it prints what matters, for the log that outlives a crash."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[str, str]] = []
            self.loud = False

        def log(self, severity: Any, message: str) -> None:
            """Called by the library."""
            name = str(severity).rpartition(".")[2]
            self.lines.append((name, message))
            if self.loud and name in ("WARNING", "ERROR", "INTERNAL_ERROR"):
                sys.stderr.write(f"[{name}] {message}\n")

        def messages(self) -> list[str]:
            """Everything said so far."""
            return [message for _, message in self.lines]

        def warnings(self) -> list[str]:
            """Warnings so far."""
            return [message for name, message in self.lines if name == "WARNING"]

        def errors(self) -> list[str]:
            """Errors so far."""
            return [message for name, message in self.lines if name.endswith("ERROR")]

    return Logger()


def _library() -> Any:
    try:
        import tensorrt_rtx
    except ImportError as error:
        raise EngineError(
            "tensorrt_rtx is not installed", key="backend", hint='pip install "enginesmith[rtx]"'
        ) from error
    return tensorrt_rtx


def _builder(trt: Any) -> Any:
    return trt.Builder(_logger())


def _parse(trt: Any, builder: Any, model: onnx.ModelProto, path: Path) -> tuple[Any, Any]:
    """A strongly typed network and the parser that filled it, or gave up: see its errors. Weights lie beside `path`."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, _logger())
    parser.parse(model.SerializeToString(), str(path))
    return network, parser


def _errors(parser: Any) -> tuple[Refusal, ...]:
    found = (parser.get_error(i) for i in range(parser.num_errors))
    return tuple(Refusal(e.node_name(), e.node_operator(), e.desc()) for e in found)


def _config(trt: Any, builder: Any, request: BuildRequest, say: Tick) -> Any:
    options = request.options
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if not options["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    workspace = int(str(options["workspace_mb"]))
    if workspace:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace << 20)
    capabilities = [str(c) for c in _list(options["compute_capabilities"])]
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), index)
    for profile in request.profiles:
        config.add_optimization_profile(_profile(builder, profile))
    config.progress_monitor = _monitor(trt, say)
    return config


def _profile(builder: Any, profile: Profile) -> Any:
    made = builder.create_optimization_profile()
    for name, found in profile.shapes.items():
        made.set_shape(name, found.min, found.opt, found.max)
    for name, found in profile.values.items():
        made.set_shape_input(name, found.min, found.opt, found.max)
    return made


def _monitor(trt: Any, say: Tick) -> Any:
    """Tells `say` the outermost phase and how far it is."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps
                say(Progress(phase_name, 0.0))

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.steps:
                say(Progress(phase_name, min(1.0, (step + 1) / max(1, self.steps[phase_name]))))
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()


def _network_types(network: Any) -> NetworkTypes:
    outputs: dict[str, Precision] = {}
    makers: dict[str, Any] = {}
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    for layer in layers:
        for index in range(layer.num_outputs):
            tensor = layer.get_output(index)
            makers[tensor.name] = layer
            precision = _FLOATING.get(_name(tensor.dtype))
            if precision is not None:
                outputs[tensor.name] = precision
    int8 = {
        layer.metadata[len("[ONNX Layer: ") : -1]
        for layer in layers
        if layer.num_inputs >= 2 and all(_dequantizes(makers, layer.get_input(i)) for i in range(2))
    }
    return NetworkTypes(outputs, frozenset(int8))


def _dequantizes(makers: Mapping[str, Any], tensor: Any) -> bool:
    layer = makers.get(tensor.name) if tensor is not None else None
    return (
        layer is not None and _name(layer.type) == "DEQUANTIZE" and _name(layer.get_input(0).dtype) in ("INT8", "UINT8")
    )


def _weight_elements(model: onnx.ModelProto) -> dict[str, int]:
    """Elements of the constant weight of each Conv, ConvTranspose, Gemm and MatMul that has one."""
    elements = {t.name: int(np.prod(t.dims)) for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in (DEQUANTIZE, "Identity") and node.input[0] in elements:
            elements[node.output[0]] = elements[node.input[0]]
    return {
        node.name: elements[node.input[1]]
        for node in model.graph.node
        if node.op_type in COMPUTE and len(node.input) > 1 and node.input[1] in elements
    }


def _tensors(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            t.name,
            _NUMPY.get(_name(t.dtype), _name(t.dtype).lower()),
            tuple(None if d < 0 else int(d) for d in t.shape),
        )
        for t in tensors
    )


def _name(value: Any) -> str:
    """DataType.HALF → "HALF"."""
    return str(value).rpartition(".")[2]


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)
