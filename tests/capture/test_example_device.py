"""Example tensors are copied to the device of the model."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpart.capture.flat_batch import flatten_batch, on_device_of


def test_examples_follow_a_model_on_one_device() -> None:
    with FakeTensorMode():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
        batch = {"x": torch.ones(2, 4), "more": [torch.ones(2), 3]}
        found = on_device_of(model, flatten_batch(batch))
    assert [t.device.type for t in found.tensors] == ["cuda", "cuda"]
    assert found.paths == flatten_batch(batch).paths


def test_nothing_is_copied_without_need() -> None:
    x = torch.ones(2, 4)
    for model in (nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), nn.Identity()):
        (same,) = on_device_of(model, flatten_batch((x,))).tensors
        assert same is x
