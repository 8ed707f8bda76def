"""Turns any text into a name that MLflow, file systems and URLs take, and back.

MLflow refuses ``/conv1/Conv_output_0`` and ``mAP@0.5``. The escapes are those of ISO/IEC 9075-14 (SQL/XML names): a
character that may not stand becomes ``_xHHHH_``, its code point in hexadecimal, and an underscore that would read as
the start of such an escape is escaped itself. Different texts give different names.
"""

from __future__ import annotations

import re

_REFUSED = re.compile(r"[^A-Za-z0-9._-]|_(?=x[0-9A-F]{4})|^\.(?=\.?$)")
_ESCAPE = re.compile(r"_x([0-9A-F]{4,6})_")


def safe_name(text: str) -> str:
    """One path component of ASCII letters, digits, dots, dashes and underscores; `original_name` undoes it.

    Raises:
        ValueError: the text is empty.
    """
    if not text:
        raise ValueError("an empty text has no name")
    return _REFUSED.sub(lambda found: f"_x{ord(found[0]):04X}_", text)


def original_name(name: str) -> str:
    """The text that `safe_name` was given."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), name)


def safe_path(path: str) -> str:
    """A relative path with every component made safe."""
    return "/".join(safe_name(part) for part in path.split("/") if part)
