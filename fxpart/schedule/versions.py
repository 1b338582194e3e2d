"""Which weight version each computation reads: counted from the order of actions, before any run.

An asynchronous pipeline updates a stage's weights after the backwards of each minibatch and never
drains, so that forwards read weights that lack updates. How many is a property of the schedule
alone: on each stage the order of forwards and backwards is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpart.errors import error
from fxpart.schedule.weight_modes import Horizon, WeightMode

_KNOWN = 1024  # answers that are kept


@dataclass(frozen=True, slots=True)
class WeightRead:
    """What one microbatch reads on one stage; versions are numbers of updates since the start.

    version: the updates in the weights that its forward starts from. forward, backward: the updates
    that have been applied on the stage when each of the two runs (u_f, u_b). look_forward,
    look_backward: by how many updates each looks ahead.
    """

    version: int
    forward: int
    backward: int
    look_forward: int
    look_backward: int

    @property
    def staleness(self) -> int:
        """Updates between forward and backward."""
        return self.backward - self.forward


@dataclass(frozen=True)
class WeightVersionCounters:
    """The version counters of a stream of microbatches that begins with empty stages.

    ahead: per stage the forwards that it runs before its first backward (in a chain of K stages
    K - k; one more than its warm-up). every: microbatches of a minibatch, after whose last backward
    a stage updates its weights. start: updates applied before the stream. Microbatches count from 0
    within the stream. Source: the table in section 1 of the notes on weight versions: with
    t = i + 1, u_f = floor(max(0, t - (K - k)) / a) and u_b = floor((t - 1) / a).
    """

    ahead: tuple[int, ...]
    every: int
    start: int = 0
    _known: dict[tuple[int, int, int], tuple[WeightMode, WeightRead]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def forward(self, stage: int, microbatch: int) -> int:
        """Updates applied on the stage when the microbatch's forward runs."""
        return self.start + max(0, microbatch + 1 - self.ahead[stage]) // self.every

    def backward(self, stage: int, microbatch: int) -> int:
        """Updates applied on the stage when the microbatch's backward runs."""
        return self.start + microbatch // self.every

    def staleness(self, stage: int, microbatch: int) -> int:
        """Updates that are applied between a microbatch's forward and its backward."""
        return self.backward(stage, microbatch) - self.forward(stage, microbatch)

    def read(self, mode: WeightMode, stage: int, microbatch: int) -> WeightRead:
        """Which weights the microbatch reads on the stage."""
        # Kept, since a stage that runs asks for the same several times, between its computations.
        key = id(mode), stage, microbatch
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[key] = mode, self._read(mode, stage, microbatch)
        return found[1]

    def _read(self, mode: WeightMode, stage: int, microbatch: int) -> WeightRead:
        first = microbatch - microbatch % self.every
        if mode.flush:  # no update is missing; it looks as far as in a full stream
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
        """One update before those of earlier minibatches; with one stage nothing is delayed."""
        now = self.backward(stage, microbatch)
        return now if max(self.ahead) == 1 else max(self.start, now - 1)

    def _looks(self, mode: WeightMode, stage: int, microbatch: int) -> tuple[int, int]:
        """How far its forward and its backward look ahead."""
        behind = self.staleness(stage, microbatch)
        most = self.staleness(self.deepest, microbatch)
        return (
            _look(mode.look_forward, behind, most, forward=True),
            _look(mode.look_backward, behind, most, forward=False),
        )

    def gap(self, stage: int) -> int:
        """The most updates between a microbatch's forward and backward: ceil((K - 1 - k) / a).

        With one microbatch to an update the staleness of each once the pipeline is full, K - 1 - k.
        """
        return -(-(self.ahead[stage] - 1) // self.every)

    def period(self) -> range:
        """The microbatches of one minibatch, late enough for what they read to repeat ever after.

        By then the pipeline is full and updates that are delayed have been made.
        """
        first = (-(-max(self.ahead) // self.every) + 2) * self.every
        return range(first, first + self.every)

    def check(self, mode: WeightMode) -> None:
        """Raise FXP109 where the mode is not made for so many microbatches to an update.

        A double buffer holds the weights of two updates, so that no microbatch may miss a second
        one: as many microbatches to an update as are in flight (PipeDream-2BW, section 3.1).
        """
        most = max(self.ahead)
        if mode.base == "delayed" and not mode.flush and self.every < most:
            raise error(
                "FXP109",
                where=f"weights={mode.name}",
                why=f"{self.every} microbatches to an update, and {most} in flight on stage "
                f"{self.deepest}: a forward could miss two updates, and there are two buffers",
                fix=f"{most} microbatches or more, fewer stages, or weights=stash",
            )

    @property
    def lag(self) -> int:
        """Minibatches after which what the last stage says of one is known everywhere, unawaited.

        A rank is ahead of the last stage by its warm-up at most, and one more lets news travel
        while the ranks work. 0 where there is one stage.
        """
        most = max(self.ahead) - 1
        return -(-most // self.every) + 1 if most else 0

    @property
    def deepest(self) -> int:
        """The stage that runs furthest ahead: the first of those with most forwards in flight."""
        return max(range(len(self.ahead)), key=lambda stage: (self.ahead[stage], -stage))


def _look(horizon: Horizon, behind: int, most: int, *, forward: bool) -> int:
    """Updates to look ahead; for a chain with one microbatch to an update, staleness K - 1 - k."""
    if horizon == "none":
        return 0
    if horizon == "staleness":
        return behind if forward else 0
    if horizon == "depth":
        return most
    half = (most - behind) // 2  # floor(k / 2)
    return behind + half if forward else half


def count_chain_warmup(stages: int) -> tuple[int, ...]:
    """Forwards before the first backward in a chain of stages: K - k."""
    return tuple(range(stages, 0, -1))
