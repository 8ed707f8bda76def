"""Turns a graph into FP32 graphs that show on a CPU what FP16 storage does to it.

What "a node in FP16" means, here and in every stage: each float32 operand, activation or constant, is rounded to FP16
(to nearest even, overflow to infinity, subnormals kept), the operator computes and accumulates in float32, and each
float32 result is rounded to FP16. That is what GPU kernels with FP32 accumulators do. A node that is not in FP16 reads
the values of an FP16 tensor exactly.

A rounding is a pair Cast(FLOAT→FLOAT16), Cast(FLOAT16→FLOAT): ONNX Runtime keeps such pairs at every optimization
level, whereas it runs a real FP16 graph in FP32 without most of the roundings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph.names import all_nodes
from enginesmith.tasks.progress import Bar
from enginesmith.tasks.runner import OnnxRunner, predict

if TYPE_CHECKING:
    from enginesmith.tasks.data import Dataset

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

_FLOAT = ir.DataType.FLOAT
_HALF = ir.DataType.FLOAT16
_HALF_TYPE = "tensor(float16)"

# Operands that stay float32: coordinates and factors of positions, not data.
_FLOAT32_OPERANDS = {"Resize": {1, 2}, "Upsample": {1}}

# Drawn anew in every run: their effect cannot be measured by comparing two runs.
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}

# Results that are, bit for bit, among the operands' values: nothing is left to round after the operands were.
_MOVES = {
    "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "MaxPool", "GlobalMaxPool",
    "Relu", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Neg", "Abs",
    "Max", "Min", "Clip", "Concat", "Where", "Pad", "ReduceMax", "ReduceMin",
}  # fmt: skip

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
    return _obstacles(prepared(model))


def _obstacles(model: ir.Model) -> dict[str, str]:
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
    if not any(value.dtype == _FLOAT for value in _values(node)):
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
        and value.dtype == _FLOAT
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
        and value.dtype == _FLOAT
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
        floats = [value for value in node.inputs if value is not None and value.dtype == _FLOAT]
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
        return node.outputs[0].dtype == _FLOAT
    source = node.inputs[0] if node.inputs else None
    return (
        node.op_type == "Cast"
        and source is not None
        and source.dtype in _WIDE_INTEGERS
        and node.outputs[0].dtype == _FLOAT
    )


def _all_integers(value: ir.Value) -> bool:
    if not is_constant(value) or value.const_value is None:
        return False
    array = value.const_value.numpy()
    return bool(np.isfinite(array).all() and (array == np.floor(array)).all())


def is_constant(value: ir.Value) -> bool:
    """Whether a value of a prepared model is a constant."""
    return value.is_initializer() and value.const_value is not None


def emulate(model: ir.Model) -> ir.Model:
    """The FP32 graph that computes what a typed graph with FP16 tensors computes on FP16 storage.

    1. FP16 tensors become float32 tensors that hold only FP16 values; FP16 constants become float32, exactly.
    2. Each result that an FP16 node computes gets a rounding behind it. Results that are among the operands' values
       (Reshape, Relu, MaxPool, …) need none.
    3. Cast to FLOAT16 rounds; Cast from FLOAT16 does nothing. CastLike becomes Cast.
    4. Control flow carries float32; the nodes of its bodies are treated as above.
    5. Inputs and outputs of the model keep their names and types: FP16 ones are cast at the border.

    Run node by node (`level` DISABLE_ALL) the result is bit for bit that of `SwitchedModel` at that level; otherwise
    ONNX Runtime may fuse neighbours that are both FP32, which changes their last bits. It fuses nothing across a
    rounding. Calls of model-local functions are inlined. The given model is not changed.
    """
    copy = prepared(model)
    common.InlinePass()(copy)
    common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(copy)
    nodes = list(copy.graph.all_nodes())
    declared = [index for index, value in enumerate(copy.graph.outputs) if value.dtype == _HALF]
    halves = {value for node in nodes for value in node.outputs if value.dtype == _HALF}
    for graph in copy.graphs():
        for value in graph.initializers.values():
            _widen_constant(value)
        if graph is not copy.graph:
            for value in graph.inputs:
                _widen(value)
    _widen_inputs(copy.graph)
    for node in nodes:
        _widen_attributes(node)
        for value in node.outputs:
            if value in halves:
                _widen_result(node, value)
            else:
                _widen(value)
    for index in declared:
        _narrow_output(copy.graph, index)
    return copy


def _widen_result(node: ir.Node, value: ir.Value) -> None:
    """Make a node's FP16 result float32, with the roundings that its operator needs."""
    if node.op_type == "CastLike":
        _replace_castlike(node, value)
    elif node.op_type == "Cast":
        _append(node, value, [_cast(value, _FLOAT, f"half:{value.name}:32")], raw=_HALF)
    elif bodies(node) or node.op_type in _MOVES:
        value.dtype = _FLOAT
    else:
        _append(node, value, _pair(value, f"half:{value.name}"), raw=_FLOAT)


def _append(node: ir.Node, value: ir.Value, chain: list[ir.Node], *, raw: ir.DataType) -> None:
    """Put a chain of casts behind a value; its end takes the value's name and uses."""
    end = chain[-1].outputs[0]
    users = [use for use in value.uses() if use.node is not chain[0]]
    graph = node.graph
    if graph is None:
        raise TypeError(f"node {node.name!r} belongs to no graph")
    graph.insert_after(node, chain)
    for use in users:
        use.node.replace_input_with(use.idx, end)
    if value.is_graph_output():
        outputs = graph.outputs
        for index, output in enumerate(outputs):
            if output is value:
                outputs[index] = end
    end.name, value.name = value.name, f"exact:{value.name}"
    end.shape = value.shape
    value.dtype = raw
    end.dtype = _FLOAT


def _replace_castlike(node: ir.Node, value: ir.Value) -> None:
    cast = _cast(_operand(node, 0), _HALF, f"half:{value.name}:16")
    back = _cast(cast.outputs[0], _FLOAT, f"half:{value.name}:32")
    graph = node.graph
    if graph is None:
        raise TypeError(f"node {node.name!r} belongs to no graph")
    graph.insert_before(node, [cast, back])
    value.replace_all_uses_with(back.outputs[0], replace_graph_outputs=True)
    back.outputs[0].name, value.name = value.name, None
    graph.remove(node, safe=True)


def _operand(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise TypeError(f"operand {index} of node {node.name!r} is missing")
    return value


def _widen_constant(value: ir.Value) -> None:
    if value.const_value is not None and value.const_value.dtype == _HALF:
        value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
        value.dtype = _FLOAT


def _widen_inputs(graph: ir.Graph) -> None:
    for value in [value for value in graph.inputs if value.dtype == _HALF]:
        cast = _cast(value, _FLOAT, f"half:{value.name}:32")
        for use in [use for use in value.uses() if use.node is not cast]:
            use.node.replace_input_with(use.idx, cast.outputs[0])
        if len(graph):
            graph.insert_before(graph[0], cast)
        else:
            graph.append(cast)


def _narrow_output(graph: ir.Graph, index: int) -> None:
    """Cast an output back to the FLOAT16 that the model declares."""
    value = graph.outputs[index]
    cast = _cast(value, _HALF, f"half:{value.name}:out")
    cast.outputs[0].shape = value.shape
    graph.append(cast)
    cast.outputs[0].name, value.name = value.name, f"half:{value.name}"
    graph.outputs[index] = cast.outputs[0]


def _widen(value: ir.Value) -> None:
    """Replace FLOAT16 by FLOAT in a value's declared type, inside sequences and optionals too."""
    if value.type is not None:
        value.type = _wide(value.type)


def _wide(kind: ir.TypeProtocol) -> ir.TypeProtocol:
    if isinstance(kind, ir.TensorType):
        return ir.TensorType(_FLOAT) if kind.dtype == _HALF else kind
    if isinstance(kind, ir.SequenceType):
        return ir.SequenceType(_wide(kind.elem_type))
    if isinstance(kind, ir.OptionalType):
        return ir.OptionalType(_wide(kind.elem_type))
    return kind


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _HALF:
            wide = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
            node.attributes[name] = ir.AttrTensor(name, wide)
        elif name in _DTYPE_ATTRIBUTES and attribute.as_int() == _HALF:
            node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))


_DTYPE_ATTRIBUTES = {"dtype", "output_dtype", "output_datatype", "precision", "softmax_precision"}


class SwitchedModel:
    """A model in which each run says which nodes are in FP16.

    Every candidate stands in both forms behind an If on a boolean input of its own: no session per node, no copies of
    activations, and constants are rounded once, when the sessions are built. With all nodes in FP32 the outputs are
    those of the model run node by node, without fusions.

    The graph is cut into `segments` of consecutive nodes, a session each, so that runs which differ late can share
    what comes before (`forward`). Results do not depend on where it is cut.

    Args:
        model: FP32 model; every node has a unique name. It is not changed.
        segments: how many parts at most.
        threads: intra-op threads; None means as many as this process may use.
        level: graph optimization level of the sessions; None means all.

    Attributes:
        nodes: names of the candidates, in order.
        inputs: names of the model's inputs.
        outputs: names of the model's outputs.
        segments: the parts, in order.

    Raises:
        EnginesmithError: ONNX Runtime refuses the model, or a node has no name of its own.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        segments: int = 1,
        threads: int | None = None,
        level: ort.GraphOptimizationLevel | None = None,
    ) -> None:
        copy = prepared(model)
        _check_names(copy)
        self.inputs = tuple(str(value.name) for value in copy.graph.inputs)
        self.outputs = tuple(str(value.name) for value in copy.graph.outputs)
        self.nodes = tuple(name for name, reason in _obstacles(copy).items() if not reason)
        _own_outputs(copy)
        switches = _insert_switches(copy, set(self.nodes))
        parts = _cut(copy, _cut_points(copy, switches, segments))
        self.segments = tuple(Segment(part, switches, threads=threads, level=level) for part in parts)
        self._known = frozenset(self.nodes)

    def predict(self, dataset: Dataset, half: Collection[str], *, bar: Bar | None = None) -> dict[str, np.ndarray]:
        """Outputs for all samples with the nodes `half` in FP16; see `OnnxRunner.predict`."""
        chosen = self.checked(half)
        return predict(lambda feed: self.forward(feed, chosen), dataset, bar=bar)

    def forward(
        self, tensors: Mapping[str, np.ndarray], half: Collection[str], *, start: int = 0, keep: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """The model's outputs for one feed, and the tensors named in `keep`.

        Args:
            tensors: the model's inputs; when `start` is not 0, also what the segments from there on read.
            half: nodes in FP16.
            start: first segment to run.
            keep: more tensors to return, outputs of nodes in segments from `start` on.
        """
        known = dict(tensors)
        for segment in self.segments[start:]:
            wanted = dict.fromkeys((*segment.carried, *(name for name in keep if name in segment.tensors)))
            known.update(segment.run(known, half, tuple(wanted)))
        return {name: known[name] for name in dict.fromkeys((*self.outputs, *keep))}

    def checked(self, half: Collection[str]) -> frozenset[str]:
        """The names as a set.

        Raises:
            EnginesmithError: a name is no candidate.
        """
        chosen = frozenset(half)
        for name in sorted(chosen - self._known):
            raise EnginesmithError(f"node {name!r} cannot be in FP16: it is not among the candidates", where=name)
        return chosen


class Segment:
    """Consecutive nodes of a switched model, as one session.

    Attributes:
        nodes: names of its candidates.
        inputs: tensors that it reads: inputs of the model, or tensors that earlier segments carry.
        carried: tensors that later segments read or that are outputs of the model.
        tensors: everything that a run can return.
    """

    def __init__(
        self,
        part: _Part,
        switches: Mapping[str, str],
        *,
        threads: int | None = None,
        level: ort.GraphOptimizationLevel | None = None,
    ) -> None:
        names = {value.name for value in part.model.graph.inputs}
        self._switches = {node: switch for node, switch in switches.items() if switch in names}
        self._runner = OnnxRunner(part.model, threads=threads, level=level, spinning=False)
        self.nodes = tuple(self._switches)
        self.inputs = tuple(name for name in self._runner.inputs if name not in set(switches.values()))
        self.carried = part.carried
        self.tensors = frozenset(self._runner.outputs)

    def run(
        self, tensors: Mapping[str, np.ndarray], half: Collection[str], fetch: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """The tensors `fetch`, computed from `tensors` with the nodes `half` in FP16; names elsewhere are ignored."""
        feeds = {name: tensors[name] for name in self.inputs}
        feeds.update({switch: _ON if node in half else _OFF for node, switch in self._switches.items()})
        return self._runner.run(feeds, fetch)


_ON, _OFF = np.array(True), np.array(False)


class _Part:
    """The graph of a segment, and which of its tensors are needed outside."""

    def __init__(self, model: ir.Model, carried: tuple[str, ...]) -> None:
        self.model = model
        self.carried = carried


def _check_names(model: ir.Model) -> None:
    seen: set[str] = set()
    for node in all_nodes(model):
        if not node.name or node.name in seen:
            raise EnginesmithError(
                f"a node {node.op_type} has no name of its own (it is {node.name!r})",
                hint="name the nodes first: tasks/graph/names.py",
            )
        seen.add(node.name)


def _own_outputs(model: ir.Model) -> None:
    """Give an output that is a constant a node that produces it."""
    graph = model.graph
    for index, value in enumerate(graph.outputs):
        if value.is_initializer():
            copy = ir.node("Identity", [value], name=f"output:{value.name}")
            copy.outputs[0].type = value.type
            copy.outputs[0].name, value.name = value.name, f"constant:{value.name}"
            graph.append(copy)
            graph.outputs[index] = copy.outputs[0]


def _insert_switches(model: ir.Model, chosen: set[str]) -> dict[str, str]:
    """Put each chosen node behind an If; returns the switch input's name for each, in order."""
    switches: dict[str, str] = {}
    opsets = model.opset_imports
    for node in [node for node in model.graph.all_nodes() if node.name in chosen]:
        name = str(node.name)
        switch = ir.val(f"switch:{name}", ir.DataType.BOOL, [])
        model.graph.inputs.append(switch)
        switches[name] = f"switch:{name}"
        half, full = _half_branch(node, opsets), _full_branch(node)
        choice = ir.node(
            "If", [switch], {"then_branch": half, "else_branch": full}, num_outputs=len(full.outputs), name=name
        )
        present = [value for value in node.outputs if value.name]
        for old, new in zip(present, choice.outputs, strict=True):
            new.name, new.type = old.name, old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            old.name = None
        graph = node.graph
        if not isinstance(graph, ir.Graph):
            raise TypeError(f"node {name!r} belongs to no graph")
        graph.insert_before(node, choice)
        graph.remove(node, safe=True)
    return switches


def _full_branch(node: ir.Node) -> ir.Graph:
    inputs, constants = _own_constants(node, "full", ())
    copy = _copy_of(node, inputs, "full")
    return ir.Graph([], [v for v in copy.outputs if v.name], nodes=[copy], initializers=constants, name="full")


def _half_branch(node: ir.Node, opsets: Mapping[str, int]) -> ir.Graph:
    rounded = operands(node, opsets)
    inputs, constants = _own_constants(node, "half", rounded)
    nodes: list[ir.Node] = []
    for position in rounded:
        value = inputs[position]
        if value is not None and not is_constant(value):
            pair = _pair(value, f"half:{node.name}:operand{position}")
            nodes += pair
            inputs[position] = pair[-1].outputs[0]
    copy = _copy_of(node, inputs, "half")
    nodes.append(copy)
    outputs = {value: value for value in copy.outputs if value.name}
    if node.op_type not in _MOVES:
        for position in results(node, opsets):
            value = copy.outputs[position]
            pair = _pair(value, f"half:{node.name}:result{position}")
            nodes += pair
            outputs[value] = pair[-1].outputs[0]
    return ir.Graph([], list(outputs.values()), nodes=nodes, initializers=constants, name="half")


def _own_constants(
    node: ir.Node, prefix: str, rounded: Collection[int]
) -> tuple[list[ir.Value | None], list[ir.Value]]:
    """A node's operands with the constants among them replaced by initializers for one branch, and those.

    ONNX Runtime chooses its fast kernels and packs weights only for constants of the same graph.
    """
    inputs = list(node.inputs)
    constants: list[ir.Value] = []
    for position, value in enumerate(inputs):
        if value is None or not is_constant(value) or value.const_value is None:
            continue
        name = f"{prefix}:{node.name}:constant{position}"
        tensor = value.const_value
        if position in rounded:
            tensor = ir.tensor(round_half(tensor.numpy()), name=name)
        own = ir.val(name, const_value=tensor)
        inputs[position] = own
        constants.append(own)
    return inputs, constants


def _copy_of(node: ir.Node, inputs: Sequence[ir.Value | None], prefix: str) -> ir.Node:
    """The same operation on other inputs, with outputs of its own."""
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        node.attributes.values(),
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=f"{prefix}:{node.name}",
    )
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name = f"{prefix}:{old.name}" if old.name else ""
        new.type = old.type
    return copy


def _pair(value: ir.Value, name: str) -> list[ir.Node]:
    """Cast to FLOAT16 and back."""
    down = _cast(value, _HALF, f"{name}:16")
    return [down, _cast(down.outputs[0], _FLOAT, f"{name}:32")]


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    node = ir.node("Cast", [value], {"to": dtype}, name=name)
    node.outputs[0].name = name
    node.outputs[0].dtype = dtype
    return node


def _cut_points(model: ir.Model, switches: Mapping[str, str], segments: int) -> list[int]:
    """Positions in the list of nodes at which a new segment starts.

    About equally many candidates in each, cut where the fewest tensors cross.
    """
    nodes = list(model.graph)
    crossing = _crossings(nodes)
    weights = np.cumsum([len(set(_switched(node, switches))) for node in nodes])
    if not len(nodes) or segments < 2 or not weights[-1]:
        return []
    step = weights[-1] / segments
    points: list[int] = []
    for number in range(1, segments):
        low, high = np.searchsorted(weights, [(number - 0.25) * step, (number + 0.25) * step])
        allowed = [p for p in range(max(int(low), 1), int(high) + 1) if p < len(nodes) and crossing[p] is not None]
        if allowed:
            best = min(allowed, key=lambda p: (crossing[p] or 0, abs(weights[p - 1] - number * step)))
            if not points or best > points[-1]:
                points.append(best)
    return points


def _switched(node: ir.Node, switches: Mapping[str, str]) -> Iterator[str]:
    """Names of the candidates that a node of the main graph is or holds."""
    if node.name in switches:
        yield str(node.name)
        return
    for body in bodies(node):
        yield from (str(inner.name) for inner in body.all_nodes() if inner.name in switches)


def _crossings(nodes: Sequence[ir.Node]) -> list[int | None]:
    """For each position, how many tensors nodes before it pass to nodes behind it; None when others than tensors do."""
    place = _roots(nodes)
    change = np.zeros(len(nodes) + 1, np.int64)
    other = np.zeros(len(nodes) + 1, np.int64)
    for index, node in enumerate(nodes):
        for value in node.outputs:
            last = max((place[use.node] for use in value.uses()), default=index)
            count = change if isinstance(value.type, ir.TensorType) else other
            count[index + 1] += 1
            count[last + 1] -= 1
    return [None if bad else int(good) for good, bad in zip(np.cumsum(change), np.cumsum(other), strict=True)]


def _roots(nodes: Sequence[ir.Node]) -> dict[ir.Node, int]:
    """Position in `nodes` of each node, and for a node inside of bodies that of the node that holds it."""
    places = {node: index for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        for body in bodies(node):
            places.update(dict.fromkeys(body.all_nodes(), index))
    return places


def _cut(model: ir.Model, points: Sequence[int]) -> Iterator[_Part]:
    """The graph in parts, each with all of its tensors as outputs; the model is used up."""
    graph = model.graph
    nodes = list(graph)
    bounds = [0, *points, len(nodes)]
    part_of = {node: bisect_right(points, index) for node, index in _roots(nodes).items()}
    final = {str(value.name) for value in graph.outputs}
    outside = [*graph.inputs, *graph.initializers.values()]
    graph.outputs.clear()
    graph.remove(nodes)
    inputs: list[dict[ir.Value, ir.Value]] = [{} for _ in bounds[1:]]
    carried: list[list[str]] = [[] for _ in bounds[1:]]
    for value in [*outside, *(value for node in nodes for value in node.outputs)]:
        producer = value.producer()
        home = part_of[producer] if producer is not None else None
        for use in tuple(value.uses()):
            part = part_of[use.node]
            if part == home:
                continue
            if value not in inputs[part]:
                inputs[part][value] = ir.val(value.name, type=value.type, const_value=value.const_value)
            use.node.replace_input_with(use.idx, inputs[part][value])
        if home is not None and value.name and (value.name in final or any(value in later for later in inputs)):
            carried[home].append(value.name)
    for part, (start, stop) in enumerate(pairwise(bounds)):
        members = nodes[start:stop]
        crossing = inputs[part]
        initializers = [new for old, new in crossing.items() if is_constant(old)]
        outputs = [value for node in members for value in node.outputs if _can_be_fetched(value, carried[part])]
        part_graph = ir.Graph(
            [new for old, new in crossing.items() if not is_constant(old)],
            outputs,
            nodes=members,
            initializers=initializers,
            opset_imports=model.opset_imports,
            name=f"{graph.name}:{part}",
        )
        functions = [function.clone() for function in model.functions.values()]
        yield _Part(ir.Model(part_graph, ir_version=model.ir_version, functions=functions), tuple(carried[part]))


def _can_be_fetched(value: ir.Value, carried: Collection[str]) -> bool:
    return bool(value.name) and (isinstance(value.type, ir.TensorType) or str(value.name) in carried)
