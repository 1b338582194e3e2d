"""Faults of what a plan predicts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.plan.check_stages import Faults
from fxpart.schedule.spec import SCHEDULES

if TYPE_CHECKING:
    from fxpart.plan.model import Plan, RankPrediction

MOST = 200  # ranks named at most
_MOST_SLOWDOWN = 1e6  # what is above is no measurement
_SLIGHTLY = 1e-6  # by which sums of shares may differ


def prediction(plan: Plan) -> Faults:
    """Each rank is predicted once, on its own stage, within its device's memory."""
    stage_of = {rank: s.index for s in plan.stages for rank in s.ranks}
    if plan.prediction.bubble > 1:
        yield "prediction.bubble", f"{plan.prediction.bubble} is a share above 1"
    for index, entry in enumerate(plan.prediction.ranks):
        count = entry.taken(plan.microbatches)
        own = count * entry.microbatch_seconds + entry.step_only_seconds
        if plan.prediction.step_seconds < own * (1 - 1e-6):
            yield "prediction.step_seconds", f"prediction.ranks[{index}] alone takes {own} seconds"
            break
    given = Counter(rank for entry in plan.prediction.ranks for rank in entry.ranks)
    for rank, count in given.items():
        if count > 1:
            yield "prediction.ranks", f"rank {rank} stands there {count} times"
    for rank in sorted(set(stage_of) - set(given))[:MOST]:
        yield "prediction.ranks", f"rank {rank} is missing"
    for index, entry in enumerate(plan.prediction.ranks):
        where = f"prediction.ranks[{index}]"
        yield from _entry(plan, entry, where)
        yield from _places(plan, entry, stage_of, where)
    yield from _hosts(plan, stage_of)


def _hosts(plan: Plan, stage_of: dict[int, int]) -> Faults:
    """Each rank shares at most one host, whose curve can be computed with."""
    given = Counter(rank for load in plan.prediction.hosts for rank in load.ranks)
    for rank, count in given.items():
        if count > 1:
            yield "prediction.hosts", f"rank {rank} stands there {count} times"
        elif rank not in stage_of:
            yield "prediction.hosts", f"no stage runs on rank {rank}"
    for index, load in enumerate(plan.prediction.hosts):
        where = f"prediction.hosts[{index}]"
        if not load.ranks:
            yield f"{where}.ranks", "there are none"
        for place, seconds in enumerate(load.wake):
            if not 0 <= seconds < 1e6:
                yield f"{where}.wake[{place}]", f"{seconds} s is no time to wait"
        if load.uneven is not None:
            yield from _uneven(load.uneven, f"{where}.uneven")
        if not load.slowdown:
            yield f"{where}.slowdown", "there is none"
        for place, factor in enumerate(load.slowdown):
            if not 0 < factor <= _MOST_SLOWDOWN:
                yield f"{where}.slowdown[{place}]", f"{factor} is not above 0 and reasonable"
        if load.transfer > _MOST_SLOWDOWN:
            yield f"{where}.transfer", f"{load.transfer} ranks are too many"
        for place, share in enumerate(load.shares):
            if not 0 < share <= 1:
                yield f"{where}.shares[{place}]", f"{share} is no part of the time"
        if load.shares and len(load.shares) != len(load.ranks):
            yield f"{where}.shares", f"there are {len(load.shares)} for {len(load.ranks)} ranks"
        here = sum(load.shares) if load.shares else len(load.ranks)
        if load.full and load.full < here - _SLIGHTLY:
            yield f"{where}.full", f"it is below the number of ranks, {here:g}"
        if load.full > _MOST_SLOWDOWN:
            yield f"{where}.full", f"{load.full} ranks are too many"


def _uneven(given: CpuLoadImbalance, where: str) -> Faults:
    if given.cores < 2:
        yield f"{where}.cores", f"of {given.cores} none is idle while two ranks share another"
    if not 0 <= given.seconds < 1e6:
        yield f"{where}.seconds", f"{given.seconds} s is no time to wait"
    for name in ("fallen", "risen"):
        if not 0 <= getattr(given, name) <= 1:
            yield f"{where}.{name}", f"{getattr(given, name)} is no part of a core"


def streams(plan: Plan) -> bool:
    """Whether minibatches follow each other without a drain."""
    return not SCHEDULES[plan.schedule].flushes


def _entry(plan: Plan, entry: RankPrediction, where: str) -> Faults:
    if not entry.ranks:
        yield f"{where}.ranks", "there are none"
    most = max(plan.microbatches, len(plan.stages) if streams(plan) else 0)
    if not 1 <= entry.in_flight <= most:
        yield f"{where}.in_flight", f"{entry.in_flight} of {most} microbatches"
    behind = streams(plan) or any(plan.staleness)
    if not behind and (entry.staleness or entry.memory.copies or entry.predict_seconds):
        yield where, f"the schedule {plan.schedule} has neither staleness nor copies of weights"
    if entry.tensors > entry.memory_limit:
        name = "memory" if entry.memory.total > entry.memory_limit else "update"
        yield f"{where}.{name}", f"{entry.tensors} bytes, above the {entry.memory_limit} allowed"
    if entry.workspace > entry.memory.activations:
        yield f"{where}.workspace", f"it is part of {entry.memory.activations} bytes of activations"
    whole = entry.forward_seconds + entry.backward_seconds
    if entry.collective_seconds > whole * (1 + 1e-9):
        yield f"{where}.collective_seconds", f"they are part of {whole} seconds of computation"


def _places(plan: Plan, entry: RankPrediction, stage_of: dict[int, int], where: str) -> Faults:
    """The entry's ranks: their stage, and the memory of their devices."""
    smallest: int | None = None
    for rank in entry.ranks:
        stage = stage_of.get(rank)
        if stage is None:
            yield where, f"no stage runs on rank {rank}"
        elif entry.stage != stage:
            yield f"{where}.stage", f"rank {rank} runs stage {stage}, not {entry.stage}"
        index = plan.devices[rank] if 0 <= rank < len(plan.devices) else rank
        if 0 <= index < len(plan.cluster.devices):
            memory = plan.cluster.devices[index].memory
            smallest = memory if smallest is None else min(smallest, memory)
    if smallest is not None and entry.memory_limit > smallest:
        yield f"{where}.memory_limit", f"the device has {smallest} bytes"
