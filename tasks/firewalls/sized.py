"""Turns a graph and sizes of its dynamic dimensions into the shape of every tensor, or the node that cannot run.

The shapes come from ONNX's own inference with data propagation, on a copy without large weights: what a Reshape, Expand
or Slice computes from sizes is followed as values. Where inference is silent about a Reshape, the element counts are
compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from enginesmith.tasks.firewalls.dims import fixed_shape
from enginesmith.tasks.settings import InputSettings

_SMALL = 4096
"""Elements up to which a constant may take part in shape arithmetic."""


@dataclass(frozen=True)
class Misfit:
    """A node that cannot run at some sizes.

    Attributes:
        node: its name; empty when inference does not say.
        op: its operator.
        said: why, in one line.
    """

    node: str
    op: str
    said: str


@dataclass(frozen=True)
class Sized:
    """A graph at one choice of sizes.

    Attributes:
        shapes: by tensor name; None where a dimension depends on data.
        misfit: the node that cannot run at these sizes, where inference proves it.
    """

    shapes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    misfit: Misfit | None = None

    def full(self, name: str) -> tuple[int, ...] | None:
        """A shape all of whose dimensions are known, else None."""
        shape = self.shapes.get(name)
        return tuple(d for d in shape if d is not None) if shape is not None and None not in shape else None


class Sizer:
    """The graph of a model, ready to be sized many times.

    Args:
        model: a valid model; it is not changed.
        inputs: declared inputs; those that the graph does not have are passed over.
    """

    def __init__(self, model: ir.Model, inputs: Mapping[str, InputSettings]) -> None:
        self._inputs = inputs
        self._proto = _light(model)
        names = {tensor.name for tensor in self._proto.graph.initializer}
        self._constants = {name: array for name, array in small_constants(model).items() if name in names}

    def at(self, sizes: Mapping[str, int]) -> Sized:
        """All shapes at these sizes of the declared dimensions."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        for value in proto.graph.input:
            declared = self._inputs.get(value.name)
            if declared is not None:
                _set_shape(value.type.tensor_type, fixed_shape(declared, sizes))
        try:
            inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
            said = ""
        except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
            said = str(error)
            try:
                inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=False, data_prop=True)
            except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
                return Sized()
        shapes = {
            value.name: shape
            for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
            if (shape := _shape(value)) is not None
        }
        shapes |= {name: array.shape for name, array in self._constants.items()}
        misfit = _misfit(said) if said else self._reshape_misfit(shapes)
        return Sized(shapes, misfit)

    def _reshape_misfit(self, shapes: Mapping[str, tuple[int | None, ...]]) -> Misfit | None:
        """A Reshape whose constant target has another number of elements than its input."""
        for node in self._proto.graph.node:
            if node.op_type != "Reshape" or node.input[1] not in self._constants:
                continue
            shape = shapes.get(node.input[0])
            target: list[int] = [int(d) for d in self._constants[node.input[1]].reshape(-1)]
            if shape is None or None in shape or any(d < 0 for d in target):
                continue
            if any(attribute.name == "allowzero" and attribute.i for attribute in node.attribute):
                continue
            known = [d for d in shape if d is not None]
            wanted = [known[i] if d == 0 and i < len(known) else d for i, d in enumerate(target)]
            if math.prod(known) != math.prod(wanted):
                return Misfit(
                    node.name, "Reshape", f"{list(known)} has not the {math.prod(wanted)} elements of {target}"
                )
        return None


def _light(model: ir.Model) -> onnx.ModelProto:
    """The graph as protobuf; constants above `_SMALL` elements are inputs of the same type instead."""
    names = {str(v.name) for v in model.graph.initializers.values() if (_elements(v) or 0) > _SMALL}
    clone = model.clone()
    for name in names:
        value = clone.graph.initializers.pop(name)
        tensor = value.const_value
        if tensor is not None:
            value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype
        value.const_value = None
        if not any(i is value for i in clone.graph.inputs):
            clone.graph.inputs.append(value)
    for graph in clone.graphs():  # inference opens no other file
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = ir.tensor(np.array(value.const_value.numpy()), name=value.name)
    for node in clone.graph.all_nodes():
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None
    proto = ir.to_proto(clone)
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    return proto


def _elements(value: ir.Value) -> int | None:
    tensor = value.const_value
    return None if tensor is None else tensor.size


def _set_shape(tensor: Any, shape: Sequence[int]) -> None:
    tensor.shape.Clear()
    for size in shape:
        tensor.shape.dim.add().dim_value = size


def _shape(value: onnx.ValueInfoProto) -> tuple[int | None, ...] | None:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)


def _misfit(said: str) -> Misfit | None:
    """The node in an inference error; None for errors that are not about sizes (a type, an unknown operator)."""
    found = re.search(r"op_type:\s*(\w+)(?:,\s*node name:\s*([^)]*))?\):\s*\[ShapeInferenceError\]\s*(.*)", said)
    if not found:
        return None
    op, node, why = found[1], (found[2] or "").strip(), " ".join(found[3].split())
    why = re.sub(r"^\([^()]*op_type:[^()]*\):?\s*", "", why)
    why = why.replace("[ShapeInferenceError]", "").strip()
    if re.search(r"type|unknown|schema|infer(red)? elem", why, re.IGNORECASE) and "imension" not in why:
        return None
    return Misfit(node, op, why[:200])


def small_constants(model: ir.Model) -> dict[str, npt.NDArray[Any]]:
    """Constants of up to `_SMALL` elements by name, those in Constant nodes and subgraphs included; no strings."""
    found: dict[str, npt.NDArray[Any]] = {}
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            count = _elements(value)
            tensor = value.const_value
            if tensor is not None and count is not None and count <= _SMALL and tensor.dtype != ir.DataType.STRING:
                found[str(name)] = np.array(tensor.numpy())  # a copy: no hold on a mapped file
        for node in graph:
            if node.op_type == "Constant" and node.outputs:
                tensor = ir.convenience.get_const_tensor(node.outputs[0])
                if tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.size <= _SMALL:
                    found[str(node.outputs[0].name)] = np.asarray(tensor.numpy())
    return found
