"""Turns an FP32 graph and names of nodes wanted in FP16 into a typed graph: FLOAT16 tensors, Cast at the borders."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CheckerPass

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.graph.fp16 import FLOAT, HALF, prepared
from enginesmith.tasks.graph.names import UniqueNodeNames, all_nodes
from enginesmith.tasks.graph.placement import Placement, Unit, constant, half_form, place

MARK = "enginesmith.precision"
"""Key of the model's metadata that says a conversion has been made."""

_LAZY_BYTES = 1 << 20


@dataclass(frozen=True)
class Conversion:
    """A typed graph and what making it took.

    Attributes:
        model: the typed graph.
        half: names of the nodes that run in FP16 in it, in graph order.
        moved: names of nodes that run in the other precision than asked for, which saves casts and changes no value.
        casts: Cast nodes added. No placement of the same values has fewer.
        unmoved_casts: Cast nodes that there would be if no node had moved.
    """

    model: ir.Model
    half: tuple[str, ...]
    moved: tuple[str, ...]
    casts: int
    unmoved_casts: int


def to_mixed(model: ir.Model, half: Collection[str]) -> ir.Model:
    """The typed graph in which the named nodes run in FP16; see `ToMixed`. The given model is not changed.

    Raises:
        EnginesmithError: a name matches no node, or a node that has no FP16 form; the model is a result of this
            function; it does not pass the ONNX checker.
    """
    return convert(model, half).model


def convert(model: ir.Model, half: Collection[str]) -> Conversion:
    """`to_mixed`, with what it did."""
    conversion = ToMixed(half)
    try:
        conversion(model)
    except ir.passes.PreconditionError as error:
        if isinstance(error.__cause__, EnginesmithError):
            raise error.__cause__ from None
        raise
    except ir.passes.PostconditionError as error:
        raise EnginesmithError(f"the typed graph does not pass the ONNX checker: {error.__cause__}") from error
    assert conversion.result is not None  # noqa: S101 - the pass ran
    return conversion.result


class ToMixed(ir.passes.FunctionalPass):
    """Type the named nodes FLOAT16 and put Casts at the borders.

    Rewritten:

    1. Every float32 operand and result of a named node becomes FLOAT16 where the operator's schema allows it: also of
       nodes in the bodies of If, Loop and Scan.
    2. A Cast to FLOAT16 stands behind a float32 tensor that named nodes read, and a Cast to FLOAT behind a FLOAT16
       tensor that others read: one per tensor, directly behind its writer, shared by all readers, bodies included.
    3. A float32 constant that named nodes read is stored as FLOAT16, rounded to nearest even; when others read it too
       there is one copy per precision. Nothing is clamped: what FP16 does not hold becomes infinite, subnormal or zero
       (the layer table's `lossy` says which do).
    4. Nodes that only move data, that compare, or that cast, and the values that If, Loop and Scan carry, run in
       whichever precision needs the fewest casts, when that changes no value (`placement.place`).
    5. A Cast to float32, and nodes that make float32 data from nothing (ConstantOfShape, RandomNormal, …), make FLOAT16
       directly when named.
    6. Constant nodes become initializers; initializers are no longer listed among the graph's inputs.
    7. Graph outputs keep name and type: the FLOAT16 tensor behind one is called `NAME_fp16`. Unnamed nodes get names.

    Left alone: integer, boolean, float64 and string data; operands that the operator wants as float32 whatever the
    others are (Resize's roi and scales, …); nodes that are not named; model-local functions.

    Refused: names that match no node or a node without an FP16 form (unknown operators, control flow, no float32 data);
    a model that has been converted already; a model that does not pass the ONNX checker.

    Afterwards the model passes the full checker with strict shape inference, if it did so before, and is sorted
    topologically.
    """

    def __init__(self, half: Collection[str]) -> None:
        self._half = frozenset(half)
        self._strict = True
        self.result: Conversion | None = None

    def requires(self, model: ir.Model) -> None:
        """The model is whole, has not been converted, and knows the names."""
        if MARK in model.metadata_props:
            raise EnginesmithError(
                "the model has been converted to mixed precision already",
                hint="convert the FP32 model it was made from",
            )
        try:
            CheckerPass()(model)
        except Exception as error:
            raise EnginesmithError(f"the model does not pass the ONNX checker: {error}") from error
        self._strict = _passes_full_check(model)
        nodes = {node.name: node for node in model.graph.all_nodes() if node.name}
        for name in sorted(self._half - set(nodes)):
            close = difflib.get_close_matches(name, nodes, n=3)
            raise EnginesmithError(
                f"no node is called {name!r}", hint=f"did you mean {', '.join(close)}?" if close else ""
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Convert a copy."""
        model = prepared(model)
        UniqueNodeNames()(model)
        for node in model.graph.all_nodes():
            if node.name in self._half and half_form(node, model.opset_imports) is None:
                raise EnginesmithError(f"{node.op_type} {node.name!r} has no FP16 form", where=node.name or "")
        placement = place(model, self._half)
        casts = _Rewriter(model, placement).rewrite()
        if placement.half:
            model.metadata_props[MARK] = "mixed"
        names = tuple(u.node.name or "" for u in placement.units if u.node is not None and u in placement.half)
        self.result = Conversion(model, names, placement.moved, casts, placement.unmoved_casts)
        return ir.passes.PassResult(model, modified=bool(placement.half))

    def ensures(self, model: ir.Model) -> None:
        """The checker accepts the result; with strict shape inference, where it did so before."""
        CheckerPass(full_check=self._strict)(model)


def _passes_full_check(model: ir.Model) -> bool:
    """Whether strict shape inference agrees with what the model declares; runtimes do not insist on that."""
    try:
        CheckerPass(full_check=True)(model)
    except Exception:  # what the checker raises has no common base class
        return False
    return True


class _Rewriter:
    """Types and casts for one model, changed in place."""

    def __init__(self, model: ir.Model, placement: Placement) -> None:
        self._model = model
        self._placement = placement
        self._names = _Names(model)
        self._firsts = {graph: graph[0] if len(graph) else None for graph in model.graphs()}

    def rewrite(self) -> int:
        crossings = list(self._placement.crossings())
        for unit in self._placement.units:
            if unit in self._placement.half:
                for value in unit.writes:
                    value.type = ir.TensorType(HALF)
                if unit.node is not None:
                    _retype_attributes(unit.node, unit)
        for value, readers in crossings:
            cast = self._insert_cast(value, for_output=any(r.use.holder is self._model.graph for r in readers))
            for reader in readers:
                reader.use.replace(cast)
        self._convert_constants()
        return len(crossings)

    def _insert_cast(self, value: ir.Value, *, for_output: bool) -> ir.Value:
        old = value.name or ""
        to_half = value.dtype == FLOAT
        if for_output:
            value.name = self._names.free(f"{old}_fp16")
            name = old
        else:
            name = self._names.free(f"{old}_{'fp16' if to_half else 'fp32'}")
        dtype = HALF if to_half else FLOAT
        result = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
        node = ir.node(
            "Cast",
            [value],
            {"to": int(dtype)},
            outputs=[result],
            name=self._names.free(f"{old}_to_{'fp16' if to_half else 'fp32'}"),
        )
        graph = _graph_of(value)
        if (producer := value.producer()) is not None:
            graph.insert_after(producer, node)
        elif (first := self._firsts[graph]) is not None:
            graph.insert_before(first, node)
        else:
            graph.append(node)
        return result

    def _convert_constants(self) -> None:
        """One FLOAT16 copy per constant; it takes the name when nobody reads the float32 one any more."""
        copies: dict[ir.Value, ir.Value] = {}
        for unit in self._placement.units:
            for value, use in unit.constants if unit in self._placement.half else ():
                tensor = constant(value)
                if value not in copies and tensor is not None:
                    copies[value] = self._half_copy(value, tensor)
                use.replace(copies[value])
        for value, copy in copies.items():
            if not value.uses() and not value.is_graph_output():
                name = value.name or ""
                del _graph_of(value).initializers[name]
                copy.name = name

    def _half_copy(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        name = self._names.free(f"{value.name}_fp16")
        copy = ir.Value(name=name, type=ir.TensorType(HALF), shape=ir.Shape(tensor.shape.numpy()))
        copy.const_value = _rounded(tensor, name)
        _graph_of(value).register_initializer(copy)
        return copy


class _Names:
    """Names that nothing in the model bears yet."""

    def __init__(self, model: ir.Model) -> None:
        self._taken: Counter[str] = Counter()
        for node in all_nodes(model):
            self._taken.update([node.name or "", *(v.name or "" for v in node.outputs)])
        for graph in model.graphs():
            self._taken.update([*(v.name or "" for v in graph.inputs), *graph.initializers])

    def free(self, wanted: str) -> str:
        name, number = wanted, 0
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}"
        self._taken[name] += 1
        return name


def _graph_of(value: ir.Value) -> ir.Graph:
    """The graph that a value of a model lives in: the main graph or a body."""
    producer = value.producer()
    graph = producer.graph if producer is not None else value.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"tensor {value.name!r} belongs to no graph")
    return graph


def _retype_attributes(node: ir.Node, unit: Unit) -> None:
    """Say FLOAT16 in the attribute that decides a result's type, where the operator has one."""
    if not unit.writes:
        return
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", int(HALF))
    elif node.op_type == "ConstantOfShape":
        fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(_to_half(fill)))
    elif node.op_type in (
        "EyeLike",
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
    ):
        node.attributes["dtype"] = ir.AttrInt64("dtype", int(HALF))
    elif node.op_type in ("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"):
        node.attributes["output_datatype"] = ir.AttrInt64("output_datatype", int(HALF))


def _to_half(array: np.ndarray) -> np.ndarray:
    """Rounded to nearest even; overflow gives infinity, subnormals are kept."""
    with np.errstate(over="ignore"):
        return array.astype(np.float16)


def _rounded(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """A constant in FP16; a large one is rounded whenever it is read, so that it need not stay in memory."""
    if tensor.nbytes <= _LAZY_BYTES:
        return ir.tensor(_to_half(tensor.numpy()), name=name)
    return ir.LazyTensor(
        lambda: ir.tensor(_to_half(tensor.numpy())), dtype=HALF, shape=ir.Shape(tensor.shape.numpy()), name=name
    )
