"""What the README and docs/ say can be done: their links exist, their settings load, their commands are known."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import yaml

from enginesmith.flows.cli import cli
from enginesmith.tasks.settings import load_pipeline

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*/pipeline.yaml"))
SMALLEST = {"model": {"checkpoint": "net.pt", "factory": "model:build"}, "inputs": {"x": {"shape": [1, 3]}}}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{target} in {name(page)}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_load(page: Path, tmp_path: Path) -> None:
    for index, text in enumerate(blocks(page, "yaml")):
        data = yaml.safe_load(text)
        if not isinstance(data, dict) or "pipelines" in data:
            continue
        file = tmp_path / f"{index}.yaml"
        file.write_text(yaml.safe_dump({**SMALLEST, **data}))
        load_pipeline(file)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_known(page: Path) -> None:
    assert isinstance(cli, click.Group)
    for command, rest in re.findall(r"(?:^    |`|\$ )enginesmith ([a-z]+)([^`\n]*)", page.read_text(), re.MULTILINE):
        assert command in cli.commands, f"{command} in {name(page)}"
        known = {option for p in cli.commands[command].params for option in p.opts} | {"--help"}
        for option in re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", rest):
            assert option in known, f"{option} of {command} in {name(page)}"


@pytest.mark.parametrize("file", EXAMPLES, ids=name)
def test_examples_load(file: Path) -> None:
    assert load_pipeline(file).settings.model.factory
