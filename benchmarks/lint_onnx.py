"""How long `enginesmith lint FILE.onnx` takes on the ONNX files that public packages ship, and what it says.

    python benchmarks/lint_onnx.py

Every file is linted by the command in a process of its own, twice; the table has the faster time, the start of the
interpreter and of the child process that opens the file included.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

PACKAGES = ("magika", "rapidocr_onnxruntime", "silero_vad", "mne_icalabel")
RUNS = 2


def files() -> list[tuple[str, Path]]:
    """Every .onnx file of the packages, with the package's name."""
    found = []
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            found += [(package, path) for path in sorted(Path(folder).rglob("*.onnx"))]
    return found


def lint(path: Path) -> tuple[float, int, dict[str, object]]:
    """Seconds, exit code and report of one run."""
    command = [Path(sys.executable).with_name("enginesmith"), "lint", path, "--json"]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return time.perf_counter() - started, done.returncode, json.loads(done.stdout)["targets"][0]


def main() -> None:
    """Print one row per file."""
    print("| package | file | MB | s | exit code | findings |")
    print("|---|---|---:|---:|---:|---|")
    for package, path in files():
        runs = [lint(path) for _ in range(RUNS)]
        _, code, target = runs[-1]
        counts = Counter(f["rule"] for f in target["findings"])  # type: ignore[attr-defined]
        said = ", ".join(f"{rule} ({n})" if n > 1 else rule for rule, n in sorted(counts.items())) or "none"
        size = path.stat().st_size / 1e6
        print(f"| {package} | {path.name} | {size:.1f} | {min(r[0] for r in runs):.1f} | {code} | {said} |", flush=True)


if __name__ == "__main__":
    main()
