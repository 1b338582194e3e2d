"""Schedules with split backwards: I yields the input gradients, W fills the bubble."""

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
    """1F1B with split backwards, W as late as the memory of 1F1B permits (Qi et al., ICLR 2024:
    ZB-H1).

    Stage s of p runs the W of a microbatch s I's later, so that each stage has at most p
    microbatches in flight, as the first stage of 1F1B. Bubble (table 1 of the paper): (p - 1) (tF +
    tI - tW) for tW <= tF, a third of the 1F1B bubble where the three are equal. ``zb_h1(3, 5)``::

        0 | F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    If the ranks form a loop with several stages each: interleaved 1F1B with split backwards. With
    other ranks each stage keeps its order, and the rank runs whatever can start, W last.
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


@lru_cache(maxsize=16)  # the verifier requests it again for the in-flight counts
def _looped(stage_rank: tuple[int, ...], microbatches: int) -> Schedule:
    """Return interleaved 1F1B with split backwards: the fastest of several slopes and delays."""
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
    """Two stages per rank in a V, split backwards, no bubble (Qi et al., NeurIPS 2024: ZB-V).

    Stages s < p and 2p - 1 - s are on rank s. The rank that starts a microbatch also ends it, so
    that its first gradient is available at once. If F, I and W take the same time t and m >= 2p -
    1, no rank waits between its first and last computation: a step takes 6 m t + (p - 1) t. In
    flight on a rank: at most 2p microbatches of half a rank's size, as on the first rank of 1F1B.
    ``zb_v(4, 3)``::

        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    stage_rank: a number means so many stages, two per rank. Raises FXP109 for ranks that are not a
    V.
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
            why="The schedule needs stages s and 2p - 1 - s on the same rank (two per rank, a V).",
            fix=f"Use for example stage_rank={assign_v_ranks(2 * count)}.",
        )
    lists: list[tuple[Action, ...]] = [()] * count
    # Too few microbatches to fill the pipeline: truncate a schedule that has enough.
    several = max(2 * count - 1, microbatches)
    for turn in range(count):
        order = _VOrder(turn, stages - 1 - turn).run(count, several)
        lists[ranks[turn]] = tuple(a for a in order if a.microbatch < microbatches)
    return Schedule(ZB_V, stages, microbatches, tuple(lists), ranks)


def assign_v_ranks(stages: int) -> tuple[int, ...]:
    """Return the rank of each stage in a V: (0, 1, 1, 0)."""
    down = tuple(range((stages + 1) // 2))
    return down + down[: stages // 2][::-1]


class _VOrder:
    """The order of one rank: the next F, I and W of each of its two stages."""

    def __init__(self, down: int, up: int) -> None:
        """down: the stage on the way down the V. up: the stage on the way up."""
        self.down, self.up = down, up
        self.done = {
            (stage, kind): 0
            for stage in (down, up)
            for kind in (ActionKind.F, ActionKind.I, ActionKind.W)
        }
        self.order: list[Action] = []

    def run(self, ranks: int, microbatches: int) -> list[Action]:
        """Run the rank's computations.

        ranks: the number of ranks from this one to the bottom of the V. microbatches: at least 2 *
        ranks - 1.
        """
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
