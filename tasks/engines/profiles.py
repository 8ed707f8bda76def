"""Turns declared inputs into optimization profiles, and refuses profiles that no build can satisfy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from enginesmith.tasks.engines.spec import EngineError, Input, Profile, Range

_SIZE_OPERANDS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "ConstantOfShape": (0,),
    "Resize": (3,),
    "Pad": (1,),
    "Slice": (1, 2, 4),
    "Range": (0, 1, 2),
    "TopK": (1,),
    "OneHot": (1,),
}
_SIZE_ARITHMETIC = {
    "Add", "Sub", "Mul", "Div", "Concat", "Gather", "Slice", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Identity",
    "Min", "Max", "Where", "ReduceProd",
}  # fmt: skip


def profile_of(inputs: Sequence[Input]) -> Profile:
    """The one profile that spans the declared ranges.

    Raises:
        EngineError: a dynamic dimension without a range, or one name with two ranges.
    """
    ranges: dict[str, tuple[str, tuple[int, int, int]]] = {}
    shapes: dict[str, Range] = {}
    for item in inputs:
        corners: list[tuple[int, int, int]] = []
        for size in item.shape:
            if isinstance(size, int):
                corners.append((size, size, size))
                continue
            dim = item.dims.get(size)
            if dim is None:
                raise EngineError(
                    f"input {item.name!r} has a dynamic dimension {size!r} and no range for it",
                    key=f"inputs.{item.name}.dims",
                    hint=f"declare it: dims: {{{size}: {{min: 1, opt: 8, max: 32}}}}",
                )
            corner = (dim.min, dim.opt, dim.max)
            other, first = ranges.setdefault(size, (item.name, corner))
            if first != corner:
                raise EngineError(
                    f"dimension {size!r} has range {first} in input {other!r} and {corner} in input {item.name!r}",
                    key=f"inputs.{item.name}.dims.{size}",
                    hint="one name is one size; use two names for two sizes",
                )
            corners.append(corner)
        low, best, high = (tuple(c[i] for c in corners) for i in range(3))
        shapes[item.name] = Range(low, best, high)
    return Profile(shapes)


def check_profiles(model: onnx.ModelProto, profiles: Sequence[Profile]) -> None:
    """Refuse, before a build starts, what no build can satisfy.

    Refused, naming input and dimension: a model without any profile; an input without a range or a range without an
    input; another rank; min <= opt <= max not holding; a size other than the graph's static one; a shape tensor (an
    integer input whose elements become sizes) without a range of values.

    Raises:
        EngineError: the first of these.
    """
    graph_inputs = true_inputs(model)
    if not profiles:
        raise EngineError("no optimization profile", key="inputs", hint="declare the inputs and their dims")
    sizes = shape_tensors(model)
    for index, profile in enumerate(profiles):
        where = f"profile {index}" if len(profiles) > 1 else ""
        unknown = sorted((set(profile.shapes) | set(profile.values)) - set(graph_inputs))
        if unknown:
            raise EngineError(
                f"the model has no input {', '.join(map(repr, unknown))}",
                where=where,
                key=f"inputs.{unknown[0]}",
                hint=f"its inputs: {', '.join(graph_inputs)}",
            )
        for name, value in graph_inputs.items():
            found = profile.shapes.get(name)
            if found is None:
                raise EngineError(f"input {name!r} has no profile", where=where, key=f"inputs.{name}")
            _check_range(name, found, where)
            _check_against_graph(name, value, found, where)
            if name in sizes:
                _check_values(name, value, profile.values, where)


def true_inputs(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Graph inputs that are fed at run time, in order: those that no initializer stands behind."""
    constant = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    return {value.name: value for value in model.graph.input if value.name not in constant}


def shape_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """Graph inputs whose elements become sizes: they reach a shape operand through integer arithmetic only."""
    producers = {name: node for node in model.graph.node for name in node.output}
    found: set[str] = set()
    todo = [
        node.input[i]
        for node in model.graph.node
        for i in _SIZE_OPERANDS.get(node.op_type, ())
        if i < len(node.input) and node.input[i]
    ]
    seen: set[str] = set()
    inputs = true_inputs(model)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in inputs:
            found.add(name)
        elif name in producers and producers[name].op_type in _SIZE_ARITHMETIC:
            todo += [i for i in producers[name].input if i]
    return frozenset(found)


def _check_range(name: str, found: Range, where: str) -> None:
    if not len(found.min) == len(found.opt) == len(found.max):
        raise EngineError(f"input {name!r}: min, opt and max have different ranks", where=where, key=f"inputs.{name}")
    for axis, (low, best, high) in enumerate(zip(found.min, found.opt, found.max)):  # noqa: B905 - checked above
        if not low <= best <= high:
            raise EngineError(
                f"input {name!r}, dim {axis}: min <= opt <= max does not hold for {low}, {best}, {high}",
                where=where,
                key=f"inputs.{name}.dims",
                hint="opt is the size to be fastest at; it lies between min and max",
            )


def _check_against_graph(name: str, value: onnx.ValueInfoProto, found: Range, where: str) -> None:
    if not value.type.tensor_type.HasField("shape"):
        return
    dims = value.type.tensor_type.shape.dim
    if len(dims) != len(found.min):
        raise EngineError(
            f"input {name!r} has rank {len(dims)} in the graph and {len(found.min)} in the profile",
            where=where,
            key=f"inputs.{name}.shape",
        )
    for axis, (dim, low, high) in enumerate(zip(dims, found.min, found.max)):  # noqa: B905 - same rank
        if dim.dim_value > 0 and not low == dim.dim_value == high:
            raise EngineError(
                f"input {name!r}, dim {axis}: the graph has the static size {dim.dim_value}, "
                f"the profile {low} to {high}",
                where=where,
                key=f"inputs.{name}.shape",
                hint="export with this dimension dynamic, or declare the static size",
            )


def _check_values(name: str, value: onnx.ValueInfoProto, values: Mapping[str, Range], where: str) -> None:
    if name not in values:
        dims = value.type.tensor_type.shape.dim
        count = dims[0].dim_value if dims else 1
        raise EngineError(
            f"input {name!r} is a shape tensor: its {count} element(s) become sizes, and no range of values is given",
            where=where,
            key=f"inputs.{name}",
            hint="export with these sizes fixed, or give the profile the range of its values",
        )
    _check_range(name, values[name], where)
