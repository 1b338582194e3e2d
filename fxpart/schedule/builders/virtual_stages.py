"""Schedules with virtual stages in a loop over the ranks: interleaved 1F1B and breadth-first.

With p ranks, stage s is on the rank of stage s mod p, and a microbatch passes all ranks v times.
The orders are those of a chain; a general stage graph has fewer dependencies, so they are valid for
every stage graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fxpart.errors import error
from fxpart.schedule.action import Action, ActionKind, Schedule, StageEdge
from fxpart.schedule.builders.protocol import Groups, Ranks, reject_replicas, validate_stage_rank
from fxpart.schedule.in_flight import count_in_flight

BREADTH_FIRST, INTERLEAVED = "breadth-first", "interleaved"


def breadth_first(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """Run all microbatches through a rank's first stage, then its next (Lamy-Poirier, MLSys 2023).

    Backwards run in the same way from the last stage on, with ascending microbatches. In flight on
    every stage: m. ``breadth_first([0, 1, 0, 1], 3)``::

        0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   .   2B0 === 2B1 === 2B2 === 0B0 === 0B1 === 0B2 ===
        1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 === 3B1 === 3B2 === 1B0 === 1B1 === 1B2 === .   .

    The gradients of a stage are complete as early as possible, so that their all-reduce over
    pipeline replicas overlaps with the remaining backwards. Supports any ranks; with one stage per
    rank it is GPipe.
    """
    reject_replicas(BREADTH_FIRST, replicas)
    ranks = validate_stage_rank(stage_rank, microbatches)
    lists: list[list[Action]] = [[] for _ in set(ranks)]
    for kind, stages in (
        (ActionKind.F, range(len(ranks))),
        (ActionKind.B, range(len(ranks))[::-1]),
    ):
        for stage in stages:
            lists[ranks[stage]] += [Action(stage, kind, m) for m in range(microbatches)]
    return Schedule(BREADTH_FIRST, len(ranks), microbatches, tuple(map(tuple, lists)), ranks)


def interleaved(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """1F1B with v virtual stages per rank in a loop (Narayanan et al., Megatron-LM, SC 2021).

    Microbatches run in groups of p, each through all stages of a rank before the next group. Rank r
    runs 2 (p - r - 1) + (v - 1) p forwards ahead, then alternates; it has one more than that number
    in flight. If p divides m, the bubble is that of 1F1B divided by v: (p - 1) (tF + tB) of a
    virtual stage, which is 1/v of a rank's work. ``interleaved([0, 1, 0, 1], 3)``::

        0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 === .   2B1 === .   2B2 === 0B0 === 0B1 === 0B2 ===
        1 | .   1F0 1F1 1F2 3F0 3B0 === 3F1 3B1 === 3F2 3B2 === 1B0 === 1B1 === 1B2 === .   .

    Supports any number of microbatches, and loops whose last stages are missing: among the possible
    groupings it takes the one with the shortest step for stages of equal time. Raises FXP109 for
    ranks that are not a loop.
    """
    reject_replicas(INTERLEAVED, replicas)
    return _interleaved(validate_stage_rank(stage_rank, microbatches), microbatches)


@lru_cache(maxsize=16)  # the verifier requests it again for the in-flight counts
def _interleaved(stage_rank: tuple[int, ...], microbatches: int) -> Schedule:
    loop = StageLoop.of(INTERLEAVED, stage_rank, microbatches)
    if loop.ranks == 1:
        # A single rank never waits; an immediate backward keeps the fewest microbatches in flight.
        return loop.schedule(INTERLEAVED, loop.alternating([1] * microbatches, 0, ActionKind.B))
    return loop.best(
        INTERLEAVED,
        (loop.alternating(groups, 2, ActionKind.B) for groups in loop.groupings()),
    )


# Ticks for the comparison of candidates: all halves equal, then a longer input-gradient half.
_TIMES = (
    {ActionKind.F: 1, ActionKind.B: 2, ActionKind.I: 1, ActionKind.W: 1},
    {ActionKind.F: 2, ActionKind.B: 3, ActionKind.I: 2, ActionKind.W: 1},
)


def _compute_end(
    lists: Sequence[Sequence[Action]], stages: int, ticks: dict[ActionKind, int]
) -> int:
    """Return when the last computation of a chain's lists ends, with free transfers.

    Returns -1 if the lists cannot all be run. The result is that of
    :func:`fxpart.schedule.lower.compute_times`, several times faster.
    """
    forward: list[dict[int, int]] = [{} for _ in range(stages)]
    back: list[dict[int, int]] = [{} for _ in range(stages)]
    at, free = [0] * len(lists), [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                stage, kind, m = action.stage, action.kind, action.microbatch
                ready: int | None = 0
                if kind is ActionKind.F and stage:
                    ready = forward[stage - 1].get(m)
                elif kind in (ActionKind.B, ActionKind.I):
                    ready = back[stage + 1].get(m) if stage + 1 < stages else forward[stage].get(m)
                if ready is None or (kind is not ActionKind.F and m not in forward[stage]):
                    break
                free[rank] = max(free[rank], ready) + ticks[kind]
                if kind is not ActionKind.W:
                    (forward if kind is ActionKind.F else back)[stage][m] = free[rank]
                at[rank] += 1
                moved = True
    return max(free) if all(map(int.__eq__, at, map(len, lists))) else -1


@dataclass(frozen=True)
class StageLoop:
    """Stages in a loop over ranks. where: the rank of each position in the loop."""

    stage_rank: tuple[int, ...]
    microbatches: int
    where: tuple[int, ...]

    @classmethod
    def of(cls, name: str, stage_rank: tuple[int, ...], microbatches: int) -> StageLoop:
        """Return the loop; raise FXP109 if stage s is not on the rank of stage s mod p."""
        count = len(set(stage_rank))
        where = stage_rank[:count]
        if any(rank != where[stage % count] for stage, rank in enumerate(stage_rank)):
            loop = tuple(stage % count for stage in range(len(stage_rank)))
            raise error(
                "FXP109",
                where=f"schedule={name}, stage_rank={stage_rank}",
                why="With p ranks, stage s must be on the same rank as stage s - p (a loop).",
                fix=f"Use for example stage_rank={loop}, or a schedule that supports any ranks.",
            )
        return cls(stage_rank, microbatches, where)

    @property
    def ranks(self) -> int:
        """p."""
        return len(self.where)

    @property
    def rounds(self) -> int:
        """Return v, how often a microbatch passes the ranks; the last pass may be partial."""
        return -(-len(self.stage_rank) // self.ranks)

    def groupings(self) -> Iterator[list[int]]:
        """Yield candidate group sizes: p each; if p does not divide m, other sizes too."""
        p, m = self.ranks, self.microbatches
        whole, rest = divmod(m, p)
        yield [p] * whole + [rest] * (rest > 0)
        if rest:
            yield [p] * (whole + 1)  # the last microbatches of which do not exist
            for groups in {max(1, whole), whole + 1}:
                yield [m // groups + (g < m % groups) for g in range(groups)]

    def alternating(
        self, groups: Sequence[int], slope: int, kind: ActionKind, delay: Sequence[int] = ()
    ) -> list[list[Action]]:
        """Return by position: warm-up forwards, alternating forwards and backwards, last backwards.

        groups: sizes, whose sum may exceed the number of microbatches. slope: how many more
        forwards a rank runs ahead than the next rank. kind: B, or I; with I, delay is by position
        the number of I's by which the W's of a rank lag behind.
        """
        found = []
        for place in range(self.ranks):
            forwards = [
                a for g in self._passes(groups, False) for a in self._run(place, ActionKind.F, g)
            ]
            backwards = [a for g in self._passes(groups, True) for a in self._run(place, kind, g)]
            ahead = slope * (self.ranks - place - 1) + (self.rounds - 1) * groups[0]
            order = forwards[:ahead]
            late: deque[Action] = deque()
            for index, action in enumerate(backwards):
                order += [*forwards[ahead + index : ahead + index + 1], action]
                if kind is ActionKind.I:
                    late.append(Action(action.stage, ActionKind.W, action.microbatch))
                    if len(late) > delay[place]:
                        order.append(late.popleft())
            order += late
            found.append([a for a in order if self._exists(a)])
        return found

    def best(self, name: str, candidates: Iterable[list[list[Action]]]) -> Schedule:
        """Return the candidate with the shortest step.

        Criteria in order: the end with stages of equal time, the end with a shorter W, the fewest
        microbatches in flight. Candidates that cannot run are skipped.
        """
        found: list[tuple[list[int], int, int, Schedule]] = []
        for lists in candidates:
            ends = [_compute_end(lists, len(self.stage_rank), ticks) for ticks in _TIMES]
            if min(ends) >= 0:  # otherwise a group is so small that a rank would wait for itself
                built = self.schedule(name, lists)
                found.append((ends, sum(count_in_flight(built)), len(found), built))
        assert found, "groups of p can always be run"
        return min(found)[-1]

    def schedule(self, name: str, lists: Sequence[Sequence[Action]]) -> Schedule:
        """Return the schedule of the lists by position."""
        ranks: list[tuple[Action, ...]] = [()] * self.ranks
        for rank, actions in zip(self.where, lists, strict=True):
            ranks[rank] = tuple(actions)
        return Schedule(
            name, len(self.stage_rank), self.microbatches, tuple(ranks), self.stage_rank
        )

    def _passes(self, groups: Sequence[int], back: bool) -> Iterator[tuple[int, int, int]]:
        """Yield the round and the microbatches (from, to) of each run of microbatches, in order."""
        first = 0
        for size in groups:
            for number in range(self.rounds)[:: -1 if back else 1]:
                yield number, first, first + size
            first += size

    def _run(self, place: int, kind: ActionKind, span: tuple[int, int, int]) -> list[Action]:
        number, first, end = span
        return [Action(number * self.ranks + place, kind, m) for m in range(first, end)]

    def _exists(self, action: Action) -> bool:
        return action.stage < len(self.stage_rank) and action.microbatch < self.microbatches
