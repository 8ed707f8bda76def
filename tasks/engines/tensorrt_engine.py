"""Turns a serialized TensorRT engine into outputs, and into calls that can be timed on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from enginesmith.tasks.engines import cuda
from enginesmith.tasks.engines.spec import Engine, EngineError, Manifest


class Bound:
    """An execution context with inputs on the device and outputs allocated: one inference that can be enqueued."""

    def __init__(self, trt: Any, engine: Any, feeds: Mapping[str, np.ndarray], profile: int = 0) -> None:
        before = cuda.memory()[0]
        self.context = engine.create_execution_context()
        if self.context is None:
            raise EngineError("TensorRT gave no execution context", hint="is the GPU's memory full?")
        self.stream = cuda.Stream()
        if profile and not self.context.set_optimization_profile_async(profile, self.stream.address):
            raise EngineError(f"the engine has no profile {profile}")
        self.buffers: dict[str, cuda.Buffer] = {}
        self.feeds: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        sources = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        for name in sources:
            if name not in feeds:
                raise EngineError(f"input {name!r} is missing", hint=f"the engine reads {', '.join(sources)}")
            array = np.ascontiguousarray(feeds[name], dtype=trt.nptype(engine.get_tensor_dtype(name)))
            if not self.context.set_input_shape(name, array.shape):
                raise EngineError(f"input {name!r} of shape {array.shape} is outside the engine's profile {profile}")
            self.feeds[name] = array
            self._bind(name, array.nbytes)
        for name in names:
            if name in sources:
                continue
            shape = tuple(self.context.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                raise EngineError(f"output {name!r} has a size that depends on the data: {shape}")
            self.outputs[name] = np.empty(shape, dtype=trt.nptype(engine.get_tensor_dtype(name)))
            self._bind(name, self.outputs[name].nbytes)
        self.context_bytes = before - cuda.memory()[0]

    def _bind(self, name: str, size: int) -> None:
        self.buffers[name] = cuda.Buffer(size)
        self.context.set_tensor_address(name, self.buffers[name].pointer)

    def upload(self) -> None:
        """Copy the inputs to the device."""
        for name, array in self.feeds.items():
            self.buffers[name].upload(array, self.stream)

    def enqueue(self) -> None:
        """Put one inference onto the stream."""
        if not self.context.execute_async_v3(self.stream.address):
            raise EngineError("TensorRT could not enqueue the inference")

    def download(self) -> dict[str, np.ndarray]:
        """Outputs of what was enqueued, waited for."""
        for name, array in self.outputs.items():
            self.buffers[name].download(array, self.stream)
        self.stream.synchronize()
        return {name: array.copy() for name, array in self.outputs.items()}

    def graph(self) -> cuda.Graph:
        """One inference as a CUDA graph.

        Raises:
            CudaError: the engine cannot be captured.
        """
        self.enqueue()
        self.stream.synchronize()
        with self.stream.capture() as captured:
            self.enqueue()
        return captured[0]

    def close(self) -> None:
        """Free the context and its memory."""
        self.stream.synchronize()
        self.context = None
        for buffer in self.buffers.values():
            buffer.close()
        self.stream.close()


class LoadedEngine(Engine):
    """A deserialized engine.

    Args:
        trt: the library.
        runtime: what deserialized the engine; kept alive.
        engine: the engine.
        manifest: what its engine.json says.
    """

    def __init__(self, trt: Any, runtime: Any, engine: Any, manifest: Manifest) -> None:
        self.manifest = manifest
        self._trt, self._runtime, self.engine = trt, runtime, engine
        self._bound: list[Bound] = []

    def bind(self, feeds: Mapping[str, np.ndarray], profile: int = 0) -> Bound:
        """A context of its own for these inputs, freed with the engine."""
        cuda.use_device()
        bound = Bound(self._trt, self.engine, feeds, profile)
        self._bound.append(bound)
        return bound

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name, host arrays in, host arrays out."""
        bound = self.bind(feeds)
        try:
            bound.upload()
            bound.enqueue()
            return bound.download()
        finally:
            self._bound.remove(bound)
            bound.close()

    def prepare(self, feeds: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A call that runs one inference on the device to its end; inputs are copied once, before."""
        bound = self.bind(feeds)
        bound.upload()
        bound.stream.synchronize()

        def call() -> None:
            bound.enqueue()
            bound.stream.synchronize()

        return call

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
        for bound in self._bound:
            bound.close()
        self._bound.clear()
        self.engine = self._runtime = None

    def __enter__(self) -> LoadedEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
