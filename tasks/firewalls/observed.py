"""Turns a graph and one feed into the largest absolute value of each of its floating-point tensors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.experiment import Case
from enginesmith.tasks.runner import OnnxRunner


def observe(model: ir.Model, cases: Iterable[Case]) -> dict[str, float]:
    """Largest absolute value by tensor name on the first case of real samples; empty when the graph does not run on it.

    Infinite and NaN values are left out, and so are tensors inside of subgraphs. A foreign model is run: call it where
    it may run, in a child under limits.

    Args:
        model: a valid model; it is not changed.
        cases: as the experiment's; only the first real one is taken.
    """
    case = next((case for case in cases if case.real and case.declared), None)
    if case is None:
        return {}
    copy = model.clone()
    present = {id(value) for value in copy.graph.outputs}
    wanted = [
        value
        for node in copy.graph
        for value in node.outputs
        if value.name and value.dtype is not None and value.dtype.is_floating_point()
    ]
    copy.graph.outputs.extend(value for value in wanted if id(value) not in present)
    names = [str(value.name) for value in wanted]
    try:
        with OnnxRunner(copy) as runner:
            results = runner.run({name: case.feed[name] for name in runner.inputs if name in case.feed})
    except EnginesmithError:
        return {}
    found = {}
    for name in names:
        array = results[name]
        finite = np.abs(array[np.isfinite(array)])
        if finite.size:
            found[name] = float(finite.max())
    return found
