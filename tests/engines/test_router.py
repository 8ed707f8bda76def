"""A call goes to the tightest bucket that takes its shapes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from enginesmith.tasks.engines.router import Router
from enginesmith.tasks.engines.spec import EngineError, Profile, Range, TensorSpec


class Bucket:
    """An engine that says its own size."""

    def __init__(self, low: int, high: int, *, name: str = "x") -> None:
        profile = Profile({name: Range((1, 3, low, low), (1, 3, low, low), (4, 3, high, high))})
        spec = (TensorSpec(name, "float32", (None, 3, None, None)),)
        self.manifest = SimpleNamespace(profiles=(profile,), inputs=spec, outputs=spec)
        self.size, self.closed = high, False

    def run(self, feeds) -> dict[str, np.ndarray]:
        return {"y": np.array(self.size)}

    def close(self) -> None:
        self.closed = True


def image(size: int, batch: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.zeros((batch, 3, size, size), np.float32)}


@pytest.mark.parametrize(("size", "bucket"), [(32, 64), (64, 64), (65, 128), (128, 128), (200, 256)])
def test_the_tightest_bucket_takes_the_call(size, bucket) -> None:
    router = Router([Bucket(32, 256), Bucket(32, 64), Bucket(65, 128)])
    assert router.run(image(size))["y"] == bucket


@pytest.mark.parametrize("feeds", [image(300), image(64, batch=5), {"z": np.zeros((1, 3, 64, 64))}, {"x": np.zeros(3)}])
def test_shapes_that_no_bucket_takes_are_refused_with_the_buckets(feeds) -> None:
    with pytest.raises(EngineError, match="no bucket takes the shapes") as caught:
        Router([Bucket(32, 64), Bucket(65, 128)]).run(feeds)
    assert caught.value.details[1] == "x: (1, 3, 65, 65) to (4, 3, 128, 128)"


def test_buckets_of_two_models_are_refused() -> None:
    with pytest.raises(EngineError, match="not one model"):
        Router([Bucket(1, 2), Bucket(1, 2, name="z")])
    with pytest.raises(EngineError, match="at least one engine"):
        Router([])


def test_leaving_the_block_frees_every_bucket() -> None:
    buckets = [Bucket(1, 2), Bucket(3, 4)]
    with Router(buckets):
        pass
    assert all(bucket.closed for bucket in buckets)
