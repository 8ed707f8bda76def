"""Turns the pages of docs/rules into a catalogue of rules: what each is, how bad, what happens and what to do."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.findings import Severity

INDEX = "README.md"
JUDGES = ("source", "graph", "export", "settings", "sample")
"""What a page's `Judged by` line may name: how the rule's examples are run (see docs/rules/README.md)."""

_FORM = re.compile(
    r"# (?P<id>[a-z][a-z-]*/[a-z0-9-]+)\n\n"
    r"Severity: (?P<severity>[^\n]+)\.\n"
    r"Judged by: (?P<judge>[a-z]+)\.\n\n"
    r"(?P<what>(?!\*\*|#).+?)\n\n"
    r"\*\*If ignored\.\*\* (?P<ignored>.+?)\n\n"
    r"\*\*What to do\.\*\* (?P<remedy>.+?)\n\n"
    r"## Bad\n\n(?P<bad>.+?)\n\n"
    r"## Good\n\n(?P<good>.+?)\n*",
    re.DOTALL,
)
_TABLE = re.compile(r"\| rule \| severity \| what it finds \|\n(\|[^\n]*\n)+")


@dataclass(frozen=True)
class Rule:
    """One page of docs/rules.

    Attributes:
        id: ``firewall/rule``.
        severity: the page's words, of which the first is the severity.
        judge: what its examples are judged by, one of `JUDGES`.
        what: what the rule finds, Markdown.
        ignored: what happens if it is ignored, Markdown.
        remedy: what to do, Markdown.
        bad: an example on which it reports, Markdown.
        good: the same, mended, on which it does not.
        text: the whole page.
    """

    id: str
    severity: str
    judge: str
    what: str
    ignored: str
    remedy: str
    bad: str
    good: str
    text: str

    @property
    def level(self) -> Severity:
        """The worst severity with which it reports."""
        return next(level for level in get_args(Severity) if self.severity.startswith(level))

    @property
    def summary(self) -> str:
        """The first sentence of `what`, on one line."""
        return _first_sentence(self.what)

    @property
    def effect(self) -> str:
        """The first sentence of `ignored`, on one line."""
        return _first_sentence(self.ignored)


def _first_sentence(markdown: str) -> str:
    """Without links, on one line."""
    plain = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", plain, maxsplit=1)[0].rstrip(":")


def parse_page(text: str, name: str) -> Rule:
    """One page as a rule.

    Args:
        text: the page.
        name: the file's name, which must be the rule's id with `-` for `/`.

    Raises:
        EnginesmithError: the page has not the form that docs/rules/README.md describes.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        parts = (
            "# rule/id",
            "Severity: x.",
            "Judged by: x.",
            "**If ignored.**",
            "**What to do.**",
            "## Bad",
            "## Good",
        )
        absent = [part for part in parts if part.split(" ")[0] not in text]
        raise EnginesmithError(
            f"{name} has not the form of a rule's page" + (f": it lacks {', '.join(absent)}" if absent else ""),
            hint="docs/rules/README.md describes the form",
        )
    rule = Rule(**match.groupdict(), text=text)
    if name != f"{rule.id.replace('/', '-')}.md":
        raise EnginesmithError(f"{name} is the page of {rule.id}: it must be called {rule.id.replace('/', '-')}.md")
    if rule.severity.split()[0].rstrip(",;:") not in get_args(Severity) or rule.judge not in JUDGES:
        raise EnginesmithError(
            f"{name}: severity {rule.severity!r} or judge {rule.judge!r} is none of ours",
            hint=f"severities: {', '.join(get_args(Severity))}; judges: {', '.join(JUDGES)}",
        )
    return rule


@functools.cache
def catalogue() -> dict[str, Rule]:
    """All rules by id, sorted.

    Raises:
        EnginesmithError: a page has not the form of one.
    """
    folder = importlib.resources.files("enginesmith.rules")
    pages = [p for p in folder.iterdir() if p.name.endswith(".md") and p.name != INDEX]
    rules = [parse_page(page.read_text(encoding="utf-8"), page.name) for page in pages]
    return {rule.id: rule for rule in sorted(rules, key=lambda rule: rule.id)}


def find_rule(name: str) -> Rule:
    """A rule by its id; `-` for `/` is understood.

    Raises:
        EnginesmithError: there is none of this name; the nearest ones are named.
    """
    rules = catalogue()
    for rule in rules.values():
        if name in (rule.id, rule.id.replace("/", "-")):
            return rule
    short = {rule.partition("/")[2]: rule for rule in rules}
    close = dict.fromkeys(
        [
            *difflib.get_close_matches(name, rules, n=3, cutoff=0.5),
            *(short[c] for c in difflib.get_close_matches(name.rpartition("/")[2], short, n=2, cutoff=0.6)),
        ]
    )
    raise EnginesmithError(
        f"there is no rule {name!r}",
        hint=f"did you mean {', '.join(close)}?" if close else "enginesmith explain --list names them all",
    )


def index_table(rules: Iterable[Rule]) -> str:
    """The table of docs/rules/README.md."""
    rows = [f"| [{r.id}]({r.id.replace('/', '-')}.md) | {r.severity} | {r.summary} |" for r in rules]
    return "\n".join(["| rule | severity | what it finds |", "|---|---|---|", *rows]) + "\n"


def write_index(folder: Path) -> None:
    """Bring the table of a folder's README up to its pages: `python -m enginesmith.tasks.firewalls.rules docs/rules`.

    Raises:
        EnginesmithError: a page has not the form of one, or the README has no table.
    """
    pages = [page for page in sorted(folder.glob("*.md")) if page.name != INDEX]
    rules = [parse_page(page.read_text(encoding="utf-8"), page.name) for page in pages]
    index = folder / INDEX
    text, count = _TABLE.subn(lambda _: index_table(sorted(rules, key=lambda r: r.id)), index.read_text())
    if count != 1:
        raise EnginesmithError(f"{index} has no table of rules")
    index.write_text(text)


if __name__ == "__main__":
    write_index(Path(sys.argv[1]))
