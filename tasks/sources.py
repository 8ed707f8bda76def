"""Turns the paths and names written in pipeline.yaml into files, folders and code that are known by their content."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.stage import SourceFile
from enginesmith.tasks.store import sha256_file
from enginesmith.tasks.usercode import UserCode

_CALLABLE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_PACKAGE = "package://"


@dataclass(frozen=True)
class FolderSource:
    """A folder from outside the store, known by its files' names and bytes and not by its place.

    Attributes:
        path: where it lies now.
        files: path below the folder and hex SHA-256 of every file, sorted by path.
    """

    path: Path
    files: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, path: Path, *, key: str = "", suffix: str = "") -> FolderSource:
        """Read and digest every file below a folder.

        Args:
            path: the folder. Symbolic links are followed; ``__pycache__`` is left out.
            key: the key of pipeline.yaml that named it.
            suffix: only files directly in the folder whose names end so; empty for all files at any depth.

        Raises:
            EnginesmithError: a file cannot be read, or there is none.
        """
        found = []
        try:
            names = (
                [p.name for p in path.iterdir() if p.suffix == suffix and p.is_file()]
                if suffix
                else list(_below(path, path, set()))
            )
            for name in sorted(names):
                progress.checkpoint()
                found.append((name, sha256_file(path / name)))
        except OSError as error:
            raise EnginesmithError(f"{error.filename} cannot be read: {error.strerror}", key=key) from error
        if not found:
            raise EnginesmithError(f"{path} holds no {suffix or 'file'}" + (" file" if suffix else ""), key=key)
        return cls(path, tuple(found))

    def key_part(self) -> object:
        """Names and digests."""
        return {"files": dict(self.files)}


DataSource = UserCode | SourceFile | FolderSource


def resolve_source(text: str, folder: Path, key: str) -> Path:
    """The existing file or folder that a path of pipeline.yaml names.

    Args:
        text: a path, relative ones start at `folder`; or ``package://NAME/path``, a file that the installed import
            package NAME ships. The package is located, not imported.
        folder: the pipeline file's folder.
        key: the key of pipeline.yaml that holds `text`.

    Raises:
        EnginesmithError: nothing is there, with close names as a hint.
    """
    if text.startswith(_PACKAGE):
        return _in_package(text, key)
    if "://" in text:
        raise EnginesmithError(
            f"{text!r} is not on this host", key=key, hint="give a local path, or package://NAME/path"
        )
    path = folder / Path(text).expanduser()
    if not path.exists():
        raise EnginesmithError(f"{path} does not exist", key=key, hint=_similar(path))
    return path


def onnx_source(path: Path, *, key: str = "") -> SourceFile:
    """An ONNX file as a stage's input: the digest covers the file and the external data that lies in its folder.

    Only the digest is made here; whether the file is what it should be is for the stage that opens it.

    Raises:
        EnginesmithError: the file cannot be read.
    """
    import onnx_ir as ir
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    source = SourceFile.of(path, key=key)
    try:
        model = ir.load(path)
    except (DecodeError, ValueError, TypeError, OSError, ir.serde.SerdeError):
        return source
    values = [v.const_value for graph in model.graphs() for v in graph.initializers.values()]
    names = sorted({str(tensor.location) for tensor in values if isinstance(tensor, ir.ExternalTensor)})
    folder = path.resolve().parent
    inside = [p for p in (folder / name for name in names) if p.is_file() and p.parent.samefile(folder)]
    if not inside:
        return source
    digests = [source.sha256, *(f"{file.name} {sha256_file(file)}" for file in inside)]
    return SourceFile(path, hashlib.sha256("\n".join(digests).encode()).hexdigest())


def data_source(text: str, folder: Path, key: str) -> DataSource:
    """What ``data.calibration``, ``data.evaluation`` or ``data.search`` names.

    ``module:function`` is code; a ``.npz`` or ``.npy`` is a file; anything else is a folder of ``.npy`` files.

    Raises:
        EnginesmithError: it does not exist or is of another kind.
    """
    if _CALLABLE.match(text):
        return UserCode(folder, text, key=key)
    path = resolve_source(text, folder, key)
    if path.is_dir():
        return FolderSource.of(path, key=key, suffix=".npy")
    if path.suffix in (".npz", ".npy"):
        return SourceFile.of(path, key=key)
    raise EnginesmithError(
        f"{path} is no data that can be read", key=key, hint="give module:function, a .npz, a .npy or a folder of .npy"
    )


def keyed_files(texts: Sequence[str], folder: Path, key: str = "data.files") -> tuple[SourceFile | FolderSource, ...]:
    """The files and folders that the data callables read, keyed by content.

    Raises:
        EnginesmithError: one does not exist, cannot be read, or is an empty folder; `key` is completed with its index.
    """
    sources: list[SourceFile | FolderSource] = []
    for index, text in enumerate(texts):
        place = f"{key}.{index}"
        path = resolve_source(text, folder, place)
        sources.append(FolderSource.of(path, key=place) if path.is_dir() else SourceFile.of(path, key=place))
    return tuple(sources)


def _in_package(text: str, key: str) -> Path:
    name, _, inside = text.removeprefix(_PACKAGE).partition("/")
    if not name.isidentifier() or not inside or ".." in PurePosixPath(inside).parts:
        raise EnginesmithError(
            f"{text!r} names no file of a package", key=key, hint="write package://NAME/path, NAME as in import NAME"
        )
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise EnginesmithError(f"no package {name!r} is installed", key=key, hint=f"pip install what provides {name}")
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    for root in roots:
        if (root / inside).exists():
            return root / inside
    if not roots:
        raise EnginesmithError(f"{name!r} is a single module and ships no files", where=str(spec.origin), key=key)
    path = roots[0] / inside
    raise EnginesmithError(f"{path} does not exist", key=key, hint=_similar(path))


def _below(folder: Path, root: Path, above: set[Path]) -> Iterator[str]:
    """Paths of all files below a folder, relative to `root`; a link to a folder above itself is followed no further."""
    real = folder.resolve()
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _below(Path(entry.path), root, above | {real})
            else:
                yield Path(entry.path).relative_to(root).as_posix()


def _similar(path: Path) -> str:
    """A hint that lists names like the one that is missing."""
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    names = sorted(p.name for p in parent.iterdir())
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"{parent} has {', '.join(close)}" if close else f"nothing like {path.name!r} is in {parent}"
