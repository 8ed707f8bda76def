"""Turns findings and the waivers of a pipeline.yaml into findings of which the accepted ones carry their reason."""

from __future__ import annotations

import datetime
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.rules import catalogue, find_rule
from enginesmith.tasks.settings import WaiverSettings

_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)")
KEY = "lint.waivers"


def active(waivers: Iterable[WaiverSettings], today: datetime.date) -> tuple[WaiverSettings, ...]:
    """Those that still hold: `until` is the last day."""
    return tuple(w for w in waivers if w.until is None or today <= w.until)


def covers(waiver: WaiverSettings, finding: Finding) -> bool:
    """Whether a waiver is about a finding: every pattern that it gives matches."""
    file, line = waiver.file, 0
    if match := _LINE.fullmatch(file):
        file, line = match["file"], int(match["line"])
    pairs = (
        (waiver.rule, finding.rule),
        (file, finding.file),
        (waiver.module, finding.module),
        (waiver.node, finding.node),
        (waiver.backend, finding.backend),
    )
    return all(not p or p == text or fnmatch.fnmatchcase(text, p) for p, text in pairs) and line in (0, finding.line)


def waive(findings: Iterable[Finding], waivers: Sequence[WaiverSettings]) -> list[Finding]:
    """The findings, with the reason of the first waiver that covers each. Waivers do not waive what waivers report."""
    out = []
    for finding in findings:
        found = next((w for w in waivers if covers(w, finding)), None)
        spared = found is None or finding.rule.startswith("waivers/")
        out.append(finding if spared or found is None else finding.model_copy(update={"waived": found.reason}))
    return out


def check_waivers(
    waivers: Sequence[WaiverSettings],
    findings: Sequence[Finding],
    today: datetime.date,
    place: Callable[[str], tuple[str, int]],
) -> list[Finding]:
    """`waivers/unused`: a waiver covers nothing that was found. `waivers/expired`: its last day has passed.

    Args:
        waivers: all of the file.
        findings: all that was found, waived or not.
        today: the day to judge by.
        place: file and line of a dotted key of pipeline.yaml.
    """
    out = []
    for index, waiver in enumerate(waivers):
        file, line = place(f"{KEY}.{index}")
        if waiver.until is not None and today > waiver.until:
            out.append(
                Finding(
                    rule="waivers/expired",
                    severity="warning",
                    message=f"the waiver of {_words(waiver)} held until {waiver.until}",
                    effect="what it covered counts again",
                    file=file,
                    line=line,
                    hint="mend what it covers, or look at it again and set a new day",
                )
            )
        elif not any(covers(waiver, finding) for finding in findings):
            out.append(
                Finding(
                    rule="waivers/unused",
                    severity="warning",
                    message=f"the waiver of {_words(waiver)} covers nothing that was found",
                    effect="it would hide the next finding of this kind at this place",
                    file=file,
                    line=line,
                    hint="remove it, or correct its place",
                )
            )
    return out


def check_rules(waivers: Sequence[WaiverSettings]) -> None:
    """See that every waiver's rule is one, or a pattern that some rule matches.

    Raises:
        EnginesmithError: with the key of the waiver that names none.
    """
    for index, waiver in enumerate(waivers):
        known_pattern(waiver.rule, key=f"{KEY}.{index}.rule")


def known_pattern(pattern: str, *, key: str) -> None:
    """See that a rule's name or pattern matches a rule.

    Raises:
        EnginesmithError: it matches none; the nearest names are in the hint.
    """
    if any(fnmatch.fnmatchcase(rule, pattern) for rule in catalogue()):
        return
    try:
        find_rule(pattern)
    except EnginesmithError as error:
        raise EnginesmithError(f"no rule matches {pattern!r}", key=key, hint=error.hint) from None
    raise EnginesmithError(f"no rule matches {pattern!r}", key=key, hint=f"write {find_rule(pattern).id}")


def _words(waiver: WaiverSettings) -> str:
    places = {"file": waiver.file, "module": waiver.module, "node": waiver.node, "backend": waiver.backend}
    return " at ".join([waiver.rule, ", ".join(f"{k} {v}" for k, v in places.items() if v)]).removesuffix(" at ")
