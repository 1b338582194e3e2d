"""What torchrun says of this process."""

from __future__ import annotations

import os

import pytest

from fxpart import environment
from fxpart.environment import read_launch
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
    assert read_launch() is None


def test_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch)
    found = read_launch()
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.local_world) == (3, 4, 1, 2)
    assert (found.address, found.port, found.restarts) == ("host", 29500, 1)
    assert not found.one_machine


def test_started_by_hand_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name)
    found = read_launch()
    assert found is not None and found.one_machine and found.local_rank == 3


def test_every_fault_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, RANK="x", LOCAL_RANK="-1")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(FxpartError) as caught:
        read_launch()
    assert {p.where for p in caught.value.problems} == {
        "environment variable RANK",
        "environment variable LOCAL_RANK",
        "environment variable MASTER_ADDR",
    }


def test_a_rank_beyond_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, RANK="4")
    with pytest.raises(FxpartError, match="not less than WORLD_SIZE=4"):
        read_launch()


def test_threads_of_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared anew whenever ranks are started, unless the user has said how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "_limited", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    found = []
    for ranks in (4, 3, 1, 24, 4):
        environment.limit_threads(ranks)
        found.append(os.environ["OMP_NUM_THREADS"])
    assert found == ["3", "4", "12", "1", "3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    environment.limit_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_threads_that_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(environment, "_limited", None)
    for ranks in (1, 2, 1):
        environment.limit_threads(ranks)
        assert os.environ["OMP_NUM_THREADS"] == "2"


def test_who_was_started_by_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once, and remembered: its own children are not the launcher's."""
    monkeypatch.setattr(environment, "_launched", False)
    assert environment.take_launcher_pid() is None and not environment.is_launched_by_fxpart()
    monkeypatch.setenv("FXPART_LAUNCHER", "17")
    assert environment.take_launcher_pid() == 17 and environment.is_launched_by_fxpart()
    assert environment.take_launcher_pid() is None and environment.is_launched_by_fxpart()
