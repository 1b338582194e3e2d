"""The weight version that each computation reads, derived from the order of actions.

An asynchronous pipeline updates a stage's weights after the backwards of each minibatch, without
flushes, so that forwards read stale weights. The staleness is a property of the schedule alone,
because the order of forwards and backwards on each stage is fixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fxpart.errors import error
from fxpart.schedule.weight_modes import Horizon, WeightMode

_KNOWN = 1024  # cached results


@dataclass(frozen=True, slots=True)
class WeightRead:
    """The weights that one microbatch reads on one stage; versions are numbers of updates.

    version: the updates in the weights that its forward starts from. forward, backward: the updates
    applied on the stage when each of the two runs (u_f, u_b). look_forward, look_backward: by how
    many updates ahead each predicts the weights.
    """

    version: int
    forward: int
    backward: int
    look_forward: int
    look_backward: int

    @property
    def staleness(self) -> int:
        """Return the number of updates between forward and backward."""
        return self.backward - self.forward


@dataclass(frozen=True)
class WeightVersionCounters:
    """Version counters of an asynchronous pipeline that starts empty.

    ahead: per stage the forwards that it runs before its first backward (in a chain of K stages K -
    k; one more than its warm-up). every: microbatches of a minibatch, after whose last backward a
    stage updates its weights. start: updates applied before the first microbatch. Microbatches are
    numbered from 0. Source: the table in section 1 of the notes on weight versions: with t = i + 1,
    u_f = floor(max(0, t - (K - k)) / a) and u_b = floor((t - 1) / a).
    """

    ahead: tuple[int, ...]
    every: int
    start: int = 0
    _known: dict[tuple[int, int, int], tuple[WeightMode, WeightRead]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def forward(self, stage: int, microbatch: int) -> int:
        """Return the updates applied on the stage when the microbatch's forward runs."""
        return self.start + max(0, microbatch + 1 - self.ahead[stage]) // self.every

    def backward(self, stage: int, microbatch: int) -> int:
        """Return the updates applied on the stage when the microbatch's backward runs."""
        return self.start + microbatch // self.every

    def staleness(self, stage: int, microbatch: int) -> int:
        """Return the updates applied between a microbatch's forward and its backward."""
        return self.backward(stage, microbatch) - self.forward(stage, microbatch)

    def read(self, mode: WeightMode, stage: int, microbatch: int) -> WeightRead:
        """Return which weights the microbatch reads on the stage."""
        # Cached, since a running stage requests the same read several times between computations.
        key = id(mode), stage, microbatch
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[key] = mode, self._read(mode, stage, microbatch)
        return found[1]

    def _read(self, mode: WeightMode, stage: int, microbatch: int) -> WeightRead:
        first = microbatch - microbatch % self.every
        # no update is missing; predict as far ahead as in a full asynchronous pipeline
        if mode.flush:
            steady = microbatch + max(self.ahead) * self.every
            now = self.backward(stage, microbatch)
            ahead, back = self._looks(mode, stage, steady)
            return WeightRead(now, now, now, ahead, back)
        applied = self.forward(stage, microbatch)
        version = {
            "applied": applied,
            "first stage": self.forward(self.deepest, microbatch),
            "delayed": self._delayed(stage, microbatch),
            "first microbatch": self.forward(stage, first),
        }[mode.base]
        at = first if mode.base == "first microbatch" else microbatch
        return WeightRead(
            version, applied, self.backward(stage, microbatch), *self._looks(mode, stage, at)
        )

    def _delayed(self, stage: int, microbatch: int) -> int:
        """Return one update less than those of earlier minibatches; with one stage there is no
        delay."""
        now = self.backward(stage, microbatch)
        return now if max(self.ahead) == 1 else max(self.start, now - 1)

    def _looks(self, mode: WeightMode, stage: int, microbatch: int) -> tuple[int, int]:
        """Return by how many updates ahead its forward and its backward predict."""
        behind = self.staleness(stage, microbatch)
        most = self.staleness(self.deepest, microbatch)
        return (
            _look(mode.look_forward, behind, most, forward=True),
            _look(mode.look_backward, behind, most, forward=False),
        )

    def gap(self, stage: int) -> int:
        """Return the most updates between a microbatch's forward and backward: ceil((K - 1 - k) /
        a).

        With one microbatch per update this is the staleness of each once the pipeline is full, K -
        1 - k.
        """
        return -(-(self.ahead[stage] - 1) // self.every)

    def mean_delay(self, mode: WeightMode) -> float:
        """Return the updates that a computation misses, on average over stages and microbatches.

        In a full pipeline; predictions are not subtracted. In a chain of K stages whose forwards
        read the newest weights, (K - 1) / (2 a).
        """
        if mode.flush:
            return 0.0
        stages = range(len(self.ahead))
        if mode.base == "applied":
            missed = [(self.ahead[stage] - 1) / self.every for stage in stages]
        elif mode.base == "first stage":
            missed = [(max(self.ahead) - 1) / self.every for stage in stages]
        elif mode.base == "delayed":
            missed = [float(max(self.ahead) > 1) for stage in stages]
        else:
            missed = [float(self.gap(stage)) for stage in stages]
        return math.fsum(missed) / len(missed)

    def period(self) -> range:
        """Return the microbatches of one minibatch, late enough for the reads to be periodic.

        By then the pipeline is full and delayed updates have been applied.
        """
        first = (-(-max(self.ahead) // self.every) + 2) * self.every
        return range(first, first + self.every)

    def check(self, mode: WeightMode) -> None:
        """Raise FXP109 if the mode does not support this number of microbatches per update.

        A double buffer stores the weights of two updates, so no microbatch may miss a second one:
        the microbatches per update must be at least those in flight (PipeDream-2BW, section 3.1).
        """
        most = max(self.ahead)
        if mode.base == "delayed" and not mode.flush and self.every < most:
            raise error(
                "FXP109",
                where=f"weights={mode.name}",
                why=f"With {self.every} microbatches per update and {most} in flight on stage "
                f"{self.deepest}, a forward could miss two updates; there are two buffers.",
                fix=f"Use {most} microbatches or more, fewer stages, or weights=stash.",
            )

    @property
    def lag(self) -> int:
        """Return after how many minibatches a report of the last stage is known everywhere.

        No rank has to wait for it: a rank is ahead of the last stage by at most its warm-up, and
        one more minibatch hides the latency of the message. 0 with one stage.
        """
        most = max(self.ahead) - 1
        return -(-most // self.every) + 1 if most else 0

    @property
    def deepest(self) -> int:
        """Return the stage that runs furthest ahead: the first with the most forwards in flight."""
        return max(range(len(self.ahead)), key=lambda stage: (self.ahead[stage], -stage))


def _look(horizon: Horizon, behind: int, most: int, *, forward: bool) -> int:
    """Return the updates to predict ahead; in a chain with one microbatch per update: K - 1 - k."""
    if horizon == "none":
        return 0
    if horizon == "staleness":
        return behind if forward else 0
    if horizon == "depth":
        return most
    half = (most - behind) // 2  # floor(k / 2)
    return behind + half if forward else half


def count_chain_warmup(stages: int) -> tuple[int, ...]:
    """Return the forwards before the first backward in a chain of stages: K - k."""
    return tuple(range(stages, 0, -1))
