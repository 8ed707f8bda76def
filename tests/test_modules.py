"""Loading: a module has exactly the stored weights, or an error lists every name and shape that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.modules import call_module, load_module
from enginesmith.tasks.slim import checkpoint_source, slim_checkpoint
from enginesmith.tasks.usercode import UserCode, importable
from enginesmith.tasks.weights import write_state


def loaded(folder: Path, state: dict[str, torch.Tensor], body: str, arguments: str = "") -> nn.Module:
    """Slim a state dict and load it into what `build` with this body returns."""
    torch.save(state, folder / "c.pt")
    slim_checkpoint(folder, checkpoint=checkpoint_source(folder / "c.pt"))
    (folder / "net.py").write_text(f"import torch\nfrom torch import nn\n\ndef build({arguments}):\n    {body}\n")
    with importable(folder):
        return load_module(UserCode(folder, "net:build", key="model.factory"), folder / "weights.safetensors")


def refused(folder: Path, state: dict[str, torch.Tensor], body: str, arguments: str = "") -> EnginesmithError:
    with pytest.raises(EnginesmithError) as caught:
        loaded(folder, state, body, arguments)
    return caught.value


LINEAR = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}


def test_weights_are_loaded_and_the_module_is_in_eval_mode_without_gradients(tmp_path: Path) -> None:
    module = loaded(tmp_path, LINEAR, "return nn.Linear(3, 3).train()")
    assert module.state_dict()["weight"].unique().tolist() == [1.0]
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())


def test_names_that_match_nothing_are_listed_on_both_sides(tmp_path: Path) -> None:
    state = {f"head.{k}": v for k, v in LINEAR.items()}
    error = refused(tmp_path, state, "return nn.Linear(3, 3)")
    assert error.details == (
        "missing in the checkpoint: bias",
        "missing in the checkpoint: weight",
        "unexpected in the checkpoint: head.bias",
        "unexpected in the checkpoint: head.weight",
    )
    assert "'head.bias'" in error.hint


def test_shapes_that_differ_are_listed(tmp_path: Path) -> None:
    error = refused(tmp_path, LINEAR, "return nn.Linear(3, 4)")
    assert error.details == (
        "bias: (3,) in the checkpoint, (4,) here",
        "weight: (3, 3) in the checkpoint, (4, 3) here",
    )


def test_a_missing_weight_is_never_left_at_its_random_value(tmp_path: Path) -> None:
    error = refused(tmp_path, {"weight": torch.ones(3, 3)}, "return nn.Linear(3, 3)")
    assert error.details == ("missing in the checkpoint: bias",)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod.", "model."])
def test_wrapper_of_the_training_run_is_not_needed(tmp_path: Path, prefix: str) -> None:
    module = loaded(tmp_path, {prefix + k: v for k, v in LINEAR.items()}, "return nn.Linear(3, 3)")
    assert module.state_dict()["weight"].unique().tolist() == [1.0]


@pytest.mark.parametrize("prefix", ["model.", "module.model."])
def test_wrapper_that_the_factory_has_too_is_put_back(tmp_path: Path, prefix: str) -> None:
    module = loaded(
        tmp_path,
        {prefix + k: v for k, v in LINEAR.items()},
        "m = nn.Module(); m.add_module('model', nn.Linear(3, 3)); return m",
    )
    assert module.state_dict()["model.weight"].unique().tolist() == [1.0]


def test_tied_weights_stay_tied_in_the_module(tmp_path: Path) -> None:
    body = "m = nn.ModuleList([nn.Linear(3, 3, False), nn.Linear(3, 3, False)]); m[1].weight = m[0].weight; return m"
    weight = torch.randn(3, 3)
    module = loaded(tmp_path, {"0.weight": weight, "1.weight": weight}, body)
    assert dict(module.named_parameters(remove_duplicate=False)).keys() == {"0.weight", "1.weight"}
    assert len(list(module.parameters())) == 1
    assert module.state_dict()["1.weight"].equal(weight)


def test_module_that_ties_what_the_checkpoint_does_not_is_refused(tmp_path: Path) -> None:
    body = "m = nn.ModuleList([nn.Linear(3, 3, False), nn.Linear(3, 3, False)]); m[1].weight = m[0].weight; return m"
    error = refused(tmp_path, {"0.weight": torch.ones(3, 3), "1.weight": torch.zeros(3, 3)}, body)
    assert error.details == ("0.weight",)


def test_half_precision_checkpoint_is_widened(tmp_path: Path) -> None:
    module = loaded(tmp_path, {k: v.half() for k, v in LINEAR.items()}, "return nn.Linear(3, 3)")
    assert module.state_dict()["weight"].dtype == torch.float32


def test_lazy_module_takes_the_shapes_of_the_checkpoint(tmp_path: Path) -> None:
    module = loaded(tmp_path, LINEAR, "return nn.LazyLinear(3)")
    assert module.state_dict()["weight"].shape == (3, 3)


@pytest.mark.parametrize(
    ("body", "arguments", "found"),
    [
        ("return nn.Linear(width, 3)", "width", "needs arguments: width"),
        ("return nn.Linear(3, 3), None", "", "returns a builtins.tuple"),
        ("return nn.Linear", "", "returns a builtins.type"),
        ("raise ValueError('no such width')", "", "net:build failed: ValueError: no such width"),
    ],
)
def test_factory_that_gives_no_module_is_refused(tmp_path: Path, body: str, arguments: str, found: str) -> None:
    error = refused(tmp_path, LINEAR, body, arguments)
    assert found in str(error)
    assert error.key == "model.factory"
    assert "net.py:" in error.where


class Two(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor, scale: float = 2.0) -> Any:
        return {"difference": left - scale * right, "parts": (left, [right])}


def test_inputs_are_bound_by_name_whatever_their_order() -> None:
    outputs = call_module(Two(), {"right": torch.ones(1), "left": torch.zeros(1)})
    assert outputs["difference"].tolist() == [-2.0]
    assert list(outputs) == ["difference", "parts.0", "parts.1.0"]


def test_inputs_are_bound_in_order_where_forward_names_them_otherwise() -> None:
    outputs = call_module(Two(), {"a": torch.ones(1), "b": torch.zeros(1)})
    assert outputs["difference"].tolist() == [1.0]


@pytest.mark.parametrize("names", [("left",), ("a",), ("a", "b", "c", "d")])
def test_inputs_that_forward_does_not_take_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(EnginesmithError) as caught:
        call_module(Two(), {name: torch.ones(1) for name in names})
    assert caught.value.key == "inputs"


def test_written_state_is_the_same_for_the_same_values(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    state = {"b": shared, "a": shared, "view": shared[2:4], "t": torch.randn(2, 3).t()}
    write_state(state, tmp_path / "1.safetensors")
    write_state(
        dict(reversed({k: v.clone() if k == "t" else v for k, v in state.items()}.items())), tmp_path / "2.safetensors"
    )
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "2.safetensors").read_bytes()
