"""Turns an exported graph into a simpler one that computes the same, or keeps it as it is and says why."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass, TopologicalSortPass
from pydantic import BaseModel

from enginesmith.tasks import child, progress
from enginesmith.tasks.child import ChildError, Limits
from enginesmith.tasks.data import load_dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.findings import blocking
from enginesmith.tasks.firewalls.origin import MODULE, SOURCE
from enginesmith.tasks.firewalls.samples import cases_of, load_cases, save_cases
from enginesmith.tasks.firewalls.shape import check_inputs, compare
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import InputSettings, SimplifySettings
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact

ROOM = 1 << 20
"""Bytes that a graph may grow beyond `growth` times its size."""

ATTEMPTS: dict[str, dict[str, Any]] = {
    "everything": {"include_subgraph": True},
    "folds up to 64 kB, the main graph only": {"tensor_size_threshold": "64KB"},
}
"""Options of onnxsim, most first; the second is tried when the result of the first does not pass the gate."""

LIMITS = Limits(seconds=300, memory=12 << 30)


class Attempt(BaseModel):
    """One run of the simplifier.

    Attributes:
        how: what it was allowed to do.
        refused: why its result was not taken; empty when it was.
    """

    how: str
    refused: str


class SimplifyReport(BaseModel):
    """What became of the graph.

    Attributes:
        kept: whether the original was kept.
        reason: why, or what was gained.
        nodes: before and after.
        bytes: size of model.onnx and its data before and after.
        operators: operators whose count changed: before and after.
        errors: for each output its largest difference from the original, relative to its range.
        attempts: what was tried.
    """

    kept: bool
    reason: str
    nodes: tuple[int, int]
    bytes: tuple[int, int]
    operators: dict[str, tuple[int, int]]
    errors: dict[str, float]
    attempts: tuple[Attempt, ...]


def simplify_graph(
    out: Path, *, model: Artifact, data: Artifact, inputs: Mapping[str, InputSettings], settings: SimplifySettings
) -> SimplifyReport:
    """Run onnxsim in a child process and take its result only if it passes the gate.

    The gate: every output equals the original's on real samples at all declared sizes, inputs, their dimensions and
    the opset are unchanged, and the files are at most ``growth`` times as large plus 1 MB. When the result grew too
    much, or the simplifier crashed, hung or ran out of memory, it is tried once more with less (`ATTEMPTS`). What does
    not pass then is not taken: the original is kept byte for byte.

    Args:
        out: empty folder; model.onnx is written here.
        model: the exported graph.
        data: the data stage's artifact; calibration samples are what outputs are compared on.
        inputs: declared inputs.
        settings: `enabled`, `growth`, `tolerance`.
    """
    if not settings.enabled:
        return _keep(out, model, "switched off in the settings", ())
    attempts: list[Attempt] = []
    with tempfile.TemporaryDirectory(prefix="enginesmith-simplify-") as scratch, progress.track("simplify", 2) as bar:
        cases = Path(scratch) / "cases"
        cases.mkdir()
        save_cases(cases_of(load_dataset(data, "calibration"), inputs), cases)
        for how, options in ATTEMPTS.items():
            folder = Path(scratch) / f"attempt-{len(attempts)}"
            folder.mkdir()
            verdict = _attempt(model.path, folder, cases, inputs, settings, options)
            attempts.append(Attempt(how=how, refused=verdict.refused))
            bar.advance()
            if not verdict.refused:
                _copy(folder, out)
                return _report(out, model, errors=verdict.errors, attempts=attempts)
            if verdict.final:
                break
    return _keep(out, model, attempts[0].refused, attempts)


class Verdict(BaseModel):
    """What a child says of one attempt.

    Attributes:
        refused: why the result must not replace the original; empty: it may.
        final: whether trying with less is pointless: the simplifier ran and its result is wrong.
        errors: for each output its largest difference from the original, relative to its range.
    """

    refused: str = ""
    final: bool = False
    errors: dict[str, float] = {}


def _attempt(
    original: Path,
    folder: Path,
    cases: Path,
    inputs: Mapping[str, InputSettings],
    settings: SimplifySettings,
    options: Mapping[str, Any],
) -> Verdict:
    try:
        answer = child.call(
            attempt,
            limits=LIMITS,
            what="onnxsim",
            original=str(original),
            out=str(folder),
            cases=str(cases),
            inputs={name: declared.model_dump(mode="json") for name, declared in inputs.items()},
            settings=settings.model_dump(),
            room=ROOM,
            options=options,
        )
    except ChildError as error:
        return Verdict(refused=error.found.splitlines()[0])
    return Verdict.model_validate(answer)


def attempt(
    original: str,
    out: str,
    cases: str,
    inputs: dict[str, Any],
    settings: dict[str, Any],
    room: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """In a child: simplify one graph and judge the result; a `Verdict` as JSON.

    Args:
        original: folder with the graph.
        out: folder for the result.
        cases: folder written by `save_cases`.
        inputs: declared inputs.
        settings: `SimplifySettings`.
        room: bytes of growth that are always allowed.
        options: further arguments of `onnxsim.simplify`.
    """
    chosen = SimplifySettings.model_validate(settings)
    run_onnxsim(Path(original), Path(out), options)
    before, after = folder_bytes(Path(original)), folder_bytes(Path(out))
    limit = int(chosen.growth * before) + room
    if after > limit:
        return Verdict(refused=f"it grew from {before} to {after} bytes, {limit} are allowed").model_dump()
    declared = {name: InputSettings.model_validate(value) for name, value in inputs.items()}
    return judge_simplified(Path(original), Path(out), Path(cases), declared, chosen.tolerance).model_dump()


def run_onnxsim(original: Path, out: Path, options: Mapping[str, Any]) -> None:
    """Simplify one graph and bring the result into the pipeline's form."""
    # onnxsim imports torch for helpers that are not used here: seconds and 200 MB in every child.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type] # how the import system spells "not here"
    import onnxsim

    simplified, _ = onnxsim.simplify(onnx.load(original / io.MODEL), check_n=0, **options)
    model, source = ir.from_proto(simplified), io.load(original)
    _copy_origins(source, model)
    _copy_symbols(source, model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveUnusedNodesPass()(model)
    TopologicalSortPass()(model)
    UniqueNodeNames()(model)
    io.save(model, out)


def _copy_origins(before: ir.Model, after: ir.Model) -> None:
    """A node that still makes a value of the original's comes from where that value's node came."""
    origins = {value.name: node for node in before.graph.all_nodes() for value in node.outputs}
    for node in after.graph.all_nodes():
        source = next((origins[value.name] for value in node.outputs if value.name in origins), None)
        node.metadata_props.clear()
        node.doc_string = None
        if source is None:
            continue
        for key in (MODULE, SOURCE):
            if key in source.metadata_props:
                node.metadata_props[key] = source.metadata_props[key]
        if source.op_type == node.op_type:
            node.name = source.name


def _copy_symbols(before: ir.Model, after: ir.Model) -> None:
    """Give output dimensions their names back where inference calls them otherwise; a number it found stays."""
    for old, new in zip(before.graph.outputs, after.graph.outputs, strict=False):
        if old.shape is not None and new.shape is not None and len(old.shape) == len(new.shape):
            new.shape = ir.Shape(b if isinstance(b, int) else a for a, b in zip(old.shape, new.shape, strict=True))


def judge_simplified(
    original: Path, candidate: Path, cases: Path, inputs: Mapping[str, InputSettings], tolerance: float
) -> Verdict:
    """Compare a simplified graph with the original: interface, checker, and every output on every case."""
    before, after = io.load(original), io.load(candidate)
    problem = _changed(before, after) or "; ".join(f.message for f in blocking(check_inputs(after, inputs)))
    if problem:
        return Verdict(refused=problem, final=True)
    try:
        onnx.checker.check_model(str(candidate / io.MODEL), full_check=True)
        runner = OnnxRunner(candidate)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return Verdict(refused=f"ONNX's checker refuses it: {str(error).strip().splitlines()[0]}", final=True)
    except EnginesmithError as error:
        return Verdict(refused=f"ONNX Runtime refuses it: {'; '.join(error.details[:1])}", final=True)
    agreement = compare(
        OnnxRunner(original).run, runner.run, load_cases(cases), tolerance=tolerance, name="the original"
    )
    wrong = blocking(agreement.findings)[:3]
    return Verdict(refused="; ".join(f.message for f in wrong), final=True, errors=agreement.errors)


def _changed(before: ir.Model, after: ir.Model) -> str:
    """What the simplifier changed that it must not; empty when nothing."""
    if before.opset_imports.get("") != after.opset_imports.get(""):
        return f"the opset changed from {before.opset_imports.get('')} to {after.opset_imports.get('')}"
    for kind in ("inputs", "outputs"):
        old, new = _signature(getattr(before.graph, kind)), _signature(getattr(after.graph, kind))
        if [entry[:2] for entry in old] != [entry[:2] for entry in new]:
            return f"the {kind} changed from {_names(old)} to {_names(new)}"
        for (name, _, was), (_, _, now) in zip(old, new, strict=True):
            if was is not None and (now is None or len(was) != len(now)):
                return f"the rank of {name} changed"
            for a, b in zip(was or (), now or (), strict=True):
                if a != b and not isinstance(a, int) and isinstance(b, int):
                    return f"dimension {a} of {name} became {b}"
                if isinstance(a, int) and a != b:
                    return f"a dimension of {name} changed from {a} to {b}"
    return ""


def _signature(values: Any) -> list[tuple[str, Any, list[int | str | None] | None]]:
    return [
        (
            str(v.name),
            v.dtype,
            None if v.shape is None else [d.value if isinstance(d, ir.SymbolicDim) else d for d in v.shape],
        )
        for v in values
    ]


def _names(signature: list[tuple[str, Any, Any]]) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype, _ in signature)


def folder_bytes(folder: Path) -> int:
    """Bytes of model.onnx and its data."""
    return sum((folder / name).stat().st_size for name in (io.MODEL, io.DATA) if (folder / name).exists())


def _keep(out: Path, model: Artifact, reason: str, attempts: Sequence[Attempt]) -> SimplifyReport:
    _copy(model.path, out)
    return _report(out, model, errors={}, attempts=attempts, kept_because=reason)


def _copy(source: Path, out: Path) -> None:
    for name in (io.MODEL, io.DATA):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def _report(
    out: Path, model: Artifact, *, errors: dict[str, float], attempts: Sequence[Attempt], kept_because: str = ""
) -> SimplifyReport:
    before, after = (Counter(n.op_type for n in io.load(folder).graph.all_nodes()) for folder in (model.path, out))
    nodes = (before.total(), after.total())
    return SimplifyReport(
        kept=bool(kept_because),
        reason=kept_because or f"{nodes[0]} nodes became {nodes[1]}",
        nodes=nodes,
        bytes=(folder_bytes(model.path), folder_bytes(out)),
        operators={op: (before[op], after[op]) for op in sorted({*before, *after}) if before[op] != after[op]},
        errors=errors,
        attempts=tuple(attempts),
    )


SIMPLIFY = Stage("simplify", version=1, run=simplify_graph, tools=("onnxsim", "onnx", "onnx-ir", "onnxruntime"))
