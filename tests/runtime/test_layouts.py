"""The order in memory of what crosses stages: every bit is that of one rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

from fxpart.runtime.executor.dim_order import (
    get_dim_order,
    has_several_orders,
    is_contiguous_order,
    pack_to_order,
    unpack_from_order,
)
from tests.support.plain_training import batches_of, difference


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_tensors_arrive_with_their_strides(dims: int) -> None:
    for order in permutations(range(dims)):
        tensor = torch.randn(2, 3, 4, 5)[(0,) * (4 - dims)].permute(order)
        found = get_dim_order(tensor)
        sent = pack_to_order(tensor, found)
        assert sent.is_contiguous() and sent.shape == tensor.shape
        assert sent.data_ptr() == tensor.data_ptr()
        arrived = unpack_from_order(sent.clone(), found)
        assert arrived.stride() == tensor.stride() and torch.equal(arrived, tensor)


def test_another_order_than_that_of_the_link_is_copied() -> None:
    tensor = torch.randn(2, 3, 4).permute(2, 0, 1)
    for order in ((0, 1, 2), (2, 1, 0)):
        assert torch.equal(unpack_from_order(pack_to_order(tensor, order), order), tensor)
    expanded = torch.randn(3, 1).expand(3, 4)
    order = get_dim_order(expanded)
    assert torch.equal(unpack_from_order(pack_to_order(expanded, order), order), expanded)
    assert is_contiguous_order((0, 1)) and not is_contiguous_order((1, 0))
    assert has_several_orders((2, 3)) and not has_several_orders((2,))


class Last(nn.Module):
    """A block whose linear layer has the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.deep = nn.LayerNorm(16), nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.wide = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.wide(self.deep(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class TimeFirst(nn.Module):
    """A layer that has the time first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.inner(x.transpose(0, 1)))).transpose(0, 1)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), Last(), Last(), Last(), nn.Flatten(), nn.Linear(256, 4)
    )


def times() -> nn.Module:
    layers = [TimeFirst() for _ in range(3)]
    return nn.Sequential(nn.Linear(16, 16), *layers, nn.Flatten(), nn.Linear(96, 4))


def channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3),
        nn.ReLU(), nn.Conv2d(16, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)


def volumes() -> nn.Module:
    model = nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.SiLU(), nn.Conv3d(8, 4, 3),
        nn.Flatten(2), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last_3d)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "images": (images, (4, 3, 16, 16), None),
    "images channels_last": (images, (4, 3, 16, 16), torch.channels_last),
    "times": (times, (4, 6, 16), None),
    "channels_last": (channels_last, (4, 3, 12, 12), None),
    "channels_last twice": (channels_last, (4, 3, 12, 12), torch.channels_last),
    "one row": (channels_last, (1, 3, 12, 12), torch.channels_last),
    "volumes": (volumes, (2, 2, 4, 4, 4), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_alone_change_no_bit(name: str, stages: int) -> None:
    build, shape, form = MODELS[name]
    batches = batches_of(shape, (shape[0], 4))
    if form is not None:
        batches = [(x.to(memory_format=form), y) for x, y in batches]
    constraints = {"mesh": "none", "stages": stages}
    assert difference(build, batches, devices=stages, constraints=constraints) == 0.0
