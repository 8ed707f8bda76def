"""Turns this host into the facts that a latency depends on: CPU, its INT8 instructions, memory, GPUs, load."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

INTEGER_DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
FEATURES = ("sse4_1", "avx", "avx2", "f16c", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "fphp", "asimdhp")


@dataclass(frozen=True)
class Host:
    """One machine, as far as it decides how fast an engine runs.

    Attributes:
        cpu: model name.
        cpus: logical CPUs that this process may use.
        machine: architecture.
        system: operating system and its kernel's release.
        memory_bytes: physical memory.
        int8_instructions: instructions that add up 8-bit products without saturation in between.
        features: other vector extensions that kernels choose by.
        gpus: name, compute capability and memory of each GPU.
        driver: version of the GPU driver, empty without one.
    """

    cpu: str
    cpus: int
    machine: str
    system: str
    memory_bytes: int
    int8_instructions: tuple[str, ...]
    features: tuple[str, ...]
    gpus: tuple[str, ...]
    driver: str

    def facts(self) -> dict[str, object]:
        """The host as JSON data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def identity(self) -> dict[str, object]:
        """What two latencies must share to be one host's: everything but the kernel's release."""
        return {name: value for name, value in self.facts().items() if name not in ("system", "memory_bytes")}


def this_host() -> Host:
    """The machine that this process runs on."""
    from enginesmith.tasks.engines import gpu

    flags = cpu_flags()
    return Host(
        cpu=_cpu_model(),
        cpus=usable_cpus(),
        machine=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        int8_instructions=tuple(f for f in INTEGER_DOT_PRODUCTS if f in flags),
        features=tuple(f for f in FEATURES if f in flags),
        gpus=tuple(str(found) for found in gpu.devices()),
        driver=gpu.driver_version(),
    )


def cpu_flags() -> frozenset[str]:
    """Instruction set extensions of the CPU as the kernel names them; empty where it does not say."""
    return frozenset(_cpu_info(r"flags|Features").split())


def usable_cpus() -> int:
    """Logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def int8_note(host: Host) -> str:
    """What a reader has to know about INT8 on this host's CPU; empty when there is nothing to know."""
    if host.int8_instructions or host.machine not in ("x86_64", "AMD64"):
        return ""
    return (
        "this CPU has no VNNI: INT8 runs on kernels that widen to 16 bits to keep sums exact, "
        "so its latency says little about CPUs that have it"
    )


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(key: str) -> str:
    """The first value of a key in /proc/cpuinfo; empty where there is no such file or key."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^(?:{key})\s*:\s*(.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""
