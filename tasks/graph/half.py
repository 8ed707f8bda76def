"""FP16 storage on FP32 graphs: what can be in FP16, a typed graph emulated, and nodes switched run by run.

A rounding is a pair Cast(FLOAT→FLOAT16), Cast(FLOAT16→FLOAT): ONNX Runtime keeps such pairs at every optimization
level, whereas it runs a real FP16 graph in FP32 without most of the roundings.
"""

from enginesmith.tasks.graph.emulate import emulate
from enginesmith.tasks.graph.fp16 import (
    LARGEST,
    OVERFLOW,
    SMALLEST_NORMAL,
    SUBNORMAL,
    VANISH,
    bodies,
    candidates,
    is_constant,
    obstacles,
    operands,
    prepared,
    results,
    round_half,
)
from enginesmith.tasks.graph.switched import Segment, SwitchedModel

__all__ = [
    "LARGEST",
    "OVERFLOW",
    "SMALLEST_NORMAL",
    "SUBNORMAL",
    "VANISH",
    "Segment",
    "SwitchedModel",
    "bodies",
    "candidates",
    "emulate",
    "is_constant",
    "obstacles",
    "operands",
    "prepared",
    "results",
    "round_half",
]
