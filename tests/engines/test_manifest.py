"""An engine that does not fit this host is refused from its manifest, with both sides named."""

from __future__ import annotations

import json
import shutil

import pytest

from enginesmith.tasks.engines import backend
from enginesmith.tasks.engines.manifest import verified_manifest
from enginesmith.tasks.engines.spec import EngineError

ORT = backend("onnxruntime")


@pytest.fixture
def engine(ort_engine, tmp_path):
    """A copy of an engine, to be spoiled."""
    return shutil.copytree(ort_engine("fp32")[0], tmp_path / "copy")


def change(folder, **fields) -> None:
    path = folder / "engine.json"
    data = json.loads(path.read_text())
    data.update(fields)
    path.write_text(json.dumps(data))


def test_another_runtime_version_is_refused(engine) -> None:
    change(engine, fingerprint={**ORT.fingerprint(), "onnxruntime": "1.2.3"})
    with pytest.raises(EngineError, match=rf"the engine has 1\.2\.3, this host {ORT.version()}"):
        ORT.load(engine)


def test_another_gpu_is_refused_with_both_compute_capabilities(engine) -> None:
    change(engine, fingerprint={"gpu": "Tesla T4, SM 7.5", "driver": "580.1"})
    with pytest.raises(EngineError) as caught:
        verified_manifest(engine, backend="onnxruntime", fingerprint={"gpu": "A10, SM 8.6", "driver": "580.1"})
    assert "gpu: the engine has Tesla T4, SM 7.5, this host A10, SM 8.6" in caught.value.found
    assert "driver" not in caught.value.found


def test_every_difference_is_named(engine) -> None:
    change(engine, fingerprint={"a": "1", "b": "2"})
    with pytest.raises(EngineError, match=r"a: the engine has 1, this host 3; b: the engine has 2, this host none"):
        verified_manifest(engine, backend="onnxruntime", fingerprint={"a": "3"})


def test_another_backends_engine_is_refused(engine) -> None:
    with pytest.raises(EngineError, match="an engine of onnxruntime, not of tensorrt"):
        verified_manifest(engine, backend="tensorrt", fingerprint={})


def test_a_changed_byte_is_refused_with_both_digests(engine) -> None:
    path = engine / "engine.onnx"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(EngineError, match=r"engine\.onnx has changed: engine\.json says .* it has"):
        ORT.load(engine)


def test_a_missing_file_is_refused(engine) -> None:
    (engine / "engine.onnx").unlink()
    with pytest.raises(EngineError, match=r"engine\.onnx is missing"):
        ORT.load(engine)


def test_a_folder_without_an_engine_is_refused(tmp_path) -> None:
    with pytest.raises(EngineError, match="no engine here"):
        ORT.load(tmp_path)
