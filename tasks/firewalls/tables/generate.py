"""Turns a checkout of onnx-tensorrt into the JSON tables beside this file: `python generate.py CHECKOUT`.

The operator matrices are docs/operators.md of the release branches. What later releases changed, and no branch of the
checkout holds, is listed in `AMENDMENTS`, each with its source.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = "https://github.com/onnx/onnx-tensorrt"
BASES = {"8.6": "release/8.6-GA", "10": "10.1-GA", "11": "10.1-GA"}

_FLOATS = ["FP32", "FP16", "BF16"]
_TEN = {
    "source": f"{REPOSITORY} docs/operators.md as of TensorRT 10.15",
    "opset": 24,
    "operators": {
        "Attention": {"types": _FLOATS, "limits": ["rank:4"]},
        "BlackmanWindow": {"types": ["FP32", "FP16"]},
        "HammingWindow": {"types": ["FP32", "FP16"]},
        "HannWindow": {"types": ["FP32", "FP16"]},
        "Mish": {"types": ["FP32", "FP16"]},
        "RMSNormalization": {"types": _FLOATS},
        "RotaryEmbedding": {"types": _FLOATS},
        "STFT": {"types": ["FP32"], "limits": ["constant:frame_step,window"]},
        "TensorScatter": {"types": [*_FLOATS, "INT32"]},
        "Pad": {"types": [*_FLOATS, "INT32", "INT64"]},
        "Pow": {"types": [*_FLOATS, "INT32", "INT64"]},
        "Slice": {"types": [*_FLOATS, "INT32", "INT64", "BOOL"]},
    },
}
AMENDMENTS: dict[str, list[dict[str, Any]]] = {
    "10": [_TEN],
    "11": [
        _TEN,
        {
            "source": "https://github.com/NVIDIA/TensorRT/releases/tag/v11.0",
            "operators": {"Swish": {"types": _FLOATS}},
        },
        {
            "source": "https://docs.nvidia.com/deeplearning/tensorrt/latest/getting-started/release-notes-11/11.2.1.html",
            "operators": {"DFT": {"types": ["FP32", "FP16"]}, "GridSample": {"types": _FLOATS, "limits": ["rank:4,5"]}},
        },
        {
            "source": "https://docs.nvidia.com/deeplearning/tensorrt/latest/reference/onnx-opset-guide.html",
            "opset": 25,
            "operators": {},
        },
    ],
}

_LIMITS = {
    r"2D or 3D [Pp]ooling only": "rank:4,5",
    r"`dilations` must be empty or all ones": "dilations:1",
    r"`Indices` output tensor unsupported|Only the first output": "outputs:1",
    r"`axes` must be an initializer|`axes` must be a constant": "constant:axes",
    r"`axis` must be an initializer": "constant:axis",
    r"`depth` must be a build-time constant": "constant:depth",
    r"`reduction` is not supported|`reduction` other than": "attribute:reduction=none",
    r"`sorted` must be 1": "attribute:sorted=1",
    r"`layout` attribute must be 0": "attribute:layout=0",
    r"`input_forget` attribute must be 0": "attribute:input_forget=0",
    r"Input must be 4D": "rank:4",
    r"Supported resize modes: `nearest`, `linear`": "attribute:mode=nearest,linear",
    r"Antialiasing is not supported": "attribute:antialias=0",
    r"aspect ratio policy: `stretch`": "attribute:keep_aspect_ratio_policy=stretch",
    r"nearest modes: `floor`": "attribute:nearest_mode=floor,ceil,round_prefer_floor,round_prefer_ceil",
    r"resize transformation modes: `half_pixel`": "attribute:coordinate_transformation_mode="
    "half_pixel,pytorch_half_pixel,tf_half_pixel_for_nn,asymmetric,align_corners",
    r"`x_zero_point` must be zero|`y_zero_point` must be 0": "zero-point:0",
}
"""What a restriction says, as something that a rule can check."""


def parse(text: str) -> tuple[int, dict[str, dict[str, Any]], list[str]]:
    """The newest opset, the supported operators with types and limits, and the operators marked unsupported."""
    opset = int(re.findall(r"[Oo]pset (\d+)", text.partition("## Operator")[0])[-1])
    supported: dict[str, dict[str, Any]] = {}
    unsupported = []
    for line in text.partition("## Operator Support Matrix")[2].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 2 or not re.fullmatch(r"[A-Z]\w+", cells[0]) or cells[0] == "Operator":
            continue
        if not cells[1].startswith("Y"):
            unsupported.append(cells[0])
            continue
        types = re.findall(r"[A-Z]+\d+|BOOL", cells[2]) if len(cells) > 2 else []
        said = " ".join(cells[3:])
        limits = [limit for pattern, limit in _LIMITS.items() if re.search(pattern, said)]
        supported[cells[0]] = {"types": types, **({"limits": limits} if limits else {})}
    return opset, supported, unsupported


def table(checkout: Path, version: str) -> dict[str, Any]:
    """One release's table as JSON."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    branch = BASES[version]
    commit = git("rev-parse", branch).strip()
    opset, supported, unsupported = parse(git("show", f"{commit}:docs/operators.md"))
    sources = [f"{REPOSITORY}/blob/{commit}/docs/operators.md"]
    for change in AMENDMENTS.get(version, []):
        sources.append(change["source"])
        opset = change.get("opset", opset)
        supported |= change["operators"]
    return {
        "version": version,
        "sources": sources,
        "commit": commit,
        "date": git("log", "-1", "--format=%cs", commit).strip(),
        "opset": opset,
        "operators": dict(sorted(supported.items())),
        "unsupported": sorted(set(unsupported) - set(supported)),
    }


if __name__ == "__main__":
    for name in BASES:
        file = Path(__file__).parent / f"tensorrt-{name}.json"
        file.write_text(json.dumps(table(Path(sys.argv[1]), name), indent=1) + "\n")
