"""Turns a graph and a GPU into advice: work that its Tensor Cores waste, nodes that its memory or launches bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from enginesmith.tasks.firewalls.cost import MATRIX, Cost, costs
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.gpus import Gpu
from enginesmith.tasks.firewalls.origin import Place
from enginesmith.tasks.firewalls.sized import Sized
from enginesmith.tasks.graph.gelu import LARGEST_ERROR, find_gelus

TILES = {"fp16": 8, "int8": 16}
"""Channels that a Tensor Core instruction takes at once. Source: NVIDIA, Deep Learning Performance Guide."""

SHARE = 0.02
"""Share of the whole estimated time below which nothing is said."""

LAUNCH = 3e-6
"""Seconds that starting one kernel takes, order of magnitude."""

_SHOWN = 3
_ITEM = 2


def check_hardware(model: ir.Model, sized: Sized, gpu: Gpu) -> Iterator[Finding]:
    """Advice for one GPU in FP16; never more than one finding per rule, with the most expensive nodes.

    1. `hardware/tile-waste`: convolutions and matrix products whose channels are no multiple of 8 (INT8: 16). The share
       is what the padding adds, and the estimate what it costs of the whole. Depthwise convolutions do not run on
       Tensor Cores and are not counted; an input of 3 channels is: it cannot be helped, so it is left out.
    2. `hardware/memory-bound`: depthwise convolutions whose arithmetic intensity is below the GPU's balance: FLOPs
       say nothing about time.
    3. `hardware/launch-bound`: more nodes than their work pays for: the whole graph's roofline time is below half of
       what launching each kernel takes.

    4. `hardware/expensive-activation`: GELUs written out as several nodes, whose bytes take `SHARE` of the time or more
       when the nodes run one by one; what x·sigmoid(1.702·x) would save, at which error. SiLU is of that form already.

    Only nodes that take `SHARE` of the graph's roofline time or more are named.
    """
    every = list(costs(model, sized))
    total = sum(gpu.seconds(c.flops, c.bytes(_ITEM)) for c in every)
    if not total:
        return
    yield from _tiles(every, gpu, total)
    yield from _memory(every, gpu, total)
    yield from _activations(model, every, gpu, total)
    kernels = sum(1 for c in every if c.node.op_type in MATRIX or c.flops)
    if kernels >= 20 and total < 0.5 * kernels * LAUNCH:
        yield Finding(
            rule="hardware/launch-bound",
            severity="advice",
            message=f"{kernels} nodes need {total * 1e6:.1f} µs of arithmetic and memory on {gpu.name}, "
            f"and about {kernels * LAUNCH * 1e6:.0f} µs to be launched one by one",
            effect="at this size the host, not the GPU, decides the latency",
            hint="use larger batches or a CUDA graph; write chains of small operations as one operator",
        )


def _activations(model: ir.Model, every: Sequence[Cost], gpu: Gpu, total: float) -> Iterator[Finding]:
    gelus = [gelu for gelu in find_gelus(model) if gelu.nodes > 3]
    by_name = {str(cost.node.name): cost for cost in every}
    saved = 0.0
    for gelu in gelus:
        last = by_name.get(gelu.node)
        if last is not None:  # every node of the chain reads and writes what its last one does
            saved += (gelu.nodes - 3) * gpu.seconds(last.flops, last.bytes(_ITEM))
    if not gelus or saved < SHARE * total:
        return
    first = by_name.get(gelus[0].node)
    yield Place.of(first.node if first is not None else None).put(
        Finding(
            rule="hardware/expensive-activation",
            severity="advice",
            message=f"{len(gelus)} GELU(s) are written out as {gelus[0].nodes} nodes each; x·sigmoid(1.702·x) takes 3 "
            f"and differs by at most {LARGEST_ERROR:.4f}",
            effect=f"up to {saved * 1e6:.1f} of {total * 1e6:.1f} µs on {gpu.name} (roofline, FP16, unfused)",
            hint="set precision.cheap_activations: true, which replaces what the metric does not notice",
        )
    )


@dataclass(frozen=True)
class _Waste:
    cost: Cost
    channels: tuple[int, ...]
    share: float
    seconds: float


def _tiles(every: Sequence[Cost], gpu: Gpu, total: float) -> Iterator[Finding]:
    wasted = []
    for cost in every:
        channels = _channels(cost.node)
        if channels is None:
            continue
        padded = 1.0
        for count in channels:
            padded *= _up(count, TILES["fp16"]) / count
        seconds = gpu.seconds(cost.flops * padded, cost.bytes(_ITEM)) - gpu.seconds(cost.flops, cost.bytes(_ITEM))
        if padded > 1:
            wasted.append(_Waste(cost, channels, 1 - 1 / padded, seconds))
    wasted.sort(key=lambda w: -w.seconds)
    lost = sum(w.seconds for w in wasted)
    if not wasted or lost < SHARE * total:
        return
    worst = wasted[:_SHOWN]
    named = "; ".join(
        f"{w.cost.node.name} {'x'.join(map(str, w.channels))} wastes {w.share:.0%} ({w.cost.flops / 1e9:.2f} GFLOP)"
        for w in worst
    )
    yield Place.of(worst[0].cost.node).put(
        Finding(
            rule="hardware/tile-waste",
            severity="advice",
            message=f"{len(wasted)} layer(s) have channels that are no multiple of 8: {named}",
            effect=f"about {lost * 1e6:.1f} of {total * 1e6:.1f} µs on {gpu.name} (roofline, FP16) go into padding",
            hint="make channels multiples of 8, or of 16 for INT8; the padding costs the same as real channels",
        )
    )


def _memory(every: Sequence[Cost], gpu: Gpu, total: float) -> Iterator[Finding]:
    balance = gpu.fp16 * 1e12 / (gpu.bandwidth * 1e9)
    deep = [c for c in every if _is_depthwise(c.node) and c.intensity(_ITEM) < balance]
    time = sum(gpu.seconds(c.flops, c.bytes(_ITEM)) for c in deep)
    if not deep or time < 10 * SHARE * total:
        return
    deep.sort(key=lambda c: -c.elements)
    flops = sum(c.flops for c in deep) / max(1.0, sum(c.flops for c in every))
    yield Place.of(deep[0].node).put(
        Finding(
            rule="hardware/memory-bound",
            severity="advice",
            message=f"{len(deep)} depthwise convolution(s) do {flops:.0%} of the FLOPs in {time / total:.0%} of the "
            f"time: {deep[0].intensity(_ITEM):.1f} FLOP per byte, {gpu.name} needs {balance:.0f}",
            effect=f"about {time * 1e6:.1f} of {total * 1e6:.1f} µs on {gpu.name} (roofline, FP16) wait for memory",
            hint="fewer FLOPs will not help here; smaller activations, or dense convolutions of fewer channels, do",
        )
    )


def _channels(node: ir.Node) -> tuple[int, ...] | None:
    """Input and output channels of a Tensor Core operator; None for others, depthwise ones and a first layer."""
    if node.op_type not in ("Conv", "Gemm", "MatMul") or len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    weight = node.inputs[1]
    if weight.const_value is None or len(weight.const_value.shape) < 2 or _is_depthwise(node):
        return None
    shape = list(weight.const_value.shape.numpy())
    if node.op_type == "Conv" or (
        node.op_type == "Gemm" and (attribute := node.attributes.get("transB")) is not None and attribute.as_int()
    ):
        inner, outer = shape[1], shape[0]
    else:
        inner, outer = shape[-2], shape[-1]
    first = node.inputs[0] is not None and node.inputs[0].is_graph_input()
    last = any(output.is_graph_output() for output in node.outputs)
    kept = ([] if first else [inner]) + ([] if last else [outer])
    return tuple(kept) or None


def _is_depthwise(node: ir.Node) -> bool:
    group = node.attributes.get("group")
    if node.op_type != "Conv" or group is None or group.as_int() == 1 or node.inputs[1] is None:
        return False
    weight = node.inputs[1].const_value
    return weight is not None and weight.shape.numpy()[1] == 1


def _up(count: int, tile: int) -> int:
    return -(-count // tile) * tile
