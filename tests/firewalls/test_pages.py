"""Every rule has a page, every page a rule, and the examples of source rules do what the page says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from enginesmith.tasks.firewalls.source import check_source
from enginesmith.tasks.settings import DimSettings, InputSettings

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(p for p in (ROOT / "docs" / "rules").glob("*.md") if p.name != "README.md")
INPUTS = {
    "x": InputSettings(
        shape=("batch", "time", 4),
        dims={"batch": DimSettings(min=1, opt=2, max=5), "time": DimSettings(min=2, opt=3, max=6)},
    )
}


def rules_in_the_code():
    files = [*(ROOT / "tasks" / "firewalls").glob("*.py"), *(ROOT / "tasks" / "export").glob("*.py")]
    return {r for f in files for r in re.findall(r'"((?:shape|control-flow|operators)/[a-z-]+)"', f.read_text())}


def title(page):
    return page.read_text().splitlines()[0].removeprefix("# ")


def test_rules_and_pages_are_the_same_set():
    assert {title(page) for page in PAGES} == rules_in_the_code()
    assert {page.stem for page in PAGES} == {title(page).replace("/", "-") for page in PAGES}
    index = (ROOT / "docs" / "rules" / "README.md").read_text()
    assert set(re.findall(r"\[([a-z-]+/[a-z-]+)\]", index)) == {title(page) for page in PAGES}


@pytest.mark.parametrize("page", [p for p in PAGES if "## Bad" in p.read_text()], ids=lambda p: p.stem)
def test_bad_example_is_suspected_and_good_one_is_not(page, tmp_path):
    bad, good = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    rule = title(page)
    found = rules_of(bad, tmp_path / "bad.py")
    assert found
    assert rule in found or rule == "control-flow/data-dependent"  # torch.export's own; the source rule sees it too
    assert rules_of(good, tmp_path / "good.py") == set()


def rules_of(code, path):
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {f.rule for f in check_source(module.Net().eval(), INPUTS)}
