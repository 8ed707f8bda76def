"""Turns this host and this process into facts worth recording: versions, hardware, and who is writing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from enginesmith.tasks.hardware import this_host
from enginesmith.tasks.stage import tool_version

TOOLS = (
    "numpy", "onnx", "onnx-ir", "onnxruntime", "onnxscript", "onnxsim", "polygraphy", "tensorrt", "tensorrt-rtx",
    "torch",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python, of enginesmith and of the installed tools that shape an engine."""
    found = {tool: tool_version(tool) for tool in TOOLS}
    return {
        "enginesmith": tool_version("enginesmith"),
        "python": platform.python_version(),
        **{tool: version for tool, version in found.items() if version != "absent"},
    }


def hardware() -> dict[str, str]:
    """What of this host a latency depends on, as texts; what it does not have is left out."""
    found: dict[str, str] = {}
    for name, value in this_host().facts().items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if text:
            found[name] = text
    return found


def git_commit(folder: Path) -> str:
    """The commit that a folder is checked out at, ``-dirty`` behind it when tracked files differ; empty outside git."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return str(done.stdout).strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class Process:
    """One process among all that this host ever ran: process numbers are used again, start times are not.

    Attributes:
        host: the host's name.
        pid: the process number.
        boot: what identifies this boot of the host and its process namespace; empty where neither is known.
        started: when the process started, in units that survive a change of the clock.
    """

    host: str
    pid: int
    boot: str
    started: str

    @classmethod
    def current(cls) -> Process:
        """The calling process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        """A running process of this host and process namespace."""
        return cls(platform.node().replace(" ", "_") or "unknown", pid, _boot(), _started(pid))

    @classmethod
    def read(cls, text: str) -> Process:
        """The process that `str` wrote; what follows is not read."""
        host, pid, boot, started, *_ = text.split(" ")
        return cls(host, int(pid), boot, started)

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.boot} {self.started}"

    def surely_gone(self) -> bool:
        """Whether this process cannot be running any more; False when it cannot be known from here."""
        here = Process.current()
        if self.host != here.host:
            return False
        boot, _, namespace = self.boot.partition("/")
        boot_here, _, namespace_here = here.boot.partition("/")
        if boot != boot_here:
            return True
        return namespace == namespace_here and _started(self.pid) != self.started


def _boot() -> str:
    """``boot/namespace``: two containers may share a host's name and boot, but not a process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Start time of a process, empty when there is none: clock ticks since boot, elsewhere seconds since 1970."""
    try:
        # proc(5): the command in parentheses may hold anything; the start time is field 22
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return ""
    import psutil

    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.NoSuchProcess:
        return ""
