"""Turns a node that FP16 harms into the region that has to go back to FP32 with it.

One node in FP32 between FP16 neighbours often restores nothing: what it reads has been rounded already, and what it
returns is rounded again. A region ends where its values fit FP16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import onnx_ir as ir

from enginesmith.tasks.graph.fp16 import OVERFLOW, candidates, prepared
from enginesmith.tasks.graph.placement import MOVES_DATA, Reader, Survey, Unit

REDUCTIONS = frozenset(
    (
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
    )
)
"""Operators that bring many elements together into a statistic."""

_JOINS = frozenset(("Add", "Div", "Mul", "Sub"))
_ELEMENTWISE = _JOINS | frozenset(
    ("Abs", "Clip", "Exp", "Log", "Max", "Min", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Tanh")
)
_LIGHT = _ELEMENTWISE | MOVES_DATA | REDUCTIONS
_REACH = 24
"""How many nodes a written-out normalisation may be long."""

Kind = Literal["node", "closed", "pattern"]


@dataclass(frozen=True)
class Region:
    """Nodes that go back to FP32 together.

    Attributes:
        seed: the node that FP16 harms.
        nodes: all of them, in graph order, the seed included.
        kind: "node": the seed alone. "closed": with the nodes between it and the place where values fit FP16 again.
            "pattern": with the rest of the written-out normalisation (LayerNorm, softmax, …) that it belongs to.
    """

    seed: str
    nodes: tuple[str, ...]
    kind: Kind


class Regions:
    """The regions of one model.

    Args:
        model: FP32 model with unique node names. It is not changed.
        absmax: by node name, the largest magnitude among its float32 results, measured in FP32; nodes without a figure
            count as fitting FP16.
    """

    def __init__(self, model: ir.Model, absmax: Mapping[str, float]) -> None:
        self._survey = Survey(prepared(model))
        self._absmax = absmax
        names = candidates(model)
        self._position = {name: index for index, name in enumerate(names)}
        self._unit = {
            unit.node.name: unit
            for unit in self._survey.units
            if unit.node is not None and unit.node.name in self._position
        }

    @cached_property
    def patterns(self) -> tuple[tuple[str, ...], ...]:
        """The written-out normalisations: a statistic of a tensor, and the way to where it meets the tensor again.

        1. From each reduction, forward through element-wise operators, data movement and further reductions, to the
           nearest Add, Sub, Mul or Div whose other operand comes from what the reduction reads, on a way without
           reductions. All nodes on ways between the two form a block: mean and Sub, or square, mean, root and Div.
        2. Blocks that share nodes, or where one starts from another's result (one unary node may lie between: softmax's
           Exp), form one pattern.
        """
        blocks = [block for unit in self._survey.units if _is(unit, REDUCTIONS) for block in self._blocks(unit)]
        return tuple(self._ordered(block) for block in self._merged(blocks))

    def close(self, seeds: Iterable[str]) -> tuple[str, ...]:
        """The smallest set around the seeds at whose border every value fits FP16, in graph order.

        A result that overflows takes in everybody who reads it; an operand that overflows takes in its writer.
        """
        region: set[Unit] = set()
        todo = [self._unit[name] for name in seeds]
        while todo:
            unit = todo.pop()
            if unit in region:
                continue
            region.add(unit)
            for value in unit.writes:
                if not self._fits(value):
                    todo += [reader.unit for reader in self._readers(value) if reader.unit is not None]
            todo += [w for v, _ in unit.reads if not self._fits(v) and (w := self._survey.writer.get(v)) is not None]
        return self._ordered(region)

    def around(self, seed: str) -> Region:
        """The region that a node's own harm calls for.

        Closed; and when closing takes half of the arithmetic of a pattern, the whole pattern: it is then one FP32
        kernel and not two halves with casts between them.
        """
        closed = self.close([seed])
        whole = set(closed)
        for pattern in self.patterns:
            arithmetic = [name for name in pattern if not _is(self._unit[name], MOVES_DATA)]
            taken = sum(name in whole for name in arithmetic)
            if taken > 1 and 2 * taken >= len(arithmetic):
                whole.update(pattern)
        if len(whole) > len(closed):
            return Region(seed, self.close(whole), "pattern")
        return Region(seed, closed, "closed" if len(closed) > 1 else "node")

    def _blocks(self, reduction: Unit) -> Iterator[frozenset[Unit]]:
        sources = self._sources(reduction)
        seen: set[Unit] = {reduction}
        front = [reduction]
        while front and len(seen) < _REACH:
            unit = front.pop(0)
            for value in unit.writes:
                for reader in self._readers(value):
                    after = reader.unit
                    if after is None or after in seen or not _is(after, _LIGHT):
                        continue
                    seen.add(after)
                    others = [v for v, _ in after.reads if v is not value]
                    forks = set().union(*(self._direct(v) & sources for v in others)) if _is(after, _JOINS) else set()
                    if forks:
                        yield self._between(forks, after) | {after}
                    else:
                        front.append(after)

    def _sources(self, reduction: Unit) -> set[ir.Value]:
        """Values that a reduction's operand is made from by light nodes, itself included."""
        return self._upstream([v for v, _ in reduction.reads], _LIGHT)

    def _direct(self, value: ir.Value) -> set[ir.Value]:
        """Values that a value is made from without a reduction on the way, itself included."""
        return self._upstream([value], _LIGHT - REDUCTIONS)

    def _upstream(self, values: list[ir.Value], through: frozenset[str]) -> set[ir.Value]:
        found: set[ir.Value] = set()
        todo = list(values)
        while todo and len(found) < _REACH:
            value = todo.pop(0)
            if value in found:
                continue
            found.add(value)
            writer = self._survey.writer.get(value)
            if writer is not None and _is(writer, through):
                todo += [v for v, _ in writer.reads]
        return found

    def _between(self, forks: set[ir.Value], join: Unit) -> frozenset[Unit]:
        """The light nodes on ways from the nearest forks to the join."""
        above: dict[Unit, list[Unit]] = {}
        todo = [join]
        while todo and len(above) < _REACH:
            unit = todo.pop(0)
            if unit in above:
                continue
            above[unit] = [
                w for v, _ in unit.reads if v not in forks and (w := self._survey.writer.get(v)) and _is(w, _LIGHT)
            ]
            todo += above[unit]
        from_fork = {unit for unit in above if any(v in forks for v, _ in unit.reads)}
        growing = True
        while growing:
            more = {
                unit for unit, writers in above.items() if unit not in from_fork and from_fork.intersection(writers)
            }
            from_fork |= more
            growing = bool(more)
        return frozenset(from_fork)

    def _merged(self, blocks: list[frozenset[Unit]]) -> list[set[Unit]]:
        merged: list[set[Unit]] = []
        for block in blocks:
            whole = set(block)
            for unit in block:
                for value, _ in unit.reads:
                    whole |= self._bridge(value, merged)
            rest = []
            for other in merged:
                if other & whole:
                    whole |= other
                else:
                    rest.append(other)
            merged = [*rest, whole]
        return merged

    def _bridge(self, value: ir.Value, patterns: list[set[Unit]]) -> set[Unit]:
        """The writer of a value and what lies between it and a pattern; empty when no pattern is next to it."""
        writer = self._survey.writer.get(value)
        if writer is None:
            return set()
        if any(writer in pattern for pattern in patterns):
            return {writer}
        if _is(writer, _ELEMENTWISE) and len(writer.reads) == 1 and not writer.constants:
            before = self._survey.writer.get(writer.reads[0][0])
            if any(before in pattern for pattern in patterns) and before is not None:
                return {writer, before}
        return set()

    def _fits(self, value: ir.Value) -> bool:
        """Whether a value's largest magnitude is finite in FP16; one that is infinite in FP32 already is no reason."""
        reach = max((self._absmax.get(w.node.name or "", 0.0) for w in self._origins(value) if w.node), default=0.0)
        return not OVERFLOW <= reach < float("inf")

    def _origins(self, value: ir.Value) -> set[Unit]:
        """The nodes that a value comes from; what control flow carries is followed to its sources."""
        found: set[Unit] = set()
        todo = [value]
        while todo:
            writer = self._survey.writer.get(todo.pop())
            if writer is None or writer in found:
                continue
            found.add(writer)
            if writer.node is None:
                todo += [v for v, _ in writer.reads]
        return found

    def _readers(self, value: ir.Value) -> list[Reader]:
        return self._survey.readers.get(value, [])

    def _ordered(self, units: Collection[Unit]) -> tuple[str, ...]:
        names = {u.node.name for u in units if u.node is not None}
        return tuple(sorted((n for n in names if n in self._position), key=self._position.__getitem__))


def _is(unit: Unit, operators: frozenset[str]) -> bool:
    return unit.node is not None and unit.node.op_type in operators
