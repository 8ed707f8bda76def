"""Turns a graph and its declared inputs into what all rules on graphs find, without running it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from enginesmith.tasks.firewalls.dims import declared_dims
from enginesmith.tasks.firewalls.findings import Finding, in_order
from enginesmith.tasks.firewalls.gpus import Gpu
from enginesmith.tasks.firewalls.hardware import check_hardware
from enginesmith.tasks.firewalls.integers import check_integers
from enginesmith.tasks.firewalls.numerics import Ranges, check_numerics
from enginesmith.tasks.firewalls.profiles import check_profiles
from enginesmith.tasks.firewalls.sized import Sizer
from enginesmith.tasks.firewalls.subgraphs import check_subgraphs
from enginesmith.tasks.firewalls.support import check_support
from enginesmith.tasks.settings import InputSettings


def graph_findings(
    model: ir.Model,
    inputs: Mapping[str, InputSettings],
    backends: Iterable[str] = (),
    *,
    ranges: Ranges | None = None,
    gpu: Gpu | None = None,
) -> list[Finding]:
    """All findings of the graph rules, worst first; they do not raise on a valid model.

    Args:
        model: a valid model; it is not changed.
        inputs: declared inputs.
        backends: backends of the targets: what only concerns others is left out.
        ranges: largest absolute value of tensors on calibration data, where it was measured.
        gpu: the GPU that hardware advice is about; without one there is none.
    """
    wanted = set(backends)
    sizer = Sizer(model, inputs)
    sized = sizer.at({name: given.opt for name, given in declared_dims(inputs).items()})
    findings = [*check_profiles(model, sizer, inputs), *check_integers(model), *check_numerics(model, sized, ranges)]
    if "tensorrt" in wanted:
        findings += [*check_support(model), *check_subgraphs(model, wanted)]
    if gpu is not None and not any(f.rule == "shape/size-refused" and f.severity == "error" for f in findings):
        findings += check_hardware(model, sized, gpu)
    return in_order(f for f in findings if not f.backend or f.backend in wanted)
