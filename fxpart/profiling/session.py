"""``fxpart profile``: measure what plans of a model would be made of, until the budget is used.

In turn: every distinct op at the sizes that plans would use; the stages of the best few plans,
whole; factors fitted to these; how ranks of this host slow each other down on the model; the stages
of the plan that is best by all this, or of given ones; where all devices are this host's
processors, the plans that may be the best, run by real ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from fxpart.cluster.cpu_quota import quota
from fxpart.cluster.devices import Device
from fxpart.cluster.model import Cluster
from fxpart.costmodels import AUTO
from fxpart.costmodels.profile_store import MeasurementEnvironment, Profile, chip
from fxpart.errors import FxpartError, error
from fxpart.plan.model import Plan
from fxpart.planner.prepared_model import PlanningArguments, PreparedModel, prepare_model
from fxpart.planner.request import PlanRequest, make_request
from fxpart.profiling.device_group import keep_same_devices
from fxpart.profiling.phases import Phases
from fxpart.profiling.plan_stages import check_places
from fxpart.profiling.report import ProfilingReport
from fxpart.profiling.run import Progress
from fxpart.runtime.host.heap import keep_freed_memory

if TYPE_CHECKING:
    from fxpart.capture.workload import Workload


_CAPTURING = 0.1  # of the budget, at most
_GRAPH = ("granularity", "precision")  # constraints that say what the ops and blocks are


def profile(
    workload: Workload,
    cluster: Cluster | str | Path,
    path: str | Path,
    *,
    budget: float = 60.0,
    batch_size: int | None = None,
    microbatches: int | None = None,
    optimizer: Any = None,
    constraints: Mapping[str, int | float | str | bool] | None = None,
    seed: int = 0,
    batch_dims: Mapping[str, int | None] | None = None,
    date: str = "",
    progress: Progress | None = None,
    rehearse: bool = True,
    plans: Sequence[Plan] = (),
) -> ProfilingReport:
    """Measure the workload's ops, stages, contention and best plans into the profile at ``path``.

    The profile is made where there is none; what it holds for this device is not measured again.
    budget: seconds for measurements, and for capturing the model as far as that is short. rehearse:
    run the plans that may be the best, where all devices of the cluster are this host's processors.
    plans: measure the stages that they put on devices like the cluster's first, before all else and
    in half of the budget at most. date: YYYY-MM-DD, kept with them. progress: told what is
    measured. The other arguments are those of :func:`fxpart.compile`, and so are errors; FXP602
    where the cluster's first device is not of this machine's kind; of plans FXP304 (of another
    model), FXP105 (for another batch size) and FXP305 (no device of this kind).
    """
    asked = PlanningArguments(batch_size, microbatches, optimizer, AUTO, constraints or {}, seed)
    made = ProfilingSession.of(
        workload, cluster, asked, batch_dims=batch_dims, date=date, progress=progress,
        rehearse=rehearse, plans=tuple(plans),
    )  # fmt: skip
    check_places(plans, made.front.request.cluster.devices[:1])
    return made.run(path, budget)


@dataclass(frozen=True)
class ProfilingSession:
    """What is profiled, captured once, and how; see :func:`profile`.

    front: for the whole cluster. captured: how many seconds that took.
    """

    front: PreparedModel
    captured: float
    microbatches: int | None
    date: str
    progress: Progress
    rehearse: bool
    plans: tuple[Plan, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster | str | Path,
        asked: PlanningArguments,
        *,
        batch_dims: Mapping[str, int | None] | None = None,
        date: str = "",
        progress: Progress | None = None,
        rehearse: bool = True,
        plans: tuple[Plan, ...] = (),
    ) -> ProfilingSession:
        """Capture the workload; what ``asked`` leaves open is the workload's own."""
        start = time.monotonic()
        optimizer = asked.optimizer if asked.optimizer is not None else workload.optimizer
        batch_size = asked.batch_size or workload.batch_size
        front = prepare_model(
            workload.model,
            cluster,
            None,
            (workload.example, workload.example_kwargs),
            replace(asked, batch_size=batch_size, optimizer=optimizer),
            {"loss": workload.loss, "batch_dims": batch_dims},
        )
        took = time.monotonic() - start
        return cls(front, took, asked.microbatches, date, progress or _silent, rehearse, plans)

    def run(self, path: str | Path, budget: float, *, place: int = 0) -> ProfilingReport:
        """Measure on this device, which is the cluster's device number ``place``."""
        device = self.front.request.cluster.devices[place]
        start = time.monotonic()
        with on_device(device) as here, Profile(path, create=True) as held:
            found = Phases(
                front=_of_one_kind(self.front, place),
                whole=self.front,
                profile=held,
                device=here,
                setting=get_measurement_environment(device.model, here),
                microbatches=self.microbatches,
                start=start - min(self.captured, _CAPTURING * budget),
                budget=budget,
                date=self.date,
                progress=self.progress,
                rehearse=self.rehearse,
                plans=self.plans,
            ).run()
        took = time.monotonic() - start
        return msgspec.structs.replace(found, capture_seconds=self.captured, seconds=took)


def _of_one_kind(front: PreparedModel, place: int) -> PreparedModel:
    """For the devices of this one's kind alone: what others take is not measured here.

    Wishes for the whole cluster that these alone cannot keep are left out.
    """
    asked = front.request
    part = keep_same_devices(asked.cluster, asked.cluster.devices[place])
    if part == asked.cluster:
        return front

    def request(constraints: Mapping[str, int | float | str | bool]) -> PlanRequest:
        return make_request(part, asked.optimizer, asked.cost_model, constraints, asked.seed)

    try:
        return replace(front, request=request(asked.constraints))
    except FxpartError:
        kept = {name: value for name, value in asked.constraints.items() if name in _GRAPH}
        return replace(front, request=request(kept))


def _silent(what: str, done: int, of: int) -> None:
    """Nobody listens."""


def get_measurement_environment(
    model: str, device: torch.device | None = None
) -> MeasurementEnvironment:
    """The setting of this process. model: of the device, as the cluster says it."""
    version = str(torch.__version__)
    if device is not None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return MeasurementEnvironment(device=model, chip=name, threads=0, torch=version)
    threads = torch.get_num_threads()
    left = quota() or threads
    held = round(left, 4) if left < threads else 0.0
    return MeasurementEnvironment(
        device=model, chip=chip(), threads=threads, torch=version, quota=held
    )


@contextmanager
def on_device(device: Device) -> Iterator[torch.device]:
    """This machine's device of the cluster's kind, with as many threads as a rank has there."""
    if device.kind == "gpu":
        if not torch.cuda.is_available():
            raise error(
                "FXP602",
                where=f"profiling {device.name} ({device.model})",
                why="torch sees no GPU here",
                fix="profile on a machine that has one, and merge the files",
            )
        yield torch.device("cuda", 0)
        return
    keep_freed_memory()  # as the ranks do
    before = torch.get_num_threads()
    if not isinstance(device.threads, msgspec.UnsetType):
        torch.set_num_threads(device.threads)
    try:
        yield torch.device("cpu")
    finally:
        torch.set_num_threads(before)
