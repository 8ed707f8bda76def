"""What lint says: text with the line underlined, JSON, and SARIF with what GitHub code scanning asks for."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from enginesmith.tasks.firewalls import sarif
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.report import Experiment, Linted, Problem, as_json, exit_code
from enginesmith.tasks.firewalls.rules import catalogue
from enginesmith.tasks.firewalls.sarif import as_sarif, repository_root
from enginesmith.tasks.firewalls.text import print_linted

CODE = "import torch\n\n\ndef forward(x):\n    return x * len(x)\n"
AT_LINE = Finding(
    rule="shape/size-as-number",
    severity="error",
    message="len() depends on a dynamic size: len(x)",
    effect="the value is wrong at another batch",
    measured=0.5,
    file="net/model.py",
    line=5,
    hint="use x.shape[0]",
)
AT_NODE = Finding(
    rule="operators/refused", severity="error", message="no Unique", node="/Unique", backend="tensorrt_rtx"
)
WAIVED = Finding(rule="shape/input-unused", severity="warning", message="nothing reads 'y'", waived="kept for the API")
ADVICE = Finding(rule="operators/not-judged", severity="advice", message="not installed", backend="tensorrt")


@pytest.fixture
def linted(tmp_path):
    """A repository with a pipeline in a folder, and four findings on it."""
    folder = tmp_path / "repo" / "a project"
    (folder / "net").mkdir(parents=True)
    (tmp_path / "repo" / ".git").mkdir()
    (folder / "net" / "model.py").write_text(CODE)
    return Linted(
        target="pipeline.yaml",
        kind="pipeline",
        file=folder / "pipeline.yaml",
        folder=folder,
        findings=(AT_LINE, AT_NODE, WAIVED, ADVICE),
        experiment=Experiment(feeds=("opt", "min", "max"), seconds=0.25),
        seconds=2.0,
    )


def text_of(linted, **options):
    page = io.StringIO()
    print_linted([linted], Console(file=page, width=100, highlight=False, **options))
    return page.getvalue()


def log_of(*linted, root):
    return json.loads(as_sarif(linted, root))


def results(linted):
    return log_of(linted, root=repository_root(linted.folder))["runs"][0]["results"]


def test_text_underlines_the_code_of_the_line(linted):
    lines = text_of(linted).splitlines()
    at = lines.index("5 |     return x * len(x)")
    assert lines[at + 1] == "  |     ^^^^^^^^^^^^^^^^^"
    assert lines[at - 3 : at - 1] == [
        "error[shape/size-as-number] len() depends on a dynamic size: len(x)",
        "  --> net/model.py:5",
    ]


def test_text_says_effect_fix_waiver_and_cost(linted):
    said = text_of(linted)
    for words in (
        "= ignored: the value is wrong at another batch",
        "= fix: use x.shape[0]",
        "waived warning[shape/input-unused]",
        "= waived: kept for the API",
        "2 errors, 1 advice, 1 waived (2.0 s; experiment: 3 feeds, 0.2 s)",
    ):
        assert words in said


def test_colour_is_for_terminals_and_not_where_no_color_is_set(linted, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" not in text_of(linted)
    assert "\x1b[1;31m" in text_of(linted, force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in text_of(linted, force_terminal=True)


def test_line_beyond_the_file_is_left_out(linted):
    moved = linted.model_copy(update={"findings": (AT_LINE.model_copy(update={"line": 99}),)})
    assert "net/model.py:99" in text_of(moved)


def test_json_holds_every_field_and_an_identity(linted):
    data = json.loads(as_json([linted]))
    assert (data["version"], data["exit_code"]) == (1, 1)
    (target,) = data["targets"]
    assert [Finding.model_validate(f) for f in target["findings"]] == list(linted.findings)
    assert target["identities"] == [f.identity for f in linted.findings]
    assert target["experiment"] == {"feeds": ["opt", "min", "max"], "seconds": 0.25}
    assert target["failed"]


@pytest.mark.parametrize(("fail_on", "code"), [("error", 0), ("warning", 0), ("advice", 1), ("never", 0)])
def test_exit_code_is_one_at_or_above_fail_on(linted, fail_on, code):
    mild = linted.model_copy(update={"findings": (WAIVED, ADVICE), "fail_on": fail_on})
    assert exit_code([mild]) == code


def test_exit_code_is_two_when_a_target_was_not_judged(linted):
    assert exit_code([linted, linted.model_copy(update={"problem": Problem(message="cut off")})]) == 2


def test_identity_outlives_moved_lines_and_other_figures():
    again = AT_LINE.model_copy(update={"line": 9, "measured": 0.75})
    assert again.identity == AT_LINE.identity
    louder = WAIVED.model_copy(update={"message": "differs by 0.5 in 3 values"})
    assert louder.identity == louder.model_copy(update={"message": "differs by 1.25e-3 in 17 values"}).identity
    assert AT_NODE.identity != AT_NODE.model_copy(update={"node": "/Other"}).identity


def test_measured_infinity_is_no_figure():
    assert Finding(rule="a/b", severity="error", message="infinite", measured=float("inf")).measured is None


def test_sarif_has_what_code_scanning_requires(linted):
    """Required by docs.github.com, "SARIF support for code scanning": the properties below."""
    log = log_of(linted, root=repository_root(linted.folder))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "enginesmith"
    for rule in driver["rules"]:
        page = catalogue()[rule["id"]]
        assert rule["help"]["markdown"] == page.text
        assert rule["help"]["text"]
        assert 0 < len(rule["shortDescription"]["text"]) <= 1024
        assert 0 < len(rule["fullDescription"]["text"]) <= 1024
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
        assert len(rule["properties"]["tags"]) <= 10
        assert rule["properties"]["problem.severity"] in ("error", "warning", "recommendation")
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["region"]["startLine"] >= 1
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        assert ":" not in uri
        assert not uri.startswith("/")
        assert result["partialFingerprints"]["primaryLocationLineHash"]


def test_sarif_places_a_line_relative_to_the_repository(linted):
    (found,) = [r for r in results(linted) if r["ruleId"] == "shape/size-as-number"]
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "a%20project/net/model.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 5, "startColumn": 5, "endColumn": 22}
    assert found["level"] == "error"


def test_sarif_places_a_node_at_the_target_with_its_name(linted):
    (found,) = [r for r in results(linted) if r["ruleId"] == "operators/refused"]
    assert found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20project/pipeline.yaml"
    assert found["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "/Unique", "kind": "object"}]
    assert "[tensorrt_rtx]" in found["message"]["text"]


def test_sarif_levels_and_suppressions(linted):
    by_rule = {r["ruleId"]: r for r in results(linted)}
    assert by_rule["operators/not-judged"]["level"] == "note"
    suppressed = by_rule["shape/input-unused"]["suppressions"]
    assert suppressed == [{"kind": "external", "status": "accepted", "justification": "kept for the API"}]
    assert "suppressions" not in by_rule["operators/not-judged"]


def test_sarif_fingerprint_moves_with_its_line_and_tells_twins_apart(linted):
    def marks(found):
        return [r["partialFingerprints"]["primaryLocationLineHash"] for r in results(found)]

    one = linted.model_copy(update={"findings": (AT_LINE,)})
    before = marks(one)
    (linted.folder / "net" / "model.py").write_text("# a new first line\n" + CODE)
    assert marks(one.model_copy(update={"findings": (AT_LINE.model_copy(update={"line": 6}),)})) == before
    twins = marks(linted.model_copy(update={"findings": (AT_NODE, AT_NODE.model_copy(update={"measured": 1.0}))}))
    assert [mark.rpartition(":")[2] for mark in twins] == ["1", "2"]


def test_sarif_keeps_to_the_limit_of_results_and_says_so(linted, monkeypatch):
    monkeypatch.setattr(sarif, "MAX_RESULTS", 2)
    (run,) = log_of(linted, root=linted.folder)["runs"]
    assert [r["level"] for r in run["results"]] == ["error", "error"]
    assert "2 findings were left off" in run["invocations"][0]["toolExecutionNotifications"][-1]["message"]["text"]


def test_sarif_says_what_could_not_be_judged(linted):
    failed = linted.model_copy(update={"findings": (), "problem": Problem(message="cut off", where="a.onnx")})
    (run,) = log_of(failed, root=linted.folder)["runs"]
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 2)
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "a.onnx: cut off"
