"""Turns a graph, its declared inputs and the module it came from into findings about dimensions and values."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.dims import symbolic_shape
from enginesmith.tasks.firewalls.experiment import Case, Difference, differences, output_range
from enginesmith.tasks.firewalls.findings import Finding, is_tooling, readable_path
from enginesmith.tasks.settings import InputSettings

Array = npt.NDArray[Any]
_UNREAL = 10

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]


def check_inputs(model: ir.Model, inputs: Mapping[str, InputSettings]) -> list[Finding]:
    """Read inputs and their dimensions back from the graph.

    `shape/input-gone`: a declared input is not in the graph. `shape/input-unknown`: the graph wants one that is not
    declared. `shape/static-dim`: a dimension is not what was declared. `shape/dtype`: an input has another dtype.
    `shape/input-unused`: nothing reads an input (a warning: the graph is right, an engine may drop the input).
    """
    values = {str(value.name): value for value in model.graph.inputs if not value.is_initializer()}
    findings = [
        Finding(
            rule="shape/input-gone",
            severity="error",
            message=f"the declared input {name!r} is not in the graph: feeding by position would shift the others",
            hint="forward does not use it: remove it from inputs, or use it",
        )
        for name in inputs
        if name not in values
    ]
    for name, value in values.items():
        declared = inputs.get(name)
        if declared is None:
            findings.append(
                Finding(
                    rule="shape/input-unknown",
                    severity="error",
                    message=f"the graph has an input {name!r} that is not declared",
                    hint=f"declared are {', '.join(inputs)}; the graph's are {', '.join(values)}",
                )
            )
            continue
        findings += _check_shape(name, value, declared)
        if not value.uses() and not value.is_graph_output():
            findings.append(
                Finding(
                    rule="shape/input-unused",
                    severity="warning",
                    message=f"nothing reads the input {name!r}: an engine builder may drop it",
                    hint="remove it from inputs and from forward, or use it",
                )
            )
    return findings


def _check_shape(name: str, value: ir.Value, declared: InputSettings) -> list[Finding]:
    findings: list[Finding] = []
    dtype = "" if value.dtype is None else str(np.dtype(value.dtype.numpy()))
    if dtype != declared.dtype:
        findings.append(
            Finding(
                rule="shape/dtype",
                severity="error",
                message=f"input {name!r} is {dtype or 'of unknown type'} in the graph, declared is {declared.dtype}",
                hint="declare the dtype that the graph has, or cast in forward",
            )
        )
    wanted = symbolic_shape(declared)
    found = None if value.shape is None else [d.value if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
    if found is None or len(found) != len(wanted):
        shown = "no shape" if found is None else f"rank {len(found)}"
        message = f"input {name!r} has {shown} in the graph, declared is rank {len(wanted)}"
        return [*findings, Finding(rule="shape/static-dim", severity="error", message=message)]
    for axis, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if want == have:
            continue
        dynamic = isinstance(want, str)
        findings.append(
            Finding(
                rule="shape/static-dim",
                severity="error",
                message=(
                    f"dimension {want} of input {name!r} came out static: axis {axis} is {have} in the graph"
                    if dynamic and isinstance(have, int)
                    else f"axis {axis} of input {name!r} is {have} in the graph, declared is {want}"
                ),
                hint=(
                    "something in forward reads the size as a Python number (int(), len(), a loop); "
                    "keep it a tensor size, or declare the dimension as that number"
                    if dynamic
                    else "declare what the graph has"
                ),
            )
        )
    return findings


@dataclass(frozen=True)
class Agreement:
    """What an experiment measured.

    Attributes:
        findings: empty when every output agrees everywhere.
        errors: for each output the largest absolute error relative to its range, over all cases.
        cases: the words of the cases that were compared.
        shapes: for each compared case its sizes and the shapes of the original's outputs.
    """

    findings: tuple[Finding, ...]
    errors: dict[str, float]
    cases: tuple[str, ...]
    shapes: tuple[tuple[dict[str, int], dict[str, tuple[int, ...]]], ...] = ()


def compare(
    original: Run,
    graph: Run,
    cases: Iterable[Case],
    *,
    tolerance: float,
    name: str = "the module",
    roots: Sequence[Path] = (),
) -> Agreement:
    """Run the original and the graph on every case and compare all outputs by name.

    `shape/value`: an output differs. `shape/graph-fails`: the graph cannot run where the original can.
    `shape/original-fails`: the original itself cannot run at min, opt or max. `shape/constrained-dim` (a warning): it
    cannot at another size inside the declared range. `shape/random`: the original differs from itself.

    Args:
        original: arrays by input name in, arrays by output name out.
        graph: likewise.
        cases: what to run; on the first one the original runs twice.
        tolerance: relative to each output's range over all real cases; ten times that where the values are no samples:
            those cases are there for branches, whose error is of the order of the range.
        name: what messages call the original.
        roots: the user's folders, for places in findings.
    """
    findings: list[Finding] = []
    ran: list[tuple[Case, Mapping[str, Array], Mapping[str, Array]]] = []
    for index, case in enumerate(cases):
        progress.checkpoint()
        try:
            expected = original(case.feed)
        except Exception as error:  # the user's forward may raise anything
            if case.real:
                findings.append(_original_failed(case, error, name, roots))
            continue
        if index == 0:
            random = _random(case, expected, original(case.feed), tolerance, name)
            if random:
                return Agreement(tuple(random), {}, (case.word,))
        try:
            ran.append((case, expected, graph(case.feed)))
        except EnginesmithError as error:
            findings.append(
                Finding(
                    rule="shape/graph-fails",
                    severity="error",
                    message=f"the graph cannot run {case.place}, {name} can: {'; '.join(error.details[:2])}",
                    hint="something was fixed at the size of the export: a Reshape, an Expand, a table of positions",
                )
            )
    ranges = _ranges(ran)
    errors: dict[str, float] = dict.fromkeys(ranges, 0.0)
    differing: dict[str, list[tuple[Difference, Case]]] = {}
    for case, expected, found in ran:
        scales = ranges if case.real else {n: max(ranges[n], output_range([expected[n]])) for n in expected}
        allowed = tolerance if case.real else _UNREAL * tolerance
        wrong, relative = differences(expected, found, case=case, tolerance=allowed, ranges=scales)
        for output, worst in relative.items():
            errors[output] = max(errors[output], worst)
        for difference in wrong:
            differing.setdefault(difference.output, []).append((difference, case))
    findings += [_differs(output, found, name) for output, found in differing.items()]
    shapes = tuple((case.sizes, {n: value.shape for n, value in expected.items()}) for case, expected, _ in ran)
    return Agreement(tuple(findings), errors, tuple(case.word for case, _, _ in ran), shapes)


def _differs(output: str, found: Sequence[tuple[Difference, Case]], name: str) -> Finding:
    """One finding for an output: the worst case, and how many others."""
    worst, case = max(found, key=lambda entry: entry[0].error)
    others = [other.word for _, other in found if other is not case]
    return Finding(
        rule="shape/value",
        severity="error",
        message=f"output {output!r} of the graph {worst.found}, {case.place}"
        + (f"; it differs in {len(others)} other cases too: {', '.join(others)}" if others else ""),
        hint=f"the graph does not compute what {name} computes; the other findings may name the place",
    )


def _ranges(ran: Sequence[tuple[Case, Mapping[str, Array], Mapping[str, Array]]]) -> dict[str, float]:
    """Range of each output over all real cases, as the original computes it."""
    names = dict.fromkeys(name for _, expected, _ in ran for name in expected)
    return {n: output_range([expected[n] for case, expected, _ in ran if case.real and n in expected]) for n in names}


def _random(
    case: Case, first: Mapping[str, Array], second: Mapping[str, Array], tolerance: float, name: str
) -> list[Finding]:
    ranges = {output: output_range([value]) for output, value in first.items()}
    wrong, _ = differences(first, second, case=replace(case, real=False), tolerance=tolerance, ranges=ranges)
    return [
        Finding(
            rule="shape/random",
            severity="error",
            message=f"output {d.output!r} {d.found} between two runs of {name} on the same input",
            hint="something in it draws random numbers in eval mode (functional dropout with training=True?)",
        )
        for d in wrong
    ]


def _original_failed(case: Case, error: Exception, name: str, roots: Sequence[Path]) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if any(Path(f.filename).is_relative_to(root) for root in roots)]
    best = own or [f for f in frames if not is_tooling(f.filename)]
    said = [*error.details, error.found] if isinstance(error, EnginesmithError) else str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {said[0] if said else ''}"[:300]
    return Finding(
        rule="shape/original-fails" if case.declared else "shape/constrained-dim",
        severity="error" if case.declared else "warning",
        message=f"{name} itself fails {case.place}, inside the declared range: {reason}",
        file=readable_path(best[-1].filename, roots) if best else "",
        line=(best[-1].lineno or 0) if best else 0,
        hint=(
            "declare only sizes that it accepts"
            if case.declared
            else "min, opt and max are accepted; feed no size between them that is not"
        ),
    )


def name_output_dims(
    model: ir.Model, shapes: Sequence[tuple[Mapping[str, int], Mapping[str, tuple[int, ...]]]]
) -> None:
    """Correct the output shapes that a file claims by those that were seen, in place.

    An axis that always has the size of one declared dimension, over at least two sizes of it, gets its name; one that
    varies and is claimed static becomes free; an unknown one that never varies, though every dimension did, its number.
    """
    dims = sorted({name for sizes, _ in shapes for name in sizes})
    varied = all(len({sizes[name] for sizes, _ in shapes}) > 1 for name in dims)
    for value in model.graph.outputs:
        seen = [(sizes, outputs[str(value.name)]) for sizes, outputs in shapes if value.name in outputs]
        if not seen or len({len(shape) for _, shape in seen}) > 1:
            continue
        claimed = value.shape if value.shape is not None and len(value.shape) == len(seen[0][1]) else None
        named: list[int | str | None] = []
        for axis in range(len(seen[0][1])):
            found = {shape[axis] for _, shape in seen}
            same = [n for n in dims if len(found) > 1 and all(sizes[n] == shape[axis] for sizes, shape in seen)]
            claim = None if claimed is None else claimed[axis]
            if same:
                named.append(same[0])
            elif len(found) > 1:
                named.append(None if isinstance(claim, int) or claim is None else claim.value)
            elif isinstance(claim, int):
                named.append(claim)
            else:
                named.append(found.pop() if varied else None if claim is None else claim.value)
        value.shape = ir.Shape(named)
