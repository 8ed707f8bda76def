"""A digits model of one's own: the example, trained once, copied for each test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from enginesmith.tasks.record.tracking import connect

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
ENGINESMITH = Path(sys.executable).with_name("enginesmith")


@dataclass(frozen=True)
class Project:
    """A folder with a pipeline.yaml and its store."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.yaml"

    @property
    def store(self) -> Path:
        return self.folder / "artifacts"

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace text that must be there."""
        text = (self.folder / file).read_text()
        assert old in text
        (self.folder / file).write_text(text.replace(old, new))

    def leftovers(self) -> list[Path]:
        """What unfinished builds left behind."""
        return list((self.store / "tmp").glob("*"))

    def published(self) -> set[str]:
        """Every artifact in the store, as stage/key."""
        return {f"{p.parent.name}/{p.name}" for p in (self.store / "objects").glob("*/*")}


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that one test process of a run makes and all of them use."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(folder.with_suffix(".lock")):
        done = folder.with_suffix(".done")
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)  # in place: MLflow's tables have absolute paths
            done.touch()
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its checkpoint."""
    return made_once(tmp_path_factory, "trained", _train) / "digits"


def _train(parent: Path) -> None:
    folder = parent / "digits"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.pt", "artifacts", "__pycache__"))
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True)
    (folder / "artifacts").mkdir()
    with connect(f"sqlite:///{folder}/artifacts/mlflow.db"):
        pass  # MLflow's tables take seconds to create: once for all copies


@pytest.fixture(scope="session")
def compiled(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The example, compiled once. Do not change it: copy it with `recompiled`."""

    def make(parent: Path) -> None:
        shutil.copytree(trained, parent / "digits")
        run_enginesmith(["compile", "pipeline.yaml", "--plain"], parent / "digits")

    return Project(made_once(tmp_path_factory, "compiled", make) / "digits")


@pytest.fixture(scope="session")
def unchanged(compiled: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What compiling the compiled example again says."""

    def make(folder: Path) -> None:
        (folder / "compiled.json").write_text(json.dumps(compile_json(compiled)))

    data: dict[str, Any] = json.loads((made_once(tmp_path_factory, "unchanged", make) / "compiled.json").read_text())
    return data


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Project:
    """A fresh copy of the trained example with an empty store."""
    shutil.copytree(trained, tmp_path / "digits")
    return Project(tmp_path / "digits")


@pytest.fixture
def recompiled(trained: Path, compiled: Project, tmp_path: Path) -> Project:
    """A copy of the compiled example, store and all; its MLflow records start anew."""
    shutil.copytree(compiled.folder, tmp_path / "digits", ignore=shutil.ignore_patterns("mlflow.db*", "mlruns"))
    shutil.copy(trained / "artifacts" / "mlflow.db", tmp_path / "digits" / "artifacts")
    return Project(tmp_path / "digits")


def run_enginesmith(arguments: Sequence[str], folder: Path, *, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own, as a user runs it."""
    done = subprocess.run(
        [ENGINESMITH, *arguments], cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


Compile = Callable[..., dict[str, Any]]


def compile_json(project: Project, *options: str) -> dict[str, Any]:
    """What `compile --plain --json` prints last."""
    done = run_enginesmith(["compile", "pipeline.yaml", "--plain", "--json", *options], project.folder)
    data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return data


def ran(data: dict[str, Any]) -> set[str]:
    """Labels of the stages that were not in the store."""
    return {label for label, stage in data["stages"].items() if not stage["cached"]}
