"""Turns a build request into an engine's folder inside a child process that can crash, hang or be killed without harm.

The parent starts ``python -m enginesmith.tasks.engines.child WORK`` with the request in WORK; the child writes its
progress to one pipe as JSON lines, everything else it and the vendor's library print to WORK/log, and its result to
WORK/result. The child dies with its parent: the kernel is asked to kill it (Linux), and a thread ends it when the pipe
that the parent holds open closes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from enginesmith.tasks.engines.manifest import write_manifest
from enginesmith.tasks.engines.precision import check_obeyed, load_model
from enginesmith.tasks.engines.profiles import check_profiles
from enginesmith.tasks.engines.spec import (
    Backend,
    BuildRequest,
    BuildResult,
    Built,
    EngineError,
    Option,
    Progress,
    Tick,
    merged_options,
)

TIMEOUT = Option("timeout", "float", 3600.0, "seconds after which the builder is stopped")
LOG_TAIL = 20
_POLL_SECONDS = 0.1


def build_engine(backend: Backend, request: BuildRequest, out: Path, *, tick: Tick | None = None) -> BuildResult:
    """Check a request, build it in a child process, compare precisions, and write engine.json.

    Args:
        backend: who builds.
        request: what to build.
        out: an existing, empty folder; it holds the engine's files, engine.json and precision.json afterwards.
        tick: called about ten times a second with the builder's progress; what it raises stops the build.

    Raises:
        EngineError: the backend is not installed, the request cannot be satisfied, the builder failed, crashed, was
            killed or ran out of time (with the tail of its log), or the engine does not have the precision asked for.
    """
    if backend.version() is None:
        raise EngineError(
            f"{backend.name} is not installed",
            key="backend",
            hint=f'pip install "enginesmith[{backend.extra}]"' if backend.extra else "pip install enginesmith",
        )
    options = merged_options((*backend.options, TIMEOUT), request.options, backend=backend.name)
    timeout = options.pop(TIMEOUT.name)
    request = replace(request, options=options)
    check_profiles(load_model(request.model, weights=False), request.profiles)
    built, seconds, peak = _run_child(backend, request, out, tick or _silent, float(str(timeout)))
    check_obeyed(built.layers, backend=backend.name, variant=request.variant)
    manifest = write_manifest(request, built, out, backend=backend.name, fingerprint=backend.fingerprint())
    return BuildResult(manifest, built.layers, seconds, peak)


def _run_child(
    backend: Backend, request: BuildRequest, out: Path, tick: Tick, timeout: float
) -> tuple[Built, float, int]:
    name = backend.name
    cls = type(backend)
    with tempfile.TemporaryDirectory(prefix="enginesmith-build-") as folder:
        work = Path(folder)
        absolute = replace(request, model=request.model.resolve())
        (work / "request").write_bytes(
            pickle.dumps((cls.__module__, cls.__qualname__, absolute, out.resolve(), os.getpid()))
        )
        started = time.monotonic()
        status = _supervise(
            [sys.executable, "-m", __name__, str(work)], work, timeout=timeout, tick=tick, what=f"{name}'s builder"
        )
        seconds = time.monotonic() - started
        result = work / "result"
        if status != 0 or not result.exists():
            raise EngineError(
                f"{name}'s builder {_describe(status)}",
                where=str(request.model),
                details=_tail(work / "log"),
                hint="the log above is the builder's own; the pipeline itself is unharmed",
            )
        outcome, peak = pickle.loads(result.read_bytes())  # noqa: S301 - written by our own child
    if isinstance(outcome, EngineError):
        raise outcome
    built: Built = outcome
    return built, seconds, peak


def _supervise(command: list[str], work: Path, *, timeout: float, tick: Tick, what: str) -> int:
    """Run a command to its end and give its exit status; kill it and its children when time is up or `tick` raises."""
    paths = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p) or str(Path.cwd())
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0", "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    latest = _Latest()
    reader = threading.Thread(target=latest.follow, args=(process.stdout,), daemon=True)
    reader.start()
    deadline = time.monotonic() + timeout
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
            tick(latest.progress)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{what} took longer than {timeout:g} s and was stopped"
                    + (f" (it was at: {latest.progress.phase})" if latest.progress.phase else ""),
                    key="options.timeout",
                    details=_tail(work / "log"),
                    hint="raise the target's option timeout (seconds)",
                )
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdin.close()
        reader.join(timeout=1)
        process.stdout.close()


class _Latest:
    """The last progress line that the child wrote."""

    def __init__(self) -> None:
        self.progress = Progress()

    def follow(self, pipe: IO[bytes]) -> None:
        with suppress(ValueError, OSError):
            for line in pipe:
                with suppress(ValueError, TypeError):
                    self.progress = Progress(**json.loads(line))


def _describe(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        killed = " (often: out of memory)" if -status == signal.SIGKILL else ""
        return f"was killed by {name}{killed}"
    return f"ended with exit code {status}"


def _tail(log: Path) -> list[str]:
    text = log.read_bytes()[-65536:].decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LOG_TAIL:]


def _silent(progress: Progress) -> None:
    """Watch nothing."""


def main(argv: list[str]) -> int:
    """The child's own entry: read WORK/request, build, write WORK/result."""
    _settle_addresses()
    work = Path(argv[1])
    written = (work / "request").read_bytes()
    module, cls, request, out, parent = pickle.loads(written)  # noqa: S301 - written by our own parent
    _die_with_parent(parent)
    say = _speaker()
    outcome: Built | EngineError
    try:
        backend: Backend = getattr(importlib.import_module(module), cls)()
        outcome = backend.compile(request, out, say)
    except EngineError as error:
        outcome = error
    temporary = work / "result.new"
    temporary.write_bytes(pickle.dumps((outcome, _peak_memory())))
    temporary.rename(work / "result")
    sys.stderr.flush()
    os._exit(0)  # the engine is written: a vendor library that crashes while it unloads does not matter any more


def _settle_addresses() -> None:
    """Start again without address space randomization, where the kernel allows it.

    TensorRT orders its internal names by address, so that two builds of one graph differ in bytes; with fixed addresses
    they agree.
    """
    addr_no_randomize, ask = 0x0040000, 0xFFFFFFFF
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    current = libc.personality(ask)
    if current == -1 or current & addr_no_randomize or libc.personality(current | addr_no_randomize) == -1:
        return
    if libc.personality(ask) & addr_no_randomize:
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this very program again


def _speaker() -> Callable[[Progress], None]:
    """A function that sends progress to the parent; from here on, whatever else prints goes to the log."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(progress: Progress) -> None:
        line: Mapping[str, object] = {"phase": progress.phase, "done": progress.done}
        with suppress(OSError):
            channel.write(json.dumps(line).encode() + b"\n")

    return say


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _peak_memory() -> int:
    """Highest resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main(sys.argv)
