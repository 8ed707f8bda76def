"""The `enginesmith` command: arguments turn into calls of flows and stages, results into tables or JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from enginesmith.flows.order import Compiled, StageName
    from enginesmith.tasks.store import Artifact

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the run's page has the log; errors are printed once, below
    "PREFECT_CLI_COLORS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

VARIANTS = ("fp32", "fp16", "mixed", "int8", "int8-mixed")

_pipeline = click.argument("pipeline", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last thing on stdout.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="enginesmith")
def cli() -> None:
    """A checkpoint goes in; the fastest engine that still keeps the model's accuracy comes out."""


@cli.command("compile")
@_pipeline
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Compile this instead of model.checkpoint.")
@click.option("--until", default="record", metavar="STAGE", show_default=True, help="Stop after this stage.")
@click.option("--plain", is_flag=True, help="Without Prefect: same stages, same order, no server.")
@click.option("--remeasure", is_flag=True, help="Time the engines again although an earlier session did.")
@_json
def compile_command(
    pipeline: Path, checkpoint: Path | None, until: str, plain: bool, remeasure: bool, as_json: bool
) -> None:
    """Compile PIPELINE (a pipeline.yaml) to every variant on every target."""
    from enginesmith.flows.order import IncompleteError, compile_plain, preflight, stage_name

    last = stage_name(until)
    show = _print_json if as_json else _print
    try:
        if plain:
            compiled = compile_plain(pipeline, checkpoint=checkpoint, until=last, remeasure=remeasure)
        else:
            preflight(pipeline, checkpoint)  # what is wrong in the file is said before a server starts
            from enginesmith.flows.compile import compile_checkpoint

            compiled = compile_checkpoint(pipeline, checkpoint=checkpoint, until=last, remeasure=remeasure)
    except IncompleteError as error:
        show(error.compiled)
        raise
    show(compiled)


def _services_command(function: Callable[..., None]) -> click.Command:
    """A command on the local servers, with the options that say which."""
    for option in (
        click.option(
            "--workers", type=click.IntRange(min=0), default=1, show_default=True, help="Workers of the work pool."
        ),
        click.option("--pool", default="compile", show_default=True, help="The work pool."),
        click.option("--mlflow-port", type=click.IntRange(1, 65535), default=5000, show_default=True),
        click.option("--prefect-port", type=click.IntRange(1, 65535), default=4200, show_default=True),
        click.option("--host", default="127.0.0.1", show_default=True, help="Beyond loopback only with logins set."),
        _services_folder,
    ):
        function = option(function)
    return cli.command()(function)


_services_folder = click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("artifacts/services"),
    envvar="ENGINESMITH_SERVICES",
    show_default=True,
    help="Databases, logs and process files.",
)


@_services_command
@click.option("--deploy", "file", type=click.Path(path_type=Path), help="Apply the deployments of this pipeline.yaml.")
def up(file: Path | None, folder: Path, **options: Any) -> None:
    """Start the Prefect server, its workers and the MLflow server on this host; what runs already is left alone."""
    from enginesmith.flows.services import Options, deploy, environment
    from enginesmith.flows.services import up as start

    chosen = Options(folder.resolve(), **options)
    start(chosen, click.echo)
    if file is not None:
        deploy(chosen, file)
        click.echo(f"deployed {file}")
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        click.echo(f"export {name}={environment(chosen)[name]}")


@cli.command()
@_services_folder
def down(folder: Path) -> None:
    """Stop what `enginesmith up` started from this folder, and nothing else."""
    from enginesmith.flows.services import down as stop

    stop(folder.resolve(), click.echo)


@_services_command
@_json
def status(folder: Path, as_json: bool, **options: Any) -> None:
    """Show how the local servers and workers are; exit code 1 when one does not answer."""
    from dataclasses import asdict

    from enginesmith.flows.services import Options
    from enginesmith.flows.services import status as look

    found = look(Options(folder.resolve(), **options))
    if as_json:
        click.echo(json.dumps([asdict(service) for service in found]))
    else:
        for service in found:
            pid = f"pid {service.pid}" if service.pid else ""
            click.echo(f"{service.name:<10} {service.state:<10} {pid:<12} {service.address}".rstrip())
    if any(service.state != "up" for service in found):
        raise click.exceptions.Exit(1)


_LINT_HELP = """Show what the firewalls find in each TARGET.

    \b
    TARGET is
      pipeline.yaml          source, graph and experiment, prepared as in a compile
      model.onnx             the graph alone: no pipeline and no source needed
      file.py[:Class]        the source alone, without weights
      module:factory         the same, of an importable module

    \b
    Exit code
      0  nothing at or above --fail-on
      1  findings at or above --fail-on
      2  a target could not be judged: a bad file, no module, no forward, a factory that raises, wrong settings
    """


@cli.command(help=_LINT_HELP)
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "sarif"]),
    default="text",
    show_default=True,
    help="For people, for programs, for code scanning.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file instead.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "advice", "never"]),
    help="What makes the exit code 1; else lint.fail_on of pipeline.yaml, else error.",
)
@click.option("--rule", "rules", multiple=True, metavar="GLOB", help="Only these rules, as in 'shape/*'.")
@click.option("--ignore", "ignored", multiple=True, metavar="GLOB", help="Not these rules.")
@click.option(
    "--target",
    "backends",
    multiple=True,
    metavar="BACKEND[:VERSION]",
    help="Judge for these backends, as in tensorrt:10; else the pipeline's own targets, of other files all.",
)
def lint(
    targets: tuple[str, ...],
    form: str,
    as_json: bool,
    output: Path | None,
    fail_on: Any,
    rules: tuple[str, ...],
    ignored: tuple[str, ...],
    backends: tuple[str, ...],
) -> None:
    """Show what the firewalls find in each of `targets`."""
    from enginesmith.flows.lint import lint_target, wish
    from enginesmith.flows.show import write_report
    from enginesmith.tasks.errors import EnginesmithError
    from enginesmith.tasks.firewalls.report import exit_code

    try:
        asked = wish(rules, ignored, backends, fail_on)
        linted = [lint_target(target, asked) for target in targets]
        write_report(linted, "json" if as_json else form, output)
    except EnginesmithError as error:
        if type(error) is not EnginesmithError:
            raise
        place = ", ".join(part for part in (error.where, error.key) if part)
        said = f"{place}: {error.found}" if place else error.found
        click.secho(f"error: {said}{f' ({error.hint})' if error.hint else ''}", fg="red", err=True)
        raise click.exceptions.Exit(2) from None
    for one in linted:
        if one.problem:
            click.secho(f"error: {one.problem.line}", fg="red", err=True)
    raise click.exceptions.Exit(exit_code(linted))


@cli.command()
@click.argument("rule", required=False)
@click.option("--list", "listing", is_flag=True, help="All rules, one a line.")
def explain(rule: str | None, listing: bool) -> None:
    """Explain RULE: what it finds, what happens if it is ignored, what to do, a bad and a good example."""
    from enginesmith.flows.show import show_rule, show_rules
    from enginesmith.tasks.firewalls.rules import find_rule

    if listing or rule is None:
        show_rules()
    else:
        show_rule(find_rule(rule))


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--weights", default="auto", show_default=True, help="Which weights: auto, ema, model, or a key.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), help="Convert floating-point weights.")
@click.option("--allow-pickle", is_flag=True, help="Read weights out of whole pickled modules; nothing in them runs.")
@click.option("--drop", multiple=True, metavar="PATTERN", help="Leave out names like aux_head.*; !PATTERN keeps them.")
@click.option("--allow-nonfinite", multiple=True, metavar="PATTERN", help="Tensors that may hold NaN or infinity.")
@_json
def slim(
    source: Path,
    out: Path,
    weights: str,
    dtype: str | None,
    allow_pickle: bool,
    drop: tuple[str, ...],
    allow_nonfinite: tuple[str, ...],
    as_json: bool,
) -> None:
    """Keep the weights of the checkpoint SOURCE and write them to OUT (.safetensors)."""
    from enginesmith.flows.workbench import put_file, scratch_store
    from enginesmith.tasks.slim import SLIM, checkpoint_source

    with scratch_store(near=out) as store:
        artifact = SLIM(
            store=store,
            checkpoint=checkpoint_source(source, key=""),
            weights=weights,
            dtype=dtype,
            allow_pickle=allow_pickle,
            drop=drop,
            allow_nonfinite=allow_nonfinite,
        )
        put_file(artifact, "weights.safetensors", out)
        _report(artifact, out, as_json)


@cli.command()
@_pipeline
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Fold this instead of model.checkpoint.")
@_json
def fold(pipeline: Path, out: Path, checkpoint: Path | None, as_json: bool) -> None:
    """Fold BatchNorm in PIPELINE's model and put the weights and the list of folds into the folder OUT."""
    _one_stage("fold", pipeline, out, checkpoint, as_json)


@cli.command()
@_pipeline
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Export this instead of model.checkpoint.")
@_json
def export(pipeline: Path, out: Path, checkpoint: Path | None, as_json: bool) -> None:
    """Export PIPELINE's model behind the firewalls and put model.onnx and findings.json into the folder OUT."""
    _one_stage("export", pipeline, out, checkpoint, as_json)


def _model_command(name: str, *, data: bool = True) -> Callable[[Callable[..., None]], click.Command]:
    """A command on an .onnx file and feeds."""

    def decorate(function: Callable[..., None]) -> click.Command:
        function = _json(function)
        function = click.option(
            "--dim", "dims", multiple=True, metavar="NAME=MIN:OPT:MAX", help="Range of a dynamic dimension."
        )(function)
        if data:
            function = click.option(
                "--metric",
                default="agreement",
                show_default=True,
                metavar="agreement|top1|MODULE:FUNCTION",
                help="How to judge outputs; top1 and functions need `targets` in the feeds.",
            )(function)
        function = click.option(
            "--data",
            "feeds",
            required=data,
            type=click.Path(path_type=Path),
            help="Feeds: an .npz (input names, optional targets) or a folder of .npy.",
        )(function)
        function = click.argument("model", type=click.Path(path_type=Path))(function)
        return cli.command(name)(function)

    return decorate


@_model_command("simplify", data=False)
@click.argument("out", type=click.Path(path_type=Path))
def simplify(model: Path, out: Path, feeds: Path | None, dims: tuple[str, ...], as_json: bool) -> None:
    """Simplify MODEL (.onnx) and write it to OUT; the original when simplifying would change or bloat it."""
    from enginesmith.flows.workbench import put_file, ranges, workbench

    with workbench(model, feeds, dims=ranges(dims), near=out) as bench:
        put_file(bench.simplified, "model.onnx", out)
        _report(bench.simplified, out, as_json)


@_model_command("probe")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Samples on which every node is probed.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the rows (JSON) here.")
def probe(
    model: Path, feeds: Path, metric: str, samples: int, out: Path | None, dims: tuple[str, ...], as_json: bool
) -> None:
    """Show what FP16 does to each node of MODEL (.onnx) and, through it, to the outputs and the metric."""
    from enginesmith.flows.workbench import put_file, ranges, workbench
    from enginesmith.tasks.probe import PROBE

    with workbench(model, feeds, metric=metric, dims=ranges(dims)) as bench:
        artifact = PROBE(store=bench.store, model=bench.model, samples=samples, **bench.judged)
        if out is not None:
            put_file(artifact, "layers.json", out)
        if as_json:
            click.echo((artifact.path / "layers.json").read_text())
            return
        from rich.console import Console

        from enginesmith.tasks.graph.layers import load_layers, table

        Console(width=None if sys.stdout.isatty() else 120).print(table(load_layers(artifact.path / "layers.json")))


@_model_command("fallback")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--max-drop",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    help="Budget: how much worse than FP32, absolute.",
)
@click.option(
    "--layer-drop",
    type=click.FloatRange(min=0),
    default=0.02,
    show_default=True,
    help="A node that costs more alone stays FP32.",
)
@click.option("--keep-fp32", multiple=True, metavar="NAME", help="Node name, pattern or operator to keep in FP32.")
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Samples on which every node is probed.",
)
def fallback(
    model: Path,
    out: Path,
    feeds: Path,
    metric: str,
    max_drop: float,
    layer_drop: float,
    keep_fp32: tuple[str, ...],
    samples: int,
    dims: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the nodes of MODEL (.onnx) that must stay FP32; put fp16/, mixed/ and plan.json into the folder OUT."""
    from enginesmith.flows.workbench import put, ranges, workbench
    from enginesmith.tasks.fallback import FALLBACK
    from enginesmith.tasks.probe import PROBE
    from enginesmith.tasks.settings import BudgetSettings, Fp16Settings

    with workbench(model, feeds, metric=metric, dims=ranges(dims), near=out) as bench:
        artifact = FALLBACK(
            store=bench.store,
            model=bench.model,
            probe=PROBE(store=bench.store, model=bench.model, samples=samples, **bench.judged),
            settings=Fp16Settings(layer_drop=layer_drop, keep_fp32=keep_fp32, samples=samples),
            budget=BudgetSettings(max_drop=max_drop),
            **bench.judged,
        )
        _report(artifact, put(artifact, out), as_json)


@_model_command("calibrate")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--calibrator",
    default="entropy",
    show_default=True,
    type=click.Choice(["entropy", "minmax", "percentile", "mse"]),
    help="How a range is chosen.",
)
@click.option(
    "--placement",
    default="conv-relu",
    show_default=True,
    type=click.Choice(["conv-relu", "conv", "conv+residual"]),
    help="What is quantized.",
)
@click.option("--samples", type=click.IntRange(min=1), default=512, show_default=True, help="Calibration samples.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Node name, pattern or operator to leave alone.")
def calibrate(
    model: Path,
    out: Path,
    feeds: Path,
    metric: str,  # noqa: ARG001 - calibration judges no outputs
    calibrator: str,
    placement: str,
    samples: int,
    exclude: tuple[str, ...],
    dims: tuple[str, ...],
    as_json: bool,
) -> None:
    """Quantize the Conv-BN-ReLU subgraphs of MODEL (.onnx) to INT8; put int8/ and ranges.json into the folder OUT."""
    from enginesmith.flows.workbench import put, ranges, workbench
    from enginesmith.tasks.calibrate import CALIBRATE
    from enginesmith.tasks.settings import Int8Settings

    settings = Int8Settings.model_validate(
        {"calibrator": calibrator, "placement": placement, "samples": samples, "exclude": exclude}
    )
    with workbench(model, feeds, dims=ranges(dims), near=out) as bench:
        artifact = CALIBRATE(store=bench.store, model=bench.model, data=bench.data, settings=settings)
        _report(artifact, put(artifact, out), as_json)


@_model_command("revert")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--max-drop",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    help="Budget: how much worse than FP32, absolute.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Samples on which every node is probed.",
)
def revert(
    model: Path,
    out: Path,
    feeds: Path,
    metric: str,
    max_drop: float,
    samples: int,
    dims: tuple[str, ...],
    as_json: bool,
) -> None:
    """Quantize MODEL (.onnx), take back what harms, FP16 elsewhere; put int8-mixed/ into the folder OUT."""
    from enginesmith.flows.workbench import put, ranges, workbench
    from enginesmith.tasks.calibrate import CALIBRATE
    from enginesmith.tasks.fallback import FALLBACK
    from enginesmith.tasks.probe import PROBE
    from enginesmith.tasks.revert import REVERT
    from enginesmith.tasks.settings import BudgetSettings, Fp16Settings, Int8Settings

    int8, fp16, budget = Int8Settings(), Fp16Settings(samples=samples), BudgetSettings(max_drop=max_drop)
    with workbench(model, feeds, metric=metric, dims=ranges(dims), near=out) as bench:
        quantized = CALIBRATE(store=bench.store, model=bench.model, data=bench.data, settings=int8)
        probed = PROBE(store=bench.store, model=bench.model, samples=samples, **bench.judged)
        judged = {"store": bench.store, "model": bench.model, "budget": budget, **bench.judged}
        mixed = FALLBACK(probe=probed, settings=fp16, **judged)
        artifact = REVERT(int8=quantized, fallback=mixed, settings=int8, **judged)
        _report(artifact, put(artifact, out), as_json)


@_model_command("build", data=False)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--backend", "name", default="onnxruntime", show_default=True, help="What builds: see docs/engines.md.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the backend (YAML value).")
@click.option(
    "--variant", type=click.Choice(VARIANTS), default="fp32", show_default=True, help="Which variant the file is."
)
def build(
    model: Path,
    out: Path,
    feeds: Path | None,
    name: str,
    options: tuple[str, ...],
    variant: str,
    dims: tuple[str, ...],
    as_json: bool,
) -> None:
    """Build MODEL (.onnx) as it stands, precision and all, and put the engine into the folder OUT."""
    from enginesmith.flows.workbench import option_values, put, ranges, workbench
    from enginesmith.tasks.backends import find_backend
    from enginesmith.tasks.build import BUILD

    with workbench(model, feeds, dims=ranges(dims), near=out) as bench:
        artifact = BUILD(
            store=bench.store,
            model=bench.model,
            variant=variant,
            inputs=bench.inputs,
            backend=name,
            options=option_values(options),
            fingerprint=dict(find_backend(name).fingerprint()),
        )
        _report(artifact, put(artifact, out), as_json)


@_model_command("measure")
@click.option(
    "--reference", "baseline", type=click.Path(path_type=Path), help="FP32 model to compare with; else MODEL."
)
def measure(model: Path, feeds: Path, metric: str, baseline: Path | None, dims: tuple[str, ...], as_json: bool) -> None:
    """Compute the metric of MODEL (.onnx; FP16 tensors are emulated) on the feeds, and its drop against FP32."""
    from enginesmith.flows.workbench import ranges, workbench
    from enginesmith.tasks.measure import MEASURE

    with workbench(baseline or model, feeds, metric=metric, dims=ranges(dims)) as bench:
        candidate = bench.adopt(model) if baseline else bench.model
        artifact = MEASURE(store=bench.store, model=candidate, engine=None, backend=None, **bench.judged)
        _report(artifact, feeds, as_json)


def _one_stage(stage: StageName, pipeline: Path, out: Path, checkpoint: Path | None, as_json: bool) -> None:
    from enginesmith.flows.order import compile_plain
    from enginesmith.flows.workbench import put

    artifact = compile_plain(pipeline, checkpoint=checkpoint, until=stage).artifacts[stage]
    _report(artifact, put(artifact, out), as_json)


def _report(artifact: Artifact, out: Path, as_json: bool) -> None:
    """A single stage's report."""
    if as_json:
        click.echo(json.dumps({"path": str(out), "seconds": artifact.seconds, "report": artifact.report}))
        return
    from enginesmith.flows.show import report_lines

    for line in report_lines(artifact.report):
        click.echo(line)
    click.echo(f"{artifact.stage}: {out} ({artifact.seconds:.1f} s)")


def as_data(compiled: Compiled) -> dict[str, Any]:
    """A compile as JSON data: `stages` by label, `variants` as rows, `mlflow` where it is recorded."""
    from dataclasses import asdict

    return {
        "stages": {
            label: {"key": a.key, "path": str(a.path), "cached": a.cached, "seconds": a.seconds, "report": a.report}
            for label, a in compiled.artifacts.items()
        },
        "variants": [row.model_dump(mode="json") for row in compiled.rows],
        "failures": {label: str(error) for label, error in compiled.failures.items()},
        "mlflow": asdict(compiled.recorded) if compiled.recorded else None,
        "seconds": round(compiled.seconds, 3),
    }


def _print_json(compiled: Compiled) -> None:
    click.echo(json.dumps(as_data(compiled), allow_nan=False))


def _print(compiled: Compiled) -> None:
    """The table, what ran and what did not, and where MLflow keeps it."""
    ran = [label for label, artifact in compiled.artifacts.items() if not artifact.cached]
    if compiled.rows:
        from rich.console import Console

        from enginesmith.tasks.table import choose_champions, table

        Console(width=None if sys.stdout.isatty() else 120).print(table(compiled.rows, metric=compiled.metric))
        for verdict in choose_champions(compiled.rows)[1]:
            click.echo(f"{verdict.target}: {verdict.reason}")
    else:
        for label, artifact in compiled.artifacts.items():
            click.echo(f"{label}: {artifact.path}")
    if "export" in compiled.artifacts:
        from enginesmith.flows.show import waived_lines

        for line in waived_lines(compiled.artifacts["export"].report):
            click.echo(line)
    count = len(compiled.artifacts)
    click.echo(
        f"no stage had to run: all {count} artifacts were in the store ({compiled.seconds:.1f} s)"
        if not ran
        else f"{len(ran)} of {count} stages ran, the others were in the store ({compiled.seconds:.1f} s)"
    )
    if compiled.recorded:
        click.echo(f"MLflow: {compiled.recorded.url}")
        if compiled.recorded.command:
            click.echo(f"open it with: {compiled.recorded.command}")


def main() -> None:
    """Entry point: one-screen errors, exit code 1 for errors, 130 for Ctrl-C, 143 for SIGTERM."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    received = _listen()
    try:
        code = cli(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        _say("stopped", hint="run the same command again; finished stages are kept")
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if not received:
            _explain(error)
            sys.exit(1)
        _say("stopped", hint="run the same command again; finished stages are kept")
    sys.exit(128 + (received[-1] if received else signal.SIGINT))


def _listen() -> list[int]:
    """On Ctrl-C and SIGTERM, ask running stages to stop; a second one stops at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        from enginesmith.tasks import progress

        if received:
            os._exit(128 + number)
        received.append(number)
        progress.interrupt()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return received


def _explain(error: BaseException) -> None:
    """An error on at most one screen; with ENGINESMITH_DEBUG=1 the traceback too."""
    if os.environ.get("ENGINESMITH_DEBUG"):
        traceback.print_exception(error)
    if hasattr(error, "found"):
        stage = getattr(error, "stage", "")
        parts = (getattr(error, "where", ""), getattr(error, "key", ""), f"stage {stage}" if stage else "")
        place = ", ".join(part for part in parts if part)
        _say(error.found, where=place, hint=getattr(error, "hint", ""), details=getattr(error, "details", ()))
        return
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    _say(
        f"unexpected {type(error).__name__}: {error}",
        where=where,
        hint="this is a defect of enginesmith: please report it with ENGINESMITH_DEBUG=1 and the output",
    )


def _say(found: str, *, where: str = "", hint: str = "", details: tuple[str, ...] = (), rows: int = 24) -> None:
    lines = found.splitlines() or [""]
    click.secho(f"error: {lines[0]}", fg="red", err=True)
    shown = [*lines[1:], *(line for detail in details for line in detail.splitlines())]
    for line in shown[: rows - 4]:
        click.echo(f"  {line[:200]}", err=True)
    if len(shown) > rows - 4:
        click.echo(f"  ... and {len(shown) - rows + 4} more lines", err=True)
    if where:
        click.echo(f"  at {where}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)
