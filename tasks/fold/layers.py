"""Turns a PyTorch layer into its role in folding: a BatchNorm, a layer that can take one up, or neither."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from enginesmith.tasks.batchnorm import Floats, Layout, Norm

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FORWARDS = ("forward", "_conv_forward", "_check_input_dim", "_output_padding")


def layout_of(layer: nn.Module) -> Layout | None:
    """How the layer's weight is laid out, None when it is no convolution or linear layer."""
    if isinstance(layer, _TRANSPOSED):
        return "transposed"
    if isinstance(layer, _CONVS):
        return "conv"
    return "linear" if isinstance(layer, nn.Linear) else None


def is_norm(layer: nn.Module) -> bool:
    """Whether the layer is a BatchNorm by class, or computes one from frozen statistics."""
    return isinstance(layer, _NORMS) or is_frozen_norm(layer)


def is_layer(layer: nn.Module) -> bool:
    """Whether tracing stops at this module: it takes part in folding as a whole."""
    return layout_of(layer) is not None or is_norm(layer)


def is_frozen_norm(layer: nn.Module) -> bool:
    """Whether a module of another class computes a BatchNorm: it has the statistics, and the results are the same.

    torchvision's and detectron2's FrozenBatchNorm2d are such. The class name proves nothing, so the module is run in
    float64 on random inputs and compared with the formula.
    """
    if isinstance(layer, _NORMS) or next(layer.children(), None) is not None:
        return False
    tensors = dict(layer.named_parameters(recurse=False)) | dict(layer.named_buffers(recurse=False))
    mean, var = tensors.get("running_mean"), tensors.get("running_var")
    if mean is None or var is None or mean.dim() != 1 or mean.shape != var.shape or not hasattr(layer, "eps"):
        return False
    if set(tensors) - {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}:
        return False
    return _computes_norm(layer, norm_of(layer))


def _computes_norm(layer: nn.Module, norm: Norm) -> bool:
    import copy

    double = copy.deepcopy(layer).double().eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, len(norm.mean), 3, 5, dtype=torch.float64, generator=generator) * 3 + 1
    try:
        with torch.no_grad():
            found = double(x).numpy()
    except Exception:  # a module that cannot be run like a BatchNorm is none
        return False
    expected = x.numpy() * norm.scale[:, None, None] + norm.shift[:, None, None]
    return found.shape == expected.shape and bool(np.allclose(found, expected, rtol=1e-9, atol=1e-12))


def norm_of(layer: nn.Module) -> Norm:
    """A BatchNorm's statistics in float64. Without affine parameters gamma is 1 and beta 0."""
    mean, var = (_float64(getattr(layer, name)) for name in ("running_mean", "running_var"))
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    gamma = np.ones_like(mean) if weight is None else _float64(weight)
    beta = np.zeros_like(mean) if bias is None else _float64(bias)
    eps: Any = layer.eps
    return Norm(gamma, beta, mean, var, float(eps))


def weight_of(layer: nn.Module) -> tuple[Floats, Floats | None]:
    """Weight and bias of a convolution or linear layer in float64."""
    bias = getattr(layer, "bias", None)
    weight: Any = layer.weight
    return _float64(weight), None if bias is None else _float64(bias)


def groups_of(layer: nn.Module) -> int:
    """Groups of a convolution, 1 for a linear layer."""
    return int(getattr(layer, "groups", 1))


def out_channels(layer: nn.Module) -> int:
    """Size of a layer's output channel axis."""
    return int(getattr(layer, "out_channels", 0) or getattr(layer, "out_features", 0))


def in_channels(layer: nn.Module) -> int:
    """Size of a layer's input channel axis."""
    return int(getattr(layer, "in_channels", 0) or getattr(layer, "in_features", 0))


def obstacle(layer: nn.Module) -> str:
    """Why a layer does not compute what its class says, empty when it does."""
    if parametrize.is_parametrized(layer):
        return "its weight is computed (torch.nn.utils.parametrize)"
    base = next((c for c in (*_CONVS, *_TRANSPOSED, nn.Linear, *_NORMS) if isinstance(layer, c)), None)
    if base is not None:
        own = [n for n in _FORWARDS if getattr(type(layer), n, None) is not getattr(base, n, None) or n in vars(layer)]
        if own:
            return f"its class {type(layer).__name__} has a {own[0]} of its own"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    if any(getattr(layer, name, None) for name in hooks[:2]):
        return "it has forward hooks (weight_norm and spectral_norm are such)"
    return ""


def _float64(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().cpu().to(torch.float64).numpy()
    return array.copy()
