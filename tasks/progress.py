"""Turns long work into progress bars or, where nobody looks at a terminal, into occasional lines; both on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from enginesmith.tasks.errors import Interrupted

if TYPE_CHECKING:
    from rich.progress import Progress

_stop = threading.Event()
_quiet = threading.Event()
_lock = threading.RLock()
_live: Progress | None = None
_bars = 0


class Bar(Protocol):
    """One piece of long work."""

    def advance(self, steps: float = 1) -> None:
        """Say that this many steps are done; raises `Interrupted` when the user asked to stop."""


def interrupt() -> None:
    """Ask all running work to stop at its next `checkpoint` or `Bar.advance`."""
    _stop.set()


def reset() -> None:
    """Forget an earlier `interrupt`."""
    _stop.clear()


def quiet(on: bool = True) -> None:
    """Print no progress and no notes from now on (or do so again)."""
    if on:
        _quiet.set()
    else:
        _quiet.clear()


def checkpoint() -> None:
    """Raise `Interrupted` when the user asked to stop. Call it in loops that have no bar."""
    if _stop.is_set():
        raise Interrupted("stopped by the user", hint="run the same command again; finished stages are kept")


def note(message: str) -> None:
    """One line for the person who watches."""
    if _quiet.is_set():
        return
    with _lock:
        if _live is not None:
            _live.console.print(message, highlight=False, markup=False)
        else:
            print(message, file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def track(description: str, total: float | None) -> Iterator[Bar]:
    """A bar of `total` steps (None when unknown), shown while the block runs."""
    checkpoint()
    if _quiet.is_set():
        yield _Silent()
    elif sys.stderr.isatty():
        with _rich_bar(description, total) as bar:
            yield bar
    else:
        yield _Lines(description, total)


class _Silent:
    def advance(self, steps: float = 1) -> None:  # noqa: ARG002
        checkpoint()


@dataclass
class _Lines:
    """At most one line every ten seconds."""

    description: str
    total: float | None
    done: float = 0.0
    said: float = field(default_factory=time.monotonic)

    def advance(self, steps: float = 1) -> None:
        checkpoint()
        self.done += steps
        now = time.monotonic()
        if now - self.said >= 10:
            self.said = now
            share = f"{self.done / self.total:.0%}" if self.total else f"{self.done:.0f}"
            note(f"{self.description}: {share}")


@dataclass
class _RichBar:
    progress: Progress
    task: int

    def advance(self, steps: float = 1) -> None:
        from rich.progress import TaskID

        checkpoint()
        self.progress.advance(TaskID(self.task), steps)


@contextmanager
def _rich_bar(description: str, total: float | None) -> Iterator[_RichBar]:
    """Bars of all threads share one live display, started by the first and stopped by the last."""
    global _live, _bars
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with _lock:
        if _live is None:
            _live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            _live.start()
        live = _live
        _bars += 1
        task = live.add_task(description, total=total)
    try:
        yield _RichBar(live, task)
    finally:
        with _lock:
            live.remove_task(task)
            _bars -= 1
            if _bars == 0:
                live.stop()
                _live = None
