"""Every rule has a page, every page a rule, and the examples of each page do what the page says."""

from __future__ import annotations

import ast
import datetime
import importlib.util
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from enginesmith.tasks.data import Dataset
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.export.foreign import adopt_file
from enginesmith.tasks.export.judge import judge_module
from enginesmith.tasks.firewalls.findings import Finding
from enginesmith.tasks.firewalls.operators import check_operators
from enginesmith.tasks.firewalls.rules import INDEX, catalogue, find_rule, index_table, parse_page
from enginesmith.tasks.firewalls.samples import cases_of, save_cases
from enginesmith.tasks.firewalls.source import check_source
from enginesmith.tasks.firewalls.waivers import check_waivers
from enginesmith.tasks.settings import ExportSettings, InputSettings, LintSettings

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "rules"
PAGES = [page for page in sorted(FOLDER.glob("*.md")) if page.name != INDEX]
RULES = [parse_page(page.read_text(), page.name) for page in PAGES]
X = {
    "shape": ["batch", "time", 4],
    "dims": {"batch": {"min": 1, "opt": 2, "max": 5}, "time": {"min": 2, "opt": 3, "max": 6}},
}


def rules_in_the_code():
    """Every string of a rule's form whose first part is a firewall, and whatever Finding(rule=...) is given."""
    firewalls = {rule.id.partition("/")[0] for rule in RULES}
    found = set()
    for file in [*(ROOT / "tasks").rglob("*.py"), *(ROOT / "flows").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                match = re.fullmatch(r"([a-z][a-z-]*)/[a-z0-9-]+", node.value)
                if match and match[1] in firewalls and file.parent.name in ("firewalls", "export"):
                    found.add(node.value)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                given = [k.value for k in node.keywords if k.arg == "rule"]
                found |= {v.value for v in given if isinstance(v, ast.Constant)}
    return found


def example(markdown, path):
    """The module that an example's one block of code defines."""
    (code,) = re.findall(r"```python\n(.*?)```", markdown, flags=re.DOTALL)
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs_of(module):
    return {n: InputSettings.model_validate(d) for n, d in getattr(module, "INPUTS", {"x": X}).items()}


def dataset(inputs):
    """Eight samples of standard normal values at opt."""
    rng = np.random.default_rng(0)
    shapes = {
        n: tuple(d if isinstance(d, int) else given.dims[d].opt for d in given.shape[1:]) for n, given in inputs.items()
    }
    return Dataset(
        {n: rng.standard_normal((8, *s)).astype(inputs[n].dtype) for n, s in shapes.items()}, None, True, 1, 2, 5
    )


def by_source(module, folder) -> list[Finding]:
    return check_source(module.Net().eval(), inputs_of(module))


def by_export(module, folder) -> list[Finding]:
    inputs = inputs_of(module)
    settings = ExportSettings.model_validate(getattr(module, "EXPORT", {}))
    folder.mkdir()
    judged = judge_module(
        module.Net().eval(), dataset(inputs), inputs, settings, getattr(module, "TARGETS", ()), folder, (folder.parent,)
    )
    return list(judged.findings)


def by_graph(module, folder) -> list[Finding]:
    inputs = inputs_of(module)
    for name in ("in", "out"):
        (folder / name).mkdir(parents=True)
    save_cases(cases_of(dataset(inputs), inputs), folder / "in")
    source = folder / "file.onnx"
    onnx.save(module.model(), source)
    declared = {n: d.model_dump(mode="json") for n, d in inputs.items()}
    adopted = adopt_file(str(source), str(folder / "out"), str(folder / "in"), declared, 1e-4)
    found = [Finding.model_validate(f) for f in adopted["findings"]]
    if (folder / "out" / "model.onnx").exists():
        found += check_operators(folder / "out", getattr(module, "TARGETS", ()))
    return found


def test_settings_examples_are_judged_as_their_pages_say():
    for rule in [r for r in RULES if r.judge == "settings"]:
        found, fine = (by_settings(text) for text in (rule.bad, rule.good))
        assert {f.rule for f in found} == {rule.id}
        assert fine == []


def by_settings(markdown) -> list[Finding]:
    (text,) = re.findall(r"```yaml\n(.*?)```", markdown, flags=re.DOTALL)
    settings = LintSettings.model_validate(yaml.safe_load(text)["lint"])
    return check_waivers(settings.waivers, [], datetime.date(2026, 1, 1), lambda key: ("pipeline.yaml", 3))


_RUN = {"source": by_source, "export": by_export, "graph": by_graph}


def test_rules_and_pages_are_the_same_set():
    assert {rule.id for rule in RULES} == rules_in_the_code()


def test_index_is_up_to_date():
    wanted = index_table(sorted(RULES, key=lambda rule: rule.id))
    command = "python -m enginesmith.tasks.firewalls.rules docs/rules"
    assert wanted in (FOLDER / INDEX).read_text(), f"run: {command}"


def test_catalogue_is_what_the_pages_say():
    assert catalogue() == {rule.id: rule for rule in sorted(RULES, key=lambda rule: rule.id)}
    assert find_rule("shape-value") == find_rule("shape/value")


@pytest.mark.parametrize(("asked", "meant"), [("shape/vlaue", "shape/value"), ("refused", "operators/refused")])
def test_unknown_rule_names_the_nearest(asked, meant):
    with pytest.raises(EnginesmithError, match="there is no rule") as error:
        find_rule(asked)
    assert meant in error.value.hint


@pytest.mark.parametrize(
    ("part", "word"), [("## Good", "## Good"), ("**If ignored.**", "If"), ("Judged by: export.\n", "form")]
)
def test_a_page_without_a_part_is_refused(part, word):
    with pytest.raises(EnginesmithError, match="form of a rule's page"):
        parse_page(find_rule("shape/value").text.replace(part, ""), "shape-value.md")


@pytest.mark.parametrize("rule", [r for r in RULES if r.judge in _RUN], ids=lambda r: r.id)
def test_bad_example_is_found_and_good_one_is_not(rule, tmp_path):
    found = _RUN[rule.judge](example(rule.bad, tmp_path / "bad.py"), tmp_path / "bad")
    assert rule.id in {f.rule for f in found}, [str(f) for f in found]
    fine = _RUN[rule.judge](example(rule.good, tmp_path / "good.py"), tmp_path / "good")
    worse = {f.rule for f in fine if f.severity == "error"}
    assert rule.id not in {f.rule for f in fine}
    assert not worse, [str(f) for f in fine]
