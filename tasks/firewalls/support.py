"""Turns a graph into what TensorRT releases do not support in it, by tables of the public operator matrices."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.origin import Place

VERSIONS = ("8.6", "10", "11")
_DTYPES = {
    ir.DataType.BOOL: "BOOL",
    ir.DataType.UINT8: "UINT8",
    ir.DataType.INT16: "INT16",
    ir.DataType.UINT16: "UINT16",
    ir.DataType.UINT32: "UINT32",
    ir.DataType.UINT64: "UINT64",
    ir.DataType.COMPLEX64: "COMPLEX64",
    ir.DataType.COMPLEX128: "COMPLEX128",
    ir.DataType.STRING: "STRING",
}
"""Types that a matrix has to name; floats and the common integers are converted where it does not."""

_ANY_TYPE = {"Cast", "CastLike", "Shape", "Size", "Constant", "Identity", "QuantizeLinear", "DequantizeLinear", "Where"}
_CONSTANT_INPUTS = {"axes": 1, "axis": 1, "depth": 1}


class Operator(BaseModel):
    """What a release takes of one operator.

    Attributes:
        types: element types, as the matrix names them.
        limits: `kind:value`, as generate.py writes them.
    """

    model_config = ConfigDict(frozen=True)

    types: tuple[str, ...]
    limits: tuple[str, ...] = ()


class Table(BaseModel):
    """The operator matrix of one release.

    Attributes:
        version: of TensorRT.
        sources: where it was read.
        commit: of the matrix in onnx-tensorrt.
        date: of that commit.
        opset: the newest ONNX opset.
        operators: supported ones by name.
        unsupported: those that the matrix names as unsupported.
    """

    model_config = ConfigDict(frozen=True)

    version: str
    sources: tuple[str, ...]
    commit: str
    date: str
    opset: int
    operators: dict[str, Operator]
    unsupported: tuple[str, ...]


@functools.cache
def load_table(version: str) -> Table:
    """The table of one of `VERSIONS`."""
    folder = importlib.resources.files("enginesmith.tasks.firewalls.tables")
    return Table.model_validate_json((folder / f"tensorrt-{version}.json").read_text(encoding="utf-8"))


def check_support(model: ir.Model) -> Iterator[Finding]:
    """What no or not every TensorRT release supports; one finding per operator and reason, at its first node.

    1. `operators/unsupported`: an operator of ONNX's own domain that the matrix does not support, a dtype it does not
       list, or a limit that an attribute, a rank or an input breaks. Error when no release of `VERSIONS` takes it,
       warning when a newer one does.

    Not reported: operators of other domains (a plugin may exist), operators that a matrix does not name at all, limits
    that need values known only when the engine is built, and an opset newer than a release's, since each operator is
    looked at (only opset 21 and later gave old operators new forms, which the builder refuses itself).
    """
    found: dict[tuple[str, str], tuple[ir.Node, list[str]]] = {}
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        for version in VERSIONS:
            reason = _refusal(node, load_table(version))
            if reason:
                found.setdefault((node.op_type, reason), (node, []))[1].append(version)
    for (op, reason), (node, versions) in found.items():
        versions = list(dict.fromkeys(versions))
        nowhere = len(versions) == len(VERSIONS)
        yield Place.of(node).put(
            Finding(
                rule="operators/unsupported",
                severity="error" if nowhere else "warning",
                message=f"TensorRT {', '.join(versions)} does not support {op}{reason}",
                effect="no release in the tables builds this graph" if nowhere else "those releases do not build it",
                backend="tensorrt",
                versions=tuple(versions),
                hint="rewrite it with operators that are supported"
                + ("" if nowhere else f", or build with {next(v for v in VERSIONS[::-1] if v not in versions)}"),
            )
        )


def _refusal(node: ir.Node, table: Table) -> str:
    """Why a release does not take a node, as the rest of a sentence after the operator's name; empty when it does."""
    if node.op_type in table.unsupported:
        return " (not in its operator matrix)"
    entry = table.operators.get(node.op_type)
    if entry is None:
        return ""
    data = node.inputs[0] if node.inputs else None
    dtype = _DTYPES.get(data.dtype) if data is not None and data.dtype is not None else None
    if dtype and entry.types and dtype not in entry.types and node.op_type not in _ANY_TYPE:
        return f" on {dtype}"
    return next((said for limit in entry.limits if (said := _broken(node, limit))), "")


def _broken(node: ir.Node, limit: str) -> str:
    kind, _, rest = limit.partition(":")
    if kind == "attribute":
        name, _, allowed = rest.partition("=")
        return _attribute(node, name, allowed.split(","))
    if kind == "dilations":
        attribute = node.attributes.get("dilations")
        return " with dilations" if attribute is not None and set(attribute.as_ints()) != {1} else ""
    if kind == "outputs":
        return " with a second output" if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]) else ""
    if kind == "rank":
        data = node.inputs[0] if node.inputs else None
        rank = len(data.shape) if data is not None and data.shape is not None else None
        ranks = {int(r) for r in rest.split(",")}
        if node.op_type in ("AveragePool", "MaxPool"):
            ranks.add(3)  # the parser widens 1D pooling to 2D
        return f" on {rank} dimensions" if rank is not None and rank not in ranks else ""
    if kind == "constant" and rest in _CONSTANT_INPUTS:
        position = 3 if node.op_type in ("Slice", "Pad", "Resize") else _CONSTANT_INPUTS[rest]
        value = node.inputs[position] if len(node.inputs) > position else None
        constant = value is None or ir.convenience.get_const_tensor(value) is not None
        return "" if constant else f" with computed {rest}"
    return ""


def _attribute(node: ir.Node, name: str, allowed: list[str]) -> str:
    attribute = node.attributes.get(name)
    if attribute is None or (name == "nearest_mode" and _mode(node) != "nearest"):
        return ""
    value = str(attribute.value)
    return "" if value in allowed else f" with {name} = {value}"


def _mode(node: ir.Node) -> str:
    attribute = node.attributes.get("mode")
    return "nearest" if attribute is None else attribute.as_string()
