"""Turns a module, an ONNX file or Python source into findings, without publishing anything: what lint shows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from pydantic import TypeAdapter

from enginesmith.tasks import child
from enginesmith.tasks.child import ChildError, Limits
from enginesmith.tasks.data import Dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export.foreign import LIMITS, adopt_apart, check_foreign, read_foreign, tidy
from enginesmith.tasks.firewalls.findings import Finding, blocking, in_order
from enginesmith.tasks.firewalls.gpus import Gpu
from enginesmith.tasks.firewalls.graph_rules import graph_findings
from enginesmith.tasks.firewalls.operators import check_operators
from enginesmith.tasks.firewalls.samples import cases_of
from enginesmith.tasks.graph import io
from enginesmith.tasks.settings import ExportSettings, InputSettings

if TYPE_CHECKING:
    from torch import nn

SOURCE_LIMITS = Limits(seconds=120, memory=12 << 30)
_FINDINGS = TypeAdapter(list[Finding])


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a model.

    Attributes:
        findings: worst first.
        feeds: what the experiment compared, in words; empty when there was none.
        seconds: what the experiment took.
    """

    findings: tuple[Finding, ...]
    feeds: tuple[str, ...] = ()
    seconds: float = 0.0


def judge(
    subject: nn.Module | Path,
    dataset: Dataset,
    inputs: Mapping[str, InputSettings],
    settings: ExportSettings,
    backends: Iterable[str],
    roots: Sequence[Path] = (),
    gpus: Sequence[Gpu] = (),
) -> Verdict:
    """All findings on a module (source, graph and experiment) or on an ONNX file (graph and experiment).

    Args:
        subject: a module in eval mode, or the path of an ONNX file, which is opened in a child process under limits.
        dataset: samples that the experiment runs on.
        inputs: declared inputs.
        settings: opset, exporter, tolerance.
        backends: whose parsers are asked.
        roots: folders of the user's own source; call it inside `importable` of the first.
        gpus: those that hardware advice is about.

    Raises:
        EnginesmithError: it could not be judged: inputs that do not fit forward, a file that is no ONNX.
    """
    from enginesmith.tasks.export.judge import judge_module

    with tempfile.TemporaryDirectory(prefix="enginesmith-lint-") as scratch:
        folder = Path(scratch)
        if not isinstance(subject, Path):
            judged = judge_module(subject, dataset, inputs, settings, backends, folder, roots)
            findings = [*judged.findings, *_advice(folder, inputs, gpus)]
            return Verdict(tuple(in_order(findings)), judged.cases, judged.seconds)
        adopted = adopt_apart(subject, folder, cases_of(dataset, inputs), inputs, settings.tolerance)
        findings = list(adopted.findings)
        if not blocking(findings):
            findings += check_operators(folder, backends)
            findings += _advice(folder, inputs, gpus)
        return Verdict(tuple(in_order(findings)), adopted.cases, adopted.seconds)


def _advice(folder: Path, inputs: Mapping[str, InputSettings], gpus: Sequence[Gpu]) -> list[Finding]:
    """Advice for each GPU on the graph in a folder; none where no graph was written."""
    if not gpus or not (folder / io.MODEL).exists():
        return []
    model = io.load(folder)
    found = [f for gpu in gpus for f in graph_findings(model, inputs, gpu=gpu)]
    return [f for f in found if f.rule.startswith("hardware/")]


def lint_onnx(path: Path, backends: Iterable[str]) -> list[Finding]:
    """What an ONNX file shows without declared inputs and without running it.

    ONNX's checker, ONNX Runtime's loader, the graph rules with all dynamic dimensions left free, and the parsers of the
    backends that are installed here. The file is opened in a child process under limits.

    Args:
        path: the file; external data lies beside it.
        backends: whose findings are wanted and whose parsers are asked.

    Raises:
        EnginesmithError: not a readable ONNX file, external data outside its folder, or opening it crashed, hung or
            needed more than `LIMITS`.
    """
    wanted = sorted(set(backends))
    _check_readable(path, "an .onnx file")
    if path.stat().st_size > _PROTOBUF:
        raise EnginesmithError(
            f"it has {path.stat().st_size} bytes, and protobuf ends at {_PROTOBUF}",
            where=str(path),
            hint="save the weights as external data",
        )
    with tempfile.TemporaryDirectory(prefix="enginesmith-lint-") as scratch:
        answer = _apart(judge_file, LIMITS, path, source=str(path), out=scratch, backends=wanted)
        findings = _FINDINGS.validate_python(answer)
        if (Path(scratch) / io.MODEL).exists():
            findings += check_operators(Path(scratch), wanted)
    return in_order(findings)


_PROTOBUF = (1 << 31) - 1
"""Bytes of the largest protobuf message."""


def judge_file(source: str, out: str, backends: list[str]) -> list[dict[str, Any]]:
    """The part of `lint_onnx` that runs in the child: findings as JSON; `model.onnx` in the pipeline's form in `out`.

    Raises:
        EnginesmithError: as `read_foreign`.
    """
    model = read_foreign(Path(source))
    findings = check_foreign(Path(source))
    if not blocking(findings):
        tidy(model)
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
        findings += graph_findings(model, {}, backends)
        io.save(_named(model), Path(out))
    return [finding.model_dump(mode="json") for finding in findings]


def _named(model: ir.Model) -> ir.Model:
    """The model with a name for its graph, which vendors' parsers expect."""
    model.graph.name = model.graph.name or "graph"
    return model


def lint_source(target: str, file: Path, name: str) -> tuple[list[Finding], list[str]]:
    """What Python source shows without weights, inputs or an export: the source rules, as suspicions.

    Args:
        target: ``module:factory``, or anything else for a file.
        file: the source file; its folder is importable.
        name: the class or function; all modules that the file defines when empty.

    Returns:
        the findings, and a sentence for each thing that could not be judged.

    Raises:
        EnginesmithError: there is no module to judge: no such file or name, importing or building failed, took longer
            or needed more than `SOURCE_LIMITS`, or what was built has no forward.
    """
    module = "" if file.suffix == ".py" and target.partition(":")[0].endswith(".py") else target.partition(":")[0]
    if not module:
        _check_readable(file, "a Python file, a class in one, or module:factory")
    answer = _apart(judge_source, SOURCE_LIMITS, file, file=str(file), module=module, name=name, root=str(Path.cwd()))
    return _FINDINGS.validate_python(answer["findings"]), list(answer["notes"])


def judge_source(file: str, module: str, name: str, root: str) -> dict[str, Any]:
    """The part of `lint_source` that runs in the child: findings and notes as JSON."""
    from enginesmith.tasks.export.built import build_from_source

    built, notes = build_from_source(Path(file), module, name, Path(root))
    from enginesmith.tasks.export.built import free_inputs
    from enginesmith.tasks.firewalls.source import check_source

    roots = (Path(root) if module else Path(file).parent,)
    findings = dict.fromkeys(f for one in built for f in check_source(one, free_inputs(one), roots))
    return {"findings": [f.model_dump(mode="json") for f in findings], "notes": notes}


def _check_readable(path: Path, wanted: str) -> None:
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "is no plain file" if path.exists() else "does not exist"
        raise EnginesmithError(found, where=str(path), hint=f"give {wanted}")


def _apart(function: Any, limits: Limits, path: Path, **arguments: Any) -> Any:
    try:
        return child.call(function, limits=limits, what=f"judging {path.name}", **arguments)
    except ChildError as error:
        raise EnginesmithError(error.found, where=str(path), details=error.details) from error
