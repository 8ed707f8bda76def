"""Turns what a firewall rule saw into a finding: which rule, how bad, where, what happens, how to fix it."""

from __future__ import annotations

import hashlib
import math
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, field_validator

from enginesmith.tasks.errors import EnginesmithError

FINDINGS = "findings.json"

Severity = Literal["error", "warning", "advice"]
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "advice": 2}


class Finding(BaseModel):
    """One thing that a rule found.

    Attributes:
        rule: the rule's id, ``firewall/rule``; docs/rules/ has a page for each.
        severity: `error` stops the export (or, with `backend`, only that backend), `warning` and `advice` do not.
        message: what was found, with the measured number where there is one.
        effect: what happens if it is ignored; empty when the rule's page says all there is.
        measured: the figure that was measured, in the unit that the message names; None where nothing was measured or
            the figure is not finite (the message says so then).
        file: source file, relative to the pipeline's folder or to the folder of installed packages; empty if unknown.
        line: line in `file`, 1-based; 0 if unknown.
        node: name of the ONNX node; empty if it is not about one.
        module: dotted path of the module below the model (``features.0.1``).
        backend: the backend that it is about; empty when it is about all of them.
        versions: the backend's releases that it is about (``8.6``); empty when it is about all.
        hint: what to do.
        waived: the reason of the waiver that covers it: it is shown, does not fail and does not block. Empty otherwise.
    """

    model_config = ConfigDict(frozen=True)

    rule: str
    severity: Severity
    message: str
    effect: str = ""
    measured: float | None = None
    file: str = ""
    line: int = 0
    node: str = ""
    module: str = ""
    backend: str = ""
    versions: tuple[str, ...] = ()
    hint: str = ""
    waived: str = ""

    @field_validator("measured")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    @property
    def identity(self) -> str:
        """Sixteen hex digits that stay the same when lines move and figures change; alike findings share them."""
        message = re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", self.message)
        parts = (self.rule, self.backend, self.file, self.module, self.node, message)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    @property
    def where(self) -> str:
        """The place in one phrase: source line, module path, node, as far as known."""
        source = f"{self.file}:{self.line}" if self.file and self.line else self.file
        parts = (source, f"module {self.module}" if self.module else "", f"node {self.node}" if self.node else "")
        return ", ".join(part for part in parts if part)

    def __str__(self) -> str:
        head = f"{'waived ' if self.waived else ''}{self.severity} {self.rule}"
        head += f" [{self.backend}]" if self.backend else ""
        place = f" {self.where}:" if self.where else ":"
        return f"{head}{place} {self.message}"


_MANY = TypeAdapter(tuple[Finding, ...])


class BlockedError(EnginesmithError):
    """The firewalls stopped an export.

    Attributes:
        findings: all findings, the blocking ones first.
    """

    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, findings: Iterable[Finding], *, what: str, key: str = "") -> BlockedError:
        """The first blocking finding as the error, the others as its details."""
        ordered = tuple(in_order(findings))
        first, *rest = blocking(ordered)
        lines = [line for f in rest for line in (str(f), f"  hint: {f.hint}" if f.hint else "") if line]
        error = cls(
            f"{what} is blocked by {first.rule}: {first.message}",
            where=first.where,
            key=key,
            hint=first.hint,
            details=lines,
        )
        error.findings = ordered
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return (*super().__reduce__()[:2], {"findings": self.findings})


def blocking(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop the export for every target."""
    return [f for f in findings if f.severity == "error" and not f.backend and not f.waived]


def refused_backends(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """The blocking findings of single backends, by backend: these targets cannot be built."""
    refused: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.severity == "error" and finding.backend and not finding.waived:
            refused.setdefault(finding.backend, []).append(finding)
    return refused


def failing(findings: Iterable[Finding], fail_on: Severity | Literal["never"]) -> list[Finding]:
    """Those at or above a severity that no waiver covers, single backends' included."""
    if fail_on == "never":
        return []
    return [f for f in findings if _ORDER[f.severity] <= _ORDER[fail_on] and not f.waived]


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first, then by place; each once."""
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda f: (_ORDER[f.severity], f.backend, f.file, f.line, f.rule, f.node, f.message))


def save_findings(findings: Iterable[Finding], folder: Path) -> Path:
    """Write findings.json."""
    path = folder / FINDINGS
    path.write_bytes(_MANY.dump_json(tuple(in_order(findings)), indent=1) + b"\n")
    return path


def load_findings(folder: Path) -> tuple[Finding, ...]:
    """Read findings.json of an export's or adoption's folder."""
    return _MANY.validate_json((folder / FINDINGS).read_bytes())


def readable_path(file: str, roots: Sequence[Path] = ()) -> str:
    """A source file relative to one of `roots`, else to an import folder, else its name: never a machine's path."""
    path = Path(file)
    packages = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    for root in [*roots, *packages, *(Path(p) for p in sys.path if p)]:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def is_tooling(file: str) -> bool:
    """Whether a source file belongs to torch, to the exporters, to Python itself or to this program."""
    path = Path(file)
    if not path.is_absolute() or path.is_relative_to(_OURS):
        return True
    for name in ("purelib", "platlib"):
        packages = Path(sysconfig.get_path(name))
        if path.is_relative_to(packages):
            return path.relative_to(packages).parts[0] in _TOOLS
    return path.is_relative_to(Path(sysconfig.get_path("stdlib")))


_OURS = Path(__file__).resolve().parent.parent
_TOOLS = {"torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "sympy", "numpy"}
