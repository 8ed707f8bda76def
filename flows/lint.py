"""A pipeline file turns into the firewalls' findings on its source and its graph; nothing is published or recorded."""

from __future__ import annotations

from pathlib import Path

from enginesmith.flows.order import factory_of, make_plan, plain_call, run_stages, watched
from enginesmith.tasks.firewalls.findings import Finding


def lint_pipeline(path: Path) -> list[Finding]:
    """Findings on the model of a pipeline file, the worst first; weights and data are prepared as in a compile.

    Raises:
        EnginesmithError: the model could not be judged, because its checkpoint, code or data is not as it should be.
    """
    from enginesmith.tasks.data import load_dataset
    from enginesmith.tasks.export.lint import lint
    from enginesmith.tasks.modules import load_folded

    with watched(path, record=False) as watch:
        pipeline = watch.pipeline
        plan = make_plan(pipeline, until="fold")
        artifacts = run_stages(plan, plain_call(plan.store)).artifacts
        subject = plan.source.path if plan.is_onnx else load_folded(factory_of(pipeline), artifacts["fold"])
        return lint(
            subject,
            load_dataset(artifacts["data"], "calibration"),
            pipeline.settings.inputs,
            pipeline.settings.export,
            sorted({target.backend for target in plan.targets}),
            roots=(pipeline.folder,),
        )
