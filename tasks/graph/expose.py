"""Turns tensors inside the branches of If into tensors of the main graph, so that a run can return them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir


def expose_branches(model: ir.Model) -> dict[str, tuple[str, ...]]:
    """Give every If of the main graph further outputs: the float32 results of the nodes in its branches, in place.

    1. In the branch that is not taken such an output is empty, with shape [0].
    2. An If inside of a branch is treated first, so that its tensors come out too.
    3. Bodies of Loop and Scan are left alone: their tensors have a value per iteration, and may change shape.

    Returns:
        For each node inside of branches, the names of the main graph's tensors that are its float32 results, in order.
    """
    found: dict[str, list[str]] = {}
    for node in list(model.graph):
        if _is_if(node):
            for name, value in _expose(node):
                found.setdefault(name, []).append(str(value.name))
    return {name: tuple(values) for name, values in found.items()}


def _expose(node: ir.Node) -> list[tuple[str, ir.Value]]:
    """Add the outputs to one If; returns for each the name of the node inside whose result it is."""
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    wanted = [(number, name, value) for number, branch in enumerate(branches) for name, value in _results(list(branch))]
    first = len(node.outputs)
    node.resize_outputs(first + len(wanted))
    exposed = []
    for place, (number, name, value) in enumerate(wanted):
        output = node.outputs[first + place]
        output.name = f"inside:{node.name}:{place}"
        output.dtype = ir.DataType.FLOAT
        _put_out(branches[number], value, f"{output.name}:taken")
        _put_out_nothing(branches[1 - number], f"{output.name}:other")
        exposed.append((name, output))
    return exposed


def _results(nodes: list[ir.Node]) -> Iterator[tuple[str, ir.Value]]:
    for node in nodes:
        own = [value for value in node.outputs if value.name and value.dtype == ir.DataType.FLOAT]
        yield from ((str(node.name), value) for value in own)
        if _is_if(node):
            yield from _expose(node)


def _put_out(branch: ir.Graph, value: ir.Value, name: str) -> None:
    if value.is_graph_output():
        copy = ir.node("Identity", [value], name=name)
        copy.outputs[0].name, copy.outputs[0].dtype = name, ir.DataType.FLOAT
        branch.append(copy)
        value = copy.outputs[0]
    branch.outputs.append(value)


def _put_out_nothing(branch: ir.Graph, name: str) -> None:
    empty = ir.node("Constant", [], {"value": ir.tensor(np.zeros(0, np.float32), name=name)}, name=name)
    empty.outputs[0].name, empty.outputs[0].dtype = name, ir.DataType.FLOAT
    branch.append(empty)
    branch.outputs.append(empty.outputs[0])


def _is_if(node: ir.Node) -> bool:
    return node.op_type == "If" and not node.domain
