"""The flow on a real Prefect server: tasks by stage, hits as Cached, failures as failures, deployments from the CLI."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Server:
    """A Prefect server on loopback with a folder of its own."""

    url: str
    env: dict[str, str]

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the REST API."""
        return httpx.post(f"{self.url}{path}", json=body or {}, timeout=30).raise_for_status().json()

    def states(self) -> dict[str, str]:
        """State name by task name of the newest flow run."""
        (run,) = self.post("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
        tasks = self.post("/task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
        return {task["name"]: task["state_name"] for task in tasks}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prefect")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [BIN / "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        env=env,
        stdout=(folder / "server.log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/api/health", process)
        yield Server(f"http://127.0.0.1:{port}/api", env)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def wait_for(url: str, process: subprocess.Popen[Any], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, "the server ended"
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).is_success:
                return
        time.sleep(0.5)
    raise AssertionError(f"{url} did not answer within {seconds} s")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "digits"
    shutil.copytree(
        ROOT / "examples" / "digits", folder, ignore=shutil.ignore_patterns("*.pt", "artifacts", "__pycache__")
    )
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True)
    return folder


def run(server: Server, folder: Path, *command: str | Path, code: int = 0) -> str:
    done = subprocess.run(command, cwd=folder, env=server.env, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_stages_are_tasks_and_hits_are_cached(server: Server, digits: Path) -> None:
    run(server, digits, BIN / "enginesmith", "compile", "pipeline.yaml")
    first = server.states()
    assert set(first) >= {"slim", "fold", "export", "probe", "fallback", "calibrate", "build/cpu/int8", "record"}
    assert {first[name] for name in ("slim", "fold", "build/cpu/fp32")} == {"Completed"}
    out = run(server, digits, BIN / "enginesmith", "compile", "pipeline.yaml")
    assert "no stage had to run" in out
    stages = {name: state for name, state in server.states().items() if not name.startswith(("latency", "record"))}
    assert set(stages.values()) == {"Cached"}


def test_a_failed_stage_fails_the_run_on_one_screen(server: Server, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    model = tmp_path / "digits" / "model.py"
    model.write_text(model.read_text().replace("nn.Linear(256, 10)", "nn.Linear(256, 11)"))
    out = run(server, tmp_path / "digits", BIN / "enginesmith", "compile", "pipeline.yaml", code=1)
    assert "Traceback" not in out
    assert "11.weight" in out
    assert len(out.splitlines()) < 30
    states = server.states()
    assert (states["slim"], states["fold"]) == ("Cached", "Failed")
    (flow_run,) = server.post("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert flow_run["state_type"] == "FAILED"


def test_a_deployment_runs_from_the_command_line(server: Server, digits: Path) -> None:
    shutil.copy(ROOT / "pipeline.yaml", digits / "deployments.yaml")
    prefect = BIN / "prefect"
    run(server, digits, prefect, "work-pool", "create", "compile", "--type", "process")
    run(server, digits, prefect, "--no-prompt", "deploy", "--all", "--prefect-file", "deployments.yaml")
    worker = subprocess.Popen(
        [prefect, "worker", "start", "--pool", "compile"],
        cwd=digits,
        env=server.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        name = "compile-checkpoint/on-checkpoint"
        file = digits / "pipeline.yaml"
        run(server, digits, prefect, "deployment", "run", name, "-p", f"pipeline={file}", "--watch")
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(30)
    (flow_run,) = server.post("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert flow_run["state_type"] == "COMPLETED"
    assert set(server.states().values()) <= {"Cached", "Completed"}
