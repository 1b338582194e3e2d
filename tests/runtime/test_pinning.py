"""Which cores each rank gets, on machines that are made up, and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Pool

from fxpart.errors import FxpartError
from fxpart.runtime.host.cpu_affinity import (
    LogicalCpu,
    count_physical_cores,
    pin_process,
    read_cpu_topology,
    split_cores,
)

SMT = [LogicalCpu(cpu // 4 % 2, cpu % 8, cpu) for cpu in range(16)]  # cpu 8 is the twin of cpu 0


def test_hyperthreads_stay_with_their_core() -> None:
    found = split_cores(SMT, 4)
    assert found == ((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15))
    assert [count_physical_cores(share, SMT) for share in found] == [2, 2, 2, 2]


def test_shares_lie_within_a_node() -> None:
    """Three ranks on two nodes of four cores: one core of each share's worth is left over."""
    found = split_cores([LogicalCpu(cpu // 4, cpu, cpu) for cpu in range(8)], 3)
    assert found == ((0, 1), (2, 3), (4, 5))


def test_without_room_in_nodes_cores_are_dealt_in_a_row() -> None:
    found = split_cores([LogicalCpu(cpu // 3, cpu, cpu) for cpu in range(6)], 3)
    assert found == ((0, 1), (2, 3), (4, 5))


def test_fewer_cores_than_ranks() -> None:
    assert split_cores([LogicalCpu(0, 0, 0), LogicalCpu(0, 0, 1)], 2) == (
        (0,),
        (1,),
    )  # two threads of one core
    assert split_cores([LogicalCpu(0, 0, 0)], 2) == ()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=24),
    st.integers(1, 8),
)
def test_equal_and_disjoint(places: list[tuple[int, int]], ranks: int) -> None:
    cores = [LogicalCpu(node, physical, cpu) for cpu, (node, physical) in enumerate(places)]
    found = split_cores(cores, ranks)
    flat = [cpu for share in found for cpu in share]
    assert len(flat) == len(set(flat)) and set(flat) <= set(range(len(cores)))
    assert len(found) in (0, ranks)
    assert bool(found) == (len(cores) >= ranks)
    assert (
        len({count_physical_cores(share, cores) for share in found}) <= 1
        or len(set(places)) < ranks
    )


def test_what_sys_says(tmp_path: Path) -> None:
    for cpu, (node, siblings) in enumerate([(0, "0,2"), (1, "1,3"), (0, "0,2"), (1, "1,3")]):
        folder = tmp_path / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    assert read_cpu_topology((0, 1, 2, 3), tmp_path) == (
        LogicalCpu(0, 0, 0), LogicalCpu(1, 1, 1), LogicalCpu(0, 0, 2), LogicalCpu(1, 1, 3)
    )  # fmt: skip
    assert read_cpu_topology((5,), tmp_path) == (LogicalCpu(0, 5, 5),)


def test_nothing_is_done_where_nothing_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FxpartError, match="FXP109"):
        pin_process("yes", 0, 2)
    assert "one rank" in pin_process(True, 0, 1).why
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert "cannot bind" in pin_process(True, 0, 2).why


def _pinned() -> tuple[list[int], int, list[int], int]:
    import torch.distributed as dist

    before, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    found = pin_process(True, dist.get_rank(), dist.get_world_size())
    during, count = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    assert sorted(found.cpus) == during and not found.why
    found.restore()
    assert sorted(os.sched_getaffinity(0)) == before and torch.get_num_threads() == threads
    return during, count, before, threads


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one core"
)
def test_ranks_on_cores_of_their_own(pool: Pool) -> None:
    (mine, one, before, _), (theirs, two, _, _) = pool.run(_pinned, ranks=2)
    assert not set(mine) & set(theirs) and set(mine) | set(theirs) <= set(before)
    assert one == two >= 1
