"""`enginesmith up`, `status` and `down` with the real servers, and what a compile asks of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from enginesmith.flows.cli import cli
from enginesmith.flows.services import MARK, Options, environment
from enginesmith.tasks.errors import EnginesmithError

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class House:
    """Running services and the options that name them."""

    options: Options
    first: str

    @property
    def arguments(self) -> list[str]:
        chosen = self.options
        ports = ["--prefect-port", str(chosen.prefect_port), "--mlflow-port", str(chosen.mlflow_port)]
        return ["--folder", str(chosen.folder), *ports]

    def run(self, *command: str | Path, code: int = 0) -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment(self.options)}
        done = subprocess.run(
            [BIN / command[0], *command[1:]], env=env, cwd=ROOT, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def status(self, code: int = 0) -> dict[str, dict[str, Any]]:
        found = json.loads(self.run("enginesmith", "status", "--json", *self.arguments, code=code))
        return {service["name"]: service for service in found}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return httpx.post(f"{environment(self.options)['PREFECT_API_URL']}{path}", json=body).raise_for_status().json()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("services")
    made = House(Options(folder, prefect_port=free_port(), mlflow_port=free_port()), "")
    try:
        first = made.run("enginesmith", "up", "--deploy", "pipeline.yaml", *made.arguments)
        yield House(made.options, first)
    finally:
        made.run("enginesmith", "down", "--folder", str(folder))
        assert not marked(folder)


def marked(folder: Path) -> list[int]:
    """Processes that still carry the mark of a folder: read from the kernel, not through the code under test."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={folder}#".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_up_says_where_the_servers_answer_and_a_second_up_leaves_them_alone(house: House) -> None:
    env = environment(house.options)
    assert f"export PREFECT_API_URL={env['PREFECT_API_URL']}" in house.first
    before = house.status()
    assert {name: service["state"] for name, service in before.items()} == {
        "prefect": "up",
        "mlflow": "up",
        "worker-1": "up",
    }
    assert house.run("enginesmith", "up", *house.arguments).count("runs already") == 3
    assert house.status() == before


def test_the_servers_listen_on_loopback_only(house: House) -> None:
    import psutil

    ports = {house.options.prefect_port, house.options.mlflow_port}
    listening = [c.laddr for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN and c.laddr.port in ports]
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_other_settings_are_refused_while_it_runs(house: House) -> None:
    other = ["--folder", str(house.options.folder), "--prefect-port", str(free_port())]
    out = house.run("enginesmith", "up", *other, "--mlflow-port", str(house.options.mlflow_port), code=1)
    assert "runs with other settings" in out
    assert "down first" in out


@pytest.fixture(scope="module")
def by_event(house: House, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint that an event announced."""
    folder = tmp_path_factory.mktemp("event") / "digits"
    ignored = shutil.ignore_patterns("*.pt", "artifacts", "__pycache__")
    shutil.copytree(ROOT / "examples" / "digits", folder, ignore=ignored)
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True)
    with (folder / "pipeline.yaml").open("a") as file:
        file.write("precision: {variants: [fp32]}\n")
    checkpoint = (folder / "digits.pt").rename(folder / "epoch9.pt")
    payload = json.dumps({"path": str(checkpoint), "pipeline": str(folder / "pipeline.yaml")})
    event = ("event", "emit", "checkpoint.created", "--resource-id", "checkpoint.epoch9", "--payload", payload)
    house.run("prefect", *event)
    return folder


def compiles(house: House) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(environment(house.options)["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("digits")
    return list(client.search_runs([experiment.experiment_id], "tags.`enginesmith.kind` = 'compile'"))


def test_an_event_compiles_a_checkpoint_and_mlflow_keeps_it(house: House, by_event: Path) -> None:
    end = time.monotonic() + 240
    while not (runs := house.post("/flow_runs/filter", {})) or runs[0]["state_type"] not in ("COMPLETED", "FAILED"):
        assert time.monotonic() < end, runs
        time.sleep(1)
    assert [run["state_type"] for run in runs] == ["COMPLETED"]
    assert runs[0]["parameters"]["checkpoint"] == str(by_event / "epoch9.pt")
    (parent,) = compiles(house)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["trigger"] == "deployment"


def test_two_processes_record_the_same_compile_once_through_the_server(house: House, by_event: Path) -> None:
    from mlflow import MlflowClient

    for run in compiles(house):
        MlflowClient(environment(house.options)["MLFLOW_TRACKING_URI"]).delete_run(run.info.run_id)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment(house.options)}
    compile_ = [BIN / "enginesmith", "compile", "pipeline.yaml", "--checkpoint", "epoch9.pt", "--plain"]
    both = [subprocess.Popen(compile_, cwd=by_event, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert [run.info.status for run in compiles(house)] == ["FINISHED"]


def test_a_killed_server_is_named_and_started_again(house: House) -> None:
    before = house.status()
    os.kill(before["mlflow"]["pid"], signal.SIGKILL)
    end = time.monotonic() + 20
    while house.status(code=1)["mlflow"]["state"] not in ("half-dead", "stale"):
        assert time.monotonic() < end
    assert "mlflow: " in house.run("enginesmith", "up", *house.arguments)
    after = house.status()
    assert {service["state"] for service in after.values()} == {"up"}
    assert after["mlflow"]["pid"] != before["mlflow"]["pid"]
    assert after["prefect"] == before["prefect"]


def test_a_taken_port_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["up", "--folder", str(tmp_path), "--prefect-port", str(port), "--mlflow-port", str(free_port())]
        result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, EnginesmithError)
    assert f"127.0.0.1:{port}" in result.exception.found
    assert "--prefect-port" in result.exception.hint
    assert not marked(tmp_path)


def test_beyond_loopback_needs_logins(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["up", "--folder", str(tmp_path), "--host", "0.0.0.0"])  # noqa: S104
    assert isinstance(result.exception, EnginesmithError)
    assert "MLFLOW_AUTH_CONFIG_PATH" in result.exception.found
    assert not marked(tmp_path)


def test_a_process_number_used_again_is_not_stopped(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        process = f"{socket.gethostname()} {bystander.pid} boot/pid 1"
        stale = {"name": "prefect", "process": process, "address": "http://127.0.0.1:4200", "command": ["prefect"]}
        (tmp_path / "prefect.json").write_text(json.dumps(stale))
        result = CliRunner().invoke(cli, ["down", "--folder", str(tmp_path)])
        assert "was not running" in result.output
        assert bystander.poll() is None
        assert not (tmp_path / "prefect.json").exists()
    finally:
        bystander.kill()
        bystander.wait()
