"""Turns a graph, and measured ranges where there are any, into findings on values that FP16 cannot hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.origin import Place
from enginesmith.tasks.firewalls.sized import Sized, small_constants

HALF_MAX = 65504.0
HALF_TINY = 2.0**-24
HALF_NORMAL = 2.0**-14

LOSS = 0.05
"""Relative change of a constant below FP16's normal range from which on it is reported."""

Ranges = Mapping[str, float]
"""Largest absolute value of a tensor that was measured on calibration data, by name."""

_SHOWN = 3
"""Nodes that one finding names."""


def check_numerics(model: ir.Model, sized: Sized, ranges: Ranges | None = None) -> Iterator[Finding]:
    """Traps for FP16, one finding per kind with the worst nodes: advice, and a warning where a range was measured.

    1. `numerics/layernorm-by-hand`: a normalisation written out (a squared difference, its mean or sum, a root, a
       division): the squares overflow from deviations of 256 on.
    2. `numerics/sum-overflow`: a ReduceSum, ReduceSumSquare, ReduceL2 or a GlobalAveragePool by sum over n elements
       that overflows as soon as the mean exceeds 65504 / n; only for n of 4096 and more, or where the measured range
       says so.
    3. `numerics/exp-overflow`: an Exp (above 11.09) that is not guarded by a subtracted maximum, and a Softmax fed by
       scores that were measured above 65504.
    4. `numerics/constant-range`: a constant beyond 65504 (mask sentinels: -1e9, the smallest float32), or an epsilon
       in front of a division, root or logarithm that FP16 stores as zero or `LOSS` away.
    5. `numerics/overflow-measured`, warning: any other float tensor measured beyond 65504.

    Not reported: infinities (FP16 has them), integers, weights of Conv and MatMul (the FP16 conversion looks at each),
    constants that only Clip or comparisons read, Resize scales and other inputs that stay FP32 in every variant.
    """
    ranges = ranges or {}
    squares = list(_normalisations(model))
    yield from _finding(
        "numerics/layernorm-by-hand",
        squares,
        "{n} normalisation(s) are written out with squares, which overflow FP16 from deviations of 256 on",
        "FP16 gives infinity or, divided by it, finite zeros: wrong without a NaN to see",
        "use torch.nn.LayerNorm (one LayerNormalization node), or let the fallback keep the region in FP32",
        {str(n.name): worst for n in squares if (worst := _worst(n, ranges)) is not None},
    )
    taken = {str(n.name) for n in squares}
    sums = [n for n in _sums(model, sized, ranges) if str(n.name) not in taken]
    yield from _finding(
        "numerics/sum-overflow",
        sums,
        "{n} sum(s) over so many elements that a mean of " + _mean_limit(sums, sized) + " overflows FP16",
        "the sum is infinite in FP16",
        "take the mean instead of the sum, or keep the node in FP32",
        {str(n.name): worst for n in sums if (worst := _worst(n, ranges)) is not None},
    )
    exps = list(_exponentials(model, ranges))
    yield from _finding(
        "numerics/exp-overflow",
        exps,
        "{n} Exp node(s) are infinite in FP16 for inputs above 11.09, and nothing bounds their inputs",
        "infinities, then NaN where two of them meet",
        "subtract the maximum first, clamp the input, or use Softmax or LogSumExp as one operator",
        {str(n.name): worst for n in exps if (worst := _worst(n, ranges)) is not None},
    )
    yield from _constants(model)
    taken |= {str(n.name) for n in (*sums, *exps)}
    others = [n for n in model.graph.all_nodes() if str(n.name) not in taken and (_worst(n, ranges) or 0) > HALF_MAX]
    yield from _finding(
        "numerics/overflow-measured",
        others,
        "{n} node(s) put out more than FP16's 65504 on the calibration data",
        "the value is infinite in FP16",
        "nothing to do: the fallback measures it and keeps the region in FP32; rescale to have it in FP16",
        {str(n.name): worst for n in others if (worst := _worst(n, ranges)) is not None},
    )


def _worst(node: ir.Node, ranges: Ranges) -> float | None:
    found = [ranges[str(v.name)] for v in node.outputs if str(v.name) in ranges]
    return max(found) if found else None


def _finding(
    rule: str, nodes: list[ir.Node], message: str, effect: str, hint: str, measured: Mapping[str, float]
) -> Iterator[Finding]:
    """One finding for all nodes of a kind, at the worst one; a warning when a measured value is too large."""
    if not nodes:
        return
    ordered = sorted(nodes, key=lambda n: -measured.get(str(n.name), 0.0))
    top = measured.get(str(ordered[0].name))
    over = top is not None and top > HALF_MAX
    names = ", ".join(str(n.name) for n in ordered[:_SHOWN]) + (", …" if len(ordered) > _SHOWN else "")
    said = f" ({names})" if len(ordered) > 1 else ""
    figure = f"; the largest value measured is {top:.4g}" if top is not None else ""
    yield Place.of(ordered[0]).put(
        Finding(
            rule=rule,
            severity="warning" if over else "advice",
            message=message.format(n=len(nodes)) + said + figure,
            effect=effect,
            hint=hint,
        )
    )


def _normalisations(model: ir.Model) -> Iterator[ir.Node]:
    """The mean or sum of squares in each x·x → mean → (+ε) → sqrt chain; also Pow(x, 2) and ReduceSumSquare."""
    constants = small_constants(model)
    for node in model.graph.all_nodes():
        if node.op_type not in ("ReduceMean", "ReduceSum", "ReduceSumSquare", "GlobalAveragePool"):
            continue
        source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
        if node.op_type != "ReduceSumSquare" and (source is None or not _is_square(source, constants)):
            continue
        if _reaches_root(node):
            yield node


def _is_square(node: ir.Node, constants: Mapping[str, np.ndarray]) -> bool:
    if node.op_type == "Mul":
        return node.inputs[0] is not None and node.inputs[0] is node.inputs[1]
    if node.op_type == "Pow" and node.inputs[1] is not None:
        exponent = constants.get(str(node.inputs[1].name))
        return exponent is not None and exponent.size == 1 and float(exponent.reshape(-1)[0]) == 2.0
    return False


_SCALING = {"Add", "Mul", "Div", "Max", "Cast", "Sub", "Reshape", "Expand", "Squeeze", "Unsqueeze"}


def _reaches_root(node: ir.Node, steps: int = 8) -> bool:
    """Whether a root or a power follows within a few nodes that scale, shift or reshape."""
    following = [user for output in node.outputs for user, _ in output.uses()]
    for user in following:
        if user.op_type in ("Sqrt", "Rsqrt") or (user.op_type == "Pow" and user.inputs[0] in node.outputs):
            return True
        if steps and user.op_type in _SCALING and _reaches_root(user, steps - 1):
            return True
    return False


def _reduced(node: ir.Node, sized: Sized) -> int | None:
    """Elements that each result of a reduction is made of."""
    before = sized.full(str(node.inputs[0].name)) if node.inputs and node.inputs[0] is not None else None
    after = sized.full(str(node.outputs[0].name))
    if before is None or after is None or not math.prod(after):
        return None
    return math.prod(before) // math.prod(after)


def _sums(model: ir.Model, sized: Sized, ranges: Ranges) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        if node.op_type in ("ReduceSum", "ReduceSumSquare", "ReduceL2"):
            dtype = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
            if dtype is not None and not dtype.is_floating_point():
                continue
            if (_reduced(node, sized) or 0) >= 4096 or (_worst(node, ranges) or 0) > HALF_MAX:
                yield node


def _mean_limit(nodes: list[ir.Node], sized: Sized) -> str:
    counts = [count for node in nodes if (count := _reduced(node, sized))]
    return f"{HALF_MAX / max(counts):.3g}" if counts else "65504 by the number of elements"


def _exponentials(model: ir.Model, ranges: Ranges) -> Iterator[ir.Node]:
    for node in model.graph.all_nodes():
        if node.op_type == "Exp" and node.inputs[0] is not None:
            source = node.inputs[0].producer()
            if source is not None and source.op_type in ("Sub", "Neg", "Clip", "Min", "Sigmoid", "Tanh", "Log"):
                continue
            if (worst := ranges.get(str(node.outputs[0].name))) is not None and worst <= HALF_MAX:
                continue
            yield node
        elif node.op_type in ("Softmax", "LogSoftmax") and node.inputs[0] is not None:
            scores = ranges.get(str(node.inputs[0].name), 0.0)
            if scores > HALF_MAX:
                yield node


_FREE = {"Clip", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Min", "Max", "Resize", "Range", "Upsample"}


def _constants(model: ir.Model) -> Iterator[Finding]:
    constants = small_constants(model)
    large: dict[float, list[ir.Node]] = {}
    small: dict[float, list[ir.Node]] = {}
    for node in model.graph.all_nodes():
        if node.op_type in _FREE:
            continue
        for value in node.inputs:
            array = constants.get(str(value.name)) if value is not None else None
            if array is None or array.dtype.kind != "f" or array.dtype == np.float16 or array.size != 1:
                continue
            number = float(array.reshape(-1)[0])
            if math.isfinite(number) and abs(number) > HALF_MAX:
                large.setdefault(number, []).append(node)
            elif _changes(number) and (node.op_type == "Div" or _guards(node)):
                small.setdefault(number, []).append(node)
    for number, nodes in large.items():
        yield from _constant(
            nodes,
            f"{number:.6g} becomes {'-' if number < 0 else ''}infinity in FP16",
            "added to a mask, infinity minus infinity is NaN, and a row that is masked entirely has no Softmax",
            "mask with -1e4, or with Where and a Softmax that never sees a fully masked row",
        )
    if small:
        number = min(small, key=abs)
        lost = "0" if abs(number) <= HALF_TINY / 2 else f"{float(np.float16(number)):.6g}, a subnormal,"
        yield from _constant(
            [node for nodes in small.values() for node in nodes],
            f"{number:.6g} is {lost} in FP16",
            "it no longer guards the division or the root behind it, or guards it differently",
            "use 6.1e-5 or more where that is accurate enough; the fallback keeps the node in FP32 where it matters",
        )


def _changes(number: float) -> bool:
    """Whether FP16 stores a number below its normal range as one that is `LOSS` away or more."""
    return 0 < abs(number) < HALF_NORMAL and abs(float(np.float16(number)) / number - 1) >= LOSS


def _guards(node: ir.Node) -> bool:
    """Whether a sum or a maximum goes into a divisor, a root, a logarithm or a power: its constant is an epsilon."""
    if node.op_type not in ("Add", "Max"):
        return False
    uses = [use for output in node.outputs for use in output.uses()]
    return any(
        (use.node.op_type == "Div" and use.idx == 1)
        or use.node.op_type in ("Sqrt", "Rsqrt", "Reciprocal", "Log")
        or (use.node.op_type == "Pow" and use.idx == 0)
        for use in uses
    )


def _constant(nodes: list[ir.Node], message: str, effect: str, hint: str) -> Iterator[Finding]:
    more = f", in {len(nodes)} nodes" if len(nodes) > 1 else ""
    yield Place.of(nodes[0]).put(
        Finding(
            rule="numerics/constant-range",
            severity="advice",
            message=f"the constant {message}{more}",
            effect=effect,
            hint=hint,
        )
    )
