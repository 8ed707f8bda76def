"""Turns a tensor's blocks into counts of what makes trouble later: NaN, infinity, beyond FP16, subnormal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from enginesmith.tasks.slim.tensors import Array, Tensor

# Per type: unsigned integer of the same width, and as bit patterns without the sign: infinity, the smallest value that
# rounds to infinity in FP16 (65520, half-way to the next power's step), the smallest normal FP16 (2**-14), the smallest
# normal number of the type itself.
_BITS: dict[str, tuple[type[np.unsignedinteger], int, int, int, int]] = {
    "F16": (np.uint16, 0x7C00, 0x7C00, 0x0400, 0x0400),
    "BF16": (np.uint16, 0x7F80, 0x4780, 0x3880, 0x0080),
    "F32": (np.uint32, 0x7F800000, 0x477FF000, 0x38800000, 0x00800000),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C, 0x04, 0x04),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F, 0x00, 0x08),  # no infinity, one NaN, and all of it within FP16's normal numbers
    "F64": (np.uint64, 0x7FF << 52, 0x40EFFE00 << 32, (1023 - 14) << 52, 1 << 52),
}


@dataclass
class Counts:
    """How many elements of a tensor are what.

    Attributes:
        nonfinite: NaN or infinite.
        beyond_fp16: finite, and infinite in FP16.
        tiny_fp16: not zero, and subnormal or zero in FP16.
        subnormal: subnormal in the tensor's own type; such numbers make CPUs several times slower.
    """

    nonfinite: int = 0
    beyond_fp16: int = 0
    tiny_fp16: int = 0
    subnormal: int = 0

    def add(self, dtype: str, block: Array, scratch: Array) -> None:
        """Count one block, not empty; other types than floating point have nothing to count.

        Args:
            dtype: safetensors' name of the element type.
            block: one-dimensional.
            scratch: memory to work in, uint8, at least as many bytes as the block.
        """
        if dtype == "C64":
            dtype, block = "F32", block.view(np.float32)
        if dtype not in _BITS:
            return
        unsigned, infinity, beyond, tiny, normal = _BITS[dtype]
        bits = scratch[: block.nbytes].view(unsigned)
        np.bitwise_and(block.view(unsigned), unsigned((1 << (8 * bits.itemsize - 1)) - 1), out=bits)
        if bits.max() >= beyond:
            nonfinite = int(np.count_nonzero(bits >= unsigned(infinity)))
            self.nonfinite += nonfinite
            self.beyond_fp16 += int(np.count_nonzero(bits >= unsigned(beyond))) - nonfinite
        np.subtract(bits, unsigned(1), out=bits)  # zero becomes the largest number
        smallest = bits.min()
        if tiny and smallest < unsigned(tiny - 1):
            self.tiny_fp16 += int(np.count_nonzero(bits < unsigned(tiny - 1)))
        if smallest < unsigned(normal - 1):
            self.subnormal += int(np.count_nonzero(bits < unsigned(normal - 1)))


@dataclass(frozen=True)
class DeadChannels:
    """Channels of one BatchNorm whose output does not depend on its input, or was never seen to vary."""

    norm: str
    channels: int
    zero_gain: int
    zero_variance: int


def dead_channels(tensors: Mapping[str, Tensor]) -> list[DeadChannels]:
    """BatchNorms (told by their statistics) with channels of gain zero or variance zero."""
    found = []
    for name in sorted(tensors):
        owner = re.fullmatch(r"(.*?)\.?running_var", name)
        if owner is None:
            continue
        gain = tensors.get(name.removesuffix("running_var") + "weight")
        zero_variance = _zeros(tensors[name])
        zero_gain = _zeros(gain) if gain is not None else 0
        if zero_gain or zero_variance:
            found.append(DeadChannels(owner.group(1) or ".", tensors[name].numel, zero_gain, zero_variance))
    return found


def _zeros(tensor: Tensor) -> int:
    return sum(int(np.count_nonzero(block == 0)) for block in tensor.blocks())
