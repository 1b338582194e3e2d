"""Programs whose stages have several replicas with round-robin routing of microbatches.

If stages differ in their number of ranks, a stage has several replicas, each on one rank or on a
mesh of ranks, which is the same for all. The replicas take microbatches round-robin (PipeDream,
Narayanan et al., SOSP 2019), or faster ones more often. A replica is a stage of the program like
any other, except that it takes only its own microbatches, and that the gradients of all replicas
are summed at the end of a step (:mod:`fxpart.runtime.gradients.stage_replicas`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fxpart.errors import error
from fxpart.program.spec import ProgramSpec, StageSpec
from fxpart.schedule.action import list_group_stages

if TYPE_CHECKING:
    from fxpart.plan.model import Plan

T = TypeVar("T")


def replicate_stages(spec: ProgramSpec, rounds: Sequence[Sequence[int]]) -> ProgramSpec:
    """Return the program with replicas of its stages inserted after each stage.

    rounds: by stage, the order in which its replicas take microbatches: (0, 1) for two replicas,
    (0, 0, 1) if the first takes two of three microbatches, (0,) for no replication. Replicas use
    the stage's module, and its mesh. Raises FXP109 for invalid rounds.
    """
    counts = [1 + max(turns, default=-1) for turns in rounds]
    whole = all(set(turns) == set(range(n)) for turns, n in zip(rounds, counts, strict=True))
    if len(rounds) != len(spec.stages) or min(counts, default=0) < 1 or not whole:
        why = f"{len(spec.stages)} stages need one round each, with replicas numbered from 0"
        fix = "pass for each stage a tuple such as (0, 1)"
        raise error("FXP109", where=f"replicas={tuple(rounds)}", why=why, fix=fix)
    if max(counts) == 1:
        return spec
    assert not spec.replicas, "stages are replicated once"
    firsts = [0, *accumulate(counts)][:-1]
    groups = [tuple(range(first, first + n)) for first, n in zip(firsts, counts, strict=True)]

    def copied(stage: StageSpec, index: int) -> StageSpec:
        return msgspec.structs.replace(
            stage,
            index=index,
            sources=tuple(s if s < 0 else firsts[s] for s in stage.sources),
            targets=tuple(tuple(firsts[t] for t in targets) for targets in stage.targets),
            state=tuple(msgspec.structs.replace(s, owner=firsts[s.owner]) for s in stage.state),
        )

    return msgspec.structs.replace(
        spec,
        stages=tuple(
            copied(stage, index)
            for stage, group in zip(spec.stages, groups, strict=True)
            for index in group
        ),
        ties={
            name: tuple(copy for stage in stages for copy in groups[stage])
            for name, stages in spec.ties.items()
        },
        replicas=tuple(
            tuple(first + copy for copy in turns)
            for first, turns, n in zip(firsts, rounds, counts, strict=True)
            if n > 1
        ),
    )


def replicate_program(
    spec: ProgramSpec, sources: Sequence[T], rounds: Sequence[Sequence[int]]
) -> tuple[ProgramSpec, tuple[T, ...]]:
    """Return a program and what belongs to each of its stages (``sources``) with the replicas."""
    whole = replicate_stages(spec, rounds)
    return whole, tuple(
        sources[get_original_stage(whole, stage)] for stage in range(len(whole.stages))
    )


def get_original_stage(spec: ProgramSpec, stage: int) -> int:
    """Return the stage index that a replica has in the program without replicas."""
    return stage - sum(
        sum(1 for copy in list_group_stages(group) if min(group) < copy <= stage)
        for group in spec.replicas
    )


def get_replica_rounds(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the rounds of a plan's stages, as :func:`replicate_stages` takes them."""
    groups = {group[0]: group for group in plan.replicas}
    return tuple(
        tuple(copy - first for copy in groups.get(first, (first,))) for first in plan.firsts
    )
