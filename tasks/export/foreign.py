"""Turns somebody's ONNX file into a graph in the pipeline's form; the part that runs in a child process.

An ONNX file is a program: its parser, shape inference and the run itself happen under time and memory limits.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
    ShapeInferencePass,
    TopologicalSortPass,
)
from pydantic import BaseModel

from enginesmith.tasks import child
from enginesmith.tasks.child import ChildError, Limits
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.dims import symbolic_shape
from enginesmith.tasks.firewalls.experiment import Case
from enginesmith.tasks.firewalls.findings import Finding, blocking
from enginesmith.tasks.firewalls.graph_rules import graph_findings
from enginesmith.tasks.firewalls.observed import observe
from enginesmith.tasks.firewalls.samples import load_cases, save_cases
from enginesmith.tasks.firewalls.shape import Agreement, check_inputs, compare, name_output_dims
from enginesmith.tasks.firewalls.waivers import waive
from enginesmith.tasks.graph import io
from enginesmith.tasks.graph.names import UniqueNodeNames
from enginesmith.tasks.runner import OnnxRunner
from enginesmith.tasks.settings import InputSettings, WaiverSettings

KEY = "model.checkpoint"
TARGET_OPSET = 18
CONVERSION_TOLERANCE = 1e-5


LIMITS = Limits(seconds=300, memory=12 << 30)


class Adopted(BaseModel):
    """What a child says of one file.

    Attributes:
        findings: no model.onnx was written when one of them blocks.
        opset_before: the file's own.
        errors: for each output its largest difference from the file as it came, relative to its range.
        cases: what was compared, in words.
        seconds: what comparing took.
    """

    findings: tuple[Finding, ...]
    opset_before: int
    errors: dict[str, float] = {}
    cases: tuple[str, ...] = ()
    seconds: float = 0.0


def adopt_apart(
    source: Path,
    out: Path,
    cases: Iterable[Case],
    inputs: Mapping[str, InputSettings],
    tolerance: float,
    waivers: Sequence[WaiverSettings] = (),
) -> Adopted:
    """Run `adopt_file` in a child process.

    Raises:
        EnginesmithError: not a readable ONNX file, external data outside its folder, or opening it crashed, hung or
            needed more than `LIMITS`.
    """
    with tempfile.TemporaryDirectory(prefix="enginesmith-adopt-") as scratch:
        save_cases(cases, Path(scratch))
        try:
            answer = child.call(
                adopt_file,
                limits=LIMITS,
                what=f"opening {source.name}",
                source=str(source),
                out=str(out),
                cases=scratch,
                inputs={name: declared.model_dump(mode="json") for name, declared in inputs.items()},
                tolerance=tolerance,
                waivers=[waiver.model_dump(mode="json") for waiver in waivers],
            )
        except ChildError as error:
            raise EnginesmithError(
                error.found,
                where=str(source),
                key=KEY,
                hint="an ONNX file is a program and runs under limits; check where this one comes from",
                details=error.details,
            ) from error
    return Adopted.model_validate(answer)


def adopt_file(
    source: str, out: str, cases: str, inputs: dict[str, Any], tolerance: float, waivers: Sequence[Any] = ()
) -> dict[str, Any]:
    """Read, check, convert and rewrite one file; JSON in and out, for `child.call`.

    1. External data must lie in the file's own folder.
    2. ONNX's full checker must accept the file and ONNX Runtime must load it.
    3. Declared inputs and dimensions are compared with the file's, then written into it: symbols get the declared
       names, free dimensions the declared numbers. A static dimension that is declared dynamic blocks.
    4. Model-local functions are inlined, Constant nodes become initializers, nodes get unique names, what nothing
       reads is removed, doc strings and node metadata go. The model's own metadata stays.
    5. Below opset 18 the file is converted; when the result differs, or cannot be had, the file keeps its opset and a
       warning says why.
    6. The result is compared with the file as it came, on all cases.

    Args:
        source: the file.
        out: folder for model.onnx.
        cases: folder written by `save_cases`.
        inputs: declared inputs, as JSON.
        tolerance: for the comparison, relative to each output's range.
        waivers: accepted findings, as JSON; a difference that one covers does not stop the adoption.

    Returns:
        `Adopted` as JSON.

    Raises:
        EnginesmithError: not a readable ONNX file, or external data outside its folder.
    """
    path = Path(source)
    declared = {name: InputSettings.model_validate(value) for name, value in inputs.items()}
    original = read_foreign(path)
    opset = original.opset_imports.get("", 0)
    findings = check_foreign(path)
    if blocking(findings):
        return _answer(findings, opset)
    before = OnnxRunner(path)
    model = original
    tidy(model)
    apply_inputs(model, declared)
    findings += check_inputs(model, declared)
    if blocking(findings):
        return _answer(findings, opset)
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    findings += graph_findings(model, declared, ranges=observe(model, load_cases(Path(cases))))
    started = time.monotonic()
    agreement = compare(before.run, OnnxRunner(model).run, load_cases(Path(cases)), tolerance=tolerance, name=_NAME)
    seconds = time.monotonic() - started
    findings += agreement.findings
    if blocking(waive(findings, [WaiverSettings.model_validate(waiver) for waiver in waivers])):
        return _answer(findings, opset, agreement, seconds)
    if opset < TARGET_OPSET:
        converted, problem = _converted(model, before, Path(cases))
        if converted is not None:
            model, agreement = converted
        else:
            findings.append(
                Finding(
                    rule="operators/opset-kept",
                    severity="warning",
                    message=f"the file keeps opset {opset}: converting it to {TARGET_OPSET} {problem}",
                    hint="nothing to do unless a backend or FP16 needs a newer opset; then export it again",
                )
            )
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    name_output_dims(model, agreement.shapes)
    io.save(model, Path(out))
    return _answer(findings, opset, agreement, seconds)


_NAME = "the file as it came"


def _answer(
    findings: list[Finding], opset: int, agreement: Agreement | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    adopted = Adopted(findings=tuple(findings), opset_before=opset)
    if agreement is not None:
        adopted = adopted.model_copy(update={"errors": agreement.errors, "cases": agreement.cases, "seconds": seconds})
    return adopted.model_dump(mode="json")


def read_foreign(path: Path) -> ir.Model:
    """Parse a file after looking where its external data points.

    Raises:
        EnginesmithError: not ONNX, or external data that is missing, cut off, or not in the file's own folder.
    """
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError, RuntimeError) as error:
        raise EnginesmithError(
            f"not a readable ONNX file: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=str(path),
            key=KEY,
            hint="it may be cut off; fetch or export it again",
        ) from error
    if not proto.graph.node or not proto.opset_import:
        raise EnginesmithError("not an ONNX model: it has no nodes or no opset", where=str(path), key=KEY)
    if proto.graph.sparse_initializer:
        raise EnginesmithError(
            f"it has sparse initializers ({proto.graph.sparse_initializer[0].values.name}), which are not supported",
            where=str(path),
            key=KEY,
            hint="store the weights densely",
        )
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            _check_external(tensor, path)
    return io.load(path)


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model, in subgraphs, attributes and functions too."""
    todo: list[Any] = [proto.graph, *proto.functions]
    while todo:
        scope = todo.pop()
        yield from getattr(scope, "initializer", ())
        for node in scope.node:
            for attribute in node.attribute:
                yield attribute.t
                yield from attribute.tensors
                if attribute.HasField("g"):
                    todo.append(attribute.g)
                todo.extend(attribute.graphs)


def _check_external(tensor: onnx.TensorProto, path: Path) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    name = f"the external data of tensor {tensor.name!r}"

    def refuse(found: str, hint: str) -> EnginesmithError:
        return EnginesmithError(f"{name} {found}", where=str(path), key=KEY, hint=hint)

    beside = "external data must lie in the ONNX file's own folder"
    if not location or "\0" in location:
        raise refuse("names no file", beside)
    posix, windows = PurePosixPath(location), PureWindowsPath(location)
    if posix.is_absolute() or windows.drive or windows.root or ".." in (*posix.parts, *windows.parts):
        raise refuse(f"points outside the file's folder: {location!r}", beside)
    folder = path.parent.resolve()
    file = folder / location
    if not file.exists():
        raise refuse(f"is missing: {location!r}", "an ONNX file with external data travels together with it")
    if file.is_symlink() or not file.resolve().is_relative_to(folder) or not file.is_file():
        raise refuse(f"is not a plain file in the file's folder: {location!r}", beside)
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0"))
    except ValueError:
        raise refuse("has an offset or a length that is no number", "export it again") from None
    if offset < 0 or length < 0 or offset + length > file.stat().st_size:
        raise refuse(f"goes beyond the end of {location!r}", "the data file may be cut off; fetch it again")


def check_foreign(path: Path) -> list[Finding]:
    """`operators/invalid-graph`: ONNX's checker or ONNX Runtime does not accept the file."""
    findings: list[Finding] = []
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        findings.append(_invalid(f"ONNX's checker refuses the file: {str(error).strip().splitlines()[0]}"))
    else:
        try:
            OnnxRunner(path)
        except EnginesmithError as error:
            findings.append(_invalid(f"ONNX Runtime does not load the file: {'; '.join(error.details[:2])}"))
    return findings


def _invalid(message: str) -> Finding:
    return Finding(
        rule="operators/invalid-graph", severity="error", message=message, hint="export the model again, or repair it"
    )


def apply_inputs(model: ir.Model, inputs: Mapping[str, InputSettings]) -> None:
    """Write the declared shapes into the graph's inputs where the file leaves room, and forget all other shapes.

    A free or symbolic dimension (also one of -1 or 0, as older exporters write it) takes the declared name or number.
    What the file fixes stays, for `check_inputs` to judge. Shapes behind the inputs may speak of the file's old
    symbols: they are dropped and inferred anew.
    """
    for value in model.graph.inputs:
        declared = inputs.get(str(value.name))
        if declared is None:
            continue
        wanted = symbolic_shape(declared)
        if value.shape is None:
            value.shape = ir.Shape(wanted)
        elif len(value.shape) == len(wanted):
            value.shape = ir.Shape(
                have if isinstance(have, int) and have > 0 else want
                for have, want in zip(value.shape, wanted, strict=True)
            )
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.shape = None if not value.is_graph_output() else _unnamed(value.shape)


def _unnamed(shape: ir.ShapeProtocol | None) -> ir.Shape | None:
    """The shape with its symbols forgotten."""
    return None if shape is None else ir.Shape(dim if isinstance(dim, int) and dim > 0 else None for dim in shape)


def tidy(model: ir.Model) -> None:
    """Point 4 of `adopt_file`: the same function in the pipeline's form, in place."""
    RemoveInitializersFromInputsPass()(model)
    if model.functions:
        InlinePass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveUnusedNodesPass()(model)
    TopologicalSortPass()(model)
    model.doc_string = None
    for scope in model.graphs():
        scope.doc_string = None
        scope.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
    UniqueNodeNames()(model)


def _converted(model: ir.Model, before: OnnxRunner, cases: Path) -> tuple[tuple[ir.Model, Agreement] | None, str]:
    """The model at `TARGET_OPSET` when a real converter can do it and every output stays equal, else why not."""
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), TARGET_OPSET)
        onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the converter raises RuntimeError, ValueError and others
        return None, f"failed ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
    converted = ir.from_proto(proto)
    if converted.opset_imports.get("") != TARGET_OPSET:
        return None, "did nothing"
    tidy(converted)
    try:
        runner = OnnxRunner(converted)
    except EnginesmithError as error:
        return None, f"gave a graph that ONNX Runtime refuses ({'; '.join(error.details[:1])})"
    agreement = compare(before.run, runner.run, load_cases(cases), tolerance=CONVERSION_TOLERANCE, name=_NAME)
    wrong = blocking(agreement.findings)
    return (None, f"changed it: {wrong[0].message}") if wrong else ((converted, agreement), "")
