"""What the source and the graph rules add to an export, and what the experiment costs beside it.

    python benchmarks/lint_cost.py

Each model is exported `RUNS` times in this process with everything on; the parts are timed inside the same run, so that
their ratio does not depend on what else the machine does. The table has the median of each ratio.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.export import judge
from enginesmith.tasks.firewalls.source import check_source
from enginesmith.tasks.settings import DimSettings, ExportSettings, InputSettings

RUNS = 3
BATCH = {"batch": DimSettings(min=1, opt=2, max=4)}


class Block(nn.Module):
    """Conv-BN-ReLU with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, width, H, W] to the same."""
        return torch.relu(self.norm(self.conv(x)) + x)


class Residual(nn.Module):
    """A residual classifier of `depth` blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(depth)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] to [N, 10]."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Encoder(nn.Module):
    """A transformer encoder over embedded frames."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 16, 64] to the same."""
        return self.layers(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual, 4 blocks": (lambda: Residual(4), (3, 64, 64)),
    "residual, 16 blocks": (lambda: Residual(16), (3, 64, 64)),
    "transformer, 4 layers": (lambda: Encoder(4), (16, 64)),
}


class Clock:
    """Seconds by the name of a part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; its time counts under a name."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                found = function(*args, **kwargs)
                return list(found) if isinstance(found, Iterator) else found
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the parts of `judge_module`."""
        with ExitStack() as stack:
            for name, part in (
                ("export_module", "export"),
                ("clean", "export"),
                ("check_source", "rules"),
                ("check_inputs", "rules"),
                ("graph_findings", "rules"),
                ("compare", "experiment"),
            ):
                stack.enter_context(mock.patch.object(judge, name, self.timed(part, getattr(judge, name))))
            yield


def measure(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, float]:
    """Seconds of each part in one export; the source rules, which a clean export does not need, are run beside it."""
    module = build().eval()
    inputs = {"x": InputSettings(shape=("batch", *shape), dims=BATCH)}
    samples = np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, clock.watching():
        judged = judge.judge_module(
            module, Dataset({"x": samples}, None, True, 1, 2, 5), inputs, ExportSettings(), (), Path(folder)
        )
        clock.timed("rules", check_source)(module, inputs)
    if judged.blocked:
        raise SystemExit(f"blocked: {judged.findings[0]}")
    return {**clock.seconds, "feeds": len(judged.cases)}


def main() -> None:
    """Print one row per model."""
    torch.manual_seed(0)
    print("| model | export s | rules s | rules / export | feeds | experiment s | experiment / export |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (build, shape) in MODELS.items():
        measure(build, shape)  # imports and caches
        runs = [measure(build, shape) for _ in range(RUNS)]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rules = statistics.median(run["rules"] / run["export"] for run in runs)
        tried = statistics.median(run["experiment"] / run["export"] for run in runs)
        print(
            f"| {name} | {middle['export']:.2f} | {middle['rules']:.3f} | {rules:.1%} | {middle['feeds']:.0f} "
            f"| {middle['experiment']:.2f} | {tried:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
