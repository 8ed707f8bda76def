"""A folder turns into a running Prefect server, its process workers and an MLflow server on this host, and back.

Each service has ``NAME.json`` (which process it is, by number, boot and start time, and where it answers) and
``NAME.log`` in the folder. Its processes carry the folder and the name in their environment: that is how what a killed
service left behind is told apart from anybody else's.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.record.facts import Process

MARK = "ENGINESMITH_SERVICE"
State = Literal["up", "silent", "half-dead", "stale", "down"]

_BIN = Path(sys.executable).parent
_LEASES = "prefect.server.concurrency.lease_storage.filesystem"
_QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": _LEASES,  # in memory, a restart would leak a killed holder's slot
    "PREFECT_SERVER_CONCURRENCY_MAXIMUM_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
}
_STOP_S = 20.0
_SILENT_S = 90.0  # a worker reports every 30 s


@dataclass(frozen=True)
class Options:
    """What to run and where.

    Attributes:
        folder: databases, MLflow's artifacts, logs and process files; absolute.
        host: the address to listen on.
        prefect_port: port of the Prefect server.
        mlflow_port: port of the MLflow server.
        workers: how many workers serve the pool.
        pool: the work pool; created when missing.
        patience: seconds to wait for each service to answer.
    """

    folder: Path
    host: str = "127.0.0.1"
    prefect_port: int = 4200
    mlflow_port: int = 5000
    workers: int = 1
    pool: str = "compile"
    patience: float = 180.0


@dataclass(frozen=True)
class Service:
    """One program to keep running.

    Attributes:
        name: its name: of its files too.
        command: program and arguments.
        address: what a person opens; empty for a worker.
        port: the port that it listens on; 0 for a worker.
        answers: whether it does its work now.
    """

    name: str
    command: tuple[str, ...]
    address: str
    port: int
    answers: Callable[[], bool]


class Running(BaseModel):
    """A service that was started, NAME.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    process: str
    address: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """How a service is.

    Attributes:
        name: its name.
        state: up; silent (it runs and does not answer); half-dead (its main process is gone, others of it run); stale
            (its file is left, nothing of it runs); down.
        address: where it answers.
        pid: its main process, 0 when there is none.
    """

    name: str
    state: State
    address: str = ""
    pid: int = 0


def up(options: Options, say: Callable[[str], None]) -> tuple[Status, ...]:
    """Start what does not run yet and wait until everything answers. What runs and answers is left alone.

    Raises:
        EnginesmithError: a port is taken, a service ended or does not answer, it runs with other settings, or it would
            listen beyond this host without authentication. What this call had started is stopped again.
    """
    _check_exposure(options.host)
    services = _services(options)
    with _alone(options.folder):
        missing = [service for service in services if not _settled(options, service, say)]
        for service in missing:
            _check_port(options.host, service)
        started: list[Service] = []
        try:
            _migrate(options.folder)
            waves = [[s for s in missing if s.port], [s for s in missing if not s.port]]
            for wave in waves:  # workers need the server
                for service in wave:
                    started.append(service)
                    _start(options, service)
                for service in wave:
                    _await(options, service)
                    say(f"{service.name}: started{f', {service.address}' if service.address else ''}")
        except BaseException:
            for service in reversed(started):
                _stop(options.folder, service.name)
            raise
    return status(options)


def down(folder: Path, say: Callable[[str], None]) -> None:
    """Stop every service that was started from this folder, workers first, and nothing else."""
    if not folder.is_dir():
        say(f"nothing was started from {folder}")
        return
    with _alone(folder):
        names = _known(folder)
        for name in sorted(names, key=lambda n: (not n.startswith("worker"), n)):
            stopped = _stop(folder, name)
            say(f"{name}: {'stopped' if stopped else 'was not running; its file is removed'}")
        if not names:
            say(f"nothing runs from {folder}")


def status(options: Options) -> tuple[Status, ...]:
    """How each service is, also those that an earlier start left behind."""
    services = {service.name: service for service in _services(options)}
    return tuple(_status(options.folder, name, services.get(name)) for name in {**services, **_known(options.folder)})


def environment(options: Options) -> dict[str, str]:
    """What a client of these services needs in its environment."""
    env = {
        **_QUIET,
        "PREFECT_HOME": str(options.folder / "prefect"),
        "PREFECT_API_URL": f"{_url(options.host, options.prefect_port)}/api",
        "MLFLOW_TRACKING_URI": _url(options.host, options.mlflow_port),
    }
    login = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    return env | ({"PREFECT_API_AUTH_STRING": login} if login else {})


def deploy(options: Options, file: Path) -> str:
    """Apply every deployment of a pipeline file to the Prefect server.

    Raises:
        EnginesmithError: Prefect refuses the file.
    """
    file = file.resolve()
    command = [str(_BIN / "prefect"), "--no-prompt", "deploy", "--all", "--prefect-file", file.name]
    done = subprocess.run(
        command,
        cwd=file.parent,
        env={**os.environ, **environment(options)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise EnginesmithError(
            "Prefect does not take the deployments", where=str(file), key="deployments", details=lines[-12:]
        )
    return str(done.stdout)


def _services(options: Options) -> tuple[Service, ...]:
    host, folder = options.host, options.folder
    prefect, mlflow = _url(host, options.prefect_port), _url(host, options.mlflow_port)
    program, tracking = str(_BIN / "prefect"), str(_BIN / "mlflow")
    auth = () if _is_loopback(host) else ("--app-name", "basic-auth")
    server = (program, "server", "start", "--host", host, "--port", str(options.prefect_port))
    served = (
        *(tracking, "server", "--host", host, "--port", str(options.mlflow_port), "--workers", "1", *auth),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"),
        *("--artifacts-destination", (folder / "mlflow" / "artifacts").as_uri()),
    )
    found = [
        Service("prefect", server, prefect, options.prefect_port, lambda: _answers(f"{prefect}/api/health")),
        Service("mlflow", served, mlflow, options.mlflow_port, lambda: _answers(f"{mlflow}/health")),
    ]
    for number in range(1, options.workers + 1):
        name = f"worker-{number}"
        command = (program, "worker", "start", "--pool", options.pool, "--type", "process", "--name", name)
        found.append(Service(name, command, "", 0, _polls(prefect, options.pool, name, folder / f"{name}.json")))
    return tuple(found)


def _settled(options: Options, service: Service, say: Callable[[str], None]) -> bool:
    """Whether a service runs and answers already; what is left of one that does not is stopped, and said."""
    found = _status(options.folder, service.name, service)
    if found.state == "down":
        return False
    running = _read(options.folder, service.name)
    if found.state in ("up", "silent") and running and running.command != service.command:
        raise EnginesmithError(
            f"{service.name} runs with other settings{f' at {running.address}' if running.address else ''}",
            where=str(options.folder),
            hint="enginesmith down first, then up with the new settings",
        )
    if found.state == "silent":  # it may be starting still
        with suppress(EnginesmithError):
            _await(options, service)
            found = _status(options.folder, service.name, service)
    if found.state == "up":
        say(f"{service.name}: runs already{f', {service.address}' if service.address else ''}")
        return True
    what = {
        "silent": "runs and does not answer",
        "half-dead": "lost its main process, others of it still ran",
        "stale": "was killed or the host restarted",
    }[found.state]
    say(f"{service.name}: {what}; starting it again")
    _stop(options.folder, service.name)
    return False


def _status(folder: Path, name: str, service: Service | None) -> Status:
    running = _read(folder, name)
    processes = _processes(folder, name)
    address = running.address if running else ""
    if running is None:
        return Status(name, "half-dead" if processes else "down")
    process = Process.read(running.process)
    if process.pid not in processes or process.surely_gone():
        return Status(name, "half-dead" if processes else "stale", address)
    answers = service is not None and service.command == running.command and service.answers()
    if service is None or service.command != running.command:
        answers = not address or _answers(f"{address}{'/api/health' if name == 'prefect' else '/health'}")
    return Status(name, "up" if answers else "silent", address, process.pid)


def _start(options: Options, service: Service) -> None:
    folder = options.folder
    env = {**os.environ, **environment(options), MARK: _mark(folder, service.name)}
    with (folder / f"{service.name}.log").open("ab") as log:
        child = subprocess.Popen(
            service.command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Running(
        name=service.name, process=str(Process.of(child.pid)), address=service.address, command=service.command
    )
    scratch = folder / f".{service.name}.json"
    scratch.write_text(running.model_dump_json(indent=1) + "\n")
    scratch.replace(folder / f"{service.name}.json")


def _await(options: Options, service: Service) -> None:
    end = time.monotonic() + options.patience
    while not service.answers():
        running = _read(options.folder, service.name)
        gone = running is None or Process.read(running.process).pid not in _processes(options.folder, service.name)
        if gone or time.monotonic() > end:
            log = options.folder / f"{service.name}.log"
            raise EnginesmithError(
                f"{service.name} {'ended while it started' if gone else f'did not answer for {options.patience:g} s'}",
                where=str(log),
                details=log.read_text(errors="replace").splitlines()[-12:] if log.exists() else (),
            )
        time.sleep(0.25)


def _stop(folder: Path, name: str) -> bool:
    """End all processes of a service: politely, after `_STOP_S` not. Whether there were any."""
    found = _processes(folder, name)
    deadline = time.monotonic() + _STOP_S
    asked: set[int] = set()
    while left := _processes(folder, name):
        force = time.monotonic() > deadline
        for pid in left if force else left - asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
        asked |= left
        time.sleep(0.1)
    (folder / f"{name}.json").unlink(missing_ok=True)
    return bool(found)


def _processes(folder: Path, name: str) -> set[int]:
    """The processes that carry this service's mark; a process number used again by others does not."""
    import psutil

    mark, own, found = _mark(folder, name), {os.getpid(), *(p.pid for p in psutil.Process().parents())}, set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark:
                found.add(process.pid)
    return found


def _known(folder: Path) -> dict[str, None]:
    """Names of services that have a file here; a killed start may have left one without."""
    names = [path.stem for path in folder.glob("*.json") if not path.name.startswith(".")]
    orphans = [path.stem for path in folder.glob("*.log") if _processes(folder, path.stem)]
    return dict.fromkeys(sorted({*names, *orphans}))


def _read(folder: Path, name: str) -> Running | None:
    try:
        return Running.model_validate_json((folder / f"{name}.json").read_text())
    except (OSError, ValidationError):
        return None


def _mark(folder: Path, name: str) -> str:
    return f"{folder.resolve()}#{name}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One `up` or `down` of a folder at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise EnginesmithError(
            "another enginesmith up or down is at work here", where=str(folder), hint="wait until it has finished"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _migrate(folder: Path) -> None:
    """Make MLflow's tables before its server starts: processes that do it at once break the file."""
    from enginesmith.tasks.record.tracking import connect

    with connect(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"):
        pass


def _check_port(host: str, service: Service) -> None:
    if not service.port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, service.port))
        except OSError as error:
            raise EnginesmithError(
                f"{service.name} cannot listen on {host}:{service.port}: {(error.strerror or str(error)).lower()}",
                hint=f"stop what listens there, or choose another port with --{service.name}-port",
            ) from error


def _check_exposure(host: str) -> None:
    """Beyond this host, both servers need a login: neither asks for one by itself."""
    if _is_loopback(host):
        return
    needed = ("PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_AUTH_CONFIG_PATH", "MLFLOW_FLASK_SERVER_SECRET_KEY")
    clients = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    missing = [name for name in (*needed, *clients) if not os.environ.get(name)]
    if missing:
        raise EnginesmithError(
            f"{host} can be reached from other hosts, and there is no login: {', '.join(missing)} not set",
            hint="set them (docs/nightly.md), or listen on 127.0.0.1",
        )
    if find_spec("flask_wtf") is None:
        raise EnginesmithError("MLflow's login needs Flask-WTF", hint="pip install 'mlflow[auth]'")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(host: str, port: int) -> str:
    """Where this host reaches it: an address for all interfaces is none to connect to."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{shown}:{port}"


def _polls(prefect: str, pool: str, name: str, file: Path) -> Callable[[], bool]:
    """Whether the worker that wrote `file` reports to the server; a killed one's last report is not taken for its."""

    def answers() -> bool:
        import httpx

        with suppress(httpx.HTTPError, OSError, ValueError, KeyError, TypeError):
            since = max(file.stat().st_mtime, time.time() - _SILENT_S)
            url = f"{prefect}/api/work_pools/{pool}/workers/filter"
            found = httpx.post(url, json={}, timeout=5, auth=_login(), trust_env=False).raise_for_status().json()
            return any(w["name"] == name and _moment(w["last_heartbeat_time"]) >= since for w in found)
        return False

    return answers


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _answers(url: str) -> bool:
    import httpx

    with suppress(httpx.HTTPError):
        return bool(httpx.get(url, timeout=5, auth=_login(), trust_env=False).is_success)
    return False


def _login() -> tuple[str, str] | None:
    user, colon, password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "").partition(":")
    return (user, password) if colon else None
