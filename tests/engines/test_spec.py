"""Options and manifests."""

from __future__ import annotations

import pickle

import pytest

from enginesmith.tasks.engines import backend, names
from enginesmith.tasks.engines.spec import (
    EngineError,
    FileSpec,
    Manifest,
    Option,
    Profile,
    Range,
    TensorSpec,
    merged_options,
)

SCHEMA = (
    Option("threads", "int", 0, "how many"),
    Option("tf32", "bool", False, "whether"),
    Option("compute_capabilities", "list", ["8.6"], "which", ("7.5", "8.6", "8.9")),
)


def test_defaults_hold_where_nothing_is_given() -> None:
    assert merged_options(SCHEMA, {"threads": 2}, backend="b") == {
        "threads": 2,
        "tf32": False,
        "compute_capabilities": ["8.6"],
    }


def test_yaml_numbers_in_a_list_become_text_once_each() -> None:
    found = merged_options(SCHEMA, {"compute_capabilities": [8.6, 8.9, 8.6]}, backend="b")
    assert found["compute_capabilities"] == ["8.6", "8.9"]


def test_an_unknown_option_is_named_with_what_is_meant() -> None:
    with pytest.raises(EngineError) as caught:
        merged_options(SCHEMA, {"thread": 2}, backend="b")
    assert "b has no option 'thread'" in str(caught.value)
    assert "did you mean 'threads'?" in caught.value.hint
    assert caught.value.key == "options.thread"


def test_an_option_like_no_other_is_answered_with_all_that_are_known() -> None:
    with pytest.raises(EngineError) as caught:
        merged_options(SCHEMA, {"xyz": 2}, backend="b")
    assert caught.value.hint == "it knows: compute_capabilities, tf32, threads"


@pytest.mark.parametrize(("name", "value"), [("threads", "two"), ("threads", True), ("tf32", 1), ("threads", None)])
def test_a_wrong_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(EngineError, match=f"option {name} takes"):
        merged_options(SCHEMA, {name: value}, backend="b")


def test_a_value_outside_the_choices_is_refused() -> None:
    with pytest.raises(EngineError, match=r"does not take 9\.0") as caught:
        merged_options(SCHEMA, {"compute_capabilities": ["9.0"]}, backend="b")
    assert "7.5, 8.6, 8.9" in caught.value.hint


def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    with pytest.raises(EngineError, match="no backend 'tensort'") as caught:
        backend("tensort")
    assert all(name in caught.value.hint for name in names())


def test_an_error_keeps_its_parts_across_processes() -> None:
    error = EngineError("found", where="w", key="k", hint="h", details=["a", "b"])
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (copy.found, copy.where, copy.key, copy.hint, copy.details) == ("found", "w", "k", "h", ("a", "b"))


def manifest() -> Manifest:
    return Manifest(
        backend="b",
        variant="int8",
        model_sha256="00",
        fingerprint={"b": "1.0"},
        options={"threads": 1},
        profiles=(Profile({"x": Range((1, 3), (4, 3), (8, 3))}, {"n": Range((1,), (2,), (3,))}),),
        inputs=(TensorSpec("x", "float32", (None, 3)),),
        outputs=(),
        requested={"fp32": 1},
        read_back={"fp32": 1},
        unseen=0,
        read_from="somewhere",
        lowered=(),
        warnings=("w",),
        files=(FileSpec("e", 3, "11"), FileSpec("f", 4, "22")),
    )


def test_a_manifest_reads_back_as_written() -> None:
    assert Manifest.from_json(manifest().to_json(), where="here") == manifest()


def test_an_engines_size_is_that_of_its_own_files() -> None:
    assert manifest().size == 7


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "files": 3}'])
def test_a_broken_manifest_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(EngineError, match="cannot be read") as caught:
        Manifest.from_json(text, where="here")
    assert caught.value.where == "here"


def test_a_manifest_of_another_schema_is_refused_with_both_numbers() -> None:
    text = manifest().to_json().replace('"schema": 1', '"schema": 7')
    with pytest.raises(EngineError, match="schema 7, this version reads 1"):
        Manifest.from_json(text, where="here")
