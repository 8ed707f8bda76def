"""Turns what lint found into text for people: the line it is about, what happens if it is ignored, how to fix it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from enginesmith.tasks.firewalls.findings import Finding, Severity
from enginesmith.tasks.firewalls.report import Linted, summary

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "advice": "bold cyan"}


def print_linted(linted: Sequence[Linted], console: Console) -> None:
    """Every finding with its source line, then one line per target."""
    for one in linted:
        for finding in one.findings:
            _print_finding(one, finding, console)
        for note in one.notes:
            _labelled(console, "note", note, "dim")
        if one.problem is None:
            _print_summary(one, console)


def _print_finding(one: Linted, finding: Finding, console: Console) -> None:
    style = "dim" if finding.waived else _STYLES[finding.severity]
    backend = " ".join([finding.backend, ", ".join(finding.versions)]).strip()
    head = Text.assemble(
        (f"{'waived ' if finding.waived else ''}{finding.severity}[{finding.rule}]", style),
        f" {f'{backend}: ' if backend else ''}{finding.message}",
    )
    console.print(head, soft_wrap=True)
    place = finding.where or one.target
    console.print(Text.assemble(("  --> ", "blue"), place), soft_wrap=True)
    _print_excerpt(one, finding, style, console)
    if finding.waived:
        _labelled(console, "waived", finding.waived, "dim")
    else:
        _labelled(console, "ignored", finding.effect, "bold")
        _labelled(console, "fix", finding.hint, "bold green")
    console.print()


def _print_excerpt(one: Linted, finding: Finding, style: str, console: Console) -> None:
    """The source line, its code underlined."""
    file = one.source(finding) if finding.line else None
    if file is None:
        return
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    if not 0 < finding.line <= len(lines):
        return
    code = lines[finding.line - 1].expandtabs(4).rstrip()[:160]
    bare = code.lstrip()
    number = str(finding.line)
    margin = " " * len(number)
    console.print(Text(f"{margin} |", "blue"))
    console.print(Text.assemble((f"{number} | ", "blue"), code), soft_wrap=True)
    marks = " " * (len(code) - len(bare)) + "^" * len(bare)
    console.print(Text.assemble((f"{margin} | ", "blue"), (marks, style)), soft_wrap=True)


def _labelled(console: Console, label: str, text: str, style: str) -> None:
    if text:
        console.print(Text.assemble((f"  = {label}: ", style), text), soft_wrap=True)


def _print_summary(one: Linted, console: Console) -> None:
    tried = one.experiment
    ran = f"; experiment: {len(tried.feeds)} feeds, {tried.seconds:.1f} s" if tried else ""
    style = "bold red" if one.failing else ("bold green" if not one.findings else "bold")
    line = Text.assemble(one.target, ": ", (summary(one.findings), style), f" ({one.seconds:.1f} s{ran})")
    console.print(line, soft_wrap=True)
