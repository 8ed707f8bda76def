"""Turns a target's options into TensorRT's builder configuration, with a timing cache that never fails a build."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.tasks.engines import gpu
from enginesmith.tasks.engines.spec import BuildRequest, EngineError, Option, Profile, Progress, Tick

OPTIONS = (
    Option("workspace_mb", "int", 0, "memory that one layer may use for scratch, MiB; 0 is all there is"),
    Option("builder_level", "int", 3, "builder optimization level, 0 (fast build) to 5 (slow build)"),
    Option("tactic_sources", "list", [], "names of tactic sources, such as JIT_CONVOLUTIONS; empty is the default set"),
    Option("timing_cache", "str", "", "folder of timing caches, one per version and GPU; empty is none"),
    Option("tf32", "bool", False, "let FP32 convolutions and products round their operands to TF32"),
    Option("weight_streaming", "bool", False, "keep weights in host memory and stream them in (10 and later)"),
    Option("version_compatible", "bool", False, "an engine that later versions can load"),
    Option("hardware_compatible", "bool", False, "an engine for all GPUs from Ampere on"),
    Option("calibration", "str", "", "int8-implicit: an .npz with one array per input, samples along the first axis"),
    Option("calibration_cache", "str", "", "int8-implicit: file that keeps the calibrator's ranges"),
)


def configure(trt: Any, builder: Any, request: BuildRequest, say: Tick, flags: tuple[str, ...]) -> Any:
    """A builder configuration with DETAILED verbosity, profiles, and the flags of the network's kind.

    Raises:
        EngineError: an option that this version does not have.
    """
    options = request.options
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for flag in flags:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    if not options["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    for option, flag in (("weight_streaming", "WEIGHT_STREAMING"), ("version_compatible", "VERSION_COMPATIBLE")):
        if options[option]:
            config.set_flag(_member(trt.BuilderFlag, flag, option))
    if options["hardware_compatible"]:
        level = _member(trt, "HardwareCompatibilityLevel", "hardware_compatible")
        config.hardware_compatibility_level = level.AMPERE_PLUS
    workspace = int(str(options["workspace_mb"]))
    if workspace:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace << 20)
    config.builder_optimization_level = int(str(options["builder_level"]))
    sources = options["tactic_sources"]
    if isinstance(sources, (list, tuple)) and sources:
        bits = 0
        for source in sources:
            bits |= 1 << int(_member(trt.TacticSource, str(source), "tactic_sources"))
        config.set_tactic_sources(bits)
    for profile in request.profiles:
        config.add_optimization_profile(_profile(builder, profile))
    if hasattr(trt, "IProgressMonitor"):
        config.progress_monitor = _monitor(trt, say)
    return config


def _member(owner: Any, name: str, option: str) -> Any:
    if not hasattr(owner, name):
        raise EngineError(f"this TensorRT has no {name}", key=f"options.{option}", hint="leave the option out")
    return getattr(owner, name)


def _profile(builder: Any, profile: Profile) -> Any:
    made = builder.create_optimization_profile()
    for name, found in profile.shapes.items():
        made.set_shape(name, found.min, found.opt, found.max)
    for name, found in profile.values.items():
        made.set_shape_input(name, found.min, found.opt, found.max)
    return made


def _monitor(trt: Any, say: Tick) -> Any:
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


def cache_file(folder: str, version: str) -> Path | None:
    """The timing cache of this version and GPU; None when no folder is set."""
    if not folder:
        return None
    key = "|".join([version, gpu.driver_version(), *map(str, gpu.devices())])
    return Path(folder) / f"tensorrt-{version}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.cache"


def attach_cache(config: Any, path: Path | None) -> None:
    """Give the builder the stored timings; a damaged file counts as none."""
    if path is None:
        return
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    for content in (stored, b""):
        try:
            cache = config.create_timing_cache(content)
            if cache is not None and config.set_timing_cache(cache, False):
                return
        except Exception as error:
            sys.stderr.write(f"timing cache not used: {error}\n")


def keep_cache(config: Any, path: Path | None) -> None:
    """Write the timings back, whole or not at all; what goes wrong is only said."""
    if path is None:
        return
    temporary = ""
    try:
        content = bytes(memoryview(config.get_timing_cache().serialize()))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except Exception as error:
        sys.stderr.write(f"timing cache not kept: {error}\n")
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()


def calibrator(trt: Any, request: BuildRequest) -> Any:
    """An entropy calibrator over the arrays of the option `calibration`, with its cache.

    Raises:
        EngineError: no arrays and no cache.
    """
    from enginesmith.tasks.engines import cuda

    arrays_path, cache_path = str(request.options["calibration"]), str(request.options["calibration_cache"])
    if not arrays_path and not (cache_path and Path(cache_path).exists()):
        raise EngineError(
            "int8-implicit has no calibration data", key="options.calibration", hint="give an .npz of input arrays"
        )
    shapes = request.profiles[0].shapes

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IInt8EntropyCalibrator2.__init__(self)
            self.arrays: dict[str, np.ndarray] = dict(np.load(arrays_path)) if arrays_path else {}
            self.size = next(iter(shapes.values())).opt[0]
            self.at = 0
            self.buffers: dict[str, cuda.Buffer] = {}

        def get_batch_size(self) -> int:
            return self.size

        def get_batch(self, names: list[str]) -> list[int] | None:
            batch = {n: np.ascontiguousarray(self.arrays[n][self.at : self.at + self.size]) for n in names}
            if any(len(b) < self.size for b in batch.values()):
                return None
            self.at += self.size
            cuda.use_device()
            with cuda.Stream() as stream:
                for name, array in batch.items():
                    if name not in self.buffers:
                        self.buffers[name] = cuda.Buffer(array.nbytes)
                    self.buffers[name].upload(array, stream)
                stream.synchronize()
            return [self.buffers[n].pointer for n in names]

        def read_calibration_cache(self) -> bytes | None:
            path = Path(cache_path)
            return path.read_bytes() if cache_path and path.exists() else None

        def write_calibration_cache(self, cache: Any) -> None:
            if cache_path:
                fresh = Path(f"{cache_path}.new")
                fresh.write_bytes(bytes(cache))
                fresh.replace(cache_path)

    return Calibrator()
