"""``fxpart profile``: measure the parts of a model's plans within a time budget.

The phases are: distinct ops at the sizes of likely plans; whole stages of the best few plans;
calibration factors fitted to these; CPU contention of this host's ranks; the stages of the plan
that is then the best, or of given plans; and, if all devices are CPUs of this host, trial runs of
the candidates for the best plan by real ranks.
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

from fxpart.accelerator import find_accelerator, get_device_module, is_accelerator
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


_CAPTURING = 0.1  # Maximum fraction of the budget.
_GRAPH = ("granularity", "precision")  # Constraints that determine ops and blocks.


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

    The profile is created if needed; known measurements of this device are not repeated. budget:
    seconds for measurements, and for up to a tenth of it the model's capture. ``rehearse``: run the
    candidates for the best plan if all devices of the cluster are CPUs of this host. plans: measure
    their stages on devices of the first device's kind first, in at most half of the budget. date:
    YYYY-MM-DD, stored with the measurements. progress: called during measurements.

    Other arguments and errors are those of :func:`fxpart.compile`. Further errors: FXP602 if the
    cluster's first device is not of this machine's kind; FXP304 for a plan of another model, FXP105
    of another batch size, and FXP305 without a device of this kind.
    """
    arguments = PlanningArguments(
        batch_size, microbatches, optimizer, AUTO, constraints or {}, seed
    )
    made = ProfilingSession.of(
        workload, cluster, arguments, batch_dims=batch_dims, date=date, progress=progress,
        trial_runs=rehearse, plans=tuple(plans),
    )  # fmt: skip
    check_places(plans, made.front.request.cluster.devices[:1])
    return made.run(path, budget)


@dataclass(frozen=True)
class ProfilingSession:
    """A model to profile, captured once, and options; see :func:`profile`.

    front: model prepared for the whole cluster. captured: seconds of the capture. trial_runs:
    whether to run plans.
    """

    front: PreparedModel
    captured: float
    microbatches: int | None
    date: str
    progress: Progress
    trial_runs: bool
    plans: tuple[Plan, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster | str | Path,
        arguments: PlanningArguments,
        *,
        batch_dims: Mapping[str, int | None] | None = None,
        date: str = "",
        progress: Progress | None = None,
        trial_runs: bool = True,
        plans: tuple[Plan, ...] = (),
    ) -> ProfilingSession:
        """Capture the workload, which supplies arguments that are not given."""
        start = time.monotonic()
        optimizer = arguments.optimizer if arguments.optimizer is not None else workload.optimizer
        batch_size = arguments.batch_size or workload.batch_size
        front = prepare_model(
            workload.model,
            cluster,
            None,
            (workload.example, workload.example_kwargs),
            replace(arguments, batch_size=batch_size, optimizer=optimizer),
            {"loss": workload.loss, "batch_dims": batch_dims},
        )
        took = time.monotonic() - start
        return cls(
            front, took, arguments.microbatches, date, progress or _silent, trial_runs, plans
        )

    def run(self, path: str | Path, budget: float, *, place: int = 0) -> ProfilingReport:
        """Measure on this machine, for the cluster's device with index ``place``."""
        device = self.front.request.cluster.devices[place]
        start = time.monotonic()
        with on_device(device) as here, Profile(path, create=True) as stored:
            found = Phases(
                front=_of_one_kind(self.front, place),
                whole=self.front,
                profile=stored,
                device=here,
                setting=get_measurement_environment(device.model, here),
                microbatches=self.microbatches,
                start=start - min(self.captured, _CAPTURING * budget),
                budget=budget,
                date=self.date,
                progress=self.progress,
                trial_runs=self.trial_runs,
                plans=self.plans,
            ).run()
        took = time.monotonic() - start
        return msgspec.structs.replace(found, capture_seconds=self.captured, seconds=took)


def _of_one_kind(front: PreparedModel, place: int) -> PreparedModel:
    """Return the prepared model for devices of this kind only.

    Constraints for the whole cluster that these devices cannot satisfy are dropped.
    """
    given = front.request
    part = keep_same_devices(given.cluster, given.cluster.devices[place])
    if part == given.cluster:
        return front

    def request(constraints: Mapping[str, int | float | str | bool]) -> PlanRequest:
        return make_request(part, given.optimizer, given.cost_model, constraints, given.seed)

    try:
        return replace(front, request=request(given.constraints))
    except FxpartError:
        kept = {name: value for name, value in given.constraints.items() if name in _GRAPH}
        return replace(front, request=request(kept))


def _silent(what: str, done: int, of: int) -> None:
    """Ignore progress."""


def get_measurement_environment(
    model: str, device: torch.device | None = None
) -> MeasurementEnvironment:
    """Return the environment of this process. model: the device's model in the cluster."""
    version = str(torch.__version__)
    if device is not None and is_accelerator(device):
        name = get_device_module(device).get_device_name(device)
        return MeasurementEnvironment(device=model, chip=name, threads=0, torch=version)
    threads = torch.get_num_threads()
    left = quota() or threads
    limit = round(left, 4) if left < threads else 0.0
    return MeasurementEnvironment(
        device=model, chip=chip(), threads=threads, torch=version, quota=limit
    )


@contextmanager
def on_device(device: Device) -> Iterator[torch.device]:
    """Select this machine's device of the cluster's kind, and set the threads of a rank."""
    if device.kind == "gpu":
        accelerator = find_accelerator()
        if accelerator is None:
            raise error(
                "FXP602",
                where=f"profiling {device.name} ({device.model})",
                why="torch finds no GPU on this machine",
                fix="profile on a machine with a GPU, and merge the files",
            )
        yield torch.device(accelerator, 0)
        return
    keep_freed_memory()  # As in ranks.
    before = torch.get_num_threads()
    if not isinstance(device.threads, msgspec.UnsetType):
        torch.set_num_threads(device.threads)
    try:
        yield torch.device("cpu")
    finally:
        torch.set_num_threads(before)
