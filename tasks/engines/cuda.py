"""Turns the installed NVIDIA driver into memory, streams, events and graphs that an engine runs with.

Everything goes through ctypes and the driver's own library, so that a target host needs no CUDA package for Python.
TensorRT works in the device's primary context, which is the one retained here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np

from enginesmith.tasks.engines.spec import EngineError

_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class CudaError(EngineError):
    """A call of the driver failed."""


@lru_cache(maxsize=1)
def _driver() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("no NVIDIA driver on this host", hint="engines of TensorRT run on a host with a GPU")


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{function} failed: {(text.value or b'').decode() or status}")


@lru_cache(maxsize=1)
def _initialize() -> None:
    _call("cuInit", 0)


@lru_cache(maxsize=8)
def _primary(device: int) -> ctypes.c_void_p:
    _initialize()
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


def use_device(device: int = 0) -> None:
    """Make a device's primary context current in this thread.

    Raises:
        CudaError: no driver, or no such device.
    """
    _call("cuCtxSetCurrent", _primary(device))


def memory() -> tuple[int, int]:
    """Free and total bytes of the current device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


class Buffer:
    """Device memory of a fixed size, freed by `close`."""

    def __init__(self, size: int) -> None:
        pointer = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(1, size)))
        self.pointer, self.size = pointer.value, size

    def upload(self, array: np.ndarray, stream: Stream) -> None:
        """Copy a contiguous host array in; done when the stream is."""
        source = ctypes.c_void_p(array.ctypes.data)
        _call(
            "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.pointer), source, ctypes.c_size_t(array.nbytes), stream.handle
        )

    def download(self, array: np.ndarray, stream: Stream) -> None:
        """Copy out into a contiguous host array; done when the stream is."""
        goal = ctypes.c_void_p(array.ctypes.data)
        _call("cuMemcpyDtoHAsync_v2", goal, ctypes.c_uint64(self.pointer), ctypes.c_size_t(array.nbytes), stream.handle)

    def close(self) -> None:
        """Free the memory; the second call does nothing."""
        if self.pointer:
            _call("cuMemFree_v2", ctypes.c_uint64(self.pointer))
            self.pointer = 0


class Graph:
    """Captured work that is launched as one."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._graph = handle
        self._executable = ctypes.c_void_p()
        _call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), handle, ctypes.c_ulonglong(0))

    def launch(self, stream: Stream) -> None:
        """Put the captured work onto a stream."""
        _call("cuGraphLaunch", self._executable, stream.handle)

    def close(self) -> None:
        """Free the graph."""
        _call("cuGraphExecDestroy", self._executable)
        _call("cuGraphDestroy", self._graph)


class Stream:
    """A queue of device work. A context manager."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        _call("cuStreamCreate", ctypes.byref(self.handle), ctypes.c_uint(_NON_BLOCKING))

    @property
    def address(self) -> int:
        """The handle as a number, as TensorRT takes it."""
        return self.handle.value or 0

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        _call("cuStreamSynchronize", self.handle)

    @contextmanager
    def capture(self) -> Iterator[list[Graph]]:
        """Work put onto the stream inside the block is not run, but kept: the list holds the graph afterwards.

        Raises:
            CudaError: the work cannot be captured.
        """
        captured: list[Graph] = []
        _call("cuStreamBeginCapture_v2", self.handle, ctypes.c_int(_RELAXED))
        graph = ctypes.c_void_p()
        try:
            yield captured
        except BaseException:
            _driver().cuStreamEndCapture(self.handle, ctypes.byref(graph))
            raise
        _call("cuStreamEndCapture", self.handle, ctypes.byref(graph))
        captured.append(Graph(graph))

    def close(self) -> None:
        """Free the stream; the second call does nothing."""
        if self.handle.value:
            _call("cuStreamDestroy_v2", self.handle)
            self.handle = ctypes.c_void_p()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Event:
    """A mark on a stream; two of them give the time between."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        _call("cuEventCreate", ctypes.byref(self._handle), ctypes.c_uint(0))

    def record(self, stream: Stream) -> None:
        """Mark what has been put onto the stream so far."""
        _call("cuEventRecord", self._handle, stream.handle)

    def since(self, start: Event) -> float:
        """Seconds of device time from `start`; both must have been passed."""
        milliseconds = ctypes.c_float()
        _call("cuEventElapsedTime", ctypes.byref(milliseconds), start._handle, self._handle)
        return milliseconds.value / 1e3
