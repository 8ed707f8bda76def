"""Turns a folded module, or somebody's ONNX file, into the graph that the pipeline compiles, past three firewalls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from pydantic import BaseModel

from enginesmith.tasks import progress
from enginesmith.tasks.data import load_dataset
from enginesmith.tasks.export.foreign import adopt_apart
from enginesmith.tasks.export.judge import Judgement, judge_module
from enginesmith.tasks.firewalls.findings import BlockedError, Finding, blocking, in_order, save_findings
from enginesmith.tasks.firewalls.operators import check_operators
from enginesmith.tasks.firewalls.samples import cases_of
from enginesmith.tasks.firewalls.waivers import waive
from enginesmith.tasks.graph import io
from enginesmith.tasks.settings import ExportSettings, InputSettings, WaiverSettings
from enginesmith.tasks.stage import SourceFile, Stage
from enginesmith.tasks.store import Artifact
from enginesmith.tasks.usercode import UserCode, importable


class ExportReport(BaseModel):
    """How the graph came about and how well it agrees with its origin.

    Attributes:
        exporter: `dynamo` or `legacy`.
        reason: what the exporters tried before it said; empty when the first one did it.
        opset: read back from the file.
        nodes: number of nodes, those of subgraphs included.
        bytes: size of the tensors.
        inputs: shape of each input, read back from the file.
        outputs: shape of each output, read back.
        errors: for each output its largest difference from PyTorch, relative to its range.
        compared: at which sizes and on which inputs it was compared.
        findings: what the firewalls say.
    """

    exporter: str
    reason: tuple[str, ...]
    opset: int
    nodes: int
    bytes: int
    inputs: dict[str, tuple[int | str | None, ...]]
    outputs: dict[str, tuple[int | str | None, ...]]
    errors: dict[str, float]
    compared: tuple[str, ...]
    findings: tuple[Finding, ...]


def export_folded(
    out: Path,
    *,
    model: Artifact,
    factory: UserCode,
    data: Artifact,
    inputs: Mapping[str, InputSettings],
    settings: ExportSettings,
    backends: Iterable[str],
    waivers: Sequence[WaiverSettings] = (),
) -> ExportReport:
    """Export the folded module to `model.onnx` and write `findings.json`.

    Args:
        out: empty folder for the files.
        model: the fold stage's artifact.
        factory: the user's code that builds the module.
        data: the data stage's artifact; its calibration samples are the export's and the experiment's inputs.
        inputs: declared inputs.
        settings: opset, exporter, tolerance.
        backends: whose parsers are asked; a refusal blocks only that backend.
        waivers: accepted findings. What they cover does not block, as long as the graph was compared with PyTorch.

    Raises:
        BlockedError: a firewall blocks the export.
        EnginesmithError: the declared inputs do not fit forward.
    """
    from enginesmith.tasks.modules import load_folded

    with importable(factory.folder), progress.track("export", 2) as bar:
        module = load_folded(factory, model)
        bar.advance()
        judgement = judge_module(
            module, load_dataset(data, "calibration"), inputs, settings, backends, out, roots=(factory.folder,)
        )
        bar.advance()
    return _published(judgement, out, waivers)


def _published(judgement: Judgement, out: Path, waivers: Sequence[WaiverSettings]) -> ExportReport:
    compared = judgement.exported is not None and bool(judgement.cases)
    findings = accepted(judgement.findings, waivers, compared=compared)
    if blocking(findings) or judgement.exported is None:
        raise BlockedError.of(findings, what="the export", key="model.factory")
    save_findings(findings, out)
    exported = judgement.exported
    return ExportReport(
        exporter=exported.exporter,
        reason=tuple(f.message for f in exported.failures),
        findings=findings,
        errors=dict(judgement.errors),
        compared=judgement.cases,
        **graph_facts(exported.model),
    )


def accepted(findings: Sequence[Finding], waivers: Sequence[WaiverSettings], *, compared: bool) -> tuple[Finding, ...]:
    """Findings with their waivers' reasons.

    An error that kept the graph from being run beside its original cannot be waived: nobody would know what the graph
    computes. It keeps blocking and says so.
    """
    waived = waive(findings, waivers)
    if compared:
        return tuple(in_order(waived))
    return tuple(
        in_order(
            f.model_copy(update={"waived": "", "hint": f"its waiver cannot lift it: nothing was compared; {f.hint}"})
            if f.waived and f.severity == "error" and not f.backend
            else f
            for f in waived
        )
    )


def graph_facts(model: ir.Model) -> dict[str, Any]:
    """What reports say of a graph: opset, nodes, bytes, inputs, outputs."""
    return {
        "opset": model.opset_imports.get("", 0),
        "nodes": sum(1 for _ in model.graph.all_nodes()),
        "bytes": io.tensor_bytes(model),
        "inputs": {str(value.name): _shape(value) for value in model.graph.inputs},
        "outputs": {str(value.name): _shape(value) for value in model.graph.outputs},
    }


def _shape(value: ir.Value) -> tuple[int | str | None, ...]:
    return () if value.shape is None else tuple(d if isinstance(d, int) else d.value for d in value.shape)


class AdoptReport(BaseModel):
    """What an ONNX file brought and what became of it.

    Attributes:
        opset: before and after; equal when it was not converted.
        nodes: number of nodes, those of subgraphs included.
        bytes: size of the tensors.
        inputs: shape of each input as it is now.
        outputs: shape of each output.
        errors: for each output its largest difference from the file as it came, relative to its range.
        compared: at which sizes and on which inputs it was compared.
        findings: what the firewalls say.
    """

    opset: tuple[int, int]
    nodes: int
    bytes: int
    inputs: dict[str, tuple[int | str | None, ...]]
    outputs: dict[str, tuple[int | str | None, ...]]
    errors: dict[str, float]
    compared: tuple[str, ...]
    findings: tuple[Finding, ...]


def adopt_onnx(
    out: Path,
    *,
    source: SourceFile,
    data: Artifact,
    inputs: Mapping[str, InputSettings],
    settings: ExportSettings,
    backends: Iterable[str],
    waivers: Sequence[WaiverSettings] = (),
) -> AdoptReport:
    """Take over an ONNX file: `model.onnx` in the pipeline's form and `findings.json`; see `foreign.adopt_file`.

    Args:
        out: empty folder for the files.
        source: the file; external data lies beside it.
        data: the data stage's artifact.
        inputs: declared inputs.
        settings: tolerance of the comparison; a file of opset 18 and later keeps its opset.
        backends: whose parsers are asked; a refusal blocks only that backend.
        waivers: accepted findings. What they cover does not block, as long as the graph was compared with the file.

    Raises:
        BlockedError: a firewall blocks it.
        EnginesmithError: not a readable ONNX file, external data outside its folder, or opening it crashed, hung or
            needed more than its limits.
    """
    with progress.track("adopt", 2) as bar:
        cases = cases_of(load_dataset(data, "calibration"), inputs)
        adopted = adopt_apart(source.path, out, cases, inputs, settings.tolerance, waivers)
        bar.advance()
        findings = accepted(adopted.findings, waivers, compared=(out / io.MODEL).exists())
        if not blocking(findings):
            findings += tuple(waive(check_operators(out, backends), waivers))
        bar.advance()
    if blocking(findings):
        raise BlockedError.of(findings, what=source.path.name, key="model.checkpoint")
    save_findings(findings, out)
    facts = graph_facts(io.load(out))
    return AdoptReport(
        opset=(adopted.opset_before, facts.pop("opset")),
        errors=adopted.errors,
        compared=adopted.cases,
        findings=tuple(in_order(findings)),
        **facts,
    )


_TOOLS = ("onnx", "onnx-ir", "onnxruntime", "tensorrt-rtx", "tensorrt")

EXPORT = Stage("export", version=1, run=export_folded, tools=("torch", "onnxscript", *_TOOLS))
ADOPT = Stage("adopt", version=1, run=adopt_onnx, tools=_TOOLS)
