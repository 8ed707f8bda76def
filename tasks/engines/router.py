"""Turns the engines of a model's resolution buckets into one that picks by the shape of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import TracebackType

import numpy as np

from enginesmith.tasks.engines.spec import Engine, EngineError, Profile


class Router:
    """One engine per bucket; each call goes to the tightest bucket that takes its shapes. A context manager.

    Args:
        engines: loaded engines; each takes the shapes of the profiles in its manifest.

    Raises:
        EngineError: no engine, or engines with different inputs or outputs.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise EngineError("a router needs at least one engine")
        for engine in engines[1:]:
            first, other = _interface(engines[0]), _interface(engine)
            if first != other:
                raise EngineError(f"the buckets are not one model: one has {first}, another {other}")
        self.engines = tuple(engines)

    def route(self, feeds: Mapping[str, np.ndarray]) -> Engine:
        """The engine for these inputs: of those whose profile takes them, the one with the smallest largest shapes.

        Raises:
            EngineError: no bucket takes these shapes; it names the shapes and the buckets.
        """
        fitting = [
            (_volume(profile), index)
            for index, engine in enumerate(self.engines)
            for profile in engine.manifest.profiles
            if _takes(profile, feeds)
        ]
        if not fitting:
            shapes = {name: tuple(array.shape) for name, array in feeds.items()}
            raise EngineError(
                f"no bucket takes the shapes {shapes}",
                details=[_described(profile) for engine in self.engines for profile in engine.manifest.profiles],
                hint="resize or pad the input to a bucket, or add one",
            )
        return self.engines[min(fitting)[1]]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name from the engine for these shapes."""
        return self.route(feeds).run(feeds)

    def prepare(self, feeds: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A call that runs one inference on the engine for these shapes."""
        return self.route(feeds).prepare(feeds)

    def close(self) -> None:
        """Free every engine."""
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _interface(engine: Engine) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    manifest = engine.manifest
    inputs, outputs = ([(t.name, t.dtype) for t in tensors] for tensors in (manifest.inputs, manifest.outputs))
    return inputs, outputs


def _takes(profile: Profile, feeds: Mapping[str, np.ndarray]) -> bool:
    if set(profile.shapes) != set(feeds):
        return False
    for name, found in profile.shapes.items():
        shape = feeds[name].shape
        if len(shape) != len(found.min):
            return False
        if any(not low <= size <= high for low, size, high in zip(found.min, shape, found.max)):  # noqa: B905 - same rank
            return False
    return True


def _volume(profile: Profile) -> int:
    return sum(prod(found.max) for found in profile.shapes.values())


def _described(profile: Profile) -> str:
    return ", ".join(f"{name}: {found.min} to {found.max}" for name, found in profile.shapes.items())
