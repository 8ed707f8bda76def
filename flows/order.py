"""The order of stages: a pipeline file and a checkpoint turn into every variant on every target, recorded.

    slim - fold - export - simplify - reference -+- probe - fallback -+- revert -+- build - measure - record
                                                 +- calibrate --------+          |
                                                 +------- fp32, fp16, int8 ------+   (per variant and target)

`run_stages` states the order once. Plain mode calls each stage on the spot; the flow in compile.py submits it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.settings import VARIANTS, Pipeline, VariantName, load_pipeline
from enginesmith.tasks.stage import Part, SourceFile, Stage
from enginesmith.tasks.store import Artifact, Store
from enginesmith.tasks.usercode import UserCode, importable

if TYPE_CHECKING:
    from enginesmith.tasks.latency import TimedEngine
    from enginesmith.tasks.record import Recorded
    from enginesmith.tasks.table import VariantRow

StageName = Literal[
    "slim",
    "data",
    "fold",
    "export",
    "simplify",
    "reference",
    "approximate",
    "probe",
    "fallback",
    "calibrate",
    "revert",
    "build",
    "measure",
    "record",
]
STAGES: tuple[StageName, ...] = get_args(StageName)
_NAMES: Any = {"adopt": "export"}  # a checkpoint that is ONNX already is adopted where others are exported

# A stage call: the artifact itself in plain mode, a future of it under Prefect. Stages take either.
Call = Callable[..., Any]
# ``call(label, function, **inputs)`` for what is no stage: timing and recording.
CallFunction = Callable[..., Any]


@dataclass(frozen=True)
class Target:
    """A target of pipeline.yaml as it presents itself on this host.

    Attributes:
        name: its name in pipeline.yaml.
        backend: the backend's name.
        options: the backend's options.
        fingerprint: what of the host an engine depends on (GPU, driver, runtime).
        builds: the variants whose precision the backend keeps in an engine.
        executes: the variants that it really executes on this host.
    """

    name: str
    backend: str
    options: dict[str, Any]
    fingerprint: dict[str, Any]
    builds: frozenset[str]
    executes: frozenset[str]


@dataclass(frozen=True)
class Plan:
    """Everything a compile needs to know before its first stage.

    Attributes:
        pipeline: the pipeline file.
        store: where artifacts go.
        source: the checkpoint.
        targets: the targets, as they are on this host.
        until: the last stage to run.
    """

    pipeline: Pipeline
    store: Store
    source: SourceFile
    targets: tuple[Target, ...]
    until: StageName = "record"

    @property
    def is_onnx(self) -> bool:
        """Whether the checkpoint is a graph already: no slimming, folding or exporting of a module."""
        return self.source.path.suffix == ".onnx"

    @property
    def variants(self) -> tuple[VariantName, ...]:
        """The variants asked for, in their fixed order; FP32 always."""
        asked = {*self.pipeline.settings.precision.variants, "fp32"}
        return tuple(v for v in VARIANTS if v in asked)


@dataclass
class Compiled:
    """What a compile made.

    Attributes:
        metric: the metric's name, for people.
        stages: artifact (or future) per label: a stage's name, or ``build/TARGET/VARIANT`` and ``measure/…``.
        rows: one row per variant and target, once everything is measured.
        recorded: where MLflow keeps it.
        started: when it began.
        seconds: wall time, once it is finished.
    """

    metric: str = "metric"
    stages: dict[str, Any] = field(default_factory=dict)
    rows: tuple[VariantRow, ...] = ()
    recorded: Recorded | None = None
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    seconds: float = 0.0

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """The stages' artifacts, after `settle`."""
        return {label: value for label, value in self.stages.items() if isinstance(value, Artifact)}

    @property
    def failures(self) -> dict[str, EnginesmithError]:
        """The builds that failed, by label; the variants and targets beside them went on."""
        return {
            label: value.error
            for label, value in self.stages.items()
            if isinstance(value, Failed) and label.startswith("build/")
        }


@dataclass(frozen=True)
class Failed:
    """A build that failed, in the place of its artifact and of what would have been measured through it."""

    error: EnginesmithError


class IncompleteError(EnginesmithError):
    """Some builds failed, or MLflow could not be written; everything else was compiled and measured.

    Attributes:
        compiled: what was made all the same.
    """

    compiled: Compiled

    @classmethod
    def of(cls, compiled: Compiled, unrecorded: EnginesmithError | None) -> IncompleteError:
        """The first failure as the error, the others as its details."""
        failures = dict(compiled.failures) | ({"record": unrecorded} if unrecorded else {})
        (label, first), *rest = failures.items()
        error = cls(
            f"{label} failed: {first.found}",
            where=first.where,
            key=first.key,
            hint=first.hint,
            details=[*first.details, *(f"{other} failed: {e.found}" for other, e in rest)],
        )
        error.stage = label.partition("/")[0]
        error.compiled = compiled
        return error


class _Reached(Exception):  # noqa: N818 - not an error: `until` has been reached
    pass


def run_stages(plan: Plan, call: Call) -> Compiled:
    """The picture of docs/design.md: every stage in order, each given what it depends on.

    Args:
        plan: what to compile.
        call: ``call(label, stage, **inputs)``, which runs the stage or submits it.

    Returns:
        The stages' results by label, as `call` returned them.
    """
    done = Compiled(plan.pipeline.settings.data.metric.call.rpartition(":")[2])
    last = STAGES.index(plan.until)

    def step(stage: Stage, *, label: str = "", **inputs: Any) -> Any:
        name: StageName = _NAMES.get(stage.name, stage.name)
        if STAGES.index(name) > last:
            raise _Reached
        label = label or name
        done.stages[label] = call(label, stage, **inputs)
        return done.stages[label]

    with suppress(_Reached):
        _steps(plan, step)
    return done


def _steps(plan: Plan, step: Callable[..., Any]) -> None:
    from enginesmith.tasks.approximate import APPROXIMATE
    from enginesmith.tasks.calibrate import CALIBRATE
    from enginesmith.tasks.data import DATA
    from enginesmith.tasks.export import ADOPT, EXPORT
    from enginesmith.tasks.fallback import FALLBACK
    from enginesmith.tasks.firewalls.waivers import active
    from enginesmith.tasks.fold import FOLD, FOLD_GRAPH
    from enginesmith.tasks.metric import metric_ref
    from enginesmith.tasks.probe import PROBE
    from enginesmith.tasks.reference import REFERENCE
    from enginesmith.tasks.revert import REVERT
    from enginesmith.tasks.simplify import SIMPLIFY
    from enginesmith.tasks.slim import SLIM

    settings = plan.pipeline.settings
    inputs = settings.inputs
    fp16, int8, budget = settings.precision.fp16, settings.precision.int8, settings.budget
    metric = metric_ref(settings.data.metric, plan.pipeline.folder)
    backends = tuple(sorted({target.backend for target in plan.targets}))
    judging = {"settings": settings.export, "backends": backends, "waivers": active(settings.lint.waivers, _today())}

    if plan.is_onnx:
        data = step(DATA, **_data_inputs(plan.pipeline))
        adopted = step(ADOPT, source=plan.source, data=data, inputs=inputs, **judging)
        exported = step(FOLD_GRAPH, model=adopted, data=data, inputs=inputs, settings=settings.fold)
    else:
        factory = factory_of(plan.pipeline)
        weights = step(SLIM, checkpoint=plan.source, **_slim_settings(plan.pipeline))
        data = step(DATA, **_data_inputs(plan.pipeline))
        folded = step(FOLD, weights=weights, factory=factory, data=data, inputs=inputs, settings=settings.fold)
        exported = step(EXPORT, model=folded, factory=factory, data=data, inputs=inputs, **judging)
    model = step(SIMPLIFY, model=exported, data=data, inputs=inputs, settings=settings.simplify)
    judged = {"data": data, "reference": step(REFERENCE, model=model, data=data, metric=metric), "metric": metric}

    files = {"fp32": model}
    if settings.precision.cheap_activations:  # what follows starts from the cheaper graph, held to the exact reference
        model = step(APPROXIMATE, model=model, budget=budget, **judged)
    wanted = set(plan.variants)
    if wanted & {"fp16", "mixed", "int8-mixed"}:
        layers = step(PROBE, model=model, samples=fp16.samples, **judged)
        mixed = step(FALLBACK, model=model, probe=layers, settings=fp16, budget=budget, **judged)
        files |= {"fp16": Part(mixed, "fp16"), "mixed": Part(mixed, "mixed")}
    if wanted & {"int8", "int8-mixed"}:
        quantized = step(CALIBRATE, model=model, data=data, settings=int8)
        files["int8"] = Part(quantized, "int8")
    if "int8-mixed" in wanted:
        reverted = step(REVERT, model=model, int8=quantized, fallback=mixed, settings=int8, budget=budget, **judged)
        files["int8-mixed"] = Part(reverted, "int8-mixed")

    _engines(plan, step, {variant: files[variant] for variant in plan.variants}, judged)


def _today() -> date:
    return datetime.now(UTC).date()


def _engines(plan: Plan, step: Callable[..., Any], files: dict[str, Any], judged: dict[str, Any]) -> None:
    """Build every variant for every target, then measure each: through its engine where that is evidence."""
    from enginesmith.tasks.build import BUILD
    from enginesmith.tasks.measure import MEASURE

    engines = {
        (target.name, variant): step(
            BUILD,
            label=f"build/{target.name}/{variant}",
            model=model,
            variant=variant,
            inputs=plan.pipeline.settings.inputs,
            backend=target.backend,
            options=target.options,
            fingerprint=target.fingerprint,
        )
        for target in plan.targets
        for variant, model in files.items()
        if variant in target.builds
    }
    for target in plan.targets:
        for variant, model in files.items():
            real = variant in target.executes
            step(
                MEASURE,
                label=f"measure/{target.name}/{variant}",
                model=model,
                engine=engines[target.name, variant] if real else None,
                backend=target.backend if real else None,
                **judged,
            )


def compile_plain(
    path: Path, *, checkpoint: Path | None = None, until: StageName = "record", remeasure: bool = False
) -> Compiled:
    """Compile one pipeline file in this process, without Prefect.

    Args:
        path: the pipeline.yaml.
        checkpoint: a checkpoint instead of the one that the file names.
        until: the last stage to run, one of `STAGES`.
        remeasure: time the engines again although an earlier session did.

    Raises:
        EnginesmithError: whatever went wrong, with its place in the file; the failure is recorded in MLflow.
    """
    with compiling(path, checkpoint=checkpoint, until=until) as plan:
        compiled = run_stages(plan, plain_call(plan.store))
        finish(plan, compiled, _call_function, remeasure=remeasure)
        return compiled


@contextmanager
def compiling(path: Path, *, checkpoint: Path | None, until: StageName) -> Iterator[Plan]:
    """Load and plan a pipeline, its code importable; errors get their place and leave a failed MLflow run."""
    with watched(path) as watch:
        plan = make_plan(watch.pipeline, checkpoint=checkpoint, until=until)
        watch.source_sha256 = plan.source.sha256
        yield plan


def preflight(path: Path, checkpoint: Path | None = None) -> None:
    """Check what can be known without reading the checkpoint; errors are those of `compiling`."""
    with watched(path) as watch:
        _check_code(watch.pipeline)
        _checkpoint(watch.pipeline, checkpoint)
        _targets(watch.pipeline)


@dataclass
class Watch:
    """What is known of a compile when it fails.

    Attributes:
        pipeline: its file.
        source_sha256: digest of its checkpoint, once it was read.
        started: when it began.
    """

    pipeline: Pipeline
    source_sha256: str = ""
    started: datetime = field(default_factory=lambda: datetime.now(UTC))


@contextmanager
def watched(path: Path, *, record: bool = True) -> Iterator[Watch]:
    """Load a pipeline, its code importable; errors get their place and, with `record`, leave a failed MLflow run."""
    progress.reset()
    watch = Watch(load_pipeline(path))
    pipeline = watch.pipeline
    with recording_failure(watch) if record else nullcontext(), located(pipeline), importable(pipeline.folder):
        try:
            yield watch
        except BaseException:
            progress.interrupt()  # work that goes on in other threads ends at its next step
            raise


def stage_name(text: str) -> StageName:
    """A stage's name as the user wrote it.

    Raises:
        EnginesmithError: there is no such stage.
    """
    for name in STAGES:
        if name == text:
            return name
    close = difflib.get_close_matches(text, STAGES, n=1)
    raise EnginesmithError(
        f"there is no stage {text!r}", hint=f"did you mean {close[0]}?" if close else f"stages: {', '.join(STAGES)}"
    )


def make_plan(pipeline: Pipeline, *, checkpoint: Path | None = None, until: StageName = "record") -> Plan:
    """Resolve and check everything that can be known before the first stage."""
    _check_code(pipeline)
    path = _checkpoint(pipeline, checkpoint)
    source = _source(path, "" if checkpoint else "model.checkpoint")
    return Plan(pipeline, Store(pipeline.store_root), source, _targets(pipeline), until)


def finish(
    plan: Plan,
    compiled: Compiled,
    call: CallFunction,
    *,
    remeasure: bool = False,
    tags: Mapping[str, str] | None = None,
) -> None:
    """Time the engines, make the table, record everything in MLflow. Needs every artifact.

    Args:
        plan: what was compiled.
        compiled: its artifacts; receives rows, where it was recorded, and the wall time.
        call: ``call(label, function, **inputs)``, which runs the function or runs it as a task.
        remeasure: time the engines again although an earlier session did.
        tags: what set the compile off, for MLflow.
    """
    unrecorded: EnginesmithError | None = None
    if plan.until in ("measure", "record"):
        from enginesmith.tasks.latency import time_engines
        from enginesmith.tasks.record import CompileRecord, record
        from enginesmith.tasks.table import assemble_rows

        artifacts = compiled.artifacts
        sessions = {
            target.name: call(
                f"latency/{target.name}",
                time_engines,
                store=plan.store,
                target=target.name,
                engines=_timed(target, artifacts),
                data=artifacts["data"],
                again=remeasure,
            )
            for target in plan.targets
        }
        found = {name: session for name, session in sessions.items() if session is not None}
        compiled.rows = assemble_rows(
            artifacts,
            targets={target.name: target.backend for target in plan.targets},
            variants=plan.variants,
            max_drop=plan.pipeline.settings.budget.max_drop,
            sessions=found,
            notes={
                label.partition("/")[2]: [f"build failed: {error.found}"] for label, error in compiled.failures.items()
            },
        )
        if plan.until == "record":
            made = CompileRecord(
                pipeline=plan.pipeline,
                source_sha256=plan.source.sha256,
                artifacts=artifacts,
                rows=compiled.rows,
                started=compiled.started,
                finished=datetime.now(UTC),
                sessions=found,
                tags=tags or {"trigger": "command line"},
            )
            try:
                compiled.recorded = call("record", record, compiled=made)
            except EnginesmithError as error:
                if isinstance(error, Interrupted):
                    raise
                unrecorded = error
    compiled.seconds = (datetime.now(UTC) - compiled.started).total_seconds()
    if compiled.failures or unrecorded:
        raise IncompleteError.of(compiled, unrecorded)


def _timed(target: Target, artifacts: Mapping[str, Artifact]) -> list[TimedEngine]:
    """The target's engines that really execute their precision on this host."""
    from enginesmith.tasks.backends import refused
    from enginesmith.tasks.latency import TimedEngine

    engines = {v: artifacts.get(f"build/{target.name}/{v}") for v in VARIANTS if v in target.executes}
    return [
        TimedEngine(v, target.backend, engine)
        for v, engine in engines.items()
        if engine is not None and not refused(engine)
    ]


@contextmanager
def located(pipeline: Pipeline) -> Iterator[None]:
    """Add file:line of the key at fault to every error that passes."""
    try:
        yield
    except EnginesmithError as error:
        if error.key:
            place = pipeline.where(error.key)
            if error.key == "tracking.uri" and os.environ.get("MLFLOW_TRACKING_URI"):
                place = "MLFLOW_TRACKING_URI"
            error.where = f"{place}, {error.where}" if error.where and error.where != place else place
        raise


@contextmanager
def recording_failure(watch: Watch) -> Iterator[None]:
    """Leave a failed MLflow run behind when a compile fails or is stopped."""
    try:
        yield
    except IncompleteError:  # recorded already, with everything that did not fail, or impossible to record
        raise
    except BaseException as error:
        from enginesmith.tasks.record import record_failure

        # A server that does not answer must not hold up a person who wants to stop.
        patience = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        before = {name: os.environ.get(name) for name in patience}
        os.environ.update(patience)
        try:
            record_failure(
                watch.pipeline,
                error,
                started=watch.started,
                stage=getattr(error, "stage", ""),
                source_sha256=watch.source_sha256,
            )
        except Exception as second:  # the first error is the one to report
            progress.note(f"the failure could not be recorded in MLflow: {second}")
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        raise


def _call_function(label: str, function: Callable[..., Any], **inputs: Any) -> Any:  # noqa: ARG001
    return function(**inputs)


def plain_call(store: Store) -> Call:
    """A `call` that runs each stage on the spot and says so."""

    def call(label: str, stage: Stage, **inputs: Any) -> Artifact | Failed:
        for value in inputs.values():
            if isinstance(value, Failed):
                return value
        try:
            artifact = stage(store=store, **inputs)
        except EnginesmithError as error:
            if stage.name != "build" or isinstance(error, Interrupted):
                raise
            progress.note(f"{label} failed: {error.found}")
            return Failed(error)
        progress.note(said(label, artifact))
        return artifact

    return call


def said(label: str, artifact: Artifact) -> str:
    """One line about a finished stage."""
    how = "cached" if artifact.cached else f"{artifact.seconds:.1f} s"
    return f"{label:<28} {how:>8}   {artifact.key[:12]}"


def _targets(pipeline: Pipeline) -> tuple[Target, ...]:
    """The targets as they are on this host; a backend that is not installed or an unknown option ends the compile."""
    from enginesmith.tasks.backends import engine_errors, find_backend
    from enginesmith.tasks.engines import names
    from enginesmith.tasks.engines.child import TIMEOUT
    from enginesmith.tasks.engines.spec import merged_options

    found = []
    for name, settings in pipeline.settings.targets.items():
        if settings.backend not in names():
            raise EnginesmithError(
                f"there is no backend {settings.backend!r} in this version",
                key=f"targets.{name}.backend",
                hint=f"there are: {', '.join(names())}",
            )
        backend = find_backend(settings.backend)
        if backend.version() is None:
            raise EnginesmithError(
                f"the backend {settings.backend} of target {name!r} is not installed",
                key=f"targets.{name}.backend",
                hint=f"pip install {backend.extra}, or remove the target",
            )
        with engine_errors(key=f"targets.{name}"):
            options = merged_options((*backend.options, TIMEOUT), settings.options, backend=settings.backend)
        found.append(
            Target(
                name,
                settings.backend,
                options,
                dict(backend.fingerprint()),
                frozenset(backend.builds()),
                frozenset(backend.executes()),
            )
        )
    return tuple(found)


def _checkpoint(pipeline: Pipeline, given: Path | None) -> Path:
    """The file to compile; a folder or a file of a kind that its settings do not fit is refused."""
    from enginesmith.tasks.data import resolve_source

    model = pipeline.settings.model
    key = "" if given else "model.checkpoint"
    path = given.absolute() if given else resolve_source(model.checkpoint, pipeline.folder, key)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise EnginesmithError(f"{path} {found}", key=key, hint="give a checkpoint file")
    if path.suffix == ".onnx" and model.factory:
        raise EnginesmithError(
            "an ONNX checkpoint has no use for a factory", key="model.factory", hint="remove model.factory"
        )
    return path


def _check_code(pipeline: Pipeline) -> None:
    """Every ``module:function`` of the file: a slip of the pen is said before the first stage."""
    settings = pipeline.settings
    named = {
        "model.factory": settings.model.factory,
        "data.calibration": settings.data.calibration,
        "data.evaluation": settings.data.evaluation,
        "data.search": settings.data.search,
        "data.metric.call": settings.data.metric.call,
        "data.metric.fit": settings.data.metric.fit,
    }
    for key, text in named.items():
        if text and ":" in text and "://" not in text and not (pipeline.folder / text).exists():
            UserCode(pipeline.folder, text, key).check()


def _source(path: Path, key: str) -> SourceFile:
    """The checkpoint by its content: with the shards of an index, with the external data of an ONNX file."""
    if path.suffix == ".onnx":
        from enginesmith.tasks.sources import onnx_source

        return onnx_source(path, key=key)
    from enginesmith.tasks.slim import checkpoint_source

    return checkpoint_source(path, key=key)


def _slim_settings(pipeline: Pipeline) -> dict[str, Any]:
    model = pipeline.settings.model
    return {
        "weights": model.weights,
        "dtype": model.dtype,
        "allow_pickle": model.allow_pickle,
        "drop": model.drop,
        "allow_nonfinite": model.allow_nonfinite,
    }


def _data_inputs(pipeline: Pipeline) -> dict[str, Any]:
    from enginesmith.tasks.data import data_source, keyed_files

    data = pipeline.settings.data

    def source(text: str | None, key: str) -> Any:
        return data_source(text, pipeline.folder, key) if text else None

    return {
        "calibration": source(data.calibration, "data.calibration"),
        "evaluation": source(data.evaluation, "data.evaluation"),
        "search": source(data.search, "data.search"),
        "files": keyed_files(data.files, pipeline.folder),
        "inputs": pipeline.settings.inputs,
        "seed": data.seed,
        "samples": data.samples,
    }


def factory_of(pipeline: Pipeline) -> UserCode:
    """The code that gives the weights a shape."""
    factory = pipeline.settings.model.factory
    if factory is None:
        raise EnginesmithError(
            "a checkpoint of weights needs the code that gives them a shape",
            key="model",
            hint="add model.factory: module:function, a function without arguments that returns the nn.Module",
        )
    return UserCode(pipeline.folder, factory, "model.factory")
