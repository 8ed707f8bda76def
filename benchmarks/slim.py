"""Turns a synthetic checkpoint with Adam state into figures: time and peak memory of slimming it, beside plain torch.

Each measurement is a process of its own, so that peak memory is that process's. "private" leaves out pages of mapped
files, which the kernel may drop at any time. Whatever writes ends with fsync. "copy" is the disk's own speed: it reads
and writes the kept bytes, in blocks, and does nothing else. The page cache is warm unless --cold is given (needs root).

    python benchmarks/slim.py --gigabytes 10
    python benchmarks/slim.py --gigabytes 10 --shards 4     # the weights alone, as PyTorch shards with an index
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
import zipfile
from collections.abc import Callable
from pathlib import Path

WAYS = {
    "import torch": "",
    "copy": "copy of the kept bytes",
    "enginesmith": "enginesmith",
    "load": "torch.load + save",
    "mmap": "torch.load(mmap=True) + save",
    "before": "model loaded from the original",
    "after": "model loaded from the slim file",
}
LAYER = 4096  # a weight of LAYER x LAYER FP32 numbers is 64 MB


def main() -> None:
    """Write the checkpoint, measure each way, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint, a third of it weights")
    parser.add_argument(
        "--shards", type=int, default=0, help="the weights alone, in so many PyTorch files and an index"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help=f"what to measure, of {', '.join(WAYS)}")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each way; the fastest counts")
    parser.add_argument("--folder", type=Path, default=None, help="where the files go (default: the temporary folder)")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.folder)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        kept = write_shards(folder, arguments) if arguments.shards else write_checkpoint(folder, arguments.gigabytes)
        size = sum(path.stat().st_size for path in folder.iterdir())
        os.sync()
        best("enginesmith", folder, 1, False)  # the copy needs its output
        rows = {way: best(way, folder, arguments.repeat, arguments.cold) for way in arguments.ways.split(",")}
        after = (folder / "out" / "weights.safetensors").stat().st_size
    if arguments.json:
        print(json.dumps({"bytes": size, "kept": kept, "after": after, "cold": arguments.cold, "rows": rows}))
        return
    print(f"{size / 1e6:.0f} MB, of which {kept / 1e6:.0f} MB are weights; slimmed: {after / 1e6:.0f} MB")
    print(f"{'':34}{'seconds':>9}{'CPU s':>8}{'GB/s':>7}{'peak RSS MB':>13}{'private MB':>12}")
    for way, row in rows.items():
        speed = f"{kept / 1e9 / row['seconds']:7.2f}" if row["seconds"] else " " * 7
        times = f"{row['seconds']:9.2f}{row['cpu']:8.2f}{speed}"
        print(f"{WAYS[way] or way:34}{times}{row['rss']:13.0f}{row['private']:12.0f}")


def write_checkpoint(folder: Path, gigabytes: float) -> int:
    """Weights, Adam's two moments and an epoch number in one .pt file; returns the weights' bytes."""
    import torch

    layers = _layers(gigabytes)

    def tensors() -> list[torch.Tensor]:
        return [torch.empty(LAYER, LAYER) for _ in range(layers)]

    content = {
        "model": {f"layers.{i}.weight": t for i, t in enumerate(tensors())},
        "optimizer": {
            "state": {
                i: {"exp_avg": a, "exp_avg_sq": b} for i, (a, b) in enumerate(zip(tensors(), tensors(), strict=True))
            }
        },
        "epoch": 7,
    }
    _save(content, folder / "checkpoint.pt")
    return layers * LAYER * LAYER * 4


def write_shards(folder: Path, arguments: argparse.Namespace) -> int:
    """The weights of such a checkpoint, dealt out to files, with an index; returns their bytes."""
    import torch

    names = [f"layers.{i}.weight" for i in range(_layers(arguments.gigabytes))]
    places = {name: f"pytorch_model-{i % arguments.shards:05d}.bin" for i, name in enumerate(names)}
    for shard in sorted(set(places.values())):
        _save({n: torch.empty(LAYER, LAYER) for n in names if places[n] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return len(names) * LAYER * LAYER * 4


def _layers(gigabytes: float) -> int:
    return max(1, round(gigabytes * 1e9 / 3 / (LAYER * LAYER * 4)))


def _save(content: object, path: Path) -> None:
    """torch.save, with normal numbers in each storage; a checkpoint of 10 GB never needs to be in memory."""
    import numpy as np
    import torch

    with torch.serialization.skip_data():
        torch.save(content, path)
    random = np.random.default_rng(0)
    numbers = random.standard_normal(LAYER * LAYER, np.float32)
    with zipfile.ZipFile(path) as archive:
        records = [r for r in archive.infolist() if "/data/" in r.filename]
    with path.open("r+b") as file:
        for record in records:
            file.seek(record.header_offset + 26)
            header = file.read(4)
            start = (
                record.header_offset + 30 + int.from_bytes(header[:2], "little") + int.from_bytes(header[2:], "little")
            )
            file.seek(start)
            file.write(np.roll(numbers, int(random.integers(numbers.size))).data)
        file.flush()
        os.fsync(file.fileno())


def best(way: str, folder: Path, repeat: int, cold: bool) -> dict[str, float]:
    """The fastest of some runs, each in a process of its own."""
    runs = []
    for _ in range(repeat):
        if cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        command = [sys.executable, __file__, "--one", way, "--folder", str(folder)]
        runs.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    return min(runs, key=lambda run: run["seconds"])


def one(way: str, folder: Path) -> dict[str, float]:
    """Run one way in this process: wall and CPU seconds (imports apart), peak RSS and peak private memory in MB."""
    source = next((p for p in folder.iterdir() if p.suffix == ".json"), folder / "checkpoint.pt")
    out = folder / "out"
    out.mkdir(exist_ok=True)
    run = prepared(way, source, out)
    seen: list[float] = []

    def watch() -> None:
        while True:
            seen.append(memory("RssAnon"))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    time.sleep(0.03)
    started, busy = time.perf_counter(), time.process_time()
    run()
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    if way == "import torch":
        seconds = cpu = 0.0
    return {"seconds": seconds, "cpu": cpu, "rss": memory("VmHWM"), "private": max(seen)}


def prepared(way: str, source: Path, out: Path) -> Callable[[], object]:
    """What is to be timed; everything it needs is imported already."""
    if way == "enginesmith":
        from enginesmith.tasks import progress
        from enginesmith.tasks.slim import slim_checkpoint
        from enginesmith.tasks.stage import SourceFile

        progress.quiet()

        def slim() -> None:
            slim_checkpoint(out, checkpoint=SourceFile(source, ""))
            _sync(out / "weights.safetensors")

        return slim
    if way == "copy":
        return lambda: copy(out / "weights.safetensors", out / "copy")
    import torch
    from safetensors.torch import load_file

    def state(mmap: bool = False) -> dict[str, torch.Tensor]:
        files = sorted(source.parent.glob("*.bin")) if source.suffix == ".json" else [source]
        loaded: dict[str, torch.Tensor] = {}
        for file in files:
            content = torch.load(file, weights_only=True, mmap=mmap)
            loaded |= content.get("model", content)
        return loaded

    def save(mmap: bool) -> None:
        torch.save(state(mmap), out / "plain.pt")
        _sync(out / "plain.pt")

    def load(read: Callable[[], dict[str, torch.Tensor]]) -> None:
        loaded = read()
        with torch.device("meta"):
            model = torch.nn.Module()
            model.layers = torch.nn.ModuleList(torch.nn.Linear(LAYER, LAYER, bias=False) for _ in loaded)
        model.load_state_dict(loaded, assign=True)
        sum(float(t.detach().sum()) for t in model.parameters())  # the pages are needed, not only their addresses

    return {
        "import torch": lambda: None,
        "load": lambda: save(False),
        "mmap": lambda: save(True),
        "before": lambda: load(state),
        "after": lambda: load(lambda: load_file(out / "weights.safetensors")),
    }[way]


def copy(source: Path, target: Path) -> None:
    """Copy a file in blocks of the size that slim uses."""
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(1 << 20):
            writer.write(block)
    _sync(target)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def memory(field: str) -> float:
    """A field of this process's status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
