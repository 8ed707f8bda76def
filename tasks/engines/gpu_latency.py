"""Turns a loaded TensorRT engine into latencies: host clock and GPU events, with and without a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from enginesmith.tasks.engines import cuda
from enginesmith.tasks.engines.tensorrt_engine import Bound, LoadedEngine

JITTER = 2.0


@dataclass(frozen=True)
class GpuLatency:
    """One engine at one batch size.

    Attributes:
        batch: samples per call.
        graph: whether a CUDA graph was launched instead of the enqueue.
        runs: counted calls.
        host_p50_ms, host_p90_ms, host_p99_ms, host_max_ms: host clock around enqueue and wait.
        gpu_p50_ms, gpu_p99_ms: between GPU events around the same work.
        jitter: whether p99 is beyond twice p50, host clock.
    """

    batch: int
    graph: bool
    runs: int
    host_p50_ms: float
    host_p90_ms: float
    host_p99_ms: float
    host_max_ms: float
    gpu_p50_ms: float
    gpu_p99_ms: float
    jitter: bool


def time_batch(
    engine: LoadedEngine, feeds: Mapping[str, np.ndarray], batch: int, *, graph: bool, seconds: float = 0.5
) -> GpuLatency:
    """Time one batch size after a warm-up; inputs are on the device already.

    Raises:
        CudaError: the engine cannot be captured into a graph.
    """
    bound = engine.bind(feeds)
    bound.upload()
    launch: Callable[[], None] = bound.enqueue
    captured = bound.graph() if graph else None
    if captured is not None:
        taken = captured

        def launch() -> None:
            taken.launch(bound.stream)

    start, end = cuda.Event(), cuda.Event()
    for _ in range(20):
        launch()
    bound.stream.synchronize()
    host: list[float] = []
    device: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(host) < 50 or (time.perf_counter() < deadline and len(host) < 2000):
        before = time.perf_counter()
        launch()
        bound.stream.synchronize()
        host.append(time.perf_counter() - before)
        start.record(bound.stream)
        launch()
        end.record(bound.stream)
        bound.stream.synchronize()
        device.append(end.since(start))
    if captured is not None:
        captured.close()
    p50, p90, p99 = (float(v) * 1e3 for v in np.percentile(host, (50, 90, 99)))
    g50, g99 = (float(v) * 1e3 for v in np.percentile(device, (50, 99)))
    return GpuLatency(batch, graph, len(host), p50, p90, p99, max(host) * 1e3, g50, g99, jitter=not p99 <= JITTER * p50)


def throughput(engine: LoadedEngine, feeds: Mapping[str, np.ndarray], batch: int, streams: int) -> float:
    """Samples per second with this many contexts, each on a stream of its own, kept busy together."""
    bounds: list[Bound] = [engine.bind(feeds) for _ in range(streams)]
    for bound in bounds:
        bound.upload()
        bound.enqueue()
    for bound in bounds:
        bound.stream.synchronize()
    rounds = 100
    start = time.perf_counter()
    for _ in range(rounds):
        for bound in bounds:
            bound.enqueue()
    for bound in bounds:
        bound.stream.synchronize()
    return rounds * streams * batch / (time.perf_counter() - start)


def copy_ms(engine: LoadedEngine, feeds: Mapping[str, np.ndarray]) -> float:
    """Median milliseconds of one host-to-device copy of the inputs, from pageable memory."""
    bound = engine.bind(feeds)
    times = []
    for _ in range(20):
        before = time.perf_counter()
        bound.upload()
        bound.stream.synchronize()
        times.append(time.perf_counter() - before)
    return float(np.median(times)) * 1e3
