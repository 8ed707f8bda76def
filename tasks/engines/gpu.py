"""Turns the installed NVIDIA driver into device names, compute capabilities and versions, through its own library."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_SUCCESS = 0
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        name: as the driver calls it.
        capability: compute capability, such as "8.9".
        memory_bytes: its memory.
    """

    name: str
    capability: str
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.name}, SM {self.capability}, {self.memory_bytes / 2**30:.0f} GiB"


@lru_cache(maxsize=1)
def devices() -> tuple[Device, ...]:
    """The GPUs that CUDA sees, in CUDA's order; empty without a driver or a GPU."""
    cuda = _library()
    if cuda is None or cuda.cuInit(0) != _SUCCESS:
        return ()
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return ()
    return tuple(_device(cuda, index) for index in range(count.value))


def driver_version() -> str:
    """Version of the NVIDIA kernel driver; empty when there is none."""
    try:
        text = _DRIVER_FILE.read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else ""


def _device(cuda: ctypes.CDLL, index: int) -> Device:
    handle, major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(handle), index)
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    return Device(name.value.decode(errors="replace"), f"{major.value}.{minor.value}", memory.value)


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
