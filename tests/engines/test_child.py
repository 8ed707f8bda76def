"""A builder that crashes, hangs, is killed or left alone harms nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

from enginesmith.tasks.engines.child import build_engine
from enginesmith.tasks.engines.spec import BuildRequest, EngineError, Progress

BUILDERS = """
import ctypes, os, signal, sys, time
from pathlib import Path
from enginesmith.tasks.engines.spec import Built, EngineError, NodePrecision, Progress

class Base:
    name, extra, options = "trial", "", ()
    def version(self): return "1.0"
    def fingerprint(self): return {"trial": "1.0"}
    def builds(self): return frozenset({"fp32"})
    executes = builds
    def check(self, model): return ()

class Good(Base):
    def compile(self, request, out, say):
        say(Progress("tuning", 0.5))
        time.sleep(0.5)
        print("this goes to the log")
        (out / "engine").write_bytes(b"engine")
        return Built(("engine",), (), (), (), "nothing")

class Disobedient(Good):
    def compile(self, request, out, say):
        built = super().compile(request, out, say)
        row = NodePrecision("n_c0", "Conv", "fp32", "fp16", "n_c0 + n_r0")
        return Built(built.files, (), (), (row,), "nothing")

class Complaining(Base):
    def compile(self, request, out, say):
        raise EngineError("no such layer", where="conv7", hint="rename it", details=["a", "b"])

class Raising(Base):
    def compile(self, request, out, say):
        raise ValueError("a defect of the backend")

class Segfaulting(Base):
    def compile(self, request, out, say):
        print("about to read address 0", flush=True)
        ctypes.string_at(0)

class Exiting(Base):
    def compile(self, request, out, say):
        os._exit(3)

class Killed(Base):
    def compile(self, request, out, say):
        os.kill(os.getpid(), signal.SIGKILL)

class Hanging(Base):
    def compile(self, request, out, say):
        say(Progress("tuning conv7", 0.25))
        (out / "pid").write_text(str(os.getpid()))
        libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, as vendors' libraries do
        while True:
            libc.sleep(1)

class WithChild(Base):
    def compile(self, request, out, say):
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        (out / "pid").write_text(str(child.pid))
        time.sleep(100)

class Absent(Base):
    extra = "rtx"
    def version(self): return None
"""


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request):
    """Backends of a module that the child can import, by class name."""
    name = f"trial_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(BUILDERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(name)
    return lambda cls: getattr(module, cls)()


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends (or is a zombie) within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


def wait_for(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)
    return int(path.read_text())


def test_a_good_build_leaves_engine_and_manifest(trial, request_for, out) -> None:
    result = build_engine(trial("Good"), request_for("fp32"), out)
    assert sorted(p.name for p in out.iterdir()) == ["engine", "engine.json", "precision.json"]
    assert result.manifest.fingerprint == {"trial": "1.0"}
    assert result.seconds > 0
    assert result.peak_memory > 10 * 2**20


def test_progress_reaches_the_caller(trial, request_for, out) -> None:
    seen: list[Progress] = []
    build_engine(trial("Good"), request_for("fp32"), out, tick=seen.append)
    assert Progress("tuning", 0.5) in seen


def test_a_backends_error_keeps_its_parts(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match="no such layer") as caught:
        build_engine(trial("Complaining"), request_for("fp32"), out)
    error = caught.value
    assert (error.where, error.hint, error.details) == ("conv7", "rename it", ("a", "b"))


def test_a_defect_shows_its_traceback(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match="ended with exit code 1") as caught:
        build_engine(trial("Raising"), request_for("fp32"), out)
    assert caught.value.details[-1] == "ValueError: a defect of the backend"


def test_a_crash_is_an_error_with_the_log(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match="trial's builder was killed by SIGSEGV") as caught:
        build_engine(trial("Segfaulting"), request_for("fp32"), out)
    assert "about to read address 0" in caught.value.details
    assert any("Segmentation fault" in line for line in caught.value.details)


def test_a_silent_exit_is_an_error(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match="ended with exit code 3"):
        build_engine(trial("Exiting"), request_for("fp32"), out)


def test_a_kill_is_an_error_that_thinks_of_memory(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match=r"killed by SIGKILL .*out of memory"):
        build_engine(trial("Killed"), request_for("fp32"), out)


def test_a_hang_is_stopped_and_says_where_it_was(trial, request_for, out) -> None:
    with pytest.raises(
        EngineError, match=r"took longer than 10 s and was stopped \(it was at: tuning conv7\)"
    ) as caught:
        build_engine(trial("Hanging"), request_for("fp32", timeout=10), out)
    assert caught.value.key == "options.timeout"
    assert gone(wait_for(out / "pid"))


def test_what_tick_raises_stops_the_builder(trial, request_for, out) -> None:
    class StopError(Exception):
        pass

    def tick(said: Progress) -> None:
        if said.phase:
            raise StopError

    with pytest.raises(StopError):
        build_engine(trial("Hanging"), request_for("fp32"), out, tick=tick)
    assert gone(wait_for(out / "pid"))


def test_the_builders_own_children_go_with_it(trial, request_for, out) -> None:
    class StopError(Exception):
        pass

    def tick(said: Progress) -> None:
        if (out / "pid").exists() and (out / "pid").read_text():
            raise StopError

    with pytest.raises(StopError):
        build_engine(trial("WithChild"), request_for("fp32"), out, tick=tick)
    assert gone(int((out / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_the_builder_dies_with_its_parent(trial, request_for, out, tmp_path) -> None:
    module = type(trial("Hanging")).__module__
    request: BuildRequest = request_for("fp32")
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from pathlib import Path
        from {module} import Hanging
        from enginesmith.tasks.engines.child import build_engine
        from enginesmith.tasks.engines.spec import BuildRequest, Profile, Range
        profile = Profile({{"x": Range((1, 3, 16, 16), (1, 3, 16, 16), (1, 3, 16, 16))}})
        build_engine(Hanging(), BuildRequest(Path({str(request.model)!r}), "fp32", (profile,)), Path({str(out)!r}))
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    builder = wait_for(out / "pid")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(builder)


def test_an_engine_of_another_precision_is_refused_and_has_no_manifest(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match="did not keep the precision") as caught:
        build_engine(trial("Disobedient"), request_for("fp32"), out)
    assert caught.value.details == ("n_c0 (Conv): asked fp32, has fp16 in n_c0 + n_r0",)
    assert not (out / "engine.json").exists()


def test_a_missing_runtime_is_an_error_that_names_the_extra(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match="trial is not installed") as caught:
        build_engine(trial("Absent"), request_for("fp32"), out)
    assert caught.value.hint == 'pip install "enginesmith[rtx]"'


def test_a_bad_option_is_refused_before_anything_runs(trial, request_for, out) -> None:
    with pytest.raises(EngineError, match="no option 'level'") as caught:
        build_engine(trial("Segfaulting"), request_for("fp32", level=3), out)
    assert caught.value.hint == "it knows: timeout"
