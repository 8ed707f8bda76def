"""Claims about progress: bars and lines on stderr only, and the place where Ctrl-C takes effect."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from enginesmith.tasks import progress
from enginesmith.tasks.errors import Interrupted


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    progress.quiet(False)
    yield
    progress.quiet(False)


def test_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    progress.note("hello")
    with progress.track("work", total=2) as bar:
        bar.advance()
        bar.advance()
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(("total", "line"), [(4, "work: 50%\n"), (None, "work: 2\n"), (0, "work: 2\n")])
def test_long_work_says_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], total: float | None, line: str
) -> None:
    with progress.track("work", total=total) as bar:
        assert isinstance(bar, progress._Lines)
        bar.advance()
        bar.said -= 10
        bar.advance()
        bar.advance()
    assert capsys.readouterr().err == line


def test_quiet_is_silent_and_can_be_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    progress.quiet()
    progress.note("hello")
    progress.interrupt()
    with pytest.raises(Interrupted), progress.track("work", total=1):
        pass
    assert capsys.readouterr().err == ""


def test_a_stop_takes_effect_at_the_next_step() -> None:
    with progress.track("work", total=3) as bar:
        bar.advance()
        progress.interrupt()
        with pytest.raises(Interrupted, match="stopped by the user"):
            bar.advance()
    with pytest.raises(Interrupted):
        progress.checkpoint()
    progress.reset()
    progress.checkpoint()


def test_a_stop_reaches_every_thread() -> None:
    stopped = []

    def work() -> None:
        try:
            with progress.track("work", total=None) as bar:
                while True:
                    bar.advance()
        except Interrupted:
            stopped.append(True)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    progress.interrupt()
    for thread in threads:
        thread.join(timeout=10)
    assert stopped == [True] * 3


def test_on_a_terminal_bars_of_threads_share_one_display() -> None:
    code = """
        import threading, time
        from enginesmith.tasks import progress

        def work(name):
            with progress.track(name, total=5) as bar:
                for _ in range(5):
                    time.sleep(0.05)
                    bar.advance()
                progress.note(f"{name} done")

        with progress.track("outer", total=None) as bar:
            threads = [threading.Thread(target=work, args=(n,)) for n in ("one", "two")]
            [t.start() for t in threads]
            [t.join() for t in threads]
            bar.advance()
        print("result")
    """
    terminal, child_end = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=child_end,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        text=True,
    )
    os.close(child_end)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # Linux reports the child's end as closed this way
        pass
    finally:
        os.close(terminal)
    assert child.communicate(timeout=60)[0] == "result\n"
    assert child.returncode == 0
    for words in (b"outer", b"one", b"two", b"one done", b"two done"):
        assert words in shown
