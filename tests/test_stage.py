"""Claims about stages: a key changes exactly when the content of an input changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import Fp16Settings, InputSettings
from enginesmith.tasks.stage import Part, SourceFile, Stage, digest_of, tool_version
from enginesmith.tasks.store import Artifact, Store


class Report(BaseModel):
    saw: str = ""


def run(out: Path, **inputs: Any) -> Report:
    for name, value in inputs.items():
        if isinstance(value, Artifact):
            (out / name).write_text(value.path.name)
    (out / "a").mkdir()
    (out / "b").mkdir()
    (out / "a" / "file").write_text(str(inputs.get("a")))
    (out / "b" / "file").write_text(str(inputs.get("b")))
    return Report(saw=", ".join(inputs))


STAGE = Stage("stage", version=1, run=run, tools=("numpy",))


def key(stage: Stage = STAGE, **inputs: Any) -> str:
    return digest_of(stage.explain(**inputs))


class TestKey:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            (1, 2),
            (1, True),
            (1, 1.0),
            (1, "1"),
            (None, ""),
            (None, False),
            ([], None),
            ([1, 2], [2, 1]),
            ({"a": 1}, {"a": 2}),
            ({"a": 1}, {"b": 1}),
            (Fp16Settings(), Fp16Settings(layer_drop=0.03)),
            ({"x": InputSettings(shape=(1, 3))}, {"x": InputSettings(shape=(3, 1))}),
        ],
        ids=str,
    )
    def test_another_value_is_another_key(self, one: Any, other: Any) -> None:
        assert key(x=one) != key(x=other)

    @pytest.mark.parametrize(
        ("one", "same"),
        [
            ([1, 2], (1, 2)),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            (Fp16Settings(), Fp16Settings(layer_drop=0.02)),
        ],
        ids=str,
    )
    def test_an_equal_value_is_the_same_key(self, one: Any, same: Any) -> None:
        assert key(x=one) == key(x=same)

    def test_name_version_and_tools_are_part_of_it(self) -> None:
        others = [replace(STAGE, name="other"), replace(STAGE, version=2), replace(STAGE, tools=("numpy", "onnx"))]
        assert len({key(stage, x=1) for stage in (STAGE, *others)}) == 4

    def test_the_version_of_a_tool_is_part_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = key(x=1)
        monkeypatch.setattr("enginesmith.tasks.stage.tool_version", lambda _: "0.0.0")
        assert key(x=1) != before

    def test_the_order_of_arguments_is_not(self) -> None:
        assert key(x=1, y=2) == key(y=2, x=1)

    def test_a_file_is_known_by_its_bytes_and_not_by_its_place(self, tmp_path: Path) -> None:
        for name, content in (("a", b"same"), ("b", b"same"), ("c", b"else")):
            (tmp_path / name).write_bytes(content)
        a, b, c = (key(x=SourceFile.of(tmp_path / name)) for name in "abc")
        assert a == b
        assert a != c

    def test_every_byte_of_a_file_counts(self, tmp_path: Path) -> None:
        content = bytearray(range(256))
        path = tmp_path / "file"
        keys = set()
        for index in range(0, 256, 15):
            changed = bytearray(content)
            changed[index] ^= 1
            path.write_bytes(changed)
            keys.add(key(x=SourceFile.of(path)))
        assert len(keys) == 18

    def test_an_artifact_is_known_by_its_content_and_not_by_its_key(self, store: Store) -> None:
        one, two = STAGE(store=store, a=1, note="one"), STAGE(store=store, a=1, note="two")
        assert one.key != two.key
        assert key(x=one) == key(x=two)
        assert key(x=one) != key(x=STAGE(store=store, a=2))

    def test_a_part_depends_on_its_folder_alone(self, store: Store) -> None:
        one, two = STAGE(store=store, a=1, b=1), STAGE(store=store, a=1, b=2)
        first = STAGE(store=store, x=Part(one, "a"))
        assert STAGE(store=store, x=Part(two, "a")).key == first.key
        assert STAGE(store=store, x=Part(two, "b")).key != first.key

    @pytest.mark.parametrize(
        "value", [Path("/etc"), b"bytes", {1, 2}, object(), 1j], ids=lambda value: type(value).__name__
    )
    def test_what_has_no_content_is_refused(self, value: Any) -> None:
        with pytest.raises(TypeError, match="cannot be part of a stage's key"):
            key(x=value)
        with pytest.raises(TypeError, match="cannot be part of a stage's key"):
            key(x=[{"deep": value}])

    def test_a_missing_file_names_the_key_that_named_it(self, tmp_path: Path) -> None:
        with pytest.raises(EnginesmithError, match="cannot be read: No such file") as caught:
            SourceFile.of(tmp_path / "absent", key="model.checkpoint")
        assert caught.value.key == "model.checkpoint"

    def test_an_absent_tool_has_no_version(self) -> None:
        assert tool_version("no-such-distribution") == "absent"


class TestRun:
    def test_inputs_arrive_as_given_and_the_report_is_kept(self, store: Store) -> None:
        artifact = STAGE(store=store, a=1, b="two")
        assert (artifact.path / "a" / "file").read_text() == "1"
        assert artifact.report == {"saw": "a, b"}

    def test_the_report_changes_nothing_downstream(self, store: Store) -> None:
        one, two = STAGE(store=store, a=1, first=0), STAGE(store=store, a=1, second=0)
        assert one.report != two.report
        assert one.digest == two.digest

    def test_as_a_prefect_task_a_hit_shows_as_cached(self, store: Store) -> None:
        from prefect.states import State

        made = STAGE.task.fn(store=store, a=1)
        found = STAGE.task.fn(store=store, a=1)
        assert isinstance(made, Artifact)
        assert isinstance(found, State)
        assert (found.name, found.is_completed()) == ("Cached", True)
