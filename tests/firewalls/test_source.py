"""Source rules: what they suspect stands on the right line, and ordinary code raises no suspicion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from enginesmith.tasks.firewalls.source import check_source
from enginesmith.tasks.settings import DimSettings, InputSettings

INPUTS = {
    "x": InputSettings(
        shape=("batch", "time", 4),
        dims={"batch": DimSettings(min=1, opt=2, max=5), "time": DimSettings(min=2, opt=3, max=6)},
    )
}
TEXT = Path(__file__).read_text().splitlines()


def suspicions(module):
    return [(f.rule, f.line) for f in check_source(module.eval(), INPUTS, (Path(__file__).parent,))]


def marked(cls):
    """Lines of a class that end in `# rule`, as (rule, line)."""
    start = next(i for i, line in enumerate(TEXT) if line.startswith(f"class {cls.__name__}("))
    end = next((i for i in range(start + 1, len(TEXT)) if TEXT[i] and not TEXT[i].startswith(" ")), len(TEXT))
    return [(TEXT[i].split("  # ")[1].strip(), i + 1) for i in range(start, end) if "  # " in TEXT[i]]


class Branches(nn.Module):
    def forward(self, x):
        if x.mean() > 0:  # control-flow/branch-on-value
            x = x * 2
        y = x if torch.any(x > 3) else -x  # control-flow/branch-on-value
        assert x.sum() < 1e9  # control-flow/branch-on-value
        while y.max() > 1:  # control-flow/loop-on-value
            y = y / 2
        return y


class Numbers(nn.Module):
    def forward(self, x):
        peak = x.max().item()  # shape/value-as-number
        for _ in range(int(peak)):  # control-flow/loop-on-value
            x = x + 1
        total = float(x.sum())  # shape/value-as-number
        if total > 1:  # control-flow/branch-on-value
            x = -x
        return x * x.detach().numpy().max()  # shape/value-as-number


class Sizes(nn.Module):
    def forward(self, x):
        batch, time, width = x.shape
        for step in range(time):  # control-flow/loop-over-size
            x = x + step
        for _ in range(width):
            x = x + 1
        for row in x:  # control-flow/loop-over-size
            x = x + row
        scale = len(x)  # shape/size-as-number
        half = int(x.shape[1] / 2)  # shape/size-as-number
        if batch % 2:  # control-flow/branch-on-size
            x = x * scale
        return x[:, :half]


class Roundtrips(nn.Module):
    def forward(self, x):
        count = np.prod(x.shape)  # shape/size-as-number
        root = np.sqrt(x.shape[1])  # shape/size-as-number
        peak = np.max(x)  # shape/value-as-number
        if (total := x.sum()) > 0:  # control-flow/branch-on-value
            x = x * 2
        if total < 0:  # control-flow/branch-on-value
            x = -x
        return x / count / root / peak * np.sqrt(2.0)


class Inner(nn.Module):
    def forward(self, y, flip=False):
        if flip and y.sum() > 0:  # control-flow/branch-on-value
            return -y
        return y


def helper(y):
    return y * 2 if y.min() > 0 else y


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Inner()])
        self.last = nn.Sequential(nn.ReLU(), Inner())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.finish(self.last(x))

    def finish(self, x):
        return self.blocks[1](x, flip=True)


class Clean(nn.Module):
    """What ordinary models do."""

    def __init__(self):
        super().__init__()
        self.option, self.mode, self.scale = None, "mean", 2.0
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(4)})

    def forward(self, x, mask=None):
        if self.training and x.sum() > 0:
            x = -x
        if mask is not None:
            x = x + mask
        if x.dim() != 3 or x.ndim < 2 or x.dtype == torch.float64 or not isinstance(x, torch.Tensor):
            raise ValueError(f"expected three dimensions, got {tuple(x.shape)}")
        if x.shape[-1] != 4:
            raise ValueError("expected four channels")
        if x.size(2) == 4 and self.mode == "mean" and self.option is None:
            x = x * self.scale
        for index, (layer, other) in enumerate(zip(self.layers, self.layers, strict=True)):
            x = layer(x) if index % 2 else other(x)
        for norm in self.norms.values():
            x = norm(x)
        for row in self.weight:
            x = x + row
        x = x / np.prod(self.weight.shape) + len(self.weight)
        batch, time, _ = x.size()
        x = x.reshape(batch, time, 2, 2).flatten(2)
        x = torch.where(x > 0, x, functional.softplus(x))
        parts = [part * 2 for part in torch.chunk(x, 2, dim=-1)]
        return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("cls", [Branches, Numbers, Sizes, Roundtrips])
def test_suspicions_stand_on_their_lines(cls):
    assert suspicions(cls()) == marked(cls)


def test_ordinary_code_raises_no_suspicion():
    assert suspicions(Clean()) == []


def test_submodules_and_methods_are_followed_with_their_options():
    module = Outer()
    found = check_source(module, INPUTS, (Path(__file__).parent,))
    assert [(f.rule, f.line) for f in found] == marked(Inner)


def test_functions_and_lambdas_are_followed():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.run = lambda v: v * (1 if v.max() > 0 else 2)

        def forward(self, x):
            return self.run(helper(x))

    rules = [rule for rule, _ in suspicions(Calls())]
    assert rules == ["control-flow/branch-on-value", "control-flow/branch-on-value"]


def test_module_path_is_given():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Identity(), Inner())
            self.head = Inner()

        def forward(self, x):
            return self.head(self.stem(x), True)

    (finding,) = check_source(Deep(), INPUTS)
    assert finding.module == "head"
    assert finding.file.endswith("test_source.py")


def test_recursion_in_the_users_code_ends():
    class Recursive(nn.Module):
        def forward(self, x):
            return self.again(x, 3)

        def again(self, x, depth):
            return x if depth == 0 else self.again(x + 1, depth - 1)

    assert suspicions(Recursive()) == []


def test_code_without_source_is_passed_over():
    scope = {"nn": nn}
    exec("class Hidden(nn.Module):\n  def forward(self, x):\n    return x if x.sum() > 0 else -x", scope)  # noqa: S102
    assert suspicions(scope["Hidden"]()) == []
