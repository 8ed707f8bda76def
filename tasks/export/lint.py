"""Turns a module or an ONNX file into findings, without publishing anything: what `enginesmith lint` shows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.export.foreign import adopt_apart
from enginesmith.tasks.export.judge import judge_module
from enginesmith.tasks.firewalls.findings import Finding, blocking, in_order
from enginesmith.tasks.firewalls.operators import check_operators
from enginesmith.tasks.firewalls.samples import cases_of
from enginesmith.tasks.settings import ExportSettings, InputSettings

if TYPE_CHECKING:
    from torch import nn


def lint(
    subject: nn.Module | Path,
    dataset: Dataset,
    inputs: Mapping[str, InputSettings],
    settings: ExportSettings,
    backends: Iterable[str],
    roots: Sequence[Path] = (),
) -> list[Finding]:
    """All findings on a module (source, graph and experiment) or on an ONNX file (graph and experiment), worst first.

    Args:
        subject: a module in eval mode, or the path of an ONNX file, which is opened in a child process under limits.
        dataset: samples that the experiment runs on.
        inputs: declared inputs.
        settings: opset, exporter, tolerance.
        backends: whose parsers are asked.
        roots: folders of the user's own source; call it inside `importable` of the first.

    Raises:
        EnginesmithError: it could not be judged: inputs that do not fit forward, a file that is no ONNX.
    """
    with tempfile.TemporaryDirectory(prefix="enginesmith-lint-") as scratch:
        folder = Path(scratch)
        if not isinstance(subject, Path):
            return list(judge_module(subject, dataset, inputs, settings, backends, folder, roots).findings)
        findings = list(adopt_apart(subject, folder, cases_of(dataset, inputs), inputs, settings.tolerance).findings)
        if not blocking(findings):
            findings += check_operators(folder, backends)
        return in_order(findings)
