"""Backends that turn one ONNX file into an engine, behind one interface (see spec.py)."""

from __future__ import annotations

import importlib
from typing import cast

from enginesmith.tasks.engines.spec import Backend, EngineError

_BACKENDS = {
    "onnxruntime": "enginesmith.tasks.engines.onnxruntime:OnnxRuntime",
    "tensorrt": "enginesmith.tasks.engines.tensorrt:TensorRt",
    "tensorrt_rtx": "enginesmith.tasks.engines.tensorrt_rtx:TensorRtRtx",
}


def names() -> tuple[str, ...]:
    """Names of all backends, installed or not."""
    return tuple(sorted(_BACKENDS))


def backend(name: str) -> Backend:
    """The backend of this name. The vendor's library is imported when it is first used, not here.

    Raises:
        EngineError: no such backend.
    """
    if name not in _BACKENDS:
        raise EngineError(f"no backend {name!r}", key="backend", hint=f"there are: {', '.join(names())}")
    module, _, cls = _BACKENDS[name].partition(":")
    return cast("Backend", getattr(importlib.import_module(module), cls)())
