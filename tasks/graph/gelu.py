"""Turns the GELUs of a graph, however they are written, into x·sigmoid(1.702·x), one by one as chosen.

Source of the cheaper form: Hendrycks, Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

FACTOR = 1.702

LARGEST_ERROR = 0.020335
"""Largest difference of x·sigmoid(1.702·x) from the GELU over all x, near x = ±2.2."""

Array = npt.NDArray[np.float64]

_GRID = np.concatenate([np.linspace(-6, 6, 481), [-30.0, 30.0]])
_SAME = 1e-4
"""Difference on the grid up to which a written-out form is a GELU; the tanh form is 4.7e-4 from the erf form."""

_UP, _DOWN = 8, 4
"""Nodes between the input of a written-out form and its erf or tanh, and between that and its output."""


@dataclass(frozen=True)
class Gelu:
    """One GELU of a graph.

    Attributes:
        node: name of the node that puts out its result.
        form: erf or tanh.
        source: its input.
        result: its output.
        nodes: how many nodes it takes.
    """

    node: str
    form: Literal["erf", "tanh"]
    source: ir.Value
    result: ir.Value
    nodes: int


def exact(x: Array) -> Array:
    """x·Φ(x) in float64."""
    return np.asarray(x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))), dtype=np.float64)


def by_tanh(x: Array) -> Array:
    """The tanh form in float64."""
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), dtype=np.float64)


def by_sigmoid(x: Array) -> Array:
    """x·sigmoid(1.702·x) in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-FACTOR * x)), dtype=np.float64)


def difference(x: Array, form: Literal["erf", "tanh"]) -> float:
    """Largest difference of the cheaper form from the exact one on these inputs, from a table of step 1e-3, to 1e-6."""
    if not x.size:
        return 0.0
    grid = np.linspace(-10, 10, 20001)
    table = np.abs(by_sigmoid(grid) - (exact if form == "erf" else by_tanh)(grid))
    return float(np.interp(np.clip(x, -10, 10), grid, table).max())


def find_gelus(model: ir.Model) -> list[Gelu]:
    """The GELUs of the main graph, in order.

    1. A Gelu node, either form.
    2. A written-out form: an Erf or Tanh with a value x before it and a value y behind it such that y is computed from
       x and scalar constants by elementwise nodes alone, and is the GELU of x on a grid to 1e-4. How it is arranged
       (0.5·x·(1+erf), x·(0.5+0.5·erf), powers as products) does not matter.

    Not found: a form whose constants are tensors, one in a subgraph, SiLU (x·sigmoid(x) is as cheap already), and a
    tanh or erf that is something else.
    """
    constants = {
        str(value.name): float(np.asarray(tensor.numpy()).reshape(-1)[0])
        for value in _constants(model)
        if (tensor := ir.convenience.get_const_tensor(value)) is not None and tensor.size == 1
    }
    found = []
    for node in model.graph:
        if node.op_type == "Gelu" and node.domain in ("", "com.microsoft") and node.inputs[0] is not None:
            attribute = node.attributes.get("approximate")
            form: Literal["erf", "tanh"] = (
                "tanh" if attribute is not None and attribute.as_string() == "tanh" else "erf"
            )
            found.append(Gelu(str(node.name), form, node.inputs[0], node.outputs[0], 1))
        elif node.op_type in ("Erf", "Tanh"):
            gelu = _written_out(node, constants)
            if gelu is not None:
                found.append(gelu)
    return found


def _constants(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.initializers.values()
    for node in model.graph:
        if node.op_type == "Constant":
            yield node.outputs[0]


def _written_out(seed: ir.Node, constants: Mapping[str, float]) -> Gelu | None:
    form: Literal["erf", "tanh"] = "erf" if seed.op_type == "Erf" else "tanh"
    wanted = exact(_GRID) if form == "erf" else by_tanh(_GRID)
    sources = [v for v in _before(seed) if str(v.name) not in constants]
    for result in _behind(seed):
        for source in sources:
            seen: dict[ir.Value, Any] = {source: _GRID}
            value = _evaluate(result, constants, seen)
            if isinstance(value, np.ndarray) and np.abs(value - wanted).max() < _SAME:
                producer = result.producer()
                count = sum(1 for v in seen if v is not source and str(v.name) not in constants)
                return Gelu(str(producer.name if producer else ""), form, source, result, count)
    return None


def _before(node: ir.Node) -> list[ir.Value]:
    """Values that a node is computed from, the nearest first."""
    found: dict[ir.Value, None] = {}
    level = [v for v in node.inputs if v is not None]
    for _ in range(_UP):
        found.update(dict.fromkeys(level))
        producers = [p for v in level if (p := v.producer()) is not None and p.op_type in _OPERATORS]
        level = [v for p in producers for v in p.inputs if v is not None and v not in found]
    return list(found)


def _behind(node: ir.Node) -> list[ir.Value]:
    """Values that are computed from a node by elementwise nodes, the nearest first."""
    found: dict[ir.Value, None] = {}
    level = list(node.outputs)
    for _ in range(_DOWN):
        level = [u.outputs[0] for v in level for u, _ in v.uses() if u.op_type in _OPERATORS]
        found.update(dict.fromkeys(level))
    return list(found)


_OPERATORS: Mapping[str, Any] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Tanh": np.tanh,
    "Erf": np.vectorize(math.erf, otypes=[np.float64]),
    "Identity": lambda x: x,
}


def _evaluate(value: ir.Value, constants: Mapping[str, float], seen: dict[ir.Value, Any], depth: int = 16) -> Any:
    """A value on the grid, from the source in `seen` and scalars; None when it needs anything else."""
    if value in seen:
        return seen[value]
    if str(value.name) in constants:
        seen[value] = constants[str(value.name)]
        return seen[value]
    node = value.producer()
    if node is None or node.op_type not in _OPERATORS or not depth:
        return None
    operands = []
    for operand in node.inputs:
        found = None if operand is None else _evaluate(operand, constants, seen, depth - 1)
        if found is None:
            return None
        operands.append(found)
    with np.errstate(all="ignore"):
        seen[value] = _OPERATORS[node.op_type](*operands)
    return seen[value]


def cheapen(model: ir.Model, chosen: Collection[str]) -> ir.Model:
    """A copy of a model in which the GELUs that these nodes put out are x·sigmoid(1.702·x).

    Names of values stay; what only the written-out form needed is removed. The new nodes are called after the old one.
    """
    copy = model.clone()
    for gelu in find_gelus(copy):
        if gelu.node not in chosen:
            continue
        old = gelu.result.producer()
        dtype = gelu.source.dtype or ir.DataType.FLOAT
        if old is None:
            continue
        factor = ir.Value(
            name=f"{gelu.node}/factor",
            shape=ir.Shape(()),
            type=ir.TensorType(dtype),
            const_value=ir.tensor(np.array(FACTOR, dtype=dtype.numpy()), name=f"{gelu.node}/factor"),
        )
        copy.graph.register_initializer(factor)
        scaled = ir.node("Mul", [gelu.source, factor], name=f"{gelu.node}/scaled")
        gate = ir.node("Sigmoid", [scaled.outputs[0]], name=f"{gelu.node}/gate")
        result = ir.node("Mul", [gelu.source, gate.outputs[0]], name=gelu.node)
        for node, name in ((scaled, "scaled"), (gate, "gate")):
            node.outputs[0].name = f"{gelu.node}/{name}_output"
            node.outputs[0].dtype, node.outputs[0].shape = dtype, gelu.result.shape
        ir.convenience.replace_nodes_and_values(
            copy.graph, old, [old], [scaled, gate, result], [gelu.result], [result.outputs[0]]
        )
    RemoveUnusedNodesPass()(copy)
    return copy
