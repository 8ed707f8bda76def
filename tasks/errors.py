"""The error that every stage raises: what was found, where, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable


class EnginesmithError(Exception):
    """A failure that the user can act on.

    Args:
        found: what is wrong, one sentence with the offending value.
        where: the place, as precise as known: ``file:line``, a tensor or a node name.
        key: the key of pipeline.yaml that is at fault, dotted (``model.checkpoint``); the command line adds file:line.
        hint: what to do next.
        details: further lines (a list of keys, a child's log); the command line cuts them to one screen.

    Attributes:
        stage: the stage in which it happened, set on its way up; empty outside of stages.
    """

    stage: str = ""

    def __init__(
        self, found: str, *, where: str = "", key: str = "", hint: str = "", details: Iterable[str] = ()
    ) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.key = key
        self.hint = hint
        self.details = tuple(details)

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.where, self.key) if part)
        lines = [f"{place}: {self.found}" if place else self.found]
        lines += [f"  {line}" for line in self.details]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.found, self.where, self.key, self.hint, self.details))


def _rebuild(
    cls: type[EnginesmithError], found: str, where: str, key: str, hint: str, details: tuple[str, ...]
) -> EnginesmithError:
    return cls(found, where=where, key=key, hint=hint, details=details)


class Interrupted(EnginesmithError):  # noqa: N818 - it is no error of anybody's
    """The user asked the run to stop (Ctrl-C or SIGTERM)."""
