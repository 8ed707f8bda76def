"""Whatever is wrong with the input ends in one screen: what, where and what to do; the store stays as it was."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from enginesmith.flows.order import compile_plain
from enginesmith.tasks.errors import EnginesmithError

from .conftest import Project, run_enginesmith


def truncate(project: Project) -> None:
    path = project.folder / "digits.pt"
    path.write_bytes(path.read_bytes()[:5000])


def remove(project: Project) -> None:
    (project.folder / "digits.pt").unlink()


def rename_a_key(project: Project) -> None:
    edit(project, lambda c: c["state_dict"].update({"stem.weight": c["state_dict"].pop("0.weight")}))


def poison(project: Project) -> None:
    edit(project, lambda c: c["state_dict"]["3.weight"].fill_(float("nan")))


def pickle_a_module(project: Project) -> None:
    torch.save({"model": torch.nn.Linear(3, 3)}, project.folder / "digits.pt")


def edit(project: Project, change: Callable[[dict[str, Any]], object]) -> None:
    checkpoint = torch.load(project.folder / "digits.pt", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, project.folder / "digits.pt")


def says(file: str, old: str, new: str) -> Callable[[Project], None]:
    return lambda project: project.replace(file, old, new)


CASES: dict[str, tuple[Callable[[Project], None], list[str]]] = {
    "a missing checkpoint": (remove, ["digits.pt", "does not exist", "pipeline.yaml:2"]),
    "a truncated checkpoint": (truncate, ["digits.pt"]),
    "weights of another model": (rename_a_key, ["stem.weight", "0.weight"]),
    "a pickled module": (pickle_a_module, ["Linear"]),
    "NaN in a weight": (poison, ["3.weight", "NaN"]),
    "an unknown key": (says("pipeline.yaml", "budget:", "bugdet:"), ["bugdet", "budget", "pipeline.yaml:9"]),
    "an unknown metric": (says("pipeline.yaml", "call: top1", "call: top_1"), ["top_1", "top1", "pipeline.yaml:8"]),
    "no such factory": (says("pipeline.yaml", "model:build", "model:make"), ["make", "build", "pipeline.yaml:2"]),
    "data code that is not there": (
        says("pipeline.yaml", "calibration: data:calibration", "calibration: data:calibrate"),
        ["calibrate", "pipeline.yaml:6"],
    ),
    "a metric that is not there": (
        says("pipeline.yaml", "call: top1", 'call: "metrics:top1"'),
        ["metrics", "pipeline.yaml:8"],
    ),
    "data code that raises": (says("data.py", "/ 16)", "/ zero)"), ["NameError", "data.py:19"]),
    "calibration that yields nothing": (
        says("data.py", "return _digits(slice(0, HALF))", "return iter(())"),
        ["pipeline.yaml:6", "data.calibration"],
    ),
    "calibration of the wrong shape": (
        says("data.py", "reshape(-1, 1, 8, 8)", "reshape(-1, 1, 4, 16)"),
        ["[900, 1, 4, 16]", "[batch, 1, 8, 8]"],
    ),
    "an unknown backend option": (
        says("pipeline.yaml", "budget:", "targets: {cpu: {backend: onnxruntime, options: {thread: 1}}}\nbudget:"),
        ["thread", "pipeline.yaml:9"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_an_error_with_its_place(case: str, project: Project) -> None:
    change, words = CASES[case]
    change(project)
    with pytest.raises(EnginesmithError) as raised:
        compile_plain(project.file, until="export")
    text = str(raised.value)
    for word in words:
        assert word in text
    assert project.leftovers() == []
    assert "export" not in {name.partition("/")[0] for name in project.published()}


def test_the_command_prints_one_screen_and_marks_the_run_failed(project: Project) -> None:
    rename_a_key(project)
    done = run_enginesmith(["compile", "pipeline.yaml", "--plain"], project.folder, code=1)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) <= 30
    assert "Traceback" not in done.stderr
    assert any(line.startswith("error: ") for line in lines)
    with sqlite3.connect(project.store / "mlflow.db") as database:
        ((status, name),) = database.execute("select status, name from runs").fetchall()
    assert status == "FAILED"
    assert name.endswith("failed in fold")


def test_a_file_that_is_no_pipeline(tmp_path: Path) -> None:
    run = run_enginesmith(["compile", "nothing.yaml", "--plain"], tmp_path, code=1)
    assert "nothing.yaml" in run.stderr
