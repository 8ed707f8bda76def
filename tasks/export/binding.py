"""Turns declared inputs and a module's forward into calls by name, and what forward returns into named outputs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import InputSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

Feed = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Binding:
    """How the declared inputs reach forward.

    Attributes:
        inputs: declared names, in the order of the settings: the order of the graph's inputs.
        parameters: for each input the parameter of forward that it is passed as; None: by position.
    """

    inputs: tuple[str, ...]
    parameters: tuple[str, ...] | None

    def call(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """Forward on tensors in the order of `inputs`."""
        if self.parameters is None:
            return module(*tensors)
        return module(**dict(zip(self.parameters, tensors, strict=True)))


def bind(module: nn.Module, inputs: Mapping[str, InputSettings]) -> Binding:
    """Match declared inputs with forward's parameters.

    1. Every declared name is a parameter: by name, in whatever order they are declared.
    2. One declared input, and forward can be called with one argument: that argument, whatever its name.
    3. forward takes ``*args``: by position, in declared order.

    Raises:
        EnginesmithError: a declared name is no parameter, or a required parameter is not declared. Several inputs are
            never matched by position: an unused or reordered one would silently shift the others.
    """
    names = tuple(inputs)
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    shown = f"{type(module).__name__}.forward({', '.join(str(p) for p in parameters)})"
    if set(names) <= {p.name for p in named}:
        missing = [name for name in required if name not in names]
        if missing:
            raise EnginesmithError(
                f"{shown} needs {', '.join(missing)}, which is not declared",
                key="inputs",
                hint="declare every required parameter of forward as an input, or give it a default",
            )
        return Binding(names, names)
    if len(names) == 1 and not any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
        if positional and sum(p.default is p.empty for p in positional) <= 1:
            return Binding(names, None)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) and not required:
        return Binding(names, None)
    unknown = [name for name in names if name not in {p.name for p in named}]
    raise EnginesmithError(
        f"{shown} has no parameter {', '.join(unknown)}",
        key=f"inputs.{unknown[0]}",
        hint="name the inputs as forward names its parameters: several inputs are matched by name, never by position",
    )


@dataclass(frozen=True)
class NotATensor:
    """A leaf of what forward returned that no graph output can be."""

    name: str
    type: str


def flatten(returned: Any, *, taken: Sequence[str] = ()) -> dict[str, torch.Tensor | NotATensor]:
    """Name the leaves of what forward returned, in order; None leaves are left out.

    One tensor is `output`; in a tuple `output_0`, `output_1`, …; in a dict its key; in a named tuple or a dataclass
    its field; nested parts are joined with an underscore. A name that an input has already gets `_out` appended.
    """
    import torch
    from torch.utils import _pytree as pytree

    leaves, _ = pytree.tree_flatten_with_path(_plain(returned))
    named: dict[str, torch.Tensor | NotATensor] = {}
    for path, leaf in leaves:
        if leaf is None:
            continue
        name = _name(path)
        while name in named or name in taken:
            name += "_out"
        named[name] = leaf if isinstance(leaf, torch.Tensor) else NotATensor(name, type(leaf).__name__)
    return named


def _plain(value: Any) -> Any:
    """Dataclasses as dicts of their fields, at any depth; torch's tree functions take them for leaves."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value


def _name(path: Sequence[Any]) -> str:
    parts: list[str] = []
    for step in path:
        value = getattr(step, "key", getattr(step, "name", getattr(step, "idx", None)))
        parts.append(re.sub(r"\W+", "_", str(value)))
    if not parts or parts[0].isdigit():
        parts.insert(0, "output")
    return "_".join(parts)


def to_tensors(binding: Binding, feed: Feed) -> list[torch.Tensor]:
    """Arrays as tensors, in the order of the binding's inputs."""
    import torch

    return [torch.from_numpy(np.array(feed[name])) for name in binding.inputs]
