"""Turns the user's `exclude` entries into the convolutions they name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph.qdq import ConvSubgraph

KEY = "precision.int8.exclude"


def excluded(model: ir.Model, convs: Sequence[ConvSubgraph], entries: Sequence[str]) -> dict[str, str]:
    """Which convolutions the entries exclude, and by which entry.

    An entry is an operator type, or a name or pattern (``*``, ``?``, ``[…]``) of a node, of a tensor that a node writes
    or of a weight. It excludes the convolutions whose subgraph it touches. An entry that touches none of them but
    something else in the graph is allowed: that is not quantized anyway.

    Raises:
        EnginesmithError: an entry that matches nothing in the graph, with its place in the list and close matches.
    """
    nodes = {node.name: node for node in model.graph}
    found: dict[str, str] = {}
    everything = _everything(model)
    for index, entry in enumerate(entries):
        hit = [c for c in convs if any(_matches(entry, name) for name in _names_of(c, nodes))]
        if not hit and not any(_matches(entry, name) for name in everything):
            close = difflib.get_close_matches(entry, sorted(everything), n=3, cutoff=0.5)
            candidates = close or [c.conv for c in convs[:3]]
            raise EnginesmithError(
                f"{entry!r} matches no node, tensor or operator of the model",
                key=f"{KEY}.{index}",
                hint=f"{'close' if close else 'quantized are for example'}: {', '.join(candidates)}"
                if candidates
                else "the model has no convolution to exclude",
            )
        for subgraph in hit:
            found.setdefault(subgraph.conv, entry)
    return found


def _matches(entry: str, name: str) -> bool:
    return entry == name or fnmatchcase(name, entry)


def _names_of(subgraph: ConvSubgraph, nodes: dict[str | None, ir.Node]) -> set[str]:
    members = [nodes[name] for name in subgraph.members]
    names = {node.op_type for node in members} | set(subgraph.members) | {subgraph.weight}
    return names | {value.name for node in members for value in node.outputs if value.name}


def _everything(model: ir.Model) -> set[str]:
    names: set[str] = set(model.graph.initializers)
    for node in model.graph.all_nodes():
        names |= {node.op_type, node.name or ""}
        names |= {value.name for value in node.outputs if value.name}
    return names - {""}
