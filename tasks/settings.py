"""Turns pipeline.yaml into settings, or into errors that name file, line, key and what would be right."""

from __future__ import annotations

import datetime
import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from enginesmith.tasks.errors import EnginesmithError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
CALLABLE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
CallableName = Annotated[str, StringConstraints(pattern=CALLABLE)]
VariantName = Literal["fp32", "fp16", "mixed", "int8", "int8-mixed"]
VARIANTS: tuple[VariantName, ...] = get_args(VariantName)
DTYPES = ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")

S = TypeVar("S", bound="Settings")

METRICS = ("agreement", "top1")
_MAX_NODES = 100_000
_MERGE = "tag:yaml.org,2002:merge"
_PREFECT_KEYS = {"name", "prefect-version", "build", "push", "pull", "definitions", "deployments"}


class Settings(BaseModel):
    """Base of all settings: frozen, and no key that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        items = value if isinstance(value, list) else [value]
        if annotation is not bool and any(isinstance(item, bool) for item in items):
            raise ValueError("YAML reads yes, no, on, off, true and false as truth values; quote the word")
        return value


class ModelSettings(Settings):
    """The checkpoint and the code that gives it a shape."""

    name: Name = Field("", validate_default=False)
    checkpoint: str
    factory: CallableName | None = None
    weights: str = "auto"
    dtype: Literal["float32", "float16"] | None = None
    allow_pickle: bool = False
    drop: tuple[str, ...] = ()
    allow_nonfinite: tuple[str, ...] = ()


class DimSettings(Settings):
    """The range of one dynamic dimension."""

    min: int = Field(ge=1)
    opt: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> DimSettings:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"needs min <= opt <= max, has {self.min}, {self.opt}, {self.max}")
        return self


class InputSettings(Settings):
    """Shape and dtype of one model input; a string in `shape` names a dynamic dimension."""

    shape: tuple[int | Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")], ...]
    dtype: Literal["float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"] = "float32"
    dims: dict[str, DimSettings] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> InputSettings:
        named = {d for d in self.shape if isinstance(d, str)}
        unused = sorted(set(self.dims) - named)
        if unused:
            raise ValueError(f"dims names {', '.join(unused)}, which shape {list(self.shape)} does not have")
        missing = sorted(named - set(self.dims))
        if missing:
            raise ValueError(
                f"dynamic dimension {', '.join(missing)} needs a range, as in "
                f"dims: {{{missing[0]}: {{min: 1, opt: 8, max: 32}}}}"
            )
        if any(isinstance(d, int) and d < 1 for d in self.shape):
            raise ValueError(f"static dimensions must be at least 1, has {list(self.shape)}")
        return self


class MetricSettings(Settings):
    """The user's measure of accuracy.

    `call` is ``module:function`` or a built-in name. The function takes ``(outputs, targets)`` and, when `fit` is
    given, the state that `fit(outputs, targets)` returned for the FP32 model on the calibration data.
    """

    call: str = "agreement"
    better: Literal["higher", "lower"] = "higher"
    fit: CallableName | None = None

    @field_validator("call")
    @classmethod
    def _known(cls, value: str) -> str:
        if re.match(CALLABLE, value) or value in METRICS:
            return value
        close = difflib.get_close_matches(value, METRICS, n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"write module:function, or one of {', '.join(METRICS)}"
        raise ValueError(f"unknown metric {value!r}; {meant}")

    @model_validator(mode="after")
    def _fitted(self) -> MetricSettings:
        if self.fit and self.call in METRICS:
            raise ValueError(f"the metric {self.call!r} has nothing to fit; leave fit out")
        return self


class DataSettings(Settings):
    """Calibration and evaluation data."""

    calibration: str | None = None
    evaluation: str | None = None
    search: str | None = None
    reference: str | None = None
    files: tuple[str, ...] = ()
    metric: MetricSettings = MetricSettings()
    seed: int = Field(0, ge=0)
    samples: int = Field(64, ge=1, description="random samples per set when no data is given")


class BudgetSettings(Settings):
    """How much worse than FP32 a champion may be: absolute, in the metric's unit."""

    max_drop: float = Field(0.01, ge=0, allow_inf_nan=False)


class FoldSettings(Settings):
    """BatchNorm folding."""

    clamp: (
        Literal["auto", "off"]
        | Annotated[
            dict[Literal["floor"], Annotated[float, Field(gt=0, allow_inf_nan=False)]],
            Field(min_length=1),
        ]
    ) = "auto"
    tolerance: float = Field(1e-5, gt=0, allow_inf_nan=False)
    skip: tuple[str, ...] = ()


class ExportSettings(Settings):
    """ONNX export."""

    opset: int = Field(18, ge=11)
    exporter: Literal["auto", "dynamo", "legacy"] = "auto"
    tolerance: float = Field(1e-4, gt=0, allow_inf_nan=False)


class WaiverSettings(Settings):
    """A finding that somebody looked at and accepts: by rule and place, with the reason.

    `rule`, `file` (``model.py`` or ``model.py:12``), `module`, `node` and `backend` are patterns with ``*``, ``?`` and
    ``[]``; all that are given must match. After `until` it no longer holds.
    """

    rule: str = Field(min_length=1)
    file: str = ""
    module: str = ""
    node: str = ""
    backend: str = ""
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    until: datetime.date | None = None


class LintSettings(Settings):
    """What of the firewalls' findings counts."""

    fail_on: Literal["error", "warning", "advice", "never"] = "error"
    waivers: tuple[WaiverSettings, ...] = ()


class SimplifySettings(Settings):
    """onnxsim and its gate."""

    enabled: bool = True
    growth: float = Field(1.5, ge=1, allow_inf_nan=False)
    tolerance: float = Field(1e-5, gt=0, allow_inf_nan=False)


class Fp16Settings(Settings):
    """FP16 probing and fallback."""

    layer_drop: float = Field(0.02, ge=0, allow_inf_nan=False)
    keep_fp32: tuple[str, ...] = ()
    samples: int = Field(64, ge=1, description="search samples on which every node is probed")


class Int8Settings(Settings):
    """INT8 calibration and placement."""

    calibrator: Literal["entropy", "minmax", "percentile", "mse"] = "entropy"
    samples: int = Field(512, ge=1)
    placement: Literal["conv-relu", "conv", "conv+residual"] = "conv-relu"
    exclude: tuple[str, ...] = ()


class PrecisionSettings(Settings):
    """Which variants to make and how."""

    variants: tuple[VariantName, ...] = Field(VARIANTS, min_length=1)
    cheap_activations: bool = False
    fp16: Fp16Settings = Fp16Settings()
    int8: Int8Settings = Int8Settings()


class TargetSettings(Settings):
    """A backend on a host."""

    backend: Literal["onnxruntime", "tensorrt", "tensorrt_rtx"]
    gpu: str = ""
    work_pool: str | None = None
    options: dict[str, JsonValue] = Field(default_factory=dict)


class StoreSettings(Settings):
    """Where artifacts are kept."""

    url: str = "artifacts/"


class TrackingSettings(Settings):
    """Where MLflow records."""

    uri: str = ""


class PipelineSettings(Settings):
    """One pipeline.yaml that compiles a model."""

    model: ModelSettings
    inputs: dict[str, InputSettings] = Field(min_length=1)
    data: DataSettings = DataSettings()
    budget: BudgetSettings = BudgetSettings()
    fold: FoldSettings = FoldSettings()
    export: ExportSettings = ExportSettings()
    lint: LintSettings = LintSettings()
    simplify: SimplifySettings = SimplifySettings()
    precision: PrecisionSettings = PrecisionSettings()
    targets: dict[Name, TargetSettings] = Field(
        default_factory=lambda: {"cpu": TargetSettings(backend="onnxruntime")}, min_length=1
    )
    store: StoreSettings = StoreSettings()
    tracking: TrackingSettings = TrackingSettings()


class ListSettings(Settings):
    """One pipeline.yaml that lists others, for nightly rebuilds."""

    pipelines: tuple[str, ...] = Field(min_length=1)
    store: StoreSettings = StoreSettings()
    tracking: TrackingSettings = TrackingSettings()


@dataclass(frozen=True)
class Pipeline:
    """A pipeline.yaml that was read.

    Attributes:
        path: the file, absolute.
        settings: what it says.
        lines: line number of each dotted key, 1-based.
    """

    path: Path
    settings: PipelineSettings
    lines: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def folder(self) -> Path:
        """The file's folder: relative paths start here, and it is importable."""
        return self.path.parent

    @property
    def name(self) -> str:
        """The model's name; without one in the file, the folder's."""
        return self.settings.model.name or re.sub(r"[^A-Za-z0-9._-]+", "-", self.folder.name).strip("-._") or "model"

    def where(self, key: str) -> str:
        """``file:line`` of a dotted key, or of its nearest parent in the file."""
        parts = key.split(".")
        while parts and ".".join(parts) not in self.lines:
            parts.pop()
        line = self.lines.get(".".join(parts))
        return f"{self.path}:{line}" if line else str(self.path)

    @property
    def store_root(self) -> Path:
        """The local store: ENGINESMITH_STORE, relative to the current folder; else store.url, relative to the file."""
        outside = os.environ.get("ENGINESMITH_STORE")
        url, base = (outside, Path.cwd()) if outside else (self.settings.store.url, self.folder)
        if "://" in url and not url.startswith("file://"):
            raise EnginesmithError(
                f"{url!r} is not a local folder", key="store.url", hint="the store is a folder on this host"
            )
        return (base / Path(url.removeprefix("file://")).expanduser()).resolve()

    @property
    def tracking_uri(self) -> str:
        """MLflow's address: MLFLOW_TRACKING_URI; else tracking.uri, a path relative to the file; else in the store."""
        outside = os.environ.get("MLFLOW_TRACKING_URI")
        uri = outside or self.settings.tracking.uri
        if not uri:
            return f"sqlite:///{self.store_root / 'mlflow.db'}"
        base = Path.cwd() if outside else self.folder
        if uri.startswith("sqlite:///"):
            return f"sqlite:///{(base / uri.removeprefix('sqlite:///')).resolve()}"
        return uri if ":" in uri else str((base / Path(uri).expanduser()).resolve())


def load_pipeline(path: Path) -> Pipeline:
    """Read and check one pipeline.yaml that has `model:`.

    Raises:
        EnginesmithError: with file and line, for anything in it that is not as it should be.
    """
    path = path.resolve()
    data, lines = _read(path)
    if "pipelines" in data:
        if "model" in data:
            raise _error(path, lines, "pipelines", "a file has either model: or pipelines:, this one has both")
        raise _error(path, lines, "pipelines", "this file lists pipelines", hint="compile one of the listed files")
    known = {name: value for name, value in data.items() if name not in _PREFECT_KEYS}
    return Pipeline(path, _validate(PipelineSettings, known, path, lines), lines)


def load_list(path: Path) -> list[Path]:
    """The pipeline files that a file with `pipelines:` lists, sorted; a file with `model:` lists itself."""
    path = path.resolve()
    data, lines = _read(path)
    if "pipelines" not in data:
        return [path]
    known = {name: value for name, value in data.items() if name not in _PREFECT_KEYS}
    settings = _validate(ListSettings, known, path, lines)
    found: set[Path] = set()
    for index, pattern in enumerate(settings.pipelines):
        try:
            matches = [p.resolve() for p in path.parent.glob(pattern) if p.is_file()]
        except (NotImplementedError, ValueError) as error:
            raise _error(path, lines, f"pipelines.{index}", f"{pattern!r} is no pattern: {error}") from error
        if not matches:
            raise _error(path, lines, f"pipelines.{index}", f"{pattern!r} matches no file")
        found.update(matches)
    return sorted(found - {path})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnginesmithError(
            f"{path} cannot be read: {error.strerror}", hint="give the path of a pipeline.yaml"
        ) from error
    except UnicodeDecodeError as error:
        raise EnginesmithError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise EnginesmithError("not a pipeline file: it holds no keys", where=str(path), hint="see examples/")
        lines: dict[str, int] = {}
        for count, (key, line) in enumerate(_walk(node, (), path, set())):
            lines.setdefault(key, line)
            if count > _MAX_NODES:
                raise EnginesmithError("too large: are aliases nested in aliases?", where=f"{path}:{line}")
        # Values that only look like dates or numbers raise a ValueError of their own.
        data = yaml.load(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise EnginesmithError("nested too deeply", where=str(path)) from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        said = [part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part]
        raise EnginesmithError(f"not plain YAML: {' '.join(said) or error}", where=where) from error
    return data, lines


def _walk(node: yaml.Node, prefix: tuple[str, ...], path: Path, above: set[int]) -> Iterator[tuple[str, int]]:
    """Dotted key and line of everything below a node; duplicate keys and self-references are errors."""
    if id(node) in above:
        raise EnginesmithError("an alias refers to itself", where=f"{path}:{node.start_mark.line + 1}")
    if len(prefix) > 24:
        raise EnginesmithError("nested too deeply", where=f"{path}:{node.start_mark.line + 1}")
    above = above | {id(node)}
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        # What `<<` merges comes last: a key that stands here itself has its own line.
        for key_node, value in sorted(node.value, key=lambda pair: pair[0].tag == _MERGE):
            if key_node.tag == _MERGE:
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _walk(merged, prefix, path, above)
                continue
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise EnginesmithError(f"the key {key!r} stands twice", where=f"{path}:{line}")
            seen.add(key)
            yield ".".join((*prefix, key)), line
            yield from _walk(value, (*prefix, key), path, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield ".".join((*prefix, str(index))), value.start_mark.line + 1
            yield from _walk(value, (*prefix, str(index)), path, above)


def _validate(schema: type[S], data: dict[str, Any], path: Path, lines: dict[str, int]) -> S:
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        problems: dict[str, EnginesmithError] = {}
        for found in error.errors(include_url=False):
            key = _key_of(dict(found), lines)
            # A union reports each of its alternatives; the first one says it.
            problems.setdefault(".".join(key), _explain(schema, dict(found), key, path, lines))
        first, *rest = problems.values()
        raise EnginesmithError(
            first.found, where=first.where, hint=first.hint, details=[str(p) for p in rest]
        ) from None


def _key_of(error: dict[str, Any], lines: dict[str, int]) -> list[str]:
    """The key that a pydantic error is about, without the names of union branches."""
    key: list[str] = []
    for part in error["loc"]:
        if ".".join([*key, str(part)]) in lines or error["type"] == "missing":
            key.append(str(part))
    return key


def _explain(
    schema: type[Settings], error: dict[str, Any], key: list[str], path: Path, lines: dict[str, int]
) -> EnginesmithError:
    """One pydantic error in the user's terms."""
    dotted = ".".join(key)
    kind = error["type"]
    if kind == "extra_forbidden":
        allowed = _fields_at(schema, key[:-1])
        close = difflib.get_close_matches(key[-1], allowed, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(sorted(allowed))}"
        return _error(path, lines, dotted, f"unknown key {dotted!r}", hint=hint)
    if kind == "missing":
        return _error(path, lines, dotted, f"{dotted!r} is missing", hint="see the README for a complete file")
    message = error["msg"].removeprefix("Value error, ")
    value = error.get("input")
    shown = "" if isinstance(value, dict | list | tuple) else f" (it is {value!r})"
    return _error(path, lines, dotted, f"{dotted}: {message}{shown}")


def _fields_at(schema: type[BaseModel], key: list[str]) -> list[str]:
    """Names of the fields that a settings class has below a dotted key."""
    current: Any = schema
    for part in key:
        annotation = current.model_fields[part].annotation if _is_settings(current) else None
        if annotation is None:
            arguments = get_args(current)
            annotation = arguments[-1] if arguments else None
        while get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        current = annotation
    return list(current.model_fields) if _is_settings(current) else []


def _is_settings(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _error(path: Path, lines: dict[str, int], key: str, found: str, *, hint: str = "") -> EnginesmithError:
    parts = key.split(".")
    while parts and ".".join(parts) not in lines:
        parts.pop()
    line = lines.get(".".join(parts))
    return EnginesmithError(found, where=f"{path}:{line}" if line else str(path), hint=hint)
