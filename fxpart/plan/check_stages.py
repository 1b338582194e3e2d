"""Faults of what a plan says about its stages: blocks, ranks, degrees, edges, ties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from fxpart.errors import short
from fxpart.schedule.spec import INTERLEAVED, SCHEDULES

if TYPE_CHECKING:
    from fxpart.plan.model import Plan, Stage

Faults: TypeAlias = Iterator[tuple[str, str]]


def stages(plan: Plan) -> Faults:
    """Each stage by itself, and its place among the others."""
    if not plan.stages:
        yield "stages", "there are none"
        return
    for position, stage in enumerate(plan.stages):
        where = f"stages[{position}]"
        if stage.index != position:
            yield f"{where}.index", f"it is {stage.index}; stages stand in order from 0"
        yield from ((where, why) for why in _degrees(stage))
        degree = stage.data_parallel * stage.tensor_parallel
        if degree > 0 and len(stage.ranks) != degree:
            yield f"{where}.ranks", f"{len(stage.ranks)} ranks, but {degree} replicas and shards"
    yield from _blocks(plan)
    yield from _copies(plan)


def _copies(plan: Plan) -> Faults:
    """Groups are disjoint; a copy has its group's blocks, one rank, and no pieces."""
    count, seen = len(plan.stages), set[int]()
    for index, group in enumerate(plan.replicas):
        where, copies = f"replicas[{index}]", set(group)
        if len(copies) < 2 or group[0] != min(copies):
            yield where, "a group is two stages or more, and begins with the first of them"
        if not all(0 <= stage < count for stage in copies):
            yield where, f"there are only {count} stages"
            continue
        if seen & copies:
            yield where, f"stage {min(seen & copies)} is in another group too"
        seen |= copies
        spans = {plan.stages[stage].spans for stage in copies}
        if len(spans) > 1:
            yield where, "its stages hold different blocks"
        if any(len(plan.stages[stage].ranks) != 1 for stage in copies):
            yield where, "each of its stages is one rank"
    if plan.replicas and not SCHEDULES[plan.schedule].supports_replicas:
        yield "replicas", f"the schedule {plan.schedule} is not made for copies of stages"


def _degrees(stage: Stage) -> Iterator[str]:
    data, expert = stage.data_parallel, stage.expert_parallel
    if min(data, stage.tensor_parallel, expert) < 1:
        yield "a degree of parallelism is below 1"
    elif data % expert:
        yield f"{expert} replicas cannot share the experts of each part of {data} replicas"


def _blocks(plan: Plan) -> Faults:
    """Every block lies in one piece, and pieces follow each other in the schedule's order."""
    turns, first = plan.virtual, len(plan.stages[0].spans)
    later = {copy for group in plan.replicas for copy in group if copy != group[0]}
    least, most = SCHEDULES[plan.schedule].stages_per_rank
    if not least <= turns <= most:
        yield "stages", f"pieces do not fit the schedule {plan.schedule}; {INTERLEAVED} has several"
    for position, stage in enumerate(plan.stages):
        if len(stage.spans) != first:
            yield f"stages[{position}].pieces", f"{len(stage.spans)} pieces, stage 0 has {first}"
        if (stage.first, stage.last) != (stage.spans[0][0], stage.spans[-1][1]):
            yield f"stages[{position}].pieces", "they do not begin at first and end at last"
    expected = 0
    for position, (begin, last) in _pieces(plan):
        where = f"stages[{position}]"
        if position in later:
            continue
        if begin > expected:
            yield where, f"blocks {expected} to {begin - 1} are on no stage before it"
        elif begin < expected:
            yield where, f"block {begin} is on the stage before it as well"
        if last < begin:
            yield where, f"it ends at block {last}, before its first block {begin}"
        expected = last + 1
    if expected != plan.model.blocks:
        last_block = plan.model.blocks - 1
        yield "stages", f"they end at block {expected - 1}; the model's last is {last_block}"


def _pieces(plan: Plan) -> Iterator[tuple[int, tuple[int, int]]]:
    """Positions of stages with their pieces as the schedule wants these to follow each other.

    In turns; of a V the second turn goes back; where a schedule was found, as they stand.
    """
    every = list(enumerate(plan.stages))
    spec = SCHEDULES[plan.schedule]
    if spec.build is None:
        spans = [(position, span) for position, stage in every for span in stage.spans]
        yield from sorted(spans, key=lambda item: item[1])
        return
    for turn in range(plan.virtual):
        for position, stage in reversed(every) if spec.placement == "V" and turn % 2 else every:
            if turn < len(stage.spans):
                yield position, stage.spans[turn]


def order(plan: Plan) -> Faults:
    """The order of the blocks has each of them once."""
    if plan.order and (
        len(plan.order) != plan.model.blocks or set(plan.order) != set(range(plan.model.blocks))
    ):
        yield "order", f"it does not name each of the {plan.model.blocks} blocks once"


def ranks(plan: Plan) -> Faults:
    """Ranks 0 to world - 1, each on one stage and one device."""
    world, devices = plan.world, len(plan.cluster.devices)
    for position, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            if not 0 <= rank < world:
                yield f"stages[{position}].ranks", f"rank {rank} is not below {world}, their number"
    for rank, count in Counter(r for s in plan.stages for r in s.ranks).items():
        if count > 1:
            yield "stages", f"rank {rank} stands there {count} times"
    if world > devices:
        yield "stages", f"{world} ranks, and the cluster has {devices} devices"
    if not plan.devices:
        return
    if len(plan.devices) != world:
        yield "devices", f"{len(plan.devices)} devices for {world} ranks"
    if any(a >= b for a, b in pairwise(plan.devices)):
        yield "devices", "they do not rise, so that ranks are not in the cluster's order"
    for device in plan.devices:
        if not 0 <= device < devices:
            yield "devices", f"the cluster has no device {device}"


def mesh(plan: Plan) -> Faults:
    """The mesh is as large as the stages; where they differ it says only how many there are."""
    degrees = {(s.data_parallel, s.tensor_parallel) for s in plan.stages}
    size, expected = math.prod(plan.mesh.values()), plan.world
    if any(extent < 1 for extent in plan.mesh.values()):
        yield "mesh", "an axis has no ranks"
    elif len(degrees) > 1 and plan.mesh != {"pipeline": len(plan.stages)}:
        yield "mesh", "stages of different degrees have no axis but pipeline, their number"
    elif plan.replicas:
        if plan.mesh != {"pipeline": len(plan.firsts)}:
            yield "mesh", "of stages with copies it says only how many groups follow each other"
    elif len(degrees) == 1 and size != expected:
        yield "mesh", f"it has {size} ranks, the stages have {expected}"


def edges(plan: Plan) -> Faults:
    """Edges lead from a stage (or piece) to a later one, each once."""
    count = len(plan.program_stages)
    seen = set()
    for index, (source, target, _) in enumerate(plan.edges):
        if not 0 <= source < target < count:
            yield f"edges[{index}]", f"{source} to {target}: no later stage of the {count} stages"
        if (source, target) in seen:
            yield f"edges[{index}]", f"{source} to {target} stands there twice"
        seen.add((source, target))


def ties(plan: Plan) -> Faults:
    """Each tie has names, stages and an owner among them."""
    for index, tie in enumerate(plan.ties):
        where = f"ties[{index}]"
        if not tie.names:
            yield where, "it names no parameter"
        if tie.owner not in tie.stages:
            yield where, f"the owner, stage {tie.owner}, does not hold it"
        if any(not 0 <= stage < len(plan.stages) for stage in tie.stages):
            yield where, "it names a stage that the plan does not have"
        if len(set(tie.stages)) != len(tie.stages):
            yield where, "a stage stands there twice"
    for name, uses in Counter(n for tie in plan.ties for n in tie.names).items():
        if uses > 1:
            yield "ties", f"the name {short(name)!a} stands there {uses} times"
