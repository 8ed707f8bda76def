"""Reports turn into lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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
