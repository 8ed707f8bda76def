"""Fixtures for all tests. Imported on CPython 3.10 without most dependencies too: keep module-level imports bare."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from enginesmith.tasks.store import Store

# Two test processes share two cores: one thread each. Set before numpy or torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No store, no tracking server and no stop request from outside the test."""
    from enginesmith.tasks import progress

    for name in ("ENGINESMITH_STORE", "ENGINESMITH_DEBUG", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    progress.reset()
    progress.quiet(on=False)
    yield
    progress.reset()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    from enginesmith.tasks.store import Store

    return Store(tmp_path / "store")
