"""Which GPU a process uses, and processes that would share one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from fxpart.errors import FxpartError
from fxpart.runtime.host.gpus import check_distinct_gpus, local_device

JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def start(monkeypatch: pytest.MonkeyPatch, rank: int, visible: int) -> None:
    for name, value in {**JOB, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)


@pytest.mark.parametrize(("rank", "visible", "index"), [(0, 4, 0), (3, 4, 3), (3, 1, 0), (1, 2, 1)])
def test_a_rank_gets_its_gpu_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, rank: int, visible: int, index: int
) -> None:
    start(monkeypatch, rank, visible)
    assert local_device("cuda") == torch.device("cuda", index)
    assert local_device() == torch.device("cpu")


def test_too_few_visible_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, 3, 2)
    with pytest.raises(FxpartError, match="this process sees 2 GPUs") as caught:
        local_device("cuda")
    assert caught.value.code == "FXP602"


@pytest.mark.parametrize("same", [False, True])
def test_processes_that_share_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    start(monkeypatch, 0, 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(uuid="GPU-a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def exchange(message: bytes) -> list[bytes]:
        host, mine = json.loads(message)
        other = [host if same else host + 1, mine]  # another host may number its GPUs alike
        return [message, json.dumps(other).encode()]

    if not same:
        check_distinct_gpus(exchange)
        return
    with pytest.raises(FxpartError, match="the same GPU") as caught:
        check_distinct_gpus(exchange)
    assert caught.value.code == "FXP602" and caught.value.problems[0].where == "ranks 0, 1"
