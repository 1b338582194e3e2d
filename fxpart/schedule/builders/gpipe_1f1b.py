"""GPipe, 1F1B and forward-only: the order of a stage does not depend on its rank.

A rank with several stages runs next whichever computation can start first
(:mod:`fxpart.schedule.rank_merge`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from fxpart.schedule.action import (
    FORWARD,
    Action,
    ActionKind,
    Schedule,
    StageEdge,
    list_group_stages,
)
from fxpart.schedule.builders.protocol import (
    Groups,
    Ranks,
    assign_microbatches,
    validate_stage_rank,
)
from fxpart.schedule.builders.replica_warmup import count_warmup_forwards
from fxpart.schedule.dependence import chain, depths
from fxpart.schedule.rank_merge import merge_onto_ranks

GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"


def gpipe(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    In flight on every stage: m. ``gpipe(3, 4)``::

        0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 == B1 == B2 == B3 ==
        1 | .  F0 F1 F2 F3 .  .  .  B0 == B1 == B2 == B3 == .  .
        2 | .  .  F0 F1 F2 F3 B0 == B1 == B2 == B3 == .  .  .  .

    A stage's order is the same for every stage graph.
    """
    ranks = validate_stage_rank(stage_rank, microbatches)
    return build_alternating(
        GPIPE, ranks, microbatches, edges, [microbatches] * len(ranks),
        forward=forward, backward=backward, replicas=replicas,
    )  # fmt: skip


def one_f_one_b(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """One forward, one backward (Narayanan et al., PipeDream, SOSP 2019; flushed every step).

    Stage s runs as many forwards ahead as there are stages on the longest path from s to the end,
    then alternates. In flight on stage s of a chain of S: min(m, S - s). ``one_f_one_b(3, 4)``::

        0 | F0 F1 F2 .  .  .  .  B0 == F3 B1 == .  B2 == .  B3 ==
        1 | .  F0 F1 .  .  B0 == F2 B1 == F3 B2 == .  B3 == .  .
        2 | .  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == .  .  .  .

    With parallel branches the longest path, and so the number in flight, is smaller than in a
    chain. One of n equal replicas runs every n-th microbatch and takes n times as long for a
    balanced pipeline. It runs ahead by the sum of the group sizes on the longest path, divided by n
    (:mod:`fxpart.schedule.builders.replica_warmup`, also for replicas of unequal speed).
    """
    ranks = validate_stage_rank(stage_rank, microbatches)
    graph = chain(len(ranks)) if edges is None else tuple(edges)
    ahead = depths(len(ranks), graph)
    if replicas:
        ahead = count_warmup_forwards(len(ranks), microbatches, graph, replicas)
    return build_alternating(
        ONE_F_ONE_B, ranks, microbatches, graph, ahead,
        forward=forward, backward=backward, replicas=replicas,
    )  # fmt: skip


def build_alternating(
    name: str,
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None,
    warmup: Sequence[int],
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """Build a schedule in which each stage warms up, then alternates backwards and forwards.

    warmup: number of forwards of each stage before its first backward, capped at the number of its
    microbatches. The other arguments and errors are those of a builder
    (:class:`.protocol.BuildFunction`).
    """
    ranks = validate_stage_rank(stage_rank, microbatches)
    lists = _alternating(warmup, assign_microbatches(len(ranks), microbatches, replicas))
    return _merge(name, ranks, microbatches, lists, edges, forward, backward, replicas)


def forward_only(
    stage_rank: Ranks,
    microbatches: int,
    edges: Iterable[StageEdge] | None = None,
    *,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    replicas: Groups = (),
) -> Schedule:
    """Forwards only, for evaluation; no activations stay in flight. ``forward_only(3, 4)``::

        0 | F0 F1 F2 F3 .  .
        1 | .  F0 F1 F2 F3 .
        2 | .  .  F0 F1 F2 F3

    A stage's order is the same for every stage graph.
    """
    ranks = validate_stage_rank(stage_rank, microbatches)
    lists = [
        tuple(Action(stage, ActionKind.F, m) for m in mine)
        for stage, mine in enumerate(assign_microbatches(len(ranks), microbatches, replicas))
    ]
    return _merge(FORWARD, ranks, microbatches, lists, edges, forward, backward, replicas)


def count_1f1b_in_flight(
    stage_rank: Ranks, microbatches: int, replicas: Groups = ()
) -> tuple[int, ...]:
    """Return by stage the most microbatches that 1F1B has in flight, on any stage graph.

    The bound is the count in a chain of all stages or groups of replicas.
    """
    stages = len(validate_stage_rank(stage_rank, microbatches))
    groups = {stage: list_group_stages(group) for group in replicas for stage in group}
    units = list(dict.fromkeys(groups.get(stage, (stage,)) for stage in range(stages)))
    joined = [
        StageEdge(a, b) for first, then in pairwise(units) for a in first for b in then if a < b
    ]
    most = count_warmup_forwards(stages, microbatches, joined, replicas)
    counts = map(len, assign_microbatches(stages, microbatches, replicas))
    return tuple(min(a, count) for a, count in zip(most, counts, strict=True))


def _alternating(
    ahead: Sequence[int], stage_microbatches: Sequence[tuple[int, ...]]
) -> list[tuple[Action, ...]]:
    """Run ahead[k] forwards on stage k, then alternate, then run the remaining backwards."""
    lists = []
    for stage, (most, mine) in enumerate(zip(ahead, stage_microbatches, strict=True)):
        first = min(most, len(mine))
        actions = [Action(stage, ActionKind.F, m) for m in mine[:first]]
        for place_, m in enumerate(mine):
            actions.append(Action(stage, ActionKind.B, m))
            if first + place_ < len(mine):
                actions.append(Action(stage, ActionKind.F, mine[first + place_]))
        lists.append(tuple(actions))
    return lists


def _merge(
    name: str,
    ranks: tuple[int, ...],
    microbatches: int,
    lists: Sequence[tuple[Action, ...]],
    edges: Iterable[StageEdge] | None,
    forward: Sequence[float] | None,
    backward: Sequence[float] | None,
    replicas: Groups,
) -> Schedule:
    """Merge the lists of the stages onto their ranks."""
    groups = tuple(tuple(group) for group in replicas)
    built = Schedule(name, len(ranks), microbatches, tuple(lists), tuple(range(len(ranks))), groups)
    return merge_onto_ranks(built, ranks, edges, forward=forward, backward=backward)
