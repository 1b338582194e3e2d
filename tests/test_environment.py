"""What torchrun says of this process."""

from __future__ import annotations

import pytest

from fxpart.environment import launch
from fxpart.errors import FxpartError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def started(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in {**TORCHRUN, **changes}.items():
        monkeypatch.setenv(name, value)


def test_nothing_outside_of_torchrun() -> None:
    assert launch() is None


def test_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch)
    found = launch()
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.local_world) == (3, 4, 1, 2)
    assert (found.address, found.port, found.restarts) == ("host", 29500, 1)
    assert not found.one_machine


def test_started_by_hand_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name)
    found = launch()
    assert found is not None and found.one_machine and found.local_rank == 3


def test_every_fault_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, RANK="x", LOCAL_RANK="-1")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(FxpartError) as caught:
        launch()
    assert {p.where for p in caught.value.problems} == {
        "environment variable RANK",
        "environment variable LOCAL_RANK",
        "environment variable MASTER_ADDR",
    }


def test_a_rank_beyond_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, RANK="4")
    with pytest.raises(FxpartError, match="not below WORLD_SIZE=4"):
        launch()
