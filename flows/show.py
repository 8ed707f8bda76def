"""Reports turn into lines for people."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.tasks.errors import EnginesmithError

if TYPE_CHECKING:
    from enginesmith.tasks.firewalls.report import Linted
    from enginesmith.tasks.firewalls.rules import Rule


def report_lines(report: Mapping[str, Any], *, indent: str = "", most: int = 12) -> Iterator[str]:
    """A stage's report as indented lines; long lists are cut and say how much was left out."""
    for name, value in report.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from report_lines(dict(list(value.items())[:most]), indent=indent + "  ", most=most)
            if len(value) > most:
                yield f"{indent}  ... and {len(value) - most} more"
        elif isinstance(value, list):
            yield f"{indent}{name}: {len(value)}" if value else f"{indent}{name}: none"
            for item in value[:most]:
                yield f"{indent}  {_flat(item)}"
            if len(value) > most:
                yield f"{indent}  ... and {len(value) - most} more"
        else:
            yield f"{indent}{name}: {_flat(value)}"


def _flat(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_flat(item)}" for name, item in value.items() if item not in (None, "", [], {}))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(_flat(item) for item in value)
    return str(value)


def waived_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The waived errors of an export or adoption, one a line: what a compile accepted and why."""
    for finding in report.get("findings", ()):
        if finding.get("waived") and finding["severity"] == "error":
            backend = f" [{finding['backend']}]" if finding["backend"] else ""
            yield f"waived: {finding['rule']}{backend}: {finding['message']} (reason: {finding['waived']})"


def write_report(linted: Sequence[Linted], form: str, output: Path | None) -> None:
    """What lint found as text, JSON or SARIF, on stdout or whole into a file.

    Raises:
        EnginesmithError: the file cannot be written.
    """
    if form == "text" and output is None:
        from rich.console import Console

        from enginesmith.tasks.firewalls.text import print_linted

        print_linted(linted, Console(highlight=False))
        return
    text = _report(linted, form)
    if output is None:
        click.echo(text)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{output.name}-", dir=output.parent)
        with contextlib.ExitStack() as undo:
            undo.callback(Path(scratch).unlink, missing_ok=True)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            Path(scratch).chmod(0o644)
            Path(scratch).replace(output)
    except OSError as error:
        raise EnginesmithError(f"it cannot be written: {error.strerror}", where=str(output)) from error


def _report(linted: Sequence[Linted], form: str) -> str:
    if form == "json":
        from enginesmith.tasks.firewalls.report import as_json

        return as_json(linted)
    if form == "sarif":
        from enginesmith.tasks.firewalls.sarif import as_sarif, repository_root

        return as_sarif(linted, repository_root(Path.cwd()))
    from rich.console import Console

    from enginesmith.tasks.firewalls.text import print_linted

    page = io.StringIO()
    print_linted(linted, Console(file=page, highlight=False, width=120))
    return page.getvalue().rstrip()


def show_rule(rule: Rule) -> None:
    """One rule's page, rendered for the terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    Console(highlight=False).print(Markdown(rule.text))


def show_rules() -> None:
    """All rules, one a line: id, worst severity, what it finds."""
    from enginesmith.tasks.firewalls.rules import catalogue

    rules = catalogue().values()
    width = max(len(rule.id) for rule in rules)
    for rule in rules:
        click.echo(f"{rule.id:<{width}}  {rule.level:<7}  {rule.summary}")
