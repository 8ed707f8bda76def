"""Turns the user's factory and stored weights into a PyTorch module with exactly these weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.usercode import UserCode
from enginesmith.tasks.weights import WEIGHTS, Weights, read_weights

FOLDS = "folds.json"


class ScaleShift(nn.Module):
    """A BatchNorm whose statistics FP16 cannot hold: ``x * scale + shift`` along axis 1, both float32.

    Args:
        channels: size of axis 1.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(channels))
        self.register_buffer("shift", torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (N, C, ...) in, the same out."""
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return x * self.scale.view(shape) + self.shift.view(shape)


class Structure(BaseModel):
    """How a folded module differs from what the factory builds; the content of folds.json.

    Attributes:
        identities: module paths of BatchNorms that were folded away.
        scale_shifts: module paths of BatchNorms that became a `ScaleShift`, and their channels.
        biases: module paths that got a bias, and its size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    identities: tuple[str, ...] = ()
    scale_shifts: dict[str, int] = {}
    biases: dict[str, int] = {}

    def apply(self, module: nn.Module) -> None:
        """Change a freshly built module accordingly; the new tensors are zeros and ones until weights are loaded."""
        for path, size in sorted(self.biases.items()):
            owner = module.get_submodule(path)
            weight = owner.weight
            assert isinstance(weight, torch.Tensor)  # noqa: S101 - for the type checker
            owner.bias = nn.Parameter(torch.zeros(size, dtype=weight.dtype), requires_grad=weight.requires_grad)
        for path in self.identities:
            replace_module(module, path, nn.Identity())
        for path, channels in sorted(self.scale_shifts.items()):
            replace_module(module, path, ScaleShift(channels))


def replace_module(root: nn.Module, path: str, new: nn.Module) -> None:
    """Put a module in the place of another one, under every name that the other one has."""
    old = root.get_submodule(path)
    new.train(old.training)
    for owner in list(root.modules()):
        for name, child in owner._modules.items():
            if child is old:
                owner._modules[name] = new


def build_module(factory: UserCode) -> nn.Module:
    """Call the factory. The module's weights are whatever the factory left in it. Call inside `importable`.

    Raises:
        EnginesmithError: it needs arguments, fails, or returns no `torch.nn.Module`.
    """
    function = factory.load()
    try:
        needed = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        needed = []
    if needed:
        raise EnginesmithError(
            f"the factory {factory.spec} needs arguments: {', '.join(needed)}",
            where=_place(function),
            key=factory.key,
            hint="write a function without arguments that returns the module, and name that one",
        )
    module = factory()
    if not isinstance(module, nn.Module):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise EnginesmithError(
            f"the factory {factory.spec} returns a {kind}, not a torch.nn.Module",
            where=_place(function),
            key=factory.key,
            hint="return the module alone, on the CPU, without wrappers",
        )
    return module


def load_module(factory: UserCode, weights: Path) -> nn.Module:
    """The factory's module with the weights that slim wrote, in eval mode, without gradients.

    Args:
        factory: ``module:function`` without arguments that returns a `torch.nn.Module`. Call inside `importable`.
        weights: weights.safetensors.

    Raises:
        EnginesmithError: see `build_module`; or names or shapes do not fit one another, all of them listed.
    """
    return _with_weights(build_module(factory), read_weights(weights), factory)


def load_folded(factory: UserCode, folded: Artifact) -> nn.Module:
    """The factory's module with its BatchNorms folded as folds.json says and the folded weights, in eval mode.

    Raises:
        EnginesmithError: as `load_module`; or the factory builds another module than the one that was folded.
    """
    structure = Structure.model_validate_json((folded.path / FOLDS).read_text())
    module = build_module(factory)
    try:
        structure.apply(module)
    except AttributeError as error:
        raise EnginesmithError(
            f"the factory {factory.spec} builds another module than the one that was folded: {error}", key=factory.key
        ) from error
    return _with_weights(module, read_weights(folded.path / WEIGHTS), factory)


def call_module(module: nn.Module, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a module on named inputs and name its outputs, without gradients.

    Inputs go by name when every name is a parameter of `forward`, else by position in the order of `feeds`. An output
    that is a dictionary or dataclass keeps its keys, nested ones joined by dots; others are ``output`` or
    ``output.0``, ``output.1``, …

    Raises:
        EnginesmithError: `forward` takes other inputs, or returns something that is no tensor.
    """
    args, kwargs = bind_inputs(module, feeds)
    with torch.no_grad():
        result = module(*args, **kwargs)
    outputs: dict[str, torch.Tensor] = {}
    _flatten(result, "", outputs)
    if not outputs:
        raise EnginesmithError(f"the module returns no tensor but {type(result).__name__}", key="model.factory")
    return outputs


def bind_inputs(
    module: nn.Module, feeds: Mapping[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Positional and keyword arguments for `forward`, by name where the names fit, else by position.

    Raises:
        EnginesmithError: `forward` takes fewer inputs, or needs more.
    """
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # TorchScript has none
        return tuple(feeds.values()), {}
    by_name = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if set(feeds) <= by_name:
        missing = [n for n, p in parameters.items() if n in by_name and n not in feeds and p.default is p.empty]
        if missing:
            raise _wrong_inputs(module, feeds, f"needs {', '.join(missing)} as well")
        return (), dict(feeds)
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in positional)
    unlimited = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if len(feeds) < needed or (len(feeds) > len(positional) and not unlimited):
        raise _wrong_inputs(module, feeds, f"takes {', '.join(p.name for p in positional) or 'nothing'}")
    return tuple(feeds.values()), {}


def _wrong_inputs(module: nn.Module, feeds: Mapping[str, torch.Tensor], found: str) -> EnginesmithError:
    return EnginesmithError(
        f"{type(module).__name__}.forward {found}; declared inputs are {', '.join(feeds)}",
        where=_place(type(module).forward),
        key="inputs",
        hint="name the inputs as forward names them",
    )


def _flatten(value: Any, name: str, outputs: dict[str, torch.Tensor]) -> None:
    """Add every tensor inside a value under its dotted name; numbers and None carry no tensor."""
    if isinstance(value, torch.Tensor):
        outputs[name or "output"] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(item, f"{name}.{key}" if name else str(key), outputs)
    elif isinstance(value, tuple | list):
        keys = getattr(value, "_fields", range(len(value)))
        for key, item in zip(keys, value, strict=True):
            _flatten(item, f"{name or 'output'}.{key}", outputs)
    elif is_dataclass(value):
        for field in fields(value):
            _flatten(getattr(value, field.name), f"{name}.{field.name}" if name else field.name, outputs)


def _with_weights(module: nn.Module, weights: Weights, factory: UserCode) -> nn.Module:
    """Load strictly: every name and every shape fits, and afterwards the module holds exactly these values."""
    wanted = {n: t for n, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    state = _renamed(weights, set(wanted))
    missing = sorted(set(module.state_dict()) - set(state))
    unexpected = sorted(set(state) - set(wanted))
    lazy = {n for n, p in module.named_parameters(remove_duplicate=False) if nn.parameter.is_lazy(p)}
    misshapen = sorted(n for n in set(wanted) & set(state) - lazy if wanted[n].shape != state[n].shape)
    if missing or unexpected or misshapen:
        counts = [(missing, "missing"), (unexpected, "unexpected"), (misshapen, "of another shape")]
        raise EnginesmithError(
            "the weights do not fit the factory's module: "
            + ", ".join(f"{len(names)} {kind}" for names, kind in counts if names),
            where=factory.spec,
            key="model.checkpoint",
            details=[
                *(f"missing in the checkpoint: {n}" for n in missing),
                *(f"unexpected in the checkpoint: {n}" for n in unexpected),
                *(f"{n}: {tuple(state[n].shape)} in the checkpoint, {tuple(wanted[n].shape)} here" for n in misshapen),
            ],
            hint=_naming_hint(missing, unexpected),
        )
    module.load_state_dict(state, strict=True)
    loaded = module.state_dict()
    changed = [n for n in sorted(state) if not torch.equal(loaded[n], state[n].to(loaded[n].dtype))]
    if changed:
        raise EnginesmithError(
            f"{len(changed)} tensors of the factory's module do not keep the values that were loaded",
            where=factory.spec,
            key="model.checkpoint",
            details=changed,
            hint="the module ties tensors that differ in the checkpoint, or changes them when loading",
        )
    return module.eval().requires_grad_(False)


def _renamed(weights: Weights, wanted: set[str]) -> dict[str, torch.Tensor]:
    """The tensors under the names that fit: as they are, or with part of the prefix that slim took off put back."""
    parts = weights.prefix.split(".")[:-1]
    for start in range(len(parts), -1, -1):
        front = "".join(f"{part}." for part in parts[start:])
        if {front + name for name in weights.tensors} == wanted:
            return {front + name: tensor for name, tensor in weights.tensors.items()}
    return dict(weights.tensors)


def _naming_hint(missing: list[str], unexpected: list[str]) -> str:
    """What the names suggest, as a question; nothing is renamed by guessing."""
    if missing and unexpected:
        name = missing[0]
        longer = next((u for u in unexpected if u.endswith(f".{name}")), None)
        if longer:
            return f"the checkpoint calls {name!r} {longer!r}: build the module under that name in the factory"
        return "the factory builds another model, or another size of it, than the checkpoint was trained with"
    if missing:
        return "the checkpoint lacks part of the model; nothing is left at its random start values"
    if unexpected:
        return "leave them out with model.drop if the model does not need them"
    return "the factory builds the model in another size"


def _place(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
