"""Unequal devices in a plan: their order is chosen with the cuts, and it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fxpart.costmodels import find
from torch import nn

import fxpart
from fxpart.api import Program
from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.pricing.device_groups import group_devices
from fxpart.pricing.device_order import device_links


def device(k: int, speed: float = 1e8, memory: int = 1 << 33) -> Device:
    return Device(
        name=f"h/cpu:{k}", kind="cpu", model="x", host="h", memory=memory,
        flops={"float32": speed}, bandwidth=1e10,
    )  # fmt: skip


def cluster(devices: list[Device], fast: set[tuple[int, int]]) -> Cluster:
    """Devices with a fast link between these pairs alone."""
    links = [
        Link(
            source=a.name, target=b.name, latency=1e-5,
            bandwidth=1e10 if (i, j) in fast or (j, i) in fast else 1e6,
        )
        for i, a in enumerate(devices) for j, b in enumerate(devices) if i != j
    ]  # fmt: skip
    return Cluster(name="few", devices=tuple(devices), links=tuple(links)).validate()


def planned(on: Cluster, **constraints: Any) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    return fxpart.compile(
        model, on, example_inputs=(torch.randn(64, 64), torch.randn(64, 64)),
        loss=nn.functional.mse_loss, microbatches=8, constraints=constraints,
    )  # fmt: skip


@pytest.mark.slow
def test_a_slow_link_is_left_out() -> None:
    """0 and 1 stand first, but only 0 and 2 are close."""
    found = planned(cluster([device(k) for k in range(3)], {(0, 2)}), stages=2)
    assert found.plan.devices == (0, 2)
    assert [stage.ranks for stage in found.plan.stages] in ([(0,), (1,)], [(1,), (0,)])
    assert found.verify(steps=1).passed


@pytest.mark.slow
def test_a_slow_device_is_left_out() -> None:
    slow = [device(0, 1e6), device(1), device(2)]
    found = planned(cluster(slow, {(0, 1), (1, 2), (0, 2)}), stages=2)
    assert found.plan.devices == (1, 2)


@pytest.mark.slow
def test_groups_change_places_whole() -> None:
    """On a mesh of two, pairs of consecutive devices: the slow pair is not used."""
    devices = [device(0, 1e6), device(1, 1e6), *(device(k) for k in range(2, 6))]
    every = {(a, b) for a in range(6) for b in range(6)}
    found = planned(cluster(devices, every), mesh="dp=2", stages=2)
    assert found.plan.devices == (2, 3, 4, 5)
    assert [stage.ranks for stage in found.plan.stages] == [(0, 1), (2, 3)]


def test_links_between_groups_are_their_worst() -> None:
    on = cluster([device(k) for k in range(4)], {(0, 2), (0, 3), (1, 2)})
    model = find("roofline")
    one = device_links(on, model)
    assert one.inverse[0][1] == pytest.approx(1e-6) and one.inverse[0][0] == 0.0
    assert one.inverse[0][2] == pytest.approx(1e-10)
    pairs = device_links(group_devices(on, 2), model)
    assert pairs.inverse[0][1] == pytest.approx(1e-6)  # 1 and 3 are far
