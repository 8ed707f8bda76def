"""Turns a bundle's plan into a results folder on the host that it was copied to, one row at a time.

A row that is finished stays when the run is killed, and is skipped the next time. Nothing but CPython 3.10, numpy, onnx
and the vendor's runtime is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.tasks.engines import backend
from enginesmith.tasks.engines.child import build_engine
from enginesmith.tasks.engines.gpu_latency import copy_ms, throughput, time_batch
from enginesmith.tasks.engines.manifest import read_layers, sha256_file
from enginesmith.tasks.engines.profiles import profile_of
from enginesmith.tasks.engines.spec import BuildRequest, Dim, EngineError, Input
from enginesmith.tasks.engines.tensorrt import ENGINE, load_engine
from enginesmith.tasks.engines.tensorrt_engine import LoadedEngine

PLAN = "plan.json"


def run_bundle(bundle: Path, results: Path, *, limit: float = float("inf"), keep: bool = True) -> int:
    """Build and measure every row of the plan that has no result yet; the number of rows that are left.

    Args:
        bundle: folder with plan.json and what it names.
        results: folder of results, made when missing.
        limit: seconds after which no further row is started.
        keep: whether inspector reports and build logs are copied into the results.

    Raises:
        EngineError: a file of the bundle has changed.
    """
    plan = json.loads((bundle / PLAN).read_text())
    for name, digest in plan["files"].items():
        if not (bundle / name).is_file() or sha256_file(bundle / name) != digest:
            raise EngineError(f"{name} has changed or is missing", where=str(bundle), hint="copy the bundle again")
    results.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256((bundle / PLAN).read_bytes()).hexdigest()
    started = time.monotonic()
    left = 0
    for row in plan["rows"]:
        goal = results / f"{row['name']}.json"
        if goal.exists() and json.loads(goal.read_text()).get("plan") == key:
            continue
        if time.monotonic() - started > limit:
            left += 1
            continue
        result: dict[str, Any] = {"plan": key, "row": row["name"], "model": row["model"], "variant": row["variant"]}
        try:
            result.update(_row(bundle, row, results if keep else None))
        except EngineError as error:
            result["error"] = str(error)
        except Exception:
            result["error"] = traceback.format_exc()
        fresh = goal.with_suffix(".new")
        fresh.write_text(json.dumps(result, indent=1) + "\n")
        fresh.replace(goal)
        sys.stdout.write(f"{row['name']}: {result.get('error', 'done').splitlines()[0]}\n")
        sys.stdout.flush()
    return left


def _row(bundle: Path, row: Mapping[str, Any], reports: Path | None) -> dict[str, Any]:
    feeds = dict(np.load(bundle / row["feeds"]))
    expected = dict(np.load(bundle / row["expected"]))
    found = backend(row["backend"])
    out = Path(row.get("work", "/tmp")) / f"enginesmith-{os.getpid()}-{row['name']}"  # noqa: S108 - a fresh folder
    out.mkdir(parents=True)
    options = dict(row["options"])
    if options.get("calibration"):
        options["calibration"] = str((bundle / options["calibration"]).resolve())
    inputs = [
        Input(i["name"], tuple(i["shape"]), i["dtype"], {k: Dim(*v) for k, v in i["dims"].items()})
        for i in row["inputs"]
    ]
    request = BuildRequest(bundle / row["file"], row["variant"], (profile_of(inputs),), options)
    refused = ""
    built = None
    started = time.monotonic()
    try:
        built = build_engine(found, request, out)
    except EngineError as error:
        if not (out / ENGINE).exists():
            raise
        refused = str(error)
    finally:
        for name in ("inspector.json", "build.log"):
            if reports is not None and (out / name).exists():
                shutil.copy(out / name, reports / f"{row['name']}.{name}")
    result: dict[str, Any] = {
        "build_s": time.monotonic() - started if built is None else built.seconds,
        "peak_memory": built.peak_memory if built else None,
        "manifest": json.loads(built.manifest.to_json()) if built else {},
        "layers": [asdict(layer) for layer in read_layers(out)] if built else [],
    }
    if refused:
        result["error"] = refused  # timed all the same, so that the cost of what was asked for can be told
    with load_engine(out / ENGINE, None) if refused else found.load(out) as engine:  # type: ignore[arg-type]
        result["outputs"] = _compare(engine, feeds, expected, max(row["batches"]))
        if isinstance(engine, LoadedEngine):
            result.update(_gpu_figures(engine, feeds, row["batches"]))
    shutil.rmtree(out)
    return result


def _gpu_figures(engine: LoadedEngine, feeds: Mapping[str, np.ndarray], batches: Sequence[int]) -> dict[str, Any]:
    """Latency of every batch size without and with a CUDA graph, throughput by streams, and the copy apart."""
    latency: list[dict[str, Any]] = []
    for batch in batches:
        part = {name: array[:batch] for name, array in feeds.items()}
        for graph in (False, True):
            try:
                latency.append(asdict(time_batch(engine, part, batch, graph=graph)))
            except EngineError as error:
                latency.append({"batch": batch, "graph": graph, "error": str(error)})
    largest = max(batches)
    part = {name: array[:largest] for name, array in feeds.items()}
    return {
        "latency": latency,
        "streams": {str(count): throughput(engine, part, largest, count) for count in (1, 2, 4)},
        "copy_ms": copy_ms(engine, part),
    }


def _compare(engine: Any, feeds: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], batch: int) -> Any:
    """Relative L2 error and agreement of the largest element, over all samples."""
    count = len(next(iter(feeds.values())))
    parts: dict[str, list[np.ndarray]] = {}
    for at in range(0, count, batch):
        for name, array in engine.run({n: a[at : at + batch] for n, a in feeds.items()}).items():
            parts.setdefault(name, []).append(array)
    report = {}
    for name, arrays in parts.items():
        got, want = np.concatenate(arrays).astype(np.float64), expected[name].astype(np.float64)
        finite = bool(np.isfinite(got).all())
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want)) if finite else None
        agree = float((got.argmax(-1) == want.argmax(-1)).mean())
        report[name] = {"relative_l2": error, "top1_agreement": agree, "finite": finite, "samples": count}
        if "__labels__" in expected:
            report[name]["accuracy"] = float((got.argmax(-1) == expected["__labels__"]).mean())
    return report


def main(argv: list[str] | None = None) -> int:
    """Entry of run.py in a bundle; exit code 3 when rows are left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no row is started")
    arguments = parser.parse_args(argv)
    return 3 if run_bundle(arguments.bundle, arguments.out, limit=arguments.limit) else 0


if __name__ == "__main__":
    sys.exit(main())
