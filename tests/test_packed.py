"""Packed weights: the same products, and a model that is given back as it was."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from cbasync import packed
from cbasync.attention import borrow, give_back
from cbasync.packed import PackedLinears
from cbasync.random_models import tiny_model

pytestmark = pytest.mark.skipif(
    platform.machine() not in packed._MACHINES
    or not torch.backends.mkldnn.is_available(),
    reason="nothing is packed on this machine",
)


def small_net(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (1, 70, 24)])
@torch.no_grad()
def test_packed_products_are_the_same_but_for_rounding(
    bias: bool, shape: tuple[int, ...]
) -> None:
    net = small_net(bias=bias)
    x = torch.randn(shape)
    own = net(x)
    assert len(PackedLinears(net)) == 2
    torch.testing.assert_close(net(x), own, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_packed_weights_are_a_copy_made_at_the_start() -> None:
    net, x = small_net(), torch.randn(2, 24)
    own = net(x)
    PackedLinears(net)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            parameter.zero_()
    torch.testing.assert_close(net(x), own, rtol=1e-5, atol=1e-6)


def test_undone_nothing_is_left_of_it() -> None:
    net = small_net()
    before = [dict(vars(layer)) for layer in net.modules()]
    both = PackedLinears(net)
    both.undo()
    assert [dict(vars(layer)) for layer in net.modules()] == before
    assert len(both) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    assert len(PackedLinears(small_net().to(dtype))) == 0


def test_too_large_a_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    net = small_net()
    size = sum(p.nbytes for p in net.parameters() if p.dim() > 1)
    monkeypatch.setattr(packed, "_MOST_BYTES", size - 1)
    assert len(PackedLinears(net)) == 0
    monkeypatch.setattr(packed, "_MOST_BYTES", size)
    assert len(PackedLinears(net)) == 2


def test_layers_of_another_kind_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    net = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    assert len(PackedLinears(net)) == 1
    assert "forward" not in vars(net[0])


def packed_layers(model: Any) -> int:
    return sum("forward" in vars(module) for module in model.modules())


def test_the_last_engine_gives_the_model_back_unpacked() -> None:
    model: LlamaForCausalLM = tiny_model().float()
    borrow(model)
    borrow(model)
    assert packed_layers(model) > 0
    give_back(model)
    assert packed_layers(model) > 0
    give_back(model)
    assert packed_layers(model) == 0
    borrow(model, pack=False)
    assert packed_layers(model) == 0
    give_back(model)
