"""What one rank runs: its stages and their schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fxpart.program.spec import ProgramSpec
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.action import Schedule


@dataclass(frozen=True)
class RankProgram:
    """The stages of one rank and mesh rank, and their schedule.

    modules: the rank's stage modules by stage index. schedule: lowered. device: of received
    tensors. receivers: returns the ranks to which a stage sends its messages for another stage;
    None: the rank of the schedule.
    """

    spec: ProgramSpec
    modules: Mapping[int, nn.Module]
    schedule: Schedule
    rank: int
    transport: Transport
    device: torch.device
    receivers: Callable[[int, int], tuple[int, ...]] | None = None

    def find_receivers(self, stage: int, target: int) -> tuple[int, ...]:
        """Return the ranks to which a stage of this rank sends its messages for another stage."""
        if self.receivers is None:
            return (self.schedule.stage_rank[target],)
        return self.receivers(stage, target)
