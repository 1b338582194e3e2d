"""What a run of the emulator gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fxpart.errors import error

if TYPE_CHECKING:
    import torch

SYNC = "sync"  # another name of the mode "flush"


@dataclass(frozen=True)
class EmulationResult:
    """One run of a model under one weight mode.

    weights: the mode's name, as it was asked for. stages, microbatches: of the pipeline; a
    minibatch of so many microbatches makes an update. losses: of each update's minibatch, by the
    weights that its forwards read. evaluations: (updates, value) where the run was evaluated.
    staleness: per stage the most updates that are applied between a microbatch's forward and its
    backward, in a full pipeline. copies: per stage the most sets of weights that there were at
    once, the parameters among them. rho: per stage the mean of |W' - W| / |W'' - W| with W' the
    predicted weights of a forward, W'' those that it would have read without prediction, and W
    those of its backward; above 1 prediction is worse than none. None where nothing was predicted
    or measured. diverged: the update whose loss was the first that is no number, where the run
    ended; None where all are. seconds: of the run. state_dict: parameters and buffers at the end by
    name, whole.
    """

    weights: str
    stages: int
    microbatches: int
    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, float], ...]
    staleness: tuple[int, ...]
    copies: tuple[int, ...]
    rho: tuple[float | None, ...]
    diverged: int | None
    seconds: float
    state_dict: Mapping[str, torch.Tensor] = field(repr=False, compare=False)

    def final(self, part: float = 0.1) -> float:
        """The mean loss of the last part of the updates; infinite where the run diverged."""
        if not 0 < part <= 1:
            raise error(
                "FXP109", where=f"final({part})", why="it is not a part of a run", fix="0.1"
            )
        if self.diverged is not None or not self.losses:
            return math.inf
        return fmean(self.losses[-max(1, round(part * len(self.losses))) :])

    def to_dict(self) -> dict[str, Any]:
        """All but the tensors, as plain data for JSON: what is no finite number is None."""
        return {
            "weights": self.weights,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "updates": len(self.losses),
            "losses": [_finite(loss) for loss in self.losses],
            "evaluations": [[update, _finite(value)] for update, value in self.evaluations],
            "final_loss": _finite(self.final()),
            "staleness": list(self.staleness),
            "copies": list(self.copies),
            "rho": [None if rho is None else _finite(rho) for rho in self.rho],
            "diverged": self.diverged,
            "seconds": self.seconds,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
