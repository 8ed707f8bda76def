"""`enginesmith lint` and `explain` as a user runs them: targets of all kinds, formats, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from enginesmith.flows.cli import cli
from enginesmith.flows.lint import Wish, wish
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.firewalls.findings import Finding

from .conftest import Project, run_enginesmith

README = Path(__file__).parents[2] / "README.md"
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return x / x.max().item()
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["lint", *arguments])


def test_what_can_be_judged_is_and_the_rest_is_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cut.onnx").write_bytes(b"\x08\x08\x12\x05torch")
    (tmp_path / "pipeline.yaml").write_text("model: {checkpoint: a.pt}\n")
    done = run_enginesmith(
        [
            "lint",
            "model.py:Net",
            "cut.onnx",
            "absent.onnx",
            "pipeline.yaml",
            "--format",
            "sarif",
            "--output",
            "a.sarif",
        ],
        tmp_path,
        code=2,
    )
    lines = done.stderr.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["error"] * 3
    for line, word in zip(lines, ("cut.onnx", "absent.onnx", "inputs"), strict=True):
        assert word in line
    (log,) = json.loads((tmp_path / "a.sarif").read_text())["runs"]
    assert [r["ruleId"] for r in log["results"]] == ["shape/value-as-number"]
    assert not log["invocations"][0]["executionSuccessful"]
    assert done.stdout == ""


def test_warning_fails_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    file = str(tmp_path / "model.py")
    assert run(file).exit_code == 0
    strict = run(file, "--fail-on", "warning", "--json")
    assert strict.exit_code == 1
    assert json.loads(strict.stdout)["targets"][0]["failed"]


def test_waived_error_is_shown_and_does_not_fail(project: Project) -> None:
    project.replace(
        "model.py",
        "    return nn.Sequential(",
        "    class Net(nn.Sequential):\n"
        "        def forward(self, x):\n"
        "            return super().forward(x) * len(x)\n\n"
        "    return Net(",
    )
    waiver = "lint: {waivers: [{rule: 'shape/*', reason: one size}, {rule: 'shape/*', file: gone.py, reason: none}]}\n"
    project.file.write_text(project.file.read_text() + waiver)
    data = json.loads(run_enginesmith(["lint", "pipeline.yaml", "--json"], project.folder).stdout)
    (target,) = data["targets"]
    waived = {f["rule"]: f["waived"] for f in target["findings"] if f["severity"] == "error"}
    assert waived["shape/value"] == "one size"
    assert all(waived.values())
    (unused,) = [f for f in target["findings"] if f["rule"] == "waivers/unused"]
    assert unused["file"] == "pipeline.yaml"
    assert unused["line"] == len(project.file.read_text().splitlines())
    assert target["experiment"]["feeds"]
    assert target["experiment"]["seconds"] > 0
    compiled = run_enginesmith(["compile", "pipeline.yaml", "--plain", "--until", "export"], project.folder)
    assert "waived: shape/value: " in compiled.stdout
    assert "(reason: one size)" in compiled.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rule", "shape/valeu"], ["--rule", "shape/value"]),
        (["--ignore", "nothing/*"], ["--ignore", "nothing/*"]),
        (["--target", "tensort"], ["--target", "tensorrt"]),
        (["--target", "tensorrt:7"], ["--target", "8.6"]),
    ],
)
def test_wrong_wishes_are_said(arguments: list[str], words: list[str]) -> None:
    done = run("model.onnx", *arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words)


UNSUPPORTED = Finding(
    rule="operators/unsupported",
    severity="warning",
    message="no Slice",
    effect="8.6 does not build it",
    backend="tensorrt",
    versions=("8.6",),
)
PLAIN = Finding(rule="shape/value", severity="error", message="differs", effect="wrong values")


def test_effect_comes_from_the_page_where_the_finding_has_none() -> None:
    (found,) = wish().of([PLAIN.model_copy(update={"effect": ""})])
    assert found.effect == "The engine computes something else."


def test_readme_shows_what_lint_says(tmp_path: Path) -> None:
    """Rules, places and underlined lines; the words of messages may change."""
    code, said = re.search(
        r"```python\n# model.py\n(.*?)```.*?```text\n(.*?)```", README.read_text(), re.DOTALL
    ).groups()
    (tmp_path / "model.py").write_text(code)
    done = run_enginesmith(["lint", "model.py"], tmp_path)

    def skeleton(text: str) -> list[str]:
        lines = [re.sub(r"\(.* s\)$", "", line).rstrip() for line in text.splitlines() if not line.startswith("  =")]
        return [line.partition("] ")[0] for line in lines]

    assert skeleton(said) == skeleton(done.stdout)


def test_release_of_a_backend_decides_what_its_findings_mean() -> None:
    assert wish(targets=["tensorrt"]).of([UNSUPPORTED]) == (UNSUPPORTED,)
    assert wish(targets=["tensorrt:10"]).of([UNSUPPORTED]) == ()
    (found,) = wish(targets=["tensorrt:8.6"]).of([UNSUPPORTED])
    assert found.severity == "error"


def test_rules_are_chosen_by_pattern() -> None:
    both = [UNSUPPORTED, PLAIN]
    assert Wish(rules=("shape/*",)).of(both) == (PLAIN,)
    assert Wish(ignored=("shape/*",)).of(both) == (UNSUPPORTED,)
    with pytest.raises(EnginesmithError):
        wish(rules=["shape"])


def test_help_has_the_table_of_exit_codes() -> None:
    text = run("--help").output
    assert all(f"\n    {code}  " in text for code in (0, 1, 2))


def test_explain_shows_the_page_and_the_nearest_names() -> None:
    page = CliRunner().invoke(cli, ["explain", "shape/size-as-number"])
    assert page.exit_code == 0
    assert "x.sum() / len(x)" in page.stdout
    listing = CliRunner().invoke(cli, ["explain", "--list"]).stdout
    assert "shape/value " in listing
    with pytest.raises(EnginesmithError, match="there is no rule 'shape/vlaue'"):
        CliRunner().invoke(cli, ["explain", "shape/vlaue"], catch_exceptions=False)
