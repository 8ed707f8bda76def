"""Makes a function a stage: its inputs turn into a key, the key into an artifact from the store or from one run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.store import REPORT, SCHEMA, Artifact, Store, sha256_file

if TYPE_CHECKING:
    from prefect import Task


@runtime_checkable
class Keyed(Protocol):
    """A value that says what of it a stage's result depends on."""

    def key_part(self) -> object:
        """JSON-compatible data: equal exactly when the value's content is equal."""


@dataclass(frozen=True)
class SourceFile:
    """A file from outside the store, known by its bytes and not by its place.

    Attributes:
        path: where it lies now.
        sha256: hex SHA-256 of its bytes.
    """

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path, *, key: str = "") -> SourceFile:
        """Read and digest a file; `key` is the key of pipeline.yaml that named it."""
        try:
            return cls(path, sha256_file(path))
        except OSError as error:
            raise EnginesmithError(
                f"{path} cannot be read: {error.strerror}", key=key, hint="check the path; it is relative to the file"
            ) from error

    def key_part(self) -> object:
        """The digest."""
        return {"sha256": self.sha256}


@dataclass(frozen=True)
class Part:
    """One folder of an artifact that may not exist yet: how a later stage depends on a single variant."""

    artifact: Artifact
    folder: str

    def resolve(self) -> Artifact:
        """The folder as an artifact."""
        return self.artifact.part(self.folder)


@dataclass(frozen=True)
class Stage:
    """A named function from inputs to the files of one artifact.

    Args:
        name: name in the store, in Prefect and in reports.
        version: raised by whoever changes what the function writes.
        run: the function: ``run(out, **inputs) -> report``. It writes its files into the empty folder `out` and
            returns a pydantic model, saved as report.json. It reads no file that is not among its inputs, and never
            another stage's report.
        tools: distributions whose versions shape the output.
    """

    name: str
    version: int
    run: Callable[..., BaseModel]
    tools: tuple[str, ...] = ()

    def explain(self, **inputs: object) -> dict[str, Any]:
        """Everything the key depends on, as JSON data."""
        return {
            "schema": SCHEMA,
            "stage": self.name,
            "version": self.version,
            "inputs": {name: key_part(value) for name, value in sorted(inputs.items())},
            "tools": {tool: tool_version(tool) for tool in sorted(self.tools)},
        }

    def __call__(self, *, store: Store, **inputs: object) -> Artifact:
        """The artifact for these inputs: from the store when it is there, else made by running the stage."""
        try:
            return self._find_or_make(store, inputs)
        except EnginesmithError as error:
            error.stage = error.stage or self.name
            raise

    def _find_or_make(self, store: Store, inputs: Mapping[str, object]) -> Artifact:
        resolved = {name: value.resolve() if isinstance(value, Part) else value for name, value in inputs.items()}
        progress.checkpoint()
        explained = self.explain(**resolved)
        key = digest_of(explained)
        found = store.lookup(self.name, key)
        if found is not None:
            return found
        with _writing(self.name, store.root), store.building(self.name, key) as folder:
            if isinstance(folder, Artifact):
                return folder
            # Within the block too: the half-made files still fill the disk.
            with _writing(self.name, store.root):
                started = time.monotonic()
                report = self.run(folder, **resolved)
                (folder / REPORT).write_text(report.model_dump_json(indent=1) + "\n")
                return store.publish(self.name, key, folder, inputs=explained, seconds=time.monotonic() - started)

    @cached_property
    def task(self) -> Task[..., Artifact]:
        """The stage as a Prefect task. The store is the only cache; a hit shows as Cached."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE
        from prefect.states import Completed

        @task(name=self.name, cache_policy=NO_CACHE, persist_result=False)
        def run(**inputs: Any) -> Any:
            artifact = self(**inputs)
            return Completed(name="Cached", data=artifact) if artifact.cached else artifact

        return run


@contextmanager
def _writing(stage: str, root: Path) -> Iterator[None]:
    """Turn whatever a full or read-only disk makes libraries raise into an error that says so."""
    try:
        yield
    except Exception as error:
        reason = _unwritable(error, root)
        if not reason:
            raise
        raise EnginesmithError(
            f"{reason}: {stage} could not write {getattr(error, 'filename', None) or 'its files'}",
            where=str(root),
            key="store.url",
            hint="free space or move the store (store.url, ENGINESMITH_STORE); finished stages are kept",
        ) from error


def _unwritable(error: Exception, root: Path) -> str:
    """Why the store cannot be written to, empty when the error is another one.

    Libraries hide what the system said: numpy's tofile leaves out the error number, safetensors and torch raise classes
    of their own. On a disk without space, no space is the reason.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full" if number == errno.ENOSPC else os.strerror(number).lower()
    if number in (errno.EROFS, errno.EACCES, errno.EPERM) and str(getattr(error, "filename", "")).startswith(str(root)):
        return "the store cannot be written to"
    if isinstance(error, EnginesmithError):
        return ""
    if "No space left on device" in str(error) or shutil.disk_usage(root).free < 1 << 16:
        return "the disk is full"
    return ""


def key_part(value: object) -> object:
    """What of a value belongs into a key. Paths and unknown types are refused: a place is not a content."""
    if isinstance(value, Artifact):
        return {"artifact": value.digest}
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Keyed):
        return value.key_part()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): key_part(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [key_part(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be part of a stage's key")


def digest_of(data: object) -> str:
    """Hex SHA-256 of JSON data in canonical form."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tool_version(distribution: str) -> str:
    """Installed version of a distribution, "absent" when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"
