"""Turns If, Loop and Scan nodes of a graph into findings on backends that cannot run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.origin import Place


def check_subgraphs(model: ir.Model, backends: Iterable[str]) -> Iterator[Finding]:
    """Control flow in the graph that TensorRT's parsers refuse, without asking one.

    1. `control-flow/branches-differ`, warning for the backend tensorrt: outputs of an If's two branches with different
       ranks or dtypes; the parser needs equal ranks.
    2. `control-flow/loop-state`, warning for the backend tensorrt: a Loop whose carried value leaves the body in
       another shape than it entered, or whose number of scanned outputs is not fixed (no constant trip count).

    Nested subgraphs are looked at too. Not reported: a rank that is not known; an If decided by ranks and sizes, which
    the parser settles; ONNX Runtime, which runs all three; tensorrt_rtx, whose own parser is asked.
    """
    nodes = list(model.graph.all_nodes())
    branches = [(n, said) for n in nodes if n.op_type == "If" and _by_data(n.inputs[0]) and (said := _branches(n))]
    loops = [(n, said) for n in nodes if n.op_type == "Loop" and (said := _loop(n))]
    for backend in sorted({"tensorrt"} & set(backends)):
        if branches:
            yield _finding(
                "control-flow/branches-differ",
                branches,
                backend,
                "TensorRT's matrix asks for equal ranks: its parser may refuse the node and with it the target",
                "give both branches outputs of one rank and dtype, or choose with Where after computing both",
            )
        if loops:
            yield _finding(
                "control-flow/loop-state",
                loops,
                backend,
                "this backend needs carried values of one shape and scanned outputs of known length",
                "preallocate the state at its largest size and mask it, or unroll a fixed number of steps",
            )


def _finding(rule: str, found: list[tuple[ir.Node, str]], backend: str, effect: str, hint: str) -> Finding:
    """One finding for all nodes of a kind, at the first."""
    (node, said), *others = found
    more = f" (and in {len(others)} more)" if others else ""
    message = f"{node.op_type}: {said}{more}"
    return Place.of(node).put(
        Finding(rule=rule, severity="warning", message=message, effect=effect, backend=backend, hint=hint)
    )


def _by_data(condition: ir.Value | None) -> bool:
    """Whether a condition depends on values: one of constants, ranks and sizes is decided when the graph is parsed."""
    todo, seen = [condition], set()
    while todo:
        value = todo.pop()
        if value is None or value in seen or value.const_value is not None:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            return True
        if node.op_type not in ("Shape", "Size", "Constant"):
            todo.extend(node.inputs)
    return False


def _branches(node: ir.Node) -> str:
    """How the outputs of an If's branches differ; empty when they do not."""
    then, other = (node.attributes[name].as_graph() for name in ("then_branch", "else_branch"))
    for index, (a, b) in enumerate(zip(then.outputs, other.outputs, strict=False)):
        name = str(node.outputs[index].name) if index < len(node.outputs) else str(index)
        types = (a.dtype, b.dtype)
        if None not in types and a.dtype != b.dtype:
            return f"output {name} is {a.dtype} in one branch and {b.dtype} in the other"
        if a.shape is not None and b.shape is not None and len(a.shape) != len(b.shape):
            return f"output {name} has {len(a.shape)} dimensions in one branch and {len(b.shape)} in the other"
    return ""


def _loop(node: ir.Node) -> str:
    """What of a Loop is not fixed; empty when all is."""
    body = node.attributes["body"].as_graph()
    carried = len(node.inputs) - 2
    for before, after in zip(body.inputs[2:], body.outputs[1 : 1 + carried], strict=False):
        if before.shape is not None and after.shape is not None and _differ(before.shape, after.shape):
            return f"the carried value {after.name} enters as {before.shape} and leaves as {after.shape}"
    scanned = len(body.outputs) - 1 - carried
    trips = node.inputs[0] if node.inputs else None
    if scanned > 0 and (trips is None or ir.convenience.get_const_tensor(trips) is None):
        return f"{scanned} scanned output(s), and the number of iterations is no constant"
    return ""


def _differ(a: ir.ShapeProtocol, b: ir.ShapeProtocol) -> bool:
    if len(a) != len(b):
        return True
    return any(isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(a, b, strict=True))
