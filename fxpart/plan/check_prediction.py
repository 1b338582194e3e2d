"""Check a plan's prediction."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from fxpart.cluster.devices import CpuLoadImbalance
from fxpart.plan.check_stages import Faults
from fxpart.schedule.spec import SCHEDULES

if TYPE_CHECKING:
    from fxpart.cluster.model import Cluster
    from fxpart.plan.model import Plan, RankPrediction

MOST = 200  # reported ranks
_MOST_SLOWDOWN = 1e6  # larger values cannot be measurements
_SLIGHTLY = 1e-6  # tolerance for sums of shares


def prediction(plan: Plan) -> Faults:
    """Check that each rank is predicted once, on its stage, within its device's memory."""
    stage_of = {rank: s.index for s in plan.stages for rank in s.ranks}
    if plan.prediction.bubble > 1:
        yield "prediction.bubble", f"the fraction {plan.prediction.bubble} is above 1"
    for index, entry in enumerate(plan.prediction.ranks):
        count = entry.taken(plan.microbatches)
        own = count * entry.microbatch_seconds + entry.step_only_seconds
        if plan.prediction.step_seconds < own * (1 - 1e-6):
            yield "prediction.step_seconds", f"prediction.ranks[{index}] alone takes {own} seconds"
            break
    given = Counter(rank for entry in plan.prediction.ranks for rank in entry.ranks)
    for rank, count in given.items():
        if count > 1:
            yield "prediction.ranks", f"rank {rank} occurs {count} times"
    for rank in sorted(set(stage_of) - set(given))[:MOST]:
        yield "prediction.ranks", f"rank {rank} is missing"
    for index, entry in enumerate(plan.prediction.ranks):
        where = f"prediction.ranks[{index}]"
        yield from _entry(plan, entry, where)
        yield from _ranks(plan, entry, stage_of, where)
    yield from _hosts(plan, stage_of)
    yield from host_memory(plan)


def host_memory(plan: Plan) -> Faults:
    """Check that what the ranks of a host offload fits into its memory, if that is not theirs."""
    needed: Counter[str] = Counter()
    for entry in plan.prediction.ranks if plan.offload != "none" else ():
        for rank in entry.ranks:
            index = plan.devices[rank] if 0 <= rank < len(plan.devices) else rank
            if 0 <= index < len(plan.cluster.devices):
                device = plan.cluster.devices[index]
                needed[device.host] += entry.host if device.kind != "cpu" else 0
    limits = _list_host_memory(plan.cluster) if needed else Counter()
    for host, size in sorted(needed.items()):
        if size > (limit := limits[host]):
            yield (
                "prediction.ranks",
                f"offload={plan.offload} needs {size} bytes on {host}, which has {limit}",
            )


def _list_host_memory(cluster: Cluster) -> Counter[str]:
    """Return the memory of each host in bytes: as stated, else twice that of its devices.

    A DGX H100 and a DGX A100 have 2 TB, and 640 GB on their devices.
    """
    found: Counter[str] = Counter()
    for device in cluster.devices:
        found[device.host] += 2 * device.memory
    for known in () if cluster.hosts is msgspec.UNSET else cluster.hosts:
        if known.memory is not msgspec.UNSET:
            found[known.name] = known.memory
    return found


def _hosts(plan: Plan, stage_of: dict[int, int]) -> Faults:
    """Check that each rank shares at most one host, whose contention curve is valid."""
    given = Counter(rank for load in plan.prediction.hosts for rank in load.ranks)
    for rank, count in given.items():
        if count > 1:
            yield "prediction.hosts", f"rank {rank} occurs {count} times"
        elif rank not in stage_of:
            yield "prediction.hosts", f"no stage runs on rank {rank}"
    for index, load in enumerate(plan.prediction.hosts):
        where = f"prediction.hosts[{index}]"
        if not load.ranks:
            yield f"{where}.ranks", "the list is empty"
        for place, seconds in enumerate(load.wake):
            if not 0 <= seconds < 1e6:
                yield f"{where}.wake[{place}]", f"{seconds} s is not a valid waiting time"
        if load.uneven is not None:
            yield from _uneven(load.uneven, f"{where}.uneven")
        if not load.slowdown:
            yield f"{where}.slowdown", "the list is empty"
        for place, factor in enumerate(load.slowdown):
            if not 0 < factor <= _MOST_SLOWDOWN:
                yield (
                    f"{where}.slowdown[{place}]",
                    f"{factor} is not between 0 and {_MOST_SLOWDOWN:g}",
                )
        if load.transfer > _MOST_SLOWDOWN:
            yield f"{where}.transfer", f"{load.transfer} ranks are too many"
        for place, share in enumerate(load.shares):
            if not 0 < share <= 1:
                yield f"{where}.shares[{place}]", f"{share} is not a fraction between 0 and 1"
        if load.shares and len(load.shares) != len(load.ranks):
            yield (
                f"{where}.shares",
                f"there are {len(load.shares)} shares for {len(load.ranks)} ranks",
            )
        here = sum(load.shares) if load.shares else len(load.ranks)
        if load.full and load.full < here - _SLIGHTLY:
            yield f"{where}.full", f"{load.full:g} is below the number of ranks, {here:g}"
        if load.full > _MOST_SLOWDOWN:
            yield f"{where}.full", f"{load.full} ranks are too many"


def _uneven(given: CpuLoadImbalance, where: str) -> Faults:
    if given.cores < 2:
        yield f"{where}.cores", f"imbalance requires at least 2 cores, not {given.cores}"
    if not 0 <= given.seconds < 1e6:
        yield f"{where}.seconds", f"{given.seconds} s is not a valid waiting time"
    for name in ("fallen", "risen"):
        if not 0 <= getattr(given, name) <= 1:
            yield f"{where}.{name}", f"{getattr(given, name)} is not a fraction between 0 and 1"


def _runs_without_flushes(plan: Plan) -> bool:
    """Return whether the schedule runs without flushes."""
    return not SCHEDULES[plan.schedule].flushes


def _entry(plan: Plan, entry: RankPrediction, where: str) -> Faults:
    if not entry.ranks:
        yield f"{where}.ranks", "the list is empty"
    most = max(plan.microbatches, len(plan.stages) if _runs_without_flushes(plan) else 0)
    if not 1 <= entry.in_flight <= most:
        yield f"{where}.in_flight", f"{entry.in_flight} is not between 1 and {most} microbatches"
    behind = _runs_without_flushes(plan) or any(plan.staleness)
    if not behind and (entry.staleness or entry.memory.copies or entry.predict_seconds):
        yield where, f"the schedule {plan.schedule} has neither staleness nor copies of weights"
    if entry.tensors > entry.memory_limit:
        name = "memory" if entry.memory.total > entry.memory_limit else "update"
        yield f"{where}.{name}", f"{entry.tensors} bytes exceed the limit of {entry.memory_limit}"
    if entry.workspace > entry.memory.activations:
        yield (
            f"{where}.workspace",
            f"the workspace exceeds the activations, {entry.memory.activations} bytes",
        )
    whole = entry.forward_seconds + entry.backward_seconds
    if entry.collective_seconds > whole * (1 + 1e-9):
        yield (
            f"{where}.collective_seconds",
            f"collectives exceed forward and backward, {whole} seconds",
        )


def _ranks(plan: Plan, entry: RankPrediction, stage_of: dict[int, int], where: str) -> Faults:
    """Check the entry's ranks: their stage, and the memory of their devices."""
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
        yield f"{where}.memory_limit", f"the limit exceeds the device's {smallest} bytes"
