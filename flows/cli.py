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
    from enginesmith.flows.order import Compiled

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_CLI_COLORS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

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
    if plain:
        from enginesmith.flows.order import compile_plain as run
    else:
        from enginesmith.flows.compile import compile_here as run
    compiled = run(pipeline, checkpoint=checkpoint, until=until, remeasure=remeasure)
    if as_json:
        click.echo(json.dumps(as_data(compiled), allow_nan=False))
    else:
        _print(compiled)


def as_data(compiled: Compiled) -> dict[str, Any]:
    """A compile as JSON data: `stages` by label, `variants` as rows, `mlflow` where it is recorded."""
    from dataclasses import asdict

    return {
        "stages": {
            label: {"key": a.key, "path": str(a.path), "cached": a.cached, "seconds": a.seconds, "report": a.report}
            for label, a in compiled.artifacts.items()
        },
        "variants": [row.model_dump(mode="json") for row in compiled.rows],
        "mlflow": asdict(compiled.recorded) if compiled.recorded else None,
        "seconds": round(compiled.seconds, 3),
    }


def _print(compiled: Compiled) -> None:
    raise NotImplementedError(compiled)


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
        place = ", ".join(part for part in (getattr(error, "where", ""), getattr(error, "key", "")) if part)
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
