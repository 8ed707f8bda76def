"""A checkpoint turns into engines, as a Prefect flow with one task per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from enginesmith.flows.order import Call, Compiled, Failed, StageName, compiling, finish, run_stages, said
from enginesmith.tasks import progress
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Store


@flow(
    name="compile-checkpoint",
    flow_run_name="compile-{pipeline}",
    task_runner=ThreadPoolTaskRunner(max_workers=1),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
)
def compile_checkpoint(
    pipeline: Path, checkpoint: Path | None = None, until: StageName = "record", remeasure: bool = False
) -> Compiled:
    """Compile one checkpoint to all variants on all targets and record them in MLflow.

    Args:
        pipeline: the pipeline.yaml.
        checkpoint: a checkpoint instead of the one that the file names.
        until: the last stage to run.
        remeasure: time the engines again although an earlier session did.
    """
    with compiling(pipeline, checkpoint=checkpoint, until=until) as plan:
        compiled = run_stages(plan, _submit_to(plan.store))
        settle(compiled)
        finish(plan, compiled, _call_task, remeasure=remeasure, tags=_tags())
        return compiled


def settle(compiled: Compiled) -> None:
    """Wait for every submitted stage and put its artifact in place of its future.

    The first failure is raised, except those of builds: they stand in for their artifacts, and the others go on.
    """
    failed: dict[str, Failed] = {}
    for label, future in compiled.stages.items():
        stage, _, place = label.partition("/")
        try:
            compiled.stages[label] = future.result()
        except Exception as error:
            if stage == "build" and isinstance(error, EnginesmithError) and not isinstance(error, Interrupted):
                failed[place] = Failed(error)
                progress.note(f"{label} failed: {error.found}")
            elif not (stage == "measure" and place in failed):
                raise
            compiled.stages[label] = failed[place]
        else:
            progress.note(said(label, compiled.stages[label]))


def _submit_to(store: Store) -> Call:
    def submit(label: str, stage: Stage, **inputs: Any) -> Any:
        return stage.task.with_options(task_run_name=label).submit(store=store, **inputs)

    return submit


def _tags() -> dict[str, str]:
    run = runtime.flow_run
    return {
        "trigger": "deployment" if runtime.deployment.id else "command line",
        "prefect.flow_run_id": str(run.id or ""),
        "prefect.flow_run_name": str(run.name or ""),
        "prefect.flow_run_url": str(run.ui_url or ""),
    }


def _call_task(label: str, function: Any, **inputs: Any) -> Any:
    return task(name=label, task_run_name=label, cache_policy=NO_CACHE, persist_result=False)(function)(**inputs)
