"""Turns text and settings into what may be shown: secrets and the user's home folder are masked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

MASK = "***"

_WORDS = r"password|passwd|passphrase|secret|token|credentials?|api[_-]?key|access[_-]?key|private[_-]?key"
_SECRET_NAME = re.compile(rf"(?:{_WORDS})$|(?:^|[^a-z])(?:{_WORDS}|pass|pwd)(?:$|[^a-z])", re.IGNORECASE)
_USERINFO = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@'\"<>]+@")
_QUERY = re.compile(rf"([?&;][\w.-]*(?:{_WORDS}|signature|sig|auth|key)=)[^\s&;'\"<>]+", re.IGNORECASE)
_ASSIGNED = re.compile(rf"\b([\w-]*(?:{_WORDS})[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;}}\]]+)", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE)
_HOMES = re.compile(r"(?<![\w.~-])/(?:home|Users)/[^/\s:'\",;)]+")
_SHORTEST = 8  # an environment variable's value shorter than this also occurs by chance


def mask_uris(text: str) -> str:
    """Mask user and password in URIs, signed queries, and the values of secret environment variables.

    Nothing that is not certainly a secret changes: safe on any file's text.
    """
    text = _QUERY.sub(rf"\1{MASK}", _USERINFO.sub(rf"\1{MASK}@", text))
    for value in _secrets(frozenset(os.environ.items())):
        text = text.replace(value, MASK)
    return text


def mask(text: str) -> str:
    """Mask what looks like a secret, and shorten home folders to ``~``. For messages that people read."""
    text = _BEARER.sub(rf"\1 {MASK}", _ASSIGNED.sub(rf"\1{MASK}", mask_uris(text)))
    home = str(Path.home())
    if home != "/":
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?=$|[/\s:'\",;)])", "~", text)
    return _HOMES.sub("~", text)


def is_secret(name: str) -> bool:
    """Whether a key or a variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def mask_data(data: object) -> object:
    """JSON data with every text masked, and the whole value masked below a secret key."""
    if isinstance(data, Mapping):
        return {
            mask(str(name)): MASK if is_secret(str(name)) and value is not None else mask_data(value)
            for name, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [mask_data(item) for item in data]
    return mask(data) if isinstance(data, str) else data


@lru_cache(maxsize=4)
def _secrets(environment: frozenset[tuple[str, str]]) -> list[str]:
    """Values of environment variables whose names say that they are secret; longest first."""
    found = {v for n, v in environment if is_secret(n) and len(v) >= _SHORTEST and not Path(v).exists()}
    return sorted(found, key=len, reverse=True)
