"""Schedules with split backwards: I gives the gradients that others wait for, W fills the gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from fxpart.errors import error
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.builders.protocol import Groups, Ranks, reject_replicas, validate_stage_rank
from fxpart.schedule.builders.virtual_stages import StageLoop
from fxpart.schedule.dependence import chain, depths
from fxpart.schedule.rank_merge import merge_onto_ranks

ZB_H1, ZB_V = "zb-h1", "zb-v"


def zb_h1(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """1F1B with split backwards, W as late as 1F1B's memory lets it (Qi et al., ICLR 2024: ZB-H1).

    Stage s of p does the W of a microbatch s of its I's later, so that each holds at most p
    microbatches: what the first stage of 1F1B does. Bubble (their table 1):
    (p - 1) (tF + tI - tW) where tW <= tF, a third of 1F1B's where the three are
    equal. ``zb_h1(3, 5)``::

        0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Where a rank has several stages in a loop: interleaved 1F1B with split backwards. With other
    ranks each stage keeps its order and the rank takes whatever can go on, W last.
    """
    reject_replicas(ZB_H1, replicas)
    ranks = validate_stage_rank(stage_rank, microbatches)
    stages, count = len(ranks), len(set(ranks))
    if count < stages and all(rank == ranks[s % count] for s, rank in enumerate(ranks)):
        return _looped(ranks, microbatches)
    graph = chain(stages) if edges is None else tuple(edges)
    deep = depths(stages, graph)
    lists = []
    for stage, ahead in enumerate(deep):
        first, late = min(ahead, microbatches), max(deep) - ahead
        actions = [Action(stage, ActionKind.F, m) for m in range(first)]
        for m in range(microbatches + late):
            if m < microbatches:
                actions.append(Action(stage, ActionKind.I, m))
            if late <= m:
                actions.append(Action(stage, ActionKind.W, m - late))
            if first + m < microbatches:
                actions.append(Action(stage, ActionKind.F, first + m))
        lists.append(tuple(actions))
    built = Schedule(ZB_H1, stages, microbatches, tuple(lists), tuple(range(stages)))
    return merge_onto_ranks(built, ranks, graph, forward=forward, backward=backward)


@lru_cache(maxsize=16)  # the verifier asks again for what is in flight
def _looped(stage_rank: tuple[int, ...], microbatches: int) -> Schedule:
    """Interleaved 1F1B with split backwards: of several slopes and delays, what takes least."""
    loop = StageLoop.of(ZB_H1, stage_rank, microbatches)
    return loop.best(
        ZB_H1,
        (
            loop.alternating(groups, slope, ActionKind.I, [late * r for r in range(loop.ranks)])
            for groups in loop.groupings()
            for slope in (1, 2)
            for late in (1, 2)
        ),
    )


def zb_v(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """Two stages a rank in a V, split backwards, no bubble (Qi et al., NeurIPS 2024: ZB-V).

    Stage s < p is on rank s, stage 2p - 1 - s on the same: the rank that starts a microbatch also
    ends it, so that its first gradient is there at once. Where F, I and W take the same time t and
    m >= 2p - 1, no rank waits between its first and its last computation: a step takes
    6 m t + (p - 1) t. Held on a rank: at most 2p pieces of half a rank's size, as 1F1B does on its
    first rank. ``zb_v(4, 3)``::

        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    stage_rank: as a number of stages, two a rank. Raises FXP109 for ranks that are no V.
    """
    reject_replicas(ZB_V, replicas)
    if isinstance(stage_rank, int):
        stage_rank = assign_v_ranks(stage_rank)
    ranks = validate_stage_rank(stage_rank, microbatches)
    stages, count = len(ranks), len(set(ranks))
    if stages != 2 * count or ranks != ranks[::-1]:
        raise error(
            "FXP109",
            where=f"schedule={ZB_V}, stage_rank={ranks}",
            why="it needs two stages a rank, in a V: stage s on the same rank as stage 2p - 1 - s",
            fix=f"for example stage_rank={assign_v_ranks(2 * count)}",
        )
    lists: list[tuple[Action, ...]] = [()] * count
    # With fewer microbatches than fill the pipeline: what is left of a schedule that has enough.
    several = max(2 * count - 1, microbatches)
    for turn in range(count):
        order = _VOrder(turn, stages - 1 - turn).run(count, several)
        lists[ranks[turn]] = tuple(a for a in order if a.microbatch < microbatches)
    return Schedule(ZB_V, stages, microbatches, tuple(lists), ranks)


def assign_v_ranks(stages: int) -> tuple[int, ...]:
    """The ranks of so many stages in a V: (0, 1, 1, 0)."""
    down = tuple(range((stages + 1) // 2))
    return down + down[: stages // 2][::-1]


class _VOrder:
    """The order of one rank: how far each of its two stages has come with F, I and W."""

    def __init__(self, down: int, up: int) -> None:
        """down: the stage on the way down the V. up: that on the way up."""
        self.down, self.up = down, up
        self.done = {
            (stage, kind): 0
            for stage in (down, up)
            for kind in (ActionKind.F, ActionKind.I, ActionKind.W)
        }
        self.order: list[Action] = []

    def run(self, ranks: int, microbatches: int) -> list[Action]:
        """microbatches: at least 2 * ranks - 1. This rank is as far from the V's top as its
        first stage is from the first of all."""
        place, to_end = self.down, ranks - self.down
        for _ in range(2 * to_end - 1):
            self._do(self.down, ActionKind.F)
        for _ in range(place):
            self._do(self.up, ActionKind.F)
            self._do(self.down, ActionKind.F)
        for _ in range(to_end):
            self._do(self.up, ActionKind.F, ActionKind.I, ActionKind.W)
        while self.done[self.up, ActionKind.F] < microbatches:
            if self.done[self.down, ActionKind.F] < microbatches:
                self._do(self.down, ActionKind.F)
            self._do(self.down, ActionKind.I, ActionKind.W)
            self._do(self.up, ActionKind.F, ActionKind.I, ActionKind.W)
        for _ in range(place):
            self._do(self.down, ActionKind.I)
            self._do(self.up, ActionKind.I)
        for _ in range(to_end):
            self._do(self.down, ActionKind.I, ActionKind.W)
        for stage in (self.up, self.down):
            while self.done[stage, ActionKind.W] < self.done[stage, ActionKind.I]:
                self._do(stage, ActionKind.W)
        return self.order

    def _do(self, stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            self.order.append(Action(stage, kind, self.done[stage, kind]))
            self.done[stage, kind] += 1
