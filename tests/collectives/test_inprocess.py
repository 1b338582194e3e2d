"""Mesh ranks in threads: no failure leaves another mesh rank waiting."""

from __future__ import annotations

import time

import pytest
import torch

from fxpart import collectives as C
from fxpart.errors import FxpartError
from fxpart.sharding import Mesh

MESH = Mesh.parse("a=3")


def test_a_failure_reaches_all_lanes() -> None:
    seen: dict[int, BaseException] = {}

    def mesh_rank(comm: C.Communicator) -> None:
        comm.all_reduce(torch.ones(1), "a")
        if comm.mesh_rank == 1:
            raise ValueError("no more")
        try:
            comm.all_reduce(torch.ones(1), "a")
        except C.PeerLostError as cause:
            seen[comm.mesh_rank] = cause
            raise

    with pytest.raises(ValueError, match="no more"):
        C.InProcessHub(MESH, timeout=20).run(mesh_rank)
    assert sorted(seen) == [0, 2]
    assert "mesh rank 1" in str(seen[0]) and "no more" in str(seen[0])


def test_a_lane_that_ends_early_is_missed() -> None:
    def mesh_rank(comm: C.Communicator) -> None:
        if comm.mesh_rank:
            comm.all_gather(torch.ones(1), "a")

    with pytest.raises(C.PeerLostError, match="mesh rank 0 .*ended"):
        C.InProcessHub(MESH, timeout=20).run(mesh_rank)


def test_a_lane_may_end_before_the_others_have_their_result() -> None:
    def mesh_rank(comm: C.Communicator) -> float:
        handle = comm.start_all_reduce(torch.ones(2), "a")
        if comm.mesh_rank == 0:
            return 0.0  # it has given its part and wants no result
        time.sleep(0.05 * comm.mesh_rank)
        return handle.wait().sum().item()

    assert C.InProcessHub(MESH, timeout=20).run(mesh_rank) == [0.0, 6.0, 6.0]


@pytest.mark.slow
def test_a_wait_is_bounded() -> None:
    def mesh_rank(comm: C.Communicator) -> None:
        if comm.mesh_rank == 2:
            time.sleep(1.0)
        else:
            comm.all_reduce(torch.ones(1), "a")

    with pytest.raises(C.TransferTimeoutError) as caught:
        C.InProcessHub(MESH, timeout=0.2).run(mesh_rank)
    assert caught.value.seconds == 0.2 and "mesh ranks 2" in caught.value.detail


@pytest.mark.parametrize("wrong", ["kind", "shape"])
def test_lanes_that_disagree(wrong: str) -> None:
    def mesh_rank(comm: C.Communicator) -> None:
        if comm.mesh_rank == 0 and wrong == "kind":
            comm.all_gather(torch.ones(1), "a")
        else:
            comm.all_reduce(torch.ones(1 + comm.mesh_rank % 2), "a")

    with pytest.raises(FxpartError, match="disagree"):
        C.InProcessHub(MESH, timeout=20).run(mesh_rank)


def test_handles_may_be_waited_for_in_any_order() -> None:
    def mesh_rank(comm: C.Communicator) -> list[float]:
        handles = [comm.start_all_reduce(torch.tensor(float(k)), "a") for k in range(4)]
        order = handles if comm.mesh_rank else handles[::-1]
        return sorted(handle.wait().item() for handle in order)

    assert C.InProcessHub(MESH, timeout=20).run(mesh_rank) == [[0.0, 3.0, 6.0, 9.0]] * 3


def test_the_hub_can_be_used_again_and_keeps_the_mode() -> None:
    hub = C.InProcessHub(MESH, timeout=20)
    with pytest.raises(ZeroDivisionError):
        hub.run(lambda comm: 1 // comm.mesh_rank)
    with torch.no_grad():
        assert hub.run(lambda comm: torch.is_grad_enabled()) == [False] * 3
    sums = hub.run(lambda comm: comm.all_reduce(torch.tensor(comm.mesh_rank), "a").item())
    assert sums == [3, 3, 3]
