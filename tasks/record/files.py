"""Turns artifacts of the store into a folder of links, laid out as MLflow will keep them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.record.masking import mask_data, mask_uris
from enginesmith.tasks.record.names import safe_path
from enginesmith.tasks.store import MANIFEST, Artifact, FileEntry

_TEXT = {".csv", ".html", ".json", ".log", ".md", ".txt", ".yaml", ".yml"}
_MASKED_BELOW = 16_000_000  # bytes; larger text files are tables of numbers


@contextmanager
def staged(artifacts: Mapping[str, Artifact], texts: Mapping[str, str], *, copy_above_mb: float) -> Iterator[Path]:
    """A temporary folder with every artifact in a folder of its own, and further text files.

    A file keeps its path inside its artifact, so external data stays beside its model. Text that holds a secret is
    masked. A file above the limit is represented by ``NAME.uri.json``: where it lies, its size and its SHA-256.

    Args:
        artifacts: by folder.
        texts: contents by path.
        copy_above_mb: size of the largest file that is copied, in MB (10^6 bytes).
    """
    with tempfile.TemporaryDirectory(prefix="enginesmith-record-") as scratch:
        root = Path(scratch) / "files"  # its mode is copied with it: not the temporary folder's 0700
        root.mkdir()
        for folder, artifact in artifacts.items():
            _stage(artifact, root / safe_path(folder), int(copy_above_mb * 1e6))
        for name, text in texts.items():
            _write(root / safe_path(name), text)
        yield root


def _stage(artifact: Artifact, folder: Path, limit: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in artifact.files:
        source = artifact.path / entry.path
        if not source.is_file() or source.stat().st_size != entry.size:
            raise EnginesmithError(
                f"{entry.path} of the {artifact.stage} artifact is missing or has changed since this run looked it up",
                where=str(source),
                key="store.url",
                hint="run the same command again: what is damaged is built again",
            )
        _place(source, entry, folder / safe_path(entry.path), limit)
    manifest = artifact.path / MANIFEST
    if manifest.is_file():
        _write(folder / MANIFEST, json.dumps(mask_data(json.loads(manifest.read_text())), indent=1) + "\n")


def _place(source: Path, entry: FileEntry, target: Path, limit: int) -> None:
    if entry.size > limit:
        fact = {"uri": source.as_uri(), "size": entry.size, "sha256": entry.sha256}
        _write(target.with_name(target.name + ".uri.json"), json.dumps(fact, indent=1) + "\n")
        return
    if source.suffix in _TEXT and entry.size < _MASKED_BELOW:
        text = source.read_text(encoding="utf-8", errors="surrogateescape")
        masked = mask_uris(text)
        if masked != text:
            _write(target, masked)
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
