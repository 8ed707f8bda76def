"""Turns three TensorRT packages into the list of names that each version's Python API has, a fixture of the tests.

    python benchmarks/tensorrt_names.py --v86 WHEEL --stubs WHEEL --bindings WHEEL

WHEEL: tensorrt 8.6.0, tensorrt-stubs 10.13.0.35.1, tensorrt-cu13-bindings 11.4.0.106. The two compiled ones are read as
strings, so a name counts as present when it stands in them as a whole word; names are the attributes that
tasks/engines/tensorrt*.py use.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from pathlib import Path

ENGINES = Path(__file__).parents[1] / "tasks/engines"


def used_names() -> set[str]:
    """Attributes, and strings that look like identifiers, in the TensorRT modules."""
    found: set[str] = set()
    for path in sorted(ENGINES.glob("tensorrt*.py")):
        if path.name == "tensorrt_rtx.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return found


def present(wheel: Path, suffixes: tuple[str, ...], names: set[str]) -> list[str]:
    """Those of the names that stand in a wheel's files, followed by no further letter, sorted.

    Compilers store a string that ends another one only once, so in compiled files a longer word may stand before.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = [n for n in archive.namelist() if n.endswith(suffixes) and "libnvinfer" not in n]
        text = "\n".join(archive.read(name).decode("latin-1") for name in files)
    before = "" if ".so" in suffixes else r"(?<![A-Za-z_0-9])"
    return sorted(name for name in names if re.search(rf"{before}{name}(?![A-Za-z_0-9])", text))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("v86", "stubs", "bindings"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    used = used_names()
    table = {
        "8.6.0": present(arguments.v86, (".so", ".py"), used),
        "10.13.0.35.1": present(arguments.stubs, (".pyi",), used),
        "11.4.0.106": present(arguments.bindings, (".so", ".py"), used),
    }
    sys.stdout.write(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
