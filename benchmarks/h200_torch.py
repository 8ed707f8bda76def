"""Measures the bundle's MobileNetV2 in plain PyTorch, eager and compiled, FP16: the baseline of the engines' latencies.

    python3 BUNDLE/torch_baseline.py --bundle BUNDLE --out results/torch.json

It runs with the GPU host's own Python and torch. Milliseconds per batch, host clock around one call and a wait.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch


def mobilenet(bundle: Path) -> torch.nn.Module:
    """The module with the published weights, FP32, on the CPU."""
    spec = importlib.util.spec_from_file_location("mobilenetv2_bottle", bundle / "torch_mobilenetv2.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{bundle} holds no torch_mobilenetv2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net: torch.nn.Module = module.MobileNetV2_bottle(input_size=224, width_mult=1.0).eval()
    net.load_state_dict(torch.load(bundle / "torch_mobilenetv2.pt", weights_only=True))
    return net


def timed(call: Callable[[], object], runs: int, device: str) -> dict[str, float]:
    """Percentiles of one call, after a tenth as many calls as warm-up."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(max(3, runs // 10)):
        once()
    seconds = [once() for _ in range(runs)]
    p50, p90, p99 = (float(v) * 1e3 for v in np.percentile(seconds, (50, 90, 99)))
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99}


def main() -> None:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=150)
    parser.add_argument("--modes", nargs="+", default=["eager", "compile"])
    arguments = parser.parse_args()
    layout = torch.channels_last
    net = mobilenet(arguments.bundle).half().to(arguments.device, memory_format=layout)
    samples = torch.from_numpy(np.load(arguments.bundle / "mobilenetv2.feeds.npz")["x"]).half().to(arguments.device)
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for mode in arguments.modes:
            for batch in (1, 8, 32):
                x = samples[:batch].contiguous(memory_format=layout)
                model = net if mode == "eager" else torch.compile(net, mode="reduce-overhead", dynamic=False)
                row = {"mode": mode, "dtype": "fp16", "batch": batch}
                rows.append(row | timed(lambda model=model, x=x: model(x), arguments.runs, arguments.device))
                sys.stdout.write(f"{rows[-1]}\n")
    arguments.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
