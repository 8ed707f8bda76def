"""Single stages on plain files, as the command line offers them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from .conftest import ENGINESMITH, Project, run_enginesmith

HEAVY = ("torch", "onnx", "onnxruntime", "numpy", "prefect", "mlflow", "matplotlib", "pydantic", "rich")


@pytest.fixture(scope="module")
def files(compiled: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.onnx (the exported digits net) and feeds.npz (60 labelled digits)."""
    folder = tmp_path_factory.mktemp("files")
    (model,) = (compiled.store / "objects" / "simplify").glob("*/model.onnx")
    (folder / "model.onnx").write_bytes(model.read_bytes())
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels[-60:].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    np.savez(folder / "feeds.npz", image=images, targets=labels[-60:])
    return folder


def test_help_loads_nothing_heavy() -> None:
    code = f"import sys, enginesmith.flows.cli; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_command_has_help() -> None:
    listing = subprocess.run([ENGINESMITH, "--help"], capture_output=True, text=True, check=True).stdout
    commands = [line.split()[0] for line in listing.partition("Commands:")[2].strip().splitlines() if line.strip()]
    assert {"compile", "lint", "slim", "fold", "export", "simplify", "probe", "fallback", "calibrate"} <= set(commands)
    for command in commands:
        subprocess.run([ENGINESMITH, command, "--help"], capture_output=True, check=True)


def test_slim_keeps_the_weights_bit_for_bit(project: Project, tmp_path: Path) -> None:
    out = tmp_path / "out" / "weights.safetensors"
    done = run_enginesmith(["slim", str(project.folder / "digits.pt"), str(out), "--json"], tmp_path)
    kept = load_file(out)
    source = torch.load(project.folder / "digits.pt", weights_only=True)["state_dict"]
    assert set(kept) == set(source)
    assert all(torch.equal(kept[name], source[name]) for name in source)
    assert json.loads(done.stdout)["report"]["bytes_after"] == out.stat().st_size
    assert [p.name for p in out.parent.iterdir()] == ["weights.safetensors"]


def test_probe_prints_a_row_per_node(files: Path) -> None:
    done = run_enginesmith(
        ["probe", "model.onnx", "--data", "feeds.npz", "--metric", "top1", "--samples", "32", "--json"], files
    )
    nodes = {node.name for node in onnx.load(files / "model.onnx").graph.node}
    assert {row["name"] for row in json.loads(done.stdout)["rows"]} == nodes


def test_simplify_writes_a_model_that_loads(files: Path, tmp_path: Path) -> None:
    run_enginesmith(["simplify", str(files / "model.onnx"), str(tmp_path / "small.onnx")], tmp_path)
    onnx.checker.check_model(onnx.load(tmp_path / "small.onnx"), full_check=True)


def test_fallback_and_calibrate_write_their_graphs(files: Path, tmp_path: Path) -> None:
    data = ["--data", str(files / "feeds.npz"), "--metric", "top1"]
    run_enginesmith(["fallback", str(files / "model.onnx"), "halves", *data, "--samples", "16"], tmp_path)
    run_enginesmith(["calibrate", str(files / "model.onnx"), "eighths", *data], tmp_path)
    for path in ("halves/fp16/model.onnx", "halves/mixed/model.onnx", "eighths/int8/model.onnx"):
        onnx.checker.check_model(onnx.load(tmp_path / path))
    again = run_enginesmith(["calibrate", str(files / "model.onnx"), "eighths", *data], tmp_path, code=1)
    assert "exists already" in again.stderr


def test_a_built_engine_has_a_manifest(files: Path, tmp_path: Path) -> None:
    run_enginesmith(["build", str(files / "model.onnx"), "engine"], tmp_path)
    assert json.loads((tmp_path / "engine" / "engine.json").read_text())["backend"] == "onnxruntime"


def test_measure_compares_two_models(files: Path) -> None:
    done = run_enginesmith(
        ["measure", "model.onnx", "--reference", "model.onnx", "--data", "feeds.npz", "--metric", "top1", "--json"],
        files,
    )
    report = json.loads(done.stdout)["report"]
    assert report["drop"] == 0
    assert report["samples"] == 60


def test_lint_names_the_line_that_decides_by_a_tensor(project: Project) -> None:
    assert "nothing found" in run_enginesmith(["lint", "pipeline.yaml"], project.folder).stdout
    project.replace(
        "model.py",
        "    return nn.Sequential(",
        "    class Net(nn.Sequential):\n"
        "        def forward(self, x):\n"
        "            if x.mean() > 0.5:\n"
        "                x = x * 2\n"
        "            return super().forward(x)\n\n"
        "    return Net(",
    )
    done = run_enginesmith(["lint", "pipeline.yaml"], project.folder, code=1)
    assert "model.py:10" in done.stdout
    assert "torch.where" in done.stdout
    assert not (project.store / "mlruns").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compile", "pipeline.yaml", "--plain", "--until", "probing"], ["probing", "probe"]),
        (["probe", "absent.onnx", "--data", "feeds.npz"], ["absent.onnx"]),
        (["simplify", "digits.pt", "out.onnx"], ["digits.pt"]),
        (["simplify", "model.onnx", "out.onnx", "--dim", "batch=8"], ["batch=8", "MIN:OPT:MAX"]),
    ],
)
def test_wrong_arguments_are_said(arguments: list[str], words: list[str], project: Project, files: Path) -> None:
    for name in ("model.onnx", "feeds.npz"):
        (project.folder / name).write_bytes((files / name).read_bytes())
    done = run_enginesmith(arguments, project.folder, code=1)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (project.folder / "out.onnx").exists()
