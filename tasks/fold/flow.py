"""Turns a module and one feed into the data flow of its computation: who calls what, and who uses the result.

1. `torch.fx` records the forward pass symbolically: it is valid for every input, or it fails (control flow on values or
   sizes). Layers stay whole; everything else is followed into its operations. The recorded graph is run on the feed and
   must give the module's own outputs, bit for bit; otherwise it is not believed.
2. Where that fails, `torch.export` records the operations for the feed's sizes; those of a layer are put together.
3. Where that fails too, there is no flow, and the reason of both is given.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from enginesmith.tasks.fold.layers import is_layer, is_norm
from enginesmith.tasks.modules import bind_inputs

Kind = Literal["module", "same", "flatten", "concat", "parameter", "other", "input", "output"]

_SAME_MODULES = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_SHAPE_METHODS = {"size", "dim", "numel", "stride", "is_contiguous", "get_device", "data_ptr"}
_SHAPE_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "layout", "is_cuda"}
_DROPOUTS = {
    nn.functional.dropout, nn.functional.dropout1d, nn.functional.dropout2d, nn.functional.dropout3d,
    nn.functional.alpha_dropout, nn.functional.feature_alpha_dropout,
}  # fmt: skip


@dataclass(eq=False)
class Node:
    """One step of the computation.

    Attributes:
        kind: a layer's call; an operation that hands its input on (``same``, ``flatten`` of all axes from 1 on,
            ``concat``); a parameter that is read outside its layer; anything else.
        target: module path of a layer or parameter, name of an operation.
        shape: of the result on the feed, None when it is no tensor.
        axis: of a ``concat``, counted from the front.
        inputs: steps whose tensors go in, in order; those that are only asked for their shape do not count.
        users: steps that this step's tensor goes into.
    """

    kind: Kind
    target: str
    shape: tuple[int, ...] | None = None
    axis: int = 0
    inputs: list[Node] = field(default_factory=list, repr=False)
    users: list[Node] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Flow:
    """The data flow of one module.

    Attributes:
        nodes: in the order of execution.
        evidence: ``traced`` (valid for every input) or ``exported`` (for the feed's sizes), or ``none``.
        problem: why there is no flow, else empty.
    """

    nodes: tuple[Node, ...]
    evidence: Literal["traced", "exported", "none"]
    problem: str = ""


def trace_flow(module: nn.Module, feeds: Mapping[str, torch.Tensor]) -> Flow:
    """The data flow of a module in eval mode.

    Args:
        module: the module; it is not changed.
        feeds: one feed, by input name; at least two samples where the batch is free, so that axes can be told apart.
    """
    problems = []
    module = copy.deepcopy(module)  # a forward that keeps what it computes would keep symbols
    for record, evidence in ((_symbolic, "traced"), (_exported, "exported")):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Flow(tuple(record(module, feeds)), evidence)  # type: ignore[arg-type]
        except Exception as error:  # the user's forward may raise anything under tracing
            problems.append(
                f"{record.__name__.lstrip('_')}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            )
    return Flow((), "none", "; ".join(problems))


# --- torch.fx ------------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """Follows everything but layers and those modules of PyTorch's own that hold no BatchNorm."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Found before tracing starts: whether a module computes a BatchNorm is found out by running it.
        self.whole = {m for m in module.modules() if is_layer(m)}
        self.norms = {m for m in self.whole if is_norm(m)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self.whole:
            return True
        return super().is_leaf_module(m, module_qualified_name) and not self.norms & set(m.modules())


class _Shapes(fx.Interpreter):
    """Runs a graph and keeps the shape of every tensor."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.shapes[n] = tuple(result.shape)
        return result


def _symbolic(module: nn.Module, feeds: Mapping[str, torch.Tensor]) -> list[Node]:
    args, kwargs = bind_inputs(module, feeds)
    signature = inspect.signature(module.forward)
    given = signature.bind(*args, **kwargs).arguments
    defaults = {n: p.default for n, p in signature.parameters.items() if n not in given and p.default is not p.empty}
    graph = _Tracer(module).trace(module, concrete_args=defaults or None)
    interpreter = _Shapes(fx.GraphModule(module, graph))
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    values = {**defaults, **given}
    order = list(values) if len(values) == len(placeholders) else []
    names = [n for n in signature.parameters if n in order]
    result = interpreter.run(*(values[n] for n in names))
    expected = module(*args, **kwargs)
    if not _equal(result, expected):
        raise RuntimeError("the recorded graph does not give the module's outputs")
    nodes: dict[fx.Node, Node] = {}
    for step in graph.nodes:
        if _reads_shape(step):
            continue
        node = _from_fx(module, step, interpreter.shapes)
        nodes[step] = node
        for argument in step.all_input_nodes:
            if argument in nodes:
                _connect(nodes[argument], node)
    return list(nodes.values())


def _from_fx(module: nn.Module, step: fx.Node, shapes: Mapping[fx.Node, tuple[int, ...]]) -> Node:
    shape = shapes.get(step)
    inner = [shapes[a] for a in step.all_input_nodes if a in shapes]
    if step.op == "call_module":
        target = str(step.target)
        layer = module.get_submodule(target)
        if isinstance(layer, _SAME_MODULES) and not layer.training:
            return Node("same", target, shape)
        if isinstance(layer, nn.Flatten) and _flattens(inner[:1], shape):
            return Node("flatten", target, shape)
        return Node("module", target, shape)
    if step.op == "get_attr":
        return Node("parameter", str(step.target), shape)
    if step.op in ("placeholder", "output"):
        return Node("input" if step.op == "placeholder" else "output", step.name, shape)
    name = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", str(step.target))
    if step.op == "call_function" and step.target in (torch.cat, torch.concat, torch.concatenate):
        axis = step.kwargs.get("dim", step.kwargs.get("axis", step.args[1] if len(step.args) > 1 else 0))
        if isinstance(axis, int) and shape is not None:
            return Node("concat", name, shape, axis % len(shape))
    if step.target in _DROPOUTS and step.kwargs.get("training") is False:
        return Node("same", name, shape)
    if step.op == "call_method" and name == "contiguous":
        return Node("same", name, shape)
    if name in ("flatten", "reshape", "view") and _flattens(inner[:1], shape):
        return Node("flatten", name, shape)
    return Node("other", name, shape)


def _reads_shape(step: fx.Node) -> bool:
    """Whether a step looks only at sizes and types, so that values do not matter to it."""
    if step.op == "call_method":
        return step.target in _SHAPE_METHODS
    if step.op == "call_function" and step.target is getattr:
        return step.args[1] in _SHAPE_ATTRIBUTES
    inputs = step.all_input_nodes
    return step.op == "call_function" and bool(inputs) and all(map(_reads_shape, inputs))


def _flattens(inner: list[tuple[int, ...]], outer: tuple[int, ...] | None) -> bool:
    """Whether all axes from 1 on became one."""
    if not inner or outer is None or len(outer) != 2 or len(inner[0]) < 2:
        return False
    return inner[0][0] == outer[0]


def _equal(left: Any, right: Any) -> bool:
    ours, theirs = pytree.tree_leaves(left), pytree.tree_leaves(right)
    return len(ours) == len(theirs) and all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


# --- torch.export --------------------------------------------------------------------------------------------------


def _exported(module: nn.Module, feeds: Mapping[str, torch.Tensor]) -> list[Node]:
    args, kwargs = bind_inputs(module, feeds)
    program = torch.export.export(module, args, kwargs, strict=False)
    signature = program.graph_signature
    owned = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    layers = {path: layer for path, layer in module.named_modules(remove_duplicate=False) if is_layer(layer)}
    nodes: dict[Any, Node] = {}
    calls: dict[str, Node] = {}
    for step in program.graph.nodes:
        call = _layer_call(step, layers)
        if step.op == "placeholder":
            name = owned.get(step.name)
            nodes[step] = Node("parameter", name, _shape(step)) if name else Node("input", step.name, _shape(step))
            continue
        if call is not None:
            key, path = call
            node = calls.setdefault(key, Node("module", path))
            node.shape = _shape(step)
        elif step.op == "output":
            node = Node("output", step.name)
        else:
            node = _from_aten(step)
        nodes[step] = node
        for argument in step.all_input_nodes:
            source = nodes[argument]
            inside = source.kind == "parameter" and node.kind == "module" and _owns(node.target, source.target, layers)
            if source is not node and not inside:
                _connect(source, node)
    unique = dict.fromkeys(nodes.values())
    return [n for n in unique if n.kind != "parameter" or n.users]


def _layer_call(step: Any, layers: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """Which call of which layer an operation belongs to."""
    for key, (path, _) in (step.meta.get("nn_module_stack") or {}).items():
        path = path.partition("@")[0]
        if path in layers:
            return key, path
    return None


def _owns(path: str, parameter: str, layers: Mapping[str, nn.Module]) -> bool:
    """Whether a parameter (by any of its names) is the layer's own."""
    owner, _, name = parameter.rpartition(".")
    return owner == path or (owner in layers and layers[owner] is layers[path] and hasattr(layers[path], name))


def _from_aten(step: Any) -> Node:
    shape = _shape(step)
    name = str(step.target)
    operator = name.removeprefix("aten.").partition(".")[0]
    inner = [s for a in step.all_input_nodes if (s := _shape(a)) is not None]
    if operator == "cat" and shape is not None:
        axis = step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", 0)
        return Node("concat", operator, shape, axis % len(shape))
    if operator in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout") and step.args[2] is False:
        return Node("same", operator, shape)
    if operator in ("contiguous", "alias"):
        return Node("same", operator, shape)
    if operator in ("flatten", "view", "reshape") and _flattens(inner[:1], shape):
        return Node("flatten", operator, shape)
    return Node("other", operator, shape)


def _shape(step: Any) -> tuple[int, ...] | None:
    value = step.meta.get("val")
    return tuple(int(n) for n in value.shape) if isinstance(value, torch.Tensor) else None


def _connect(source: Node, user: Node) -> None:
    source.users.append(user)
    user.inputs.append(source)


def calls_of(flow: Flow, module: nn.Module) -> Iterator[tuple[Node, nn.Module]]:
    """Every layer call, with the layer."""
    for node in flow.nodes:
        if node.kind == "module":
            yield node, module.get_submodule(node.target)
