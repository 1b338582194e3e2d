"""Orders that torch's own schedules make, as CSV, run in fxpart's trainer with the same numbers."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from hand_stages import ADAMW, batch, language
from runtime_programs import bits, make

from fxpart.runtime import InProcess, Trainer
from fxpart.schedule.torch_csv import from_torch_csv


def csv(schedule: str, stages: int, ranks: int, microbatches: int, folder: Path) -> str:
    """What torch would write of its schedule; stages only have to say how many there are."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    like: Any = types.SimpleNamespace(
        num_stages=stages, group_size=ranks, group_rank=0, stage_index=0, is_last=False
    )
    made = getattr(schedules, schedule)([like] * (stages // ranks), microbatches)
    made._dump_csv(str(folder / "order.csv"), "compute_only")
    return (folder / "order.csv").read_text()


def trained(trainer: Trainer) -> tuple[list[float], Any]:
    losses = [float(trainer.step(batch(8, 5, seed))) for seed in range(2)]
    return losses, bits(trainer.state_dict())


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"),
    [
        # With a stage a rank this is 1F1B; what torch's Schedule1F1B shows as its order has
        # microbatches that there are not.
        ("ScheduleInterleaved1F1B", 2, 2),
        ("ScheduleInterleaved1F1B", 4, 2),
    ],
)
def test_torchs_orders_run(schedule: str, stages: int, ranks: int, tmp_path: Path) -> None:
    cut = (1, 1, 1, 1) if stages == 4 else (2, 2)
    order = from_torch_csv(csv(schedule, stages, ranks, 4, tmp_path), "torch")
    assert order.stage_rank == tuple(stage % ranks for stage in range(stages))
    hand = language(cut)
    placed = make(hand, InProcess(ranks), ranks=order.stage_rank, schedule=order, optimizer=ADAMW)
    own = make(language(cut), InProcess(stages), schedule="gpipe", optimizer=ADAMW)
    assert trained(placed) == trained(own)
