"""Training under NCCL's ordering rules: it ends, with the bits of one process.

Ranks are threads over an emulated transport (tests/support/nccl_rules.py), which raises where all
wait. A few cases use processes and gloo under the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import lane_programs
import nccl_programs as programs
import pytest
import stage_degree_programs
from built_schedules import BUILDERS
from nccl_processes import under_rules
from nccl_rules import MODES, DeadlockError, SharedChannels, run_ranks
from queued_programs import plan
from ranks import Pool

from fxpart.program.edges import find_stage_edges
from fxpart.runtime import InProcess
from fxpart.runtime.asynchronous.stage_channels import describe_transfers
from fxpart.runtime.asynchronous.stage_graph import AsyncStageGraph
from fxpart.runtime.engine import resolve_schedule
from fxpart.runtime.gradients.tied_parameters import find_tied_transfers
from fxpart.runtime.transport.interface import BACKWARD, FORWARD, STATE, Route
from fxpart.schedule.asynchronous_channels import count_microbatches, list_asynchronous_operations
from fxpart.schedule.channels import Operation, Wait, list_operations
from fxpart.schedule.dependence import Dependence
from fxpart.schedule.weight_modes import MODES as WEIGHT_MODES

TRAINING = [name for name, b in BUILDERS.items() if name != "forward" and b.flushes]


@cache
def expected(schedule: str, ranks: int, microbatches: int) -> Any:
    return programs.train(InProcess(ranks), schedule, ranks, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule(schedule: str, ranks: int, mode: str) -> None:
    """Skip connections, tied parameters, and an evaluation after each step."""
    found = run_ranks(ranks, mode, lambda t: programs.train(t, schedule, ranks, 6))
    assert found == [expected(schedule, ranks, 6)] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("microbatches", [3, 16])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_on_eight_ranks(schedule: str, microbatches: int, mode: str) -> None:
    found = run_ranks(8, mode, lambda t: programs.train(t, schedule, 8, microbatches))
    assert found == [expected(schedule, 8, microbatches)] * 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [2, 4])
def test_asynchronous(stages: int, mode: str) -> None:
    wanted = programs.train_asynchronously(InProcess(stages), stages, "stash")
    found = run_ranks(stages, mode, lambda t: programs.train_asynchronously(t, stages, "stash"))
    assert found == [wanted] * stages


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weights", [n for n, m in WEIGHT_MODES.items() if not m.discount])
def test_every_asynchronous_mode(weights: str, mode: str) -> None:
    if WEIGHT_MODES[weights].name == "flush":
        pytest.skip("a synchronous mode")
    wanted = programs.train_asynchronously(InProcess(4), 4, weights)
    found = run_ranks(4, mode, lambda t: programs.train_asynchronously(t, 4, weights))
    assert found == [wanted] * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("counts", "schedule"), [((2, 1), "1f1b"), ((1, 3), "gpipe")])
def test_replicas(counts: tuple[int, ...], schedule: str, mode: str) -> None:
    ranks = sum(counts)
    wanted = programs.train_replicas(InProcess(ranks), counts, schedule)
    found = run_ranks(ranks, mode, lambda t: programs.train_replicas(t, counts, schedule))
    assert found == [found[0]] * ranks
    for name, values in wanted.items():  # In one process replicas are added in another order.
        assert found[0][name] == pytest.approx(values, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_stage_completes_its_transfers(mode: str) -> None:
    found = run_ranks(4, mode, lambda t: programs.fails(t, "1f1b", range(4), stage=2))
    assert found == [found[0]] * 4
    assert found[0].startswith("FXP504 rank 2, stage 2")


@pytest.mark.parametrize(
    ("schedule", "ranks", "mode"),
    [
        ("1f1b", 2, "lazy"),
        ("1f1b", 4, "group"),
        ("zb-v", 2, "prepared"),
        ("interleaved", 2, "prepared"),
    ],
)
def test_a_group_for_each_direction_hangs(schedule: str, ranks: int, mode: str) -> None:
    """With receives posted early, as over gloo: the emulation finds what NCCL would do."""
    with pytest.raises(DeadlockError, match="waits for"):
        run_ranks(
            ranks, mode, lambda t: programs.train(t, schedule, ranks, 6),
            channels=SharedChannels, ahead=2,
        )  # fmt: skip


DIRECTIONS = {"forward": FORWARD, "backward": BACKWARD, "tied": STATE}


def routes(rank: int, operations: Sequence[Operation | Wait]) -> list[tuple[Route, bool]]:
    found = []
    for each in operations:
        if isinstance(each, Operation):
            source, target, direction = each.channel  # type: ignore[misc]
            assert rank == (source if each.is_send else target)
            found.append((Route(source, target, DIRECTIONS[direction]), each.is_send))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("schedule", TRAINING)
def test_the_proof_is_about_what_the_runtime_does(schedule: str, ahead: int) -> None:
    """The verifier's operations are those that each rank issues, in that order."""
    found = run_ranks(4, "prepared", lambda t: programs.issue(t, schedule, 4), ahead=ahead)
    seats = programs.placed(schedule, 4)
    spec = programs.chain(len(seats), skips=False).spec()
    made = resolve_schedule(schedule, spec, seats, 6)
    listed = list_operations(
        made, Dependence.of(made, find_stage_edges(spec)), tied=find_tied_transfers(spec),
        ahead=ahead,
    )  # fmt: skip
    for rank, (issued, operations) in enumerate(zip(found, listed, strict=True)):
        assert [(each.route, each.is_send) for each in issued] == routes(rank, operations)


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_proof_is_about_what_asynchronous_stages_do(ahead: int) -> None:
    layout = AsyncStageGraph.of(programs.chain(4, skips=False, tied=False).spec())
    transfers = describe_transfers(layout, range(4), early=ahead > 0)
    listed = list_asynchronous_operations(transfers)
    count = count_microbatches(transfers)
    found = run_ranks(
        4, "prepared", lambda t: programs.issue_asynchronously(t, 4, count), ahead=ahead
    )
    for rank, (issued, operations) in enumerate(zip(found, listed, strict=True)):
        assert [(each.route, each.is_send) for each in issued] == routes(rank, operations)


# -- processes over gloo ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks", "mode"), [("zb-v", 2, "lazy"), ("1f1b", 4, "group")])
def test_processes(schedule: str, ranks: int, mode: str, pool: Pool) -> None:
    args = ("nccl_programs", "train_on_ranks", (schedule, ranks, 6))
    found = pool.run(under_rules, mode, *args, ranks=ranks)
    assert found == [expected(schedule, ranks, 6)] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_in_processes(schedule: str, ranks: int, mode: str, pool: Pool) -> None:
    args = ("nccl_programs", "train_on_ranks", (schedule, ranks, 6))
    found = pool.run(under_rules, mode, *args, ranks=ranks)
    assert found == [expected(schedule, ranks, 6)] * ranks


@pytest.mark.slow
def test_asynchronous_processes(pool: Pool) -> None:
    wanted = programs.train_asynchronously(InProcess(2), 2, "stash")
    args = ("nccl_programs", "train_asynchronously_on_ranks", (2, "stash"))
    assert pool.run(under_rules, "lazy", *args, ranks=2) == [wanted] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options", "mode"),
    [
        ("dp=2", {"zero": 2}, "lazy"),
        ("tp=2", {}, "group"),
        ("dp=2", {"zero3": True}, "prepared"),
    ],
)
def test_meshes(mesh: str, options: dict[str, Any], mode: str, pool: Pool) -> None:
    """Two stages of two mesh ranks: collectives of each stage between the transfers."""
    wanted = pool.run(lane_programs.train, mesh, options, ranks=4)
    found = pool.run(under_rules, mode, "lane_programs", "train", (mesh, options), ranks=4)
    assert found == wanted


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_unequal_tensor_degrees(mode: str, pool: Pool) -> None:
    """One rank, then two: each value and gradient is sent once, between collectives."""
    wanted = stage_degree_programs.train("shared_mlp", "1")
    args = ("stage_degree_programs", "train", ("shared_mlp", "1|2"))
    for found in pool.run(under_rules, mode, *args, ranks=3, timeout=120):
        assert stage_degree_programs.difference(found, wanted) < 1e-9


@pytest.mark.slow
def test_queues(pool: Pool) -> None:
    args = ("nccl_programs", "train_from_queues", (plan((2, 1)).dumps(),))
    wanted = pool.run(programs.train_from_queues, *args[2], ranks=3)
    found = pool.run(under_rules, "lazy", *args, ranks=3)
    for losses, expected_losses in zip(found, wanted, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-6)
