"""Turns the engines' own terms (which know nothing of us) into the stages': inputs, manifests, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from enginesmith.tasks.engines import backend
from enginesmith.tasks.engines.manifest import read_manifest
from enginesmith.tasks.engines.precision import counts, load_model, requests
from enginesmith.tasks.engines.spec import MODEL, Backend, Dim, EngineError, Input, Manifest, RefusedError
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import InputSettings
from enginesmith.tasks.store import Artifact

KEY = "targets"
REFUSED = "refused.json"


@contextmanager
def engine_errors(key: str = KEY) -> Iterator[None]:
    """Engines' errors leave the block as EnginesmithError; a key relative to the target goes below `key`."""
    try:
        yield
    except EngineError as error:
        if error.key and not error.key.startswith("inputs"):
            key = KEY if key == KEY else f"{key}.{error.key}"
        else:
            key = error.key
        raise EnginesmithError(
            error.found, where=error.where, key=key, hint=error.hint, details=error.details
        ) from error


def find_backend(name: str) -> Backend:
    """The backend of this name."""
    with engine_errors():
        return backend(name)


def refusal(name: str, variant: str) -> str:
    """Why a backend cannot build a variant with the precision it asks for; empty when it can."""
    found = find_backend(name)
    if variant in found.builds():
        return ""
    return f"{name} does not keep the precision of {variant}; it builds {', '.join(sorted(found.builds()))}"


def write_refusal(error: RefusedError, folder: Path) -> None:
    """Keep what a backend said of a model that it does not take."""
    for left in folder.iterdir():
        left.unlink()
    nodes = [{"node": r.node, "op": r.op, "reason": r.reason} for r in error.refusals]
    (folder / REFUSED).write_text(json.dumps({"found": error.found, "nodes": nodes}, indent=1) + "\n")


def refused(engine: Artifact) -> str:
    """Why a build artifact holds no engine: what the backend said and the first node that it named; else empty."""
    path = engine.path / REFUSED
    if not path.exists():
        return ""
    data = json.loads(path.read_text())
    named = "".join(f": {n['node']} ({n['op']}): {n['reason']}" for n in data["nodes"][:1])
    return f"{data['found']}{named}"


def engine_manifest(engine: Artifact) -> Manifest:
    """What a build artifact's engine.json says; its `size` is the engine's bytes."""
    with engine_errors():
        return read_manifest(engine.path)


def node_precisions(model: Artifact) -> dict[str, int]:
    """Nodes per precision (fp32, fp16, int8, …) that an ONNX artifact asks for, without building it."""
    with engine_errors():
        return counts(request.precision for request in requests(load_model(model.path / MODEL, weights=False)))


def engine_inputs(inputs: Mapping[str, InputSettings]) -> tuple[Input, ...]:
    """Declared inputs as the engines know them."""
    return tuple(
        Input(name, s.shape, s.dtype, {dim: Dim(d.min, d.opt, d.max) for dim, d in s.dims.items()})
        for name, s in inputs.items()
    )
