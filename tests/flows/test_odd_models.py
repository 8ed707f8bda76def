"""Whole compiles of small models that break tools of this kind."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from enginesmith.flows.order import IncompleteError, compile_plain
from enginesmith.tasks.usercode import UserCode, importable

from .conftest import Project


@pytest.fixture
def make(project: Project) -> object:
    """Replaces the digits model by another: its code and its pipeline file."""

    def replaced(code: str, pipeline: str) -> Path:
        for name in ("model.py", "pipeline.yaml", "digits.pt"):
            (project.folder / name).unlink()
        header = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n\n"
        (project.folder / "model.py").write_text(header + textwrap.dedent(code))
        (project.folder / "pipeline.yaml").write_text(textwrap.dedent(pipeline))
        with importable(project.folder):
            torch.save(UserCode(project.folder, "model:build")().state_dict(), project.folder / "weights.pt")
        return project.file

    return replaced


def test_overflow_is_seen_and_mended_and_an_invalid_capture_is_traced_instead(make) -> None:  # type: ignore[no-untyped-def]
    file = make(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3, padding=1)
                self.head = nn.Linear(8, 2)

            def forward(self, image):
                x = F.relu(self.conv(image)).mean((2, 3))
                return self.head(x).squeeze(-1) * 70000.0  # squeeze of an axis of size 2: nothing in torch

        def build():
            torch.manual_seed(1)
            return Net()
        """,
        """
        model: {checkpoint: weights.pt, factory: model:build}
        inputs:
          image: {shape: [batch, 3, 16, 16], dims: {batch: {min: 1, opt: 4, max: 8}}}
        """,
    )
    compiled = compile_plain(file, until="measure")
    rows = {row.variant: row for row in compiled.rows}
    assert rows["fp16"].drop == 1.0
    assert rows["mixed"].drop == 0.0
    assert rows["mixed"].fp32_nodes > 0
    report = compiled.artifacts["export"].report
    assert report["exporter"] == "legacy"
    assert any("invalid" in finding["message"] for finding in report["findings"])


def test_frames_folded_into_the_batch_are_calibrated(make) -> None:  # type: ignore[no-untyped-def]
    file = make(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

            def forward(self, video):
                frames = F.relu(self.conv(video.flatten(0, 1))).mean((2, 3))
                return self.head(frames).view(-1, 3, 5).mean(1)

        def build():
            torch.manual_seed(0)
            return Net()
        """,
        """
        model: {checkpoint: weights.pt, factory: model:build}
        inputs:
          video: {shape: [batch, 3, 3, 8, 8], dims: {batch: {min: 1, opt: 2, max: 4}}}
        data: {samples: 8}
        """,
    )
    calibrated = compile_plain(file, until="calibrate").artifacts["calibrate"]
    assert (calibrated.path / "int8" / "model.onnx").is_file()


def test_a_target_that_refuses_the_model_costs_its_own_rows_only(make) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("tensorrt_rtx")
    file = make(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, image):
                return F.interpolate(self.conv(image), size=(3, 3), mode="bilinear", antialias=True)

        def build():
            torch.manual_seed(0)
            return Net()
        """,
        """
        model: {checkpoint: weights.pt, factory: model:build}
        inputs:
          image: {shape: [batch, 3, 10, 10], dims: {batch: {min: 1, opt: 2, max: 4}}}
        data: {samples: 8}
        precision: {variants: [fp32]}
        targets: {cpu: {backend: onnxruntime}, rtx: {backend: tensorrt_rtx}}
        """,
    )
    cpu, rtx = compile_plain(file, until="measure").rows
    assert cpu.champion
    assert not rtx.champion
    assert any(note.startswith("refused: ") and "Resize" in note for note in rtx.notes)


def test_what_cannot_be_recorded_is_shown_all_the_same(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(IncompleteError) as raised:
        compile_plain(project.file)
    assert [row.variant for row in raised.value.compiled.rows] == ["fp32", "fp16", "mixed", "int8", "int8-mixed"]
    assert "MLFLOW_TRACKING_URI" in str(raised.value)
