"""Turns a function and plain arguments into its result, computed in a child process under time and memory limits.

For work that may crash, hang, fill the memory, or read a file that somebody else wrote: parsers, simplifiers, builders.
What crosses the border is JSON, in both directions: nothing that a child answers can run code in the parent. Arrays and
models travel as files.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import psutil

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError

R = TypeVar("R")

Reason = Literal["raised", "crashed", "time", "memory"]

_GB = 1 << 30
_POLL_SECONDS = 0.05
_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Limits:
    """What a child may use.

    Attributes:
        seconds: wall time, start-up included (importing torch alone can take several seconds on a busy machine).
        memory: bytes of private writable memory of the child (RLIMIT_DATA, so files that are only mapped do not count),
            and resident bytes of the child and its own children together.
    """

    seconds: float = 300
    memory: int = 8 * _GB


class ChildError(EnginesmithError):
    """A child that gave no result.

    Attributes:
        reason: it `raised` an exception, `crashed` (a signal, or an exit without a word), or was stopped for its `time`
            or `memory`.
        kind: name of the exception class when it raised, name of the signal when it crashed, else empty.
    """

    reason: Reason = "crashed"
    kind: str = ""

    @classmethod
    def of(cls, reason: Reason, found: str, *, kind: str = "", hint: str = "", log: str = "") -> ChildError:
        """An error with the last lines of the child's output as details."""
        lines = [line.rstrip() for line in log.splitlines() if line.strip()]
        error = cls(found, hint=hint, details=lines[-_TAIL_LINES:])
        error.reason = reason
        error.kind = kind
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return (*super().__reduce__()[:2], {"reason": self.reason, "kind": self.kind})


def call(function: Callable[..., R], /, *, limits: Limits = Limits(), what: str = "", **arguments: object) -> R:
    """Call a module-level function in a child process and return what it returns.

    Args:
        function: importable by its module and name; it must not be defined in `__main__`.
        limits: time and memory.
        what: how errors call the work; the function's name when empty.
        arguments: JSON data; paths are passed as strings.

    Returns:
        the function's result, which must be JSON data too (tuples arrive as lists).

    Raises:
        ChildError: no result; `reason` says why. The child's own last lines are in the details.
        EnginesmithError: the function raised one; it arrives with all its parts.
        Interrupted: the user asked to stop; the child and its children are gone by then.
    """
    what = what or function.__name__
    request = {"module": function.__module__, "name": function.__qualname__, "arguments": arguments}
    with _folder() as folder:
        (folder / "request.json").write_text(json.dumps({**request, "memory": limits.memory, "parent": os.getpid()}))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", "from enginesmith.tasks.child import _main; _main()", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            stopped = _wait(process, limits)
        finally:
            _kill(process)
        return cast(R, _result(folder, process.returncode, stopped, limits, what))


def _wait(process: subprocess.Popen[bytes], limits: Limits) -> Reason | None:
    """Wait for the end, or for the first limit that is exceeded."""
    deadline = time.monotonic() + limits.seconds
    while process.poll() is None:
        progress.checkpoint()
        if time.monotonic() > deadline:
            return "time"
        if _resident(process.pid) > limits.memory:
            return "memory"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
    return None


def _resident(pid: int) -> int:
    """Resident bytes of a process and its descendants; 0 when it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in family:
        with contextlib.suppress(psutil.Error):
            total += member.memory_info().rss
    return total


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child's whole session; what it started goes with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(folder: Path, code: int, stopped: Reason | None, limits: Limits, what: str) -> object:
    log = (folder / "log").read_bytes().decode(errors="replace")
    if stopped == "time":
        raise ChildError.of("time", f"{what} did not finish in {limits.seconds:g} s and was stopped", log=log)
    if stopped == "memory":
        raise ChildError.of("memory", f"{what} needed more than {_size(limits.memory)} and was stopped", log=log)
    try:
        answer = json.loads((folder / "answer.json").read_text())
    except (OSError, ValueError):
        if code == 0:
            raise ChildError.of("crashed", f"{what} ended without an answer", log=log) from None
        if code < 0:
            kind = _signal(-code)
            raise ChildError.of("crashed", f"{what} crashed with {kind}", kind=kind, log=log) from None
        raise ChildError.of("crashed", f"{what} ended with exit code {code}", log=log) from None
    if "result" in answer:
        return answer["result"]
    error = answer["error"]
    if "found" in error:
        raise EnginesmithError(
            error["found"], where=error["where"], key=error["key"], hint=error["hint"], details=error["details"]
        )
    if error["kind"] == "MemoryError":
        raise ChildError.of("memory", f"{what} needed more than {_size(limits.memory)}", kind=error["kind"], log=log)
    message = f"{what} failed: {error['kind']}: {error['message']}"
    raise ChildError.of("raised", message, kind=error["kind"], log=error["trace"])


def _size(count: int) -> str:
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{count / (1 << 20):.0f} MB"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="enginesmith-child-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _main() -> None:
    """The child's side: read the request, limit this process, call, answer."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    _die_with(request["parent"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], request["memory"]))
    try:
        function: Any = importlib.import_module(request["module"])
        for part in request["name"].split("."):
            function = getattr(function, part)
        answer = json.dumps({"result": function(**request["arguments"])})
    except BaseException as error:  # everything is for the parent to judge
        answer = json.dumps({"error": _described(error)})
    part = folder / "answer.part"
    part.write_text(answer)
    part.rename(folder / "answer.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a vendor's library may crash in its own clean-up; the answer is complete


def _described(error: BaseException) -> dict[str, object]:
    if isinstance(error, EnginesmithError):
        parts = {name: getattr(error, name) for name in ("found", "where", "key", "hint")}
        return {**parts, "details": list(error.details)}
    trace = "".join(traceback.format_exception(error))
    return {"kind": type(error).__name__, "message": str(error).strip()[:2000], "trace": trace[-8000:]}


def _die_with(parent: int) -> None:
    """Linux: be killed when the parent ends, however it ends."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
