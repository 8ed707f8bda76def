"""Turns what lint found on its targets into one report: what is counted, what fails, and its JSON form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from enginesmith.tasks.firewalls.findings import Finding, Severity, failing

Kind = Literal["pipeline", "onnx", "source"]
FailOn = Literal["error", "warning", "advice", "never"]


class Experiment(BaseModel):
    """What running the graph beside its original cost.

    Attributes:
        feeds: the feeds that were compared, in words.
        seconds: wall time.
    """

    model_config = ConfigDict(frozen=True)

    feeds: tuple[str, ...]
    seconds: float


class Problem(BaseModel):
    """Why a target could not be judged.

    Attributes:
        message: one sentence.
        where: file:line or file; empty if unknown.
        hint: what to do.
    """

    model_config = ConfigDict(frozen=True)

    message: str
    where: str = ""
    hint: str = ""

    @property
    def line(self) -> str:
        """All of it on one line."""
        parts = [f"{self.where}: " if self.where else "", self.message, f" ({self.hint})" if self.hint else ""]
        return " ".join("".join(parts).split())


class Linted(BaseModel):
    """One target.

    Attributes:
        target: as it was named.
        kind: what it is.
        file: the file itself, absolute: where a finding without a source file belongs.
        folder: what the findings' files are relative to, absolute.
        findings: worst first.
        notes: what could not be judged, and why that is no failure.
        experiment: None where none was run.
        seconds: wall time of all.
        problem: None when it was judged.
    """

    model_config = ConfigDict(frozen=True)

    target: str
    kind: Kind
    file: Path
    folder: Path
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    experiment: Experiment | None = None
    seconds: float = 0.0
    fail_on: FailOn = "error"
    problem: Problem | None = None

    @property
    def failing(self) -> list[Finding]:
        """What makes lint fail."""
        return failing(self.findings, self.fail_on)

    def source(self, finding: Finding) -> Path | None:
        """The source file of a finding, when it is at hand."""
        import sysconfig

        if not finding.file:
            return None
        roots = [self.folder, Path.cwd(), *(Path(sysconfig.get_path(n)) for n in ("purelib", "platlib"))]
        return next((root / finding.file for root in roots if (root / finding.file).is_file()), None)


def exit_code(linted: Sequence[Linted]) -> int:
    """0 when nothing fails, 1 when something does, 2 when a target could not be judged."""
    if any(one.problem for one in linted):
        return 2
    return 1 if any(one.failing for one in linted) else 0


def summary(findings: Sequence[Finding]) -> str:
    """How many of which severity, in words."""
    counts = Counter("waived" if f.waived else f.severity for f in findings)
    words: list[Severity | Literal["waived"]] = ["error", "warning", "advice", "waived"]
    plural = {"error": "errors", "warning": "warnings"}
    said = [f"{counts[w]} {plural.get(w, w) if counts[w] != 1 else w}" for w in words if counts[w]]
    return ", ".join(said) or "nothing found"


class _Target(BaseModel):
    target: str
    kind: Kind
    fail_on: FailOn
    failed: bool
    findings: tuple[Finding, ...]
    identities: tuple[str, ...]
    notes: tuple[str, ...]
    experiment: Experiment | None
    seconds: float
    problem: Problem | None


class _Report(BaseModel):
    version: Literal[1] = 1
    exit_code: int
    targets: tuple[_Target, ...]


def as_json(linted: Sequence[Linted]) -> str:
    """The report as one JSON object on one line; docs/firewalls.md describes it."""
    targets = tuple(
        _Target(
            target=one.target,
            kind=one.kind,
            fail_on=one.fail_on,
            failed=bool(one.failing),
            findings=one.findings,
            identities=tuple(f.identity for f in one.findings),
            notes=one.notes,
            experiment=one.experiment,
            seconds=round(one.seconds, 3),
            problem=one.problem,
        )
        for one in linted
    )
    return _Report(exit_code=exit_code(linted), targets=targets).model_dump_json()
