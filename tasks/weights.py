"""Turns a weights.safetensors file into tensors by name, and the state of a module into such a file."""

from __future__ import annotations

import json
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


def write_state(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write a state dict. Names that share the same memory are stored once; the same state gives the same bytes."""
    from safetensors.torch import save_file

    owners: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(state):
        tensor = state[name]
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        owner = owners.setdefault(identity, name) if tensor.numel() else name
        if owner != name:
            aliases[name] = owner
    metadata = {"format": "pt"} | ({ALIASES: json.dumps(aliases, sort_keys=True)} if aliases else {})
    stored = {name: state[name].detach().cpu().contiguous() for name in sorted(state) if name not in aliases}
    # A tensor of its own for each: save_file refuses views of one storage, which contiguous() may return.
    shared: set[int] = set()
    for name, tensor in stored.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in shared or storage.nbytes() != tensor.nbytes:
            stored[name] = tensor.clone()
        shared.add(storage.data_ptr())
    save_file(stored, path, metadata=metadata)
