"""Claims about the store: all or nothing, once, verified, and nothing left behind by whatever kills a build."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store


class Report(BaseModel):
    words: str = "for people"


def write_text(out: Path, *, text: str) -> Report:
    (out / "sub").mkdir()
    (out / "sub" / "text.txt").write_text(text)
    (out / "other.txt").write_text("other")
    return Report()


WRITE = Stage("write", version=1, run=write_text)

# A stage that counts its runs, says that it has begun, and takes its time.
SLOW = """
import sys, time
from pathlib import Path
from pydantic import BaseModel
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Store

class Report(BaseModel): pass

def slow(out, *, seconds):
    (out / "half.bin").write_bytes(bytes(1000))
    with open(sys.argv[2], "a") as file: file.write("x")
    time.sleep(seconds)
    return Report()

artifact = Stage("slow", 1, slow)(store=Store(Path(sys.argv[1])), seconds=float(sys.argv[3]))
print(artifact.key, artifact.cached)
"""


def start(store: Store, runs: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, str(store.root), str(runs), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def leftovers(store: Store) -> list[Path]:
    return [*(store.root / "tmp").iterdir(), *(p for p in (store.root / "objects").rglob("*") if p.is_file())]


class TestArtifact:
    def test_a_second_call_finds_the_first_ones_files(self, store: Store) -> None:
        first = WRITE(store=store, text="a")
        second = WRITE(store=store, text="a")
        assert (first.cached, second.cached) == (False, True)
        assert second.path == first.path
        assert second.files == first.files
        assert second.report == {"words": "for people"}

    def test_the_manifest_lists_every_file_with_its_sha256(self, store: Store) -> None:
        artifact = WRITE(store=store, text="a")
        manifest = json.loads((artifact.path / "manifest.json").read_text())
        listed = {f["path"]: (f["size"], f["sha256"]) for f in manifest["files"]}
        assert listed["sub/text.txt"] == (1, hashlib.sha256(b"a").hexdigest())
        assert set(listed) == {"sub/text.txt", "other.txt", "report.json"}
        assert manifest["inputs"]["inputs"] == {"text": "a"}

    def test_the_digest_covers_names_and_contents_but_not_the_report(self, store: Store) -> None:
        def reported(out: Path, *, words: str, name: str = "a") -> Report:
            (out / name).write_text("same")
            return Report(words=words)

        stage = Stage("reported", version=1, run=reported)
        one, two = stage(store=store, words="one"), stage(store=store, words="two")
        assert one.key != two.key
        assert one.digest == two.digest
        assert stage(store=store, words="one", name="b").digest != one.digest

    def test_a_part_is_an_artifact_of_its_own(self, store: Store) -> None:
        a, b = WRITE(store=store, text="a"), WRITE(store=store, text="b")
        assert a.part("sub").digest != b.part("sub").digest
        assert [f.path for f in a.part("sub").files] == ["text.txt"]
        assert (a.part("sub").path / "text.txt").read_text() == "a"
        with pytest.raises(EnginesmithError, match="the write artifact has no folder 'absent'"):
            a.part("absent")

    def test_files_cannot_be_changed_by_accident(self, store: Store) -> None:
        artifact = WRITE(store=store, text="a")
        assert (artifact.path / "sub" / "text.txt").stat().st_mode & 0o222 == 0

    def test_a_store_may_be_moved(self, store: Store, tmp_path: Path) -> None:
        WRITE(store=store, text="a")
        store.root.rename(tmp_path / "moved")
        assert WRITE(store=Store(tmp_path / "moved"), text="a").cached

    def test_a_file_in_the_place_of_the_store(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(EnginesmithError, match="the store cannot be used") as caught:
            Store(tmp_path / "file")
        assert caught.value.key == "store.url"


class TestFailure:
    def test_a_failed_build_leaves_nothing(self, store: Store) -> None:
        def fail(out: Path) -> Report:
            (out / "half").write_text("half")
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            Stage("fail", 1, fail)(store=store)
        assert leftovers(store) == []

    def test_ctrl_c_in_a_stage_leaves_nothing(self, store: Store) -> None:
        def interrupted(out: Path) -> Report:
            (out / "half").write_text("half")
            progress.interrupt()
            with progress.track("work", total=3) as bar:
                bar.advance()
            return Report()

        with pytest.raises(Interrupted):
            Stage("interrupted", 1, interrupted)(store=store)
        assert leftovers(store) == []

    def test_kill_9_leaves_nothing_visible_and_no_held_lock(self, store: Store, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        child = start(store, runs, 600)
        wait_for(runs)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not (store.root / "objects" / "slow").exists()
        assert len(list((store.root / "tmp").iterdir())) == 1
        started = time.monotonic()
        again = start(Store(store.root), runs, 0)
        assert leftovers(store) == []
        out, _ = again.communicate(timeout=60)
        assert out.split()[1] == "False"
        assert time.monotonic() - started < 30

    def test_sweeping_spares_a_build_that_lives(self, store: Store, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        child = start(store, runs, 1)
        wait_for(runs)
        Store(store.root)
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        assert out.split()[1] == "False"

    @pytest.mark.parametrize(
        "damage",
        [
            lambda p: (p / "sub" / "text.txt").write_text("b"),
            lambda p: (p / "sub" / "text.txt").write_text(""),
            lambda p: (p / "other.txt").unlink(),
            lambda p: (p / "manifest.json").unlink(),
            lambda p: (p / "manifest.json").write_text("{"),
            lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"),
            lambda p: (p / "manifest.json").write_text(
                (p / "manifest.json").read_text().replace('"key": "', '"key": "0')
            ),
        ],
        ids=["changed", "emptied", "deleted", "no manifest", "cut manifest", "binary manifest", "foreign manifest"],
    )
    def test_a_damaged_artifact_is_built_again(
        self, store: Store, damage: object, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first = WRITE(store=store, text="a")
        for path in first.path.rglob("*"):
            if path.is_file():
                path.chmod(0o644)
        damage(first.path)  # type: ignore[operator]
        second = WRITE(store=store, text="a")
        assert not second.cached
        assert second.digest == first.digest
        assert (second.path / "sub" / "text.txt").read_text() == "a"
        assert "is damaged" in capsys.readouterr().err
        assert WRITE(store=store, text="a").cached


class TestAtOnce:
    def test_two_processes_build_once(self, store: Store, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        children = [start(store, runs, 1) for _ in range(2)]
        answers = [child.communicate(timeout=120)[0].split() for child in children]
        assert runs.read_text() == "x"
        assert len({key for key, _ in answers}) == 1

    def test_threads_build_once(self, store: Store) -> None:
        runs: list[int] = []
        gate = threading.Barrier(4)

        def count(out: Path, *, text: str) -> Report:
            runs.append(1)
            time.sleep(0.3)
            return write_text(out, text=text)

        def call(_: int) -> Artifact:
            gate.wait()
            return Stage("count", 1, count)(store=store, text="a")

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(call, range(4)))
        assert len(runs) == 1
        assert len({a.digest for a in found}) == 1

    def test_threads_build_different_artifacts_at_the_same_time(self, store: Store) -> None:
        gate = threading.Barrier(2, timeout=20)

        def meet(out: Path, *, text: str) -> Report:
            gate.wait()
            return write_text(out, text=text)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda t: Stage("meet", 1, meet)(store=store, text=t), "ab"))
        assert not any(a.cached for a in found)

    def test_waiting_for_another_build_can_be_stopped(self, store: Store, tmp_path: Path) -> None:
        runs = tmp_path / "runs"
        child = start(store, runs, 600)
        try:
            wait_for(runs)

            def slow(out: Path, *, seconds: float) -> Report:
                raise AssertionError

            threading.Timer(1, progress.interrupt).start()
            with pytest.raises(Interrupted):
                Stage("slow", 1, slow)(store=store, seconds=600.0)
        finally:
            child.kill()
            child.wait()


def fill(out: Path, *, how: str) -> Report:
    import numpy as np

    data = np.zeros(4 << 20, np.uint8)
    if how == "write":
        (out / "big").write_bytes(data.tobytes())
    elif how == "numpy":
        np.save(out / "big.npy", data)
    else:
        from safetensors.numpy import save_file

        save_file({"big": data}, out / "big.safetensors")
    return Report()


FILL = Stage("fill", 1, fill)


class TestFullDisk:
    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Store]:
        """A store on a file system of 1 MB."""
        place = tmp_path / "small"
        place.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.strip()}")
        try:
            yield Store(place)
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)

    @pytest.mark.parametrize("how", ["write", "numpy", "safetensors"])
    def test_a_full_disk_is_said_so_and_the_store_stays_as_it_was(self, small: Store, how: str) -> None:
        before = WRITE(store=small, text="a")
        with pytest.raises(EnginesmithError, match="the disk is full: fill could not write") as caught:
            FILL(store=small, how=how)
        assert caught.value.key == "store.url"
        assert caught.value.where == str(small.root)
        assert list((small.root / "tmp").iterdir()) == []
        assert WRITE(store=small, text="a") == Artifact(**{**vars(before), "cached": True})

    def test_a_file_size_limit_is_said_so(self, store: Store) -> None:
        """Where nothing can be mounted, a limit of the process stands in for a quota."""
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(EnginesmithError, match="file too large: fill could not write"):
                FILL(store=store, how="write")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert leftovers(store) == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_store_without_permission(self, store: Store) -> None:
        (store.root / "tmp").chmod(0o555)
        with pytest.raises(EnginesmithError, match="the store cannot be written to"):
            WRITE(store=store, text="a")


class TestObservations:
    def test_observations_are_kept_in_order_and_never_overwritten(self, store: Store) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: store.observe("latency", "k", {"i": i}), range(20)))
        assert sorted(o["i"] for o in store.observations("latency", "k")) == list(range(20))
        store.observe("latency", "k", {"i": 20})
        assert store.observations("latency", "k")[-1] == {"i": 20}
        assert store.observations("latency", "other") == []

    def test_nan_is_no_observation(self, store: Store) -> None:
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.observe("latency", "k", {"p50": float("nan")})
        assert store.observations("latency", "k") == []
