"""Turns a module and its declared inputs into model.onnx and into what the firewalls say of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import onnx
import onnx_ir as ir

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export.binding import Binding, bind, flatten, to_tensors
from enginesmith.tasks.export.clean import clean
from enginesmith.tasks.export.exporters import Diagnosis, Exported, ExportFailedError, Traced, export_module
from enginesmith.tasks.firewalls.dims import declared_dims
from enginesmith.tasks.firewalls.findings import Finding, blocking, in_order, readable_path
from enginesmith.tasks.firewalls.graph_rules import graph_findings
from enginesmith.tasks.firewalls.observed import observe
from enginesmith.tasks.firewalls.operators import check_operators
from enginesmith.tasks.firewalls.samples import cases_of, example_sizes, feed_of
from enginesmith.tasks.firewalls.shape import check_inputs, compare, name_output_dims
from enginesmith.tasks.firewalls.source import check_source
from enginesmith.tasks.graph import io
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import ExportSettings, InputSettings

if TYPE_CHECKING:
    from torch import nn

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Judgement:
    """An export and what is to be said of it.

    Attributes:
        findings: worst first.
        exported: None when no exporter could.
        errors: for each output the largest error relative to its range.
        cases: what was compared, in words.
        seconds: what comparing took.
    """

    findings: tuple[Finding, ...]
    exported: Exported | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def blocked(self) -> bool:
        """Whether any finding stops the export."""
        return bool(blocking(self.findings))


def judge_module(
    module: nn.Module,
    dataset: Dataset,
    inputs: Mapping[str, InputSettings],
    settings: ExportSettings,
    backends: Iterable[str],
    folder: Path,
    roots: Sequence[Path] = (),
) -> Judgement:
    """Export a module into `folder` and run all three firewalls around it. Findings do not raise.

    Args:
        module: put into eval mode by the caller, on the CPU.
        dataset: samples for the export and the experiment.
        inputs: declared inputs.
        settings: opset, exporter, tolerance of the experiment.
        backends: whose parsers are asked.
        folder: `model.onnx` is written here.
        roots: folders of the user's own source.

    Raises:
        EnginesmithError: the declared inputs do not fit forward, or forward fails on the example.
    """
    judgement = _judge(module, dataset, inputs, settings, backends, folder, roots)
    if settings.exporter == "auto" and _is_invalid(judgement):
        traced_instead = settings.model_copy(update={"exporter": "legacy"})
        second = _judge(module, dataset, inputs, traced_instead, backends, folder, roots)
        judgement = judgement if second.blocked else _excused(second, judgement)
    findings = list(judgement.findings)
    if judgement.blocked or (judgement.exported is not None and judgement.exported.exporter == "legacy"):
        traced = judgement.exported.traced if judgement.exported is not None else ()
        findings = with_suspicions(findings, check_source(module, inputs, roots), traced, roots)
    return replace(judgement, findings=tuple(in_order(findings)))


def _is_invalid(judgement: Judgement) -> bool:
    """Whether all that blocks a captured graph is that it is no valid ONNX."""
    captured = judgement.exported is not None and judgement.exported.exporter == "dynamo"
    found = blocking(judgement.findings)
    return captured and bool(found) and all(f.rule == "operators/invalid-graph" for f in found)


def _excused(traced: Judgement, captured: Judgement) -> Judgement:
    """A traced graph that stands in for an invalid captured one, and says so."""
    reason = Finding(
        rule="operators/legacy-exporter",
        severity="warning",
        message="the graph was traced, not captured by torch.export, whose graph is invalid: "
        + blocking(captured.findings)[0].message,
        hint="tracing freezes what Python decides; only the comparison with PyTorch vouches for this graph",
    )
    return replace(traced, findings=(*traced.findings, reason))


def with_suspicions(
    findings: Sequence[Finding], suspicions: Sequence[Finding], traced: Sequence[Traced], roots: Sequence[Path]
) -> list[Finding]:
    """Add what the source says to an export that failed, differs, or was traced.

    1. What blocks at no known place takes the place of the only suspicion that can explain it.
    2. With something blocking, suspicions become findings: those that can explain it block too.
    3. Otherwise (a traced graph that agrees with PyTorch) a suspicion blocks when it is about a value and the tracer
       warned at the same line: a branch was frozen, and no input that was tried took the other side.
    """
    found = blocking(findings)
    if not found:
        frozen = {(readable_path(t.file, roots), t.line) for t in traced}
        return [
            *findings,
            *(
                s.model_copy(update={"severity": "error", "message": f"{s.message}; tracing froze it"})
                for s in suspicions
                if s.rule in _ABOUT_VALUES and (s.file, s.line) in frozen
            ),
        ]
    known = {(f.file, f.line) for f in found if f.line}
    explaining = [s for s in suspicions if s.rule != "control-flow/branch-on-size"]
    if any(f.rule == "control-flow/data-dependent" for f in found):
        explaining = [s for s in explaining if s.rule in _ABOUT_VALUES]
    placed = [
        f.model_copy(update={"file": explaining[0].file, "line": explaining[0].line, "module": explaining[0].module})
        if f in found and not f.line and len(explaining) == 1
        else f
        for f in findings
    ]
    added = [s.model_copy(update={"severity": "error"}) if s in explaining else s for s in suspicions]
    return [*placed, *(s for s in added if (s.file, s.line) not in known)]


_ABOUT_VALUES = {"control-flow/branch-on-value", "control-flow/loop-on-value", "shape/value-as-number"}


def _judge(
    module: nn.Module,
    dataset: Dataset,
    inputs: Mapping[str, InputSettings],
    settings: ExportSettings,
    backends: Iterable[str],
    folder: Path,
    roots: Sequence[Path],
) -> Judgement:
    binding = bind(module, inputs)
    dims = declared_dims(inputs)
    example = feed_of(dataset, inputs, example_sizes(dims))
    try:
        exported = export_module(module, binding, inputs, dims, example, settings, roots)
    except ExportFailedError as error:
        return Judgement(tuple(in_order(_not_exported(error.failures, roots))))
    model = exported.model
    findings = _exporter_findings(exported, roots)
    try:
        clean(model, _present(model, binding.inputs), exported.outputs, roots)
    except ValueError as error:
        return Judgement((*findings, _broken(f"the exporter's graph has other inputs or outputs than asked: {error}")))
    findings += check_inputs(model, inputs)
    findings += _check_opset(model, settings.opset)
    file = io.save(model, folder)
    findings += _check_file(file)
    if blocking(findings):
        return Judgement(tuple(in_order(findings)), exported)
    try:
        runner = OnnxRunner(file)
    except EnginesmithError as error:
        findings.append(_broken(f"ONNX Runtime does not load it: {'; '.join(error.details[:2])}", "operators/refused"))
        return Judgement(tuple(in_order(findings)), exported)
    started = time.monotonic()
    agreement = compare(
        eager(module, binding),
        runner.run,
        cases_of(dataset, inputs),
        tolerance=settings.tolerance,
        roots=roots,
    )
    seconds = time.monotonic() - started
    if exported.exporter == "legacy":
        name_output_dims(model, agreement.shapes)
        io.save(model, folder)
    findings += [_with_constraints(f, exported.constraints) for f in agreement.findings]
    findings += check_operators(folder, backends)
    seen = {f.rule for f in findings}
    if not blocking(findings):  # what torch said of the sizes is not said twice
        ranges = observe(model, cases_of(dataset, inputs))
        again = {"shape/size-refused"} if "shape/constrained-dim" in seen else set()
        findings += [f for f in graph_findings(model, inputs, ranges=ranges) if f.rule not in again]
    return Judgement(tuple(in_order(findings)), exported, agreement.errors, agreement.cases, seconds)


def eager(module: nn.Module, binding: Binding) -> Any:
    """The module as a function from arrays by input name to arrays by output name."""
    import torch

    def run(feed: Mapping[str, Array]) -> dict[str, Array]:
        with torch.no_grad():
            returned = flatten(binding.call(module, to_tensors(binding, feed)), taken=binding.inputs)
        return {name: leaf.numpy() for name, leaf in returned.items() if isinstance(leaf, torch.Tensor)}

    return run


def _present(model: ir.Model, names: Sequence[str]) -> Sequence[str]:
    """Names of the graph's inputs: by position, unless the exporter dropped some and named the others itself."""
    if len(model.graph.inputs) == len(names):
        return names
    kept = [str(value.name) for value in model.graph.inputs]
    return kept if set(kept) <= set(names) else names


def _exporter_findings(exported: Exported, roots: Sequence[Path]) -> list[Finding]:
    findings: list[Finding] = []
    if exported.exporter == "legacy" and exported.failures:
        findings.append(
            Finding(
                rule="operators/legacy-exporter",
                severity="warning",
                message=f"the graph was traced, not captured by torch.export: {exported.failures[-1].message}",
                hint="tracing freezes what Python decides; only the comparison with PyTorch vouches for this graph",
                **_place(exported.failures[-1], roots),
            )
        )
    return findings


def _with_constraints(finding: Finding, constraints: Sequence[str]) -> Finding:
    """Add what torch says that the sizes must be to the finding that some are not accepted."""
    if finding.rule != "shape/constrained-dim" or not constraints:
        return finding
    return finding.model_copy(update={"message": f"{finding.message}; torch.export asks for {'; '.join(constraints)}"})


def _not_exported(failures: Sequence[Diagnosis], roots: Sequence[Path]) -> Iterator[Finding]:
    """A data-dependent failure is the control-flow firewall's; anything else says what every exporter said."""
    dependent = [f for f in failures if f.data_dependent]
    for failure in dependent:
        yield Finding(
            rule="control-flow/data-dependent",
            severity="error",
            message=f"Python decides by a tensor's values, which a graph cannot follow: {failure.message}",
            hint="use torch.where for a choice, torch.cond for a branch, a mask or a fixed number of steps for a loop",
            **_place(failure, roots),
        )
    if not dependent:
        for failure in failures:
            yield Finding(
                rule="operators/not-exported",
                severity="error",
                message=failure.message,
                hint="rewrite this part with operations that torch.onnx can translate",
                **_place(failure, roots),
            )


def _place(diagnosis: Diagnosis, roots: Sequence[Path]) -> dict[str, Any]:
    return {"file": readable_path(diagnosis.file, roots), "line": diagnosis.line} if diagnosis.file else {}


def _check_opset(model: ir.Model, asked: int) -> list[Finding]:
    found = model.opset_imports.get("", 0)
    if found == asked:
        return []
    return [
        Finding(
            rule="operators/opset",
            severity="error",
            message=f"opset {asked} was asked for, the file has {found}",
            hint="ask for the opset that the exporter writes (18 and later), or set export.exporter: legacy",
        )
    ]


def _check_file(file: Path) -> list[Finding]:
    try:
        onnx.checker.check_model(str(file), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return [_broken(f"ONNX's checker refuses the file: {str(error).strip().splitlines()[0]}")]
    return []


def _broken(message: str, rule: str = "operators/invalid-graph") -> Finding:
    return Finding(rule=rule, severity="error", message=message, hint="try the other exporter (export.exporter)")
