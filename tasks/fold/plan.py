"""Turns the data flow of a module into the folds that cannot change it, and a reason for every other BatchNorm."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.fold.flow import Flow, Node, calls_of
from enginesmith.tasks.fold.layers import (
    in_channels,
    is_norm,
    layout_of,
    norm_of,
    obstacle,
    out_channels,
)

Side = Literal["after", "before"]


@dataclass(frozen=True)
class Part:
    """A layer that takes up some channels of a BatchNorm: those from `start` to `stop`."""

    layer: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fold:
    """A BatchNorm that can be folded.

    Attributes:
        norm: its module path.
        side: it stands ``after`` the layers in the data flow, or ``before`` the layer.
        parts: the layers that take it up; more than one behind a concatenation.
    """

    norm: str
    side: Side
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        layers = ", ".join(part.layer for part in self.parts)
        return f"{self.norm} into {layers}"


@dataclass(frozen=True)
class Kept:
    """A BatchNorm that stays, and why."""

    norm: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What is folded, in the order of the data flow, and what is not."""

    folds: tuple[Fold, ...]
    kept: tuple[Kept, ...]


class _Refused(Exception):  # noqa: N818 - a reason, caught where it is listed
    pass


def plan_folds(module: nn.Module, flow: Flow, skip: tuple[str, ...] = ()) -> Plan:
    """Decide for each BatchNorm of a module in eval mode.

    Folded is a BatchNorm that is called once, normalizes with stored statistics, and

    1. gets the whole output of a convolution, transposed convolution or linear layer whose channel axis is its own,
       through nothing but Identity, Dropout, a Flatten of size-one axes, folded BatchNorms, and concatenations along
       the channel axis of such outputs; or
    2. feeds nothing but one such layer, where its shift reaches every output alike: without zero padding, or without a
       shift; through Identity, Dropout, and for a linear layer also Flatten.

    Every layer that takes one up is called once, feeds nothing else on the way (1), shares its weight with nobody, and
    computes what its class says.

    Args:
        module: the module.
        flow: its data flow.
        skip: patterns of module paths that are left alone.

    Raises:
        EnginesmithError: a pattern in `skip` matches no BatchNorm.
    """
    norms = {path: layer for path, layer in module.named_modules() if is_norm(layer)}
    for pattern in skip:
        if not any(fnmatchcase(path, pattern) for path in norms):
            raise EnginesmithError(
                f"{pattern!r} matches no BatchNorm",
                key="fold.skip",
                hint=f"there are {', '.join(list(norms)[:8])}" if norms else "the module has none",
            )
    planner = _Planner(module, flow)
    paths = {id(layer): path for path, layer in norms.items()}
    folds: list[Fold] = []
    kept: dict[str, str] = {}
    for node, layer in calls_of(flow, module):
        path = paths.get(id(layer))
        if path is None or path in kept:
            continue
        if any(fnmatchcase(path, pattern) for pattern in skip):
            kept[path] = "left out by fold.skip"
            continue
        try:
            folds.append(planner.fold(path, node, layer))
            planner.gone.add(node)
        except _Refused as refusal:
            kept[path] = str(refusal)
    done = {f.norm for f in folds}
    for path in norms:
        if path not in done and path not in kept:
            read = any(name.startswith(f"{path}.") for name in planner.read)
            kept[path] = flow.problem or ("forward uses its statistics itself" if read else "it is never called")
    return Plan(tuple(folds), tuple(Kept(path, kept[path]) for path in norms if path in kept))


class _Planner:
    def __init__(self, module: nn.Module, flow: Flow) -> None:
        self.module = module
        self.calls = Counter(id(layer) for _, layer in calls_of(flow, module))
        self.gone: set[Node] = set()  # calls of BatchNorms that are folded already: they hand their input on
        self.read = {n.target for n in flow.nodes if n.kind == "parameter"}
        self.owners: dict[int, list[str]] = {}
        for path, layer in module.named_modules():
            for parameter in layer._parameters.values():
                if parameter is not None:
                    self.owners.setdefault(_memory(parameter), []).append(path)

    def fold(self, path: str, node: Node, norm: nn.Module) -> Fold:
        self._check_norm(node, norm)
        channels = len(norm_of(norm).mean)
        if node.shape is None or len(node.shape) < 2 or node.shape[1] != channels:
            raise _Refused(f"its channel axis is not axis 1 of {node.shape}")
        try:
            return Fold(path, "after", tuple(self._parts(node.inputs[0], 0, channels)))
        except _Refused as refusal:
            behind = self._behind(node)
            if behind is None:
                raise
            try:
                return Fold(path, "before", (self._before(node, norm, *behind),))
            except _Refused as second:
                raise _Refused(f"{refusal}; and before {behind[0].target}: {second}") from None

    def _check_norm(self, node: Node, norm: nn.Module) -> None:
        found = obstacle(norm)
        if found:
            raise _Refused(found)
        if norm.training:
            raise _Refused("it is in training mode and uses the statistics of the batch")
        if getattr(norm, "running_mean", None) is None or getattr(norm, "running_var", None) is None:
            raise _Refused("it tracks no statistics and uses those of the batch")
        if self.calls[id(norm)] > 1:
            raise _Refused(f"it is called {self.calls[id(norm)]} times")
        if len(node.inputs) != 1:
            raise _Refused(f"it is called with {len(node.inputs)} tensors")

    def _parts(self, node: Node, start: int, channels: int) -> list[Part]:
        """The layers that make up a tensor's channels, which all go to one place."""
        if len(node.users) != 1:
            others = ", ".join(sorted({_shown(u) for u in node.users}))
            raise _Refused(f"the output of {_shown(node)} has {len(node.users)} uses: {others}")
        if node.kind == "same" or node in self.gone:
            return self._parts(node.inputs[0], start, channels)
        if node.kind == "flatten":
            inner = node.inputs[0].shape
            if inner is None or inner[1] != channels or any(n != 1 for n in inner[2:]):
                raise _Refused(f"{_shown(node)} mixes channels and positions")
            return self._parts(node.inputs[0], start, channels)
        if node.kind == "concat":
            if node.axis != 1:
                raise _Refused(f"{_shown(node)} joins along axis {node.axis}")
            parts: list[Part] = []
            end = start + channels
            for source in node.inputs:
                size = source.shape[1] if source.shape is not None and len(source.shape) > 1 else 0
                parts += self._parts(source, start, size)
                start += size
            if start != end:
                raise _Refused(f"{_shown(node)} joins the same tensor more than once")
            return parts
        if node.kind == "module":
            layer = self.module.get_submodule(node.target)
            if layout_of(layer) is not None:
                self._check_layer(node, layer)
                self._check_axis(node, layer)
                if out_channels(layer) != channels:
                    raise _Refused(f"{_shown(node)} has {out_channels(layer)} output channels, not {channels}")
                return [Part(node.target, start, start + channels)]
        raise _Refused(f"{_shown(node)} stands before it, not a convolution or linear layer")

    def _check_layer(self, node: Node, layer: nn.Module) -> None:
        found = obstacle(layer)
        if found:
            raise _Refused(f"{_shown(node)}: {found}")
        if self.calls[id(layer)] > 1:
            raise _Refused(f"{_shown(node)} is called {self.calls[id(layer)]} times")
        if len(node.inputs) != 1:
            raise _Refused(f"{_shown(node)} is called with {len(node.inputs)} tensors")
        for name, parameter in layer.named_parameters(recurse=False):
            others = [p for p in self.owners[_memory(parameter)] if p != node.target]
            if len(self.owners[_memory(parameter)]) > 1:
                raise _Refused(f"{_shown(node)} shares its {name} with {', '.join(others) or 'itself'}")
            if f"{node.target}.{name}" in self.read:
                raise _Refused(f"the {name} of {_shown(node)} is used elsewhere too")
            if not parameter.is_floating_point():
                raise _Refused(f"{_shown(node)} has a {name} of type {parameter.dtype}")

    def _check_axis(self, node: Node, layer: nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)  # noqa: S101 - for the type checker
        rank = len(node.shape or ())
        if layout_of(layer) == "linear" and rank != 2:
            raise _Refused(f"{_shown(node)} has its channels on the last of {rank} axes, the BatchNorm on axis 1")
        if layout_of(layer) != "linear" and rank != weight.dim():
            raise _Refused(f"{_shown(node)} runs without a batch axis")

    def _behind(self, node: Node) -> tuple[Node, bool] | None:
        """The layer that alone uses a BatchNorm's output, and whether there is a flattening in between."""
        flat = False
        while len(node.users) == 1:
            node = node.users[0]
            if node.kind == "flatten":
                flat = True
            elif node.kind == "module" and layout_of(self.module.get_submodule(node.target)) is not None:
                return node, flat
            elif node.kind != "same":
                return None
        return None

    def _before(self, node: Node, norm: nn.Module, behind: Node, flat: bool) -> Part:
        layer = self.module.get_submodule(behind.target)
        self._check_layer(behind, layer)
        statistics = norm_of(norm)
        channels = len(statistics.mean)
        layout = layout_of(layer)
        shifts = bool(statistics.shift.any())
        if layout == "linear":
            shape = node.shape or ()
            positions = 1
            for size in shape[2:]:
                positions *= size
            if (len(shape) > 2 and not flat) or in_channels(layer) != channels * positions:
                raise _Refused("its input axis is not the channel axis")
        else:
            self._check_axis(behind, layer)
            if flat or in_channels(layer) != channels:
                raise _Refused("its input axis is not the channel axis")
            if layout == "transposed" and shifts:
                raise _Refused("a shift before a transposed convolution is not the same at borders")
            if shifts and _pads_zeros(layer):
                raise _Refused("zero padding does not know the shift")
        return Part(behind.target, 0, channels)


def _pads_zeros(layer: nn.Module) -> bool:
    padding = getattr(layer, "padding", 0)
    if getattr(layer, "padding_mode", "zeros") != "zeros" or padding == "valid":
        return False
    if padding == "same":
        kernel = getattr(layer, "kernel_size", ())
        return any(k != 1 for k in kernel)
    return any(padding) if isinstance(padding, tuple) else bool(padding)


def _memory(parameter: torch.Tensor) -> int:
    return parameter.data_ptr() if parameter.numel() else id(parameter)


def _shown(node: Node) -> str:
    return repr(node.target) if node.kind in ("module", "same", "flatten") else f"{node.target} ({node.kind})"
