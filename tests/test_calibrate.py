from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from enginesmith.tasks import progress
from enginesmith.tasks.calibrate import CALIBRATE, SEED, tensor_range
from enginesmith.tasks.calibrate.collect import collect
from enginesmith.tasks.calibrate.histogram import MagnitudeHistogram
from enginesmith.tasks.calibrate.refit import Geometry, PatchStatistics
from enginesmith.tasks.calibrate.thresholds import (
    Calibrator,
    choose,
    clipped_share,
    entropy,
    least_error,
    percentile,
    relative_error,
)
from enginesmith.tasks.data import DATA, Dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph import io
from enginesmith.tasks.ranges import CACHE_FILE, RangeTable, format_cache, read_cache, read_ranges
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import DimSettings, InputSettings, Int8Settings
from enginesmith.tasks.stage import SourceFile
from enginesmith.tasks.store import Artifact, FileEntry, Store, sha256_file

Calibrate = Callable[..., tuple[Artifact, RangeTable]]

CALIBRATORS: tuple[Calibrator, ...] = ("minmax", "percentile", "entropy", "mse")


def of(*samples: np.ndarray) -> MagnitudeHistogram:
    histogram = MagnitudeHistogram()
    for sample in samples:
        histogram.add(np.asarray(sample, dtype=np.float32))
    return histogram


def quantized(x: np.ndarray, threshold: float) -> np.ndarray:
    step = threshold / 127
    return np.clip(np.rint(x / step), -127, 127) * step


# Histogram and thresholds


def test_histogram_counts_every_element_once() -> None:
    x = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    x[0, :17] = 0
    histogram = of(*x)
    assert histogram.elements == histogram.counts.sum() == 4000
    assert histogram.counts[0] == 17
    assert histogram.absmax == np.abs(x).max()
    assert histogram.peak_sample == np.abs(x).max(axis=1).argmax()
    assert (histogram.minimum, histogram.maximum) == (x.min(), x.max())


def test_order_of_samples_does_not_matter_and_an_outlier_coarsens_nothing() -> None:
    rng = np.random.default_rng(0)
    small = [rng.standard_normal(100).astype(np.float32) for _ in range(4)]
    huge = np.full(100, 1e30, np.float32)
    first, last = of(huge, *small), of(*small, huge)
    np.testing.assert_array_equal(first.counts, last.counts)
    np.testing.assert_array_equal(first.counts - of(*small).counts, of(huge).counts)


def test_nan_and_infinity_are_counted_apart() -> None:
    histogram = of(np.array([1.0, np.nan, np.inf, -np.inf, -2.0]))
    assert histogram.nonfinite == 3
    assert histogram.counts.sum() == 2
    assert histogram.absmax == 2.0


@pytest.mark.parametrize("threshold", [1.0, 3.0, 4.5])
def test_relative_error_is_that_of_quantizing(threshold: float) -> None:
    x = np.random.default_rng(1).standard_normal((16, 20000)) * np.geomspace(0.5, 2, 16)[:, None]
    noise = ((x - quantized(x, threshold)) ** 2).sum(axis=1) / (x**2).sum(axis=1)
    found = relative_error(of(*x), np.array([threshold]))[0]
    assert found == pytest.approx(noise.mean(), rel=5e-3)


def test_least_error_threshold_beats_a_brute_force_grid() -> None:
    x = np.random.default_rng(2).laplace(size=(8, 20000))
    grid = np.linspace(0.5, np.abs(x).max(), 300)
    errors = [(((x - quantized(x, t)) ** 2).sum(axis=1) / (x**2).sum(axis=1)).mean() for t in grid]
    threshold, _ = least_error(of(*x))
    found = (((x - quantized(x, threshold)) ** 2).sum(axis=1) / (x**2).sum(axis=1)).mean()
    assert found <= min(errors) * 1.01


def test_percentile_is_numpys() -> None:
    x = np.random.default_rng(3).standard_normal((8, 50000))
    found = percentile(of(*x), 0.999)
    assert found == pytest.approx(np.quantile(np.abs(x), 0.999), rel=2e-3)
    assert clipped_share(of(*x), found) == pytest.approx(0.001, rel=1e-2)


def test_percentile_that_falls_among_zeros_is_the_smallest_magnitude_above() -> None:
    x = np.zeros(1000)
    x[0] = 5.0
    assert percentile(of(x), 0.99) == 5.0


def test_entropy_keeps_a_uniform_distribution_whole_and_clips_a_long_tail() -> None:
    rng = np.random.default_rng(4)
    uniform = rng.uniform(-1, 1, (8, 50000))
    assert entropy(of(*uniform)) == pytest.approx(1.0, rel=0.02)
    tail = np.concatenate([rng.standard_normal((8, 50000)), np.full((8, 1), 60.0)], axis=1)
    assert 2.5 < entropy(of(*tail)) < 12


def test_entropy_is_the_grid_search_of_its_definition() -> None:
    # P and Q built from the data itself, for thresholds at which fine bins and data bins coincide closely enough.
    x = np.abs(np.random.default_rng(5).laplace(size=400_000))
    fine = 16

    def divergence(t: float) -> float:
        mass, _ = np.histogram(x, bins=127 * fine, range=(0, t))
        level = (np.arange(127 * fine) + fine // 2) // fine
        total = np.bincount(level, weights=mass)
        filled = np.bincount(level, weights=mass > 0)
        q = np.where(mass > 0, (total / np.maximum(filled, 1))[level], 0)
        p = mass.astype(float)
        p[-1] += (x > t).sum()
        p, q = p / p.sum(), q / q.sum()
        seen = p > 0
        return float((p[seen] * np.log(p[seen] / (q[seen] + 1e-9))).sum())

    found = entropy(of(x))
    best = min(divergence(t) for t in np.geomspace(1, x.max(), 60))
    assert divergence(found) < best + 2e-3


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_one_outlier_in_eight_samples_does_not_zero_the_others(calibrator: Calibrator) -> None:
    # Case 28: at the scale of the outlier, 1000 / 127 = 7.9, every other value becomes zero: relative error 1.0.
    x = np.random.default_rng(6).standard_normal((8, 64))
    x[5, 3] = 1000
    histogram = of(*x)
    row = tensor_range("t", histogram, calibrator)
    assert row.outlier
    assert row.peak_sample == 5
    assert row.threshold is not None
    others = np.delete(x, 5, axis=0)
    error = np.linalg.norm(others - quantized(others, row.threshold)) / np.linalg.norm(others)
    assert error < 0.1
    assert row.method == ("mse" if calibrator == "mse" else "error")


def test_a_calibrator_that_does_well_enough_keeps_its_choice() -> None:
    x = np.random.default_rng(7).standard_normal((32, 5000))
    chosen = choose(of(*x), "minmax")
    assert (chosen.method, chosen.value) == ("minmax", pytest.approx(np.abs(x).max(), rel=1e-6))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.floats(1e-30, 1e30),
    st.sampled_from(CALIBRATORS),
    st.sampled_from(["normal", "uniform", "exponential", "constant"]),
)
def test_threshold_is_positive_and_not_beyond_the_data(
    seed: int, scale: float, calibrator: Calibrator, shape: str
) -> None:
    rng = np.random.default_rng(seed)
    x = {
        "normal": lambda: rng.standard_normal((4, 50)),
        "uniform": lambda: rng.uniform(-1, 1, (4, 50)),
        "exponential": lambda: rng.exponential(size=(4, 50)),
        "constant": lambda: np.full((4, 50), -3.0),
    }[shape]()
    histogram = of(*(x * scale))
    chosen = choose(histogram, calibrator)
    assert 0 < chosen.value <= histogram.absmax * (1 + 1e-6)
    assert 0 <= chosen.clipped <= 1
    assert chosen.error <= max(4 * chosen.least_error, 1e-3) * (1 + 1e-9)


# The stage


def conv_relu_model(
    *, opset: int = 18, weight: np.ndarray | None = None, bias: float = -3.0, tail: str = "Relu"
) -> bytes:
    weight = np.ones((1, 1, 1, 1), np.float32) if weight is None else weight
    made = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv"),
            helper.make_node(tail, ["c"], ["r"], name="act"),
            helper.make_node("Conv", ["r", "w", "b"], ["c2"], name="conv2"),
            helper.make_node("Relu", ["c2"], ["r2"], name="relu2"),
            helper.make_node("GlobalAveragePool", ["r2"], ["y"], name="pool"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1, 1, 1])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([bias], np.float32), "b")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return model.SerializeToString()


def artifact(folder: Path, model: bytes) -> Artifact:
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(model)
    entry = FileEntry(path="model.onnx", size=len(model), sha256=sha256_file(folder / "model.onnx"))
    return Artifact("simplify", "0" * 64, folder, (entry,))


@pytest.fixture
def calibrate(tmp_path: Path) -> Calibrate:
    progress.quiet()
    store = Store(tmp_path / "store")

    def run(model: bytes, samples: np.ndarray, *, at_most: int = 512, **options: object) -> tuple[Artifact, RangeTable]:
        np.savez(tmp_path / "data.npz", x=samples)
        shape = ("n", *samples.shape[1:])
        data = DATA(
            store=store,
            calibration=SourceFile.of(tmp_path / "data.npz"),
            evaluation=None,
            search=None,
            files=(),
            inputs={"x": InputSettings(shape=shape, dims={"n": DimSettings(min=1, opt=4, max=8)})},
            seed=0,
            samples=4,
        )
        made = CALIBRATE(
            store=store,
            model=artifact(tmp_path / "model", model),
            data=data,
            settings=Int8Settings(samples=at_most, **options),
        )
        return made, read_ranges(made.path)

    return run


def ramp(low: float, high: float, samples: int = 40) -> np.ndarray:
    values = np.linspace(low, high, samples * 16).astype(np.float32)
    return np.random.default_rng(0).permutation(values).reshape(samples, 1, 4, 4)


def test_range_is_taken_after_the_relu(calibrate: Calibrate) -> None:
    # Case 26: the convolution gives -16.6 to 10.22; the range is the ReLU's, 10.22 / 127 = 0.0805, not 16.6 / 127.
    made, table = calibrate(conv_relu_model(), ramp(-13.6, 13.22), calibrator="minmax")
    rows = {row.tensor: row for row in table.tensors}
    assert list(rows) == ["x", "r", "r2"]
    assert rows["r"].scale == pytest.approx(0.0805, abs=1e-4)
    assert rows["r"].minimum == 0.0
    assert rows["x"].scale == pytest.approx(13.6 / 127, rel=1e-3)
    graph = onnx.load(made.path / "int8" / "model.onnx")
    (scale,) = (numpy_helper.to_array(i) for i in graph.graph.initializer if i.name == "r_scale")
    assert float(scale) == rows["r"].scale


def test_records_what_it_was_made_of(calibrate: Calibrate) -> None:
    made, table = calibrate(conv_relu_model(), ramp(-5, 9, samples=40), at_most=10)
    assert (table.samples, table.seed, table.calibrator, table.placement) == (10, SEED, "entropy", "conv-relu")
    assert len(table.model) == len(table.data) == 64
    assert made.report["samples_asked"] == 10
    assert [layer.conv for layer in table.layers] == ["conv", "conv2"]
    assert [row.read_by for row in table.tensors] == [("conv",), ("conv2",), ()]


def test_int8_graph_stays_close_to_fp32(calibrate: Calibrate) -> None:
    model = conv_relu_model(weight=np.full((1, 1, 2, 2), 0.37, np.float32), bias=0.5)
    x = np.random.default_rng(1).standard_normal((40, 1, 4, 4)).astype(np.float32)
    made, _ = calibrate(model, x, calibrator="mse")
    exact = OnnxRunner(ir.from_proto(onnx.load_from_string(model))).run({"x": x})["y"]
    found = OnnxRunner(made.path / "int8").run({"x": x})["y"]
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)


def test_same_inputs_give_the_same_bytes(calibrate: Calibrate, tmp_path: Path) -> None:
    first, _ = calibrate(conv_relu_model(), ramp(-5, 9))
    again = Store(tmp_path / "other")
    data = next(iter((tmp_path / "store" / "objects" / "data").iterdir()))
    entries = tuple(
        FileEntry(path=p.relative_to(data).as_posix(), size=p.stat().st_size, sha256=sha256_file(p))
        for p in sorted(data.rglob("*"))
        if p.is_file() and p.name not in ("report.json", "manifest.json")
    )
    second = CALIBRATE(
        store=again,
        model=artifact(tmp_path / "model", conv_relu_model()),
        data=Artifact("data", data.name, data, entries),
        settings=Int8Settings(),
    )
    assert first.digest == second.digest


def test_one_and_two_processors_give_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((1, 1, 2, 2)).astype(np.float32)
    (tmp_path / "model.onnx").write_bytes(conv_relu_model(weight=weight, bias=-0.1))
    np.save(tmp_path / "x.npy", rng.standard_normal((64, 1, 4, 4)).astype(np.float32))
    processors = sorted(os.sched_getaffinity(0))[:2]
    if len(processors) < 2:
        pytest.skip("this process may use one processor only")
    digests = []
    for allowed in (processors[:1], processors):
        environment = os.environ | {"OMP_NUM_THREADS": str(len(allowed)), "OPENBLAS_NUM_THREADS": str(len(allowed))}
        arguments = [sys.executable, "-c", _REFIT, str(tmp_path), ",".join(map(str, allowed))]
        run = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
        digests.append(run.stdout)
    assert digests[0].startswith("refit ")
    assert digests[0] == digests[1]


_REFIT = """
import hashlib, os, sys
from pathlib import Path

os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
import numpy as np
from enginesmith.tasks import progress
from enginesmith.tasks.calibrate.refit import gather, refit_weights
from enginesmith.tasks.data import Dataset
from enginesmith.tasks.graph import io, qdq

progress.quiet()
folder = Path(sys.argv[1])
graph = io.load(folder)
convs, _ = qdq.find_convs(graph, "conv")
plan = qdq.plan_quantization(graph, convs, {"x": 0.03, "r": 0.05})
dataset = Dataset({"x": np.load(folder / "x.npy")}, None, True, 1, 8, 8)
with progress.track("t", total=64) as bar:
    statistics = gather(graph, plan, dataset, bar)
qdq.QuantizePass(refit_weights(graph, plan, statistics))(graph)
print("refit", hashlib.sha256(io.save(graph, folder / "int8").read_bytes()).hexdigest())
"""


def test_model_without_conv_relu_is_left_as_it_is_and_the_report_says_so(calibrate: Calibrate, tmp_path: Path) -> None:
    model = conv_relu_model(tail="Sigmoid").replace(b"Relu", b"Tanh")
    made, table = calibrate(model, ramp(-5, 9))
    assert table.layers == ()
    assert table.tensors == ()
    assert len(table.skipped) == 2
    assert "no convolution fits placement conv-relu: the INT8 graph is the FP32 graph" in made.report["warnings"]
    x = ramp(-5, 9)
    original = OnnxRunner(tmp_path / "model").run({"x": x})["y"]
    np.testing.assert_array_equal(OnnxRunner(made.path / "int8").run({"x": x})["y"], original)


def test_old_opset_is_converted_and_not_just_renumbered(calibrate: Calibrate) -> None:
    made, _ = calibrate(conv_relu_model(opset=11), ramp(-5, 9))
    graph = io.load(made.path / "int8")
    assert graph.graph.opset_imports[""] == 13
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)


@pytest.mark.parametrize(
    ("entry", "left"),
    [("conv2", ["conv"]), ("*2", ["conv"]), ("act", ["conv2"]), ("c2", ["conv"]), ("Conv", []), ("w", [])],
)
def test_exclude_takes_names_patterns_and_operators(calibrate: Calibrate, entry: str, left: list[str]) -> None:
    _, table = calibrate(conv_relu_model(), ramp(-5, 9), exclude=(entry,))
    assert [layer.conv for layer in table.layers] == left
    assert {s.reason for s in table.skipped} == {f"excluded by {entry!r}"}


def test_exclude_of_what_is_not_quantized_anyway_is_allowed(calibrate: Calibrate) -> None:
    _, table = calibrate(conv_relu_model(), ramp(-5, 9), exclude=("pool", "GlobalAveragePool"))
    assert len(table.layers) == 2


def test_exclude_that_matches_nothing_is_an_error_with_close_names(calibrate: Calibrate) -> None:
    with pytest.raises(EnginesmithError) as caught:
        calibrate(conv_relu_model(), ramp(-5, 9), exclude=("conv", "conv22"))
    assert caught.value.key == "precision.int8.exclude.1"
    assert "conv2" in caught.value.hint


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((8, 1, 4, 4), np.float32), "the calibration data is constant: x is 0 everywhere"),
        (np.full((8, 1, 4, 4), 7.0, np.float32), "the calibration data is constant: x is 7 everywhere"),
        (np.tile(ramp(0, 1, samples=1), (8, 1, 1, 1)), "samples are the same one"),
    ],
)
def test_calibration_data_that_says_nothing_is_refused(calibrate: Calibrate, samples: np.ndarray, message: str) -> None:
    with pytest.raises(EnginesmithError, match=message) as caught:
        calibrate(conv_relu_model(), samples)
    assert caught.value.key == "data.calibration"


def test_conv_whose_input_is_always_zero_is_named_and_left(calibrate: Calibrate) -> None:
    made, table = calibrate(conv_relu_model(bias=-100.0), ramp(-5, 9))
    assert [layer.conv for layer in table.layers] == ["conv"]
    assert table.skipped[0].reason == "its input r is zero on all calibration data"
    assert any("r: zero on all calibration data" in warning for warning in made.report["warnings"])


def test_tensor_with_infinities_is_named_and_left(calibrate: Calibrate) -> None:
    _, table = calibrate(conv_relu_model(weight=np.full((1, 1, 1, 1), 3e38, np.float32)), ramp(-5, 9))
    assert [layer.conv for layer in table.layers] == ["conv"]
    assert "NaN or infinite values on the calibration data" in table.skipped[0].reason


def test_outlier_is_reported_with_its_sample(calibrate: Calibrate) -> None:
    x = np.random.default_rng(0).standard_normal((8, 1, 4, 4)).astype(np.float32)
    x[5, 0, 1, 1] = 1000
    made, table = calibrate(conv_relu_model(), x)
    assert table.tensors[0].method == "error"
    (warning,) = (w for w in made.report["warnings"] if w.startswith("x: "))
    assert "largest magnitude 1000" in warning
    assert "is an outlier" in warning


def test_memory_is_bounded_by_smaller_batches_and_then_by_groups_of_tensors() -> None:
    model = ir.from_proto(onnx.load_from_string(conv_relu_model()))
    x = ramp(-5, 9, samples=10)
    dataset = Dataset({"x": x}, None, True, 1, 4, 8)
    expected = None
    for live_bytes in (1 << 20, 300, 1):
        with progress.track("calibrate", total=10) as bar:
            found = collect(model, ["x", "r", "r2"], dataset, bar, live_bytes=live_bytes)
        counts = {name: histogram.counts for name, histogram in found.items()}
        assert found["r"].elements == 160
        expected = expected or counts
        for name in counts:
            np.testing.assert_array_equal(counts[name], expected[name])


# Ranges of another model, TensorRT caches


def test_ranges_of_a_model_with_equal_names_and_other_weights_are_refused(calibrate: Calibrate) -> None:
    # Case 30.
    made, table = calibrate(conv_relu_model(), ramp(-5, 9))
    assert read_ranges(made.path, model=table.model) == table
    with pytest.raises(EnginesmithError, match="were calibrated on model"):
        read_ranges(made.path, model="f" * 64)


def test_calibration_cache_is_tensorrts_text(calibrate: Calibrate) -> None:
    made, table = calibrate(conv_relu_model(), ramp(-13.6, 13.22), calibrator="minmax")
    header, *lines = (made.path / CACHE_FILE).read_text().splitlines()
    assert header == "TRT-8600-EntropyCalibration2"
    assert [line.split(": ")[0] for line in lines] == ["x", "r", "r2"]
    (scale,) = struct.unpack(">f", bytes.fromhex(lines[1].split(": ")[1]))
    assert scale == table.tensors[1].scale
    assert read_cache(made.path / CACHE_FILE) == table.scales()


def test_cache_names_may_hold_colons_and_spaces(tmp_path: Path) -> None:
    scales = {"(Unnamed Layer* 0) [Convolution]_output": 0.5, "model/a:0": 0.25}
    (tmp_path / "cache").write_text(format_cache(scales))
    assert read_cache(tmp_path / "cache") == scales


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("x: 3c8954be\n", "not a TensorRT calibration cache"),
        ("TRT-8600-EntropyCalibration2\nx: 3c89\n", "no tensor with a positive scale: 'x: 3c89'"),
        ("TRT-8600-EntropyCalibration2\nx: 7fc00000\n", "no tensor with a positive scale"),
        ("TRT-8600-EntropyCalibration2\nother: 3c8954be\n", "none of its 1 tensors is in the model"),
    ],
)
def test_cache_that_cannot_serve_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "calibration.cache"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EnginesmithError, match=message) as caught:
        read_cache(path, tensors={"x"})
    assert str(path) in caught.value.where


# Corrections


def ill_conditioned_model() -> tuple[bytes, np.ndarray]:
    """A 1x1 convolution that takes the small difference of two large, nearly equal channels, times 100."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal((64, 1, 8, 8))
    x = np.concatenate([common, common + 0.003 * rng.standard_normal((64, 1, 8, 8)), common], axis=1)
    weight = np.array([[[[100.0]], [[-100.0]], [[0.5]]], [[[0.3]], [[0.2]], [[0.1]]]], np.float32)
    made = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv"),
            helper.make_node("Relu", ["c"], ["y"], name="relu"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 8, 8])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([0.2, 0.1], np.float32), "b")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return model.SerializeToString(), x.astype(np.float32)


def test_ill_conditioned_convolution_is_refitted_on_quantized_input(calibrate: Calibrate) -> None:
    model, x = ill_conditioned_model()
    made, table = calibrate(model, x, calibrator="minmax")
    sqnr = made.report["output_sqnr_db"]
    assert table.correction == "refit"
    assert sqnr["refit"] > sqnr["none"] + 3
    exact = OnnxRunner(ir.from_proto(onnx.load_from_string(model))).run({"x": x})["y"]
    found = OnnxRunner(made.path / "int8").run({"x": x})["y"]
    error = 10 * np.log10((exact**2).sum() / ((found - exact) ** 2).sum())
    assert error == pytest.approx(sqnr["refit"], abs=1.0)


def test_refit_is_least_squares() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 2, 6, 6)).astype(np.float32)
    weight = rng.standard_normal((3, 2, 3, 3)).astype(np.float32)
    geometry = Geometry((3, 3), (1, 1), (1, 1), ((0, 0), (0, 0)), 1)
    seen = PatchStatistics(geometry, 0.5, 18)
    for sample in x:
        seen.add(sample)
    # All 16 positions of every sample, by an independent route.
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)
    exact = windows.reshape(-1, 18).astype(np.float64)
    rounded = np.clip(np.rint(exact / 0.5), -128, 127) * 0.5
    target = exact @ weight.reshape(3, 18).T
    with_bias = np.concatenate([rounded, np.ones((len(rounded), 1))], axis=1)
    solution, *_ = np.linalg.lstsq(with_bias, target, rcond=None)
    found = seen.refit(weight)
    np.testing.assert_allclose(found.reshape(3, 18), solution[:-1].T, atol=1e-3)
    np.testing.assert_allclose(seen.bias_shift(weight, found), solution[-1], atol=1e-3)


@pytest.mark.parametrize(
    ("groups", "strides", "dilations", "pads"),
    [
        (1, (1, 1), (1, 1), ((1, 1), (1, 1))),
        (4, (2, 1), (1, 2), ((0, 1), (2, 0))),
        (2, (1, 2), (2, 1), ((2, 2), (0, 0))),
    ],
)
def test_patches_are_what_the_convolution_multiplies(
    groups: int, strides: tuple[int, ...], dilations: tuple[int, ...], pads: tuple[tuple[int, int], ...]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 7, 9)).astype(np.float32)
    weight = rng.standard_normal((8, 4 // groups, 3, 2)).astype(np.float32)
    node = helper.make_node(
        "Conv",
        ["x", "w"],
        ["y"],
        group=groups,
        strides=strides,
        dilations=dilations,
        pads=[pads[0][0], pads[1][0], pads[0][1], pads[1][1]],
    )
    made = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 7, 9])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, "h", "w2"])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = ir.from_proto(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    y = OnnxRunner(model).run({"x": x[None]})["y"][0].reshape(8, -1).T
    geometry = Geometry.of(model.graph[0], weight.shape)
    assert geometry is not None
    patches = geometry.patches(x, np.random.default_rng(0))
    rows = weight.reshape(groups, 8 // groups, -1)
    np.testing.assert_allclose(np.einsum("ngd,god->ngo", patches, rows).reshape(len(patches), 8), y, atol=1e-4)


def test_too_few_samples_correct_nothing(calibrate: Calibrate) -> None:
    model, x = ill_conditioned_model()
    made, table = calibrate(model, x[:7], calibrator="minmax")
    assert table.correction == "none"
    assert made.report["output_sqnr_db"] == {}
