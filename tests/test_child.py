"""A child's result arrives; a child that raises, crashes, hangs or eats memory is an error and harms nobody."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from enginesmith.tasks import child, progress
from enginesmith.tasks.child import ChildError, Limits
from enginesmith.tasks.errors import EnginesmithError, Interrupted

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch, tmp_path):
    """The functions that children run lie in a module of their own, found through PYTHONPATH."""
    (tmp_path / "child_work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("child_work", None)


WORK = """
import os, signal, subprocess, sys, time
from enginesmith.tasks.errors import EnginesmithError

def add(a, b): return {"sum": a + b, "pair": (a, b)}
def pid(): return [os.getpid(), os.getcwd(), sys.path]
def explain(): raise EnginesmithError("bad", where="x.py:3", key="model", hint="do", details=["one", "two"])
def fail(): raise KeyError("lost")
def crash(): print("last words", flush=True); os.kill(os.getpid(), signal.SIGSEGV)
def leave(): os._exit(7)
def hang(note):
    inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(note, "w").write(f"{os.getpid()} {inner.pid}")
    time.sleep(600)
def eat(): return len(bytearray(600 << 20))
def opaque(): return object()
"""


def _work(name):
    import child_work

    return getattr(child_work, name)


def test_result_arrives_as_plain_data():
    assert child.call(_work("add"), a=2, b=3) == {"sum": 5, "pair": [2, 3]}


def test_child_does_not_import_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "json.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path / "sub")
    other, _, path = child.call(_work("pid"))
    assert other != os.getpid()
    assert "" not in path
    assert str(tmp_path / "sub") not in path


def test_our_own_error_arrives_with_all_its_parts():
    with pytest.raises(EnginesmithError) as caught:
        child.call(_work("explain"))
    error = caught.value
    assert (error.found, error.where, error.key, error.hint, error.details) == (
        "bad",
        "x.py:3",
        "model",
        "do",
        ("one", "two"),
    )


@pytest.mark.parametrize(
    ("name", "reason", "kind", "said"),
    [
        ("fail", "raised", "KeyError", "lost"),
        ("crash", "crashed", "SIGSEGV", "the work crashed with SIGSEGV"),
        ("leave", "crashed", "", "exit code 7"),
        ("opaque", "raised", "TypeError", "not JSON serializable"),
    ],
)
def test_failure_says_why(name, reason, kind, said):
    with pytest.raises(ChildError) as caught:
        child.call(_work(name), what="the work")
    assert caught.value.reason == reason
    assert caught.value.kind == kind
    assert said in str(caught.value)


def test_crash_keeps_what_the_child_said_last():
    with pytest.raises(ChildError) as caught:
        child.call(_work("crash"))
    assert "last words" in caught.value.details


def test_hanging_child_is_stopped_together_with_its_own_children(tmp_path):
    note = tmp_path / "pids"
    with pytest.raises(ChildError) as caught:
        child.call(_work("hang"), limits=Limits(seconds=4), note=str(note))
    assert caught.value.reason == "time"
    for pid in note.read_text().split():
        _gone(int(pid))


def test_child_that_wants_too_much_memory_is_refused_it():
    with pytest.raises(ChildError) as caught:
        child.call(_work("eat"), limits=Limits(memory=300 << 20))
    assert caught.value.reason == "memory"


def test_child_within_its_memory_limit_is_left_alone():
    assert child.call(_work("eat"), limits=Limits(memory=2 << 30)) == 600 << 20


def test_interrupt_reaches_a_waiting_call(tmp_path):
    note = tmp_path / "pids"
    timer = threading.Timer(2.0, progress.interrupt)
    timer.start()
    started = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            child.call(_work("hang"), note=str(note))
    finally:
        timer.cancel()
        progress.reset()
    assert time.monotonic() - started < 10
    for pid in note.read_text().split():
        _gone(int(pid))


def test_child_dies_with_a_killed_parent(tmp_path):
    note = tmp_path / "pids"
    code = f"import child_work; from enginesmith.tasks import child; child.call(child_work.hang, note={str(note)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code])
    _until(lambda: note.exists() and len(note.read_text().split()) == 2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    pid, grandchild = (int(part) for part in note.read_text().split())
    try:
        _gone(pid)
    finally:
        os.kill(grandchild, signal.SIGKILL)  # not ours to promise: it is the killed parent's grandchild


def test_error_survives_pickling():
    with pytest.raises(ChildError) as caught:
        child.call(_work("leave"))
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert (type(again), again.reason, str(again)) == (ChildError, "crashed", str(caught.value))


def _gone(pid):
    _until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def _until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
