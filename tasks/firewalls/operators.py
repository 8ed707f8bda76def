"""Turns an ONNX file and a backend's name into the nodes that this backend refuses, by asking its real parser."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from enginesmith.tasks import child
from enginesmith.tasks.child import ChildError, Limits
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.integers import check_integers
from enginesmith.tasks.firewalls.origin import module_of, source_of
from enginesmith.tasks.firewalls.subgraphs import check_subgraphs
from enginesmith.tasks.firewalls.support import check_support
from enginesmith.tasks.graph import io

PARSERS = {"tensorrt_rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
"""Import names of the vendor runtimes that have an ONNX parser, by backend."""

_LIMITS = Limits(seconds=240, memory=12 << 30)


def check_operators(folder: Path, backends: Iterable[str]) -> list[Finding]:
    """What each backend's own parser says of `model.onnx` in a folder.

    `operators/refused` blocks the backend, not the export: a node that the parser cannot take. `operators/not-judged`
    says that a backend's runtime is not installed here; for tensorrt `check_tables` is asked instead.
    """
    findings: list[Finding] = []
    model: ir.Model | None = None
    for backend in sorted(set(backends) & set(PARSERS)):
        module = PARSERS[backend]
        if importlib.util.find_spec(module) is None:
            findings.append(
                Finding(
                    rule="operators/not-judged",
                    severity="advice",
                    message=f"{module} is not installed here: its target host judges the graph when it builds",
                    backend=backend,
                )
            )
            if backend == "tensorrt":
                findings += check_tables(io.load(folder))
            continue
        try:
            refused = child.call(
                parse_with_vendor,
                limits=_LIMITS,
                what=f"{module}'s ONNX parser",
                module=module,
                path=str(folder / io.MODEL),
            )
        except ChildError as error:
            findings.append(
                Finding(
                    rule="operators/refused",
                    severity="error",
                    message=f"{error.found}{': ' + error.details[-1] if error.details else ''}",
                    backend=backend,
                    hint="the parser could not read this graph at all; build for another backend",
                )
            )
            continue
        if refused and model is None:
            model = io.load(folder)
        findings += [_refused(entry, backend, model) for entry in refused]
    return findings


def check_tables(model: ir.Model) -> list[Finding]:
    """What is known of a graph where TensorRT's parser cannot be asked: operators, subgraphs, INT64 constants."""
    integers = [f for f in check_integers(model) if f.backend == "tensorrt"]
    return [*check_support(model), *check_subgraphs(model, ("tensorrt",)), *integers]


def _refused(entry: dict[str, Any], backend: str, model: ir.Model | None) -> Finding:
    node = None
    if model is not None:
        node = next((n for n in model.graph.all_nodes() if n.name == entry["node"]), None)
    file, line = source_of(node) if node is not None else ("", 0)
    opset = "" if model is None else f" (opset {model.opset_imports.get('', 0)})"
    return Finding(
        rule="operators/refused",
        severity="error",
        message=f"{entry['op'] or 'the graph'}{opset} is refused: {entry['error']}",
        file=file,
        line=line,
        node=entry["node"],
        module=module_of(node) if node is not None else "",
        backend=backend,
        hint="rewrite this part with operators that the backend has, or leave this target out",
    )


def parse_with_vendor(module: str, path: str) -> list[dict[str, str]]:
    """In a child: every node that a TensorRT-family parser refuses, with operator and error; empty when it takes all.

    Args:
        module: import name of the vendor's runtime.
        path: the ONNX file; external data is found beside it.
    """
    vendor: Any = importlib.import_module(module)
    logger = vendor.Logger(vendor.Logger.INTERNAL_ERROR)
    builder = vendor.Builder(logger)
    flags = 0
    if hasattr(vendor.NetworkDefinitionCreationFlag, "EXPLICIT_BATCH"):
        flags |= 1 << int(vendor.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    if hasattr(vendor.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags |= 1 << int(vendor.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)  # the parser does not keep it alive
    parser = vendor.OnnxParser(network, logger)
    taken = parser.supports_model_v2(Path(path).read_bytes(), path)
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    refused = [
        {"node": str(e.node_name() or ""), "op": str(e.node_operator() or ""), "error": " ".join(str(e.desc()).split())}
        for e in errors
    ]
    if not taken and not refused:
        refused = [{"node": "", "op": "", "error": "the parser gives no reason"}]
    return [] if taken else refused
