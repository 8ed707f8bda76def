"""Waivers: what they cover is shown with its reason and neither fails nor blocks; the rest is as before."""

from __future__ import annotations

import datetime

import pytest
from torch import nn

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export import _published, accepted
from enginesmith.tasks.export.judge import judge_module
from enginesmith.tasks.firewalls.findings import (
    BlockedError,
    Finding,
    blocking,
    failing,
    load_findings,
    refused_backends,
)
from enginesmith.tasks.firewalls.waivers import active, check_rules, check_waivers, waive
from enginesmith.tasks.settings import DimSettings, ExportSettings, InputSettings, WaiverSettings, load_pipeline

from .test_pages import dataset

TODAY = datetime.date(2026, 3, 1)
WRONG = Finding(
    rule="shape/value",
    severity="error",
    message="differs by 0.5",
    file="net/model.py",
    line=12,
    module="head.fc",
    node="Mul",
)
REFUSED = Finding(rule="operators/refused", severity="error", message="no", backend="tensorrt_rtx", node="Unique_1")


def waiver(**given):
    return WaiverSettings.model_validate({"rule": "shape/value", "reason": "known", **given})


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"rule": "shape/*"},
        {"file": "net/model.py"},
        {"file": "net/*.py"},
        {"file": "net/model.py:12"},
        {"module": "head.*"},
        {"node": "M?l"},
        {"file": "net/model.py:12", "module": "head.fc", "node": "Mul"},
    ],
    ids=str,
)
def test_covered_finding_carries_the_reason_and_counts_no_more(place):
    (found,) = waive([WRONG], [waiver(**place)])
    assert found == WRONG.model_copy(update={"waived": "known"})
    assert not blocking([found])
    assert not failing([found], "advice")


@pytest.mark.parametrize(
    "place",
    [
        {"rule": "shape/dtype"},
        {"rule": "shape"},
        {"file": "model.py"},
        {"file": "net/model.py:13"},
        {"module": "head"},
        {"node": "mul"},
        {"backend": "tensorrt"},
        {"file": "net/model.py", "node": "Add"},
    ],
    ids=str,
)
def test_another_place_is_not_covered(place):
    assert waive([WRONG], [waiver(**place)]) == [WRONG]


def test_node_name_with_brackets_is_also_a_plain_name():
    odd = WRONG.model_copy(update={"node": "a[0]"})
    assert waive([odd], [waiver(node="a[0]")])[0].waived


def test_waived_refusal_lets_the_backend_build():
    assert set(refused_backends([REFUSED])) == {"tensorrt_rtx"}
    assert refused_backends(waive([REFUSED], [waiver(rule="operators/*", backend="tensorrt_rtx")])) == {}


def test_last_day_still_counts_and_the_day_after_does_not():
    until = waiver(until="2026-03-01")
    assert active([until], TODAY) == (until,)
    assert active([until], TODAY + datetime.timedelta(days=1)) == ()


def test_unused_and_expired_waivers_are_findings_at_their_line():
    waivers = [waiver(), waiver(file="other.py"), waiver(until="2026-02-28")]
    lines = {f"lint.waivers.{i}": 10 + i for i in range(3)}
    found = check_waivers(waivers, [WRONG], TODAY, lambda key: ("pipeline.yaml", lines[key]))
    assert [(f.rule, f.severity, f.line) for f in found] == [
        ("waivers/unused", "warning", 11),
        ("waivers/expired", "warning", 12),
    ]
    assert "other.py" in found[0].message
    assert "2026-02-28" in found[1].message


def test_what_waivers_report_cannot_be_waived():
    unused = Finding(rule="waivers/unused", severity="warning", message="covers nothing")
    assert waive([unused], [waiver(rule="*")]) == [unused]


def test_rule_that_no_rule_matches_is_an_error_at_its_key():
    with pytest.raises(EnginesmithError, match="no rule matches 'shape/valeu'") as error:
        check_rules([waiver(), waiver(rule="shape/valeu")])
    assert error.value.key == "lint.waivers.1.rule"
    assert "shape/value" in error.value.hint


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ("{rule: shape/value}", "reason"),
        ("{rule: shape/value, reason: ' '}", "reason"),
        ("{rule: shape/value, reason: x, until: soon}", "until"),
        ("{rule: shape/value, reason: x, line: 3}", "line"),
        ("{reason: x}", "rule"),
    ],
)
def test_incomplete_waiver_is_an_error_with_its_line(entry, word, tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"model: {{checkpoint: a.onnx}}\ninputs: {{x: {{shape: [1]}}}}\nlint:\n  waivers:\n    - {entry}\n")
    with pytest.raises(EnginesmithError, match=word) as error:
        load_pipeline(file)
    assert error.value.where == f"{file}:5"


class Times(nn.Module):
    def forward(self, x):
        return x * len(x)


INPUTS = {"x": InputSettings(shape=("batch", 4), dims={"batch": DimSettings(min=1, opt=2, max=5)})}


def test_waived_difference_is_published_with_its_reason(tmp_path):
    judged = judge_module(Times().eval(), dataset(INPUTS), INPUTS, ExportSettings(), (), tmp_path)
    with pytest.raises(BlockedError):
        _published(judged, tmp_path, ())
    report = _published(judged, tmp_path, [waiver(rule="shape/*", reason="served at batch 2 only")])
    assert {f.waived for f in report.findings if f.severity == "error"} == {"served at batch 2 only"}
    assert load_findings(tmp_path) == report.findings
    assert report.compared


def test_error_that_kept_the_graph_from_being_compared_cannot_be_waived():
    (found,) = accepted([WRONG], [waiver()], compared=False)
    assert blocking([found])
    assert "cannot lift it" in found.hint
