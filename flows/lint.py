"""Pipeline files, ONNX files and Python source turn into the firewalls' findings; nothing is published or recorded."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from enginesmith.flows.order import factory_of, make_plan, plain_call, run_stages, watched
from enginesmith.tasks.errors import EnginesmithError, Interrupted
from enginesmith.tasks.firewalls.findings import Finding, in_order
from enginesmith.tasks.firewalls.report import Experiment, FailOn, Linted, Problem
from enginesmith.tasks.firewalls.rules import catalogue
from enginesmith.tasks.firewalls.waivers import active, check_rules, check_waivers, known_pattern, waive

if TYPE_CHECKING:
    from enginesmith.tasks.firewalls.gpus import Gpu
    from enginesmith.tasks.settings import Pipeline
    from enginesmith.tasks.store import Artifact

_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE = re.compile(r"(?P<file>.+\.py)(:(?P<name>[A-Za-z_]\w*))?")


@dataclass(frozen=True)
class Wish:
    """What of the findings is asked for.

    Attributes:
        rules: patterns, of which one must match a finding's rule; all rules when empty.
        ignored: patterns of rules that are left out.
        backends: backend names, each with a release or an empty string; of a pipeline, its own targets when empty.
        fail_on: instead of a pipeline's own setting.
    """

    rules: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    backends: tuple[tuple[str, str], ...] = ()
    fail_on: FailOn | None = None

    def of(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Those that are asked for, worst first, each with what happens if it is ignored."""
        return tuple(in_order(_with_effect(made) for f in findings if (made := self._one(f)) is not None))

    @property
    def names(self) -> tuple[str, ...]:
        """The backends without their releases."""
        return tuple(dict.fromkeys(name for name, _ in self.backends))

    def _one(self, finding: Finding) -> Finding | None:
        rules = [fnmatch.fnmatchcase(finding.rule, pattern) for pattern in self.rules]
        if (rules and not any(rules)) or any(fnmatch.fnmatchcase(finding.rule, p) for p in self.ignored):
            return None
        asked = {version for name, version in self.backends if name == finding.backend}
        if not finding.backend or not finding.versions or not asked or "" in asked:
            return finding
        hit = tuple(v for v in finding.versions if v in asked)
        refuses = finding.rule == "operators/unsupported"
        return finding.model_copy(update={"severity": "error" if refuses else finding.severity}) if hit else None


def _with_effect(finding: Finding) -> Finding:
    """A finding that does not say what happens if it is ignored says what its rule's page says."""
    rule = catalogue().get(finding.rule)
    return finding if finding.effect or rule is None else finding.model_copy(update={"effect": rule.effect})


def wish(
    rules: Sequence[str] = (),
    ignored: Sequence[str] = (),
    targets: Sequence[str] = (),
    fail_on: FailOn | None = None,
) -> Wish:
    """What the command line asks for.

    Raises:
        EnginesmithError: a pattern matches no rule; there is no such backend, or no such release of it in the tables.
    """
    for option, patterns in (("--rule", rules), ("--ignore", ignored)):
        for pattern in patterns:
            known_pattern(pattern, key=option)
    return Wish(tuple(rules), tuple(ignored), tuple(_backend(target) for target in targets), fail_on)


def _backend(text: str) -> tuple[str, str]:
    from enginesmith.tasks.engines import names

    name, _, version = text.partition(":")
    if name not in names():
        raise EnginesmithError(f"there is no backend {name!r}", key="--target", hint=f"there are: {', '.join(names())}")
    if version:
        known = _versions(name)
        if version not in known:
            raise EnginesmithError(
                f"{name} has no release {version!r} that could be judged apart",
                key="--target",
                hint=f"there are: {', '.join(known)}" if known else f"write {name} alone",
            )
    return name, version


def _versions(backend: str) -> tuple[str, ...]:
    if backend != "tensorrt":
        return ()
    from enginesmith.tasks.firewalls.support import VERSIONS

    return VERSIONS


def lint_target(text: str, wish: Wish) -> Linted:
    """Judge one target; what keeps it from being judged is part of the answer and not raised.

    Args:
        text: a pipeline.yaml, an .onnx file, ``file.py``, ``file.py:Class`` or ``module:factory``.
        wish: what of the findings is asked for.

    Raises:
        Interrupted: the user asked to stop.
    """
    started = time.monotonic()
    kind, file = _kind(text)
    blank = Linted(target=text, kind=kind, file=file, folder=file.parent, fail_on=wish.fail_on or "error")
    try:
        if kind == "pipeline":
            linted = _pipeline(blank, wish)
        elif kind == "onnx":
            linted = _onnx(blank, wish)
        else:
            linted = _source(blank, wish)
    except Interrupted:
        raise
    except EnginesmithError as error:
        linted = blank.model_copy(update={"problem": _problem(text, error)})
    except Exception as error:  # whatever it is, lint has no verdict: never a traceback, never exit code 0
        said = str(error).strip().splitlines()[0] if str(error).strip() else ""
        problem = Problem(
            message=f"{text} could not be judged: unexpected {type(error).__name__}: {said}",
            hint="a defect of enginesmith: ENGINESMITH_DEBUG=1 shows where",
        )
        linted = blank.model_copy(update={"problem": problem})
        _debug(error)
    return linted.model_copy(update={"seconds": time.monotonic() - started})


def _debug(error: Exception) -> None:
    import os
    import traceback

    if os.environ.get("ENGINESMITH_DEBUG"):
        traceback.print_exception(error)


def _problem(target: str, error: EnginesmithError) -> Problem:
    details = f": {error.details[0].strip()}" if len(error.details) == 1 else ""
    where = error.where or error.key or target
    return Problem(message=f"{error.found}{details}", where=where, hint=error.hint)


def _kind(text: str) -> tuple[str, Path]:
    """What a target is, and its file: the current folder's for ``module:factory``."""
    if match := _FILE.fullmatch(text):
        return "source", Path(match["file"]).resolve()
    if _MODULE.fullmatch(text) and not Path(text).exists():
        base = Path.cwd().joinpath(*text.partition(":")[0].split("."))
        found = (p for p in (base.with_name(f"{base.name}.py"), base / "__init__.py") if p.is_file())
        return "source", next(found, base.with_name(f"{base.name}.py"))
    return ("onnx" if text.endswith(".onnx") else "pipeline"), Path(text).resolve()


def _pipeline(blank: Linted, wish: Wish) -> Linted:
    """A pipeline's model, its weights and data prepared as in a compile: source, graph and experiment."""
    from enginesmith.tasks.data import load_dataset
    from enginesmith.tasks.export.lint import judge
    from enginesmith.tasks.modules import load_folded

    with watched(blank.file, record=False) as watch:
        pipeline = watch.pipeline
        settings = pipeline.settings.lint
        check_rules(settings.waivers)
        plan = make_plan(pipeline, until="fold")
        artifacts = run_stages(plan, plain_call(plan.store)).artifacts
        verdict = judge(
            plan.source.path if plan.is_onnx else load_folded(factory_of(pipeline), artifacts["fold"]),
            load_dataset(artifacts["data"], "calibration"),
            pipeline.settings.inputs,
            pipeline.settings.export,
            wish.names or sorted({target.backend for target in plan.targets}),
            roots=(pipeline.folder,),
            gpus=_gpus(pipeline),
        )
        compared = [f for which in ("calibration", "search") for f in _preprocessing(pipeline, artifacts, which)]

    def place(key: str) -> tuple[str, int]:
        line = pipeline.where(key).rpartition(":")[2]
        return blank.file.name, int(line) if line.isdigit() else 0

    today = datetime.now(UTC).date()
    findings = waive((*verdict.findings, *compared), active(settings.waivers, today))
    findings += check_waivers(settings.waivers, findings, today, place)
    experiment = Experiment(feeds=verdict.feeds, seconds=round(verdict.seconds, 3)) if verdict.feeds else None
    return blank.model_copy(
        update={
            "findings": wish.of(findings),
            "experiment": experiment,
            "fail_on": wish.fail_on or settings.fail_on,
        }
    )


def _gpus(pipeline: Pipeline) -> list[Gpu]:
    """The GPUs that the targets name, each once."""
    from enginesmith.tasks.firewalls.gpus import find_gpu

    named = {n: t.gpu for n, t in pipeline.settings.targets.items() if t.gpu}
    return list(dict.fromkeys(find_gpu(gpu, f"targets.{name}.gpu") for name, gpu in named.items()))


def _preprocessing(
    pipeline: Pipeline, artifacts: Mapping[str, Artifact], which: Literal["calibration", "search"]
) -> list[Finding]:
    """What one set differs in from the training pipeline's tensors, where a sample of them is given."""
    from enginesmith.tasks.data import load_dataset
    from enginesmith.tasks.firewalls.preprocessing import check_preprocessing, load_reference

    given = pipeline.settings.data.reference
    if not given:
        return []
    reference = load_reference(given, pipeline.folder, pipeline.settings.inputs)
    return list(check_preprocessing(reference, load_dataset(artifacts["data"], which).inputs, which))


def _onnx(blank: Linted, wish: Wish) -> Linted:
    """An ONNX file by itself: ONNX's checker, ONNX Runtime, the graph rules and the vendors' parsers."""
    from enginesmith.tasks.engines import names
    from enginesmith.tasks.export.lint import lint_onnx

    findings = lint_onnx(blank.file, wish.names or names())
    note = "without declared inputs: no experiment, and no rule on the ranges of dynamic dimensions"
    return blank.model_copy(update={"findings": wish.of(findings), "notes": (note,)})


def _source(blank: Linted, wish: Wish) -> Linted:
    """Python source by itself: the source rules on every module that can be built without arguments."""
    from enginesmith.tasks.export.lint import lint_source

    name = blank.target.rpartition(":")[2] if ":" in blank.target and not blank.target.endswith(".py") else ""
    findings, notes = lint_source(blank.target, blank.file, name)
    return blank.model_copy(update={"findings": wish.of(findings), "notes": tuple(notes)})
