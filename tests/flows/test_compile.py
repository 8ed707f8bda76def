"""One compile of a small real model, and what runs again when something changes."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import ENGINESMITH, Project, compile_json, ran, run_enginesmith

VARIANTS = ("fp32", "fp16", "mixed", "int8", "int8-mixed")
EMULATED = ("fp16", "mixed", "int8-mixed")


def test_every_stage_and_every_variant_is_in_the_json(unchanged: dict[str, Any]) -> None:
    stages = set(unchanged["stages"])
    assert stages >= {
        *("slim", "data", "fold", "export", "simplify", "reference", "probe", "fallback", "calibrate", "revert"),
        *("build/cpu/fp32", "build/cpu/int8"),
        *(f"measure/cpu/{variant}" for variant in VARIANTS),
    }
    for stage in unchanged["stages"].values():
        assert set(stage) >= {"key", "path", "cached", "report"}
        assert (Path(stage["path"]) / "manifest.json").is_file()
    assert [row["variant"] for row in unchanged["variants"]] == list(VARIANTS)


def test_onnxruntime_rows_say_what_is_evidence(unchanged: dict[str, Any]) -> None:
    rows = {row["variant"]: row for row in unchanged["variants"]}
    for variant, row in rows.items():
        emulated = variant in EMULATED
        assert row["evidence"] == ("emulated" if emulated else "engine")
        assert (row["latency_p50_ms"] is None) == emulated
        assert not (emulated and row["champion"])
        assert row["within_budget"] is True
    assert rows["fp32"]["drop"] == 0
    assert sum(row["champion"] for row in rows.values()) == 1


def test_a_second_compile_runs_no_stage_and_records_nothing_new(compiled: Project, unchanged: dict[str, Any]) -> None:
    again = run_enginesmith(["compile", "pipeline.yaml", "--plain"], compiled.folder)
    assert "no stage had to run" in again.stdout
    second = compile_json(compiled)
    assert ran(unchanged) == ran(second) == set()
    assert second["variants"] == unchanged["variants"]
    assert second["mlflow"]["run_id"] == unchanged["mlflow"]["run_id"]
    assert not second["mlflow"]["created"]


def test_a_changed_optimizer_value_runs_slim_and_nothing_else(recompiled: Project) -> None:
    checkpoint = torch.load(recompiled.folder / "digits.pt", weights_only=True)
    checkpoint["optimizer"]["param_groups"][0]["lr"] *= 2
    torch.save(checkpoint, recompiled.folder / "digits.pt")
    assert ran(compile_json(recompiled)) == {"slim"}


def test_a_changed_weight_runs_all_that_depends_on_it(recompiled: Project) -> None:
    checkpoint = torch.load(recompiled.folder / "digits.pt", weights_only=True)
    checkpoint["state_dict"]["0.weight"][0, 0, 0, 0] += 0.25
    torch.save(checkpoint, recompiled.folder / "digits.pt")
    data = compile_json(recompiled)
    # FP16 costs this net nothing, so that mixed is the same file as fp16 and its verdict is there already.
    assert ran(data) | {"measure/cpu/mixed"} == set(data["stages"]) - {"data"}


def test_a_line_in_the_factory_does_not_touch_weights_and_data(recompiled: Project) -> None:
    recompiled.replace("model.py", "    return nn.Sequential(", "    # a remark\n    return nn.Sequential(")
    data = compile_json(recompiled)
    assert ran(data) == {"fold", "export"}  # what they write is the same, so nothing after them runs


def test_a_line_in_the_data_code_does_not_touch_weights(recompiled: Project) -> None:
    recompiled.replace("data.py", "HALF = 897", "HALF = 890")
    data = compile_json(recompiled)
    assert "data" in ran(data)
    assert "slim" not in ran(data)
    assert {"reference", "probe", "calibrate"} <= ran(data)


def test_a_tighter_budget_searches_again_and_probes_nothing(recompiled: Project) -> None:
    recompiled.replace("pipeline.yaml", "max_drop: 0.01", "max_drop: 0.009")
    again = ran(compile_json(recompiled))
    assert {"fallback", "revert"} <= again
    assert not again & {"slim", "data", "fold", "export", "simplify", "reference", "probe", "calibrate"}


def test_until_runs_nothing_beyond_the_stage(project: Project) -> None:
    data = compile_json(project, "--until", "fold")
    assert set(data["stages"]) == {"slim", "data", "fold"}
    assert data["variants"] == []


def test_two_processes_build_everything_once(project: Project) -> None:
    command = [ENGINESMITH, "compile", "pipeline.yaml", "--plain", "--json", "--until", "reference"]
    both = [
        subprocess.Popen(command, cwd=project.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = []
    for process in both:
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
        answers.append(json.loads(out.splitlines()[-1]))
    assert ran(answers[0]) | ran(answers[1]) == set(answers[0]["stages"])
    assert not ran(answers[0]) & ran(answers[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_compile_leaves_whole_artifacts_and_a_killed_run(project: Project, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [ENGINESMITH, "compile", "pipeline.yaml", "--plain"],
        cwd=project.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("data "):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "stopped" in err
    assert project.leftovers() == []
    with sqlite3.connect(project.store / "mlflow.db") as database:
        assert {row[0] for row in database.execute("select status from runs")} <= {"KILLED", "FAILED"}
        assert database.execute("select count(*) from runs").fetchone()[0] == 1
    before = project.published()
    assert {name.partition("/")[0] for name in before} >= {"slim", "data"}
    data = compile_json(project, "--until", "fold")
    assert ran(data) <= {"fold"}
