"""Claims about pipeline.yaml: what it may hold, and that a mistake is named with file, line and what would be right."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.settings import VARIANTS, Pipeline, load_list, load_pipeline

MINIMAL = """
model: {checkpoint: net.pt}
inputs:
  x: {shape: [batch, 3], dims: {batch: {min: 1, opt: 8, max: 32}}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def load(folder: Path, text: str) -> Pipeline:
    return load_pipeline(write(folder, text))


def refused(folder: Path, text: str) -> EnginesmithError:
    with pytest.raises(EnginesmithError) as caught:
        load(folder, text)
    return caught.value


class TestGood:
    def test_only_model_and_inputs_are_required(self, tmp_path: Path) -> None:
        settings = load(tmp_path, MINIMAL).settings
        assert settings.inputs["x"].shape == ("batch", 3)
        assert settings.inputs["x"].dtype == "float32"
        assert settings.data.metric.call == "agreement"
        assert settings.budget.max_drop == 0.01
        assert settings.precision.variants == VARIANTS
        assert {name: t.backend for name, t in settings.targets.items()} == {"cpu": "onnxruntime"}

    def test_the_file_of_the_design_is_read(self, tmp_path: Path) -> None:
        pipeline = load(
            tmp_path,
            """
            model:
              name: mobilenetv2-reid
              checkpoint: checkpoints/mobilenetv2.pt
              factory: model:build
              weights: auto
            inputs:
              image: {shape: [batch, 3, 224, 224], dtype: float32, dims: {batch: {min: 1, opt: 8, max: 32}}}
            data:
              calibration: data:calibration
              evaluation: data:evaluation
              files: [images/]
              metric: {call: metrics:top1, better: higher}
            budget: {max_drop: 0.01}
            precision:
              fp16: {layer_drop: 0.02, keep_fp32: []}
              int8: {calibrator: entropy, samples: 512, placement: conv-relu, exclude: []}
            targets:
              cpu: {backend: onnxruntime}
              h200: {backend: tensorrt, work_pool: gpu-h200}
            store: {url: artifacts/}
            tracking: {uri: sqlite:///artifacts/mlflow.db}
            deployments: []
            """,
        )
        assert pipeline.name == "mobilenetv2-reid"
        assert pipeline.settings.targets["h200"].work_pool == "gpu-h200"
        assert pipeline.store_root == tmp_path / "artifacts"
        assert pipeline.tracking_uri == f"sqlite:///{tmp_path}/artifacts/mlflow.db"

    def test_prefects_own_keys_pass_through(self, tmp_path: Path) -> None:
        load(
            tmp_path,
            MINIMAL + "name: x\nprefect-version: 3.9.1\nbuild: null\npush: null\npull: null\ndefinitions: {}\n",
        )

    def test_a_number_may_be_written_as_1e_3(self, tmp_path: Path) -> None:
        # YAML 1.1 reads 1e-3, without a dot, as text.
        assert load(tmp_path, MINIMAL + "budget: {max_drop: 1e-3}").settings.budget.max_drop == 0.001

    def test_anchors_and_merges_are_read_and_have_lines(self, tmp_path: Path) -> None:
        pipeline = load(
            tmp_path,
            """
            model: {checkpoint: net.pt}
            inputs:
              left: &image
                shape: [n, 3]
                dims: {n: {min: 1, opt: 2, max: 4}}
              right:
                <<: *image
                dtype: float16
            """,
        )
        assert pipeline.settings.inputs["right"].shape == ("n", 3)
        assert pipeline.settings.inputs["right"].dtype == "float16"
        assert pipeline.where("inputs.right.dtype").endswith(":9")
        assert pipeline.where("inputs.right.shape").endswith(":5")

    def test_the_name_defaults_to_the_folders(self, tmp_path: Path) -> None:
        folder = tmp_path / "my model (v2)"
        folder.mkdir()
        assert load(folder, MINIMAL).name == "my-model-v2"

    def test_where_names_the_nearest_key_of_the_file(self, tmp_path: Path) -> None:
        pipeline = load(tmp_path, MINIMAL)
        assert pipeline.where("model.checkpoint") == f"{tmp_path}/pipeline.yaml:2"
        assert pipeline.where("inputs.x.dims.batch.opt") == f"{tmp_path}/pipeline.yaml:4"
        assert pipeline.where("inputs.x.dtype") == f"{tmp_path}/pipeline.yaml:4"
        assert pipeline.where("budget.max_drop") == f"{tmp_path}/pipeline.yaml"


class TestPlaces:
    def test_defaults_lie_beside_the_file(self, tmp_path: Path) -> None:
        pipeline = load(tmp_path, MINIMAL)
        assert pipeline.store_root == tmp_path / "artifacts"
        assert pipeline.tracking_uri == f"sqlite:///{tmp_path}/artifacts/mlflow.db"

    def test_the_environment_wins_and_is_relative_to_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, here = tmp_path / "project", tmp_path / "here"
        folder.mkdir()
        here.mkdir()
        pipeline = load(folder, MINIMAL + "store: {url: own/}\ntracking: {uri: own/mlruns}")
        assert pipeline.store_root == folder / "own"
        assert pipeline.tracking_uri == str(folder / "own" / "mlruns")
        monkeypatch.chdir(here)
        monkeypatch.setenv("ENGINESMITH_STORE", "elsewhere")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
        assert pipeline.store_root == here / "elsewhere"
        assert pipeline.tracking_uri == f"sqlite:///{here}/mlflow.db"

    def test_a_server_stays_as_it_is(self, tmp_path: Path) -> None:
        assert load(tmp_path, MINIMAL + "tracking: {uri: 'http://mlflow:5000'}").tracking_uri == "http://mlflow:5000"

    def test_a_store_elsewhere_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(EnginesmithError, match="is not a local folder"):
            _ = load(tmp_path, MINIMAL + "store: {url: 's3://bucket'}").store_root


BASE = "model: {checkpoint: net.pt}\n"
X = "inputs: {x: {shape: [1]}}\n"

# What stands in the file, the line that the error names, and words of the error or its hint.
MISTAKES = {
    "unknown key": (BASE + X + "buget: {max_drop: 1}", 3, ["unknown key 'buget'", "did you mean 'budget'?"]),
    "unknown key below": (
        BASE + X + "precision:\n  fp16:\n    layer_dorp: 1",
        5,
        ["unknown key 'precision.fp16.layer_dorp'", "did you mean 'layer_drop'?"],
    ),
    "unknown key of a target": (
        BASE + X + "targets:\n  cpu:\n    backnd: onnxruntime",
        4,
        ["targets.cpu.backend' is missing", "unknown key 'targets.cpu.backnd'"],
    ),
    "unknown key, nothing close": (BASE + X + "zzz: 1", 3, ["known keys here: budget, data"]),
    "unknown key through a merge": (
        BASE + "inputs:\n  a: &a {shape: [1], dtyp: int8}\n  b: {<<: *a}",
        3,
        ["unknown key 'inputs.a.dtyp'", "unknown key 'inputs.b.dtyp'"],
    ),
    "missing checkpoint": ("model: {name: x}\n" + X, 1, ["'model.checkpoint' is missing"]),
    "missing model": (X, None, ["'model' is missing"]),
    "no inputs": (BASE + "inputs: {}", 2, ["inputs", "at least 1 item"]),
    "wrong type": (BASE + X + "budget: {max_drop: small}", 3, ["budget.max_drop", "valid number", "'small'"]),
    "a scalar for a mapping": (BASE + X + "budget: 0.01", 3, ["budget", "dictionary"]),
    "an empty section": (BASE + X + "budget:", 3, ["budget", "None"]),
    "a list for text": ("model: {checkpoint: [a, b]}\n" + X, 1, ["model.checkpoint", "valid string"]),
    "text for a list": (BASE + X + "data: {files: images}", 3, ["data.files", "valid tuple"]),
    "yes for a number": (BASE + X + "data: {samples: yes}", 3, ["data.samples", "truth value"]),
    "no for a name": ("model: {checkpoint: no}\n" + X, 1, ["model.checkpoint", "truth value"]),
    "on in a shape": (BASE + "inputs:\n  x:\n    shape: [on, 3]", 4, ["truth value"]),
    "a fraction in a shape": (BASE + "inputs:\n  x:\n    shape: [3.5]", 4, ["inputs.x.shape.0", "integer"]),
    "a negative dimension": (BASE + "inputs:\n  x: {shape: [-1, 3]}", 3, ["inputs.x", "at least 1", "[-1, 3]"]),
    "a dimension without range": (
        BASE + "inputs:\n  x: {shape: [batch, 3]}",
        3,
        ["dynamic dimension batch needs a range", "dims: {batch: {min: 1, opt: 8, max: 32}}"],
    ),
    "a range without dimension": (
        BASE + "inputs:\n  x: {shape: [1], dims: {batch: {min: 1, opt: 1, max: 1}}}",
        3,
        ["dims names batch"],
    ),
    "opt outside min..max": (
        BASE + "inputs:\n  x:\n    shape: [n]\n    dims:\n      n: {min: 1, opt: 8, max: 4}",
        6,
        ["min <= opt <= max", "1, 8, 4"],
    ),
    "an unknown dtype": (BASE + "inputs:\n  x: {shape: [1], dtype: float}", 3, ["inputs.x.dtype", "'float32'"]),
    "an unknown metric": (
        BASE + X + "data:\n  metric: {call: top-1}",
        4,
        ["unknown metric 'top-1'", "did you mean 'top1'?"],
    ),
    "a metric that is no name": (BASE + X + "data:\n  metric: {call: 'a:b:c'}", 4, ["module:function"]),
    "fit without a metric": (BASE + X + "data:\n  metric: {call: top1, fit: 'm:f'}", 4, ["nothing to fit"]),
    "a factory that is no name": ("model: {checkpoint: a, factory: model.py}\n" + X, 1, ["model.factory"]),
    "an unknown backend": (BASE + X + "targets: {t: {backend: tvm}}", 3, ["targets.t.backend", "'onnxruntime'"]),
    "an unknown variant": (BASE + X + "precision: {variants: [fp8]}", 3, ["precision.variants.0", "'fp16'"]),
    "NaN budget": (BASE + X + "budget: {max_drop: .nan}", 3, ["budget.max_drop", "finite"]),
    "infinite budget": (BASE + X + "budget: {max_drop: .inf}", 3, ["budget.max_drop", "finite"]),
    "negative budget": (BASE + X + "budget: {max_drop: -1}", 3, ["greater than or equal to 0"]),
    "a clamp that is no number": (BASE + X + "fold: {clamp: {floor: .nan}}", 3, ["fold.clamp"]),
    "a date among options": (
        BASE + X + "targets: {t: {backend: onnxruntime, options: {when: 2026-01-01}}}",
        3,
        ["targets.t.options.when", "JSON"],
    ),
    "model and pipelines": (BASE + X + "pipelines: [a.yaml]", 3, ["either model: or pipelines:"]),
    "a list of pipelines": ("pipelines: [a.yaml]", 1, ["this file lists pipelines"]),
    "duplicate keys": (BASE + X + BASE, 3, ["the key 'model' stands twice"]),
    "duplicate keys below": (BASE + "inputs:\n  x: {shape: [1]}\n  x: {shape: [2]}", 4, ["the key 'x' stands twice"]),
    "a tab": (BASE + "inputs:\n\tx: {shape: [1]}", 3, ["not plain YAML", "\\t"]),
    "bad indentation": (BASE + " inputs: {}", 2, ["not plain YAML"]),
    "an open bracket": ("model: {checkpoint: [", 1, ["not plain YAML"]),
    "an object": ("model: !!python/object/apply:os.system [ls]\n" + X, 1, ["not plain YAML", "python/object"]),
    "an unknown anchor": ("model: *m\n" + X, 1, ["undefined alias"]),
    "an impossible date": (BASE + X + "budget: {max_drop: 2026-13-45}", None, ["month must be in 1..12"]),
    "a self-reference": ("model: &m {checkpoint: *m}\n" + X, 1, ["refers to itself"]),
    "two documents": (BASE + X + "---\n" + BASE, 3, ["single document"]),
    "a list at the top": ("- a\n- b", None, ["it holds no keys"]),
    "a word": ("hello", None, ["it holds no keys"]),
    "empty": ("", None, ["it holds no keys"]),
    "only comments": ("# nothing\n", None, ["it holds no keys"]),
    "a control character": ("model: \x07\n", None, ["special characters"]),
}


class TestMistakes:
    @pytest.mark.parametrize(("text", "line", "words"), MISTAKES.values(), ids=MISTAKES)
    def test_a_mistake_is_named_with_its_line(
        self, tmp_path: Path, text: str, line: int | None, words: list[str]
    ) -> None:
        error = refused(tmp_path, text)
        assert error.where == f"{tmp_path}/pipeline.yaml" + (f":{line}" if line else "")
        for word in words:
            assert word in str(error)

    def test_several_mistakes_are_reported_at_once(self, tmp_path: Path) -> None:
        error = refused(tmp_path, BASE + X + "buget: 1\nbudget: {max_drop: -1}")
        assert {":3", ":4"} <= {word[-2:] for word in str(error).replace(": ", " ").split()}

    def test_each_mistake_is_reported_once(self, tmp_path: Path) -> None:
        error = refused(tmp_path, BASE + "inputs: {x: {shape: [3.5]}}")
        assert error.details == ()

    @pytest.mark.parametrize("content", [b"\x80\x04\x95\xff", b"\xff\xfem\x00o\x00"])
    def test_a_binary_file(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "pipeline.yaml"
        path.write_bytes(content)
        with pytest.raises(EnginesmithError, match="not UTF-8 text"):
            load_pipeline(path)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(EnginesmithError, match="cannot be read: No such file"):
            load_pipeline(tmp_path / "absent.yaml")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(EnginesmithError, match="cannot be read: Is a directory"):
            load_pipeline(tmp_path)

    def test_aliases_that_multiply_are_refused_quickly(self, tmp_path: Path) -> None:
        lines = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
        assert "too large" in refused(tmp_path, "\n".join(lines)).found

    def test_brackets_a_thousand_deep(self, tmp_path: Path) -> None:
        assert "nested too deeply" in refused(tmp_path, "model: " + "[" * 5000).found


class TestLists:
    def test_patterns_are_expanded_sorted_and_without_the_list_itself(self, tmp_path: Path) -> None:
        for name in ("b", "a"):
            (tmp_path / name).mkdir()
            write(tmp_path / name, MINIMAL)
        path = write(tmp_path, "pipelines: ['*/pipeline.yaml', '*.yaml']")
        assert load_list(path) == [tmp_path / "a" / "pipeline.yaml", tmp_path / "b" / "pipeline.yaml"]

    def test_a_pipeline_lists_itself(self, tmp_path: Path) -> None:
        path = write(tmp_path, MINIMAL)
        assert load_list(path) == [path]

    @pytest.mark.parametrize(
        ("pattern", "found"),
        [("absent/*.yaml", "matches no file"), ("/etc/*.yaml", "is no pattern"), ("''", "is no pattern")],
    )
    def test_a_pattern_that_matches_nothing(self, tmp_path: Path, pattern: str, found: str) -> None:
        path = write(tmp_path, f"pipelines:\n  - {pattern}")
        with pytest.raises(EnginesmithError, match=found) as caught:
            load_list(path)
        assert caught.value.where == f"{path}:2"
