"""Turns ``module:function`` in a pipeline's folder into the callable and into a digest of the code behind it."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from enginesmith.tasks.errors import EnginesmithError


@dataclass(frozen=True)
class UserCode:
    """A callable of the user's, named as in pipeline.yaml.

    Attributes:
        folder: the pipeline file's folder.
        spec: ``module:function``.
        key: the key of pipeline.yaml that names it.
    """

    folder: Path
    spec: str
    key: str = ""

    def key_part(self) -> object:
        """The spec, digests of the module and what it imports from the folder, and versions of what else it imports."""
        files, distributions = _closure(self.folder, self.spec.partition(":")[0])
        return {
            "spec": self.spec,
            "files": {
                path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(files)
            },
            "distributions": distributions,
        }

    def check(self) -> None:
        """Look for the module and the function without importing anything: a slip of the pen is said at once.

        What is only known when the module runs (names that it makes up, star imports) is left to `load`.

        Raises:
            EnginesmithError: there is no such module, or its source has no such name.
        """
        module_name, _, function = self.spec.partition(":")
        base = self.folder.joinpath(*module_name.split("."))
        file = next((p for p in (base / "__init__.py", base.with_name(f"{base.name}.py")) if p.is_file()), None)
        if file is None:
            if importlib.util.find_spec(module_name.partition(".")[0]) is None:
                raise self._no_module()
            return
        names = _names_in(file)
        if names is not None and function not in names:
            raise self._no_function(str(file), [name for name in names if not name.startswith("_")])

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function. Call inside `importable`.

        Raises:
            EnginesmithError: the module or the function is not there, or importing it failed.
        """
        module_name, _, function = self.spec.partition(":")
        if importlib.util.find_spec(module_name.partition(".")[0]) is None:
            raise self._no_module()
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise user_error(error, f"importing {module_name!r} failed", folder=self.folder, key=self.key) from error
        value = getattr(module, function, None)
        if not callable(value):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise self._no_function(str(getattr(module, "__file__", module_name)), names)
        return value  # type: ignore[no-any-return]

    def _no_module(self) -> EnginesmithError:
        return EnginesmithError(
            f"no module {self.spec.partition(':')[0]!r}",
            key=self.key,
            hint=f"it is looked for in {self.folder} and among the installed packages",
        )

    def _no_function(self, where: str, names: Iterable[str]) -> EnginesmithError:
        module_name, _, function = self.spec.partition(":")
        known = ", ".join(sorted(names))
        return EnginesmithError(
            f"{module_name!r} has no function {function!r}",
            where=where,
            key=self.key,
            hint=f"it has: {known}" if known else "",
        )

    def __call__(self, *args: object) -> Any:
        """Load and call; what the function raises becomes an `EnginesmithError` that names its line."""
        function = self.load()
        try:
            return function(*args)
        except (Exception, SystemExit) as error:
            raise user_error(error, f"{self.spec} failed", folder=self.folder, key=self.key) from error


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Put a pipeline's folder first on the import path; afterwards forget its modules: two `model.py` never meet.

    Modules of the same names that were imported from elsewhere are set aside meanwhile. No bytecode is written: Python
    takes a .pyc for fresh when the source has its size and its second, and would run code that is no longer there.
    """
    # Other threads import meanwhile: every look at sys.modules is a look at a copy.
    aside = {name: module for name, module in sys.modules.copy().items() if _shadowed(name, module, folder)}
    for name in aside:
        del sys.modules[name]
    place, wrote_none = str(folder), sys.dont_write_bytecode
    before = set(sys.modules.copy())
    sys.path.insert(0, place)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)
        sys.dont_write_bytecode = wrote_none
        loaded = sys.modules.copy()
        for name in set(loaded) - before:
            # By name too: a package installed from this very folder goes by a name that the folder does not have.
            if _has(folder, name) and _is_own(getattr(loaded[name], "__file__", None), folder):
                sys.modules.pop(name, None)
        sys.modules.update(aside)


def _shadowed(name: str, module: ModuleType, folder: Path) -> bool:
    """Whether the folder has a module of this name and the one that is loaded is another."""
    if name.partition(".")[0] in sys.stdlib_module_names or _is_own(getattr(module, "__file__", None), folder):
        return False
    return _has(folder, name)


def _has(folder: Path, name: str) -> bool:
    """Whether the top-level package or module of a dotted name lies in the folder."""
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _is_own(file: str | None, folder: Path) -> bool:
    """Whether a file is the user's: below the folder and not in an environment that happens to lie there."""
    if not file or not Path(file).is_relative_to(folder):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(file).relative_to(folder).parts)


def user_error(error: BaseException, what: str, *, folder: Path, key: str = "") -> EnginesmithError:
    """An exception from the user's code, at the user's own line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if _is_own(f.filename, folder)]
    frame = own[-1] if own else (frames[-1] if frames else None)
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
    else:
        where = f"{frame.filename}:{frame.lineno}" if frame else ""
    return EnginesmithError(f"{what}: {type(error).__name__}: {error}", where=where, key=key)


def _closure(folder: Path, module: str) -> tuple[set[Path], dict[str, str]]:
    """Files in the folder that a module is made of, followed through its imports, and distributions it names."""
    files: set[Path] = set()
    outside: set[str] = set()
    todo = [module]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = _files_of(folder, name)
        if not found:
            outside.add(name.partition(".")[0])
            continue
        for path in found - files:
            files.add(path)
            package = path.relative_to(folder).with_suffix("").parts[:-1]
            todo += _imports(path, package)
    by_module = _distributions()
    names = {d for top in outside if top not in sys.stdlib_module_names for d in by_module.get(top, ())}
    return files, {name: metadata.version(name) for name in sorted(names)}


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _names_in(path: Path) -> set[str] | None:
    """Names that a file's top level may define; None when only running it can tell."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any(alias.name == "*" for alias in node.names):
                return None
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if names & {"__getattr__"} else names


def _files_of(folder: Path, name: str) -> set[Path]:
    """The files that importing a dotted name from the folder would run; empty when it is not there."""
    parts = name.split(".")
    found: set[Path] = set()
    for depth in range(1, len(parts) + 1):
        base = folder.joinpath(*parts[:depth])
        for candidate in (base / "__init__.py", base.with_name(base.name + ".py")):
            if candidate.is_file():
                found.add(candidate)
    return found


def _imports(path: Path, package: tuple[str, ...]) -> list[str]:
    """Dotted names that a file imports; relative ones resolved, names imported from a package tried as modules too."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module or "") if part)
            names += [origin] if origin else []
            names += [f"{origin}.{alias.name}" if origin else alias.name for alias in node.names]
    return [name for name in names if name]
