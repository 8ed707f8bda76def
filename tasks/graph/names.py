"""Turns a graph with unnamed or equally named nodes into one where every node has a name of its own."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir


class UniqueNodeNames(ir.passes.InPlacePass):
    """Give every node a unique, non-empty name, bodies of If, Loop and Scan and model-local functions included.

    1. A name that only one node bears is kept.
    2. Of several nodes with one name, the first in order keeps it; the others get `NAME_1`, `NAME_2`, …, skipping
       names that are taken.
    3. An unnamed node is called `OPTYPE_OUTPUT` after its operator and its first named output, or `OPTYPE` when it
       has none, with a number when that is taken: the name does not depend on the node's place in the graph.

    Names of values, inputs, outputs and initializers are not touched. Running it twice changes nothing.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename in place; `modified` says whether any name changed."""
        nodes = list(all_nodes(model))
        taken = {node.name for node in nodes if node.name}
        seen: set[str] = set()
        modified = False
        for node in nodes:
            if node.name and node.name not in seen:
                seen.add(node.name)
                continue
            node.name = _free(node.name or _described(node), taken)
            taken.add(node.name)
            seen.add(node.name)
            modified = True
        return ir.passes.PassResult(model, modified=modified)


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node in order: a control-flow node before the nodes of its bodies; model-local functions last."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _described(node: ir.Node) -> str:
    output = next((value.name for value in node.outputs if value.name), "")
    return f"{node.op_type}_{output}" if output else node.op_type


def _free(wanted: str, taken: set[str]) -> str:
    if wanted not in taken:
        return wanted
    number = 1
    while f"{wanted}_{number}" in taken:
        number += 1
    return f"{wanted}_{number}"
