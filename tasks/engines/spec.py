"""States what a backend is: it turns one ONNX file into an engine, and an engine's folder into outputs.

Everything here is plain data: frozen dataclasses, strings and paths. The package imports nothing else of enginesmith
and runs on a target host with CPython 3.10, numpy, onnx and the vendor's runtime.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

SCHEMA = 1
MODEL = "model.onnx"
MANIFEST = "engine.json"
LAYERS = "precision.json"

Precision = Literal["fp32", "fp16", "bf16", "int8", "other"]
VARIANTS = ("fp32", "fp16", "mixed", "int8", "int8-mixed")

Tick = Callable[["Progress"], None]


class EngineError(Exception):
    """A failure that the user can act on; the same attributes as the rest of enginesmith's errors.

    Args:
        found: what is wrong, one sentence with the offending value.
        where: the place: a file, a node, an input.
        key: the key of pipeline.yaml that is at fault: ``inputs.…``, or relative to the target (``options.timeout``).
        hint: what to do next.
        details: further lines: nodes, both sides of a comparison, the tail of a log.
    """

    def __init__(
        self, found: str, *, where: str = "", key: str = "", hint: str = "", details: Iterable[str] = ()
    ) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.key = key
        self.hint = hint
        self.details = tuple(details)

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.found}" if self.where else self.found]
        lines += [f"  {line}" for line in self.details]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.found, self.where, self.key, self.hint, self.details))


def _rebuild(found: str, where: str, key: str, hint: str, details: tuple[str, ...]) -> EngineError:
    return EngineError(found, where=where, key=key, hint=hint, details=details)


class RefusedError(EngineError):
    """The vendor's compiler does not take the model, now or ever: a result, not a mishap.

    Args:
        found: what it said, one sentence.
        where: the file.
        refusals: the nodes that it named; empty when it named none.
        details: its log.
    """

    def __init__(
        self, found: str, *, where: str = "", refusals: Iterable[Refusal] = (), details: Iterable[str] = ()
    ) -> None:
        self.refusals = tuple(refusals)
        named = [f"{r.node} ({r.op}): {r.reason}" for r in self.refusals]
        super().__init__(found, where=where, details=[*named, *details])
        self._log = tuple(details)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_refused, (self.found, self.where, self.refusals, self._log))


def _rebuild_refused(found: str, where: str, refusals: tuple[Refusal, ...], details: tuple[str, ...]) -> RefusedError:
    return RefusedError(found, where=where, refusals=refusals, details=details)


@dataclass(frozen=True)
class Option:
    """One key that a target's `options` may have.

    Attributes:
        name: the key.
        kind: its type as written in YAML.
        default: what holds when the key is absent.
        choices: the only values allowed (of the elements, for a list); empty means any.
        help: one line for the documentation and for errors.
    """

    name: str
    kind: Literal["int", "float", "bool", "str", "list"]
    default: object
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dim:
    """The range of one dynamic dimension."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class Input:
    """One declared input of the model.

    Attributes:
        name: the graph input's name.
        shape: sizes; a string names a dynamic dimension.
        dtype: numpy name.
        dims: range of each dynamic dimension.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str = "float32"
    dims: Mapping[str, Dim] = field(default_factory=dict)


@dataclass(frozen=True)
class Range:
    """What one input may be inside one profile: shapes, or the values of a shape tensor."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """One optimization profile.

    Attributes:
        shapes: range of the shape of every input.
        values: range of the values of the inputs that are shape tensors (their elements are sizes).
    """

    shapes: Mapping[str, Range]
    values: Mapping[str, Range] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        model: the ONNX file; external data lies beside it.
        variant: name of the variant, for messages and the manifest. The precision itself stands in the graph.
        profiles: at least one; a backend without profiles uses the first for its own checks.
        options: the target's options, by name.
    """

    model: Path
    variant: str
    profiles: tuple[Profile, ...]
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """What a builder said last.

    Attributes:
        phase: what it is doing.
        done: share of the phase that is done, 0 to 1, or None when unknown.
    """

    phase: str = ""
    done: float | None = None


@dataclass(frozen=True)
class Refusal:
    """A node that a backend cannot take."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class NodePrecision:
    """One node's precision, as the graph asks for it and as the engine has it.

    Attributes:
        node: name of the ONNX node.
        op: its operator.
        requested: precision that the graph asks for.
        actual: precision read back; "" when the backend shows nothing about this node (folded, or fused out of sight).
        layer: name of the engine's layer that holds the node, "" when unknown.
    """

    node: str
    op: str
    requested: Precision
    actual: Precision | Literal[""]
    layer: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an engine; None stands for a dynamic size."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class FileSpec:
    """One file of an engine."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an engine was made from and what it may be loaded on; stands in engine.json.

    Attributes:
        backend: name of the backend.
        variant: name of the variant.
        model_sha256: digest of the ONNX file and its external data.
        fingerprint: the target's versions and hardware that the engine is tied to.
        options: the options in force, defaults included.
        profiles: optimization profiles.
        inputs: the engine's inputs.
        outputs: the engine's outputs.
        requested: number of nodes per precision that the graph asks for.
        read_back: number of nodes per precision that the engine has.
        unseen: nodes about which the backend shows nothing.
        read_from: where the precision was read back from.
        lowered: what the backend changed in its own copy of the graph before building, empty when nothing.
        warnings: the builder's own warnings, without times and addresses.
        files: the engine's files.
    """

    backend: str
    variant: str
    model_sha256: str
    fingerprint: Mapping[str, str]
    options: Mapping[str, object]
    profiles: tuple[Profile, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    requested: Mapping[str, int]
    read_back: Mapping[str, int]
    unseen: int
    read_from: str
    lowered: tuple[str, ...]
    warnings: tuple[str, ...]
    files: tuple[FileSpec, ...]

    @property
    def size(self) -> int:
        """Bytes of the engine's own files: what is shipped and loaded."""
        return sum(file.size for file in self.files)

    def to_json(self) -> str:
        """The manifest as text with a stable order."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Manifest:
        """Read a manifest.

        Raises:
            EngineError: it is not JSON, lacks a field, or has another schema.
        """
        try:
            data = json.loads(text)
            schema = data.pop("schema")
            if schema != SCHEMA:
                raise EngineError(
                    f"the engine's manifest has schema {schema}, this version reads {SCHEMA}",
                    where=where,
                    hint="build the engine again",
                )
            data["profiles"] = tuple(
                Profile(**{kind: {name: _range(r) for name, r in p[kind].items()} for kind in ("shapes", "values")})
                for p in data["profiles"]
            )
            for name in ("inputs", "outputs"):
                data[name] = tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in data[name])
            data["files"] = tuple(FileSpec(**f) for f in data["files"])
            data["lowered"], data["warnings"] = tuple(data["lowered"]), tuple(data["warnings"])
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"the engine's manifest cannot be read: {type(error).__name__}: {error}",
                where=where,
                hint="build the engine again",
            ) from error


@dataclass(frozen=True)
class BuildResult:
    """A finished build.

    Attributes:
        manifest: what engine.json says.
        layers: precision of every node that has one.
        seconds: wall time of the builder, an observation.
        peak_memory: highest resident memory of the builder in bytes, an observation.
    """

    manifest: Manifest
    layers: tuple[NodePrecision, ...]
    seconds: float
    peak_memory: int


@dataclass(frozen=True)
class Built:
    """What a builder leaves behind in its output folder, before the manifest is written.

    Attributes:
        files: names of the engine's files inside the folder.
        inputs: the engine's inputs.
        outputs: the engine's outputs.
        layers: precision of every node that has one.
        read_from: where the actual precisions come from.
        lowered: what was changed in the backend's own copy of the graph.
        warnings: the builder's own warnings.
    """

    files: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[NodePrecision, ...]
    read_from: str
    lowered: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Engine(Protocol):
    """A loaded engine. A context manager; `close` frees it."""

    manifest: Manifest

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name, host arrays in, host arrays out."""

    def prepare(self, feeds: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """A call that runs one inference to its end, with inputs bound and outputs allocated before."""

    def close(self) -> None:
        """Free the engine; it cannot be used afterwards."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *error: object) -> None: ...


class Backend(Protocol):
    """One vendor's compiler and runtime.

    Attributes:
        name: as in pipeline.yaml.
        extra: what ``pip install`` takes to bring the runtime.
        options: the keys that a target's `options` may have.
    """

    name: str
    extra: str
    options: tuple[Option, ...]

    def version(self) -> str | None:
        """Version of the vendor's runtime, None when it is not installed."""

    def fingerprint(self) -> dict[str, str]:
        """What of this host an engine is tied to: versions, architecture, and GPU and driver where they matter."""

    def builds(self) -> frozenset[str]:
        """Variants that the backend can build so that the engine has the precision the graph asks for."""

    def executes(self) -> frozenset[str]:
        """Variants whose precision the backend really executes on this host; empty when it cannot run here."""

    def check(self, model: Path) -> tuple[Refusal, ...]:
        """Nodes that the backend refuses; empty when it takes the whole model."""

    def compile(self, request: BuildRequest, out: Path, say: Tick) -> Built:
        """Build in this process: write the engine's files into `out` and read the precision back.

        `build_engine` calls it in a child process; nothing else should. `say` reports progress.
        """

    def load(self, folder: Path) -> Engine:
        """The engine in a folder that `build_engine` filled, after its manifest was checked.

        Raises:
            EngineError: another runtime version or GPU, or a changed file, with both sides named.
        """


def merged_options(schema: Iterable[Option], given: Mapping[str, object], *, backend: str) -> dict[str, object]:
    """Options in force: defaults, overridden by what was given.

    Raises:
        EngineError: an unknown name, a wrong type or a value outside the choices; it names what is known.
    """
    known = {option.name: option for option in schema}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise EngineError(
                f"{backend} has no option {name!r}",
                key=f"options.{name}",
                hint=f"did you mean {close[0]!r}?" if close else f"it knows: {', '.join(sorted(known)) or 'none'}",
            )
    return {name: _option_value(option, given.get(name, option.default), backend) for name, option in known.items()}


def _option_value(option: Option, value: object, backend: str) -> object:
    types: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
        "str": (str,),
        "list": (list, tuple),
    }
    wrong_bool = isinstance(value, bool) and option.kind != "bool"
    if value is not option.default and (wrong_bool or not isinstance(value, types[option.kind])):
        raise EngineError(
            f"{backend}'s option {option.name} takes {option.kind}, not {value!r}",
            key=f"options.{option.name}",
            hint=option.help,
        )
    elements = [str(v) for v in value] if isinstance(value, (list, tuple)) else [str(value)]
    bad = [element for element in elements if option.choices and element not in option.choices]
    if bad and value is not option.default:
        raise EngineError(
            f"{backend}'s option {option.name} does not take {', '.join(bad)}",
            key=f"options.{option.name}",
            hint=f"it takes: {', '.join(option.choices)}",
        )
    return list(dict.fromkeys(elements)) if isinstance(value, (list, tuple)) else value


def _range(data: Mapping[str, Iterable[int]]) -> Range:
    return Range(tuple(data["min"]), tuple(data["opt"]), tuple(data["max"]))
