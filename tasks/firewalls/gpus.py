"""Turns the name of a GPU into its peak arithmetic rates and memory bandwidth, from the vendor's data sheets."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from enginesmith.tasks.errors import EnginesmithError


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, without sparsity; accumulation in FP32.

    Attributes:
        name: as people write it.
        fp32: TFLOP/s outside the Tensor Cores.
        fp16: dense FP16 TFLOP/s of the Tensor Cores.
        int8: dense INT8 TOP/s.
        bandwidth: of its memory, GB/s.
        source: the vendor's document.
    """

    name: str
    fp32: float
    fp16: float
    int8: float
    bandwidth: float
    source: str

    def seconds(self, flops: float, size: float, precision: str = "fp16") -> float:
        """Roofline: the larger of arithmetic and memory time.

        Args:
            flops: floating-point operations, two per multiply-add.
            size: bytes read and written.
            precision: fp32, fp16 or int8.

        Source: Williams, Waterman, Patterson, "Roofline", Communications of the ACM 52 (4), 2009.
        """
        rate = {"fp32": self.fp32, "fp16": self.fp16, "int8": self.int8}[precision] * 1e12
        return max(flops / rate, size / (self.bandwidth * 1e9))


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 67, 989, 1979, 4800, "NVIDIA H200 Tensor Core GPU data sheet (SXM)"),
        Gpu("h100", 67, 989, 1979, 3350, "NVIDIA H100 Tensor Core GPU data sheet (SXM)"),
        Gpu("a100", 19.5, 312, 624, 2039, "NVIDIA A100 data sheet (80 GB, SXM)"),
        Gpu("a10", 31.2, 125, 250, 600, "NVIDIA A10 data sheet"),
        Gpu("a30", 10.3, 165, 330, 933, "NVIDIA A30 data sheet"),
        Gpu("l4", 30.3, 121, 242, 300, "NVIDIA L4 data sheet (rates halved: it states them with sparsity)"),
        Gpu("l40s", 91.6, 362, 733, 864, "NVIDIA L40S data sheet"),
        Gpu("t4", 8.1, 65, 130, 320, "NVIDIA T4 data sheet"),
        Gpu("v100", 15.7, 125, 62.8, 900, "NVIDIA V100 data sheet (SXM2); INT8 by dp4a, four times its FP32 rate"),
        Gpu("rtx-4090", 82.6, 165.2, 660.6, 1008, "NVIDIA Ada GPU architecture white paper, appendix A"),
        Gpu("rtx-3090", 35.6, 71, 284, 936, "NVIDIA Ampere GA102 white paper, appendix A"),
        Gpu("agx-orin", 5.3, 42.5, 85, 204.8, "NVIDIA Jetson AGX Orin technical brief (64 GB), GPU without DLA"),
        Gpu("orin-nano", 1.28, 10, 20, 68, "NVIDIA Jetson Orin Nano data sheet (8 GB), GPU"),
    )
}


def find_gpu(name: str, key: str = "") -> Gpu:
    """A GPU by its name: `h200`, `NVIDIA L4`, `RTX 4090`.

    Raises:
        EnginesmithError: none of this name is in the table.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?i)nvidia|geforce|jetson|tesla", "", name).lower()).strip("-")
    if plain in GPUS:
        return GPUS[plain]
    close = difflib.get_close_matches(plain, GPUS, n=1)
    raise EnginesmithError(
        f"there is no GPU {name!r} in the table",
        key=key,
        hint=f"did you mean {close[0]}?" if close else f"there are: {', '.join(GPUS)}",
    )
