"""Result of an emulator run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fxpart.errors import error

if TYPE_CHECKING:
    import torch

SYNC = "sync"  # alias of the mode "flush"


@dataclass(frozen=True)
class EmulationResult:
    """One run of a model with one weight mode.

    weights: name of the mode as given. stages, microbatches: of the pipeline; a minibatch has so
    many microbatches and makes an update. losses: of each update's minibatch, by the weights that
    its forwards read. evaluations: (updates, value) of evaluations. staleness: per stage, most
    updates between a microbatch's forward and backward in a full pipeline. copies: per stage, most
    weight versions in memory at once, including the parameters. rho: per stage, mean of |W' - W| /
    |W'' - W| with W' the predicted weights of a forward, W'' the weights without prediction, and W
    the weights of its backward; above 1, prediction is worse than none. None if nothing was
    predicted or measured. diverged: update with the first non-finite loss, where the run ended;
    None if all are finite. seconds: of the run. seed: of random ops. optimizer, options: its name
    in lowercase, and its options at the start. state_dict: final parameters and buffers by name,
    unsharded.
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
    seed: int
    optimizer: str
    options: Mapping[str, bool | float | tuple[float, ...]]
    state_dict: Mapping[str, torch.Tensor] = field(repr=False, compare=False)

    def final(self, part: float = 0.1) -> float:
        """Return the mean loss of the last part of the updates; infinite if the run diverged."""
        if not 0 < part <= 1:
            raise error(
                "FXP109", where=f"final({part})", why="part must be in (0, 1]", fix="use 0.1"
            )
        if self.diverged is not None or not self.losses:
            return math.inf
        return fmean(self.losses[-max(1, round(part * len(self.losses))) :])

    def to_dict(self) -> dict[str, Any]:
        """Return all but the tensors as plain data for JSON, with None for non-finite numbers."""
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
            "seed": self.seed,
            "optimizer": self.optimizer,
            "options": dict(self.options),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
