"""Turns a graph into sessions in which every run says which nodes are in FP16."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph.expose import expose_branches
from enginesmith.tasks.graph.fp16 import (
    MOVES,
    bodies,
    is_constant,
    obstacles_of,
    operands,
    prepared,
    results,
    round_half,
    rounding,
)
from enginesmith.tasks.graph.names import all_nodes
from enginesmith.tasks.progress import Bar
from enginesmith.tasks.runner import OnnxRunner, predict

if TYPE_CHECKING:
    from enginesmith.tasks.data import Dataset


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
        inside: for each node in a branch of If, the tensors of the main graph that are its float32 results.
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
        self.nodes = tuple(name for name, reason in obstacles_of(copy).items() if not reason)
        self.inside = expose_branches(copy)
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
            pair = rounding(value, f"half:{node.name}:operand{position}")
            nodes += pair
            inputs[position] = pair[-1].outputs[0]
    copy = _copy_of(node, inputs, "half")
    nodes.append(copy)
    outputs = {value: value for value in copy.outputs if value.name}
    if node.op_type not in MOVES:
        for position in results(node, opsets):
            value = copy.outputs[position]
            pair = rounding(value, f"half:{node.name}:result{position}")
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
