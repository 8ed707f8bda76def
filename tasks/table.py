"""Turns what was built and measured into rows, one per variant and target, and picks each target's champion."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field, field_serializer

from enginesmith.tasks.settings import VARIANTS, VariantName

if TYPE_CHECKING:
    from rich.table import Table

    from enginesmith.tasks.latency import Latency, LatencySession
    from enginesmith.tasks.measure import Result
    from enginesmith.tasks.store import Artifact

Evidence = Literal["engine", "emulated", "none"]

_ABSENT = "-"
ROUNDING = 1e-9  # of the metric itself: 1 - 0.95 is more than 0.05 in float64
_MADE_BY: Mapping[VariantName, tuple[str, str]] = {
    "fp32": ("simplify", ""),
    "fp16": ("fallback", "fp16"),
    "mixed": ("fallback", "mixed"),
    "int8": ("calibrate", "int8"),
    "int8-mixed": ("revert", "int8-mixed"),
}


class VariantRow(BaseModel):
    """One variant on one target: what it costs and what it gains.

    Attributes:
        target: name of the target in pipeline.yaml.
        backend: what builds for that target.
        variant: name of the variant.
        size_bytes: bytes of the engine, of the ONNX file where no engine was built; None when there is neither.
        metric: the user's metric on the verdict half, NaN when the model's outputs were not finite.
        drop: how much worse than FP32 that is: absolute, in the metric's unit, positive when worse; infinite when the
            metric is NaN, None when nothing was measured.
        drop_stderr: paired standard error of the drop over the samples; None when the metric has no per-sample scores.
        fp32_nodes, fp16_nodes, int8_nodes: nodes that compute in each precision.
        latency_p50_ms, latency_p99_ms: milliseconds per call at `batch` samples; None when not measured.
        throughput: samples per second; None when not measured.
        batch: samples per call of the three above.
        build_s: seconds that the build took, whenever it ran.
        evidence: what ran to give the metric: the built engine, the emulated graph, or nothing.
        within_budget: whether the drop is within budget.max_drop; None when nothing was measured.
        champion: whether this is the target's champion.
        notes: what a reader has to know about the row.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=True)

    target: str
    backend: str
    variant: VariantName
    size_bytes: int | None = None
    metric: float | None = None
    drop: float | None = None
    drop_stderr: float | None = None
    fp32_nodes: int = 0
    fp16_nodes: int = 0
    int8_nodes: int = 0
    latency_p50_ms: float | None = None
    latency_p99_ms: float | None = None
    throughput: float | None = None
    batch: int | None = None
    build_s: float | None = None
    evidence: Evidence = "none"
    within_budget: bool | None = None
    champion: bool = False
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def within_noise(self) -> bool | None:
        """Whether the drop is less than two standard errors from zero; None when the standard error is unknown."""
        drop, error = _finite(self.drop), _finite(self.drop_stderr)
        return None if drop is None or error is None else abs(drop) <= 2 * error

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fp32_share(self) -> float | None:
        """Share of the nodes that compute in FP32, 0 to 1; None when nodes were not counted."""
        return self._share(self.fp32_nodes)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fp16_share(self) -> float | None:
        """Share of the nodes that compute in FP16, 0 to 1; None when nodes were not counted."""
        return self._share(self.fp16_nodes)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def int8_share(self) -> float | None:
        """Share of the nodes that compute in INT8, 0 to 1; None when nodes were not counted."""
        return self._share(self.int8_nodes)

    @property
    def name(self) -> str:
        """``target/variant``: unique within one compile."""
        return f"{self.target}/{self.variant}"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """One of champion, within, over, failed (the metric is NaN), unmeasured."""
        if self.champion:
            return "champion"
        if self.metric is None and self.drop is None:
            return "unmeasured"
        if _finite(self.metric) is None or _finite(self.drop) is None:
            return "failed"
        return "within" if self.within_budget else "over"

    @field_serializer(
        "metric", "drop", "drop_stderr", "latency_p50_ms", "latency_p99_ms", "throughput", when_used="json"
    )
    def _null(self, value: float | None) -> float | None:
        """JSON has no NaN and no infinity."""
        return _finite(value)

    def _share(self, nodes: int) -> float | None:
        total = self.fp32_nodes + self.fp16_nodes + self.int8_nodes
        return nodes / total if total else None


class Verdict(BaseModel):
    """Which variant a target should run, and why that one or none."""

    model_config = ConfigDict(frozen=True)

    target: str
    champion: VariantName | None
    reason: str


def assemble_rows(
    artifacts: Mapping[str, Artifact],
    *,
    targets: Mapping[str, str],
    variants: Sequence[VariantName],
    max_drop: float,
    sessions: Mapping[str, LatencySession] | None = None,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> tuple[VariantRow, ...]:
    """One row per target and variant that was measured, champions marked.

    Args:
        artifacts: what the compile made, by label: stage names, ``build/TARGET/VARIANT``, ``measure/TARGET/VARIANT``.
        targets: backend by target, in the order of the rows.
        variants: in the order of the rows.
        max_drop: the budget, in the metric's unit.
        sessions: by target, the session in which its engines were timed; its largest batch is shown.
        notes: what else a reader has to know, by ``TARGET/VARIANT``.
    """
    rows = []
    for target, backend in targets.items():
        for variant in variants:
            name = f"{target}/{variant}"
            if f"measure/{name}" not in artifacts:
                continue
            row = _row(artifacts, target, backend, variant, max_drop, (sessions or {}).get(target))
            rows.append(row.model_copy(update={"notes": (*row.notes, *(notes or {}).get(name, ()))}))
    return choose_champions(rows)[0]


def within_budget(drop: float | None, max_drop: float) -> bool | None:
    """Whether a drop is within budget: never for NaN or infinity, None when it was not measured."""
    return None if drop is None else math.isfinite(drop) and drop <= max_drop + ROUNDING


def choose_champions(rows: Iterable[VariantRow]) -> tuple[tuple[VariantRow, ...], tuple[Verdict, ...]]:
    """Mark each target's champion: its fastest variant that ran as an engine, was timed, and is within budget.

    Speed is the median latency per sample. Latencies that agree to three significant digits tie; the smaller file
    wins, then the variant that changes less (the order of `VARIANTS`).

    Returns:
        The rows, same order, and one verdict per target in order of appearance.
    """
    rows = tuple(rows)
    verdicts = tuple(_judge(target, [r for r in rows if r.target == target]) for target in _targets(rows))
    champions = {(v.target, v.champion) for v in verdicts}
    marked = tuple(r.model_copy(update={"champion": (r.target, r.variant) in champions}) for r in rows)
    return marked, verdicts


def json_rows(rows: Iterable[VariantRow]) -> list[dict[str, Any]]:
    """The rows as JSON data; NaN and infinity, which JSON does not have, become null."""
    return [row.model_dump(mode="json") for row in rows]


def table(rows: Sequence[VariantRow], *, metric: str = "metric") -> Table:
    """The rows for a terminal of 100 columns or more; their notes are listed below the table.

    Args:
        rows: what to show, already in order.
        metric: heading of the metric's column; cut to ten characters.
    """
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, caption_justify="left", caption_style="")
    for heading in _headings(metric):
        text = heading in ("target", "variant", "evidence", "verdict")
        folds = heading in ("target", "verdict")  # where a narrow terminal wraps: numbers stay whole
        result.add_column(
            heading,
            justify="left" if text else "right",
            no_wrap=not folds,
            min_width=8 if heading == "verdict" else None,
            overflow="fold",
        )
    notes = _numbered(rows)
    for row, previous in zip(rows, [None, *rows[:-1]], strict=True):
        first = previous is None or previous.target != row.target
        if first and previous is not None:
            result.add_section()
        cells = _cells(row, [notes[n] for n in row.notes])
        style = {"champion": "bold green", "over": "yellow", "failed": "red"}.get(row.verdict, "")
        result.add_row(cells[0] if first else "", *cells[1:], style=style)
    result.caption = "\n".join(f"[{i}] {note}".replace("[", "\\[") for note, i in notes.items()) or None
    return result


def as_text(rows: Sequence[VariantRow], *, metric: str = "metric", width: int = 120) -> str:
    """The table as plain text, without colours, of at most `width` columns."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False, legacy_windows=False).print(
        table(rows, metric=metric)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def as_markdown(rows: Sequence[VariantRow], *, metric: str = "metric") -> str:
    """The table as GitHub-flavoured Markdown, its notes listed below."""
    notes = _numbered(rows)
    headings = _headings(metric)
    lines = ["| " + " | ".join(map(_escaped, headings)) + " |", "|" + "---|" * len(headings)]
    for row in rows:
        cells = [_escaped(cell) for cell in _cells(row, [notes[n] for n in row.notes])]
        if row.champion:
            cells = [f"**{cell}**" for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    if notes:
        lines += ["", *(f"{i}. {_escaped(note)}" for note, i in notes.items())]
    return "\n".join(lines) + "\n"


def _row(
    artifacts: Mapping[str, Artifact],
    target: str,
    backend: str,
    variant: VariantName,
    max_drop: float,
    session: LatencySession | None,
) -> VariantRow:
    from enginesmith.tasks.backends import engine_manifest, node_precisions, refused
    from enginesmith.tasks.measure import load_result

    built = artifacts.get(f"build/{target}/{variant}")
    result = load_result(artifacts[f"measure/{target}/{variant}"])
    why_not = refused(built) if built is not None else ""
    if built is not None and not why_not:
        manifest = engine_manifest(built)
        size, nodes = manifest.size, dict(manifest.requested)
    else:
        model = _model(artifacts, variant)
        size, nodes = model.size, node_precisions(model)
    drop = math.inf if result.failed else result.drop
    timed = session.of(variant) if session else None
    same = variant != "fp32" and not nodes.get("fp16") and not nodes.get("int8")
    return VariantRow(
        target=target,
        backend=backend,
        variant=variant,
        size_bytes=size,
        metric=math.nan if result.failed else result.value,
        drop=drop,
        drop_stderr=result.stderr,
        fp32_nodes=nodes.get("fp32", 0),
        fp16_nodes=nodes.get("fp16", 0),
        int8_nodes=nodes.get("int8", 0),
        latency_p50_ms=timed.p50_ms if timed else None,
        latency_p99_ms=timed.p99_ms if timed else None,
        throughput=timed.throughput if timed else None,
        batch=timed.batch if timed else None,
        build_s=None if built is None else built.seconds,
        evidence=result.evidence,
        within_budget=within_budget(drop, max_drop),
        notes=(
            *(["every node is FP32: the same as fp32"] if same else []),
            *_notes(backend, variant, result, why_not, built is not None),
            *(_timing_notes(session, timed) if session and timed else ()),
        ),
    )


def _notes(backend: str, variant: VariantName, result: Result, why_not: str, built: bool) -> Iterator[str]:
    from enginesmith.tasks.backends import find_backend
    from enginesmith.tasks.hardware import this_host

    if result.failed:
        yield "failed: the metric or an output is NaN"
    if result.reason:
        yield result.reason
    if why_not:
        yield f"refused: {why_not}"
    elif not built:
        builds = find_backend(backend).builds()
        if variant not in builds:
            yield f"not built: {backend} keeps the precision of {', '.join(sorted(builds))} only"
    elif result.evidence != "engine":
        gpus = this_host().gpus
        where = f"this host's {', '.join(gpus)}" if gpus else "this host, which has no GPU"
        yield f"built, not run: {backend} cannot run on {where}"


def _timing_notes(session: LatencySession, timed: Latency) -> Iterator[str]:
    """Of a session's notes, those that are about this row."""
    from enginesmith.tasks.hardware import int8_note, this_host

    int8 = int8_note(this_host())
    for note in session.notes:
        if "int8" in timed.variant if note == int8 else timed.jitter:
            yield note


def _model(artifacts: Mapping[str, Artifact], variant: VariantName) -> Artifact:
    """The ONNX artifact of a variant."""
    stage, folder = _MADE_BY[variant]
    return artifacts[stage].part(folder) if folder else artifacts[stage]


def _judge(target: str, rows: Sequence[VariantRow]) -> Verdict:
    timed = [r for r in rows if r.evidence == "engine" and _positive(r.latency_p50_ms) and not _is_fp32_again(r)]
    fit = [r for r in timed if r.within_budget is True and _finite(r.drop) is not None]
    if fit:
        best = min(fit, key=lambda r: (_speed(r), r.size_bytes or math.inf, VARIANTS.index(r.variant)))
        others = len(fit) - 1
        beaten = f"fastest of {len(fit)} within budget" if others else "the only one timed within budget"
        reason = f"{beaten}: {_number(best.latency_p50_ms)} ms at batch {best.batch or 1}, drop {_drop(best)}"
        return Verdict(target=target, champion=best.variant, reason=reason)
    return Verdict(target=target, champion=None, reason=_why_none(rows, timed))


def _is_fp32_again(row: VariantRow) -> bool:
    """Whether the row is the FP32 graph under another name: nothing in it could be FP16 or INT8."""
    return row.variant != "fp32" and row.fp32_nodes > 0 and not row.fp16_nodes and not row.int8_nodes


def _why_none(rows: Sequence[VariantRow], timed: Sequence[VariantRow]) -> str:
    if timed:
        best = min(timed, key=lambda r: r.drop if _finite(r.drop) is not None and r.drop is not None else math.inf)
        return f"no timed variant is within budget; closest is {best.variant} with drop {_drop(best)}"
    reasons = sorted({note for r in rows for note in r.notes})
    candidates = [r.variant for r in rows if r.within_budget is True]
    text = "no variant ran as an engine with a measured latency"
    if reasons:
        text += f" ({'; '.join(reasons)})"
    return text + (f"; candidates by accuracy: {', '.join(candidates)}" if candidates else "")


def _headings(metric: str) -> list[str]:
    short = metric if len(metric) <= 10 else metric[:9] + "…"
    return [
        "target", "variant", "MB", short, "drop", "32/16/8 %", "p50 ms", "p99 ms", "per s", "evidence", "verdict",
    ]  # fmt: skip


def _cells(row: VariantRow, notes: Sequence[int]) -> list[str]:
    marks = "".join(f"[{i}]" for i in notes)
    shares = (row.fp32_share, row.fp16_share, row.int8_share)
    return [
        row.target,
        row.variant,
        _number(None if row.size_bytes is None else row.size_bytes / 1e6),
        _metric(row.metric),
        _drop(row),
        _ABSENT if None in shares else _percentages([s or 0.0 for s in shares]),
        _number(row.latency_p50_ms),
        _number(row.latency_p99_ms),
        _number(row.throughput),
        row.evidence if row.evidence != "none" else _ABSENT,
        f"{row.verdict if row.verdict != 'unmeasured' else _ABSENT} {marks}".rstrip(),
    ]


def _percentages(shares: Sequence[float]) -> str:
    """Whole per cent of each share; a share that is there at all never reads 0, one that is not all never 100."""
    whole = [min(99, max(1, round(100 * s))) if 0 < s < 1 else round(100 * s) for s in shares]
    return "/".join(map(str, whole))


def _numbered(rows: Iterable[VariantRow]) -> dict[str, int]:
    """Each different note and its number, in order of appearance."""
    notes: dict[str, int] = {}
    for row in rows:
        for note in row.notes:
            notes.setdefault(note, len(notes) + 1)
    return notes


def _metric(value: float | None) -> str:
    number = _finite(value)
    return _ABSENT if number is None else f"{number:.4f}" if abs(number) < 1000 else f"{number:.5g}"


def _drop(row: VariantRow) -> str:
    drop, error = _finite(row.drop), _finite(row.drop_stderr)
    if drop is None:
        return _ABSENT
    text = f"{drop:+.4f}" if abs(drop) < 1000 else f"{drop:+.4g}"
    return text if error is None or (row.variant == "fp32" and not error) else f"{text} ±{error:.4f}"


def _number(value: float | None) -> str:
    """Three significant digits, never in exponent form."""
    number = _finite(value)
    if number is None:
        return _ABSENT
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:.{digits}f}"


def _speed(row: VariantRow) -> float:
    """Median milliseconds per sample, to three significant digits."""
    assert row.latency_p50_ms is not None  # noqa: S101 - only timed rows come here
    return float(f"{row.latency_p50_ms / (row.batch or 1):.3g}")


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _targets(rows: Iterable[VariantRow]) -> list[str]:
    return list(dict.fromkeys(row.target for row in rows))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
