"""What copies hold for their queues, counted in a trainer, beside what a plan says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from queued_counted import Most
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.plan.prediction import PeakMemory, RankPrediction
from fxpart.planner.prediction.queue_memory import queued_row, sets_of_weights
from fxpart.schedule.action import list_group_stages

WIDE, ROWS, PARTS = 24, 8, 4


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(staleness: str, weights: str, **asked: Any) -> fxpart.Program:
    torch.manual_seed(0)
    wishes = {
        "granularity": "op",
        "stages": 2,
        "copies": "always",
        "ranks": 3,
        "staleness": staleness,
        **asked,
    }
    return fxpart.compile(
        Tower(), "local:3", example_inputs=batch(0), loss=nn.functional.mse_loss, mode="queue",
        microbatches=PARTS, optimizer="adamw", weights=weights, constraints=wishes,
    )  # fmt: skip


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDE, generator=draw), torch.randn(ROWS, WIDE, generator=draw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "weights"),
    [("0", "stash"), ("1", "stash"), ("2", "stash"), ("2", "naive"), ("2", "spectrain-v2"),
     ("2", "pipeoptim"), ("2,0", "stash")],
)  # fmt: skip
def test_no_copy_holds_more_than_the_plan_says(
    staleness: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(staleness, weights)
    plan = program.plan
    assert plan.replicas
    rows = {row.stage: row for row in plan.prediction.ranks}
    seen, largest = [], {"gradients": 0, "sets": 0}
    for seed in range(6):
        with monkeypatch.context() as patch:
            trainer = program.trainer(torch.optim.AdamW)
            seen.append(Most(trainer, batch, seed, patch).of)
            trainer.close()
    for stage, row in rows.items():
        s = plan.staleness[stage]
        copies = next(
            (len(list_group_stages(g)) for g in plan.replicas if stage in list_group_stages(g)), 1
        )
        whole = row.memory.weights  # the gradients of a minibatch are as large
        assert row.memory.gradients == (s + 1) * whole and row.staleness == s
        assert row.memory.copies == sets_of_weights(plan.weights, s) * whole
        most = {name: max(of[stage][name] for of in seen) for name in seen[0][stage]}
        assert whole <= most["gradients"] <= row.memory.gradients
        assert most["summing"] <= row.memory.gradients + (copies * whole if copies > 1 else 0)
        assert most["sets"] * whole <= row.memory.copies
        assert most["flying"] <= row.in_flight + 1
        values = row.memory.transfers * PARTS // row.taken(PARTS)  # it may take all of them
        assert 0 < most["sent"] <= values
        largest["gradients"] = max(largest["gradients"], most["gradients"] // whole)
        largest["sets"] = max(largest["sets"], most["sets"])
    if staleness == "1":  # the bounds are met; those of more updates take rarer moments
        assert largest == {"gradients": 2, "sets": 1}


def planned(memory: int, staleness: str = "", **asked: Any) -> fxpart.Plan:
    """On four devices with so many bytes; without staleness for copies that take turns."""
    torch.manual_seed(0)
    devices = _with_memory(fxpart.Cluster.parse("local:4"), memory)
    return fxpart.compile(
        Tower(), devices, example_inputs=batch(0), loss=nn.functional.mse_loss,
        mode="queue" if staleness else "sync", microbatches=PARTS, optimizer="adamw",
        constraints={
            "granularity": "op", "mesh": "none", **({"staleness": staleness} if staleness else {}),
            **asked,
        },
    ).plan  # fmt: skip


@pytest.mark.slow
def test_stages_leave_room_for_what_queues_keep() -> None:
    """The less memory the more stages; what is proven is proven of all that memory."""
    sizes = (10**9, 80_000, 60_000, 40_000)
    plans = [planned(memory, "2") for memory in sizes]
    assert [len(plan.stages) for plan in plans] == [1, 2, 3, 4]
    for memory, plan in zip(sizes, plans, strict=True):
        assert not plan.problems()
        assert all(row.tensors <= row.memory_limit for row in plan.prediction.ranks)
        bound = planned(memory).certificate.lower_bound
        assert plan.certificate.lower_bound == pytest.approx(bound)
        told = "reserved for queues" in plan.provenance.get("queues", "")
        assert told == (plan != plans[0])
    assert plans[0].certificate.status == "optimal"
    # Without what may be missed fewer stages are enough.
    assert len(planned(60_000, "0").stages) == 1


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_refused() -> None:
    fixed = {"stages": 2, "ranks": 3, "copies": "always"}
    needed = [
        max(row.tensors for row in planned(10**9, staleness, **fixed).prediction.ranks)
        for staleness in "012"
    ]
    assert needed == sorted(set(needed))
    limit = round((needed[0] + needed[1]) / 2 / 0.92)
    assert not planned(limit, "0", **fixed).problems()
    with pytest.raises(FxpartError) as refused:
        planned(limit, "2", **fixed)
    problem = refused.value.problems[0]
    assert problem.code == "FXP204" and "staleness=2" in problem.where
    assert "of weights (stash)" in problem.why and "smaller staleness" in problem.fix


def _with_memory(cluster: Any, memory: int) -> Any:
    from msgspec.structs import replace

    devices = tuple(replace(device, memory=memory) for device in cluster.devices)
    return replace(cluster, devices=devices)


def test_numbers_by_hand() -> None:
    row = RankPrediction(
        ranks=(0,), stage=0, forward_seconds=1.0, backward_seconds=2.0, transfer_seconds=0.0,
        sync_seconds=0.0, optimizer_seconds=0.0,
        memory=PeakMemory(
            weights=100, gradients=100, optimizer=200, activations=3 * 40 + 10, buffers=5,
            transfers=3 * 8,
        ),
        memory_limit=10_000, in_flight=3, workspace=10, update=450,
    )  # fmt: skip
    found = queued_row(row, 2, 2, "stash", taken=4, alone=False)
    assert found.memory == PeakMemory(
        weights=100, gradients=300, optimizer=200, activations=4 * 40 + 10, buffers=5,
        transfers=4 * 8 + 3 * 4 * 8, copies=200, sums=200,
    )  # fmt: skip
    # Other minibatches' parts, old weights and what is sent, what is in flight; then the update
    # with the sum beside the own part, or both parts and the sum while they are summed.
    assert found.update == (2 * 100 + 200 + 96 + 4 * 48) + max(450 + 100, 100 + 100 + 200 + 5 + 200)
    alone = queued_row(row, 0, 1, "flush", taken=4, alone=True)
    assert alone.memory.total - row.memory.total == 4 * 8 and alone.update == 450 + 32
    assert [sets_of_weights(w, 2) for w in ("stash", "naive", "spectrain-v2", "pipeoptim")] == [
        2, 0, 5, 2,
    ]  # fmt: skip
