"""Turns a set of nodes wanted in FP16 into the precision of every node, such that the fewest casts are needed.

What is wanted fixes values: a node in FP16 rounds what it reads and what it writes. Some nodes give the same values in
either precision, and only those may move. Which of them run in which precision is then a minimum cut: one unit of cost
per tensor that somebody reads in the precision it does not have (the Cast is shared by all such readers).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx  # type: ignore[import-untyped]
import numpy as np
import onnx
import onnx_ir as ir

from enginesmith.tasks.graph.fp16 import FLOAT, bodies, operands, results

MOVES_DATA = frozenset(
    (
        *("CenterCropPad", "Compress", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements"),
        *("GatherND", "Identity", "Pad", "Reshape", "ReverseSequence", "ScatterElements", "ScatterND", "Slice"),
        *("SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    )
)
"""Operators whose every result element is one of their operands' elements, or zero."""

READS_ONLY = frozenset(
    ("ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "NonZero")
)
"""Operators whose results are not floating point and depend on their operands' values only."""

_IGNORES_VALUES = frozenset({"Shape", "Size"})
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_datatype", "value"})
_EXACT_SOURCES = frozenset({ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.FLOAT16})


@dataclass(frozen=True)
class Form:
    """Which operands and results of a node are float32 now and float16 when the node runs in FP16.

    Attributes:
        operands: indices of inputs.
        results: indices of outputs.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """One place where a value is read: an input of a node, or an output of a graph."""

    holder: ir.Node | ir.Graph
    index: int

    def replace(self, value: ir.Value) -> None:
        """Read another value here."""
        if isinstance(self.holder, ir.Node):
            self.holder.replace_input_with(self.index, value)
        else:
            self.holder.outputs[self.index] = value


@dataclass(eq=False)
class Unit:
    """What has one precision: a node, or one value that a control-flow node carries into, through or out of its body.

    Attributes:
        node: the node, None for a carried value.
        reads: float32 values read, with the place; constants are apart.
        constants: float32 constants read, with the place.
        writes: float32 values written.
        exact: when all it reads fits FP16 exactly, it does the same in either precision, and its results fit too.
        commutes: rounding what it reads gives the same as rounding what it writes.
    """

    node: ir.Node | None
    reads: list[tuple[ir.Value, Use]] = field(default_factory=list)
    constants: list[tuple[ir.Value, Use]] = field(default_factory=list)
    writes: list[ir.Value] = field(default_factory=list)
    exact: bool = False
    commutes: bool = False


@dataclass(frozen=True)
class Reader:
    """Who reads a value where: a unit, or None for a place that takes float32 only."""

    unit: Unit | None
    use: Use


@dataclass(frozen=True)
class Placement:
    """The precision of everything.

    Attributes:
        units: in graph order.
        half: the units that run in FP16.
        readers: of each float32 value that is not constant.
        writer: the unit of each float32 value that a unit writes; graph inputs have none.
        moved: names of nodes that run in the other precision than asked for, values being the same.
        unmoved_casts: how many casts there would be if no node moved.
    """

    units: tuple[Unit, ...]
    half: frozenset[Unit]
    readers: Mapping[ir.Value, tuple[Reader, ...]]
    writer: Mapping[ir.Value, Unit]
    moved: tuple[str, ...]
    unmoved_casts: int

    def is_half(self, value: ir.Value) -> bool:
        """Whether a value is written in FP16."""
        return self.writer.get(value) in self.half

    def crossings(self) -> Iterator[tuple[ir.Value, tuple[Reader, ...]]]:
        """Each value that needs a Cast, with the readers that need it, in order of first use."""
        for value, readers in self.readers.items():
            others = tuple(r for r in readers if (r.unit in self.half) != self.is_half(value))
            if others:
                yield value, others


def half_form(node: ir.Node, opsets: Mapping[str, int]) -> Form | None:
    """How a node would run in FP16, None when its operator has no such form or it touches no float32 data.

    Constants count as operands; they are initializers. Value types have to be known (shape inference): a value of
    unknown type means no form.

    Args:
        node: a node of the main graph or of a body.
        opsets: version of each domain that the model imports.
    """
    if node.op_type in _CONTROL_FLOW | _IGNORES_VALUES or not onnx.defs.has(
        node.op_type, domain=node.domain, max_inclusive_version=opsets.get(node.domain, 0)
    ):
        return None
    schema = onnx.defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    read, written = operands(node, opsets), results(node, opsets)
    if not (read or written) or not (
        _only_tensors(node.inputs, schema.inputs) and _only_tensors(node.outputs, schema.outputs)
    ):
        return None
    bound = {_formal(schema.inputs, i).type_str for i in read}
    own = {_formal(schema.outputs, i).type_str for i in written}
    if own <= bound or _DTYPE_ATTRIBUTES & set(schema.attributes):
        return Form(read, written)
    return None


def is_float(value: ir.Value | None) -> bool:
    """Whether a value is a float32 tensor."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == FLOAT


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor behind a value that is the same in every run: an initializer that is no graph input."""
    if value is None or value.is_graph_input():
        return None
    return value.const_value if value.is_initializer() else None


def place(model: ir.Model, half: Collection[str]) -> Placement:
    """Choose the precision of every node so that values are as asked for and casts are fewest.

    Args:
        model: types known, node names unique.
        half: names of the nodes wanted in FP16; those without a `half_form` are passed over.
    """
    survey = Survey(model)
    wanted = frozenset(u for u in survey.units if u.node is not None and u.node.name in half)
    chosen = _cheapest(survey, wanted, _free(survey, wanted))
    units = tuple(survey.units)
    readers = {value: tuple(found) for value, found in survey.readers.items()}
    moved = tuple(u.node.name or "" for u in units if u.node is not None and (u in wanted) != (u in chosen))
    unmoved = Placement(units, wanted, readers, survey.writer, (), 0)
    return Placement(units, chosen, readers, survey.writer, moved, sum(1 for _ in unmoved.crossings()))


class Survey:
    """Who reads and writes each float32 value of a model, its bodies included."""

    def __init__(self, model: ir.Model) -> None:
        self.units: list[Unit] = []
        self.writer: dict[ir.Value, Unit] = {}
        self.readers: dict[ir.Value, list[Reader]] = {}
        self._opsets = model.opset_imports
        for node in model.graph.all_nodes():
            if node.op_type in _CONTROL_FLOW and node.domain == "":
                self._add_control_flow(node)
            elif node.op_type not in _IGNORES_VALUES:
                self._add_node(node)
        for index, value in enumerate(model.graph.outputs):
            self._read(None, value, Use(model.graph, index))

    def _add_node(self, node: ir.Node) -> None:
        form = half_form(node, self._opsets)
        unit = None
        if form is not None:
            unit = Unit(node, exact=_is_exact(node), commutes=_commutes(node))
            self.units.append(unit)
            self._write(unit, [node.outputs[i] for i in form.results])
        for index, value in enumerate(node.inputs):
            self._read(unit if form and index in form.operands else None, value, Use(node, index))
        for body in bodies(node):
            for index, value in enumerate(body.outputs):
                self._read(None, value, Use(body, index))

    def _add_control_flow(self, node: ir.Node) -> None:
        taken: set[Use] = set()
        for uses, values in _carried(node):
            unit = Unit(None, exact=True, commutes=True)
            read = [(_value_at(use), use) for use in uses]
            if not all(is_float(value) for value in [*(v for v, _ in read), *values]):
                continue
            self.units.append(unit)
            self._write(unit, values)
            for value, use in read:
                self._read(unit, value, use)
                taken.add(use)
        places = [Use(node, i) for i in range(len(node.inputs))]
        places += [Use(body, i) for body in bodies(node) for i in range(len(body.outputs))]
        for use in places:
            if use not in taken:
                self._read(None, _value_at(use), use)

    def _read(self, unit: Unit | None, value: ir.Value | None, use: Use) -> None:
        if value is None or not is_float(value):
            return
        if constant(value) is None:
            self.readers.setdefault(value, []).append(Reader(unit, use))
            if unit is not None:
                unit.reads.append((value, use))
        elif unit is not None:
            unit.constants.append((value, use))

    def _write(self, unit: Unit, values: list[ir.Value]) -> None:
        unit.writes += values
        self.writer.update(dict.fromkeys(values, unit))


def _free(survey: Survey, wanted: frozenset[Unit]) -> frozenset[Unit]:
    """The units that give the same values in either precision.

    1. Exact units all of whose operands fit FP16 already, because whoever wrote them rounded them.
    2. Units that commute with rounding, when every reader of their results rounds what it reads: a unit fixed in FP16,
       or another unit of this kind.
    """
    rounded = _rounded(survey, wanted)
    first = {u for u in survey.units if u.exact and all(v in rounded for v, _ in u.reads + u.constants)}
    second = {u for u in survey.units if u.commutes}

    def rounds(reader: Reader) -> bool:
        unit = reader.unit
        return unit is not None and (unit in second or (unit in wanted and unit not in first))

    shrinking = True
    while shrinking:
        shrinking = False
        for unit in reversed(survey.units):
            if unit in second and not all(rounds(r) for v in unit.writes for r in survey.readers.get(v, ())):
                second.remove(unit)
                shrinking = True
    return frozenset(first | second)


def _rounded(survey: Survey, wanted: frozenset[Unit]) -> set[ir.Value]:
    """The values that are FP16 numbers whatever tensor holds them; the greatest such set, since loops feed back."""
    rounded = set(survey.writer)
    for unit in survey.units:
        rounded.update(v for v, _ in unit.constants if unit.exact and _fits_exactly(v))
    shrinking = True
    while shrinking:
        shrinking = False
        for unit in survey.units:
            if unit in wanted or (unit.exact and all(v in rounded for v, _ in unit.reads + unit.constants)):
                continue
            shrinking |= not rounded.isdisjoint(unit.writes)
            rounded.difference_update(unit.writes)
    return rounded


def _cheapest(survey: Survey, wanted: frozenset[Unit], free: frozenset[Unit]) -> frozenset[Unit]:
    """The units to run in FP16: the fixed ones as wanted, the free ones by minimum cut, as wanted where it is equal.

    The source side of the cut is FP16. A value costs one Cast when its writer is in FP16 and any reader is not
    (writer → a with that capacity, a → every reader without limit), or the other way round.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(("half", "float"))
    cast = len(free) + 1
    end = {unit: "half" if unit in wanted else "float" for unit in survey.units if unit not in free}

    def vertex(unit: Unit | None) -> object:
        return "float" if unit is None else end.get(unit, unit)

    for unit in survey.units:
        if unit in free:
            graph.add_edge(*(("half", unit) if unit in wanted else (unit, "float")), capacity=1)
    for value, readers in survey.readers.items():
        writer = vertex(survey.writer.get(value))
        ends = dict.fromkeys(vertex(r.unit) for r in readers)
        if not free.intersection([survey.writer.get(value), *(r.unit for r in readers)]):
            continue
        if writer != "float":
            graph.add_edge(writer, (value, "widen"), capacity=cast)
            graph.add_edges_from(((value, "widen"), reader) for reader in ends)
        if writer != "half":
            graph.add_edge((value, "round"), writer, capacity=cast)
            graph.add_edges_from((reader, (value, "round")) for reader in ends)
    _, (source_side, _) = nx.minimum_cut(graph, "half", "float")
    return frozenset(u for u in survey.units if (u in source_side if u in free else u in wanted))


def _carried(node: ir.Node) -> Iterator[tuple[list[Use], list[ir.Value]]]:
    """What a control-flow node carries: for each value, where it is taken from and where it arrives.

    If: the branches' outputs become the node's. Loop: an initial value and the body's output become the body's input
    and the node's output; stacked outputs. Scan: the same, and the scanned inputs become the body's inputs.
    """
    if node.op_type == "If":
        for i, value in enumerate(node.outputs):
            yield [Use(body, i) for body in bodies(node)], [value]
        return
    (body,) = bodies(node)
    if node.op_type == "Loop":
        states, skipped = len(node.inputs) - 2, 1
        arrivals, first_input = body.inputs[2:], 2
    else:
        states, skipped = len(node.inputs) - node.attributes["num_scan_inputs"].as_int(), 0
        arrivals, first_input = body.inputs[:states], 0
        if len(body.outputs) != len(node.outputs):  # opset 8 has one more input
            return
        for i in range(states, len(node.inputs)):
            yield [Use(node, i)], [body.inputs[i]]
    for i in range(states):
        yield [Use(node, first_input + i), Use(body, skipped + i)], [arrivals[i], node.outputs[i]]
    for i in range(states, len(node.outputs)):
        yield [Use(body, skipped + i)], [node.outputs[i]]


def _value_at(use: Use) -> ir.Value | None:
    if isinstance(use.holder, ir.Node):
        return use.holder.inputs[use.index]
    return use.holder.outputs[use.index]


def _is_exact(node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return is_float(node.inputs[0]) or _source(node) in _EXACT_SOURCES
    return node.op_type in READS_ONLY or _commutes(node)


def _commutes(node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return not is_float(node.inputs[0])
    if node.op_type in ("ScatterElements", "ScatterND") and "reduction" in node.attributes:
        return node.attributes["reduction"].as_string() == "none"
    return node.op_type in MOVES_DATA


def _source(node: ir.Node) -> ir.DataType | None:
    value = node.inputs[0]
    return value.dtype if value is not None else None


def _fits_exactly(value: ir.Value) -> bool:
    tensor = constant(value)
    if tensor is None:
        return False
    array = tensor.numpy()
    with np.errstate(over="ignore"):
        return bool(np.array_equal(array.astype(np.float16).astype(np.float32), array, equal_nan=True))


def _only_tensors(values: Sequence[ir.Value | None], parameters: Sequence[onnx.defs.OpSchema.FormalParameter]) -> bool:
    """Whether all values are tensors of known type, and the operator takes tensors there."""
    return all(
        isinstance(value.type, ir.TensorType) and any(t.startswith("tensor(") for t in _formal(parameters, i).types)
        for i, value in enumerate(values)
        if value is not None and value.name
    )


def _formal(parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> onnx.defs.OpSchema.FormalParameter:
    """The formal parameter of an actual one: the last one takes all that follow when it is variadic."""
    return parameters[min(index, len(parameters) - 1)]
