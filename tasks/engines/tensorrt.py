"""Turns an ONNX file into a TensorRT engine on the GPU that will run it, with 8.6, 10 and 11 alike.

What a version has is detected, never read off its number. The precision is read back from the engine's inspector.
"""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx

from enginesmith.tasks.engines import cuda, gpu
from enginesmith.tasks.engines.inspector import parse_inspector, read_back
from enginesmith.tasks.engines.manifest import verified_manifest
from enginesmith.tasks.engines.precision import QUANTIZE, Request, load_model, requests
from enginesmith.tasks.engines.spec import (
    VARIANTS,
    BuildRequest,
    Built,
    EngineError,
    Manifest,
    Progress,
    Refusal,
    RefusedError,
    TensorSpec,
    Tick,
)
from enginesmith.tasks.engines.tensorrt_config import (
    OPTIONS,
    attach_cache,
    cache_file,
    calibrator,
    configure,
    keep_cache,
)
from enginesmith.tasks.engines.tensorrt_engine import LoadedEngine
from enginesmith.tasks.engines.tensorrt_network import (
    has_strong_typing,
    has_weak_typing,
    implicit_nodes,
    impose,
    name_of,
    parse,
    parser_errors,
)

ENGINE = "engine.trt"
INSPECTOR = "inspector.json"
BUILD_LOG = "build.log"
IMPLICIT = "int8-implicit"

_DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
_NUMPY = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "UINT8": "uint8", "BOOL": "bool"}


class TensorRt:
    """NVIDIA TensorRT: builds and runs on the GPU of this host."""

    name = "tensorrt"
    extra = "tensorrt"
    options = OPTIONS

    def version(self) -> str | None:
        """Version of the installed library; asked of the library where the packages' metadata is absent."""
        for distribution in _DISTRIBUTIONS:
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(distribution)
        with suppress(EngineError):
            return str(_library().__version__)
        return None

    def fingerprint(self) -> dict[str, str]:
        """Version, operating system, architecture, GPU and driver: an engine is tied to all of them."""
        return {
            "tensorrt": self.version() or "none",
            "system": platform.system(),
            "machine": platform.machine(),
            "gpu": "; ".join(f"{d.name}, SM {d.capability}" for d in gpu.devices()[:1]) or "none",
            "driver": gpu.driver_version() or "none",
        }

    def builds(self) -> frozenset[str]:
        """Every variant; implicit INT8 where the version still has it."""
        return frozenset((*VARIANTS, IMPLICIT)) if self.version() and _has_implicit() else frozenset(VARIANTS)

    def executes(self) -> frozenset[str]:
        """What it builds, where there is a GPU."""
        return self.builds() if self.version() is not None and gpu.devices() else frozenset()

    def check(self, model: Path) -> tuple[Refusal, ...]:
        """Nodes that the parser refuses; needs a GPU as the builder does."""
        trt = _library()
        loaded = load_model(model, weights=False)
        _, parser = parse(trt, _builder(trt), _logger(), loaded, model, strong=has_strong_typing(trt))
        return parser_errors(parser, loaded)

    def compile(self, request: BuildRequest, out: Path, say: Tick) -> Built:
        """Parse, impose or declare the precision, build, and read the precision back from the engine."""
        trt = _library()
        logger = _logger()
        implicit = request.variant == IMPLICIT
        if implicit and not _has_implicit():
            raise EngineError("this TensorRT has no implicit INT8", key="precision.variants", hint="use Q/DQ: int8")
        model = load_model(request.model, weights=False)
        wanted = requests(model)
        strong = has_strong_typing(trt) and not implicit
        say(Progress("parsing"))
        builder = _builder(trt)
        network, parser = parse(trt, builder, logger, model, request.model, strong=strong)
        refused = parser_errors(parser, model)
        if refused:
            raise RefusedError(f"TensorRT refuses {len(refused)} node(s)", where=str(request.model), refusals=refused)
        flags: list[str] = []
        if not strong:
            chosen = implicit_nodes(model) if implicit else frozenset()
            impose(trt, network, wanted, chosen)
            wanted = [replace(r, precision="int8") if r.node in chosen else r for r in wanted]
            flags = _weak_flags(model, wanted, implicit=implicit)
        config = configure(trt, builder, request, say, tuple(flags))
        if implicit:
            ranges = calibrator(trt, request)  # kept by name: the configuration does not own it
            config.int8_calibrator = ranges
            config.set_calibration_profile(_first_profile(builder, request))
        cache = cache_file(str(request.options["timing_cache"]), self.version() or "none")
        attach_cache(config, cache)
        say(Progress("building"))
        serialized = builder.build_serialized_network(network, config)
        if serialized is None:
            raise RefusedError(
                "TensorRT could not build the engine", where=str(request.model), details=logger.errors()[-10:]
            )
        keep_cache(config, cache)
        content = bytes(memoryview(serialized))
        (out / ENGINE).write_bytes(content)
        say(Progress("reading precision back"))
        runtime = trt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise EngineError("TensorRT cannot load the engine that it built", details=logger.errors()[-10:])
        report = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
        (out / INSPECTOR).write_text(report)
        (out / BUILD_LOG).write_text("\n".join(f"[{severity}] {text}" for severity, text in logger.lines) + "\n")
        layers = parse_inspector(report, [node.name for node in model.graph.node])
        return Built(
            files=(ENGINE,),
            inputs=_tensors(network.get_input(i) for i in range(network.num_inputs)),
            outputs=_tensors(network.get_output(i) for i in range(network.num_outputs)),
            layers=read_back(wanted, layers),
            read_from="the engine inspector",
            warnings=tuple(dict.fromkeys(logger.warnings())),
        )

    def load(self, folder: Path) -> LoadedEngine:
        """The engine in a folder, after its manifest was checked."""
        manifest = verified_manifest(folder, backend=self.name, fingerprint=self.fingerprint())
        return load_engine(folder / ENGINE, manifest)


def load_engine(path: Path, manifest: Manifest) -> LoadedEngine:
    """Deserialize an engine whose manifest was checked."""
    trt = _library()
    cuda.use_device()
    runtime = trt.Runtime(_logger())
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise EngineError("TensorRT cannot load the engine", where=str(path), details=_logger().errors()[-10:])
    return LoadedEngine(trt, runtime, engine, manifest)


def _has_implicit() -> bool:
    trt = _library()
    return hasattr(trt, "IInt8EntropyCalibrator2") and has_weak_typing(trt)


def _weak_flags(model: onnx.ModelProto, wanted: list[Request], *, implicit: bool) -> list[str]:
    """Which precisions a weakly typed build may use, and that it must obey."""
    flags = ["OBEY_PRECISION_CONSTRAINTS"]
    asked = {request.precision for request in wanted}
    if "fp16" in asked:
        flags.append("FP16")
    if "bf16" in asked:
        flags.append("BF16")
    if implicit or any(node.op_type == QUANTIZE for node in model.graph.node):
        flags.append("INT8")
    return flags


def _first_profile(builder: Any, request: BuildRequest) -> Any:
    """The first profile with every size at `opt`: what the calibrator feeds."""
    profile = builder.create_optimization_profile()
    for name, found in request.profiles[0].shapes.items():
        profile.set_shape(name, found.opt, found.opt, found.opt)
    return profile


@lru_cache(maxsize=1)
def _logger() -> Any:
    """The one logger of this process: the library keeps the first one it is given for good."""
    trt = _library()

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        """Keeps everything but verbose lines, and prints warnings and errors for the log that outlives a crash."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[str, str]] = []

        def log(self, severity: Any, message: str) -> None:
            """Called by the library."""
            name = name_of(severity)
            if name == "VERBOSE":
                return
            self.lines.append((name, message))
            if name != "INFO":
                sys.stderr.write(f"[{name}] {message}\n")

        def warnings(self) -> list[str]:
            """Warnings so far."""
            return [message for name, message in self.lines if name == "WARNING"]

        def errors(self) -> list[str]:
            """Errors so far."""
            return [message for name, message in self.lines if name.endswith("ERROR")]

    return Logger()


def _library() -> Any:
    try:
        import tensorrt
    except ImportError as error:
        raise EngineError(
            f"tensorrt cannot be imported: {error}", key="backend", hint='pip install "enginesmith[tensorrt]"'
        ) from error
    return tensorrt


def _builder(trt: Any) -> Any:
    return trt.Builder(_logger())


def _tensors(tensors: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            t.name,
            _NUMPY.get(name_of(t.dtype), name_of(t.dtype).lower()),
            tuple(None if d < 0 else int(d) for d in t.shape),
        )
        for t in tensors
    )
