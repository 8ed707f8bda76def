"""Turns Python source into the modules that it defines, built without weights or arguments, for the source rules."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import DimSettings, InputSettings
from enginesmith.tasks.usercode import UserCode, importable, user_error

_RANK = 8
_FREE = DimSettings(min=1, opt=2, max=64)


def build_from_source(file: Path, module: str, name: str, root: Path) -> tuple[list[nn.Module], list[str]]:
    """The modules to judge, and what could not be built.

    Args:
        file: the source file, when `module` is empty.
        module: importable name, relative to `root`.
        name: class or function; every module that the file defines itself when empty.
        root: the folder to import `module` from.

    Raises:
        EnginesmithError: nothing could be built.
    """
    folder = root if module else file.parent
    with importable(folder):
        if module:
            return [_built(UserCode(folder, f"{module}:{name}").load(), name, folder)], []
        loaded = _import(file)
        if name:
            return [_built(_named(loaded, name, file), name, folder)], []
        return _every(loaded, file)


def free_inputs(module: nn.Module) -> dict[str, InputSettings]:
    """The tensors that forward takes, of unknown shape: every size is dynamic, none is a number."""
    dims = {f"dim{axis}": _FREE for axis in range(_RANK)}
    found = {}
    for name, given in inspect.signature(type(module).forward).parameters.items():
        if given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD) or given.default is not given.empty:
            continue
        if name != "self" and str(getattr(given.annotation, "__name__", given.annotation)) not in _NO_TENSORS:
            found[name] = InputSettings(shape=tuple(dims), dims=dims)
    return found


_NO_TENSORS = {"int", "float", "bool", "str"}


def _import(file: Path) -> ModuleType:
    """A file as a module of its own name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise EnginesmithError("no Python file", where=str(file))
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = loaded
    try:
        spec.loader.exec_module(loaded)
    except (Exception, SystemExit) as error:
        raise user_error(error, f"importing {file.name} failed", folder=file.parent) from error
    return loaded


def _named(loaded: ModuleType, name: str, file: Path) -> Any:
    if not hasattr(loaded, name):
        own = [n for n, v in vars(loaded).items() if callable(v) and getattr(v, "__module__", "") == loaded.__name__]
        hint = f"it has {', '.join(own)}" if own else "it defines nothing that could be built"
        raise EnginesmithError(f"{file.name} has no {name!r}", where=str(file), hint=hint)
    return getattr(loaded, name)


def _built(made_by: Any, name: str, folder: Path) -> nn.Module:
    """What a class or factory without arguments makes: a module with a forward."""
    if isinstance(made_by, nn.Module):
        module = made_by
    elif not callable(made_by):
        raise EnginesmithError(f"{name} is a {type(made_by).__name__}, neither a module nor a factory of one")
    elif needed := _needed(made_by):
        raise EnginesmithError(
            f"{name} needs arguments: {', '.join(needed)}",
            where=_place(made_by),
            hint="name a function without arguments that returns the module",
        )
    else:
        module = _call(made_by, name, folder)
    if not isinstance(module, nn.Module):
        raise EnginesmithError(f"{name} gives a {type(module).__name__}, not a torch.nn.Module", where=_place(made_by))
    if not _has_forward(type(module)):
        raise EnginesmithError(f"{type(module).__name__} has no forward", where=_place(type(module)))
    return module.eval()


def _call(made_by: Callable[[], Any], name: str, folder: Path) -> Any:
    """Build on the meta device, where weights cost nothing; what needs values is built on the CPU."""
    try:
        with torch.device("meta"):
            return made_by()
    except Exception:  # noqa: S110 - the second attempt says what is wrong
        pass
    try:
        return made_by()
    except (Exception, SystemExit) as error:
        raise user_error(error, f"building {name} failed", folder=folder) from error


def _every(loaded: ModuleType, file: Path) -> tuple[list[nn.Module], list[str]]:
    """All modules that a file defines itself."""
    classes = [
        value
        for value in vars(loaded).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == loaded.__name__
    ]
    classes = [one for one in dict.fromkeys(classes) if _has_forward(one)]
    if not classes:
        raise EnginesmithError("it defines no torch.nn.Module with a forward", where=str(file))
    built: list[nn.Module] = []
    notes: list[str] = []
    problems: list[EnginesmithError] = []
    for one in classes:
        try:
            built.append(_built(one, one.__name__, file.parent))
        except EnginesmithError as error:
            problems.append(error)
            notes.append(f"{one.__name__} was not judged by itself: {error.found}")
    if not built:
        first = problems[0]
        raise EnginesmithError(
            first.found, where=first.where or str(file), hint=first.hint or f"name a factory: {file.name}:function"
        )
    return built, notes


def _has_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is not nn.Module.forward


def _needed(made_by: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(made_by).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _place(thing: Any) -> str:
    try:
        return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}"
    except (TypeError, OSError):
        return ""
