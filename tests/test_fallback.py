"""What goes back to FP32 because it was measured to matter, and what does not."""

from __future__ import annotations

import importlib.util
import json
import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.data import DATA, Dataset, load_dataset
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.fallback import FALLBACK, Judge, make_plan, pinned_nodes
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.emulate import emulate
from enginesmith.tasks.graph.layers import LayerRow
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.graph.plan import Plan, load_plan
from enginesmith.tasks.graph.switched import SwitchedModel
from enginesmith.tasks.metric import Metric, MetricRef, Score
from enginesmith.tasks.probe import PROBE, probe
from enginesmith.tasks.reference import REFERENCE
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import BudgetSettings, DimSettings, Fp16Settings, InputSettings
from enginesmith.tasks.stage import SourceFile, Stage
from enginesmith.tasks.store import Artifact, Store

AGREEMENT = MetricRef("agreement")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    progress.quiet()
    yield
    progress.quiet(False)


def graph(text: str, **constants: np.ndarray | float | list[float]) -> ir.Model:
    """A model from onnx's text form, with float32 initializers; nodes are named after their outputs."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    for name, value in constants.items():
        array = np.asarray(value)
        proto.graph.initializer.append(
            numpy_helper.from_array(array if array.dtype.kind == "i" else array.astype(np.float32), name)
        )
    model = ir.from_proto(proto)
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name
    return model


def planned(
    model: ir.Model,
    inputs: dict[str, np.ndarray],
    *,
    max_drop: float = 0.01,
    layer_drop: float = 0.02,
    keep_fp32: tuple[str, ...] = (),
    probed: int = 16,
    reference: Callable[[np.ndarray], np.ndarray] = lambda y: y,
) -> tuple[Plan, ir.Model, ir.Model]:
    """The plan, and the fp16 and mixed models as FP32 graphs that run faithfully."""
    count = len(next(iter(inputs.values())))
    dataset = Dataset(inputs, None, True, 1, min(16, count), 64)
    metric = Metric(AGREEMENT)
    switched = SwitchedModel(model)
    outputs = {name: reference(value) for name, value in switched.predict(dataset, ()).items()}
    judge = Judge(switched, dataset, metric, outputs, metric(outputs, dataset, outputs))
    table = probe(model, dataset.take(slice(0, probed)), metric)
    settings = Fp16Settings(layer_drop=layer_drop, keep_fp32=keep_fp32)
    plan, fp16, mixed = make_plan(model, table, judge, settings, BudgetSettings(max_drop=max_drop))
    return plan, emulate(fp16.model), emulate(mixed.model)


def fp32(plan: Plan) -> set[str]:
    return {name for region in plan.regions for name in region.nodes}


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return next(iter(OnnxRunner(model).run(feeds).values()))


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


LAYER_NORM = (
    "g (float[N,1,8] x) => (float[N,1,8] y) { w = Mul(x, k) mean = ReduceMean <axes = [-1]> (w) d = Sub(w, mean) "
    "p = Pow(d, two) var = ReduceMean <axes = [-1]> (p) e = Add(var, eps) s = Sqrt(e) n = Div(d, s) y = Mul(n, k) }"
)


class TestCases:
    """Inputs that break tools of this kind."""

    def test_layer_norm_of_large_values_goes_back_as_a_whole(self) -> None:
        x = normal(64, 1, 8, scale=400)
        plan, fp16, mixed = planned(graph(LAYER_NORM, k=1.0, two=2.0, eps=1e-5), {"x": x})
        centred = x - x.mean(axis=-1, keepdims=True)
        right = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        broken = run(fp16, {"x": x})
        assert np.isfinite(broken).all()  # finite zeros: "no NaN or inf" would have passed
        assert np.abs(broken - right).max() > 1
        np.testing.assert_allclose(run(mixed, {"x": x}), right, atol=2e-3)
        assert fp32(plan) == {"mean", "d", "p", "var", "e", "s", "n"}
        assert plan.within_budget

    def test_tiny_weights_times_a_large_factor(self) -> None:
        model = graph("g (float[N,1,4] x) => (float[N,1,4] y) { a = Mul(x, w) y = Mul(a, c) }", w=3e-9, c=1e4)
        x = normal(32, 1, 4)
        plan, fp16, mixed = planned(model, {"x": x})
        assert not run(fp16, {"x": x}).any()
        np.testing.assert_allclose(run(mixed, {"x": x}), x * 3e-5, rtol=1e-6)
        assert fp32(plan) == {"a", "y"}
        assert plan.within_budget

    def test_a_division_guarded_by_a_tiny_constant(self) -> None:
        model = graph("g (float[N,1,4] x) => (float[N,1,4] y) { a = Add(x, c) y = Div(x, a) }", c=1e-12)
        x = np.abs(normal(32, 1, 4))
        x[:, :, 0] = 0
        plan, fp16, mixed = planned(model, {"x": x})
        assert np.isnan(run(fp16, {"x": x})).any()
        np.testing.assert_allclose(run(mixed, {"x": x}), x / (x + 1e-12), atol=1e-3)
        assert "a" in fp32(plan)
        assert math.isinf(plan.start_drop)  # NaN is a failed candidate

    def test_a_batch_norm_with_tiny_variances(self) -> None:
        channels = 4
        model = graph(
            "g (float[N,4,2,2] x) => (float[N,4,2,2] y) { a = BatchNormalization <epsilon = 1e-12> (x, s, b, m, v) "
            "y = Tanh(a) }",
            s=np.full(channels, 1e-4),
            b=np.zeros(channels),
            m=np.zeros(channels),
            v=np.linspace(1e-8, 2e-8, channels),
        )
        x = normal(32, 4, 2, 2)
        plan, fp16, mixed = planned(model, {"x": x})
        right = np.tanh(x * (1e-4 / np.sqrt(np.linspace(1e-8, 2e-8, channels) + 1e-12)).reshape(1, 4, 1, 1))
        assert not np.allclose(run(fp16, {"x": x}), right, atol=0.1)
        np.testing.assert_allclose(run(mixed, {"x": x}), right, atol=2e-3)
        assert fp32(plan) == {"a"}
        (row,) = [row for row in plan.nodes if row.name == "a"]
        assert "more than layer_drop" in row.reason

    def test_a_mask_sentinel_keeps_masking(self) -> None:
        model = graph(
            "g (float[N,1,8] x, float[N,1,8] m) => (float[N,1,8] y) "
            "{ gone = Sub(one, m) b = Mul(gone, sentinel) a = Add(x, b) y = Softmax(a) }",
            one=1.0,
            sentinel=-1e9,
        )
        x = normal(32, 1, 8)
        m = np.ones_like(x)
        m[:, :, 5:] = 0
        m[3] = 0  # all masked: every score stands equally low
        plan, fp16, mixed = planned(model, {"x": x, "m": m})
        assert np.isnan(run(fp16, {"x": x, "m": m})).any()
        y = run(mixed, {"x": x, "m": m})
        assert plan.within_budget
        kept = np.delete(y, 3, axis=0)
        assert not kept[:, :, 5:].any()
        np.testing.assert_allclose(y.sum(axis=-1), 1, atol=2e-3)

    def test_an_overflowing_sum_goes_back_with_what_scales_it(self) -> None:
        model = graph(
            "g (float[N,1,64] x) => (float[N,1,1] y) "
            "{ a = Mul(x, k) s = ReduceSum(a, axes) m = Mul(s, r) y = Tanh(m) }",
            k=1.0,
            axes=np.array([2]),
            r=1e-5,
        )
        x = np.abs(normal(32, 1, 64, scale=3000))
        plan, _, mixed = planned(model, {"x": x})
        assert fp32(plan) == {"s", "m"}
        (region,) = plan.regions
        assert region.kind == "closed"
        np.testing.assert_allclose(run(mixed, {"x": x}), np.tanh(x.sum(-1, keepdims=True) * 1e-5), rtol=2e-3)

    def test_harmless_overflow_stays_in_half(self) -> None:
        # tanh of infinity is one, as it should be.
        model = graph("g (float[N,1,8] x) => (float[N,1,8] y) { a = Mul(x, k) y = Tanh(a) }", k=1e5)
        x = normal(32, 1, 8) + np.float32(5)
        plan, _, _ = planned(model, {"x": x})
        assert plan.regions == ()
        assert plan.within_budget


class TestSearch:
    def test_no_node_goes_back_when_fp16_is_within_budget(self) -> None:
        model = graph("g (float[N,1,8] x) => (float[N,1,8] y) { a = Exp(x) y = Tanh(a) }")
        plan, _, _ = planned(model, {"x": normal(32, 1, 8)})
        assert plan.regions == ()
        assert plan.half == ("a", "y")
        assert plan.evaluations == 1
        assert (plan.fp16_casts, plan.mixed_casts) == (2, 2)

    def test_errors_that_only_add_up_are_found(self) -> None:
        # 40 factors that multiply to one: every rounding alone is harmless, together they are not.
        factors = np.exp(np.random.default_rng(1).uniform(-0.5, 0.5, 20)).astype(np.float32)
        steps = [*factors, *(1 / factors)]
        names = [f"n{i}" for i in range(len(steps))]
        text = " ".join(f"{name} = Mul({names[i - 1] if i else 'x'}, c{i})" for i, name in enumerate(names))
        model = graph(
            f"g (float[N,1,8] x) => (float[N,1,8] y) {{ {text} y = Identity(n39) }}",
            **{f"c{i}": float(step) for i, step in enumerate(steps)},
        )
        plan, _, _ = planned(model, {"x": normal(64, 1, 8)}, max_drop=1e-3)
        assert all(row.drop is None or row.drop < 1e-3 for row in probe_rows(model))
        assert plan.start_drop > 1e-3
        assert plan.within_budget
        assert 0 < len(fp32(plan)) < 40
        assert plan.evaluations <= plan.limit

    def test_every_kept_region_is_needed(self) -> None:
        model = graph(
            "g (float[N,1,8] x) => (float[N,1,8] y) "
            "{ a = Mul(x, t) b = Mul(a, c) d = Mul(b, g) e = Mul(d, t) f = Mul(e, c) y = Tanh(f) }",
            t=2e-8,
            c=6e4,
            g=1e3,
        )
        # layer_drop 2: every region has to earn its place by the budget.
        plan, _, _ = planned(model, {"x": normal(32, 1, 8)}, layer_drop=2)
        assert plan.within_budget
        assert all(r.cause == "budget" for r in plan.regions)
        assert all(r.drop_without is not None and r.drop_without > 0.01 for r in plan.regions)
        assert fp32(plan) == {"a", "b", "e", "f"}

    def test_the_best_is_written_when_the_budget_cannot_be_met(self) -> None:
        # The reference is another model's: 1 - |y - 1.5 y| / |1.5 y| = 2/3 is the best that any precision can do.
        model = graph("g (float[N,1,8] x) => (float[N,1,8] y) { a = Mul(x, t) y = Mul(a, c) }", t=2e-8, c=6e4)
        plan, _, mixed = planned(model, {"x": normal(32, 1, 8)}, reference=lambda y: 1.5 * y)
        assert not plan.within_budget
        assert plan.drop == pytest.approx(1 / 3, abs=1e-3)
        assert plan.start_drop == pytest.approx(1)
        assert "does not come from FP16" in plan.obstacles[1]
        np.testing.assert_allclose(run(mixed, {"x": normal(32, 1, 8)}), normal(32, 1, 8) * 1.2e-3, rtol=1e-3)

    @pytest.mark.parametrize(("bad", "cause"), [(1, "budget"), (4, "layer_drop")])
    def test_a_doubtful_layer_is_judged_on_the_whole_search_set(self, bad: int, cause: str) -> None:
        # One bad sample of the 16 probed is 0.06, of all 64 it is 0.016, below layer_drop; four are 0.06 of all.
        model = graph("g (float[N,1,8] x) => (float[N,1,8] y) { a = Mul(x, k) y = Mul(a, r) }", k=400.0, r=1 / 400)
        x = normal(64, 1, 8)
        x[0] *= 1000
        x[17 : 16 + bad] *= 1000
        plan, _, _ = planned(model, {"x": x})
        assert fp32(plan) == {"a", "y"}
        assert {region.cause for region in plan.regions} == {cause}
        assert plan.within_budget

    def test_the_user_can_stop_it(self) -> None:
        model = graph("g (float[N,1,8] x) => (float[N,1,8] y) { y = Exp(x) }")
        x = normal(16, 1, 8)
        dataset = Dataset({"x": x}, None, True, 1, 16, 64)
        table = probe(model, dataset, Metric(AGREEMENT))
        judge = Judge(SwitchedModel(model), dataset, Metric(AGREEMENT), {"y": np.exp(x)}, Score(1.0))
        progress.interrupt()
        with pytest.raises(Interrupted):
            make_plan(model, table, judge, Fp16Settings(), BudgetSettings())

    def test_a_reference_without_value_is_said(self) -> None:
        model = graph("g (float[N,1,8] x) => (float[N,1,8] y) { y = Log(x) }")
        plan, _, _ = planned(model, {"x": normal(16, 1, 8)})
        assert not plan.within_budget
        assert "no value" in plan.obstacles[0]


def probe_rows(model: ir.Model) -> tuple[LayerRow, ...]:
    return probe(model, Dataset({"x": normal(16, 1, 8)}, None, True, 1, 16, 64), Metric(AGREEMENT)).rows


class TestPins:
    ROWS = probe_rows(
        graph(
            "g (float[N,1,8] x) => (float[N,1,8] y) { enc1 = Exp(x) enc2 = Tanh(enc1) dec1 = Tanh(enc2) y = Abs(dec1) }"
        )
    )

    @pytest.mark.parametrize(
        ("pin", "nodes"),
        [("enc2", ("enc2",)), ("enc*", ("enc1", "enc2")), ("Tanh", ("enc2", "dec1")), ("*1", ("enc1", "dec1"))],
    )
    def test_by_name_pattern_or_operator(self, pin: str, nodes: tuple[str, ...]) -> None:
        (row,) = pinned_nodes(self.ROWS, (pin,))
        assert row.nodes == nodes

    def test_by_the_path_of_a_module(self) -> None:
        rows = [row.model_copy(update={"module": f"net.{row.name}"}) for row in self.ROWS]
        (row,) = pinned_nodes(rows, ("net.enc*",))
        assert row.nodes == ("enc1", "enc2")

    def test_a_pin_that_matches_nothing_is_an_error_with_what_is_close(self) -> None:
        with pytest.raises(EnginesmithError, match="encl1") as caught:
            pinned_nodes(self.ROWS, ("enc*", "encl1"))
        assert caught.value.key == "precision.fp16.keep_fp32.1"
        assert "enc1" in caught.value.hint

    def test_pinned_nodes_stay_fp32_and_say_by_which_pin(self) -> None:
        model = graph("g (float[N,1,8] x) => (float[N,1,8] y) { a = Exp(x) b = Tanh(a) y = Abs(b) }")
        plan, _, _ = planned(model, {"x": normal(32, 1, 8)}, keep_fp32=("b",))
        assert plan.half == ("a", "y")
        (row,) = [row for row in plan.nodes if row.name == "b"]
        assert (row.precision, row.half) == ("fp32", False)
        assert "precision.fp16.keep_fp32.0" in row.reason


class Written(BaseModel):
    nodes: int


@dataclass(frozen=True)
class Given:
    """A model as the content of a stage."""

    model: ir.Model = field(repr=False)

    def key_part(self) -> object:
        return ir.to_proto(self.model).SerializeToString().hex()


def write_model(out: Path, *, model: Given) -> Written:
    io.save(model.model, out)
    return Written(nodes=len(model.model.graph))


class TestStage:
    TEXT = "g (float[n,1,64] x) => (float[n,1,1] y) { a = Mul(x, k) s = ReduceSum(a, axes) m = Mul(s, r) y = Tanh(m) }"

    def data(self, store: Store, tmp_path: Path) -> Artifact:
        return DATA(
            store=store,
            calibration=None,
            evaluation=SourceFile.of(tmp_path / "evaluation.npz"),
            search=None,
            files=(),
            inputs={"x": InputSettings(shape=("n", 1, 64), dims={"n": DimSettings(min=1, opt=8, max=16)})},
            seed=0,
            samples=8,
        )

    def artifact(self, store: Store, tmp_path: Path, settings: Fp16Settings | None = None) -> Artifact:
        source = graph(self.TEXT, k=1.0, axes=np.array([2]), r=1e-5)
        model = Stage("simplify", 1, write_model)(store=store, model=Given(source))
        np.savez(tmp_path / "evaluation.npz", x=np.abs(normal(64, 1, 64, scale=3000)))
        data = self.data(store, tmp_path)
        reference = REFERENCE(store=store, model=model, data=data, metric=AGREEMENT)
        table = PROBE(store=store, model=model, data=data, reference=reference, metric=AGREEMENT, samples=16)
        return FALLBACK(
            store=store,
            model=model,
            probe=table,
            data=data,
            reference=reference,
            metric=AGREEMENT,
            settings=settings or Fp16Settings(),
            budget=BudgetSettings(),
        )

    def test_payload_and_report(self, store: Store, tmp_path: Path) -> None:
        artifact = self.artifact(store, tmp_path)
        assert sorted(f.path for f in artifact.files) == [
            "fp16/model.onnx",
            "mixed/model.onnx",
            "plan.json",
            "report.json",
        ]
        plan = load_plan(artifact.path)
        assert [row.name for row in plan.nodes] == ["a", "s", "m", "y"]
        assert [row.precision for row in plan.nodes] == ["fp16", "fp32", "fp32", "fp16"]
        assert artifact.report["fp32_nodes"] == 2
        assert artifact.report["within_budget"]
        for variant in ("fp16", "mixed"):
            onnx.checker.check_model(str(artifact.path / variant / "model.onnx"), full_check=True)

    def test_the_mixed_file_scores_what_the_plan_says(self, store: Store, tmp_path: Path) -> None:
        artifact = self.artifact(store, tmp_path)
        dataset = load_dataset(self.data(store, tmp_path), "search")
        metric = Metric(AGREEMENT)
        exact = np.tanh(np.asarray(dataset.inputs["x"]).sum(-1, keepdims=True) * np.float32(1e-5))
        for variant, drop in (("fp16", load_plan(artifact.path).start_drop), ("mixed", load_plan(artifact.path).drop)):
            outputs = OnnxRunner(emulate(io.load(artifact.path / variant))).predict(dataset)
            score = metric(outputs, dataset, {"y": exact})
            assert 1 - score.value == pytest.approx(drop, abs=1e-5)

    def test_same_inputs_same_bytes(self, store: Store, tmp_path: Path) -> None:
        again = Store(tmp_path / "again")
        assert self.artifact(store, tmp_path).digest == self.artifact(again, tmp_path).digest

    def test_a_wrong_pin_names_its_key(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(EnginesmithError) as caught:
            self.artifact(store, tmp_path, Fp16Settings(keep_fp32=("ReduceSun",)))
        assert caught.value.key == "precision.fp16.keep_fp32.0"
        assert "ReduceSum" in caught.value.hint


def features(content: bytes) -> list[int]:
    """Magika's input: 1024 bytes from the stripped start and from the stripped end, 256 as padding between."""
    head, tail = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
    return [*head, *[256] * (2048 - len(head) - len(tail)), *tail]


def test_magika_is_restored_by_a_few_nodes() -> None:
    found = importlib.util.find_spec("magika")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("magika is not installed")
    model = io.load(Path(found.submodule_search_locations[0]) / "models/standard_v3_3/model.onnx")
    UniqueNodeNames()(model)
    folder = Path(sysconfig.get_paths()["stdlib"])
    kinds = [sorted(folder.rglob(f"*{kind}"))[:200:40] for kind in (".py", ".pyc", ".txt", ".so")]
    rows = [features(file.read_bytes()) for files in kinds for file in files]
    plan, _, _ = planned(model, {"bytes": np.array(rows, np.int32)}, max_drop=0.05, probed=4)
    assert plan.start_drop > 0.5
    assert plan.within_budget
    assert len(fp32(plan)) < 7
    assert any(row.op == "ReduceSum" for row in plan.nodes if row.region)
    assert json.loads(plan.model_dump_json())["within_budget"] is True
