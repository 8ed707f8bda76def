"""Turns an exporter's graph into the pipeline's form: declared names, unique node names, sources without paths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass, TopologicalSortPass

from enginesmith.tasks.firewalls.findings import is_tooling, readable_path
from enginesmith.tasks.firewalls.origin import MODULE, SOURCE
from enginesmith.tasks.graph.names import UniqueNodeNames


def clean(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], roots: Sequence[Path] = ()) -> None:
    """Bring a freshly exported model into the form that later stages rely on, in place.

    1. Graph inputs and outputs get the given names, by position; a value inside that bears one of them gives way. A
       value that is an input and an output, or two outputs at once, gets an Identity.
    2. Constant nodes become initializers; nodes and initializers that nothing reads are removed, inputs are not.
    3. A node from torch.export is named `MODULE/OP` (`features.0.0/Conv`); then every node's name is made unique.
    4. Metadata is reduced to the module path and `file:line` of the source, relative to one of `roots` or to the
       installed packages. Doc strings, stack traces and torch's own records go: they hold this machine's paths.
    """
    _separate_outputs(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveUnusedNodesPass()(model)
    TopologicalSortPass()(model)
    _place_nodes(model, roots)
    UniqueNodeNames()(model)
    _name_values(model, inputs, outputs)
    _drop_records(model)


def _separate_outputs(model: ir.Model) -> None:
    graph = model.graph
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value in seen or value.is_graph_input() or value.is_initializer():
            node = ir.node("Identity", [value])
            copy = node.outputs[0]
            copy.name = f"{value.name}_output_{index}"
            copy.shape, copy.type = value.shape, value.type
            graph.append(node)
            graph.outputs[index] = copy
        seen.add(value)


def _place_nodes(model: ir.Model, roots: Sequence[Path]) -> None:
    """Node names and metadata from what torch recorded: scopes, stack traces; from names, in legacy graphs."""
    for node in model.graph.all_nodes():
        props = dict(node.metadata_props)
        module = _module(props, node.name or "")
        source = _source(props.get("pkg.torch.onnx.stack_trace", ""), roots)
        node.metadata_props.clear()
        if module is not None:
            if module:
                node.metadata_props[MODULE] = module
            node.name = f"{module}/{node.op_type}" if module else node.op_type
        if source:
            node.metadata_props[SOURCE] = source
        node.doc_string = None


def _module(props: dict[str, str], name: str) -> str | None:
    """The module path below the model; empty for the model itself, None when nothing is known."""
    scopes = re.findall(r"'([^']*)'", props.get("pkg.torch.onnx.name_scopes", ""))
    if scopes:
        return _below_adapter(scopes[-2] if len(scopes) > 1 else "")
    if name.startswith("/"):  # /model/features/features.0/features.0.0/Conv: each scope repeats the path to it
        parts = name.strip("/").split("/")[:-1]
        return _below_adapter(_joined(parts))
    return None


def _below_adapter(path: str) -> str:
    return path.removeprefix("model").removeprefix(".")


def _joined(scopes: Sequence[str]) -> str:
    """One dotted path from scopes that are names of their own or repeat what stands above them."""
    path = ""
    for scope in scopes:
        below = path.removeprefix("model.")
        path = f"model.{scope}" if below and scope.startswith(below + ".") else f"{path}.{scope}" if path else scope
    return path


def _source(trace: str, roots: Sequence[Path]) -> str:
    """`file:line` of the innermost frame that is the user's own, else of the innermost outside torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [f for f in frames if any(Path(f[0]).is_relative_to(root) for root in roots)]
    best = own or [f for f in frames if not is_tooling(f[0])]
    return f"{readable_path(best[-1][0], roots)}:{best[-1][1]}" if best else ""


def _name_values(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    graph = model.graph
    wanted: dict[ir.Value, str] = dict(zip(graph.inputs, inputs, strict=True))
    wanted.update(zip(graph.outputs, outputs, strict=True))
    reserved = set(wanted.values())
    values = [value for scope in model.graphs() for value in (*scope.inputs, *scope.initializers.values())]
    values += [value for node in graph.all_nodes() for value in node.outputs]
    taken = reserved | {value.name for value in values if value.name}
    for value in values:
        if value in wanted or not value.name:
            continue
        name = value.name.removeprefix("model.") if value.is_initializer() else value.name
        if name in reserved or (name != value.name and name in taken):
            name = _free(name, taken)
        if name != value.name:
            taken.add(name)
            value.name = name
    for value, name in wanted.items():
        value.name = f"{name}\0"  # out of the way of one another first: a swap would collide
    for value, name in wanted.items():
        value.name = name


def _free(name: str, taken: set[str]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _drop_records(model: ir.Model) -> None:
    model.metadata_props.clear()
    model.doc_string = None
    for scope in model.graphs():
        scope.metadata_props.clear()
        scope.doc_string = None
        for value in (*scope.inputs, *scope.outputs, *scope.initializers.values()):
            _plain(value)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            _plain(value)


def _plain(value: ir.Value) -> None:
    value.metadata_props.clear()
    value.doc_string = None
    tensor = value.const_value
    if tensor is not None and tensor.doc_string:
        value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
