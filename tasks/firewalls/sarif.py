"""Turns what lint found into SARIF 2.1.0 as GitHub code scanning takes it.

The format: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. What GitHub reads of it and how much:
https://docs.github.com/en/code-security/reference/code-scanning/sarif-files/sarif-support
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from enginesmith.tasks.firewalls.findings import Finding, Severity, in_order
from enginesmith.tasks.firewalls.report import Linted, exit_code
from enginesmith.tasks.firewalls.rules import Rule, catalogue

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"
MAX_RESULTS = 25_000
"""Results of one run that GitHub takes; it shows 5000 of them, by severity."""
MAX_TEXT = 1024
"""Characters of a rule's descriptions that GitHub keeps."""

_LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "advice": "note"}
_PROBLEMS: dict[Severity, str] = {"error": "error", "warning": "warning", "advice": "recommendation"}


def as_sarif(linted: Sequence[Linted], root: Path) -> str:
    """One SARIF log with one run.

    Args:
        linted: the targets.
        root: the repository's folder; places below it are given relative to it.
    """
    pairs = [(one, finding) for one in linted for finding in one.findings]
    order = {finding: index for index, finding in enumerate(in_order(f for _, f in pairs))}
    pairs.sort(key=lambda pair: order[pair[1]])
    rules = [rule for rule in catalogue().values() if any(f.rule == rule.id for _, f in pairs)]
    indices = {rule.id: index for index, rule in enumerate(rules)}
    seen: Counter[str] = Counter()
    results = [_result(one, finding, root, indices, seen) for one, finding in pairs[:MAX_RESULTS]]
    notes = [_notification("error", one.problem.line) for one in linted if one.problem]
    notes += [_notification("note", f"{one.target}: {note}") for one in linted for note in one.notes]
    if len(pairs) > MAX_RESULTS:
        notes.append(_notification("warning", f"{len(pairs) - MAX_RESULTS} findings were left off"))
    run = {
        "tool": {
            "driver": {
                "name": "enginesmith",
                "semanticVersion": metadata.version("enginesmith"),
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "originalUriBaseIds": {ROOT: {"description": {"text": "the repository's root"}}},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": not any(one.problem for one in linted),
                "exitCode": exit_code(linted),
                "toolExecutionNotifications": notes,
            }
        ],
        "results": results,
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False)


def repository_root(start: Path) -> Path:
    """The folder with `.git` at or above a folder, or the folder itself."""
    return next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), start)


def _rule(rule: Rule) -> dict[str, Any]:
    plain = " ".join(rule.what.split())
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.id.replace("/", "-").split("-")),
        "shortDescription": {"text": rule.summary[:MAX_TEXT]},
        "fullDescription": {"text": plain[:MAX_TEXT]},
        "help": {
            "text": f"{plain}\n\nIf ignored: {rule.ignored}\n\nWhat to do: {rule.remedy}",
            "markdown": rule.text,
        },
        "defaultConfiguration": {"level": _LEVELS[rule.level]},
        "properties": {
            "tags": [rule.id.partition("/")[0]],
            "problem.severity": _PROBLEMS[rule.level],
            "precision": "medium" if rule.judge == "source" else "high",
        },
    }


def _result(one: Linted, finding: Finding, root: Path, indices: dict[str, int], seen: Counter[str]) -> dict[str, Any]:
    file, line, code = _place(one, finding, root)
    more = [
        f"If ignored: {finding.effect}" if finding.effect else "",
        f"Fix: {finding.hint}" if finding.hint else "",
    ]
    backend = f"[{finding.backend}] " if finding.backend else ""
    mark = hashlib.sha256(f"{finding.identity}\0{''.join(code.split())}".encode()).hexdigest()[:16]
    seen[mark] += 1
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": "\n".join([backend + finding.message, *filter(None, more)])},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": file, "uriBaseId": ROOT},
                    "region": {"startLine": line, **_columns(code)},
                },
                **_logical(finding),
            }
        ],
        "partialFingerprints": {"primaryLocationLineHash": f"{mark}:{seen[mark]}"},
    }
    if finding.rule in indices:
        result["ruleIndex"] = indices[finding.rule]
    if finding.waived:
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": finding.waived}]
    if finding.measured is not None:
        result["properties"] = {"measured": finding.measured}
    return result


def _place(one: Linted, finding: Finding, root: Path) -> tuple[str, int, str]:
    """URI relative to the root, line, and the line's text.

    What has no source in the repository (a node; a line of an installed package) is put at the target itself, since
    code scanning shows only files of the repository.
    """
    source = one.source(finding)
    installed = Path(sysconfig.get_path("purelib"))
    if source is not None and source.resolve().is_relative_to(root) and not source.is_relative_to(installed):
        lines = source.read_text(encoding="utf-8", errors="replace").splitlines() if finding.line else []
        code = lines[finding.line - 1] if 0 < finding.line <= len(lines) else ""
        return _uri(source.resolve(), root), max(finding.line, 1), code
    return _uri(one.file, root), 1, ""


def _uri(file: Path, root: Path) -> str:
    path = file.relative_to(root) if file.is_relative_to(root) else Path(file.name)
    return quote(path.as_posix())


def _columns(code: str) -> dict[str, int]:
    """The code of a line without its indentation; columns count from 1, the last one is exclusive."""
    bare = code.strip()
    if not bare:
        return {}
    first = len(code) - len(code.lstrip()) + 1
    return {"startColumn": first, "endColumn": first + len(bare)}


def _logical(finding: Finding) -> dict[str, Any]:
    """The module's path, the graph's node and the source line outside the repository."""
    found = [
        {"fullyQualifiedName": name, "kind": kind}
        for name, kind in ((finding.module, "module"), (finding.node, "object"), (finding.file, "resource"))
        if name
    ]
    return {"logicalLocations": found} if found else {}


def _notification(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": text}}
