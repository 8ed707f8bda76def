"""Turns a weights.safetensors file into tensors by name, and the state of a module into such a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.tasks.errors import EnginesmithError

if TYPE_CHECKING:
    import torch

WEIGHTS = "weights.safetensors"

# Entries of the file's metadata. Tied tensors are stored once, under the first of their names in alphabetical order;
# ALIASES is a JSON object from the other names to that one. PREFIX is what slim took off the front of every name.
ALIASES = "aliases"
PREFIX = "prefix"

_ALIGN = 8


@dataclass(frozen=True)
class Weights:
    """A state dict on disk.

    Attributes:
        tensors: every name, tied ones included (they share memory).
        prefix: leading part that all names had in the checkpoint, with a dot at its end; empty without.
    """

    tensors: dict[str, torch.Tensor]
    prefix: str


def read_weights(path: Path) -> Weights:
    """Load a file that slim or fold wrote; the tensors are mapped, on the CPU.

    Raises:
        EnginesmithError: it is no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        aliases = json.loads(metadata.get(ALIASES, "{}"))
        tensors |= {name: tensors[owner] for name, owner in aliases.items()}
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise EnginesmithError(f"the weights cannot be read: {error}", where=str(path)) from error
    return Weights(tensors, metadata.get(PREFIX, ""))


def write_state(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a state dict. Names that share the same memory are stored once; the same state gives the same bytes."""
    import torch

    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(state):
        tensor = state[name]
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        owner = owners.setdefault(identity, name) if tensor.numel() else name
        if owner != name:
            aliases[name] = owner
    stored = [name for name in state if name not in aliases]
    rows = [Row(n, _dtype_name(state[n]), tuple(state[n].shape), state[n].element_size()) for n in stored]
    order, head = header(rows, aliases, "")
    with path.open("wb") as file:
        file.write(head)
        for row in order:
            tensor = state[row.name].detach().cpu().contiguous().reshape(-1)
            file.write(tensor.view(torch.uint8).numpy().data)


@dataclass(frozen=True)
class Row:
    """One tensor of a file: name, safetensors' name of its element type, shape, bytes of one element."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.itemsize


def header(rows: Iterable[Row], aliases: Mapping[str, str], prefix: str) -> tuple[list[Row], bytes]:
    """The order in which tensors stand in a file, and everything that stands before them.

    Largest elements first, then by name, as safetensors orders them: every tensor is aligned in a mapped file. (The
    safetensors library writes its metadata in random order, so that the same tensors would not give the same bytes.)
    """
    order = sorted(rows, key=lambda row: (-row.itemsize, row.name))
    metadata = {"format": "pt"}
    if aliases:
        metadata[ALIASES] = json.dumps(dict(sorted(aliases.items())))
    if prefix:
        metadata[PREFIX] = prefix
    table: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for row in order:
        end = position + row.nbytes
        table[row.name] = {"dtype": row.dtype, "shape": row.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGN)
    return order, len(text).to_bytes(8, "little") + text


def _dtype_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    short = {
        "bool": "BOOL",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "complex64": "C64",
    }
    kind, _, bits = re.sub(r"(\d+)$", r" \1", name).partition(" ")
    return short.get(name) or f"{kind[0].upper()}{bits}"
