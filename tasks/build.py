"""Turns one variant's ONNX file into an engine of one backend: its files, engine.json and precision.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.backends import KEY, engine_errors, engine_inputs, find_backend, refusal, write_refusal
from enginesmith.tasks.engines.child import build_engine
from enginesmith.tasks.engines.profiles import profile_of
from enginesmith.tasks.engines.spec import MODEL, BuildRequest, Progress, RefusedError
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.progress import Bar
from enginesmith.tasks.settings import InputSettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact


class BuildReport(BaseModel):
    """What was built, whether it is what the graph asks for, and what that took.

    Attributes:
        backend: who built it.
        variant: what was built.
        size_bytes: bytes of the engine's own files; the manifest and precision.json do not count.
        requested: nodes per precision that the graph asks for.
        read_back: nodes per precision that the engine has.
        unseen: nodes that the engine shows nothing about: folded, or fused out of sight.
        read_from: where the precision was read back from.
        lowered: what the backend changed in its own copy of the graph.
        warnings: the builder's own warnings.
        build_s: seconds that the build took, an observation.
        peak_memory_mb: highest resident memory of the builder in MiB, an observation.
        refused: what the backend said when it does not take the model; there is no engine then.
    """

    backend: str
    variant: str
    size_bytes: int = 0
    requested: dict[str, int] = {}
    read_back: dict[str, int] = {}
    unseen: int = 0
    read_from: str = ""
    lowered: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    build_s: float = 0.0
    peak_memory_mb: float = 0.0
    refused: str = ""


def build_variant(
    out: Path,
    *,
    model: Artifact,
    variant: str,
    inputs: Mapping[str, InputSettings],
    backend: str,
    options: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
) -> BuildReport:
    """Build one variant with one backend, in a child process, and compare the precision that came out.

    A model that the backend does not take is a result too: the folder then holds refused.json and no engine, so that
    the other targets go on and the same question is not asked again.

    Args:
        out: empty folder; receives the engine's files, engine.json and precision.json, or refused.json.
        model: the variant's ONNX artifact.
        variant: its name.
        inputs: declared inputs; their ranges become the optimization profile.
        backend: name of the backend.
        options: the target's options.
        fingerprint: what the target said of itself; part of the key, compared with this host here.

    Raises:
        EnginesmithError: the backend is not installed, does not keep this variant's precision, refuses the inputs or
            an option, failed, crashed or ran out of time; or the engine has another precision than the graph asks for.
    """
    found = find_backend(backend)
    why_not = refusal(backend, variant)
    if why_not:
        raise EnginesmithError(why_not, key=KEY, hint="this variant is measured by emulation on this target")
    if found.version() is not None and dict(fingerprint) != found.fingerprint():
        raise EnginesmithError(
            f"the target says it is {dict(fingerprint)}, this host is {found.fingerprint()}",
            key=KEY,
            hint="an engine is built on the host it is for",
        )
    with engine_errors(), progress.track(f"build {variant} for {backend}", total=1.0) as bar:
        profile = profile_of(engine_inputs(inputs))
        request = BuildRequest(model=model.path / MODEL, variant=variant, profiles=(profile,), options=options)
        try:
            result = build_engine(found, request, out, tick=_Ticker(bar))
        except RefusedError as error:
            write_refusal(error, out)
            return BuildReport(backend=backend, variant=variant, refused=str(error))
    manifest = result.manifest
    return BuildReport(
        backend=backend,
        variant=variant,
        size_bytes=manifest.size,
        requested=dict(manifest.requested),
        read_back=dict(manifest.read_back),
        unseen=manifest.unseen,
        read_from=manifest.read_from,
        lowered=manifest.lowered,
        warnings=manifest.warnings,
        build_s=round(result.seconds, 3),
        peak_memory_mb=round(result.peak_memory / 2**20, 1),
    )


BUILD = Stage("build", version=1, run=build_variant, tools=("onnx",))


class _Ticker:
    """Moves a bar by what the builder says; also where Ctrl-C takes effect."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._done = 0.0

    def __call__(self, said: Progress) -> None:
        done = max(self._done, said.done or 0.0)
        self._bar.advance(done - self._done)
        self._done = done
