"""Turns declared inputs into their dynamic dimensions, and dimensions into shapes."""

from __future__ import annotations

from collections.abc import Mapping

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import DimSettings, InputSettings


def declared_dims(inputs: Mapping[str, InputSettings]) -> dict[str, DimSettings]:
    """Dynamic dimensions of all inputs by name. One whose min equals its max is a fixed number and not among them.

    Raises:
        EnginesmithError: two inputs give one dimension different ranges.
    """
    dims: dict[str, DimSettings] = {}
    for name, declared in inputs.items():
        for dim, given in declared.dims.items():
            if dims.setdefault(dim, given) != given:
                raise EnginesmithError(
                    f"dimension {dim} has another range here than in an earlier input",
                    key=f"inputs.{name}.dims.{dim}",
                    hint="a dimension of one name is one number in every run: give it one range",
                )
    return {name: given for name, given in dims.items() if given.min < given.max}


def fixed_shape(declared: InputSettings, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one input at given sizes of the dynamic dimensions."""
    return tuple(dim if isinstance(dim, int) else sizes.get(dim, declared.dims[dim].min) for dim in declared.shape)


def symbolic_shape(declared: InputSettings) -> tuple[int | str, ...]:
    """The shape that the graph must have: a dimension whose min equals its max is a number."""
    return tuple(
        declared.dims[dim].min if isinstance(dim, str) and declared.dims[dim].min == declared.dims[dim].max else dim
        for dim in declared.shape
    )
