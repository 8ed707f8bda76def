"""A bundle runs on its own, row by row, with ONNX Runtime as the vendor's runtime."""

from __future__ import annotations

import json

import numpy as np
import pytest

from enginesmith.tasks.engines.bundle_run import main, run_bundle
from enginesmith.tasks.engines.manifest import sha256_file
from enginesmith.tasks.engines.spec import EngineError


@pytest.fixture
def bundle(net, tmp_path):
    """One row that builds and one whose backend does not exist."""
    model = net("fp32")
    folder = model.parent
    x = np.random.default_rng(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "feeds.npz", x=x)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    np.savez(folder / "expected.npz", y=session.run(None, {"x": x})[0])
    row = {
        "name": "good", "model": "net", "variant": "fp32", "file": "model.onnx", "backend": "onnxruntime",
        "options": {}, "batches": [1, 2], "feeds": "feeds.npz", "expected": "expected.npz", "work": str(tmp_path),
        "inputs": [{"name": "x", "shape": ["n", 3, 16, 16], "dtype": "float32", "dims": {"n": [1, 2, 2]}}],
    }  # fmt: skip
    files = {p.name: sha256_file(p) for p in folder.iterdir()}
    plan = {"rows": [row, row | {"name": "bad", "backend": "nothing"}], "files": files}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_a_row_that_fails_is_recorded_and_costs_no_other(bundle, tmp_path) -> None:
    assert run_bundle(bundle, tmp_path / "results") == 0
    good, bad = (json.loads((tmp_path / f"results/{name}.json").read_text()) for name in ("good", "bad"))
    assert good["outputs"]["y"]["top1_agreement"] == 1.0
    manifest = good["manifest"]
    assert manifest["requested"] == {"fp32": 7}
    assert (manifest["read_back"], manifest["unseen"]) == ({"fp32": 5}, 2)  # both ReLUs are fused into their Conv
    assert "no backend 'nothing'" in bad["error"]


def test_finished_rows_are_kept_and_not_run_again(bundle, tmp_path) -> None:
    results = tmp_path / "results"
    run_bundle(bundle, results)
    before = (results / "good.json").stat().st_mtime_ns
    run_bundle(bundle, results)
    assert (results / "good.json").stat().st_mtime_ns == before


def test_past_the_time_limit_no_row_is_started(bundle, tmp_path) -> None:
    assert main(["--bundle", str(bundle), "--out", str(tmp_path / "results"), "--limit", "-1"]) == 3
    assert list((tmp_path / "results").iterdir()) == []


def test_a_bundle_changed_on_the_way_is_refused(bundle, tmp_path) -> None:
    (bundle / "feeds.npz").write_bytes(b"changed")
    with pytest.raises(EngineError, match=r"feeds\.npz has changed"):
        run_bundle(bundle, tmp_path / "results")
