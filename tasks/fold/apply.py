"""Turns a module and a plan into the folded module: FP64 arithmetic, one rounding at the end, and what was done."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from enginesmith.tasks.batchnorm import (
    Clamp,
    ClampedChannel,
    Floats,
    Norm,
    Observed,
    check_norm,
    clamp_variance,
    constant_channels,
    flushed,
    fold_after,
    fold_before,
    needs_scale_shift,
    weight_peaks,
)
from enginesmith.tasks.fold.layers import groups_of, is_norm, layout_of, norm_of, obstacle, weight_of
from enginesmith.tasks.fold.plan import Fold, Kept, Plan
from enginesmith.tasks.modules import Structure, call_module


@dataclass
class Folded:
    """A folded module.

    Attributes:
        module: it.
        structure: how it differs from what the factory builds.
        clamped: raised variances, by BatchNorm.
        constants: output channels that became constant, by layer.
        kept: BatchNorms that stay, with the reason; those that became a scale and shift are among them.
        flushed: weights and biases that FP32 could hold only as subnormal numbers, now zero.
    """

    module: nn.Module
    structure: Structure
    clamped: dict[str, tuple[ClampedChannel, ...]]
    constants: dict[str, tuple[int, ...]]
    kept: tuple[Kept, ...]
    flushed: int


@dataclass
class _Work:
    """Weights in float64 while folds are applied to them."""

    weights: dict[str, Floats] = field(default_factory=dict)
    biases: dict[str, Floats | None] = field(default_factory=dict)


def observe_norms(module: nn.Module, feeds: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Observed]:
    """What every BatchNorm of a module sees on some feeds."""
    distance: dict[str, Floats] = {}
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    handles = []

    def watch(path: str, mean: torch.Tensor) -> None:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = args[0].transpose(0, 1).reshape(len(mean), -1)
            seen = (x - mean[:, None].to(x.dtype)).abs().amax(dim=1).double().numpy()
            distance[path] = np.fmax(distance.get(path, 0.0), seen)
            low[path] = min(low.get(path, float("inf")), float(output.min()))
            high[path] = max(high.get(path, float("-inf")), float(output.max()))

        handles.append(module.get_submodule(path).register_forward_hook(hook))

    for path, layer in module.named_modules():
        mean = getattr(layer, "running_mean", None)
        if is_norm(layer) and isinstance(mean, torch.Tensor):
            watch(path, mean)
    try:
        for feed in feeds:
            call_module(module, feed)
    finally:
        for handle in handles:
            handle.remove()
    return {path: Observed(distance[path], high[path] - low[path]) for path in distance}


def apply_plan(
    module: nn.Module, plan: Plan, clamp: Clamp, observed: Mapping[str, Observed], tolerance: float
) -> Folded:
    """Fold a copy of a module.

    Args:
        module: in eval mode; it is left as it is.
        plan: what to fold.
        clamp: ``auto``, ``off``, or a floor for every variance.
        observed: what each BatchNorm saw on real inputs; those that were never seen are not clamped.
        tolerance: what ``auto`` may change of a BatchNorm's output, relative to that output's range.

    Raises:
        EnginesmithError: statistics that define no function.
    """
    result = copy.deepcopy(module)
    work = _Work()
    clamped: dict[str, tuple[ClampedChannel, ...]] = {}
    identities: list[str] = []
    kept = list(plan.kept)
    for fold in plan.folds:
        norm = norm_of(module.get_submodule(fold.norm))
        check_norm(norm, fold.norm)
        raised, changed = _clamped(module, fold, norm, work, clamp, observed.get(fold.norm), tolerance)
        broken = _try_fold(module, fold, raised, work)
        if broken:
            kept.append(Kept(fold.norm, broken))
            continue
        identities.append(fold.norm)
        if changed:
            clamped[fold.norm] = changed
    biases: dict[str, int] = {}
    count = 0
    constants: dict[str, tuple[int, ...]] = {}
    for path, weight in work.weights.items():
        layer = result.get_submodule(path)
        bias = work.biases[path]
        layout = layout_of(layer)
        assert layout is not None  # noqa: S101 - only layers with one are in a plan
        if bias is not None and getattr(layer, "bias", None) is None:
            biases[path] = len(bias)
        weight, tiny = flushed(weight)
        count += tiny
        dead = constant_channels(weight, layout, groups_of(layer))
        if dead:
            constants[path] = dead
        work.weights[path] = weight
    scale_shifts = {k.norm: n for k in kept if (n := _needs_scale_shift(module, k.norm))}
    structure = Structure(
        identities=tuple(sorted(identities)),
        scale_shifts=dict(sorted(scale_shifts.items())),
        biases=dict(sorted(biases.items())),
    )
    norms = {path: norm_of(module.get_submodule(path)) for path in scale_shifts}
    structure.apply(result)
    for path, weight in work.weights.items():
        _assign(result.get_submodule(path), "weight", weight)
        bias = work.biases[path]
        if bias is not None:
            _assign(result.get_submodule(path), "bias", bias)
    for path, norm in norms.items():
        _assign(result.get_submodule(path), "scale", norm.scale)
        _assign(result.get_submodule(path), "shift", norm.shift)
    count += _flush_subnormals(result)
    return Folded(result.requires_grad_(False), structure, clamped, constants, tuple(kept), count)


def _clamped(
    module: nn.Module,
    fold: Fold,
    norm: Norm,
    work: _Work,
    clamp: Clamp,
    seen: Observed | None,
    tolerance: float,
) -> tuple[Norm, tuple[ClampedChannel, ...]]:
    if seen is None:
        return norm, ()
    peaks, bias = np.ones_like(norm.var), norm.mean.copy()
    if fold.side == "after":
        for part in fold.parts:
            layer = module.get_submodule(part.layer)
            weight, start = _current(work, part.layer, layer)
            layout = layout_of(layer)
            assert layout is not None  # noqa: S101 - only layers with one are in a plan
            peaks[part.start : part.stop] = weight_peaks(weight, layout, groups_of(layer))
            bias[part.start : part.stop] = 0.0 if start is None else start
    return clamp_variance(
        norm, clamp, weight_peak=peaks, bias=bias, distance=seen.distance, tolerance=tolerance * seen.span
    )


def _try_fold(module: nn.Module, fold: Fold, norm: Norm, work: _Work) -> str:
    """Fold one BatchNorm into the working weights, or say why that gives no finite FP32 weights."""
    results: dict[str, tuple[Floats, Floats | None]] = {}
    for part in fold.parts:
        layer = module.get_submodule(part.layer)
        layout = layout_of(layer)
        assert layout is not None  # noqa: S101 - only layers with one are in a plan
        weight, bias = _current(work, part.layer, layer)
        change = fold_after if fold.side == "after" else fold_before
        with np.errstate(invalid="ignore", over="ignore"):
            results[part.layer] = change(
                weight, bias, norm.part(slice(part.start, part.stop)), layout, groups_of(layer)
            )
    largest = float(np.finfo(np.float32).max)
    for weight, bias in results.values():
        for values in (weight, bias):
            if values is not None and not np.all(np.abs(values) <= largest):
                channels = ", ".join(map(str, norm.broken()[:8]))
                return "folded weights would not be finite" + (f" (channels {channels})" if channels else "")
    for path, (weight, bias) in results.items():
        work.weights[path], work.biases[path] = weight, bias
    return ""


def _current(work: _Work, path: str, layer: nn.Module) -> tuple[Floats, Floats | None]:
    if path in work.weights:
        return work.weights[path], work.biases[path]
    return weight_of(layer)


def _needs_scale_shift(module: nn.Module, path: str) -> int:
    """Channels of a BatchNorm whose statistics leave FP16's range while its scale and shift do not; else 0."""
    layer = module.get_submodule(path)
    if obstacle(layer) or layer.training or getattr(layer, "running_mean", None) is None:
        return 0
    norm = norm_of(layer)
    return len(norm.mean) if needs_scale_shift(norm) else 0


def _assign(layer: nn.Module, name: str, values: Floats) -> None:
    tensor = getattr(layer, name)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(values).to(tensor.dtype))


def _flush_subnormals(module: nn.Module) -> int:
    """Set subnormal FP32 numbers of every layer to zero, except the statistics of BatchNorms that stay."""
    count = 0
    for layer in module.modules():
        if is_norm(layer):
            continue
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if tensor is None or tensor.dtype != torch.float32:
                continue
            tiny = (tensor.abs() < torch.finfo(torch.float32).tiny) & (tensor != 0)
            found = int(tiny.sum())
            if found:
                with torch.no_grad():
                    tensor[tiny] = 0
                count += found
    return count
