"""What of a graph can be stored in FP16, and how values round to it.

What "a node in FP16" means, here and in every stage: each float32 operand, activation or constant, is rounded to FP16
(to nearest even, overflow to infinity, subnormals kept), the operator computes and accumulates in float32, and each
float32 result is rounded to FP16. That is what GPU kernels with FP32 accumulators do. A node that is not in FP16 reads
the values of an FP16 tensor exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common

from enginesmith.tasks.runner import OnnxRunner

LARGEST = 65504.0
"""Largest finite FP16 value."""

OVERFLOW = 65520.0
"""Smallest magnitude that rounds to infinity: half-way between 65504 and the next power of two."""

SMALLEST_NORMAL = 2.0**-14
"""Smaller magnitudes are subnormal: fewer than 11 significant bits, and zero where the hardware flushes them."""

SUBNORMAL = SMALLEST_NORMAL - 2.0**-25
"""Smaller magnitudes round to an FP16 subnormal or to zero; this one is a tie that goes to the smallest normal."""

VANISH = 2.0**-25
"""Largest magnitude that rounds to zero: half of the smallest subnormal, a tie that goes to even."""

FLOAT = ir.DataType.FLOAT
HALF = ir.DataType.FLOAT16
_HALF_TYPE = "tensor(float16)"

# Operands that stay float32: coordinates and factors of positions, not data.
_FLOAT32_OPERANDS = {"Resize": {1, 2}, "Upsample": {1}}

# Drawn anew in every run: their effect cannot be measured by comparing two runs.
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}

MOVES = {
    "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "MaxPool", "GlobalMaxPool",
    "Relu", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Neg", "Abs",
    "Max", "Min", "Clip", "Concat", "Where", "Pad", "ReduceMax", "ReduceMin",
}  # fmt: skip
"""Operators whose results are, bit for bit, among the operands' values: nothing is left to round behind them."""

# Integer operands give integer results.
_KEEPS_INTEGERS = {
    "Abs", "Add", "Ceil", "Concat", "CumSum", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND",
    "Identity", "Max", "Min", "Mod", "Mul", "Neg", "Reshape", "Round", "Slice", "Split", "Squeeze", "Sub", "Tile",
    "Transpose", "Unsqueeze",
}  # fmt: skip

# Together with the above, what index arithmetic is made of: one result element per operand element.
_ELEMENTWISE = _KEEPS_INTEGERS | {"Clip", "Div", "Exp", "Log", "Pow", "Reciprocal", "Sign", "Sqrt", "Where"}

# What ONNX Runtime calls the types that decide anything here; other names are types that have no FP16 form.
_ORT_TYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(double)": ir.DataType.DOUBLE,
    "tensor(int64)": ir.DataType.INT64,
    "tensor(int32)": ir.DataType.INT32,
    "tensor(int8)": ir.DataType.INT8,
    "tensor(uint8)": ir.DataType.UINT8,
    "tensor(bool)": ir.DataType.BOOL,
}

_WIDE_INTEGERS = {
    ir.DataType.INT16,
    ir.DataType.INT32,
    ir.DataType.INT64,
    ir.DataType.UINT16,
    ir.DataType.UINT32,
    ir.DataType.UINT64,
}


def round_half(values: np.ndarray) -> np.ndarray:
    """Values rounded to FP16, as float32: ties to even, overflow to infinity, subnormals kept."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def prepared(model: ir.Model) -> ir.Model:
    """A copy in which every tensor's type is known and every constant is an initializer; tensor data is shared.

    Nodes other than Constant keep their names and their order.
    """
    copy = model.clone()
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
    common.RemoveInitializersFromInputsPass()(copy)
    common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(copy)
    _infer_foreign_types(copy)
    return copy


def _infer_foreign_types(model: ir.Model) -> None:
    """Ask ONNX Runtime for the types that ONNX's own inference does not know: behind operators of other domains."""
    unknown = {
        str(value.name): value
        for node in model.graph
        for value in node.outputs
        if value.name and value.type is None and not value.is_graph_output()
    }
    if not unknown:
        return
    model.graph.outputs.extend(unknown.values())
    try:
        runner = OnnxRunner(model, threads=1, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    finally:
        for _ in unknown:
            model.graph.outputs.pop()
    for output in runner.session.get_outputs():
        dtype = _ORT_TYPES.get(output.type)
        if output.name in unknown and dtype is not None:
            unknown[output.name].dtype = dtype


def candidates(model: ir.Model) -> tuple[str, ...]:
    """Names of the nodes that can be in FP16, in order, those in bodies of If, Loop and Scan included."""
    return tuple(name for name, reason in obstacles(model).items() if not reason)


def obstacles(model: ir.Model) -> dict[str, str]:
    """For every node but Constant, in order: why it cannot be in FP16, or "" for a candidate.

    A candidate reads or writes float32 data and its operator has an FP16 form in the model's opset. No candidates are

    1. Cast, Range and what carries integers in float32 (`_integer_nodes`): FP16 is exact only up to 2048;
    2. random operators, whose results no two runs share;
    3. control flow itself: the nodes of its bodies are candidates instead;
    4. operators on sequences and optionals, of other domains than ONNX's own, and calls of model-local functions.
    """
    return obstacles_of(prepared(model))


def obstacles_of(model: ir.Model) -> dict[str, str]:
    """`obstacles` of a model that is prepared already."""
    integers = _integer_nodes(model)
    functions = set(model.functions)
    return {
        node.name or "": _obstacle(node, integers, functions, model.opset_imports)
        for node in model.graph.all_nodes()
        if node.op_type != "Constant"
    }


def _obstacle(
    node: ir.Node, integers: set[ir.Node], functions: set[ir.OperatorIdentifier], opsets: Mapping[str, int]
) -> str:
    if node.op_identifier() in functions:
        return "calls a function of the model"
    if bodies(node):
        return "control flow; see the nodes of its bodies"
    if any(value.name and value.type is None for value in _values(node)):
        return "the types of its tensors are not known"
    if not any(value.dtype == FLOAT for value in _values(node)):
        return "no float32 data"
    schema = _schema(node, opsets)
    if schema is None:
        return f"operator of domain {node.domain!r} without a known FP16 form"
    if any(isinstance(value.type, ir.SequenceType | ir.OptionalType) for value in _values(node)):
        return "works on sequences or optionals"
    if node.op_type in _RANDOM:
        return "random"
    if node in integers:
        return "carries integers, which FP16 holds exactly only up to 2048"
    if node.op_type in ("Shape", "Size"):
        return "reads no values"
    if not operands(node, opsets) and not results(node, opsets):
        return f"no FP16 form in opset {opsets.get(node.domain)}"
    return ""


def operands(node: ir.Node, opsets: Mapping[str, int]) -> tuple[int, ...]:
    """Positions of the operands that are rounded when the node is in FP16."""
    schema = _schema(node, opsets)
    if schema is None:
        return ()
    fixed = _FLOAT32_OPERANDS.get(node.op_type, set())
    return tuple(
        index
        for index, value in enumerate(node.inputs)
        if value is not None
        and value.dtype == FLOAT
        and index not in fixed
        and _HALF_TYPE in schema.inputs[min(index, len(schema.inputs) - 1)].types
    )


def results(node: ir.Node, opsets: Mapping[str, int]) -> tuple[int, ...]:
    """Positions of the results that are rounded when the node is in FP16."""
    schema = _schema(node, opsets)
    if schema is None:
        return ()
    return tuple(
        index
        for index, value in enumerate(node.outputs)
        if value.name
        and value.dtype == FLOAT
        and _HALF_TYPE in schema.outputs[min(index, len(schema.outputs) - 1)].types
    )


def _schema(node: ir.Node, opsets: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    version = opsets.get(node.domain)
    if version is None or not onnx.defs.has(node.op_type, domain=node.domain, max_inclusive_version=version):
        return None
    return onnx.defs.get_schema(node.op_type, max_inclusive_version=version, domain=node.domain)


def _values(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in (*node.inputs, *node.outputs) if value is not None)


def bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node holds as attributes: branches of If, bodies of Loop and Scan."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def _integer_nodes(model: ir.Model) -> set[ir.Node]:
    """Nodes that carry integers in float32 and therefore stay FP32.

    1. Cast from a 16 to 64 bit integer to float32; Range.
    2. What reads their results, or integers computed from nothing but such and integer constants (an index times a
       frequency is read in FP32; what is computed from the product is ordinary data again).
    3. Cast from float32 to an integer, and the element-wise nodes on the way to it from 1: index arithmetic.
    """
    sources = {node for node in model.graph.all_nodes() if _makes_integers(node)}
    integers = {value for node in sources for value in node.outputs}
    derived = set(integers)
    found = set(sources)
    sinks: list[ir.Node] = []
    for node in model.graph.all_nodes():
        floats = [value for value in node.inputs if value is not None and value.dtype == FLOAT]
        if any(value in integers for value in floats):
            found.add(node)
            if node.op_type in _KEEPS_INTEGERS and all(value in integers or _all_integers(value) for value in floats):
                integers.update(node.outputs)
        if any(value in derived for value in floats) and node.op_type in _ELEMENTWISE:
            derived.update(node.outputs)
        if node.op_type == "Cast" and floats and node.outputs[0].dtype in _WIDE_INTEGERS:
            sinks.append(node)
    found.update(sinks)
    todo = [*sinks]
    while todo:
        producers = {value.producer() for value in todo.pop().inputs if value in derived}
        on_the_way = {node for node in producers if node is not None and node.op_type in _ELEMENTWISE}
        todo += on_the_way - found
        found |= on_the_way
    return found


def _makes_integers(node: ir.Node) -> bool:
    if node.op_type == "Range":
        return node.outputs[0].dtype == FLOAT
    source = node.inputs[0] if node.inputs else None
    return (
        node.op_type == "Cast"
        and source is not None
        and source.dtype in _WIDE_INTEGERS
        and node.outputs[0].dtype == FLOAT
    )


def _all_integers(value: ir.Value) -> bool:
    if not is_constant(value) or value.const_value is None:
        return False
    array = value.const_value.numpy()
    return bool(np.isfinite(array).all() and (array == np.floor(array)).all())


def is_constant(value: ir.Value) -> bool:
    """Whether a value of a prepared model is a constant."""
    return value.is_initializer() and value.const_value is not None


def rounding(value: ir.Value, name: str) -> list[ir.Node]:
    """The pair of nodes, Cast to FLOAT16 and back, that rounds a value; the last one's output is the result."""
    down = cast_node(value, HALF, f"{name}:16")
    return [down, cast_node(down.outputs[0], FLOAT, f"{name}:32")]


def cast_node(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    """A Cast; it and its output are called `name`."""
    node = ir.node("Cast", [value], {"to": dtype}, name=name)
    node.outputs[0].name = name
    node.outputs[0].dtype = dtype
    return node
