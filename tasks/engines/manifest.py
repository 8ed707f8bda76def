"""Turns a built engine into engine.json, and refuses an engine whose engine.json does not fit this host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from enginesmith.tasks.engines.precision import counts, external_files, load_model
from enginesmith.tasks.engines.spec import (
    LAYERS,
    MANIFEST,
    BuildRequest,
    Built,
    EngineError,
    FileSpec,
    Manifest,
    NodePrecision,
)


def write_manifest(
    request: BuildRequest, built: Built, out: Path, *, backend: str, fingerprint: Mapping[str, str]
) -> Manifest:
    """Digest the engine's files and write engine.json and precision.json into the same folder."""
    rows = [asdict(layer) for layer in built.layers]
    (out / LAYERS).write_text(json.dumps(rows, indent=1) + "\n")
    manifest = Manifest(
        backend=backend,
        variant=request.variant,
        model_sha256=model_digest(request.model),
        fingerprint=dict(fingerprint),
        options=dict(request.options),
        profiles=request.profiles,
        inputs=built.inputs,
        outputs=built.outputs,
        requested=counts(layer.requested for layer in built.layers),
        read_back=counts(layer.actual for layer in built.layers),
        unseen=sum(not layer.actual for layer in built.layers),
        read_from=built.read_from,
        lowered=built.lowered,
        warnings=built.warnings,
        files=tuple(
            FileSpec(name, (out / name).stat().st_size, sha256_file(out / name)) for name in sorted(built.files)
        ),
    )
    (out / MANIFEST).write_text(manifest.to_json())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """What engine.json in a folder says.

    Raises:
        EngineError: there is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text()
    except OSError as error:
        raise EngineError(
            f"no engine here: {error.strerror}", where=str(path), hint="give the folder that the build wrote"
        ) from error
    return Manifest.from_json(text, where=str(path))


def read_layers(folder: Path) -> tuple[NodePrecision, ...]:
    """The rows of precision.json."""
    return tuple(NodePrecision(**row) for row in json.loads((folder / LAYERS).read_text()))


def verified_manifest(folder: Path, *, backend: str, fingerprint: Mapping[str, str]) -> Manifest:
    """The manifest of an engine that fits this host; nothing of the engine itself is read before.

    Raises:
        EngineError: another backend, another version, GPU, driver or architecture, a missing or changed file. Every
            difference is named with both sides.
    """
    manifest = read_manifest(folder)
    where = str(folder)
    if manifest.backend != backend:
        raise EngineError(f"this is an engine of {manifest.backend}, not of {backend}", where=where)
    differences = [
        f"{name}: the engine has {manifest.fingerprint.get(name, 'none')}, this host {fingerprint.get(name, 'none')}"
        for name in sorted({*manifest.fingerprint, *fingerprint})
        if manifest.fingerprint.get(name) != fingerprint.get(name)
    ]
    if differences:
        raise EngineError(
            f"this engine was built for something else ({'; '.join(differences)})",
            where=where,
            hint="build it on this host, or for it",
        )
    for file in manifest.files:
        path = folder / file.path
        if not path.is_file():
            raise EngineError(f"{file.path} is missing", where=where, hint="build the engine again")
        found = path.stat().st_size, sha256_file(path)
        if found != (file.size, file.sha256):
            raise EngineError(
                f"{file.path} has changed: engine.json says {file.size} bytes, SHA-256 {file.sha256[:12]}; "
                f"it has {found[0]} bytes, SHA-256 {found[1][:12]}",
                where=where,
                hint="copy or build the engine again",
            )
    return manifest


def model_digest(path: Path) -> str:
    """Hex SHA-256 over an ONNX file and its external data, names included."""
    names = [path.name, *external_files(load_model(path, weights=False))]
    lines = []
    for name in names:
        try:
            lines.append(f"{sha256_file(path.parent / name)}  {name if name != path.name else 'model'}\n")
        except OSError as error:
            raise EngineError(
                f"the model's external data {name!r} cannot be read: {error.strerror}", where=str(path)
            ) from error
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
