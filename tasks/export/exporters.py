"""Turns a PyTorch module into an ONNX model by torch's exporters, and says which one did it and why.

The ladder, each step tried when the one before failed:

1. `dynamo`: torch.export with the declared ranges, then torch.onnx.
2. `dynamo` with free ranges: the code runs only for some sizes in the declared range (multiples of four, say), or
   torch cannot prove the range. What the sizes have to satisfy is kept as `Exported.constraints`.
3. `legacy`: TorchScript tracing. It freezes what Python decides while tracing; only the experiment can tell.
"""

from __future__ import annotations

import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx
import onnx_ir as ir

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export.binding import Binding, Feed, NotATensor, flatten, to_tensors
from enginesmith.tasks.firewalls.findings import is_tooling, readable_path
from enginesmith.tasks.settings import DimSettings, ExportSettings, InputSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

Exporter = Literal["dynamo", "legacy"]


DYNAMO_OPSET = 18
"""Oldest opset that the dynamo exporter translates to; asked for less, it relabels or converts, often wrongly."""


@dataclass(frozen=True)
class Diagnosis:
    """Why an exporter gave up, and where in the source.

    Attributes:
        message: first line of what it said.
        file: source file as it is on this machine; empty when unknown.
        line: 1-based; 0 when unknown.
        data_dependent: Python decided something by a tensor's values.
        constraints: what torch says the dynamic dimensions would have to be.
    """

    message: str
    file: str = ""
    line: int = 0
    data_dependent: bool = False
    constraints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced:
    """A warning of the legacy exporter: Python read a tensor's value while it was traced."""

    message: str
    file: str
    line: int


@dataclass(frozen=True)
class Exported:
    """What an exporter made, as it made it.

    Attributes:
        model: inputs in the binding's order, outputs in `outputs` order, symbols renamed to declared dimensions.
        exporter: who made it.
        outputs: output names.
        failures: what the exporters before it said.
        constraints: what the dynamic dimensions have to satisfy beyond their declared range, in torch's words.
        traced: warnings of the legacy exporter.
    """

    model: ir.Model
    exporter: Exporter
    outputs: tuple[str, ...]
    failures: tuple[Diagnosis, ...] = ()
    constraints: tuple[str, ...] = ()
    traced: tuple[Traced, ...] = field(default=())


class ExportFailedError(EnginesmithError):
    """No exporter could make a graph of the module.

    Attributes:
        failures: what each said.
    """

    failures: tuple[Diagnosis, ...] = ()


def export_module(
    module: nn.Module,
    binding: Binding,
    inputs: Mapping[str, InputSettings],
    dims: Mapping[str, DimSettings],
    example: Feed,
    settings: ExportSettings,
    roots: Sequence[Path] = (),
) -> Exported:
    """Export at `example`'s sizes with the declared dimensions dynamic.

    Args:
        module: in eval mode.
        binding: how inputs reach forward.
        inputs: declared inputs.
        dims: the dynamic ones among their dimensions.
        example: one feed; its dynamic dimensions should be at least 2, since torch specialises 0 and 1.
        settings: opset, and which exporter.
        roots: folders that the user's own source lies in.

    Raises:
        ExportFailedError: no exporter could.
    """
    import torch

    tensors = to_tensors(binding, example)
    outputs = output_names(module, binding, tensors)
    adapter = _adapter(module, binding)
    failures: list[Diagnosis] = []
    with torch.no_grad(), _quiet():
        if settings.exporter == "auto" and settings.opset < DYNAMO_OPSET:
            failures.append(Diagnosis(f"the dynamo exporter has no opset below {DYNAMO_OPSET}"))
        elif settings.exporter != "legacy":
            for free in (False, True) if dims else (False,):
                try:
                    model = _dynamo(adapter, inputs, dims, tensors, settings.opset, free=free)
                except Exception as error:  # torch raises whatever the traced code raises
                    failures.append(_diagnose(error, roots))
                    if failures[-1].data_dependent:
                        break
                    continue
                constraints = tuple(dict.fromkeys(c for f in failures for c in f.constraints if "*" in c))
                return Exported(model, "dynamo", outputs, tuple(failures), constraints)
        blocked = any(f.data_dependent for f in failures)
        if settings.exporter == "legacy" or (settings.exporter == "auto" and not blocked):
            try:
                model, traced = _legacy(adapter, binding, inputs, dims, tensors, outputs, settings.opset)
            except Exception as error:  # as above
                failures.append(_diagnose(error, roots))
            else:
                return Exported(model, "legacy", outputs, tuple(failures), (), traced)
    last = failures[-1]
    failed = ExportFailedError(
        f"the module cannot be exported: {last.message}",
        where=f"{last.file}:{last.line}" if last.file else "",
        key="model.factory",
        details=[f"{f.file}:{f.line}: {f.message}" if f.file else f.message for f in failures[:-1]],
    )
    failed.failures = tuple(failures)
    raise failed


def output_names(module: nn.Module, binding: Binding, tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Names of the outputs, from what forward returns on an example.

    Raises:
        EnginesmithError: something in it is not a tensor.
    """
    import torch

    with torch.no_grad():
        named = flatten(binding.call(module, tensors), taken=binding.inputs)
    for name, leaf in named.items():
        if isinstance(leaf, NotATensor):
            raise EnginesmithError(
                f"forward returns a {leaf.type} as {name}, which no graph output can be",
                where=f"{type(module).__name__}.forward",
                key="model.factory",
                hint="return tensors only: wrap the module in one whose forward picks the tensors you need",
            )
    if not named:
        raise EnginesmithError("forward returns no tensor", key="model.factory")
    return tuple(named)


def _adapter(module: nn.Module, binding: Binding) -> nn.Module:
    """The module with all inputs by position and all outputs as one flat tuple."""
    from torch import nn

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
            return tuple(flatten(binding.call(self.model, tensors), taken=binding.inputs).values())

    return Adapter().eval()


def _dynamo(
    adapter: nn.Module,
    inputs: Mapping[str, InputSettings],
    dims: Mapping[str, DimSettings],
    tensors: Sequence[torch.Tensor],
    opset: int,
    *,
    free: bool,
) -> ir.Model:
    import torch
    from torch.export import Dim

    named = {n: Dim.DYNAMIC if free else Dim(n, min=d.min, max=d.max) for n, d in dims.items()}
    shapes = tuple({axis: named[dim] for axis, dim in _axes(declared, dims)} for declared in inputs.values())
    with redirect_stderr(io.StringIO()):  # on a failure torch prints the graph that it has so far
        program = torch.export.export(adapter, tuple(tensors), dynamic_shapes=(shapes,), strict=False)
    exported = torch.onnx.export(program, dynamo=True, opset_version=opset, verbose=False, external_data=False)
    if exported is None:
        raise TypeError("torch.onnx.export returned nothing")
    model = exported.model
    symbols: dict[str, str] = {}
    for value, declared in zip(model.graph.inputs, inputs.values(), strict=True):
        for axis, dim in _axes(declared, dims):
            symbol = value.shape[axis] if value.shape is not None else None
            if isinstance(symbol, ir.SymbolicDim) and symbol.value:
                symbols.setdefault(symbol.value, dim)
    _rename_symbols(model, symbols)
    return model


def _axes(declared: InputSettings, dims: Mapping[str, DimSettings]) -> list[tuple[int, str]]:
    """Axis and name of each dynamic dimension of one input."""
    return [(i, dim) for i, dim in enumerate(declared.shape) if isinstance(dim, str) and dim in dims]


def _rename_symbols(model: ir.Model, symbols: Mapping[str, str]) -> None:
    """Put the declared names for torch's symbols (`s77`) into every shape, expressions (`s77//4`) included."""
    if not symbols:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, symbols)) + r")\b")
    values = [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        value.shape = ir.Shape(
            pattern.sub(lambda m: symbols[m[1]], d.value) if isinstance(d, ir.SymbolicDim) and d.value else d
            for d in value.shape
        )


def _legacy(
    adapter: nn.Module,
    binding: Binding,
    inputs: Mapping[str, InputSettings],
    dims: Mapping[str, DimSettings],
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[str],
    opset: int,
) -> tuple[ir.Model, tuple[Traced, ...]]:
    import torch
    from torch.jit._trace import TracerWarning

    buffer = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.onnx.export(
            adapter,
            tuple(tensors),
            buffer,  # type: ignore[arg-type] # a file object is fine for this exporter
            dynamo=False,
            opset_version=opset,
            input_names=list(binding.inputs),
            output_names=list(outputs),
            dynamic_axes={name: dict(_axes(declared, dims)) for name, declared in inputs.items()},
        )
    model = ir.from_proto(onnx.load_model_from_string(buffer.getvalue()))
    traced = tuple(
        Traced(str(w.message).splitlines()[0], w.filename, w.lineno)
        for w in caught
        if issubclass(w.category, TracerWarning)
    )
    return model, tuple(dict.fromkeys(traced))


def _diagnose(error: Exception, roots: Sequence[Path]) -> Diagnosis:
    """Message and source line of an exporter's exception, from its own text or else from the traceback."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    chain = _chain(error)
    text = "\n".join(str(e) for e in chain)
    data_dependent = any(isinstance(e, GuardOnDataDependentSymNode) for e in chain) or bool(
        re.search(r"[Dd]ata-dependent|[Dd]ynamic control flow|PendingUnbackedSymbolNotFound", text)
    )
    said = [(f, int(n)) for f, n in re.findall(r'File "([^"]+)", line (\d+)', text)]
    passed = [(f.filename, f.lineno or 0) for e in chain for f in traceback.extract_tb(e.__traceback__)]
    file, line = next((place for place in (_own_frame(said, roots), _own_frame(passed, roots)) if place[0]), ("", 0))
    fixes = re.findall(r"^ {2}(\w+ = .+)$", text.partition("Suggested fixes:")[2], flags=re.MULTILINE)
    return Diagnosis(_message(chain), file, line, data_dependent, tuple(dict.fromkeys(fixes)))


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and what caused it, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _message(chain: Sequence[BaseException]) -> str:
    """What went wrong in one line: the first violated constraint, else the first line about the model."""
    said = [str(e) for e in chain if str(e).strip()]
    if len(said) > 1 and said[0].startswith("Failed to"):  # torch.onnx's wrapper: a page of advice
        said.pop(0)
    if not said:
        return type(chain[0]).__name__
    violated = re.search(r"^ {2}- (You marked .*? constant \(\d+\)|Not all values .*)", said[0], flags=re.MULTILINE)
    message = violated[1] if violated else next(line for line in said[0].splitlines() if line.strip())
    return re.sub(r"L\['(tensors|args)'\]", "inputs", message.strip())[:300]


def _own_frame(frames: Sequence[tuple[str, int]], roots: Sequence[Path]) -> tuple[str, int]:
    """The innermost frame in the user's folders, else in any code that is not the exporter's; ("", 0) without one."""
    own = [f for f in frames if any(Path(f[0]).is_relative_to(root) for root in roots)]
    best = own or [f for f in frames if not is_tooling(f[0])]
    return best[-1] if best else ("", 0)


def shown_place(diagnosis: Diagnosis, roots: Sequence[Path]) -> tuple[str, int]:
    """File and line as findings give them."""
    return (readable_path(diagnosis.file, roots), diagnosis.line) if diagnosis.file else ("", 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters' running commentary is not for the user; what matters of it becomes findings.

    torch prints whole graphs to stderr when an export fails, and makes loggers while it runs: no level set beforehand
    reaches them.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
