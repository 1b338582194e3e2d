"""Check a plan's stages: blocks, ranks, degrees, edges, tied parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from fxpart.errors import short
from fxpart.schedule.spec import SCHEDULES

if TYPE_CHECKING:
    from fxpart.plan.model import Plan, Stage

Faults: TypeAlias = Iterator[tuple[str, str]]


def stages(plan: Plan) -> Faults:
    """Check each stage, and its position among the others."""
    if not plan.stages:
        yield "stages", "there are no stages"
        return
    for position, stage in enumerate(plan.stages):
        where = f"stages[{position}]"
        if stage.index != position:
            yield (
                f"{where}.index",
                f"the index is {stage.index}, but stages are numbered in order from 0",
            )
        yield from ((where, why) for why in _degrees(stage))
        degree = stage.data_parallel * stage.tensor_parallel * stage.context_parallel
        if degree > 0 and len(stage.ranks) != degree:
            yield (
                f"{where}.ranks",
                f"there are {len(stage.ranks)} ranks, but the degrees yield {degree}",
            )
    yield from _blocks(plan)
    yield from _replicas(plan)


def _replicas(plan: Plan) -> Faults:
    """Check that groups are disjoint, with equal blocks, on equal meshes, no virtual stages."""
    count, seen = len(plan.stages), set[int]()
    for index, group in enumerate(plan.replicas):
        where, replicas = f"replicas[{index}]", set(group)
        if len(replicas) < 2 or group[0] != min(replicas):
            yield where, "a group must have two or more stages, the first one in front"
        if not all(0 <= stage < count for stage in replicas):
            yield where, f"there are only {count} stages"
            continue
        if seen & replicas:
            yield where, f"stage {min(seen & replicas)} is in two groups"
        seen |= replicas
        spans = {plan.stages[stage].spans for stage in replicas}
        if len(spans) > 1:
            yield where, "the replicas have different blocks"
    if plan.replicas and len({len(stage.ranks) for stage in plan.stages}) > 1:
        yield "replicas", "with replicated stages, all stages must have the same number of ranks"
    if plan.replicas and not SCHEDULES[plan.schedule].supports_replicas:
        yield "replicas", f"the schedule {plan.schedule} does not support replicated stages"


def _degrees(stage: Stage) -> Iterator[str]:
    data, expert = stage.data_parallel, stage.expert_parallel
    if min(data, stage.tensor_parallel, expert, stage.context_parallel) < 1:
        yield "a degree of parallelism is below 1"
    elif data % expert:
        yield f"expert parallelism {expert} does not divide data parallelism {data}"
    elif shards := stage.shard_degree:
        if not 1 < shards < data or data % shards:
            yield f"the shard degree {shards} is no divisor of data parallelism {data} above 1"
        elif not stage.zero:
            yield f"the shard degree is {shards}, but the ZeRO level is 0"
        elif expert > 1:
            yield "a stage with distributed experts has no shard degree"


def _blocks(plan: Plan) -> Faults:
    """Check that every block is in one stage, and that stages follow the schedule's order."""
    virtual, first = plan.virtual, len(plan.stages[0].spans)
    later = {replica for group in plan.replicas for replica in group if replica != group[0]}
    least, most = SCHEDULES[plan.schedule].stages_per_rank
    if not least <= virtual <= most:
        yield (
            "stages",
            f"the schedule {plan.schedule} does not support {virtual} virtual stages per rank",
        )
    for position, stage in enumerate(plan.stages):
        if len(stage.spans) != first:
            yield (
                f"stages[{position}].pieces",
                f"there are {len(stage.spans)} virtual stages, but stage 0 has {first}",
            )
        if (stage.first, stage.last) != (stage.spans[0][0], stage.spans[-1][1]):
            yield f"stages[{position}].pieces", "they do not begin at `first` and end at `last`"
    expected = 0
    for position, (begin, last) in _pieces(plan):
        where = f"stages[{position}]"
        if position in later:
            continue
        if begin > expected:
            yield where, f"blocks {expected} to {begin - 1} are on no earlier stage"
        elif begin < expected:
            yield where, f"block {begin} is on the previous stage as well"
        if last < begin:
            yield where, f"the last block {last} is before the first block {begin}"
        expected = last + 1
    if expected != plan.model.blocks:
        last_block = plan.model.blocks - 1
        yield (
            "stages",
            f"the last stage ends at block {expected - 1}, but the model's last is {last_block}",
        )


def _pieces(plan: Plan) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield positions of stages with their spans of blocks, in the schedule's order.

    Round-robin; for a V the second round is reversed; for a searched schedule in block order.
    """
    every = list(enumerate(plan.stages))
    spec = SCHEDULES[plan.schedule]
    if spec.build is None:
        spans = [(position, span) for position, stage in every for span in stage.spans]
        yield from sorted(spans, key=lambda item: item[1])
        return
    for round_number in range(plan.virtual):
        for position, stage in (
            reversed(every) if spec.placement == "V" and round_number % 2 else every
        ):
            if round_number < len(stage.spans):
                yield position, stage.spans[round_number]


def order(plan: Plan) -> Faults:
    """Check that the order of the blocks has each of them once."""
    if plan.order and (
        len(plan.order) != plan.model.blocks or set(plan.order) != set(range(plan.model.blocks))
    ):
        yield "order", f"the order does not have each of the {plan.model.blocks} blocks once"


def ranks(plan: Plan) -> Faults:
    """Check that ranks are 0 to world - 1, each on one stage and one device."""
    world, devices = plan.world, len(plan.cluster.devices)
    for position, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            if not 0 <= rank < world:
                yield (
                    f"stages[{position}].ranks",
                    f"rank {rank} is not below the number of ranks, {world}",
                )
    for rank, count in Counter(r for s in plan.stages for r in s.ranks).items():
        if count > 1:
            yield "stages", f"rank {rank} occurs {count} times"
    if world > devices:
        yield "stages", f"there are {world} ranks, but the cluster has {devices} devices"
    if not plan.devices:
        return
    if len(plan.devices) != world:
        yield "devices", f"there are {len(plan.devices)} devices for {world} ranks"
    if any(a >= b for a, b in pairwise(plan.devices)):
        yield "devices", "the indices are not ascending"
    for device in plan.devices:
        if not 0 <= device < devices:
            yield "devices", f"the cluster has no device {device}"


def mesh(plan: Plan) -> Faults:
    """Check that the mesh matches the stages, or is only their number if they differ."""
    degrees = {(s.data_parallel, s.tensor_parallel, s.context_parallel) for s in plan.stages}
    size, expected = math.prod(plan.mesh.values()), plan.world
    if any(extent < 1 for extent in plan.mesh.values()):
        yield "mesh", "an axis has no ranks"
    elif len(degrees) > 1 and plan.mesh != {"pipeline": len(plan.stages)}:
        yield (
            "mesh",
            "with stages of different degrees, the only axis is pipeline, the number of stages",
        )
    elif plan.replicas:  # with a sharding, check_sharding compares the axes
        if plan.sharding is None and plan.mesh != {"pipeline": len(plan.firsts)}:
            yield "mesh", "with replicated stages, the only axis is pipeline, the number of groups"
    elif len(degrees) == 1 and size != expected:
        yield "mesh", f"the mesh has {size} ranks, but the stages have {expected}"


def edges(plan: Plan) -> Faults:
    """Check that edges lead to later (virtual) stages, each once."""
    count = len(plan.program_stages)
    seen = set()
    for index, (source, target, _) in enumerate(plan.edges):
        if not 0 <= source < target < count:
            yield (
                f"edges[{index}]",
                f"{source} to {target} does not lead to a later one of the {count} stages",
            )
        if (source, target) in seen:
            yield f"edges[{index}]", f"{source} to {target} occurs twice"
        seen.add((source, target))


def ties(plan: Plan) -> Faults:
    """Check that each tied parameter has names, stages and an owner among them."""
    for index, tie in enumerate(plan.ties):
        where = f"ties[{index}]"
        if not tie.names:
            yield where, "the list of names is empty"
        if tie.owner not in tie.stages:
            yield where, f"the owner, stage {tie.owner}, is not among its stages"
        if any(not 0 <= stage < len(plan.stages) for stage in tie.stages):
            yield where, "it has a stage that the plan does not have"
        if len(set(tie.stages)) != len(tie.stages):
            yield where, "a stage occurs twice"
    for name, uses in Counter(n for tie in plan.ties for n in tie.names).items():
        if uses > 1:
            yield "ties", f"the name {short(name)!a} occurs {uses} times"
