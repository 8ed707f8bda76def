"""Turns a synthetic checkpoint with Adam state into figures: time and peak memory of slimming it, beside plain torch.

Each measurement is a process of its own, so that peak memory is that process's. "private" leaves out pages of mapped
files, which the kernel may drop at any time. The page cache is warm unless --cold is given (needs root).

    python benchmarks/slim.py --gigabytes 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WAYS = ("import torch", "torch.load + save", "torch.load(mmap=True) + save", "enginesmith", "load before", "load after")
LAYER = 4096  # a weight of LAYER x LAYER FP32 numbers is 64 MB


def main() -> None:
    """Write the checkpoint, measure each way, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint, a third of it weights")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each way; the fastest counts")
    parser.add_argument("--folder", type=Path, default=None, help="where the files go (default: the temporary folder)")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.folder)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        kept = write_checkpoint(Path(folder), arguments.gigabytes)
        size = (Path(folder) / "checkpoint.pt").stat().st_size
        rows = {way: best(way, Path(folder), arguments.repeat, arguments.cold) for way in WAYS}
        after = (Path(folder) / "out" / "weights.safetensors").stat().st_size
    if arguments.json:
        print(json.dumps({"bytes": size, "kept": kept, "after": after, "rows": rows}))
        return
    print(f"{size / 1e6:.0f} MB, of which {kept / 1e6:.0f} MB are weights; slimmed: {after / 1e6:.0f} MB")
    print(f"{'':32}{'seconds':>9}{'CPU s':>8}{'peak RSS MB':>13}{'private MB':>12}")
    for way, row in rows.items():
        print(f"{way:32}{row['seconds']:9.2f}{row['cpu']:8.2f}{row['rss']:13.0f}{row['private']:12.0f}")


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """Weights, Adam's two moments and an epoch number in one .pt file; returns the weights' bytes."""
    import torch

    layers = max(1, round(gigabytes * 1e9 / 3 / (LAYER * LAYER * 4)))
    generator = torch.Generator().manual_seed(0)

    def tensors() -> list[torch.Tensor]:
        return [torch.randn(LAYER, LAYER, generator=generator) for _ in range(layers)]

    content = {
        "model": {f"layers.{i}.weight": t for i, t in enumerate(tensors())},
        "optimizer": {
            "state": {
                i: {"exp_avg": a, "exp_avg_sq": b} for i, (a, b) in enumerate(zip(tensors(), tensors(), strict=True))
            }
        },
        "epoch": 7,
    }
    torch.save(content, folder / "checkpoint.pt")
    return layers * LAYER * LAYER * 4


def best(way: str, folder: Path, repeat: int, cold: bool) -> dict[str, float]:
    """The fastest of some runs, each in a process of its own."""
    runs = []
    for _ in range(repeat):
        if cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        command = [sys.executable, __file__, "--one", way, "--folder", str(folder)]
        runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return min(runs, key=lambda run: run["seconds"])


def one(way: str, folder: Path) -> dict[str, float]:
    """Run one way in this process: wall and CPU seconds (imports apart), peak RSS and peak private memory in MB."""
    path, out = folder / "checkpoint.pt", folder / "out"
    out.mkdir(exist_ok=True)
    seconds = cpu = 0.0
    seen: list[float] = []

    def watch() -> None:
        while True:
            seen.append(memory("RssAnon"))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    if way == "enginesmith":
        from enginesmith.tasks import progress
        from enginesmith.tasks.slim import slim_checkpoint
        from enginesmith.tasks.stage import SourceFile

        progress.quiet()
        started, busy = time.perf_counter(), time.process_time()
        slim_checkpoint(out, checkpoint=SourceFile(path, ""))
        seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    elif way != "import torch":
        import torch

        started, busy = time.perf_counter(), time.process_time()
        if way == "load after":
            from safetensors.torch import load_file

            state = load_file(out / "weights.safetensors")
        else:
            state = torch.load(path, weights_only=True, mmap="mmap" in way)["model"]
        if "save" in way:
            torch.save(state, out / "plain.pt")
        else:
            sum(float(t.sum()) for t in state.values())  # the pages are needed, not only their addresses
        seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    else:
        import torch
    return {"seconds": seconds, "cpu": cpu, "rss": memory("VmHWM"), "private": max(seen)}


def memory(field: str) -> float:
    """A field of this process's status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
