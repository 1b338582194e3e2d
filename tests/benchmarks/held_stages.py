"""The stages that plans put on ranks under quotas, timed as ``fxpart profile --for`` does.

Imported by heterogeneous_measured.py, not run. There is a process under each quota, and they take
turns, so that what slows a shared machine down for a while counts for all quotas alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxpart.cluster.model import Cluster
    from fxpart.plan.model import Plan

_TURNS = 5
_SECONDS = 1.0  # of the processor, for each stage in all turns
_TIMEOUT = 1800.0


def measure_stages(name: str, plans: Sequence[Plan], base: Cluster, path: Path) -> None:
    """All stages of the plans, under each quota that any of their devices has, into a profile."""
    import quotas
    from fxpart.costmodels.profile_store import Profile, StageMeasurement

    from fxpart.profiling.processes import run_on_processes

    wanted = sorted({_quota(p, rank) for p in plans for rank in range(p.world)}, reverse=True)
    files = [path.with_name(f"{path.name}-stages-{rank}") for rank in range(len(wanted))]
    with quotas.Groups(wanted) as groups:
        payload = {
            "groups": [str(folder) for folder in groups.folders], "cores": groups.cores,
            "name": name, "quotas": wanted, "ranks": len(base.devices),
            "files": list(map(str, files)), "plans": [plan.dumps() for plan in plans],
        }  # fmt: skip
        run_on_processes(len(wanted), "held_stages:take_turns", payload, _TIMEOUT)
    for file in files:
        with Profile(path) as into, Profile(file) as part:
            for setting in part.settings():  # also in place of what was measured in another minute
                into.put("stages", setting, part.get("stages", setting, StageMeasurement))
        file.unlink()


def _quota(plan: Plan, rank: int) -> float:
    found = plan.device(rank).quota
    assert isinstance(found, float), "every device has one"
    return found


def take_turns(rank: int, world: int, payload: dict[str, Any]) -> dict[str, Any]:
    """A process under a quota, which measures while the others wait."""
    import quotas
    import torch.distributed as dist
    from fxpart.costmodels.profile_store import Profile
    from heterogeneous_measured import workload
    from msgspec.structs import replace

    from fxpart.cluster.model import Cluster
    from fxpart.compat.optimizer_choice import choose
    from fxpart.plan.model import Plan
    from fxpart.planner.prepared_model import PlanningArguments
    from fxpart.profiling.plan_stages import work_of
    from fxpart.profiling.session import ProfilingSession, get_measurement_environment, on_device
    from fxpart.profiling.stage_benchmark import StageBenchmark

    work, base = workload(payload["name"]), Cluster.local(payload["ranks"])
    quota = payload["quotas"][rank]
    devices = tuple(replace(d, quota=quota, threads=1) for d in base.devices)
    asked = PlanningArguments(None, None, None, "roofline", {}, 0)
    front = ProfilingSession.of(work, replace(base, devices=devices), asked).front
    optimizer = front.request.optimizer
    plans = map(Plan.loads, payload["plans"])
    works = [found for plan in plans if (found := work_of(front, plan, devices[0])) is not None]
    quotas.enter(rank, payload)
    with on_device(devices[0]) as here, Profile(payload["files"][rank], create=True) as made:
        bench = StageBenchmark(front.captured, optimizer, choose(optimizer).name, here)
        for turn in range(_TURNS * world):
            dist.barrier()
            if turn % world != rank:
                continue
            timed: set[str] = set()
            for one in works:
                seconds = _SECONDS / quota / _TURNS
                timed |= set(bench.turn(one.stages, timed, seconds=seconds))
        made.put("stages", get_measurement_environment(devices[0].model, here), bench.timings())
    return {"stages": len(bench.timings()) // 2}
