"""Turns a tracking URI into an MLflow client that is quick to fail, and experiments and runs that always end.

MLflow is imported on first use. A SQLite database is created whole or not at all, and has one writer at a time.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.record.facts import Process
from enginesmith.tasks.record.masking import mask
from enginesmith.tasks.record.names import safe_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY = "tracking.uri"
PROCESS = "enginesmith.process"  # who writes the run, and in which session: ``HOST PID BOOT STARTED SESSION``

# Set before MLflow is imported where the user has not: quiet, no telemetry, minutes of retries cut to seconds.
_ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
_CONNECT_S = 5.0
_FOREIGN_AGE_S = 24 * 3600  # a run of another process namespace is given up after this long


@dataclass(frozen=True)
class Span:
    """When a run began and ended, as MLflow shows it: the times of the compile, not of its recording."""

    started: datetime
    finished: datetime

    @property
    def start_ms(self) -> int:
        """Milliseconds since 1970."""
        return int(self.started.timestamp() * 1000)

    @property
    def end_ms(self) -> int:
        """Milliseconds since 1970."""
        return int(self.finished.timestamp() * 1000)


@dataclass
class Tracking:
    """An open MLflow.

    Attributes:
        uri: the tracking URI.
        client: MLflow's client for it.
        artifacts: folder below which new experiments keep their artifacts; None leaves it to the server.
        session: marks every run begun through this object.
    """

    uri: str
    client: MlflowClient
    artifacts: Path | None = None
    session: str = field(default_factory=lambda: uuid.uuid4().hex)

    def experiment(self, name: str, tags: Callable[[str], Mapping[str, str]]) -> str:
        """Id of the experiment of this name: created, or brought back when somebody deleted it.

        Args:
            name: the experiment's name.
            tags: from the id to the tags that it should have; those that are there stay as they are.
        """
        found = self.client.get_experiment_by_name(name)
        if found is None:
            place = None if self.artifacts is None else (self.artifacts / safe_name(name)).as_uri()
            found = self.client.get_experiment(self.client.create_experiment(name, artifact_location=place))
        elif found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        for key, value in tags(found.experiment_id).items():
            if key not in found.tags:
                self.client.set_experiment_tag(found.experiment_id, key, value)
        return str(found.experiment_id)

    @contextmanager
    def run(
        self,
        experiment: str,
        name: str,
        tags: Mapping[str, str],
        span: Span,
        *,
        status: str = "FINISHED",
    ) -> Iterator[str]:
        """The id of a new run, which ends with the block: with `status`, or FAILED or KILLED by an exception."""
        who = {PROCESS: f"{Process.current()} {self.session}"}
        try:
            run = self.client.create_run(experiment, start_time=span.start_ms, tags={**tags, **who}, run_name=name)
            yield str(run.info.run_id)
            self.client.set_terminated(run.info.run_id, status, span.end_ms)
        except BaseException as error:
            self._end_all(experiment, status_of(error))
            raise

    def _end_all(self, experiment: str, status: str) -> None:
        """End every unfinished run of this session: also one whose id an interrupt kept from us."""
        with suppress(Exception):  # the error on its way out is the one to report; `sweep` ends what is left
            for run in self.client.search_runs([experiment], f"tags.`{PROCESS}` LIKE '% {self.session}'"):
                if run.info.status in ("RUNNING", "SCHEDULED"):
                    self.client.set_terminated(run.info.run_id, status)


@contextmanager
def connect(
    uri: str, *, artifacts: Path | None = None, patience: float | None = None, turn: Path | None = None
) -> Iterator[Tracking]:
    """Open MLflow; for SQLite, alone among this host's processes.

    Args:
        uri: the tracking URI: ``sqlite:////absolute/file.db``, another database's, or http(s).
        artifacts: folder for the artifacts of new experiments; by default ``mlruns`` beside a SQLite file, and left to
            the server otherwise.
        patience: seconds to wait for another process to finish its writing; None waits as long as it takes.
        turn: what the processes that write to a server take turns by: the lock file beside this path.

    Raises:
        EnginesmithError: with key tracking.uri, when MLflow cannot be reached or refuses.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    database = _sqlite_file(uri)
    with _translated(uri):
        if database is None:
            _knock(uri)
            with nullcontext() if turn is None else _alone(turn, patience):
                yield Tracking(uri, _client(uri), artifacts)
            return
        with _alone(database, patience):
            _create(database)
            _check(database)
            yield Tracking(uri, _client(uri), artifacts or database.parent / "mlruns")


def sweep(uri: str) -> int:
    """Mark as KILLED the runs that a dead process of this host left RUNNING.

    Returns:
        How many runs were marked.
    """
    database = _sqlite_file(uri)
    if database is not None and not database.exists():
        return 0
    with connect(uri) as tracking:
        return sweep_through(tracking)


def sweep_through(tracking: Tracking) -> int:
    """`sweep` with an open MLflow."""
    client = tracking.client
    experiments = [e.experiment_id for e in _pages(client.search_experiments)]
    if not experiments:
        return 0
    query = f"attributes.status = 'RUNNING' and tags.`{PROCESS}` LIKE '{Process.current().host} %'"
    dead = [run for run in _pages(client.search_runs, experiments, query) if _is_dead(run)]
    for run in dead:
        client.set_terminated(run.info.run_id, "KILLED")
    return len(dead)


def _is_dead(run: Any) -> bool:
    process = Process.read(run.data.tags[PROCESS])
    age = time.time() - run.info.start_time / 1000
    return process.surely_gone() or (process.boot != Process.current().boot and age > _FOREIGN_AGE_S)


def _pages(search: Any, *args: Any) -> Iterator[Any]:
    page = search(*args)
    yield from page
    while page.token:
        page = search(*args, page_token=page.token)
        yield from page


def _client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _sqlite_file(uri: str) -> Path | None:
    if not uri.startswith("sqlite:"):
        return None
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or not path.is_absolute():
        raise EnginesmithError(f"{uri!r} is not a SQLite file", key=KEY, hint="write sqlite:///path/to/mlflow.db")
    return path


@contextmanager
def _alone(database: Path, patience: float | None) -> Iterator[None]:
    """Hold the lock beside a path: a schema is created once, and a compile is looked up and recorded as one."""
    database.parent.mkdir(parents=True, exist_ok=True)
    beside = database.with_name(database.name + ".lock")
    beside.open("a").close()  # where it cannot be written, FileLock would wait for ever
    lock = FileLock(beside)
    deadline = None if patience is None else time.monotonic() + patience
    said = False
    while True:
        try:
            lock.acquire(timeout=1)
            break
        except Timeout:
            if deadline is not None and time.monotonic() > deadline:
                raise EnginesmithError(
                    f"another process has been writing to {database.name} for {patience:.0f} s", key=KEY
                ) from None
            if patience is None:
                progress.checkpoint()
            if not said:
                progress.note(f"record: another process is writing to {database.name}; waiting for it")
                said = True
    try:
        yield
    finally:
        lock.release()


def _create(database: Path) -> None:
    """Create the database with MLflow's tables, under another name first: a killed creation leaves no broken file."""
    if database.exists() and database.stat().st_size:
        return
    for left in database.parent.glob(f".{database.name}-*"):
        left.unlink(missing_ok=True)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    handle, name = tempfile.mkstemp(prefix=f".{database.name}-", dir=database.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        store: Any = SqlAlchemyStore  # MLflow has no types here
        root = (database.parent / "mlruns").as_uri()
        store(f"sqlite:///{scratch}", root).engine.dispose()
        scratch.chmod(0o644)
        scratch.rename(database)
        # MLflow keeps one pool of connections per address: one to a file that was deleted here must not be used again
        store(f"sqlite:///{database}", root).engine.dispose()
    finally:
        for left in database.parent.glob(f"{scratch.name}*"):
            left.unlink(missing_ok=True)


def _check(database: Path) -> None:
    """Open the database once: where that fails, MLflow tries for minutes."""
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=rw", uri=True, timeout=_CONNECT_S)) as connection:
        connection.execute("PRAGMA schema_version")


def _knock(uri: str) -> None:
    """Connect to the server of a URI once, unless it lies behind a proxy: MLflow itself tries for minutes."""
    import requests

    parts = urlsplit(uri)
    port = parts.port or _PORTS.get(parts.scheme.partition("+")[0])
    if parts.hostname is None or port is None or requests.utils.get_environ_proxies(uri):
        return
    socket.create_connection((parts.hostname, port), timeout=_CONNECT_S).close()


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Errors of MLflow, its database and its transport as ours."""
    try:
        yield
    except EnginesmithError:
        raise
    except Exception as error:
        if not _is_mlflows(error):
            raise
        reason = mask(str(error).strip() or type(error).__name__).splitlines()
        raise EnginesmithError(
            f"MLflow at {mask(uri)} cannot be used: {reason[0][:300]}",
            key=KEY,
            details=[line[:200] for line in reason[1:6] if line.strip()],
            hint=_hint(uri, str(error)),
        ) from error


def _is_mlflows(error: Exception) -> bool:
    if isinstance(error, sqlite3.Error | OSError):  # among them what requests raises
        return True
    if "mlflow" not in sys.modules:
        return False
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError)


def _hint(uri: str, reason: str) -> str:
    if "out-of-date database schema" in reason:
        return f"back the database up, then: mlflow db upgrade {mask(uri)}"
    if not uri.startswith("sqlite:"):
        return "start the server, or point tracking.uri or MLFLOW_TRACKING_URI elsewhere"
    return "check that the file is an MLflow database that you can write to, and that the disk is not full"


def status_of(error: BaseException) -> str:
    """MLflow's status of a run that this exception ended: KILLED when the user stopped it, else FAILED."""
    stopped = isinstance(error, Interrupted | KeyboardInterrupt | SystemExit | GeneratorExit)
    return "KILLED" if stopped else "FAILED"
