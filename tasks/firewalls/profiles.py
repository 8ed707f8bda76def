"""Turns a graph and its declared ranges into findings on sizes that it cannot run or that one engine cannot serve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx_ir as ir

from enginesmith.tasks.firewalls.dims import declared_dims
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.origin import Place
from enginesmith.tasks.firewalls.sized import Misfit, Sized, Sizer
from enginesmith.tasks.settings import DimSettings, InputSettings

_SWEEP = 16
"""Sizes of one dimension that are tried to learn what it has to be."""

WIDE = 16
"""Ratio of a dimension's largest to its smallest size from which on one profile serves neither end."""

BUCKET = 4
"""Ratio of largest to smallest size within one proposed profile."""


def check_profiles(model: ir.Model, sizer: Sizer, inputs: Mapping[str, InputSettings]) -> Iterator[Finding]:
    """What is wrong with the declared ranges.

    1. `shape/size-refused`, error: at a declared minimum, optimum or maximum some node cannot run, whatever the values:
       shape inference contradicts itself there. The sizes that do run are looked for, one dimension after the other,
       and said as a multiple where they are one.
    2. `shape/size-refused`, warning: the three run and a size between them does not.
    3. `shape/wide-profile`, advice: a dimension that is nowhere the first axis (a resolution, a length) and whose
       maximum is `WIDE` times its minimum or more; ranges of ratio `BUCKET` are proposed.

    Not reported: what inference is silent about (data-dependent shapes), and the width of a batch's range, since
    kernels for small and for large batches differ less.
    """
    dims = declared_dims(inputs)
    if not dims:
        return
    best = {name: given.opt for name, given in dims.items()}
    corners = [best] + [{n: getattr(g, end) for n, g in dims.items()} for end in ("min", "max")]
    between = {n: g.opt + 1 if g.opt < g.max else g.opt - 1 for n, g in dims.items()}
    declared = next((found for sizes in corners if (found := _failure(sizer, sizes))), None)
    found = declared or _failure(sizer, between)
    if found:
        misfit, sizes = found
        yield _refused(model, misfit, sizes, _rules(sizer, dims, best), blocks=declared is not None)
    for name, given in dims.items():
        first = any(name == declared_input.shape[0] for declared_input in inputs.values() if declared_input.shape)
        if not first and given.max >= WIDE * given.min:
            yield Finding(
                rule="shape/wide-profile",
                severity="advice",
                message=f"{name} spans {given.min} to {given.max}, {given.max / given.min:.0f} times",
                effect="one engine is tuned for one optimum: it wastes memory at the small end and time at both",
                hint="make one pipeline or profile per range: " + ", ".join(f"{a} to {b}" for a, b in buckets(given)),
            )


def buckets(given: DimSettings) -> list[tuple[int, int]]:
    """The range in as few ranges of ratio `BUCKET` as cover it, geometrically equal; upper ends on multiples of 8."""
    count = max(1, math.ceil(round(math.log(given.max / given.min, BUCKET), 9)))
    step = (given.max / given.min) ** (1 / count)
    ends = [given.min * step ** (i + 1) for i in range(count - 1)]
    rounded = [max(8, round(end / 8) * 8) if given.max > 64 else round(end) for end in ends]
    upper = [*sorted({e for e in rounded if given.min <= e < given.max}), given.max]
    lower = [given.min, *(e + 1 for e in upper[:-1])]
    return list(zip(lower, upper, strict=True))


def _failure(sizer: Sizer, sizes: Mapping[str, int]) -> tuple[Misfit, Mapping[str, int]] | None:
    result: Sized = sizer.at(sizes)
    return (result.misfit, sizes) if result.misfit else None


def _rules(sizer: Sizer, dims: Mapping[str, DimSettings], best: Mapping[str, int]) -> list[str]:
    """What each dimension has to be, from the sizes that run with the others at their optimum."""
    said = []
    for name, given in dims.items():
        tried = list(range(given.min, given.max + 1))
        if len(tried) > _SWEEP:
            near = (given.opt + sign * offset for offset in (0, 1, 2, 4, 8, 16, 24, 32, 64) for sign in (1, -1))
            tried = sorted({given.min, given.max, *(n for n in near if given.min <= n <= given.max)})
        works = [size for size in tried if _failure(sizer, {**best, name: size}) is None]
        if len(works) == len(tried):
            continue
        step = next((s for s in range(2, 129) if works and works == [n for n in tried if n % s == 0]), 0)
        if not works:
            said.append(f"no {name} between {given.min} and {given.max} was found that runs")
        elif step:
            said.append(f"{name} must be a multiple of {step}")
        else:
            said.append(f"of {name} = {tried[0]} to {tried[-1]}, these run: {', '.join(map(str, works[:8]))}")
    return said


def _refused(model: ir.Model, misfit: Misfit, sizes: Mapping[str, int], rules: list[str], *, blocks: bool) -> Finding:
    node = next((n for n in model.graph.all_nodes() if misfit.node and n.name == misfit.node), None)
    at = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    what = f"{misfit.op} cannot run at {at}: {misfit.said}"
    finding = Finding(
        rule="shape/size-refused",
        severity="error" if blocks else "warning",
        message="; ".join([what, *rules]),
        effect="every request of such a size fails; an engine for this profile cannot be built"
        if blocks
        else "requests of such sizes fail",
        hint="declare only sizes that run, or find the constant that the size of the export was written into",
    )
    return Place.of(node).put(finding)
