"""What the evaluations of all kinds of choices share: time, peak memory of stages, violations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from fxpart.errors import error

if TYPE_CHECKING:
    from fxpart.solver.joint.problem import JointProblem
    from fxpart.solver.problem import PartitionProblem

Stage = TypeVar("Stage")


class StageMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak memory of a stage in bytes, by cause; the names are those of ``fxpart.plan.Memory``.

    activations: in_flight times the saved tensors of autograd, plus the largest workspace.
    transfers: each received value, and each sent one that is not saved anyway, per microbatch in
    flight (it is stored until the backward). copies: of weights besides the parameters, in an
    asynchronous pipeline.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    transfers: int
    copies: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all parts, in bytes."""
        return (
            self.weights + self.gradients + self.optimizer
            + self.activations + self.buffers + self.transfers + self.copies
        )  # fmt: skip


class StagePeakMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak memory of a stage on each of its devices, in bytes.

    workspace: already included in ``memory.activations``. updating: during the optimizer step,
    without microbatches in flight.
    """

    memory: StageMemory
    memory_limit: int
    in_flight: int
    workspace: int
    updating: int = 0

    @property
    def fits(self) -> bool:
        """Return whether the stage fits its device."""
        return self.needed <= self.memory_limit

    @property
    def needed(self) -> int:
        """Return the peak bytes: in the passes of a step, or in the update after them."""
        return max(self.memory.total, self.updating)


class ChoiceEvaluation(
    msgspec.Struct, Generic[Stage], frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A choice's time in seconds, its parts by stage, and its violations."""

    seconds: float
    stages: tuple[Stage, ...]
    faults: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """Return whether the choice fits every memory and satisfies every constraint."""
        return not self.faults


def list_forbidden(
    problem: PartitionProblem | JointProblem, stages: int, schedule: str
) -> list[str]:
    """Return a forbidden number of stages and a forbidden schedule, as text."""
    faults = []
    if not problem.min_stages <= stages <= problem.max_stages:
        faults.append(f"{stages} stages, allowed are {problem.min_stages} to {problem.max_stages}")
    if schedule not in problem.schedules:
        faults.append(f"schedule {schedule}, allowed are {', '.join(problem.schedules)}")
    return faults


def list_overfull(stages: Sequence[StagePeakMemory], names: Sequence[str]) -> list[str]:
    """Return stages that exceed the memory of their devices, as text; names: of the devices."""
    return [
        f"stage {k} needs {stage.needed} bytes, {name} has {stage.memory_limit}"
        for k, (stage, name) in enumerate(zip(stages, names, strict=False))
        if not stage.fits
    ]


def check_choice(why: str) -> None:
    """Raise FXP109 for a choice that does not belong to its problem; empty: it does."""
    if why:
        raise error(
            "FXP109", where="choice", why=why, fix="Use a choice that was made for this problem."
        )
