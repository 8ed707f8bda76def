"""Turns engines of one target into latencies that can be compared: all timed in one session, in turn.

A latency is an observation: stored with `Store.observe`, found again by `latest`, never part of an artifact. Figures of
two sessions are never compared, so the session is the unit that is stored: its key holds the digests of all its
engines, the batches and the host. Whoever changes one engine times all of them again.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from enginesmith.tasks import progress
from enginesmith.tasks.backends import engine_errors, find_backend
from enginesmith.tasks.data import Dataset, load_dataset
from enginesmith.tasks.hardware import int8_note, this_host
from enginesmith.tasks.stage import digest_of
from enginesmith.tasks.store import Artifact, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

KIND = "latency"
SCHEMA = 1
JITTER = 2.0
"""p99 beyond this many times p50 is called jitter."""

Inference = Callable[[], None]


class LatencySettings(BaseModel):
    """How long to time.

    Attributes:
        seconds: time for each engine and batch size, warm-up apart; at least `min_runs` are taken all the same.
        min_runs: fewest runs of each engine and batch size.
        max_runs: most runs.
        warmup_s: seconds of warm-up for each engine and batch size, at least 3 runs.
        block: runs of one engine in a row; the first of each block is not counted (caches belong to another engine).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float = 1.5
    min_runs: int = 20
    max_runs: int = 500
    warmup_s: float = 0.3
    block: int = 5


@dataclass(frozen=True)
class TimedEngine:
    """An engine to be timed: one whose precision its backend really executes on this host."""

    variant: str
    backend: str
    engine: Artifact


class Latency(BaseModel):
    """One engine at one batch size.

    Attributes:
        variant: name of the variant.
        backend: name of the backend.
        batch: samples per call; 1 for a model without a batch axis.
        runs: calls that were counted.
        p50_ms, p90_ms, p99_ms, max_ms: milliseconds per call, host clock around one blocking call.
        throughput: samples per second, ``1000 * batch / p50_ms``, one call at a time.
        jitter: whether p99 is beyond twice p50.
    """

    model_config = ConfigDict(frozen=True)

    variant: str
    backend: str
    batch: int
    runs: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    throughput: float
    jitter: bool


class LatencySession(BaseModel):
    """Everything timed together, and on what.

    Attributes:
        target: name of the target.
        started: when, UTC, ISO 8601.
        host: facts about the machine.
        load: one-minute load average at the start and at the end, processes.
        latencies: the figures.
        notes: what a reader has to know about them.
    """

    model_config = ConfigDict(frozen=True)

    target: str
    started: str
    host: dict[str, Any]
    load: tuple[float, float]
    latencies: tuple[Latency, ...]
    notes: tuple[str, ...]

    def of(self, variant: str, batch: int | None = None) -> Latency | None:
        """Figures of a variant at a batch size; at the largest one when None, which is `opt`."""
        rows = [row for row in self.latencies if row.variant == variant and batch in (None, row.batch)]
        return max(rows, key=lambda row: row.batch, default=None)


def time_engines(
    store: Store,
    target: str,
    engines: Sequence[TimedEngine],
    data: Artifact,
    *,
    settings: LatencySettings | None = None,
    again: bool = False,
) -> LatencySession | None:
    """Time the engines of one target in one session and store the session; an earlier one is taken when it fits.

    Every engine is loaded and warmed up, then blocks of runs take turns in an order shuffled per round, so that a
    slower minute of the machine falls on all of them. Batch sizes: 1 and the one that the model is tuned for.

    Args:
        store: where sessions are kept.
        target: name of the target.
        engines: what to time; only engines whose precision is really executed belong here.
        data: the data artifact; verdict samples are the inputs.
        settings: how long to time.
        again: time even if a session of these engines on this host is stored.

    Returns:
        The session, None when there is nothing to time.

    Raises:
        EnginesmithError: an engine cannot be loaded on this host.
    """
    if not engines:
        return None
    found = None if again else latest(store, target, engines, data)
    return found or _session(store, target, engines, data, settings or LatencySettings())


def latest(store: Store, target: str, engines: Sequence[TimedEngine], data: Artifact) -> LatencySession | None:
    """The last session in which exactly these engines were timed on this host; None when there is none."""
    stored = store.observations(KIND, session_key(target, engines, data))
    return LatencySession.model_validate(stored[-1]) if stored else None


def session_key(target: str, engines: Sequence[TimedEngine], data: Artifact) -> str:
    """Key of the sessions in which these engines are timed on this host."""
    return digest_of(
        {
            "schema": SCHEMA,
            "target": target,
            "engines": {e.variant: [e.backend, e.engine.digest] for e in engines},
            "data": data.digest,
            "host": this_host().identity(),
        }
    )


def _session(
    store: Store, target: str, engines: Sequence[TimedEngine], data: Artifact, settings: LatencySettings
) -> LatencySession:
    host = this_host()
    started, load_before = datetime.now(UTC), _load()
    dataset = load_dataset(data, "verdict")
    rows: list[Latency] = []
    batches = batch_sizes(dataset)
    with engine_errors(), ExitStack() as stack:
        loaded = {e.variant: stack.enter_context(find_backend(e.backend).load(e.engine.path)) for e in engines}
        backends = {e.variant: e.backend for e in engines}
        with progress.track(f"time {target}", total=len(batches) * len(engines) * settings.seconds) as bar:
            for batch in batches:
                feed = _feed(dataset, batch)
                calls = {variant: engine.prepare(feed) for variant, engine in loaded.items()}
                times = take_turns(calls, settings, advance=bar.advance)
                rows += [_latency(v, backends[v], batch, np.asarray(seconds)) for v, seconds in times.items()]
    load = (load_before, _load())
    session = LatencySession(
        target=target,
        started=started.isoformat(timespec="seconds"),
        host=host.facts(),
        load=load,
        latencies=tuple(rows),
        notes=_notes(rows, load, host.cpus, int8_note(host)),
    )
    store.observe(KIND, session_key(target, engines, data), session.model_dump(mode="json"))
    return session


def batch_sizes(dataset: Dataset) -> tuple[int, ...]:
    """Batch sizes to time: the smallest allowed (1 where it is) and the one that the model is tuned for."""
    if not dataset.batched:
        return (1,)
    return tuple(sorted({dataset.batch_min, dataset.batch_opt}))


def take_turns(
    calls: Mapping[str, Inference], settings: LatencySettings, *, advance: Callable[[float], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of each counted run of each call, the calls taking turns in blocks.

    Args:
        calls: what to run, by name.
        settings: how often.
        advance: told the seconds spent, for a bar.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for call in calls.values():
        _warm_up(call, settings.warmup_s)
    order = random.Random(0)  # noqa: S311 - the order of turns, nothing secret
    with _no_collection():
        while waiting := [n for n in calls if _wants_more(len(times[n]), spent[n], settings)]:
            order.shuffle(waiting)
            for name in waiting:
                seconds = _block(calls[name], settings.block)
                times[name] += seconds
                spent[name] += sum(seconds)
                if advance is not None:
                    advance(sum(seconds))
    return times


def _wants_more(runs: int, seconds: float, settings: LatencySettings) -> bool:
    return runs < settings.min_runs or (seconds < settings.seconds and runs < settings.max_runs)


def _block(call: Inference, runs: int) -> list[float]:
    call()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _warm_up(call: Inference, seconds: float) -> None:
    start = time.perf_counter()
    runs = 0
    while runs < 3 or time.perf_counter() - start < seconds:
        call()
        runs += 1
        progress.checkpoint()


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _feed(dataset: Dataset, batch: int) -> dict[str, np.ndarray]:
    feed, _ = next(dataset.feeds(batch if dataset.batched else None))
    return {name: np.ascontiguousarray(value) for name, value in feed.items()}


def _latency(variant: str, backend: str, batch: int, seconds: np.ndarray) -> Latency:
    p50, p90, p99 = (float(v) * 1e3 for v in np.percentile(seconds, (50, 90, 99)))
    return Latency(
        variant=variant,
        backend=backend,
        batch=batch,
        runs=len(seconds),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=float(seconds.max()) * 1e3,
        throughput=1e3 * batch / p50,
        jitter=not p99 <= JITTER * p50,
    )


def _notes(rows: Sequence[Latency], load: tuple[float, float], cpus: int, int8: str) -> tuple[str, ...]:
    notes = []
    jittery = sorted({row.variant for row in rows if row.jitter})
    if jittery:
        cause = "other processes used the CPU" if max(load) > cpus + 0.5 else "the machine was not quiet"
        notes.append(
            f"p99 is over {JITTER:g} x p50 for {', '.join(jittery)}: {cause} (load {load[0]:.1f}, {load[1]:.1f})"
        )
    if int8 and any("int8" in row.variant for row in rows):
        notes.append(int8)
    return tuple(notes)


def _load() -> float:
    return round(os.getloadavg()[0], 2)
