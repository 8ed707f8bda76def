"""Claims about user code: its key follows the code it runs, its errors name its line, two pipelines never meet."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
import types
from pathlib import Path

import pytest

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.stage import digest_of
from enginesmith.tasks.usercode import UserCode, importable


def write(folder: Path, **files: str) -> Path:
    """Write modules; ``a__b`` is a/b.py, ``a__init`` is a/__init__.py."""
    for name, text in files.items():
        *parents, stem = name.split("__")
        path = folder.joinpath(*parents) / f"{'__init__' if stem == 'init' else stem}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def key(folder: Path, spec: str = "model:build") -> str:
    return digest_of(UserCode(folder, spec, "model.factory").key_part())


def call(folder: Path, spec: str = "model:build") -> object:
    with importable(folder):
        return UserCode(folder, spec, "model.factory")()


class TestKey:
    def test_one_line_of_the_module_changes_it(self, tmp_path: Path) -> None:
        before = key(write(tmp_path, model="def build(): return 1"))
        assert key(write(tmp_path, model="def build(): return 1")) == before
        assert key(write(tmp_path, model="def build(): return 2")) != before

    def test_the_place_does_not(self, tmp_path: Path) -> None:
        files = {"model": "import helper\ndef build(): return helper.x", "helper": "x = 1"}
        assert key(write(tmp_path / "a", **files)) == key(write(tmp_path / "b", **files))

    def test_another_function_of_the_module_is_another_key(self, tmp_path: Path) -> None:
        write(tmp_path, model="def build(): return 1\ndef other(): return 1")
        assert key(tmp_path) != key(tmp_path, "model:other")

    @pytest.mark.parametrize(
        ("statement", "helper"),
        [
            ("import helper", "helper"),
            ("from helper import x", "helper"),
            ("import package.helper", "package__helper"),
            ("from package import helper", "package__helper"),
            ("from package.helper import x", "package__helper"),
            ("def later():\n    import helper", "helper"),
            ("import middle", "helper"),
            ("import package.middle", "package__helper"),
        ],
    )
    def test_an_imported_helper_is_part_of_it(self, tmp_path: Path, statement: str, helper: str) -> None:
        write(
            tmp_path,
            model=f"{statement}\ndef build(): return 1",
            middle="import helper",
            helper="x = 1",
            package__init="",
            package__middle="from .helper import x",
            package__helper="x = 1",
        )
        before = key(tmp_path)
        write(tmp_path, **{helper: "x = 2"})
        assert key(tmp_path) != before

    def test_the_init_of_a_package_is_part_of_it(self, tmp_path: Path) -> None:
        write(tmp_path, model="import package.helper\ndef build(): ...", package__init="", package__helper="")
        before = key(tmp_path)
        write(tmp_path, package__init="import os")
        assert key(tmp_path) != before

    def test_a_file_that_is_not_imported_is_not(self, tmp_path: Path) -> None:
        before = key(write(tmp_path, model="import helper\ndef build(): ...", helper="", notes="x = 1"))
        assert key(write(tmp_path, notes="x = 2")) == before

    def test_modules_that_import_each_other_come_to_an_end(self, tmp_path: Path) -> None:
        before = key(write(tmp_path, model="import helper\ndef build(): ...", helper="import model"))
        assert key(write(tmp_path, helper="import model  # twice")) != before

    def test_versions_of_imported_packages_are_part_of_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, model="import os\nfrom numpy import zeros\ndef build(): ...")
        code = UserCode(tmp_path, "model:build")
        part = code.key_part()
        assert isinstance(part, dict)
        assert list(part["distributions"]) == ["numpy"]
        monkeypatch.setattr("importlib.metadata.version", lambda _: "0")
        assert code.key_part() != part

    def test_a_module_with_a_syntax_error_still_has_a_key(self, tmp_path: Path) -> None:
        assert key(write(tmp_path, model="def build(:")) != key(write(tmp_path, model="def build(::"))


class TestErrors:
    def fails(self, folder: Path, spec: str = "model:build") -> EnginesmithError:
        with pytest.raises(EnginesmithError) as caught:
            call(folder, spec)
        assert caught.value.key == "model.factory"
        return caught.value

    def test_no_such_module(self, tmp_path: Path) -> None:
        error = self.fails(tmp_path, "absent_module:build")
        assert error.found == "no module 'absent_module'"
        assert str(tmp_path) in error.hint

    def test_no_such_function_lists_those_that_are_there(self, tmp_path: Path) -> None:
        error = self.fails(write(tmp_path, model="def create(): ...\nbuild = 3"))
        assert error.found == "'model' has no function 'build'"
        assert "create" in error.hint

    def test_an_import_that_fails(self, tmp_path: Path) -> None:
        error = self.fails(write(tmp_path, model="x = 1\nimport helper", helper="\n\nraise RuntimeError('no GPU')"))
        assert error.found == "importing 'model' failed: RuntimeError: no GPU"
        assert error.where == f"{tmp_path}/helper.py:3"

    def test_a_package_that_is_not_installed(self, tmp_path: Path) -> None:
        error = self.fails(write(tmp_path, model="\nimport no_such_package"))
        assert "ModuleNotFoundError: No module named 'no_such_package'" in error.found
        assert error.where == f"{tmp_path}/model.py:2"

    def test_a_syntax_error(self, tmp_path: Path) -> None:
        error = self.fails(write(tmp_path, model="\n\ndef build(:\n    ..."))
        assert "SyntaxError" in error.found
        assert error.where == f"{tmp_path}/model.py:3"

    def test_an_exception_below_a_library_names_the_users_line(self, tmp_path: Path) -> None:
        code = "import json\ndef build():\n    return json.loads('{')"
        assert self.fails(write(tmp_path, model=code)).where == f"{tmp_path}/model.py:3"

    def test_an_environment_inside_the_folder_is_not_the_users_code(self, tmp_path: Path) -> None:
        library = tmp_path / ".venv" / "lib" / "site-packages"
        write(library, somelib="def f(): raise ValueError('deep')")
        write(tmp_path, model="import somelib\ndef build():\n    somelib.f()")
        sys.path.append(str(library))
        try:
            assert self.fails(tmp_path).where == f"{tmp_path}/model.py:3"
            # Imported once, it stays: a second import of torch, say, would crash.
            assert "somelib" in sys.modules
        finally:
            sys.path.remove(str(library))
            sys.modules.pop("somelib", None)

    @pytest.mark.parametrize("code", ["raise SystemExit(0)", "import sys\nsys.exit()", "exit(3)"])
    def test_code_that_exits_does_not_end_the_compile(self, tmp_path: Path, code: str) -> None:
        assert "SystemExit" in self.fails(write(tmp_path, model=code)).found
        code = "def build():\n    " + code.replace("\n", "\n    ")
        assert "SystemExit" in self.fails(write(tmp_path, model=code)).found


class TestImportable:
    def test_two_pipelines_modules_never_meet(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write(
                tmp_path / name, model=f"import helper\ndef build(): return {name!r} + helper.x", helper=f"x = {name!r}"
            )
        assert [call(tmp_path / name) for name in ("a", "b", "a")] == ["aa", "bb", "aa"]

    def test_a_module_of_the_same_name_from_elsewhere_is_set_aside_and_comes_back(self, tmp_path: Path) -> None:
        write(tmp_path / "elsewhere", model="def build(): return 'elsewhere'")
        write(tmp_path / "own", model="def build(): return 'own'")
        sys.path.insert(0, str(tmp_path / "elsewhere"))
        try:
            import model  # type: ignore[import-not-found]

            assert call(tmp_path / "own") == "own"
            assert sys.modules["model"] is model
        finally:
            sys.path.remove(str(tmp_path / "elsewhere"))
            sys.modules.pop("model", None)

    def test_a_change_within_the_same_second_is_seen(self, tmp_path: Path) -> None:
        # Python takes bytecode for fresh when the source's size and second are the same.
        assert [call(write(tmp_path, model=f"def build(): return {n}")) for n in (1, 2, 3)] == [1, 2, 3]
        assert not list(tmp_path.rglob("*.pyc"))

    def test_the_path_is_left_as_it_was(self, tmp_path: Path) -> None:
        before, wrote_none = list(sys.path), sys.dont_write_bytecode
        call(write(tmp_path, model="def build(): return 1"))
        assert sys.path == before
        assert sys.dont_write_bytecode == wrote_none
        assert "model" not in sys.modules

    def test_a_package_installed_from_the_folder_is_not_forgotten(self, tmp_path: Path) -> None:
        # An editable install may map a folder of this name to another one: enginesmith.tasks is tasks/ itself.
        source = write(tmp_path, model="import installed\ndef build(): return 1", tasks__code="x = 1")
        spec = importlib.util.spec_from_file_location("installed", source / "tasks" / "code.py")
        assert spec is not None
        with importable(tmp_path):
            sys.modules["installed"] = importlib.util.module_from_spec(spec)
            assert UserCode(tmp_path, "model:build")() == 1
        assert sys.modules.pop("installed").__file__ == str(source / "tasks" / "code.py")

    def test_the_folder_wins_over_installed_packages(self, tmp_path: Path) -> None:
        assert call(write(tmp_path, sklearn="def build(): return 'own'"), "sklearn:build") == "own"


class Importing(types.ModuleType):
    """Looking at its file imports something, as lazily loaded modules do; other threads do so at any time."""

    count = 0

    @property
    def __file__(self) -> str | None:  # type: ignore[override]
        Importing.count += 1
        sys.modules[f"passing_{Importing.count}"] = types.ModuleType("passing")
        return None


def test_modules_may_appear_while_the_loaded_ones_are_looked_at(tmp_path: Path) -> None:
    sys.modules["importing"] = Importing("importing")
    try:
        with importable(tmp_path):
            pass
        assert Importing.count > 0
    finally:
        for name in [n for n in sys.modules.copy() if n.startswith(("passing_", "importing"))]:
            del sys.modules[name]


def test_a_slip_of_the_pen_is_found_without_importing(tmp_path: Path) -> None:
    write(tmp_path, code="raise SystemExit\n\n\ndef build(): ...\n", open="from code import *\n")
    UserCode(tmp_path, "code:build").check()
    UserCode(tmp_path, "open:anything").check()
    with pytest.raises(EnginesmithError, match="no function 'biuld'") as raised:
        UserCode(tmp_path, "code:biuld", key="model.factory").check()
    assert raised.value.hint == "it has: build"
    with pytest.raises(EnginesmithError, match="no module 'nowhere'"):
        UserCode(tmp_path, "nowhere:build").check()
