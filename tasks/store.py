"""The artifact store: a key turns into a folder of files under a verified manifest.

Layout below the root::

    objects/<stage>/<key>/          the files of one artifact, report.json, and manifest.json (written last)
    locks/<stage>-<key>.lock        held (flock) while that artifact is built; the kernel releases it with the process
    tmp/<stage>-<key>-<random>/     an artifact being built; renamed into objects/ when complete
    observations/<kind>/<key>/      what was seen rather than made (latencies): one JSON file per observation
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError

MANIFEST = "manifest.json"
REPORT = "report.json"
SCHEMA = 1


class FileEntry(BaseModel):
    """One file of an artifact: its path below the artifact's folder, its size in bytes, its SHA-256."""

    model_config = ConfigDict(frozen=True)

    path: str
    size: int
    sha256: str


class Manifest(BaseModel):
    """What an artifact is made of and what it was made from."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA
    stage: str
    key: str
    inputs: dict[str, Any]
    files: tuple[FileEntry, ...]
    created: str
    seconds: float


@dataclass(frozen=True)
class Artifact:
    """A folder of files in the store, or one folder inside it (see `part`).

    Attributes:
        stage: name of the stage that made it.
        key: the stage's key, hex SHA-256.
        path: the folder that holds the files.
        files: every file below `path`, paths relative to it.
        cached: whether this run found it in the store.
        seconds: how long it took to make.
    """

    stage: str
    key: str
    path: Path
    files: tuple[FileEntry, ...]
    cached: bool = False
    seconds: float = 0.0

    @property
    def digest(self) -> str:
        """SHA-256 over names and contents of all files except the report, which only people read."""
        lines = sorted(f"{f.sha256}  {f.path}\n" for f in self.files if f.path != REPORT)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files except the report."""
        return sum(f.size for f in self.files if f.path != REPORT)

    @property
    def report(self) -> dict[str, Any]:
        """The report as plain JSON data, empty when there is none."""
        path = self.path / REPORT
        if not path.exists():
            return {}
        data: dict[str, Any] = json.loads(path.read_text())
        return data

    def part(self, folder: str) -> Artifact:
        """The files below one folder of this artifact, as an artifact with a digest of its own."""
        inside = tuple(
            f.model_copy(update={"path": str(PurePosixPath(f.path).relative_to(folder))})
            for f in self.files
            if PurePosixPath(f.path).is_relative_to(folder)
        )
        if not inside:
            raise EnginesmithError(f"the {self.stage} artifact has no folder {folder!r}", where=str(self.path))
        return replace(self, path=self.path / folder, files=inside)


class Store:
    """Artifacts on this host's disk.

    Args:
        root: folder of the store; created when missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        try:
            for name in ("objects", "locks", "tmp", "observations"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnginesmithError(
                f"the store cannot be used: {error.strerror}",
                where=str(self.root),
                key="store.url",
                hint="point store.url or ENGINESMITH_STORE at a folder that you can write to",
            ) from error
        self._sweep()

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def path(self, stage: str, key: str) -> Path:
        """Where the artifact of this stage and key lies once it is published."""
        return self.root / "objects" / stage / key

    def lookup(self, stage: str, key: str) -> Artifact | None:
        """The artifact, or None when there is none or its files are not what the manifest says.

        A damaged artifact is said so in one line and removed, so that it is built again.
        """
        folder = self.path(stage, key)
        if not folder.exists():
            return None
        damage = _damage(folder)
        if damage:
            progress.note(f"{stage}: {folder} is damaged ({damage}); building it again")
            with self._lock(stage, key):
                if folder.exists() and _damage(folder):
                    _remove(folder)
            return None
        return _artifact(folder, cached=True)

    @contextmanager
    def building(self, stage: str, key: str) -> Iterator[Path | Artifact]:
        """Hold the lock of one artifact and give an empty folder to build it in.

        Yields the folder, to be filled and then handed to `publish`; or the artifact itself when another process
        finished it while this one waited for the lock. The folder is gone when the block ends, published or not.
        """
        with self._lock(stage, key):
            found = self.lookup(stage, key)
            if found is not None:
                yield found
                return
            for left in (self.root / "tmp").glob(f"{stage}-{key}-*"):
                _remove(left)
            folder = Path(tempfile.mkdtemp(prefix=f"{stage}-{key}-", dir=self.root / "tmp"))
            try:
                yield folder
            finally:
                _remove(folder)

    def publish(self, stage: str, key: str, folder: Path, *, inputs: dict[str, Any], seconds: float) -> Artifact:
        """Turn a filled build folder into the artifact: digests, fsync, manifest last, one rename."""
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
        manifest = Manifest(
            stage=stage,
            key=key,
            inputs=inputs,
            files=tuple(_entry(folder, p) for p in paths),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(seconds, 3),
        )
        (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
        for path in [*paths, folder / MANIFEST]:
            path.chmod(0o444)
            _fsync(path)
        for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
            _fsync(path)
        final = self.path(stage, key)
        final.parent.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        folder.rename(final)
        _fsync(final.parent)
        return _artifact(final, cached=False)

    def observe(self, kind: str, key: str, data: dict[str, Any]) -> Path:
        """Add one observation (a latency session, say). Never overwrites another.

        Raises:
            ValueError: `data` holds NaN or infinity.
        """
        text = json.dumps(data, indent=1, allow_nan=False)
        folder = self.root / "observations" / kind / key
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        handle, name = tempfile.mkstemp(prefix=".", dir=folder)
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        final = folder / f"{stamp}-{Path(name).name.lstrip('.')}.json"
        Path(name).rename(final)
        _fsync(folder)
        return final

    def observations(self, kind: str, key: str) -> list[dict[str, Any]]:
        """All observations of one kind and key, oldest first."""
        folder = self.root / "observations" / kind / key
        if not folder.exists():
            return []
        return [json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if not p.name.startswith(".")]

    @contextmanager
    def _lock(self, stage: str, key: str) -> Iterator[None]:
        lock = FileLock(self.root / "locks" / f"{stage}-{key}.lock", is_singleton=True)
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            progress.note(f"{stage}: another process is building {key[:12]}; waiting for it")
            while True:
                progress.checkpoint()
                with suppress(Timeout):
                    lock.acquire(timeout=1)
                    break
        try:
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Remove what killed builds left in tmp/."""
        for left in (self.root / "tmp").iterdir():
            name = left.name.rsplit("-", 1)[0]
            lock = FileLock(self.root / "locks" / f"{name}.lock")
            with suppress(Timeout):
                lock.acquire(blocking=False)
                _remove(left)
                lock.release()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(folder: Path, path: Path) -> FileEntry:
    return FileEntry(path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=sha256_file(path))


def _artifact(folder: Path, *, cached: bool) -> Artifact:
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
    return Artifact(manifest.stage, manifest.key, folder, manifest.files, cached=cached, seconds=manifest.seconds)


def _damage(folder: Path) -> str:
    """What is wrong with a published artifact, empty when nothing is."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        return f"its manifest cannot be read: {type(error).__name__}"
    if manifest.key != folder.name or manifest.stage != folder.parent.name:
        return f"its manifest is that of {manifest.stage} {manifest.key}"
    for entry in manifest.files:
        path = folder / entry.path
        if not path.is_file():
            return f"{entry.path} is missing"
        if path.stat().st_size != entry.size or sha256_file(path) != entry.sha256:
            return f"{entry.path} has changed"
    return ""


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
